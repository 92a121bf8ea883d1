"""One step's time divided into compute, network and host orchestration, from when its devices were busy with what.

Every instant of the step belongs to exactly one class, so the classes add up to the step. For one device:

* compute: a program runs on it, and whatever it does is not only a collective.
* network: all that it does is a collective, or the waiting in one. Also when it is idle and its host waits for others
  (the phase `wait`). A collective that computation hides costs nothing, and counts as compute.
* host: it is idle while its host is in a named phase: admission, scheduling, grading, packing, dispatch.
* unaccounted: it is idle, and its host is in no named phase.

A host's figures are the mean over its devices. Spans are i64[N, 2] of nanoseconds, start and end, sorted and disjoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from locojax.hosts.phases import PHASES, Phase

Class = Literal["compute", "network", "host", "unaccounted"]
CLASSES: tuple[Class, ...] = get_args(Class)
Row = Phase | Literal["unaccounted"]
ROWS: tuple[Row, ...] = (*PHASES, "unaccounted")
"""A step's phases, and the time in none of them, in which a device may still be busy."""

_NANO = 1e-9


@dataclasses.dataclass(frozen=True)
class DeviceSpans:
    """When one device did what. `busy`: a program ran. `collective`: in one; `working`: in any other operation."""

    busy: np.ndarray
    collective: np.ndarray
    working: np.ndarray


@dataclasses.dataclass(frozen=True)
class StepSpans:
    """One host's step: from `start` to `end` in nanoseconds, its phases and its devices. Filled by `trace`.

    `phases` are (name, start, end); they nest, as the timeline's do, and the inner one counts.
    """

    start: int
    end: int
    phases: Sequence[tuple[Phase, int, int]]
    devices: Sequence[DeviceSpans]


@dataclasses.dataclass(frozen=True)
class Division:
    """Where one host's step went: `seconds[row][class]`, which add up to `wall`. Filled by `divide`.

    `num_devices` are those that did anything in the step.
    Example: Division(1.0, {"decode": {"compute": 0.7, "network": 0.0, "host": 0.2, "unaccounted": 0.0}, ...}, 1)
    """

    wall: float
    seconds: Mapping[Row, Mapping[Class, float]]
    num_devices: int

    def shares(self) -> dict[Class, float]:
        """Each class's share of the step; they add up to 1."""
        return {name: sum(row[name] for row in self.seconds.values()) / self.wall for name in CLASSES}


def divide(spans: StepSpans) -> Division:
    """Books every nanosecond of the step under its phase and its class."""
    window = np.array([[spans.start, spans.end]])
    rows = _rows(spans, window)
    seconds: dict[Row, dict[Class, float]] = {name: dict.fromkeys(CLASSES, 0.0) for name in rows}
    for device in spans.devices:
        busy = overlap(merge(np.concatenate([device.busy, device.collective, device.working])), window)
        network = without(overlap(device.collective, window), device.working)
        compute, idle = without(busy, network), without(window, busy)
        for name, row in rows.items():
            into = seconds[name]
            into["compute"] += _length(overlap(compute, row))
            into["network"] += _length(overlap(network, row))
            of_host: Class = "unaccounted" if name == "unaccounted" else "network" if name == "wait" else "host"
            into[of_host] += _length(overlap(idle, row))
    scale = _NANO / max(len(spans.devices), 1)
    scaled: dict[Row, dict[Class, float]] = {
        name: {kind: value * scale for kind, value in row.items()} for name, row in seconds.items()
    }
    return Division((spans.end - spans.start) * _NANO, scaled, len(spans.devices))


def _rows(spans: StepSpans, window: np.ndarray) -> dict[Row, np.ndarray]:
    """Disjoint spans of each phase that happened, and of none, which cover the window."""
    # Innermost first: of two that overlap, the one that began later is inside the other.
    found: dict[Row, list[np.ndarray]] = {}
    taken = np.empty((0, 2), np.int64)
    for name, start, end in sorted(spans.phases, key=lambda phase: (-phase[1], phase[2])):
        mine = without(overlap(np.array([[start, end]]), window), taken)
        found.setdefault(name, []).append(mine)
        taken = merge(np.concatenate([taken, mine]))
    rows: dict[Row, np.ndarray] = {name: merge(np.concatenate(found[name])) for name in PHASES if name in found}
    return {**rows, "unaccounted": without(window, taken)}


def merge(spans: np.ndarray) -> np.ndarray:
    """The union of spans in any order, which may overlap: sorted and disjoint."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans.reshape(0, 2)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], reach[last]], axis=1)


def overlap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What lies in both; each is sorted and disjoint."""
    if not len(one) or not len(other):
        return np.empty((0, 2), np.int64)
    # For each span of `one`, those of `other` from the first that ends after its start to the last that begins before
    # its end.
    low = np.searchsorted(other[:, 1], one[:, 0], side="right")
    high = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = low[mine] + offsets
    found = np.stack(
        [np.maximum(one[mine, 0], other[theirs, 0]), np.minimum(one[mine, 1], other[theirs, 1])], axis=1
    )
    return found[found[:, 1] > found[:, 0]]


def without(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What lies in `one` and not in `other`; each is sorted and disjoint."""
    if not len(one):
        return one
    edges = np.concatenate([other[:, 0], other[:, 1], one[:1, 0], one[-1:, 1]])
    low, high = edges.min(), edges.max()
    gaps = np.stack([np.concatenate([[low], other[:, 1]]), np.concatenate([other[:, 0], [high]])], axis=1)
    return overlap(one, gaps[gaps[:, 1] > gaps[:, 0]])


def _length(spans: np.ndarray) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())
