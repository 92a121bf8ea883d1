"""Graded groups -> what the trainer is given: advantages, training data, denominators, the step's record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from locojax.config import Config
from locojax.hosts.meeting import Agreed, batch_totals
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.mismatch import Mismatch, mismatch
from locojax.hosts.phases import StepAccount
from locojax.rl.advantages import AdvantageResult, advantages
from locojax.rl.datums import DatumStats, group_datums, sum_stats
from locojax.training.aggregation import Totals, aggregation_weights
from locojax.training.kl import kl_in_reward
from locojax.types import AdamParams, Datum, Group, OptimStepResult

EXTRA_SUMS = ("entropy", "kl", "num_clipped", "num_nonfinite", "num_computed_tokens", "num_datum_tokens")
"""Of the trainer's sums, those that a step's record keeps; entropy as a mean over trained tokens."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What one batch of groups teaches. Filled by `lesson`.

    Attributes:
      data: empty if no group has a signal. Sums still: see `normalised`.
      group_of: of each datum, its group.
      totals: the denominators of these groups; of all hosts' once they are agreed on.
      advantages: per group, in the order of its rollouts.
      stats: counts over the groups.
    """

    data: tuple[Datum, ...]
    group_of: tuple[int, ...]
    totals: Totals
    advantages: tuple[AdvantageResult, ...]
    stats: DatumStats


def lesson(groups: Sequence[Group], config: Config) -> Lesson:
    """Advantages within each group, and the data of those that have a signal."""
    training, keeps_all = config.training, config.loss.kl_coefficient > 0
    results, parts = [], []
    for group in groups:
        result = advantages([rollout.reward.value for rollout in group.rollouts], training.advantage)
        results.append(result)
        parts.append(
            group_datums(group, result, mask_truncated=training.mask_truncated, keep_zero_variance=keeps_all)
        )
    stats = sum_stats(part.stats for part in parts)
    data = tuple(datum for part in parts for datum in part.datums)
    group_of = tuple(index for index, part in enumerate(parts) for _ in part.datums)
    return Lesson(data, group_of, batch_totals(stats, config.rollout.max_tokens), tuple(results), stats)


def normalised(learned: Lesson, config: Config) -> tuple[Datum, ...]:
    """The lesson's data with the aggregation's weights multiplied into advantages and weights.

    The denominators are known before anything is trained, so no cut of the batch can change the gradient.
    """
    masks = [datum.inputs["weights"] for datum in learned.data]
    weights = aggregation_weights(masks, config.loss.normalise, learned.totals)
    return tuple(
        Datum(datum.tokens, {**datum.inputs, "advantages": datum.inputs["advantages"] * weight, "weights": weight})
        for datum, weight in zip(learned.data, weights, strict=True)
    )


def with_reference(learned: Lesson, reference: Sequence[np.ndarray], config: Config) -> Lesson:
    """The lesson with a KL term to the reference policy, whose log-probs of each datum's targets are given.

    In the reward, the estimate is taken off the advantages; in the loss, the reference is handed to the loss.
    """
    loss, data = config.loss, []
    for datum, ref_logprobs in zip(learned.data, reference, strict=True):
        inputs = dict(datum.inputs)
        if loss.kl_in == "loss":
            inputs["ref_logprobs"] = ref_logprobs
        else:
            inputs["advantages"] = kl_in_reward(
                inputs["advantages"],
                inputs["logprobs"],
                ref_logprobs,
                inputs["weights"],
                kind=loss.kl,
                coefficient=loss.kl_coefficient,
            )
        data.append(Datum(datum.tokens, inputs))
    return dataclasses.replace(learned, data=tuple(data))


def needs_old_logprobs(config: Config) -> bool:
    """Whether the loss corrects for the gap between sampler and trainer, and so must know the trainer's log-probs."""
    return config.loss.tis_cap is not None or config.loss.icepop_low is not None


def with_old(learned: Lesson, old: Sequence[np.ndarray]) -> Lesson:
    """The lesson with the trainer's own log-probs of each datum's targets, before the batch's first optimizer step."""
    data = tuple(
        Datum(datum.tokens, {**datum.inputs, "old_logprobs": logprobs})
        for datum, logprobs in zip(learned.data, old, strict=True)
    )
    return dataclasses.replace(learned, data=data)


def loss_config(config: Config, totals: Totals) -> dict[str, Any]:
    """The loss's settings, as the trainer takes them; only those that the loss has, and that were set."""
    loss = config.loss
    found: dict[str, Any] = {}
    if loss.name in ("ppo", "cispo", "gspo"):
        bounds = {"clip_low_threshold": loss.clip_low, "clip_high_threshold": loss.clip_high}
        found |= {name: value for name, value in bounds.items() if value != "auto"}
    if loss.name == "dro":
        # Its quadratic term has no advantage to carry the denominator.
        found["beta"] = loss.dro_beta / totals.denominator(loss.normalise)
    if loss.kl != "none" and loss.kl_in == "loss":
        found |= {"kl": loss.kl, "kl_coefficient": loss.kl_coefficient}
    corrections = {"tis_cap": loss.tis_cap, "icepop_low": loss.icepop_low, "icepop_high": loss.icepop_high}
    return found | {name: value for name, value in corrections.items() if value is not None}


