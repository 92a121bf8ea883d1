"""The colocated loop: the same devices generate and train, in turns, synchronously and on-policy.

    what       makes                      waits for             unblocks
    admit      requests                   prompts in order      prefill and decode, the engine's own phases
    decode     completions as they end    nothing               grading, beside it in other processes
    reward     graded groups              the last grade        advantages
    agree      what all hosts have        every host's report   training                             meeting 1
    train      new weights                the last group        publish                              meeting 2
    publish    the engine's weights       the update            the next step                        meeting 3

Each host does this for its own share of the prompts; up to the first meeting it asks no other host for anything. With
one host the meetings are of one. Evaluations and checkpoints, which are not part of a step, meet in their own time.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from locojax.config import Config, run_folder
from locojax.errors import DataError
from locojax.hosts import folder_lock, learning
from locojax.hosts.alarms import alarms
from locojax.hosts.checkpoint import Position
from locojax.hosts.collector import Collector
from locojax.hosts.generation import NOTHING, Generated, Generation
from locojax.hosts.group import AgreedStop, Announcing, Group
from locojax.hosts.hostlog import HostLog
from locojax.hosts.interrupt import Interrupts, Stopped
from locojax.hosts.journal import Journal
from locojax.hosts.meeting import Agreed, Moments, Report, meet
from locojax.hosts.memory import StepMemory, running_out_is_told
from locojax.hosts.metrics import RunResult
from locojax.hosts.outset import Outset, check_same_settings, find_outset, open_journal
from locojax.hosts.phases import StepTimer
from locojax.hosts.pipelined import Pipeline, check_pipelined
from locojax.hosts.progress import Progress
from locojax.hosts.runlog import RunLog
from locojax.hosts.setup import Prepared, describe, prepare
from locojax.hosts.shared_checkpoints import CHECKPOINTS, SharedCheckpoints
from locojax.hosts.sharing import shares
from locojax.hosts.single_controller import Lockstepping, SingleGeneration
from locojax.hosts.startup import Startup
from locojax.hosts.stealing import Claims, StealingGeneration
from locojax.hosts.updates import Updates, plan_updates, train
from locojax.hosts.worker import HostWorker, local_engine
from locojax.rl.batches import BatchOrder
from locojax.rl.grading import Grader
from locojax.types import Prompt

__all__ = ["CHECKPOINTS", "describe", "run"]

def run(config: Config, *, resume: bool | None, timer: StepTimer, group: Group | None = None) -> RunResult:
    """Runs `config.run.num_steps` steps, or those left of them, and returns how it ended.

    With several hosts every host calls it; they find each other by `config.hosts` and the environment.

    Args:
      resume: goes on where the run was lost; None: if it has begun at all.
      group: the hosts, if they have been found already.

    Raises:
      LocoError: of the category at fault, with the run folder and the last checkpoint intact.
      Stopped: Ctrl-C or SIGTERM, on any host; a checkpoint of the last whole step was written, if there was time.
    """
    startup = Startup()
    with Group.start(config.hosts) if group is None else group as hosts:
        with Progress(Console(quiet=not hosts.is_first), config.run.num_steps) as progress:
            end, folder = _run(config, resume, Announcing(timer, hosts), hosts, progress, startup)
    return RunResult(end.next_step, end.held_out_first, end.held_out, startup.seconds, folder)


def _run(
    config: Config, resume: bool | None, timer: StepTimer, group: Group, progress: Progress, startup: Startup
) -> tuple[Position, str]:
    with startup.part("data and model"):
        prepared = prepare(config, progress.begin)
    config = prepared.config
    check_same_settings(config, group)
    check_pipelined(config, group.size)
    for prompt in prepared.dropped[:1]:
        progress.note(f"dropped {len(prepared.dropped)} prompts that are too long, {prompt.prompt_id} first")
    with contextlib.ExitStack() as stack:
        if group.is_first:
            remedy = "Let it end, or stop it; a run beside it needs another run.name"
            stack.enter_context(folder_lock.hold(run_folder(config), "run", remedy=remedy, say=progress.note))
        checkpoints = stack.enter_context(SharedCheckpoints(config, group))
        interrupts = stack.enter_context(Interrupts(progress.note))
        run_config = config.run
        period = run_config.num_steps // run_config.passes if run_config.passes > 1 else None
        order = BatchOrder(len(prepared.train), run_config.prompts_per_step, run_config.seed, period)
        with startup.part("checkpoint and journal"):
            outset = find_outset(config, group, checkpoints, resume=resume, say=progress.note)
            journal = stack.enter_context(open_journal(config, group, outset, order, progress.note))
        first = outset.first_new_step() if outset.goes_on else None
        log: RunLog | HostLog
        if group.is_first:
            log = stack.enter_context(RunLog(config, resume_at=first))
        else:
            log = stack.enter_context(HostLog(config, group.rank, resume_at=first))
        grader = stack.enter_context(_grader(prepared))
        progress.begin("load", "weights into trainer and sampler")
        agree = group.agree if group.size > 1 else None
        lockstep = Lockstepping(group, config.hosts.deadline_seconds) if config.hosts.controller == "single" else None
        make_engine = local_engine if lockstep is None else lockstep.make_engine
        with startup.part("weights"):
            worker = HostWorker(prepared.model, config, timer.phase, agree, make_engine)
            if outset.restores:
                worker.trainer.restore(checkpoints.restore(worker.trainer.state()))
        parts = (worker, grader, config, timer, interrupts.check, journal)
        generation: Generation
        if lockstep is not None:
            generation = SingleGeneration(*parts, lockstep, prepared.train, prepared.held_out, order)
        elif config.hosts.steal_groups and group.size > 1:
            generation = StealingGeneration(*parts, Claims(group), prepared.train, order)
        else:
            generation = Generation(*parts)
        loop = Loop(prepared, group, worker, generation, order, log, progress, checkpoints, timer, interrupts, outset,
                    journal, startup)  # fmt: skip
        with Collector(config.hosts.freeze_gc) as collector:
            loop.run(collector)
        return loop.position, str(log.folder)


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
        group: Group,
        worker: HostWorker,
        generation: Generation,
        order: BatchOrder,
        log: RunLog | HostLog,
        progress: Progress,
        checkpoints: SharedCheckpoints,
        timer: StepTimer,
        interrupts: Interrupts,
        outset: Outset,
        journal: Journal,
        startup: Startup,
    ):
        self.config, self.position = prepared.config, outset.position
        self._outset, self._journal, self._startup = outset, journal, startup
        self._prepared, self._group, self._worker, self._log = prepared, group, worker, log
        self._progress, self._checkpoints, self._timer, self._interrupts = progress, checkpoints, timer, interrupts
        self._generation, self._order = generation, order
        self._held_out = [prepared.held_out[index] for index in self._share(prepared.held_out)]
        self._num_idle_steps = 0
        self._memory = StepMemory()
        self._journal_seconds = 0.0  # up to the last step's end

    def run(self, collector: Collector) -> None:
        """The steps that are left. A checkpoint is written at the end, and when the run is interrupted."""
        run_config, first, lost = self.config.run, self.position.next_step, self._outset.first_new_step()
        with self._startup.part("weights"):
            self._publish()
        with self._startup.part("programs"):
            self._warm_up()
        try:
            if first == 0 and self._evaluates and self.position.held_out_first is None:
                accuracy = self._evaluate(-1)
                self.position = Position(0, accuracy, accuracy)
                self._progress.note(f"held-out accuracy {accuracy:.2f} before training")
            if lost > first:
                self._progress.begin("train", f"steps {first + 1} to {lost} again, from the journal")
            with self._startup.part(f"training {lost - first} step{'s' * (lost - first != 1)} again"):
                for step_index in range(first, min(lost, run_config.num_steps)):
                    self._step(step_index, collector)
            if self._outset.goes_on:
                reached = f"resumed at step {min(lost + 1, run_config.num_steps)} of {run_config.num_steps}"
                self._progress.note(self._startup.line(reached))
            for step_index in range(self.position.next_step, run_config.num_steps):
                self._step(step_index, collector)
        except KeyboardInterrupt as stop:
            # Without the other hosts' consent they are elsewhere, and a checkpoint needs all.
            if self._group.size == 1 or isinstance(stop, AgreedStop):
                self._save_if_there_is_time(is_urgent=isinstance(stop, Stopped) and stop.number == signal.SIGTERM)
            raise
        if run_config.checkpoint_at_end and self._checkpoints.newest != self.position.next_step:
            self._save()

    @property
    def _evaluates(self) -> bool:
        return self.config.run.eval_every > 0 and bool(self._prepared.held_out)

    def _share(self, prompts: Sequence[Prompt]) -> list[int]:
        """Which of these prompts are this host's."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        return shares(lengths, self._group.size, balance=self.config.hosts.balance)[self._group.rank]

    def _warm_up(self) -> None:
        self._progress.begin("compile", "prefill and decode")
        start, held_out = time.perf_counter(), self._held_out if self._evaluates else ()
        with self._group.doing("compile"):
            least, rest = divmod(self.config.run.prompts_per_step, self._group.size)
            num_programs = self._generation.warm_up(self._prepared.train, held_out, least + bool(rest))
            if rest and least:  # in some steps this host has a prompt less than in others
                num_programs += self._generation.warm_up(self._prepared.train, (), least)
        self._progress.note(f"{num_programs} sampling programs ready in {time.perf_counter() - start:.0f} s")

    def _save_if_there_is_time(self, *, is_urgent: bool) -> None:
        """A stopped run's last checkpoint. If the machine is taken away, which is urgent, it might be cut off: then the
        journal, which holds the same, must do."""
        if self._checkpoints.newest == self.position.next_step:
            self._checkpoints.wait()
            return
        needed = 0.0  # without a journal it is tried in any case
        if self.config.run.journal != "off":
            needed = self._checkpoints.seconds_needed(self._worker.trainer.state())
        told = self._group.agree("stop", [round(1000 * self._interrupts.seconds), round(1000 * needed)])
        left = 1000 * self.config.run.grace_seconds - told[:, 0].max()  # on the host that was told first
        if is_urgent and told[0, 1] and told[0, 1] > left:
            self._progress.note("no time for a checkpoint: the journal holds what was done since the last one")
            return
        self._progress.note(f"saving a checkpoint, after {self.position.next_step} steps")
        self._save()

    def _save(self) -> None:
        self._begin_to_save()
        self._checkpoints.wait()

    def _begin_to_save(self) -> None:
        self._checkpoints.save(self._worker.trainer.state(), self.position)
        self._journal.saved(self.position.next_step, oldest_kept=self._checkpoints.oldest_kept)

    def _publish(self) -> None:
        with self._group.waiting("publish"):
            self._worker.publish()
        self._journal.published(self._worker.policy_version)

    def _step(self, step_index: int, collector: Collector) -> None:
        run_config, number, meetings = self.config.run, step_index + 1, self._group.num_meetings
        with self._timer.step(step_index):
            batch = [self._prepared.train[index] for index in self._order.at(step_index)]
            share = self._share(batch)
            pipeline = None
            if run_config.pipelined:
                pipeline = Pipeline(self._worker, self.config, len(share) * self.config.rollout.group_size)
            generated = self._generate([batch[place] for place in share], share, step_index, pipeline)
            self._memory.ended("generate")
            with self._timer.phase("reward"):
                lesson = learning.lesson(generated.groups, self.config)
            with self._timer.phase("pack"):
                places = generated.places  # other hosts may have taken some, and this one some of theirs
                prompts = [graded.prompt for graded in generated.groups]
                updates = plan_updates(self._worker, lesson, self.config, places, num_hosts=self._group.size)
            report = self._report(generated, lesson, updates)
            with self._timer.phase("wait"):
                agreed = meet(self._group, report)
            if agreed.stop:
                raise AgreedStop(agreed.stop)  # from here to the position the step is finished, come what may
            version = self._worker.policy_version
            with running_out_is_told(self._worker.trainer.settings):
                trained = self._train(step_index, lesson, updates, agreed, pipeline)
            self._memory.ended("train")
            update = trained.update
            with self._timer.phase("record"):
                done = update.policy_version, places, prompts, update.skipped_because
                self._journal.trained(step_index, version, *done)
            self._publish()
            for text in self._memory.grown():
                self._progress.note(text)
            meetings = self._group.num_meetings - meetings
            due = number % max(run_config.eval_every, 1) == 0 or number == run_config.num_steps
            accuracy, stopped = self._evaluation_or_stop(step_index) if self._evaluates and due else (None, None)
            self.position = self.position.after(step_index, accuracy)
            if run_config.checkpoint_every and number % run_config.checkpoint_every == 0:
                with self._timer.phase("checkpoint"):
                    self._begin_to_save()
            with self._timer.phase("record"):
                if step_index not in self._log.kept:
                    advantages = [result.values.tolist() for result in lesson.advantages]
                    self._log.samples(step_index, generated.groups, advantages, places)
            with self._timer.phase("collect"):
                collector.collect()
        met = {"num_meetings": meetings} if self._group.size > 1 else {}
        collected = {"gc_seconds": collector.seconds_since_asked()}
        overlapped = {} if pipeline is None else {"overlapped_seconds": pipeline.seconds}
        with self._timer.after_step("record"):
            self._record(agreed, report, trained, accuracy, {**overlapped, **met, **collected, **self._memory.peaks()})
        if stopped is not None:
            raise stopped
        if self.position.next_step == 1 or not collector.is_frozen:  # after the training programs' first use
            collector.freeze()

    def _generate(
        self, prompts: Sequence[Prompt], places: Sequence[int], step_index: int, pipeline: Pipeline | None
    ) -> Generated:
        """This host's groups. Stopped by a signal, it has none, and says so in the meeting: no host leaves alone."""

        def show(done: int, total: int, tokens_per_second: float) -> None:
            self._progress.generate(step_index, done, total, tokens_per_second)

        try:
            take = None if pipeline is None else pipeline.add
            return self._generation.rollouts(prompts, places, step_index, show, take)
        except KeyboardInterrupt:
            if not self._interrupts.came:
                raise
            return NOTHING

    def _report(self, generated: Generated, lesson: learning.Lesson, updates: Updates) -> Report:
        rewards = [r.reward.value for group in generated.groups for r in group.rollouts if r.reward.value is not None]
        return Report(
            stop=self._interrupts.came,
            stats=lesson.stats,
            rewards=Moments.of(rewards),
            generate_seconds=generated.seconds,
            counts=updates.counts,
            num_stolen=generated.num_stolen,
        )

    def _train(
        self,
        step_index: int,
        lesson: learning.Lesson,
        updates: Updates,
        agreed: Agreed,
        pipeline: Pipeline | None,
    ) -> learning.Trained:
        trained = None
        if pipeline is not None and agreed.stats.num_trained:
            trained = pipeline.finish(agreed.totals(self.config.rollout.max_tokens), step_index=step_index)
        with self._group.waiting("train") if agreed.stats.num_trained else contextlib.nullcontext():
            trained = trained or train(
                self._worker,
                self.config,
                lesson,
                updates,
                agreed,
                step_index=step_index,
                show=lambda index, total: self._progress.train(step_index, index, total),
            )
        self._num_idle_steps = 0 if trained.sums else self._num_idle_steps + 1
        if self._num_idle_steps >= self.config.run.max_idle_steps:
            raise DataError(
                f"The last {self._num_idle_steps} steps taught nothing: in every group all rewards were equal",
                remedy="Use prompts that are sometimes solved, a larger rollout.group_size, or a finer reward; "
                "run.max_idle_steps allows more",
            )
        return trained

    def _record(
        self,
        agreed: Agreed,
        report: Report,
        trained: learning.Trained,
        accuracy: float | None,
        extra: Mapping[str, float],
    ) -> None:
        """The step's line in this host's log: host 0's is of all hosts, another's of its own part."""
        account, several = self._timer.last(), self._group.size > 1
        is_kept = account.step in self._log.kept  # its first line holds what the step took when it was whole
        before = self.position.held_out_first if account.step == 0 else None
        journal_seconds = self._journal.seconds - self._journal_seconds
        self._journal_seconds = self._journal.seconds
        told = agreed if self._group.is_first else Agreed((report,))
        stolen = {"num_stolen_groups": told.num_stolen} if several and self.config.hosts.steal_groups else {}
        metrics = learning.step_metrics(
            account,
            told,
            trained,
            held_out_before=before,
            held_out=accuracy,
            extra={"journal_seconds": journal_seconds, **stolen, **extra},
        )
        if several and self.config.hosts.metrics_in_barrier:
            lines = self._group.exchange("metrics", metrics.to_json())  # all hosts, whatever each has kept
            if isinstance(self._log, RunLog) and not is_kept:
                self._log.other_hosts(lines[1:])
        if is_kept:
            return
        if self._group.is_first or not self.config.hosts.metrics_in_barrier:
            self._log.step(metrics)
        self._progress.step(metrics, alarms(self._log.history))

    def _evaluation_or_stop(self, step_index: int) -> tuple[float | None, AgreedStop | None]:
        """The accuracy after a step: as it was found before this start, or now. A stop waits: the step is finished."""
        known = self._outset.resumption.evaluations.get(step_index)
        if known is not None:
            self._journal.evaluated(step_index, known)
            return known, None
        try:
            return self._evaluate(step_index), None
        except AgreedStop as stop:
            return None, stop

    def _evaluate(self, step_index: int) -> float:
        """Mean reward over all hosts' held-out prompts, NaN if none could be scored; one meeting of its own."""

        def show(done: int, total: int, tokens_per_second: float) -> None:
            self._progress.evaluate(step_index, done, total)

        rewards: list[float] = []
        with self._timer.phase("evaluate"):
            try:
                groups = self._generation.greedy(self._held_out, show)
                self._log.held_out(self._worker.policy_version, groups)
                found = [group.rollouts[0].reward.value for group in groups]
                rewards = [reward for reward in found if reward is not None]
            except KeyboardInterrupt:
                if not self._interrupts.came:
                    raise
            sums = np.array([math.fsum(rewards)], np.float64).view(np.int64)
            told = self._group.agree("evaluate", [self._interrupts.came, len(rewards), int(sums[0])])
        if told[:, 0].any():
            raise AgreedStop(int(told[:, 0].max()))
        count = int(told[:, 1].sum())
        accuracy = math.fsum(np.ascontiguousarray(told[:, 2]).view(np.float64)) / count if count else math.nan
        self._journal.evaluated(step_index, accuracy)
        return accuracy
