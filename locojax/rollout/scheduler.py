"""Which samples run next: first come, first served, as many as slots and memory allow.

Prompts are shared: samples of one (adapter, tokens) read one block, and a block nobody uses any more stays cached until
its room is wanted or the weights change. When a running sample needs room that isn't there, the youngest one is
preempted: its tokens are kept and prefilled again later, and since a draw depends on (seed, sample, position) alone its
completion is the same. No jax here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, runtime_checkable

from locojax.errors import CapacityError
from locojax.rollout.pages import ContinuesPrompts, KvMemory, PromptBlock
from locojax.rollout.request import Sample

WORTH_SHRINKING = 32
"""With no more tokens than this to come, a ragged tail runs in the rows it has: fewer rows are one more program to
compile, which takes as long as some tens of iterations."""

WORTH_CONTINUING = 64
"""A prompt is continued from another one if it saves so many tokens, and half of all: each is a program run of its
own, while whole prompts are computed together."""


@dataclasses.dataclass(frozen=True)
class NewPrompt:
    """A prompt to compute and store, from token `block.num_stem` on. `scored_for`: the request that wants its
    log-probs, if one does.

    Example: NewPrompt(block, (1, 9690, 198), adapter=0, scored_for=None)
    """

    block: PromptBlock
    tokens: tuple[int, ...]
    adapter: int
    scored_for: str | None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one step runs: first the prompts, then up to `num_iterations` of decoding for every running sample.

    Decoding ends early once no more than `return_at` samples are alive.
    """

    prompts: tuple[NewPrompt, ...]
    num_iterations: int
    return_at: int
    shrink: bool  # fewer rows would do, and nobody waits for the ones given up


@runtime_checkable
class Queue(Protocol):
    """What an engine asks of its scheduler, or of several that it takes for one."""

    @property
    def waiting(self) -> Collection[Sample]:
        """Samples that have no slot yet, in order."""

    @property
    def running(self) -> Sequence[Sample]:
        """Samples that have one, oldest first."""

    @property
    def num_preemptions(self) -> int:
        """Times that a sample had to make way."""

    @property
    def num_prefix_hits(self) -> int:
        """Samples whose prompt had been computed before."""

    def add(self, samples: Iterable[Sample]) -> None:
        """Queues the samples of one request."""

    def schedule(self) -> Schedule:
        """See `Scheduler.schedule`."""

    def finish(self, sample: Sample) -> None:
        """See `Scheduler.finish`."""

    def remove(self, request_id: str) -> list[Sample]:
        """See `Scheduler.remove`."""

    def preempt_all(self, adapter: int | None = None) -> None:
        """See `Scheduler.preempt_all`."""

    def drop_prefixes(self, adapter: int | None = None) -> None:
        """See `Scheduler.drop_prefixes`."""


