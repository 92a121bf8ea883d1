"""The books of several hosts' KV memories and queues, kept by one head that runs all hosts in lockstep. No jax here.

Each host keeps its own prompts and rows, as it would alone; but one program runs on all of them, so that their arrays
must have one shape: the largest that any of them wants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from locojax.rollout.pages import ContiguousMemory, Shape, power_of_two
from locojax.rollout.request import Sample
from locojax.rollout.scheduler import Schedule, Scheduler

Sources = tuple[tuple[int, ...] | None, ...]
"""For each host, the old row that each new row takes its content from; None where rows stay what they are."""


class HostMemory(ContiguousMemory):
    """One host's memory, which takes the shape that all hosts agree on in place of `settle`."""

    def wanted(self, *, shrink: bool) -> Shape:
        """The least shape that holds what this host has; without `shrink` no fewer rows than there are now."""
        count, top = len(self.rows.blocks), max(self.rows.blocks, default=-1) + 1
        if not count:
            rows = 0
        elif shrink:
            rows = self.rows.size_for(count)
        else:
            rows = max(self.rows.size_for(top), self.rows.num_rows)
        return Shape(self._entries, self._prompt_capacity, rows, self._capacity)

    def take(self, shape: Shape) -> tuple[int, ...] | None:
        """Takes a shape no smaller than `wanted`; returns the old row of each new one, or None if none moved."""
        self._prompt_capacity, self.shape = shape.prompt_capacity, shape
        if self._prompts:
            self._entries = shape.entries
        if not self.rows.blocks:  # its rows hold nothing, and its next wave starts from none
            return None
        before, source = self.rows.num_rows, self.rows.resize(shape.rows)
        self._capacity = shape.capacity
        return None if source is None or before == 0 else tuple(source)


class Hosts:
    """The hosts' schedulers, as one `Queue`. A request goes to the host that has the least to do, and stays there."""

    def __init__(self, schedulers: Sequence[Scheduler]):
        self.schedulers = tuple(schedulers)
        self.plans: tuple[Schedule, ...] = ()  # of the last `schedule`, for each host
        self._loads = [0] * len(self.schedulers)  # tokens that each host's requests may still come to, at most
        self._placed: dict[str, tuple[int, int]] = {}  # by request: its host, and its share of that

    @property
    def waiting(self) -> list[Sample]:
        return [sample for scheduler in self.schedulers for sample in scheduler.waiting]

    @property
    def running(self) -> list[Sample]:
        return [sample for scheduler in self.schedulers for sample in scheduler.running]

    @property
    def num_preemptions(self) -> int:
        return sum(scheduler.num_preemptions for scheduler in self.schedulers)

    @property
    def num_prefix_hits(self) -> int:
        return sum(scheduler.num_prefix_hits for scheduler in self.schedulers)

    def add(self, samples: Iterable[Sample]) -> None:
        samples = list(samples)
        request = samples[0].request
        load = len(request.prompt) + sum(sample.max_tokens for sample in samples)
        host = self._loads.index(min(self._loads))
        self._loads[host] += load
        self._placed[request.request_id] = host, load
        self.schedulers[host].add(samples)

    def schedule(self) -> Schedule:
        """Every host's plan, kept in `plans`, and what they have in common: the fewest iterations; fewer rows if every
        host would do with fewer; and an early end once no more samples are alive than all hosts together wait for."""
        self.plans = tuple(scheduler.schedule() for scheduler in self.schedulers)
        busy = [plan for plan, one in zip(self.plans, self.schedulers, strict=True) if one.running]
        return Schedule(
            tuple(prompt for plan in self.plans for prompt in plan.prompts),
            min((plan.num_iterations for plan in busy), default=1),
            sum(plan.return_at for plan in busy),
            bool(busy) and all(plan.shrink for plan in busy),
        )

    def finish(self, sample: Sample) -> None:
        host, _ = self._placed[sample.request.request_id]
        self.schedulers[host].finish(sample)

    def remove(self, request_id: str) -> list[Sample]:
        host, _ = self._placed[request_id]
        samples = self.schedulers[host].remove(request_id)
        self.forget(request_id)
        return samples

    def forget(self, request_id: str) -> None:
        """The request has been answered; its host may take another."""
        if request_id in self._placed:
            host, load = self._placed.pop(request_id)
            self._loads[host] -= load

    def preempt_all(self, adapter: int | None = None) -> None:
        for scheduler in self.schedulers:
            scheduler.preempt_all(adapter)

    def drop_prefixes(self, adapter: int | None = None) -> None:
        for scheduler in self.schedulers:
            scheduler.drop_prefixes(adapter)


def common_shape(memories: Sequence[HostMemory], before: Shape, *, shrink: bool, final_capacity: int) -> Shape:
    """The shape that all hosts take next. As `ContiguousMemory.settle`: with fewer rows the capacity goes to its final
    size at once, since growing it later would be one more program."""
    wanted = [memory.wanted(shrink=shrink) for memory in memories]
    shape = Shape(*(max(column) for column in zip(*map(dataclasses.astuple, wanted), strict=True)))
    if shape.rows < before.rows and shape.rows:
        jump = dataclasses.replace(shape, capacity=max(power_of_two(final_capacity), shape.capacity))
        if jump.num_tokens <= memories[0].max_tokens:
            return jump
    return shape
