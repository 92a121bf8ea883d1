"""What is going wrong with a run, in plain words, from its metrics alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from locojax.hosts.metrics import StepMetrics

MAX_TRUNCATED = 0.25
MAX_ZERO_VARIANCE = 0.8
MAX_UNSCORABLE = 0.01
FLAT_STEPS = 20  # how many steps without visible movement make a flat reward
GAP_FACTOR = 10.0  # over the running median; a ten-fold jump is what broken weight syncs have shown
GAP_FLOOR = 1e-6  # float32 rounding: where the usual gap is 0, ten times 0 means nothing
SOLVED = 0.9


def alarms(history: Sequence[StepMetrics]) -> dict[str, str]:
    """The alarms of the last step of `history` (steps in order): kind -> what to tell, most urgent first."""
    if not history:
        return {}
    checks = {"skipped": _skipped, "gap": _gap, "unscorable": _unscorable, "truncated": _truncated}
    checks |= {"zero_variance": _zero_variance, "flat": _flat}
    return {kind: text for kind, check in checks.items() if (text := check(history)) is not None}


def _skipped(history: Sequence[StepMetrics]) -> str | None:
    last = history[-1]
    if last.update_skipped is None:
        return None
    return f"Step {last.step}'s update was skipped: {last.update_skipped}. The weights are unchanged."


def _gap(history: Sequence[StepMetrics]) -> str | None:
    last, before = history[-1], [metrics.gap_mean for metrics in history[:-1]]
    if len(before) < 3:
        return None
    usual = statistics.median(before)
    if last.gap_mean <= GAP_FACTOR * max(usual, GAP_FLOOR):
        return None
    return (
        f"Sampler and trainer disagree: their log-probs differ by {last.gap_mean:.2g} nats on average, "
        f"and usually by {usual:.2g}. Suspect the weight publish or a numeric change; the gradient is off-policy."
    )


def _unscorable(history: Sequence[StepMetrics]) -> str | None:
    share = history[-1].unscorable_share
    if share <= MAX_UNSCORABLE:
        return None
    return f"{share:.1%} of the completions could not be graded. They are left out; the samples file has the errors."


def _truncated(history: Sequence[StepMetrics]) -> str | None:
    share = history[-1].truncated_share
    if share < MAX_TRUNCATED:
        return None
    return (
        f"{share:.0%} of the completions were cut off before they ended. "
        "Raise rollout.max_tokens, or set training.mask_truncated=true."
    )


def _zero_variance(history: Sequence[StepMetrics]) -> str | None:
    last = history[-1]
    if last.zero_variance_share < MAX_ZERO_VARIANCE or last.reward_mean >= SOLVED:
        return None
    return (
        f"In {last.zero_variance_share:.0%} of the groups every completion got the same reward, so they teach nothing. "
        "The prompts are too hard (or too easy) for this model, or rollout.group_size is too small."
    )


def _flat(history: Sequence[StepMetrics]) -> str | None:
    """Two halves of the window whose means differ by less than two standard errors have not visibly moved."""
    rewards = [metrics.reward_mean for metrics in history[-FLAT_STEPS:]]
    if len(rewards) < FLAT_STEPS:
        return None
    early, late = rewards[: FLAT_STEPS // 2], rewards[FLAT_STEPS // 2 :]
    error = ((statistics.variance(early) + statistics.variance(late)) / (FLAT_STEPS // 2)) ** 0.5
    first, second = statistics.fmean(early), statistics.fmean(late)
    if abs(second - first) > 2 * error or second >= SOLVED:
        return None
    return (
        f"The reward has not moved in the last {FLAT_STEPS} steps ({first:.3g} -> {second:.3g}). "
        "Try a higher optimizer.learning_rate, a larger rollout.group_size or easier prompts."
    )
