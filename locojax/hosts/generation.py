"""Prompts -> graded groups: one host's generation, with grading beside it.

What is finished is journaled as it is finished; what an earlier process of the run has journaled is not done again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from locojax.config import Config
from locojax.errors import CheckpointError, GradingError
from locojax.hosts.journal import Journal, StepNotes
from locojax.hosts.phases import StepTimer
from locojax.hosts.worker import HostWorker
from locojax.rl.grading import Grader
from locojax.rl.rewards import GradeInput
from locojax.rl.seeds import sample_seed
from locojax.types import Completion, Group, Prompt, Reward, Rollout, SampleRequest, SamplingParams

_LAST_GRADES_SECONDS = 3.0  # that a run which is being stopped waits for grades under way, to journal them

Show = Callable[[int, int, float], None]
"""(completions done, of how many, tokens/s)."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """What was generated for a batch of prompts, in their order; `seconds` from first admission to last token."""

    groups: tuple[Group, ...]
    seconds: float


class Generation:
    """Samples and grades. Completions are graded in other processes while later ones are still decoded.

    Args:
      check: called between decoding calls; may raise to stop (Ctrl-C), which gives the unfinished requests up.
      journal: keeps the training steps' groups.
    """

    def __init__(
        self,
        worker: HostWorker,
        grader: Grader,
        config: Config,
        timer: StepTimer,
        check: Callable[[], None],
        journal: Journal,
    ):
        self._worker, self._grader, self._config = worker, grader, config
        self._timer, self._check, self._journal = timer, check, journal

    def warm_up(self, train: Sequence[Prompt], held_out: Sequence[Prompt], batch: int) -> int:
        """Compiles what the run's batches need, seen on its longest prompts; returns the number of programs.

        Args:
          batch: the most prompts of a step that this host samples.
        """
        longest = sorted(train, key=lambda prompt: -len(prompt.tokens))[:batch]
        most = max(len(prompt.tokens) for prompt in [*train, *held_out])
        count = self._worker.warm_up(self._training_requests(longest, 0), most)
        return count + (self._worker.warm_up(self._greedy_requests(held_out), most) if held_out else 0)

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        step_index: int,
        show: Show,
        take: Callable[[Group], None] | None = None,
    ) -> Generated:
        """One training step's groups. Seeds follow from (run seed, step, prompt): order and host don't matter.

        Args:
          places: of the prompts, in the batch of all hosts.
          take: given each group once it is graded, between decoding calls.
        """
        with self._timer.phase("admit"):
            size, version = self._config.rollout.group_size, self._worker.policy_version
            notes = self._journal.step(step_index, places, prompts, policy_version=version, group_size=size)
            requests = self._training_requests(prompts, step_index)
        return self._generate(requests, prompts, show, notes, take)

    def greedy(self, prompts: Sequence[Prompt], show: Show) -> tuple[Group, ...]:
        """One greedy completion of each prompt, graded."""
        with self._timer.phase("evaluate"):
            groups = self._generate(self._greedy_requests(prompts), prompts, show).groups
            self._worker.forget_prompts()  # or a step that follows would need programs of another size
        return groups

    def _training_requests(self, prompts: Sequence[Prompt], step_index: int) -> list[SampleRequest]:
        rollout = self._config.rollout
        return [
            self._request(
                f"step {step_index}/{prompt.prompt_id}",
                prompt,
                SamplingParams(
                    max_tokens=rollout.max_tokens,
                    temperature=rollout.temperature,
                    top_k=rollout.top_k,
                    top_p=rollout.top_p,
                    min_p=rollout.min_p,
                    stop=rollout.stop,
                    seed=sample_seed(self._config.run.seed, step_index, prompt.prompt_id),
                ),
                rollout.group_size,
            )
            for prompt in prompts
        ]

    def _greedy_requests(self, prompts: Sequence[Prompt]) -> list[SampleRequest]:
        rollout = self._config.rollout
        params = SamplingParams(max_tokens=rollout.max_tokens, temperature=0.0, stop=rollout.stop, seed=0)
        return [self._request(f"held out/{prompt.prompt_id}", prompt, params, 1) for prompt in prompts]

    def _request(self, name: str, prompt: Prompt, params: SamplingParams, num_samples: int) -> SampleRequest:
        return SampleRequest(name, prompt.tokens, params, num_samples=num_samples, adapter=self._worker.adapter)

    def _generate(
        self,
        requests: Sequence[SampleRequest],
        prompts: Sequence[Prompt],
        show: Show,
        notes: StepNotes | None = None,
        take: Callable[[Group], None] | None = None,
    ) -> Generated:
        grading = _Grading(self._grader, self._worker.completion_text, prompts, notes)
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        total = sum(request.num_samples for request in requests)
        grading.submit_known()
        wanted = [request for index, request in enumerate(requests) if index not in grading.completions]
        num_tokens, num_done, start = 0, total - sum(request.num_samples for request in wanted), time.perf_counter()
        try:
            for result in self._worker.sample(wanted):
                seconds = time.perf_counter() - start
                grading.submit(index_of[result.request_id], result.completions, seconds)
                num_tokens += sum(len(completion.tokens) for completion in result.completions)
                num_done += len(result.completions)
                show(num_done, total, num_tokens / seconds)
                self._check()
                if take is not None:
                    for group in grading.newly_graded():
                        take(group)
        except KeyboardInterrupt:
            grading.wait(_LAST_GRADES_SECONDS)
            raise
        finally:
            done = grading.completions
            self._worker.abort([request for request in wanted if index_of[request.request_id] not in done])
        seconds = time.perf_counter() - start + grading.known_seconds
        with self._timer.phase("reward"):
            while take is not None and grading.num_not_taken:
                for group in grading.newly_graded(wait=True):
                    take(group)
            return Generated(grading.groups(), seconds)


class _Grading:
    """The groups of one batch on their way: completions, and grades as they come.

    Attributes:
      completions: of each group that is finished, by index of its prompt.
      known_seconds: what sampling the groups took that were not sampled here.
    """

    def __init__(
        self,
        grader: Grader,
        text_of: Callable[[Completion], str],
        prompts: Sequence[Prompt],
        notes: StepNotes | None,
    ):
        self._grader, self._text_of, self._prompts, self._notes = grader, text_of, prompts, notes
        self.completions: dict[int, tuple[Completion, ...]] = {}
        self._grades: dict[int, list[Future[Reward]]] = {}
        self._taken: set[int] = set()
        self.known_seconds = 0.0

    def submit_known(self) -> None:
        """What the journal holds; only grades that it lacks are asked for."""
        for index, group in self._notes.known.items() if self._notes is not None else ():
            self.known_seconds = max(self.known_seconds, group.seconds)
            missing = [each for each, reward in zip(group.completions, group.rewards, strict=True) if reward is None]
            asked = iter(self._submit(index, missing))
            self.completions[index] = group.completions
            self._grades[index] = [next(asked) if reward is None else _done(reward) for reward in group.rewards]

    def submit(self, index: int, completions: Sequence[Completion], seconds: float) -> None:
        """A prompt's completions are there, `seconds` after the first admission."""
        if self._notes is not None:
            self._notes.sampled(index, completions, seconds)
        self.completions[index] = tuple(completions)
        self._grades[index] = self._submit(index, completions)

    def wait(self, seconds: float) -> None:
        """Until what was submitted is graded, or so long."""
        concurrent.futures.wait([future for each in self._grades.values() for future in each], seconds)

    def groups(self) -> tuple[Group, ...]:
        """All of the batch's groups, once they are graded, in the order of the prompts."""
        return tuple(map(self._group, range(len(self._prompts))))

    @property
    def num_not_taken(self) -> int:
        """Groups that `newly_graded` has not given yet."""
        return len(self._prompts) - len(self._taken)

    def newly_graded(self, *, wait: bool = False) -> list[Group]:
        """Groups that are graded and were not given before, as they were finished; with `wait`, at least one."""
        left = [index for index in self._grades if index not in self._taken]
        if wait and left and not any(self._is_graded(index) for index in left):
            concurrent.futures.wait(self._grades[left[0]])
        ready = [index for index in left if self._is_graded(index)]
        self._taken.update(ready)
        return [self._group(index) for index in ready]

    def _is_graded(self, index: int) -> bool:
        return all(future.done() for future in self._grades[index])

    def _group(self, index: int) -> Group:
        rewards = self._grader.collect(self._grades[index])
        return Group(self._prompts[index], tuple(map(Rollout, self.completions[index], rewards)))

    def _submit(self, index: int, completions: Sequence[Completion]) -> list[Future[Reward]]:
        prompt = self._prompts[index]
        futures = self._grader.submit(
            [GradeInput(prompt, self._text_of(each), each.stop_reason) for each in completions]
        )
        if (notes := self._notes) is not None:
            for completion, future in zip(completions, futures, strict=True):
                future.add_done_callback(_Noted(notes, index, completion))
        return futures


@dataclasses.dataclass(frozen=True)
class _Noted:
    """Journals a grade as it comes, in whatever thread."""

    notes: StepNotes
    index: int
    completion: Completion

    def __call__(self, future: Future[Reward]) -> None:
        with contextlib.suppress(GradingError, CheckpointError):  # told by `collect`; by the journal's next record
            self.notes.graded(self.index, self.completion, future.result())


def _done(reward: Reward) -> Future[Reward]:
    future: Future[Reward] = Future()
    future.set_result(reward)
    return future
