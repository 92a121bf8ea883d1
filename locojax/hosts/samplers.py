"""Samplers over one rollout engine: many immutable snapshots, of which as many as the engine has rows are resident.

A sampler is the base model or a LoRA adapter copied when it was opened. Its weights live in host memory and, while it
is used, in one of the rows of the engine's stacked adapters. When more samplers have work than there are rows, the one
idle for longest makes way; samples of a sampler without a row wait until one is free, and so that this can't take for
ever, the sampler that is to make way gets no new samples meanwhile: its own wait behind.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from locojax.errors import RequestError
from locojax.hosts.protocol import Sample, Sampled, Tokens
from locojax.models.lora import LoraSpec
from locojax.rollout.engine import Engine
from locojax.rollout.stats import EngineStats
from locojax.types import Completion, SampleRequest, SampleResult

BASE_ROW = 0


@dataclasses.dataclass(eq=False)
class _Sampler:
    """An open sampler. `adapter` None: the base model. `row` None: not resident. `used`: when, on a logical clock."""

    adapter: Mapping[str, Any] | None
    scale: float
    version: int
    row: int | None
    used: int = 0
    operations: set[str] = dataclasses.field(default_factory=set)  # in the engine


@dataclasses.dataclass(frozen=True)
class _Operation:
    sampler_id: str
    sample: Sample
    request: SampleRequest


class Samplers:
    """See the module's head. The engine must have been loaded with a stack of `max_resident` + 1 adapters or more.

    Example:
      samplers = Samplers(engine, max_resident=8)
      samplers.open("s1", adapter, LoraSpec(rank=32), version=3)
      samplers.add("op1", protocol.Sample("s1", (1, 2, 3), SamplingParams(max_tokens=8)))
      while samplers.num_unfinished:
          for operation_id, sampled in samplers.step(): ...
    """

    def __init__(self, engine: Engine, *, max_resident: int):
        """Raises RequestError when the engine has fewer rows for adapters."""
        if engine.num_adapters <= max_resident:
            raise RequestError(
                f"{max_resident} samplers can't be resident in an engine with {engine.num_adapters - 1} rows for"
                " adapters",
                remedy="Load the engine with a larger stack of adapters (models.lora.empty_stack)",
            )
        self._engine = engine
        self._rows: dict[int, str | None] = {row: None for row in range(1, max_resident + 1)}
        self._open: dict[str, _Sampler] = {}
        self._running: dict[str, _Operation] = {}  # in the engine
        self._waiting: deque[tuple[str, _Operation]] = deque()  # for a row
        self._closed: list[tuple[str, Sampled]] = []  # to be returned by the next step
        self._clock = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """The open samplers, in the order of their opening."""
        return tuple(self._open)

    @property
    def num_unfinished(self) -> int:
        """Operations that `step` has yet to return."""
        return len(self._running) + len(self._waiting) + len(self._closed)

    @property
    def num_waiting(self) -> int:
        """Of those, how many wait for a row."""
        return len(self._waiting)

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats()

    def open(
        self, sampler_id: str, adapter: Mapping[str, Any] | None, lora: LoraSpec | None, version: int
    ) -> None:
        """A sampler of an adapter as it is now (it is copied), or of the base model (None, None).

        With the id of an open sampler, that one's weights are replaced: samples of it that run go on under the new.

        Args:
          adapter: the tree of `models.lora`, of a rank up to the stack's; numpy or jax leaves.
          version: what completions are stamped with.

        Raises:
          RequestError: the adapter doesn't fit the engine's stack.
        """
        if (adapter is None) != (lora is None):
            raise RequestError(f"Sampler {sampler_id!r} has an adapter without settings, or settings without one")
        copied = None if adapter is None else self._engine.copied(adapter)
        scale = 0.0 if lora is None else lora.scale
        old = self._open.get(sampler_id)
        if old is not None and (old.adapter is None) == (copied is None):
            old.adapter, old.scale, old.version = copied, scale, version
            if old.row is not None and copied is not None:
                self._engine.set_adapter(old.row, copied, scale, version, interrupt=True)
            return
        if old is not None:
            self.close(sampler_id)
        self._open[sampler_id] = _Sampler(copied, scale, version, BASE_ROW if copied is None else None)
        row = next((row for row, owner in self._rows.items() if owner is None), None)
        if copied is not None and row is not None:
            self._place(sampler_id, row)

    def close(self, sampler_id: str) -> bool:
        """Forgets a sampler; `step` returns what its samples have. False if it isn't open."""
        sampler = self._open.get(sampler_id)
        if sampler is None:
            return False
        for operation_id in [*sampler.operations, *(o for o, op in self._waiting if op.sampler_id == sampler_id)]:
            self.abort(operation_id)
        del self._open[sampler_id]
        if sampler.row is not None and sampler.row != BASE_ROW:
            self._rows[sampler.row] = None
        return True

    def add(self, operation_id: str, sample: Sample) -> None:
        """Queues samples; `step` returns them.

        Raises:
          RequestError: the sampler isn't open, the sample is malformed, or it is longer than the context.
        """
        sampler = self._open.get(sample.sampler_id)
        if sampler is None:
            raise RequestError(
                f"Sampler {sample.sampler_id!r} isn't open", remedy="It was closed or has expired: create another one"
            )
        if operation_id in self._running or any(waiting == operation_id for waiting, _ in self._waiting):
            raise RequestError(f"Operation {operation_id!r} is already running")
        request = _request(operation_id, sample)
        most, engine = sample.params.max_tokens, self._engine
        engine.validate(request)
        if most is not None and len(sample.prompt) + most > engine.max_context:
            raise RequestError(
                f"A prompt of {len(sample.prompt)} tokens and max_tokens {most} don't fit in the context",
                expected=f"{engine.max_context} tokens in all",
                remedy="Lower max_tokens, leave it out to sample until the context is full, or shorten the prompt",
            )
        self._waiting.append((operation_id, _Operation(sample.sampler_id, sample, request)))
        self._admit()

    def abort(self, operation_id: str) -> bool:
        """Ends an operation; `step` returns what it has, unfinished completions marked `abort`. False if unknown."""
        if operation_id in self._running:
            return self._engine.abort(operation_id)
        for waiting in self._waiting:
            if waiting[0] == operation_id:
                self._waiting.remove(waiting)
                self._closed.append((operation_id, self._untouched(waiting[1])))
                return True
        return False

    def step(self) -> list[tuple[str, Sampled]]:
        """Decodes for a while; returns the operations that finished."""
        self._admit()
        finished, self._closed = self._closed, []
        if self._engine.num_unfinished:
            for result in self._engine.step():
                operation = self._running.pop(result.request_id)
                sampler = self._open.get(operation.sampler_id)
                if sampler is not None:
                    sampler.operations.discard(result.request_id)
                finished.append((result.request_id, _sampled(result)))
            self._admit()
        return finished

    def drain(self) -> list[Tokens]:
        """What streamed operations have sampled since the last call."""
        return [
            Tokens(e.request_id, e.sample_index, e.tokens, np.asarray(e.logprobs, np.float32), e.text, e.finished)
            for e in self._engine.drain()
        ]

    def _admit(self) -> None:
        """Hands the engine what waits, in order, except what waits for a row. See the module's head."""
        held: set[str] = set()  # samplers whose samples must not overtake
        kept: deque[tuple[str, _Operation]] = deque()
        while self._waiting:
            operation_id, operation = self._waiting.popleft()
            sampler_id = operation.sampler_id
            if sampler_id in held or not self._make_resident(sampler_id, held):
                held.add(sampler_id)
                kept.append((operation_id, operation))
                continue
            sampler = self._open[sampler_id]
            assert sampler.row is not None
            request = dataclasses.replace(operation.request, adapter=sampler.row)
            self._engine.add(request, stream=operation.sample.stream)
            self._running[operation_id] = operation
            sampler.operations.add(operation_id)
            self._clock += 1
            sampler.used = self._clock
        self._waiting = kept

    def _make_resident(self, sampler_id: str, held: set[str]) -> bool:
        """Gives a sampler a row: a free one, or that of the one idle for longest. If none is idle, the one used least
        recently is held back, so that it will be."""
        sampler = self._open[sampler_id]
        if sampler.row is not None:
            return True
        row = next((row for row, owner in self._rows.items() if owner is None), None)
        if row is None:
            owners = [owner for owner in self._rows.values() if owner is not None]
            idle = [owner for owner in owners if not self._open[owner].operations]
            if not idle:
                ready = [owner for owner in owners if owner not in held]
                if ready:
                    held.add(min(ready, key=lambda owner: self._open[owner].used))
                return False
            victim = min(idle, key=lambda owner: self._open[owner].used)
            row, self._open[victim].row = self._open[victim].row, None
            assert row is not None
        self._place(sampler_id, row)
        return True

    def _place(self, sampler_id: str, row: int) -> None:
        sampler = self._open[sampler_id]
        self._engine.set_adapter(row, sampler.adapter, sampler.scale, sampler.version)
        sampler.row, self._rows[row] = row, sampler_id

    def _untouched(self, operation: _Operation) -> Sampled:
        """The answer to an operation that was aborted before it began."""
        version, logprobs_of = self._open[operation.sampler_id].version, self._engine.settings.logprobs_of
        nothing = np.zeros(0, np.float32)
        return _sampled(
            SampleResult(
                operation.request.request_id,
                tuple(
                    Completion(i, (), nothing, "", "abort", None, version, logprobs_of)
                    for i in range(operation.request.num_samples)
                ),
                None,
                None,
            )
        )


def _request(operation_id: str, sample: Sample) -> SampleRequest:
    """For the engine, but for the row."""
    return SampleRequest(
        request_id=operation_id,
        prompt=sample.prompt,
        params=sample.params,
        num_samples=sample.num_samples,
        prompt_logprobs=sample.prompt_logprobs,
        topk_prompt_logprobs=sample.topk_prompt_logprobs,
        prompt_logprobs_last_n=sample.prompt_logprobs_last_n,
        topk_sample_logprobs=sample.topk_sample_logprobs,
        target_prompt_logprobs=sample.target_prompt_logprobs,
        prompt_alt_tokens=sample.prompt_alt_tokens,
    )


def _sampled(result: SampleResult) -> Sampled:
    return Sampled(
        completions=result.completions,
        prompt_logprobs=result.prompt_logprobs,
        topk_prompt_logprobs=result.topk_prompt_logprobs,
        topk_sample_logprobs=result.topk_sample_logprobs,
        target_prompt_logprobs=result.target_prompt_logprobs,
        prompt_alt_tokens=result.prompt_alt_tokens,
        num_cached_prompt_tokens=result.num_cached_prompt_tokens,
    )