def with_placeholders(learned: Lesson, config: Config) -> tuple[Datum, ...]:
    """The lesson's data as the loss will see them, numbers aside: every input it will have, and every token on which
    it may come to depend. What is packed with them fits them when the numbers are known."""
    data = []
    for datum in learned.data:
        inputs, zeros = dict(datum.inputs), np.zeros(len(datum.tokens), np.float32)
        if config.loss.kl_coefficient > 0 and config.loss.kl_in == "loss":
            inputs["ref_logprobs"] = zeros
        elif config.loss.kl_coefficient > 0:
            inputs["advantages"] = inputs["weights"]
        if needs_old_logprobs(config):
            inputs["old_logprobs"] = zeros
        data.append(Datum(datum.tokens, inputs))
    return tuple(data)


def adam_params(config: Config, step_index: int) -> AdamParams:
    """AdamW's settings for optimizer step `step_index` (from 0) of the run."""
    optimizer = config.optimizer
    total = config.run.num_steps * config.training.substeps
    return AdamParams(
        learning_rate=optimizer.learning_rate * schedule(config, step_index, total),
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        grad_clip_norm=optimizer.grad_clip_norm,
    )


def schedule(config: Config, step_index: int, total: int) -> float:
    """Share of the peak learning rate: linear warm-up, then constant, linear or cosine decay to `final_share`."""
    optimizer = config.optimizer
    if step_index < optimizer.warmup_steps:
        return (step_index + 1) / optimizer.warmup_steps
    done = (step_index - optimizer.warmup_steps) / max(total - 1 - optimizer.warmup_steps, 1)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))}
    if optimizer.schedule == "constant":
        return 1.0
    return optimizer.final_share + (1 - optimizer.final_share) * max(left[optimizer.schedule], 0.0)


def gap(data: Sequence[Datum], outputs: Sequence[Mapping[str, np.ndarray]]) -> Mismatch:
    """Sampler against trainer, over the trained tokens of data that the trainer scored with the sampler's weights.

    A token without an advantage, whose loss has no other term, was not scored.
    """
    masks = [
        (datum.inputs["weights"] > 0) & ((datum.inputs["advantages"] != 0) | ("ref_logprobs" in datum.inputs))
        for datum in data
    ]
    return mismatch(
        [datum.inputs["logprobs"][mask] for datum, mask in zip(data, masks, strict=True)],
        [output["logprobs"][mask] for output, mask in zip(outputs, masks, strict=True)],
    )


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training made of a lesson. Filled by the loop; `sums` holds each sub-step's metrics."""

    update: OptimStepResult
    sums: tuple[Mapping[str, float], ...]
    gap: Mismatch

    def total(self, name: str) -> float:
        return sum(metrics[f"{name}:sum"] for metrics in self.sums)


def step_metrics(
    account: StepAccount,
    agreed: Agreed,
    trained: Trained,
    *,
    held_out_before: float | None,
    held_out: float | None,
    extra: Mapping[str, float],
) -> StepMetrics:
    """The step's record, of the hosts whose reports `agreed` has; account and gap are of this host alone.

    Args:
      extra: figures besides those of the loss.

    Shares of nothing are 0, a mean of nothing is NaN.
    """
    stats, rewards, gap, update = agreed.stats, agreed.rewards, trained.gap, trained.update
    samples, num_groups = max(stats.num_samples, 1), max(stats.num_groups, 1)
    num_tokens, row_tokens = trained.total("num_tokens"), trained.total("num_row_tokens")
    sums = {name: trained.total(name) for name in EXTRA_SUMS if trained.sums and f"{name}:sum" in trained.sums[0]}
    if num_tokens and "entropy" in sums:
        sums["entropy"] /= num_tokens
    return StepMetrics(
        step=account.step,
        policy_version=update.policy_version,
        account=account,
        reward_mean=rewards.mean if rewards.count else math.nan,
        reward_std=rewards.std,
        num_completions=stats.num_samples,
        completion_tokens_mean=stats.num_completion_tokens / samples,
        truncated_share=stats.num_truncated / samples,
        zero_variance_share=stats.num_zero_variance_groups / num_groups,
        unscorable_share=stats.num_unscorable / samples,
        generated_tokens_per_second=agreed.tokens_per_second,
        trained_tokens=int(num_tokens),
        padding_share=1 - trained.total("num_computed_tokens") / row_tokens if row_tokens else 0.0,
        gap_mean=gap.mean,
        gap_p99=gap.p99,
        gap_max=gap.max,
        gap_k3=gap.k3,
        ratios_outside=gap.ratios_outside,
        loss=trained.total("loss"),
        grad_norm=update.metrics.get("grad_norm", 0.0),
        learning_rate=update.metrics.get("learning_rate", 0.0),
        held_out_before=held_out_before,
        held_out=held_out,
        update_skipped=update.skipped_because,
        extra={**sums, **extra},
        generate_seconds=agreed.generate_seconds if len(agreed.reports) > 1 else (),
    )
