"""A graded batch -> optimizer steps on all hosts: what is planned alone, agreed on once, and then computed together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from locojax.config import Config
from locojax.hosts import learning
from locojax.hosts.learning import Lesson, Trained
from locojax.hosts.meeting import Agreed
from locojax.hosts.mismatch import check_first_step
from locojax.hosts.worker import HostWorker
from locojax.training.plan import Plan
from locojax.types import Datum, OptimStepResult

NOTHING_LEARNT = "no group's rewards differ, so there was nothing to learn from"

ShowPart = Callable[[int, int], None]
"""(optimizer step, of how many)."""


@dataclasses.dataclass(frozen=True)
class Updates:
    """What one host's share of a batch asks of the trainer. Filled by `plan_updates`.

    Attributes:
      parts: of each optimizer step, the indices of its data in the lesson.
      scoring: of the passes before the first one, over all data; None: there are none, or one host alone.
      steps: of each part; empty for one host alone, which has nobody to tell.
    """

    parts: tuple[tuple[int, ...], ...]
    scoring: Plan | None
    steps: tuple[Plan, ...]

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """What is told to the other hosts: one row of integers for each plan."""
        plans = self.steps if self.scoring is None else (self.scoring, *self.steps)
        return tuple(plan.counts.ints for plan in plans)


def plan_updates(
    worker: HostWorker, lesson: Lesson, config: Config, places: Sequence[int], *, num_hosts: int
) -> Updates:
    """Cuts the lesson into optimizer steps and, for several hosts, packs each; asks no other host.

    Args:
      places: of each of the lesson's groups, its place in the whole step's batch: a part is a stretch of that, so that
        the number of hosts doesn't change it.
    """
    number, size = config.training.substeps, config.run.prompts_per_step
    part_of = [places[group] * number // size for group in lesson.group_of]
    parts = tuple(tuple(i for i, part in enumerate(part_of) if part == index) for index in range(number))
    if num_hosts == 1:
        return Updates(parts, None, ())
    data = learning.with_placeholders(lesson, config)
    settings = learning.loss_config(config, lesson.totals)
    scores_first = config.loss.kl_coefficient > 0 or learning.needs_old_logprobs(config)
    scoring = worker.plan_scoring(lesson.data) if scores_first else None
    steps = tuple(worker.plan([data[i] for i in part], config.loss.name, settings) for part in parts)
    return Updates(parts, scoring, steps)


def train(
    worker: HostWorker,
    config: Config,
    lesson: Lesson,
    updates: Updates,
    agreed: Agreed,
    *,
    step_index: int,
    show: ShowPart,
) -> Trained:
    """The batch's optimizer steps, all hosts together; each that has data on any host.

    The gap is the first one's, whose weights are those that sampled.

    Raises:
      NumericsError: at the first step, sampler and trainer disagree by more than `run.max_gap`.
    """
    lesson = dataclasses.replace(lesson, totals=agreed.totals(config.rollout.max_tokens))
    nothing = learning.gap((), ())
    if agreed.stats.num_trained == 0:
        return Trained(OptimStepResult(False, worker.policy_version, {}, NOTHING_LEARNT), (), nothing)
    told = list(agreed.told)
    scoring = (updates.scoring, told.pop(0)) if updates.scoring is not None else (None, None)
    data = loss_inputs(worker, config, lesson, *scoring)
    settings = learning.loss_config(config, lesson.totals)
    results, gap, update = [], nothing, None
    for index, part in enumerate(updates.parts):
        planned = (updates.steps[index], told[index]) if updates.steps else (None, None)
        if not _somebody_has_data(part, planned[1]):
            continue
        show(index, len(updates.parts))
        own: list[Datum] = [data[i] for i in part]
        results.append(worker.forward_backward(own, config.loss.name, settings, *planned))
        if len(results) == 1:
            gap = learning.gap(own, results[0].outputs)
            if step_index == 0:
                check_first_step(gap, config.run.max_gap)
        update = worker.optim_step(learning.adam_params(config, step_index * config.training.substeps + index))
    assert update is not None, "some part has data when the batch has"
    return Trained(update, tuple(result.metrics for result in results), gap)


def loss_inputs(
    worker: HostWorker, config: Config, lesson: Lesson, plan: Plan | None = None, told: np.ndarray | None = None
) -> tuple[Datum, ...]:
    """The lesson's data with all that the loss reads, under the weights as they are; `plan`, `told`: of the passes."""
    if config.loss.kl_coefficient > 0:
        lesson = learning.with_reference(lesson, worker.reference_logprobs(lesson.data, plan, told), config)
    if learning.needs_old_logprobs(config):
        lesson = learning.with_old(lesson, worker.logprobs(lesson.data, plan, told))
    return learning.normalised(lesson, config)


def _somebody_has_data(part: Sequence[int], told: np.ndarray | None) -> bool:
    return bool(part) if told is None else bool(told[:, 0].any())  # column 0: `Counts.num_data`
