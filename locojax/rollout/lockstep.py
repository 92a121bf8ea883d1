"""The engine of a single controller: one head schedules the samples of all hosts, and all hosts run in lockstep.

It is the baseline that host-local engines are measured against, and shares with them all but the control: the model,
the sampler, prefix sharing, continuous batching, the shapes. The head admits every request of the global batch, keeps
the books of every host's slots, tells the hosts what to run before each program, and reads back what all of them drew.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from locojax.errors import ConfigError, RequestError
from locojax.models.decoder import Params
from locojax.models.lora import Adapters
from locojax.models.spec import ModelSpec
from locojax.rollout import programs, sampling
from locojax.rollout.batch import decode_rows, num_stop_ids
from locojax.rollout.engine import Engine, Phase
from locojax.rollout.layouts import Contiguous
from locojax.rollout.lockstep_memory import HostMemory, Hosts, Sources, common_shape
from locojax.rollout.lockstep_programs import (
    ChunkKey,
    Decoded,
    DecodeKey,
    Key,
    LockstepDevices,
    PrefillKey,
    pack_words,
    unpack_words,
)
from locojax.rollout.pages import ContiguousMemory, Shape
from locojax.rollout.pending import Pending
from locojax.rollout.prefill import batches, common_header, pack_alike
from locojax.rollout.prefilling import Loaded
from locojax.rollout.request import Sample, TokenBytes
from locojax.rollout.scheduler import NewPrompt, Schedule
from locojax.rollout.settings import EngineSettings, row_sizes, scheduler_of
from locojax.rollout.warmup import expected
from locojax.types import SampleRequest

Order = Callable[..., AbstractContextManager[None]]
"""Tells the other hosts what to perform: an action of `LockstepDevices` and its arguments. The head performs it too,
inside: that is where it waits for them."""


@runtime_checkable
class Lanes(Protocol):
    """What the head does on all hosts."""

    def load(self, loaded: Loaded) -> None:
        """Weights that this host has; the others load theirs by themselves."""

    def keys(self) -> list[Key]:
        """Programs that have been compiled."""

    def prepare(self, key: Key) -> None:
        """Compiles a program."""

    def reshape(self, shape: Shape, sources: Sources | None) -> None:
        """See `LockstepDevices.reshape`."""

    def prefill(self, key: Key, hosts: Sequence[Any]) -> None:
        """Stores prompts: arguments for each host."""

    def decode(self, key: DecodeKey, hosts: Sequence[Any]) -> list[Decoded]:
        """Decodes: arguments for each host, and what each drew."""


class Lockstep:
    """Lanes that run: the head's own devices, after the others have been told to do the same."""

    def __init__(self, devices: LockstepDevices, order: Order):
        self.devices, self._order = devices, order

    def load(self, loaded: Loaded) -> None:
        self.devices.load(loaded)

    def keys(self) -> list[Key]:
        return self.devices.keys()

    def prepare(self, key: Key) -> None:
        with self._order("prepare", key):
            self.devices.prepare(key)

    def reshape(self, shape: Shape, sources: Sources | None) -> None:
        with self._order("reshape", shape, sources):
            self.devices.reshape(shape, sources)

    def warm_moves(self, shapes: Sequence[Shape]) -> None:
        """See `LockstepDevices.warm_moves`."""
        with self._order("warm_moves", shapes):
            self.devices.warm_moves(shapes)

    def prefill(self, key: Key, hosts: Sequence[Any]) -> None:
        words = np.stack([pack_words(arguments) for arguments in hosts])
        with self._order("run", key, words):
            self.devices.run(key, words)
            self.devices.block()

    def decode(self, key: DecodeKey, hosts: Sequence[Any]) -> list[Decoded]:
        words = np.stack([pack_words(arguments) for arguments in hosts])
        with self._order("run", key, words):
            drawn = np.asarray(self.devices.run(key, words))
        template = Decoded.blank(key, self.devices.spec.max_iterations)
        return [unpack_words(of_host, template) for of_host in drawn]


