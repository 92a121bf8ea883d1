"""How many times faster one side is than another, with an interval: from seconds and output tokens of scored steps.

The sides are A and B; a speed-up above 1 means that A needs less time. Each side was launched several times, each
launch took the same steps. Legend: R resamples, L launches, S steps.

Two estimates of the same question:

* per step: B's mean seconds per step over A's.
* per token: B's seconds per output token over A's, each a ratio of sums, so that a long step weighs as much as it
  took. Output tokens are those that were sampled in the scored steps, truncated completions' included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from locojax.errors import ComparisonError

Verdict = Literal["faster", "slower", "no verdict"]
LEVEL = 0.95
NUM_RESAMPLES = 10_000
_BLOCK = 2_000_000  # drawn step indices held at once, 16 MB


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval. Example: Interval(1.99, 1.90, 2.08)"""

    estimate: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Scored:
    """One side's scored steps: `seconds` f64[L, S] and output `tokens` f64[L, S]. Filled by `compare`."""

    seconds: np.ndarray
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Speedup:
    """A over B, per step and per output token. Example: Speedup(Interval(2.0, 1.9, 2.1), Interval(2.0, 1.8, 2.2))"""

    per_step: Interval
    per_token: Interval

    def verdict(self, margin: float) -> Verdict:
        """What is said of A: `faster` if both intervals lie above `margin`, `slower` if both lie below 1 / margin."""
        both = (self.per_step, self.per_token)
        if all(interval.low > margin for interval in both):
            return "faster"
        if all(interval.high < 1 / margin for interval in both):
            return "slower"
        return "no verdict"


def bootstrap(a: Scored, b: Scored, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Speedup:
    """95 % percentile-bootstrap intervals (Efron and Tibshirani 1993, chapter 13).

    The two levels of the data are resampled as they arose (Davison and Hinkley 1997, section 3.8): on each side L of
    its L launches with replacement, then S of each drawn launch's S steps with replacement; A and B independently. The
    figures of a resample are the estimates of the module's text, and the interval's ends their 2.5th and 97.5th
    percentile. With one launch on a side, the interval holds for that launch alone.
    """
    generators = [np.random.Generator(np.random.PCG64(stream)) for stream in np.random.SeedSequence(seed).spawn(2)]
    seconds_a, tokens_a = _resampled_sums(a, generators[0], num_resamples)
    seconds_b, tokens_b = _resampled_sums(b, generators[1], num_resamples)
    per_step = (seconds_b / b.seconds.size) / (seconds_a / a.seconds.size)
    per_token = (seconds_b / tokens_b) / (seconds_a / tokens_a)
    return Speedup(_percentiles(_per_step(a, b), per_step), _percentiles(_per_token(a, b), per_token))


def welch(a: Scored, b: Scored) -> Speedup:
    """95 % intervals from one logarithm per launch (Welch 1947): for modes of one stack, whose launches differ little.

    A launch's value is the log of its seconds per step, or per output token. The speed-up is the exponential of the
    difference of the sides' means: a ratio of geometric means over launches. Variances may differ between the sides;
    the degrees of freedom are Welch and Satterthwaite's.

    Raises:
      ComparisonError: a side has a single launch, which says nothing of how launches vary.
    """
    for name, side in (("A", a), ("B", b)):
        if len(side.seconds) < 2:
            raise ComparisonError(
                "Welch's interval compares launches with each other, and one launch has no spread",
                got=f"{len(side.seconds)} launch of {name}",
                expected="at least 2 of each side",
                remedy="Launch it again, or leave out --welch",
            )
    per_step = _welch_interval(_log_means(a, None), _log_means(b, None))
    return Speedup(per_step, _welch_interval(_log_means(a, a.tokens), _log_means(b, b.tokens)))


def _per_step(a: Scored, b: Scored) -> float:
    return float(b.seconds.mean() / a.seconds.mean())


def _per_token(a: Scored, b: Scored) -> float:
    return float((b.seconds.sum() / b.tokens.sum()) / (a.seconds.sum() / a.tokens.sum()))


def _resampled_sums(side: Scored, generator: np.random.Generator, num_resamples: int) -> tuple[np.ndarray, np.ndarray]:
    """f64[R] seconds and f64[R] tokens: the sums over a resample's launches and steps."""
    num_launches, num_steps = side.seconds.shape
    sums = []
    block = max(1, _BLOCK // side.seconds.size)
    for start in range(0, num_resamples, block):
        size = min(block, num_resamples - start)
        launches = generator.integers(num_launches, size=(size, num_launches, 1))
        steps = generator.integers(num_steps, size=(size, num_launches, num_steps))
        sums.append([values[launches, steps].sum((1, 2)) for values in (side.seconds, side.tokens)])
    seconds, tokens = np.concatenate(sums, axis=1)
    return seconds, tokens


def _percentiles(estimate: float, resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(estimate, float(low), float(high))


def _log_means(side: Scored, per: np.ndarray | None) -> np.ndarray:
    """f64[L]: log of each launch's seconds per step, or per unit of `per`."""
    amount: Sequence[float] | np.ndarray = [side.seconds.shape[1]] if per is None else per.sum(1)
    return np.log(side.seconds.sum(1) / np.asarray(amount, np.float64))


def _welch_interval(a: np.ndarray, b: np.ndarray) -> Interval:
    from scipy import stats  # half a second to import, for those who ask for it

    estimate = float(np.exp(b.mean() - a.mean()))
    if np.ptp(a) == 0 and np.ptp(b) == 0:  # its standard error is 0, which scipy divides by
        return Interval(estimate, estimate, estimate)
    found = stats.ttest_ind(b, a, equal_var=False).confidence_interval(LEVEL)
    return Interval(estimate, float(np.exp(found.low)), float(np.exp(found.high)))
