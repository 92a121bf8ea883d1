"""Grading off the main thread, in processes that can be killed: a reward that hangs or dies costs one grade."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType

from locojax.errors import GradingError
from locojax.rl import rewards
from locojax.rl.grading_process import GradingProcess
from locojax.rl.grading_worker import grade_one
from locojax.rl.rewards import GradeInput
from locojax.types import Reward

MAX_CHUNK = 32  # grades handed to a process at once: enough to hide the pipe's cost, few enough to share them out
WINDOW = 256  # grades over which the unscorable rate is measured
NUM_ERRORS_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class _Job:
    pickled: bytes
    future: Future[Reward]


class Grader:
    """Runs one reward function on many completions, each with a deadline. Use it as a context manager, or `close` it.

    Example:
      with Grader("gsm8k") as grader:
          futures = grader.submit([GradeInput(prompt, "#### 72")])
          [reward] = grader.collect(futures)

    Args:
      spec: what `rewards.load_reward` takes.
      num_workers: processes. Built-ins that can't hang (`rewards.SAFE_INLINE`) are graded at once, without any.
      deadline_seconds: for one grade; when it has passed, the process is killed and replaced, and that completion is
        unscorable. Loading the function has its own, longer deadline.
      max_unscorable_rate: share of the last 256 grades that may be unscorable before the run is stopped.

    Raises GradingError at once when the function can't be loaded or has the wrong signature.
    """

    def __init__(
        self,
        spec: str,
        *,
        num_workers: int = 1,
        deadline_seconds: float = 10.0,
        max_unscorable_rate: float = 0.1,
    ):
        if num_workers < 1 or deadline_seconds <= 0 or not 0 <= max_unscorable_rate <= 1:
            raise GradingError(
                "The grader's settings are out of range",
                got=f"num_workers {num_workers}, deadline_seconds {deadline_seconds:g}, "
                f"max_unscorable_rate {max_unscorable_rate:g}",
                expected="at least 1 worker, a deadline above 0, a rate in [0, 1]",
            )
        self.spec, self.deadline_seconds, self.max_unscorable_rate = spec, deadline_seconds, max_unscorable_rate
        self._num_workers = num_workers
        self._inline = rewards.load_reward(spec) if spec in rewards.SAFE_INLINE else None
        self._changed = threading.Condition()  # guards what follows
        self._jobs: collections.deque[_Job] = collections.deque()
        self._recent: collections.deque[Reward] = collections.deque(maxlen=WINDOW)
        self._ended: GradingError | None = None  # why nothing more is graded: closed, or broken down
        self._processes: list[GradingProcess] = []
        self._threads: list[threading.Thread] = []
        if self._inline is None:
            self._start()

    def submit(self, inputs: Sequence[GradeInput]) -> list[Future[Reward]]:
        """Queue grades and return at once, a future for each, in order; the futures can't be cancelled.

        A future's result is a Reward, whose `value` is None when unscorable; it raises GradingError only when the
        grader was closed or has broken down, and so does this method. An input whose `meta` can't be pickled is
        unscorable.
        """
        futures: list[Future[Reward]] = [Future() for _ in inputs]
        jobs = []
        for item, future in zip(inputs, futures, strict=True):
            future.set_running_or_notify_cancel()
            try:
                jobs.append(_Job(pickle.dumps(item.arguments()), future))
            except Exception as error:  # pickling runs code of whatever object a data set put in `meta`
                future.set_result(self._record(f"the prompt can't be sent to the grader: {error}"))
        with self._changed:
            if self._ended is not None:
                raise self._ended
            if self._inline is None:
                self._jobs.extend(jobs)
                self._changed.notify_all()
        if self._inline is not None:
            for job in jobs:
                job.future.set_result(self._record(grade_one(self._inline, job.pickled)))
        return futures

    def collect(self, futures: Sequence[Future[Reward]]) -> list[Reward]:
        """Wait for grades, in order. Raises GradingError when too large a share of the latest ones is unscorable."""
        graded = [future.result() for future in futures]
        with self._changed:
            recent = list(self._recent)
        check_unscorable_rate(recent, self.max_unscorable_rate)
        return graded

    def grade(self, inputs: Sequence[GradeInput]) -> list[Reward]:
        """`submit` and `collect` in one."""
        return self.collect(self.submit(inputs))

    def close(self) -> None:
        """Kill the processes; what was not graded yet raises GradingError. May be called twice."""
        self._end(GradingError("The grader was closed before this was graded"))
        with self._changed:
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._processes = [GradingProcess(self.spec, self.deadline_seconds) for _ in range(self._num_workers)]
        try:
            for process in self._processes:
                process.wait_until_loaded()
        except BaseException:
            for process in self._processes:
                process.close()
            raise
        for index in range(self._num_workers):
            self._threads.append(threading.Thread(target=self._supervise, args=(index,), daemon=True))
            self._threads[-1].start()

    def _supervise(self, index: int) -> None:
        """One process's thread: hand it chunks, and replace it when a grade has brought it down."""
        process = self._processes[index]
        while chunk := self._take():
            num_done = 0
            for job, result in zip(chunk, process.run([job.pickled for job in chunk]), strict=False):
                self._finish(job, result)
                num_done += 1
            self._put_back(chunk[num_done:])
            if not process.alive:
                process.close()
                replacement = self._replace(index)
                if replacement is None:
                    return
                process = replacement
        process.close()

    def _take(self) -> list[_Job]:
        """The next chunk, as soon as there is one; empty when grading has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ended is not None)
            size = min(MAX_CHUNK, -(-len(self._jobs) // self._num_workers))
            return [self._jobs.popleft() for _ in range(size)]

    def _put_back(self, jobs: Sequence[_Job]) -> None:
        with self._changed:
            ended = self._ended
            if ended is None:
                self._jobs.extendleft(reversed(jobs))
                self._changed.notify_all()
        if ended is not None:
            for job in jobs:
                job.future.set_exception(ended)

    def _replace(self, index: int) -> GradingProcess | None:
        with self._changed:
            if self._ended is not None:
                return None
            process = GradingProcess(self.spec, self.deadline_seconds)
            self._processes[index] = process
        try:
            process.wait_until_loaded()
        except GradingError as error:  # it loaded before: the file has changed, or the machine is out of something
            process.close()
            self._end(error)
            return None
        return process

    def _finish(self, job: _Job, result: float | str) -> None:
        with self._changed:
            ended = self._ended
        if ended is not None:
            job.future.set_exception(ended)
            return
        job.future.set_result(self._record(result))
        with self._changed:
            failed = [reward for reward in self._recent if reward.value is None]
        # Ahead of `collect`: past this count the rate is exceeded whatever the rest of the window holds, and a batch
        # in which every grade hangs would take the deadline times its size.
        if len(failed) > self.max_unscorable_rate * WINDOW:
            self._end(_too_many(failed, WINDOW, self.max_unscorable_rate))

    def _record(self, result: float | str) -> Reward:
        reward = Reward(None, error=result) if isinstance(result, str) else Reward(result)
        with self._changed:
            self._recent.append(reward)
        return reward

    def _end(self, error: GradingError) -> None:
        with self._changed:
            if self._ended is None:
                self._ended = error
            error = self._ended
            jobs = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for job in jobs:
            job.future.set_exception(error)


def check_unscorable_rate(graded: Sequence[Reward], max_unscorable_rate: float) -> None:
    """Raises GradingError, showing the first few errors, when a larger share than that is unscorable."""
    failed = [reward for reward in graded if reward.value is None]
    if len(failed) > max_unscorable_rate * len(graded):
        raise _too_many(failed, len(graded), max_unscorable_rate)


def _too_many(failed: Sequence[Reward], num_graded: int, max_unscorable_rate: float) -> GradingError:
    distinct = list(dict.fromkeys(f"{reward.error}" for reward in failed))[:NUM_ERRORS_SHOWN]
    return GradingError(
        f"Too many completions could not be graded: {len(failed)} of the last {num_graded}",
        got="; ".join(distinct),
        expected=f"a share of at most {max_unscorable_rate:g}",
        remedy="Mend the reward function, or allow a larger share of unscorable completions",
    )
