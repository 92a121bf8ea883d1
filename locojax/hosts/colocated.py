"""The colocated loop: the same devices generate and train, in turns, synchronously and on-policy.

    what       makes                      waits for             unblocks
    admit      requests                   prompts in order      prefill and decode, the engine's own phases
    decode     completions as they end    nothing               grading, beside it in other processes
    reward     graded groups              the last grade        advantages
    train      new weights                the last group        publish
    publish    the engine's weights       the update            the next step
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console

from locojax.config import Config, run_folder
from locojax.errors import DataError
from locojax.hosts import learning
from locojax.hosts.alarms import alarms
from locojax.hosts.checkpoint import Checkpoints, Position
from locojax.hosts.generation import Generation
from locojax.hosts.interrupt import Interrupts
from locojax.hosts.metrics import RunResult
from locojax.hosts.mismatch import check_first_step
from locojax.hosts.phases import StepTimer
from locojax.hosts.progress import Progress
from locojax.hosts.runlog import RunLog
from locojax.hosts.setup import Prepared, describe, prepare
from locojax.hosts.worker import HostWorker
from locojax.rl.batches import BatchOrder
from locojax.rl.grading import Grader
from locojax.types import OptimStepResult

__all__ = ["describe", "run"]

CHECKPOINTS = "checkpoints"


def run(config: Config, *, resume: bool, timer: StepTimer) -> RunResult:
    """Runs `config.run.num_steps` steps, or those left of them, and returns how it ended.

    Raises:
      LocoError: of the category at fault, with the run folder and the last checkpoint intact.
      KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint of the last whole step was written.
    """
    start = time.perf_counter()
    with Progress(Console(), config.run.num_steps) as progress:
        prepared = prepare(config, progress.begin)
        config = prepared.config
        for prompt in prepared.dropped[:1]:
            progress.note(f"dropped {len(prepared.dropped)} prompts that are too long, {prompt.prompt_id} first")
        with _checkpoints(config) as checkpoints, Interrupts(progress.note) as interrupts:
            position = checkpoints.position() if resume else Position(0, None, None)
            with RunLog(config, resume_at=position.next_step if resume else None) as log, _grader(prepared) as grader:
                progress.begin("load", "weights into trainer and sampler")
                worker = HostWorker(prepared.model, config, timer.phase)
                if resume:
                    worker.trainer.restore(checkpoints.restore(worker.trainer.state()))
                    progress.note(f"resumed after {position.next_step} of {config.run.num_steps} steps")
                loop = Loop(prepared, worker, grader, log, progress, checkpoints, timer, interrupts, position)
                loop.run()
    end = loop.position
    seconds = time.perf_counter() - start
    return RunResult(end.next_step, end.held_out_first, end.held_out, seconds, str(log.folder))


@contextlib.contextmanager
def _checkpoints(config: Config) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(run_folder(config) / CHECKPOINTS, config)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def _grader(prepared: Prepared) -> Grader:
    grading = prepared.config.grading
    return Grader(
        prepared.reward,
        num_workers=grading.num_workers,
        deadline_seconds=grading.deadline_seconds,
        max_unscorable_rate=grading.max_unscorable_rate,
    )


class Loop:
    """One run between two of its steps: the worker's weights, and the position that belongs to them."""

    def __init__(
        self,
        prepared: Prepared,
        worker: HostWorker,
        grader: Grader,
        log: RunLog,
        progress: Progress,
        checkpoints: Checkpoints,
        timer: StepTimer,
        interrupts: Interrupts,
        position: Position,
    ):
        self.config, self.position = prepared.config, position
        self._prepared, self._worker, self._log, self._progress = prepared, worker, log, progress
        self._checkpoints, self._timer, self._interrupts = checkpoints, timer, interrupts
        self._generation = Generation(worker, grader, prepared.config, timer, interrupts.check)
        run_config = prepared.config.run
        self._order = BatchOrder(len(prepared.train), run_config.prompts_per_step, run_config.seed)
        self._num_idle_steps = 0

    def run(self) -> None:
        """The steps that are left. A checkpoint is written at the end, and when the run is interrupted."""
        run_config = self.config.run
        self._worker.publish()
        self._progress.begin("compile", "prefill and decode")
        start = time.perf_counter()
        held_out = self._prepared.held_out if self._evaluates else ()
        num_programs = self._generation.warm_up(self._prepared.train, held_out)
        self._progress.note(f"{num_programs} sampling programs ready in {time.perf_counter() - start:.0f} s")
        try:
            if self.position.next_step == 0 and self._evaluates:
                accuracy = self._evaluate(0)
                self.position = Position(0, accuracy, accuracy)
                self._progress.note(f"held-out accuracy {accuracy:.2f} before training")
            for step_index in range(self.position.next_step, run_config.num_steps):
                self._step(step_index)
        except KeyboardInterrupt:
            self._progress.note(f"saving a checkpoint, after {self.position.next_step} steps")
            self._save()
            raise
        if run_config.checkpoint_at_end and self._checkpoints.latest() != self.position.next_step:
            self._save()

    @property
    def _evaluates(self) -> bool:
        return self.config.run.eval_every > 0 and bool(self._prepared.held_out)

    def _save(self) -> None:
        self._checkpoints.save(self._worker.trainer.state(), self.position)
        self._checkpoints.wait()

    def _step(self, step_index: int) -> None:
        run_config, number = self.config.run, step_index + 1
        with self._timer.step(step_index):
            prompts = [self._prepared.train[index] for index in self._order.at(step_index)]

            def show(done: int, total: int, tokens_per_second: float) -> None:
                self._progress.generate(step_index, done, total, tokens_per_second)

            generated = self._generation.rollouts(prompts, step_index, show)
            with self._timer.phase("reward"):
                lesson = learning.lesson(generated.groups, self.config)
            self._interrupts.check()  # from here to the position the step is finished, come what may
            trained = self._train(step_index, lesson)
            self._worker.publish()
            due = number % max(run_config.eval_every, 1) == 0 or number == run_config.num_steps
            accuracy = self._evaluate(step_index) if self._evaluates and due else None
            self.position = self.position.after(step_index, accuracy)
            if run_config.checkpoint_every and number % run_config.checkpoint_every == 0:
                with self._timer.phase("checkpoint"):
                    self._checkpoints.save(self._worker.trainer.state(), self.position)
            self._log.samples(step_index, generated.groups, [result.values.tolist() for result in lesson.advantages])
        before = self.position.held_out_first if step_index == 0 else None
        metrics = learning.step_metrics(
            self._timer.last(),
            generated.groups,
            lesson,
            trained,
            tokens_per_second=generated.tokens_per_second,
            held_out_before=before,
            held_out=accuracy,
        )
        self._log.step(metrics)
        self._progress.step(metrics, alarms(self._log.history))

    def _train(self, step_index: int, lesson: learning.Lesson) -> learning.Trained:
        """The batch's optimizer steps. The gap is the first one's, whose weights are those that sampled."""
        config, version = self.config, self._worker.policy_version
        if not lesson.data:
            self._count_idle_step()
            reason = "no group's rewards differ, so there was nothing to learn from"
            return learning.Trained(OptimStepResult(False, version, {}, reason), (), learning.gap((), ()))
        self._num_idle_steps = 0
        if config.loss.kl_coefficient > 0:
            lesson = learning.with_reference(lesson, self._worker.reference_logprobs(lesson.data), config)
        if learning.needs_old_logprobs(config):
            lesson = learning.with_old(lesson, self._worker.logprobs(lesson.data))
        results, gap, update = [], learning.gap((), ()), None
        parts = learning.substeps(learning.normalised(lesson, config), config.training.substeps)
        for index, data in enumerate(parts):
            self._progress.train(step_index, index, len(parts))
            settings = learning.loss_config(config, lesson.totals)
            results.append(self._worker.forward_backward(data, config.loss.name, settings))
            if index == 0:
                gap = learning.gap(data, results[0].outputs)
                if step_index == 0:
                    check_first_step(gap, config.run.max_gap)
            update = self._worker.optim_step(
                learning.adam_params(config, step_index * config.training.substeps + index)
            )
        assert update is not None, "substeps leaves no part out when there are data"
        return learning.Trained(update, tuple(result.metrics for result in results), gap)

    def _count_idle_step(self) -> None:
        self._num_idle_steps += 1
        if self._num_idle_steps >= self.config.run.max_idle_steps:
            raise DataError(
                f"The last {self._num_idle_steps} steps taught nothing: in every group all rewards were equal",
                remedy="Use prompts that are sometimes solved, a larger rollout.group_size, or a finer reward; "
                "run.max_idle_steps allows more",
            )

    def _evaluate(self, step_index: int) -> float:
        def show(done: int, total: int, tokens_per_second: float) -> None:
            self._progress.evaluate(step_index, done, total)

        accuracy, groups = self._generation.accuracy(self._prepared.held_out, show)
        self._log.held_out(self._worker.policy_version, groups)
        return accuracy
