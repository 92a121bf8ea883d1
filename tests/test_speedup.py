"""Intervals of a speed-up: against scipy, a published example, and by their coverage of a known truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from locojax.errors import ComparisonError
from locojax.measure.speedup import Interval, Scored, Speedup, bootstrap, welch


def side(seed: int, mean: float, *, num_launches: int, num_steps: int = 12, spread: float = 0.05) -> Scored:
    """Launches whose own level varies by `spread` in the logarithm, and whose steps vary by 20 % around it."""
    random = np.random.default_rng(seed)
    level = mean * np.exp(spread * random.standard_normal((num_launches, 1)))
    tokens = random.integers(500, 1500, (num_launches, num_steps)).astype(float)
    return Scored(level * tokens / 1000 * np.exp(0.2 * random.standard_normal((num_launches, num_steps))), tokens)


def test_the_estimates_are_ratios_of_seconds_per_step_and_per_token():
    a = Scored(np.array([[1.0, 3.0]]), np.array([[10.0, 10.0]]))
    b = Scored(np.array([[4.0, 4.0], [6.0, 6.0]]), np.array([[10.0, 30.0], [20.0, 20.0]]))
    found = bootstrap(a, b, num_resamples=100)
    assert found.per_step.estimate == 5.0 / 2.0
    assert found.per_token.estimate == pytest.approx((20.0 / 80.0) / (4.0 / 20.0))


def test_one_launch_a_side_is_the_bootstrap_that_scipy_knows():
    a, b = side(1, 1.0, num_launches=1, num_steps=30), side(2, 2.0, num_launches=1, num_steps=30)
    ours = bootstrap(a, b, num_resamples=20_000, seed=3)
    for interval, statistic, data in (
        (ours.per_step, lambda sa, sb, axis: sb.mean(axis) / sa.mean(axis), (a.seconds[0], b.seconds[0])),
        (
            ours.per_token,
            lambda rows_a, rows_b, axis: _per_token(b, rows_b, axis) / _per_token(a, rows_a, axis),
            (np.arange(30), np.arange(30)),
        ),
    ):
        theirs = stats.bootstrap(
            data, statistic, n_resamples=20_000, method="percentile", vectorized=True, rng=np.random.default_rng(4)
        ).confidence_interval
        width = theirs.high - theirs.low
        assert abs(interval.low - theirs.low) < 0.04 * width and abs(interval.high - theirs.high) < 0.04 * width


def _per_token(one: Scored, rows: np.ndarray, axis: int) -> np.ndarray:
    return one.seconds[0][rows].sum(axis) / one.tokens[0][rows].sum(axis)


def test_launches_are_resampled_whole_and_widen_the_interval():
    alike = Scored(np.ones((4, 10)), np.ones((4, 10)))
    apart = Scored(np.array([[1.0], [1.0], [1.4], [1.4]]) * np.ones((4, 10)), np.ones((4, 10)))
    assert bootstrap(alike, alike).per_step == Interval(1.0, 1.0, 1.0)
    found = bootstrap(apart, alike).per_step
    # The mean of 4 draws of {1, 1.4}: all low has probability 1/16, above 2.5 %, and so has all high.
    assert found.low == pytest.approx(1 / 1.4) and found.high == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_interval_whatever_the_block(monkeypatch):
    a, b = side(1, 1.0, num_launches=3), side(2, 2.0, num_launches=2)
    once = bootstrap(a, b, seed=7)
    assert once == bootstrap(a, b, seed=7) != bootstrap(a, b, seed=8)
    monkeypatch.setattr("locojax.measure.speedup._BLOCK", 500)
    in_blocks = bootstrap(a, b, seed=7)
    assert in_blocks.per_step.low == pytest.approx(once.per_step.low, rel=0.02)


@pytest.mark.parametrize("method", ["bootstrap", "welch"])
def test_intervals_cover_the_truth_as_often_as_they_claim(method):
    covered, total = 0, 300
    for trial in range(total):
        a, b = side(2 * trial, 1.0, num_launches=6), side(2 * trial + 1, 1.5, num_launches=6)
        found = bootstrap(a, b, num_resamples=400, seed=trial) if method == "bootstrap" else welch(a, b)
        covered += found.per_token.low <= 1.5 <= found.per_token.high
    # 95 % is claimed. Few launches make a bootstrap's interval a little short, steps drawn twice a little long.
    assert 0.90 <= covered / total <= 0.99


def test_welch_gives_the_interval_of_a_published_example():
    """Welch's test on R's `sleep` data (Student 1908; `t.test(extra ~ group, sleep)` in R's manual): 95 % interval of
    the difference -3.3654832 to 0.2054832 about -1.58, with 17.776 degrees of freedom."""
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    a, b = (Scored(np.exp(logs)[:, None], np.ones((10, 1))) for logs in (second, first))
    found = welch(a, b).per_step
    assert np.log([found.estimate, found.low, found.high]) == pytest.approx([-1.58, -3.3654832, 0.2054832], abs=1e-6)


def test_welch_wants_two_launches_and_stands_identical_ones():
    two, one = side(1, 1.0, num_launches=2), side(1, 1.0, num_launches=1)
    with pytest.raises(ComparisonError) as caught:
        welch(two, one)
    assert str(caught.value) == (
        "Welch's interval compares launches with each other, and one launch has no spread. Got: 1 launch of B. "
        "Expected: at least 2 of each side. Launch it again, or leave out --welch."
    )
    same = Scored(np.full((2, 3), 2.0), np.ones((2, 3)))
    assert welch(same, same).per_step == Interval(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("per_step", "per_token", "verdict"),
    [
        ((1.2, 1.3), (1.12, 1.3), "faster"),
        ((1.2, 1.3), (1.11, 1.3), "no verdict"),  # one of the two does not clear the margin
        ((0.7, 0.89), (0.6, 0.8), "slower"),
        ((0.7, 0.89), (0.6, 0.91), "no verdict"),
        ((1.2, 1.3), (0.6, 0.8), "no verdict"),
    ],
)
def test_a_verdict_needs_both_intervals_beyond_the_margin(per_step, per_token, verdict):
    assert Speedup(Interval(1.0, *per_step), Interval(1.0, *per_token)).verdict(1.111) == verdict
