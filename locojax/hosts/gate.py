"""The gate before the first update: a sampler that isn't the trainer's policy must not be trained on."""

from __future__ import annotations

from locojax.errors import NumericsError
from locojax.training.mismatch import Mismatch


def check_first_step(found: Mismatch, max_gap: float) -> None:
    """Refuses to train on a first batch whose sampler and trainer log-probs are absurdly far apart.

    Args:
      found: over the batch's sampled tokens, under the same weights.
      max_gap: largest mean |gap| to train with, in nats (`run.max_gap`).

    Raises:
      NumericsError: the gap is larger, or a log-prob is not finite.
    """
    if found.num_nonfinite:
        raise NumericsError(
            f"{found.num_nonfinite} log-probs of sampled tokens are not finite at the first step",
            remedy="Check the model's weights, and try training.compute_dtype=float32",
        )
    if found.mean_abs > max_gap:
        raise NumericsError(
            "Sampler and trainer disagree too much to train: mean |difference of log-probs| over "
            f"{found.num_tokens} tokens at the first step",
            got=f"{found.mean_abs:.3g} nats",
            expected=f"at most {max_gap:g} (run.max_gap)",
            remedy="Sample from the weights that are trained; compare rollout.dtype with training.compute_dtype",
        )
