"""Do sampler and trainer give a token the same log-prob? Measured every step, before any clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from locojax.errors import NumericsError

RATIO_BAND = (0.99, 1.01)
# exp of more than this is past every ratio worth telling apart, and 2**64 of its squares still fit in a double.
_MAX_LOG_RATIO = 50.0


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Statistics of d = trainer - sampler log-prob over a batch's sampled tokens, in nats; ratios are exp(d).

    All are 0 when there was no token. `mean_signed` and `half_mean_square` are the cookbook's v1 and v2; the first
    hides gaps that cancel.
    """

    num_tokens: int
    mean: float  # of |d|
    p99: float  # of |d|
    max: float  # of |d|
    mean_signed: float
    half_mean_square: float
    k3: float  # mean of exp(d) - 1 - d: Schulman's low-variance, never negative estimator of KL(sampler || trainer)
    ratios_outside: float  # share of ratios outside RATIO_BAND
    num_not_finite: int  # tokens left out of the rest


def mismatch(sampler: Sequence[np.ndarray], trainer: Sequence[np.ndarray]) -> Mismatch:
    """Compares log-probs of the same tokens under the same weights.

    Args:
      sampler, trainer: one array per completion, each over that completion's tokens.

    Raises:
      ValueError: the two don't line up.
    """
    for index, (ours, theirs) in enumerate(zip(sampler, trainer, strict=True)):
        if np.shape(ours) != np.shape(theirs):
            raise ValueError(f"completion {index}: sampler has {np.shape(ours)} log-probs, trainer {np.shape(theirs)}")
    empty = [np.zeros(0)]
    difference = np.concatenate([*trainer, *empty]).astype(np.float64) - np.concatenate([*sampler, *empty])
    finite = difference[np.isfinite(difference)]
    num_not_finite = int(difference.size - finite.size)
    if finite.size == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, num_not_finite)
    size = np.abs(finite)
    bounded = np.clip(finite, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = np.exp(bounded)
    low, high = RATIO_BAND
    return Mismatch(
        num_tokens=int(finite.size),
        mean=float(size.mean()),
        p99=float(np.percentile(size, 99)),
        max=float(size.max()),
        mean_signed=float(-finite.mean()),
        half_mean_square=float(0.5 * np.mean(finite**2)),
        k3=float(np.mean(np.expm1(bounded) - bounded)),
        ratios_outside=float(np.mean((ratio < low) | (ratio > high))),
        num_not_finite=num_not_finite,
    )


def check_first_step(found: Mismatch, max_gap: float) -> None:
    """The gate before the first update: a sampler that isn't the trainer's policy must not be trained on.

    Args:
      max_gap: largest mean |d| to train with, in nats (`run.max_gap`).

    Raises:
      NumericsError: the gap is larger, or a log-prob is not finite.
    """
    if found.num_not_finite:
        raise NumericsError(
            f"{found.num_not_finite} log-probs of sampled tokens are not finite at the first step",
            remedy="Check the model's weights, and try training.compute_dtype=float32",
        )
    if found.mean > max_gap:
        raise NumericsError(
            "Sampler and trainer disagree too much to train: mean |difference of log-probs| over "
            f"{found.num_tokens} tokens at the first step",
            got=f"{found.mean:.3g} nats",
            expected=f"at most {max_gap:g} (run.max_gap)",
            remedy="Sample from the weights that are trained; compare rollout.dtype with training.compute_dtype",
        )