class Rehearsal:
    """Lanes that compile what they are asked to run. Every sample is taken to draw token 0 to its end."""

    def __init__(self, lanes: Lockstep):
        self._lanes = lanes
        self.shapes: list[Shape] = []

    def load(self, loaded: Loaded) -> None:
        """Shapes are all that matters, and they are those that the lanes have."""

    def keys(self) -> list[Key]:
        return self._lanes.keys()

    def prepare(self, key: Key) -> None:
        self._lanes.prepare(key)

    def reshape(self, shape: Shape, sources: Sources | None) -> None:
        if shape not in self.shapes:
            self.shapes.append(shape)

    def prefill(self, key: Key, hosts: Sequence[Any]) -> None:
        self._prepare(key)

    def decode(self, key: DecodeKey, hosts: Sequence[Any]) -> list[Decoded]:
        self._prepare(key)
        blank = Decoded.blank(key, self._lanes.devices.spec.max_iterations)
        found = []
        for rows, num_iterations, _ in hosts:
            gained = np.minimum(num_iterations + rows.fresh.astype(np.int32), rows.remaining) * rows.alive
            found.append(dataclasses.replace(blank, gained=gained, num_iterations=num_iterations))
        return found

    def _prepare(self, key: Key) -> None:
        if key not in self._lanes.keys():
            self._lanes.prepare(key)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The rows of an iteration that has run, ready for the next one if the same samples run in it."""

    hosts: list[list[Sample]]
    shape: Shape
    rows: list[programs.DecodeRows]

    def fits(self, hosts: list[list[Sample]], shape: Shape, num_stops: int) -> bool:
        """Whether nobody came or went, and no array was resized."""
        return self.hosts == hosts and self.shape == shape and self.rows[0].stop_ids.shape[1] == num_stops


def advanced(rows: programs.DecodeRows, drawn: Decoded) -> programs.DecodeRows:
    """The rows after what they drew, as `decode_rows` would make them of their samples."""
    gained, fresh = drawn.gained, rows.fresh
    last = gained - fresh  # item 0 of what was drawn is the fresh rows' first token
    token = np.where(gained > 0, drawn.token[last, np.arange(len(gained))], rows.token)
    own = rows.own + np.where(fresh, np.maximum(gained - 1, 0), gained)  # the last token isn't stored yet
    sampler = dataclasses.replace(rows.sampler, position=rows.sampler.position + gained)
    return dataclasses.replace(
        rows, token=token, own=own, fresh=fresh & (gained == 0), remaining=rows.remaining - gained, sampler=sampler
    )


class LockstepEngine(Engine):
    """Samples on all hosts at once; see the module's head. Only the head has one; `Engine`'s verbs hold.

    Prompts' log-probs and likeliest tokens are not offered, nor stacked adapters that change by themselves.

    Args:
      settings: of each host's share: `max_slots` and `kv_bytes` are one host's.
      lanes: of this process and those it tells.
    """

    def __init__(
        self, spec: ModelSpec, settings: EngineSettings, tokens: TokenBytes, lanes: Lanes, num_hosts: int,
        *, phase: Phase | None = None,
    ):  # fmt: skip
        super().__init__(spec, settings, tokens, phase=phase)
        if not isinstance(self._memory, ContiguousMemory):
            raise ConfigError("Hosts in lockstep keep contiguous rows", got=f"layout={settings.layout!r}",
                              expected='layout="contiguous"')  # fmt: skip
        self._lanes, self._contiguous = lanes, Contiguous()
        sizes = row_sizes(settings.max_slots, settings.min_rows)
        self._memories = [
            HostMemory(self._memory.max_tokens, sizes, self._memory.max_entries) for _ in range(num_hosts)
        ]
        self._hosts = Hosts([scheduler_of(memory, settings) for memory in self._memories])
        self._scheduler = self._hosts
        self._shape, self._lost = Shape(), True  # the arrays', of every host; whether they hold nothing of value
        self._kept: Kept | None = None

    def load(self, weights: Params, version: int, adapters: Adapters | None = None, *, interrupt: bool = False) -> None:
        super().load(weights, version, adapters, interrupt=interrupt)
        self._lanes.load(self._policy.loaded)

    def validate(self, request: SampleRequest) -> int:
        if request.scores_prompt or request.topk_sample_logprobs:
            raise RequestError(
                f"Request {request.request_id!r} asks for more than samples, which hosts in lockstep don't offer",
                remedy="Use hosts.controller=local",
            )
        return super().validate(request)

    def warm_up(self, requests: Sequence[SampleRequest], longest_prompt: int = 1) -> int:
        if self.policy_version is None:
            raise RequestError("The engine has no weights", remedy="Call load first")
        assert isinstance(self._lanes, Lockstep), "a rehearsal isn't warmed up"
        before = len(self._lanes.keys())
        limits = [*map(self.validate, requests)]
        work = expected(requests, limits, longest_prompt, self.settings.max_slots, len(self._memories))
        for memory in self._memories:
            memory.expect(work)
        for staggered in (False, True):
            rehearsal = Rehearsal(self._lanes)
            dry = LockstepEngine(self.spec, self.settings, self._tokens, rehearsal, len(self._memories))
            dry._policy = self._policy
            for memory in dry._memories:
                memory.expect(work)
            dry.rehearse(requests, staggered=staggered)
            self._lanes.warm_moves(rehearsal.shapes)
        return len(self._lanes.keys()) - before

    def _schedule(self) -> Schedule:
        """Decides what runs on every host, and brings all hosts' memory into the shape that it needs."""
        if not self._hosts.running:
            self._table_width = 1
        plan = self._hosts.schedule()
        if plan.prompts:
            self._kept = None
        final = max((s.num_stored + s.remaining for s in self._hosts.running), default=1)
        shape = common_shape(self._memories, self._shape, shrink=plan.shrink, final_capacity=final)
        sources = tuple(memory.take(shape) for memory in self._memories)
        if shape != self._shape or self._lost:
            self._lanes.reshape(shape, None if self._lost else sources)
            self._shape, self._lost = shape, False
        return plan

    def _run(self, plan: Schedule) -> None:
        """Computes new prompts, then decodes, on all hosts."""
        try:
            if plan.prompts:
                with self._phase("prefill"):
                    self._prefill(plan)
            if self._hosts.running:
                with self._phase("decode"):
                    self._decode(plan)
        except BaseException:
            self._hosts.preempt_all()  # the caches were donated and may be gone
            self._hosts.drop_prefixes()
            self._lost = True
            raise

    def _prefill(self, plan: Schedule) -> None:
        start = time.perf_counter()
        for adapter in dict.fromkeys(prompt.adapter for prompt in plan.prompts):
            packed: list[list[list[NewPrompt]]] = []  # for each host: batches
            long: list[list[NewPrompt]] = []  # for each host: prompts that go in chunks
            for host in self._hosts.plans:
                ours = [prompt for prompt in host.prompts if prompt.adapter == adapter]
                header = common_header([prompt.tokens for prompt in ours])
                found = batches([len(prompt.tokens) for prompt in ours], self.settings.max_prefill_tokens, header)
                chosen = [[ours[n] for n in batch] for batch in found]
                packed.append([batch for batch in chosen if not self._is_long(batch)])
                long.append([batch[0] for batch in chosen if self._is_long(batch)])
            for together in itertools.zip_longest(*packed, fillvalue=[]):
                self._prefill_packed(together, adapter)
            for prompts in itertools.zip_longest(*long):
                self._prefill_chunks(prompts, adapter)
        self._stats.num_prompt_tokens += sum(len(prompt.tokens) for prompt in plan.prompts)
        self._stats.prefill_seconds += time.perf_counter() - start

    def _is_long(self, batch: Sequence[NewPrompt]) -> bool:
        return len(batch) == 1 and len(batch[0].tokens) > self.settings.max_prefill_tokens

    def _prefill_packed(self, hosts: Sequence[Sequence[NewPrompt]], adapter: int) -> None:
        """One batch of each host."""
        known = [key.packed for key in self._lanes.keys() if isinstance(key, PrefillKey) and key.shape == self._shape]
        packed = pack_alike([[prompt.tokens for prompt in prompts] for prompts in hosts], known)
        key = PrefillKey(self._shape, packed[0].shape)
        self._lanes.prefill(key, [
            key.arguments(self._contiguous, [prompt.block for prompt in prompts], of_host, adapter)
            for prompts, of_host in zip(hosts, packed, strict=True)
        ])  # fmt: skip

    def _prefill_chunks(self, hosts: Sequence[NewPrompt | None], adapter: int) -> None:
        """One long prompt of each host, or none of some."""
        T = self.settings.max_prefill_tokens
        key = ChunkKey(self._shape, T)
        for start in range(0, max(len(prompt.tokens) for prompt in hosts if prompt is not None), T):
            arguments = []
            for prompt in hosts:
                tokens = () if prompt is None else prompt.tokens[start : start + T]
                block = prompt.block if prompt is not None and tokens else None
                arguments.append(key.arguments(self._contiguous, block, tokens, start, adapter))
            self._lanes.prefill(key, arguments)

    def _decode(self, plan: Schedule) -> None:
        hosts = [list(scheduler.running) for scheduler in self._hosts.schedulers]
        running = [sample for samples in hosts for sample in samples]
        self._num_stops = max(self._num_stops, num_stop_ids(running))
        rows = self._rows(hosts)
        self._kept = None
        truncates = any(sampling.truncates(sample.request.params) for sample in running)
        key = DecodeKey(self._shape, self._num_stops, self._table_width, truncates)
        # A call of one iteration compares each host's own rows with it, and ends anyway.
        return_at = plan.return_at if self.settings.max_iterations > 1 else 0
        count = np.asarray(plan.num_iterations, np.int32), np.asarray(return_at, np.int32)
        start = time.perf_counter()
        drawn = self._lanes.decode(key, [(of_host, *count) for of_host in rows])
        self._stats.decode_seconds += time.perf_counter() - start
        ran = max(int(of_host.num_iterations) for of_host in drawn)
        self._stats.num_iterations += ran
        self._kept = Kept(hosts, self._shape, list(map(advanced, rows, drawn)))
        for samples, of_host, given in zip(hosts, drawn, rows, strict=True):
            self._stats.row_iterations += int(of_host.gained.sum())
            self._stats.padded_row_iterations += self._shape.rows * (ran + int(given.fresh.any()))
            self._take(samples, of_host)

    def _rows(self, hosts: list[list[Sample]]) -> list[programs.DecodeRows]:
        """Of each host's samples; all tables as wide as the widest. Where the same samples run as in the last
        iteration, only what that one changed is written."""
        if self._kept is not None and self._kept.fits(hosts, self._shape, self._num_stops):
            return self._kept.rows
        width = self._table_width
        largest = max(min(s.request.num_samples, self.settings.max_slots) for samples in hosts for s in samples)
        while True:
            tables = [
                self._contiguous.tables(
                    [s.slot for s in samples if s.slot is not None], self._shape.rows, self._shape, max(width, largest)
                )
                for samples in hosts
            ]
            widths = {self._contiguous.width(of_host) for of_host in tables}
            width = max(widths)
            if len(widths) == 1:
                break
        self._table_width = width
        return [
            decode_rows(samples, self._shape.rows, self._num_stops, of_host)
            for samples, of_host in zip(hosts, tables, strict=True)
        ]

    def _take(self, samples: Sequence[Sample], drawn: Decoded) -> None:
        for sample in samples:
            assert sample.slot is not None
            row, first = sample.slot.row, 0 if sample.fresh else 1
            new = slice(first, first + int(drawn.gained[row]))
            self._extend(sample, drawn.token[new, row].tolist(), drawn.logprob[new, row].tolist())

    def _close(self, mine: Pending) -> None:
        super()._close(mine)
        self._hosts.forget(mine.request.request_id)
