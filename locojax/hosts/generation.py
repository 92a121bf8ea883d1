"""Prompts -> graded groups: one host's generation, with grading beside it.

What is finished is journaled as it is finished; what an earlier process of the run has journaled is not done again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from locojax.config import Config
from locojax.errors import CheckpointError, GradingError
from locojax.hosts.journal import Journal, StepNotes
from locojax.hosts.phases import StepTimer
from locojax.hosts.worker import HostWorker
from locojax.rl.grading import Grader
from locojax.rl.rewards import GradeInput
from locojax.rl.seeds import sample_seed
from locojax.rollout.request import Begun, Gained
from locojax.types import Completion, Group, Prompt, Reward, Rollout, SampleRequest, SampleResult, SamplingParams

_LAST_GRADES_SECONDS = 3.0  # that a run which is being stopped waits for grades under way, to journal them

Show = Callable[[int, int, float], None]
"""(completions done, of how many, tokens/s)."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """What one host generated of a batch.

    Attributes:
      groups: by place. places: of their prompts, in the batch of all hosts.
      seconds: from first admission to last token.
      num_stolen: groups that were another host's to do.
    """

    groups: tuple[Group, ...]
    seconds: float
    places: tuple[int, ...]
    num_stolen: int = 0


NOTHING = Generated((), 0.0, ())


class Batch:
    """The prompts that one host samples together, by index. They may change hands while it is at it.

    Args:
      prompts, requests, places: of each prompt; places in the batch of all hosts.
      step: of training; None: an evaluation. notes: the journal's, of such a step.

    Attributes:
      gone: indices of those that another host has taken over. num_own: of how many prompts it was made.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[SampleRequest],
        places: Sequence[int],
        step: int | None = None,
        notes: StepNotes | None = None,
    ):
        self.prompts, self.requests, self.places = list(prompts), list(requests), list(places)
        self.step, self.notes = step, notes
        self.gone: set[int] = set()
        self.num_own = len(self.prompts)
        self._index_of = {request.request_id: index for index, request in enumerate(self.requests)}

    def add(self, prompt: Prompt, request: SampleRequest, place: int) -> int:
        """Takes a prompt over; returns its index."""
        if self.notes is not None:
            self.notes.draw(place, prompt)
        index = self._index_of[request.request_id] = len(self.prompts)
        self.prompts.append(prompt)
        self.requests.append(request)
        self.places.append(place)
        return index

    def index_of(self, request_id: str) -> int:
        return self._index_of[request_id]

    def begun(self, request_id: str) -> Mapping[int, Begun]:
        """What an earlier process sampled of a request that it didn't finish."""
        return {} if self.notes is None else self.notes.begun.get(self.index_of(request_id), {})

    def gained(self, new: Sequence[Gained]) -> None:
        """Journals what samples that run have gained."""
        if self.notes is not None:
            self.notes.gained((self.index_of(each.request_id), each) for each in new)

    @property
    def indices(self) -> list[int]:
        """Of the prompts that are this host's now, by place."""
        return sorted(set(range(len(self.prompts))) - self.gone, key=self.places.__getitem__)

    @property
    def num_completions(self) -> int:
        """Completions that this host's prompts come to."""
        return sum(self.requests[index].num_samples for index in self.indices)