class Scheduler:
    """Owns the waiting and the running samples and the prompt blocks. See the module's head."""

    def __init__(
        self, memory: KvMemory, *, max_iterations: int, max_iterations_watched: int, prefix_cache: bool = True
    ):
        """`max_iterations_watched` holds while a sample is streamed or has stop strings, which the host looks for."""
        self.memory = memory
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []  # oldest first
        self.num_preemptions = 0
        self.num_prefix_hits = 0
        self._max_iterations, self._max_iterations_watched = max_iterations, max_iterations_watched
        self._prefix_cache = prefix_cache
        self._prefixes: OrderedDict[tuple[int, tuple[int, ...]], PromptBlock] = OrderedDict()  # least recent first
        self._unshared: set[PromptBlock] = set()  # blocks that the cache doesn't keep
        self._stems = memory if prefix_cache and isinstance(memory, ContinuesPrompts) else None
        self._new: set[PromptBlock] = set()  # opened by the last `schedule`, so not computed before it returned

    def add(self, samples: Iterable[Sample]) -> None:
        self.waiting.extend(samples)

    def schedule(self) -> Schedule:
        """Makes room for the running samples, then admits waiting ones, unless someone had to make way."""
        self._new.clear()
        preempted = self._make_room()
        prompts = [] if preempted and self.running else self._admit()
        limit = self._limit()
        count = len(self.running)
        left = max((sample.remaining for sample in self.running), default=0)
        shrink = not self.waiting and left > WORTH_SHRINKING
        if self.waiting:
            return_at = count - max(1, count // 8)
        elif shrink:
            return_at = max((size for size in self.memory.rows.sizes if size < count), default=0)
        else:
            return_at = 0
        return Schedule(tuple(prompts), limit, return_at, shrink)

    def finish(self, sample: Sample) -> None:
        """Gives up a running sample's slot and its share of the prompt."""
        self.running.remove(sample)
        self._vacate(sample)

    def remove(self, request_id: str) -> list[Sample]:
        """Takes all samples of a request out, wherever they are; returns them."""
        ours = [s for s in (*self.running, *self.waiting) if s.request.request_id == request_id]
        for sample in ours:
            if sample.slot is not None:
                self.finish(sample)
        self.waiting = deque(s for s in self.waiting if s.request.request_id != request_id)
        return ours

    def preempt_all(self, adapter: int | None = None) -> None:
        """Sends running samples (all, or one adapter's) back to wait, in order: the weights are about to change."""
        for sample in reversed(list(self.running)):
            if adapter is None or sample.request.adapter == adapter:
                self._preempt(sample)

    def drop_prefixes(self, adapter: int | None = None) -> None:
        """Forgets cached prompts (all, or one adapter's); those in use are forgotten when their last user finishes."""
        for key in list(self._prefixes):
            if adapter is None or key[0] == adapter:
                self._close_prefix(key)

    def _limit(self) -> int:
        """Iterations that every running sample has room for; those that need less have less reserved."""
        watched = any(sample.watched for sample in self.running)
        limit = self._max_iterations_watched if watched else self._max_iterations
        stored = max((s.num_stored for s in self.running), default=0)
        headroom = self.memory.headroom(stored)
        return min(limit, headroom) if headroom else limit

    def _reserve(self, sample: Sample, limit: int) -> None:
        assert sample.slot is not None
        self.memory.extend(sample.slot, sample.num_stored + min(limit, sample.remaining))

    def _make_room(self) -> bool:
        """Reserves what each running sample will write, oldest first; returns whether one was preempted."""
        limit, preempted = self._limit(), False
        for sample in list(self.running):
            while sample.slot is not None:
                try:
                    self._reserve(sample, limit)
                    break
                except CapacityError:
                    if not (self.memory.decode_reads_prompts and self._evict()):
                        self._preempt(self.running[-1])
                        preempted = True
        return preempted

    def _admit(self) -> list[NewPrompt]:
        prompts: list[NewPrompt] = []
        most = self.memory.rows.sizes[-1]
        if self.waiting and not self.running and self.memory.decode_reads_prompts:
            self._forget_oversized_cache(most)
        while self.waiting and len(self.running) < most:
            sample = self.waiting[0]
            try:
                new = self._open(sample)
            except CapacityError:
                # Nothing runs, so nothing will make room by finishing: an unused cached prompt has to.
                if not self.running and self._evict():
                    continue
                break
            self.waiting.popleft()
            self.running.append(sample)
            if new is not None:
                prompts.append(new)
        return prompts

    def _forget_oversized_cache(self, most: int) -> None:
        """Decoding's cost grows with the entries allocated; a cache far larger than the next wave isn't worth it."""
        wanted = {sample.prefix_key for sample, _ in zip(self.waiting, range(most), strict=False)}
        if len(self._prefixes) >= 2 * len(wanted):
            for key in [key for key in self._prefixes if key not in wanted]:
                self._close_prefix(key)

    def _open(self, sample: Sample) -> NewPrompt | None:
        """Gives a sample its prompt and slot; returns the prompt if it must be computed. Raises CapacityError."""
        key, new, scored = sample.prefix_key, None, _wants_hidden(sample)
        block = None if scored else self._prefixes.get(key)
        if block is None:
            block = self._open_prompt(sample.context, None if scored else self._stem_of(*key))
            request = sample.request
            new = NewPrompt(block, sample.context, request.adapter, request.request_id if scored else None)
        else:
            self._prefixes.move_to_end(key)
        try:
            sample.slot = self.memory.open_slot(block)
            try:
                self._reserve(sample, self._first_reserve(sample))
            except CapacityError:
                self.memory.close_slot(sample.slot)
                sample.slot = None
                raise
        except CapacityError:
            if new is not None:
                self.memory.close_prompt(block)
            raise
        sample.prompt = block
        if new is None:
            self.num_prefix_hits += 1
            if not sample.tokens:
                sample.num_cached = len(sample.context)
            return None
        self._new.add(block)
        if not sample.tokens:
            sample.num_cached = block.num_stem
        if self._prefix_cache and key not in self._prefixes:
            self._prefixes[key] = block
            block.users += 1
        else:
            self._unshared.add(block)
        return new

    def _stem_of(self, adapter: int, tokens: tuple[int, ...]) -> tuple[PromptBlock, int] | None:
        """The computed prompt that begins with most of these tokens, and how many: the last turn of a conversation.

        One token at least is left to compute: samples are drawn from what it predicts."""
        if self._stems is None:
            return None
        found, most = None, max(WORTH_CONTINUING, -(-len(tokens) // 2)) - 1
        for (of, cached), block in self._prefixes.items():
            if of == adapter and block not in self._new and len(cached) > most < len(tokens) - 1:
                if cached[: most + 1] == tokens[: most + 1]:
                    most = min(_num_common(cached, tokens), len(tokens) - 1)
                    found = block, most
        return found

    def _first_reserve(self, sample: Sample) -> int:
        """Room for what the next run may write, without growing the arrays for a newcomer's sake."""
        stored = max((s.num_stored for s in self.running), default=0)
        headroom = self.memory.headroom(stored)
        limit = self._max_iterations_watched if sample.watched else self._max_iterations
        return min(limit, headroom or limit)

    def _open_prompt(self, tokens: Sequence[int], stem: tuple[PromptBlock, int] | None) -> PromptBlock:
        if stem is not None:
            stem[0].users += 1  # so that it isn't evicted meanwhile
        try:
            while True:
                if self.memory.prefers_eviction() and self._evict():
                    continue
                try:
                    if stem is not None and self._stems is not None:
                        return self._stems.continue_prompt(*stem, len(tokens))
                    return self.memory.open_prompt(len(tokens))
                except CapacityError:
                    if not self._evict():
                        raise
        finally:
            if stem is not None:
                stem[0].users -= 1

    def _evict(self) -> bool:
        """Closes the cached prompt that has been unused the longest; False if every one is in use."""
        key = next((key for key, block in self._prefixes.items() if block.users == 1), None)
        if key is not None:
            self._close_prefix(key)
        return key is not None

    def _close_prefix(self, key: tuple[int, tuple[int, ...]]) -> None:
        block = self._prefixes.pop(key)
        block.users -= 1
        if block.users:
            self._unshared.add(block)
        else:
            self.memory.close_prompt(block)

    def _preempt(self, sample: Sample) -> None:
        self.running.remove(sample)
        self._vacate(sample)
        sample.preempted()
        self.waiting.appendleft(sample)
        self.num_preemptions += 1

    def _vacate(self, sample: Sample) -> None:
        assert sample.slot is not None and sample.prompt is not None
        self.memory.close_slot(sample.slot)
        if sample.prompt in self._unshared and not sample.prompt.users:
            self._unshared.discard(sample.prompt)
            self.memory.close_prompt(sample.prompt)
        sample.slot = sample.prompt = None


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _wants_hidden(sample: Sample) -> bool:
    """Prompt log-probs need the prompt's hidden states, which aren't cached; a request's first sample asks for them."""
    request = sample.request
    return sample.index == 0 and not sample.tokens and request.scores_prompt
