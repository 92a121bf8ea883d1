"""In which order an engine process runs what was submitted to it. No jax.

A lane is a queue that is run strictly in order: one for each model, and one for each sampler that comes from disk or is
the base model's. Lanes don't wait for one another: the one served longest ago goes first, so that a model with a
thousand batches holds another up by one micro-batch at most.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from locojax.hosts.protocol import CloseSampler, ForwardBackward, OpenSampler, Operation, Sample, Submit
from locojax.training.tenant_work import RowProgram
from locojax.types import ForwardBackwardResult

Lane: TypeAlias = tuple[Literal["model", "sampler"], str]


class Work(Protocol):
    """A forward_backward on its way through micro-batches; `training.tenants.Work`."""

    @property
    def done(self) -> bool: ...

    @property
    def num_rows_left(self) -> int: ...

    @property
    def program(self) -> RowProgram: ...

    def result(self) -> ForwardBackwardResult: ...


@dataclasses.dataclass(eq=False)
class Entry:
    """An operation that waits or runs.

    `work` is set once a forward_backward is packed, `found` once what a load asks for has been read, `started` once
    some of it has run.
    """

    operation_id: str
    operation: Operation
    number: int  # of arrival
    work: Work | None = None
    found: Any = None
    started: bool = False


def lane_of(operation: Operation) -> Lane:
    """The queue that an operation belongs to. Samples have none: they join the running batch.

    Raises:
      TypeError: a Sample.
    """
    if isinstance(operation, Sample):
        raise TypeError("a Sample is not queued")
    if isinstance(operation, CloseSampler) or (isinstance(operation, OpenSampler) and operation.model_id is None):
        return ("sampler", operation.sampler_id)
    assert operation.model_id is not None
    return ("model", operation.model_id)


class Lanes:
    """What is queued, by lane."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, list[Entry]] = {}  # none is empty
        self._served: dict[Lane, int] = {}  # when each was served last; only of lanes that have had a turn
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._lanes.values())

    def add(self, entry: Entry, lane: Lane) -> None:
        self._lanes.setdefault(lane, []).append(entry)

    def in_turn(self) -> list[Lane]:
        """Lanes with something to do: the one served longest ago first, of those never served the oldest head's."""
        return sorted(self._lanes, key=lambda lane: (self._served.get(lane, 0), self._lanes[lane][0].number))

    def head(self, lane: Lane) -> Entry:
        return self._lanes[lane][0]

    def forward_backwards(self, lane: Lane) -> Iterator[Entry]:
        """The lane's operations that may share a micro-batch: up to the first that is no forward_backward."""
        entries = list(self._lanes.get(lane, ()))
        return itertools.takewhile(lambda entry: isinstance(entry.operation, ForwardBackward), entries)

    def served(self, lane: Lane) -> None:
        """The lane had its turn."""
        self._served[lane] = next(self._turns)

    def remove(self, entry: Entry, lane: Lane) -> None:
        entries = self._lanes[lane]
        entries.remove(entry)
        if not entries:
            del self._lanes[lane]
            if lane[0] == "sampler":  # opened or closed: there is seldom more to come
                self._served.pop(lane, None)

    def forget(self, lane: Lane) -> list[Entry]:
        """Ends a lane; returns what waited in it."""
        self._served.pop(lane, None)
        return self._lanes.pop(lane, [])

    def retire(self, lane: Lane) -> None:
        """Forgets a lane's turns: its model is gone."""
        self._served.pop(lane, None)

    def find(self, operation_id: str) -> tuple[Entry, Lane] | None:
        for lane, entries in self._lanes.items():
            for entry in entries:
                if entry.operation_id == operation_id:
                    return entry, lane
        return None

    def opening(self, sampler_id: str) -> Lane | None:
        """The lane of the newest queued OpenSampler with this id, if there is one."""
        newest: tuple[int, Lane] | None = None
        for lane, entries in self._lanes.items():
            for entry in entries:
                operation = entry.operation
                if isinstance(operation, OpenSampler) and operation.sampler_id == sampler_id:
                    newest = max(newest or (entry.number, lane), (entry.number, lane))
        return newest and newest[1]

    def entries(self) -> list[Entry]:
        """All that is queued, in order of arrival."""
        return sorted((entry for entries in self._lanes.values() for entry in entries), key=lambda e: e.number)

    def lengths(self) -> Mapping[str, int]:
        """Operations queued, by model."""
        return {name: len(entries) for (kind, name), entries in self._lanes.items() if kind == "model"}


class HeldSamples:
    """Samples whose sampler is yet to be opened, by its id."""

    def __init__(self) -> None:
        self._held: dict[str, list[Submit]] = {}

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())

    def add(self, message: Submit, sampler_id: str) -> None:
        self._held.setdefault(sampler_id, []).append(message)

    def release(self, sampler_id: str) -> list[Submit]:
        """Those that waited for this sampler, in order; they are held no longer."""
        return self._held.pop(sampler_id, [])

    def withdraw(self, operation_id: str) -> bool:
        """Takes one out. False: it isn't held."""
        for held in self._held.values():
            for message in held:
                if message.operation_id == operation_id:
                    held.remove(message)
                    return True
        return False

    def operation_ids(self) -> list[str]:
        return [message.operation_id for held in self._held.values() for message in held]