@dataclasses.dataclass(eq=False)
class Generation:
    """Samples and grades. Completions are graded in other processes while later ones are still decoded.

    Attributes:
      check: called between decoding calls; may raise to stop (Ctrl-C), which gives the unfinished requests up.
      journal: keeps the training steps' groups.
    """

    worker: HostWorker
    grader: Grader
    config: Config
    timer: StepTimer
    check: Callable[[], None]
    journal: Journal

    def warm_up(self, train: Sequence[Prompt], held_out: Sequence[Prompt], batch: int) -> int:
        """Compiles what the run's batches need, seen on its longest prompts; returns the number of programs.

        Args:
          batch: the most prompts of a step that this host samples.
        """
        longest = sorted(train, key=lambda prompt: -len(prompt.tokens))[:batch]
        most = max(len(prompt.tokens) for prompt in [*train, *held_out])
        count = self.worker.warm_up(self._training_requests(longest, 0), most)
        return count + (self.worker.warm_up(self._greedy_requests(held_out), most) if held_out else 0)

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
        with self.timer.phase("admit"):
            size, version = self.config.rollout.group_size, self.worker.policy_version
            notes = self.journal.step(step_index, places, prompts, policy_version=version, group_size=size)
            batch = Batch(prompts, self._training_requests(prompts, step_index), places, step_index, notes)
        return self._generate(batch, show, take)

    def greedy(self, prompts: Sequence[Prompt], show: Show) -> tuple[Group, ...]:
        """One greedy completion of each prompt, graded."""
        with self.timer.phase("evaluate"):
            batch = Batch(prompts, self._greedy_requests(prompts), range(len(prompts)))
            groups = self._generate(batch, show).groups
            self.worker.forget_prompts()  # or a step that follows would need programs of another size
        return groups

    def _training_requests(self, prompts: Sequence[Prompt], step_index: int) -> list[SampleRequest]:
        rollout = self.config.rollout
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
                    seed=sample_seed(self.config.run.seed, step_index, prompt.prompt_id),
                ),
                rollout.group_size,
            )
            for prompt in prompts
        ]

    def _greedy_requests(self, prompts: Sequence[Prompt]) -> list[SampleRequest]:
        rollout = self.config.rollout
        params = SamplingParams(max_tokens=rollout.max_tokens, temperature=0.0, stop=rollout.stop, seed=0)
        return [self._request(f"held out/{prompt.prompt_id}", prompt, params, 1) for prompt in prompts]

    def _request(self, name: str, prompt: Prompt, params: SamplingParams, num_samples: int) -> SampleRequest:
        return SampleRequest(name, prompt.tokens, params, num_samples=num_samples, adapter=self.worker.adapter)

    def _generate(self, batch: Batch, show: Show, take: Callable[[Group], None] | None = None) -> Generated:
        grading = Grading(self.grader, self.worker.completion_text, batch)
        start, seconds, num_tokens = time.perf_counter(), 0.0, 0
        for index in batch.indices:
            grading.submit_known(index)
        try:
            for result in self._sample(batch, grading):
                seconds = time.perf_counter() - start
                with self.timer.phase("record"):
                    grading.submit(batch.index_of(result.request_id), result.completions, seconds)
                    num_tokens += sum(len(completion.tokens) for completion in result.completions)
                    show(grading.num_completions, batch.num_completions, num_tokens / seconds)
                self.check()
                if take is not None:
                    for group in grading.newly_graded():
                        take(group)
        except KeyboardInterrupt:
            grading.wait(_LAST_GRADES_SECONDS)
            raise
        finally:
            self.worker.abort([batch.requests[index] for index in grading.not_sampled])
        with self.timer.phase("reward"):
            while take is not None and grading.num_not_taken:
                for group in grading.newly_graded(wait=True):
                    take(group)
            indices = batch.indices
            places = tuple(batch.places[index] for index in indices)
            num_stolen = sum(index >= batch.num_own for index in indices)
            return Generated(grading.groups(indices), seconds + grading.known_seconds, places, num_stolen)

    def _sample(self, batch: Batch, grading: Grading) -> Iterator[SampleResult]:
        """Those of the batch that aren't sampled yet, as they finish."""
        requests = [batch.requests[index] for index in grading.not_sampled]
        return self.worker.sample(requests, begun=batch.begun, told=batch.gained)


class Grading:
    """The groups of one batch on their way: completions, and grades as they come.

    Attributes:
      completions: of each group that is finished, by index of its prompt.
      known_seconds: what sampling the groups took that were not sampled here.
    """

    def __init__(self, grader: Grader, text_of: Callable[[Completion], str], batch: Batch):
        self._grader, self._text_of, self._batch, self._notes = grader, text_of, batch, batch.notes
        self.completions: dict[int, tuple[Completion, ...]] = {}
        self._grades: dict[int, list[Future[Reward]]] = {}
        self._taken: set[int] = set()
        self.known_seconds = 0.0

    def submit_known(self, index: int) -> bool:
        """What the journal holds of a prompt; only grades that it lacks are asked for. False: it holds nothing."""
        group = None if self._notes is None else self._notes.known.get(index)
        if group is None:
            return False
        self.known_seconds = max(self.known_seconds, group.seconds)
        missing = [each for each, reward in zip(group.completions, group.rewards, strict=True) if reward is None]
        asked = iter(self._submit(index, missing))
        self.completions[index] = group.completions
        self._grades[index] = [next(asked) if reward is None else _done(reward) for reward in group.rewards]
        return True

    @property
    def not_sampled(self) -> list[int]:
        """Indices of this host's prompts whose completions aren't there, as they were drawn."""
        return [
            index
            for index in range(len(self._batch.prompts))
            if index not in self.completions and index not in self._batch.gone
        ]

    @property
    def num_completions(self) -> int:
        """Completions that are there."""
        return sum(map(len, self.completions.values()))

    def submit(self, index: int, completions: Sequence[Completion], seconds: float) -> None:
        """A prompt's completions are there, `seconds` after the first admission."""
        if self._notes is not None:
            self._notes.sampled(index, completions, seconds)
        self.completions[index] = tuple(completions)
        self._grades[index] = self._submit(index, completions)

    def wait(self, seconds: float) -> None:
        """Until what was submitted is graded, or so long."""
        concurrent.futures.wait([future for each in self._grades.values() for future in each], seconds)

    def groups(self, indices: Sequence[int]) -> tuple[Group, ...]:
        """These prompts' groups, once they are graded."""
        return tuple(map(self._group, indices))

    @property
    def num_not_taken(self) -> int:
        """Groups that `newly_graded` has not given yet."""
        return len(self._batch.indices) - len(self._taken)

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
        return Group(self._batch.prompts[index], tuple(map(Rollout, self.completions[index], rewards)))

    def _submit(self, index: int, completions: Sequence[Completion]) -> list[Future[Reward]]:
        prompt = self._batch.prompts[index]
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
