"""Watching memory: arrays that pile up from step to step are named, and running out of memory is told in settings.

What should be alive between two steps is always the same: weights, optimizer, caches. What grows is a leak, and a leak
ends a run hours later, in a place that has nothing to do with it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from locojax.errors import CapacityError

GIB = 1 << 30

Kind = tuple[tuple[int, ...], str]
"""An array's shape and dtype."""


@dataclasses.dataclass(frozen=True)
class Alive:
    """The arrays of this process that are alive: how many there are of each kind."""

    counts: Mapping[Kind, int]

    @classmethod
    def now(cls) -> Alive:
        """Of all of jax's arrays; of a global array, this process's parts count as one."""
        return cls.of(jax.live_arrays())

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> Alive:
        """Of arrays, or of whatever has a shape and a dtype."""
        return cls(collections.Counter((tuple(array.shape), str(array.dtype)) for array in arrays))

    @property
    def num_bytes(self) -> int:
        """Of all, a global array counted whole."""
        return sum(kind_bytes(kind) * count for kind, count in self.counts.items())


def kind_bytes(kind: Kind) -> int:
    """Bytes of one array. Keys of jax.random count as their 8 bytes each."""
    shape, dtype = kind
    return math.prod(shape) * (8 if dtype.startswith("key<") else np.dtype(dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Grown:
    """A kind of array of which there are more after every step. before, after: how many there were and are."""

    kind: Kind
    before: int
    after: int

    @property
    def num_bytes(self) -> int:
        return (self.after - self.before) * kind_bytes(self.kind)

    def __str__(self) -> str:
        shape, dtype = self.kind
        return f"{dtype}[{','.join(map(str, shape))}]: {self.before} -> {self.after}, {self.num_bytes / GIB:.3g} GiB"


class MemoryWatch:
    """Looks at what is alive between steps.

    Args:
      patience: so many steps one after another must each end with more of a kind.
      max_bytes: growth that is let pass: metrics that a run keeps are small.
      look: what is alive; tests give their own.
    """

    def __init__(self, *, patience: int = 5, max_bytes: int = 1 << 20, look: Callable[[], Alive] = Alive.now):
        self._patience, self._max_bytes, self._look = patience, max_bytes, look
        self._seen: collections.deque[Alive] = collections.deque(maxlen=patience + 1)
        self._told: set[Kind] = set()

    def after_step(self) -> list[Grown]:
        """What has grown with every step since `patience` of them, the largest first; each kind is told once."""
        self._seen.append(self._look())
        if len(self._seen) <= self._patience:
            return []
        first, last = self._seen[0], self._seen[-1]
        grown = [
            Grown(kind, first.counts.get(kind, 0), count)
            for kind, count in last.counts.items()
            if kind not in self._told and self._always_more(kind)
        ]
        grown = [found for found in grown if found.num_bytes > self._max_bytes]
        self._told.update(found.kind for found in grown)
        return sorted(grown, key=lambda found: -found.num_bytes)

    def _always_more(self, kind: Kind) -> bool:
        counts = [alive.counts.get(kind, 0) for alive in self._seen]
        return all(later > earlier for earlier, later in zip(counts, counts[1:], strict=False))


class PeakByPhase:
    """The most memory that was in use at the end of each phase of a step.

    Args:
      in_use: bytes now; None: of this process's devices, the fullest (see `bytes_in_use`).
    """

    def __init__(self, in_use: Callable[[], int] | None = None):
        self._in_use = in_use or bytes_in_use
        self._peaks: dict[str, int] = {}

    def ended(self, phase: str) -> None:
        """A phase has ended."""
        self._peaks[phase] = max(self._peaks.get(phase, 0), self._in_use())

    def take(self) -> dict[str, int]:
        """Bytes by phase since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks


def bytes_in_use() -> int:
    """Of the fullest of this process's devices; on a CPU, which keeps no account, what is resident of the process."""
    found = [stats["bytes_in_use"] for device in jax.local_devices() if (stats := device.memory_stats())]
    return max(found) if found else resident_bytes()


def resident_bytes(field: str = "VmRSS") -> int:
    """This process's memory as Linux counts it, "VmRSS" now or "VmHWM" at its peak; 0 where Linux isn't."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            found = re.search(rf"^{field}:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def out_of_memory(
    error: BaseException, settings: Mapping[str, Any], planned: int | None = None
) -> CapacityError | None:
    """The error to raise in place of one that says that memory ran out; None if `error` says something else.

    Raised once, it ends the run: the same step would run out of memory again.

    Args:
      settings: of the trainer: row_tokens, rows, remat, tile_tokens; the largest lever is named first.
      planned: bytes of a device that the step was expected to take, where that is known.
    """
    text = str(error)
    if not ("RESOURCE_EXHAUSTED" in text or "Out of memory" in text or isinstance(error, MemoryError)):
        return None
    asked = re.search(r"allocat\w* (\d+) bytes|allocate ([\d.]+[KMGT]i?B)", text)
    wanted = "" if asked is None else f", at an allocation of {asked[1] or asked[2]}{' bytes' if asked[1] else ''}"
    rows, row_tokens = settings["rows"], settings["row_tokens"]
    if rows > 1:
        lever = f"Halve the rows of a micro-batch (now {rows}): the gradient stays the same"
    elif settings["remat"] not in ("full", "offload"):
        lever = f"Keep less for the backward pass: remat \"full\" in place of {settings['remat']!r}"
    else:
        lever = f"Shorten the rows (now {row_tokens} tokens), or split the model over more devices"
    plan = "" if planned is None else f"; the plan was {planned / GIB:.2f} GiB"
    return CapacityError(
        f"The device ran out of memory{wanted}",
        got=f"micro-batches of {rows} rows of {row_tokens} tokens, remat {settings['remat']!r}, tiles of "
        f"{settings['tile_tokens']}; in use {bytes_in_use() / GIB:.2f} GiB{plan}",
        remedy=lever + ". `locojax fit` finds settings that fit",
    )


class StepMemory:
    """What a loop asks of memory in each step. Example: `memory.ended("train")`; after the step, `memory.grown()`."""

    def __init__(self) -> None:
        self._watch, self._peaks = MemoryWatch(), PeakByPhase()
        self.ended = self._peaks.ended

    def grown(self) -> list[str]:
        """In words, what piles up; see `MemoryWatch.after_step`."""
        return [f"memory grows with every step: {found}" for found in self._watch.after_step()]

    def peaks(self) -> dict[str, float]:
        """For the step's record: GiB at the end of each phase."""
        return {f"{phase}_memory_gib": size / GIB for phase, size in self._peaks.take().items()}


@contextlib.contextmanager
def running_out_is_told(settings: Any) -> Iterator[None]:
    """Raises CapacityError, with the trainer's settings that matter, where memory runs out; see `out_of_memory`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        names = ("row_tokens", "rows", "remat", "tile_tokens")
        told = out_of_memory(error, {name: getattr(settings, name) or "auto" for name in names})
        if told is None:
            raise
        raise told from error
