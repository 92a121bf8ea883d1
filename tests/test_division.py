"""A step's nanoseconds: every one in exactly one class, checked against a count of each."""

from __future__ import annotations

import numpy as np
import pytest

from locojax.measure.division import CLASSES, DeviceSpans, StepSpans, divide, merge, overlap, without


def spans(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


def covered(which: np.ndarray, end: int = 60) -> np.ndarray:
    """bool[end]: which nanoseconds lie in the spans; the plain twin of the algebra."""
    found = np.zeros(end, bool)
    for low, high in which:
        found[low:high] = True
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_algebra_is_that_of_sets(seed):
    random = np.random.default_rng(seed)
    one, other = (np.sort(random.integers(0, 60, (random.integers(0, 9), 2)), axis=1) for _ in range(2))
    left, right = merge(one), merge(other)
    for found, expected in (
        (left, covered(one)),
        (overlap(left, right), covered(one) & covered(other)),
        (without(left, right), covered(one) & ~covered(other)),
    ):
        np.testing.assert_array_equal(covered(found), expected)
        assert (found[1:, 0] >= found[:-1, 1]).all() and (found[:, 0] < found[:, 1]).all()


def test_a_step_is_divided_as_its_text_says():
    """A program runs from 100 to 500. A collective is waited for from 200 to 350, hidden by work from 300 on."""
    device = DeviceSpans(busy=spans((100, 500)), collective=spans((200, 350)), working=spans((100, 200), (300, 500)))
    phases = [("train", 50, 700), ("pack", 60, 90), ("wait", 600, 650)]
    found = divide(StepSpans(0, 1000, phases, [device]))
    nano = {row: {name: round(1e9 * value) for name, value in values.items()} for row, values in found.seconds.items()}
    nothing = dict.fromkeys(CLASSES, 0)
    assert nano == {
        "pack": {**nothing, "host": 30},
        "train": {**nothing, "compute": 300, "network": 100, "host": 10 + 10 + 100 + 50},
        "wait": {**nothing, "network": 50},
        "unaccounted": {**nothing, "unaccounted": 50 + 300},
    }
    assert found.wall == pytest.approx(1e-6)
    assert found.shares() == pytest.approx({"compute": 0.3, "network": 0.15, "host": 0.2, "unaccounted": 0.35})


def test_devices_are_averaged_and_what_lies_outside_the_step_is_cut_off():
    busy = DeviceSpans(spans((-50, 50)), spans(), spans((-50, 50)))
    idle = DeviceSpans(spans((90, 150)), spans((90, 150)), spans())
    found = divide(StepSpans(0, 100, [("decode", -10, 70)], [busy, idle]))
    assert found.shares() == pytest.approx({"compute": 0.25, "network": 0.05, "host": 0.45, "unaccounted": 0.25})


@pytest.mark.parametrize("seed", range(20))
def test_every_instant_is_in_exactly_one_class(seed):
    random = np.random.default_rng(seed)

    def some() -> np.ndarray:
        return merge(np.sort(random.integers(0, 1200, (random.integers(0, 12), 2)), axis=1))

    phases = []
    for name in ("decode", "train", "wait"):
        low, high = np.sort(random.integers(0, 1100, 2))
        phases += [(name, low, high), ("reward", low + (high - low) // 3, low + (high - low) // 2)]
    devices = [DeviceSpans(some(), some(), some()) for _ in range(3)]
    found = divide(StepSpans(100, 1000, phases, devices))
    assert sum(found.shares().values()) == pytest.approx(1.0)
    assert min(value for row in found.seconds.values() for value in row.values()) >= 0
