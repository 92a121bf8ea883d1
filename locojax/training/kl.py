"""Estimators of KL(policy || reference) from tokens that the policy drew, and the bound on log-ratios. No jax needed.

Per token, with d = log-prob under the policy - log-prob under the reference (Schulman, "Approximating KL divergence",
2020): k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d.

What they do differs between the two places a KL term can go:

- *in the reward* (a constant subtracted from the advantage; no gradient passes through it) k1 gives the gradient of
  KL(policy || reference), as the score function multiplies it: E[d grad log p]. This is the sound choice for k1.
- *in the loss* (differentiated), the expected on-policy gradient is: k1: E[grad log p] = 0, so it regularises nothing
  and only adds noise; k2: E[d grad log p], that of KL(policy || reference); k3: -E[(ref / policy) grad log p], that of
  the other direction, KL(reference || policy). tests/test_losses.py shows all three against finite differences.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np

from locojax.errors import RequestError

KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clipped to +-20 *before* exp: a ratio is at most 4.9e8, and finite. Clipping exp's result instead
would leave inf * 0 = NaN in the gradient. Beyond the bound the gradient is 0: such a token is broken."""


def kl_estimate(logprobs: Any, ref_logprobs: Any, kind: str, xp: ModuleType = np) -> Any:
    """Per-token estimate of a KLEstimator's kind, shaped like its arguments. `xp` is numpy, or jax.numpy inside a loss.

    d is clipped to +-LOG_RATIO_BOUND for k3, whose exp would overflow; k1 and k2 are exact.
    Example: kl_estimate(-1, -2, "k1") -> 1, "k2" -> 0.5, "k3" -> 0.3679 (C11)
    """
    if kind not in get_args(KLEstimator):
        raise RequestError(f"Unknown KL estimator {kind!r}", expected=", ".join(get_args(KLEstimator)))
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    d = xp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return xp.expm1(-d) + d


def kl_in_reward(
    advantages: np.ndarray,
    logprobs: np.ndarray,
    ref_logprobs: np.ndarray,
    mask: np.ndarray,
    *,
    kind: str,
    coefficient: float,
) -> np.ndarray:
    """Advantages f32[N] less coefficient x the KL estimate where `mask` is nonzero: a KL term in the reward.

    `logprobs` are those of the policy that drew the tokens. Aggregation weights are multiplied in afterwards.
    """
    penalty = coefficient * kl_estimate(np.asarray(logprobs, np.float64), np.asarray(ref_logprobs, np.float64), kind)
    return (np.asarray(advantages, np.float64) - np.where(np.asarray(mask) != 0, penalty, 0.0)).astype(np.float32)
