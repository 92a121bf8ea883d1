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

import jax
import numpy as np

from locojax.errors import RequestError
from locojax.hosts.protocol import Sample, Sampled, Tokens
from locojax.models.lora import LoraSpec
from locojax.rollout.engine import Engine
from locojax.rollout.request import validate
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
          RequestError: the adapter doesn't fit the stack, or has values that aren't finite nowhere checked here.
        """
        if (adapter is None) != (lora is None):
            raise RequestError(f"Sampler {sampler_id!r} has an adapter without settings, or settings without one")
        copied = None if adapter is None else jax.tree.map(lambda leaf: np.array(leaf, np.float32), dict(adapter))
        scale = 0.0 if lora is None else lora.scale
        if copied is not None:
            self._engine.check_adapter(copied)
        old = self._open.get(sampler_id)
        if old is not None and (old.adapter is None) == (copied is None):
            old.adapter, old.scale, old.version = copied, scale, version
            if old.row is not None and copied is not None:
                self._engine.set_adapter(old.row, copied, scale, version, interrupt=True)
            return
        if old is not None:
            self.close(sampler_id)
        self._open[sampler_id] = _Sampler(copied, scale, version, BASE_ROW if copied is None else None)
        if copied is not None and (row := next((r for r, owner in self._rows.items() if owner is None), None)):
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
          RequestError: unknown sampler, malformed, or longer than the context.
        """
        raise NotImplementedError

    def abort(self, operation_id: str) -> bool:
        """Ends an operation; `step` returns what it has, unfinished completions marked `abort`. False if unknown."""
        raise NotImplementedError

    def step(self) -> list[tuple[str, Sampled]]:
        """Decodes for a while; returns the operations that finished."""
        raise NotImplementedError

    def drain(self) -> list[Tokens]:
        """What streamed operations have sampled since the last call."""
        raise NotImplementedError
