"""Prompts -> graded groups: one host's generation, with grading beside it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from locojax.config import Config
from locojax.hosts.phases import StepTimer
from locojax.hosts.worker import HostWorker
from locojax.rl.grading import Grader
from locojax.rl.rewards import GradeInput
from locojax.rl.seeds import sample_seed
from locojax.types import Group, Prompt, Reward, Rollout, SampleRequest, SampleResult, SamplingParams

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
    """

    def __init__(self, worker: HostWorker, grader: Grader, config: Config, timer: StepTimer, check: Callable[[], None]):
        self._worker, self._grader, self._config = worker, grader, config
        self._timer, self._check = timer, check

    def warm_up(self, train: Sequence[Prompt], held_out: Sequence[Prompt], batch: int) -> int:
        """Compiles what the run's batches need, seen on its longest prompts; returns the number of programs.

        Args:
          batch: the most prompts of a step that this host samples.
        """
        longest = sorted(train, key=lambda prompt: -len(prompt.tokens))[:batch]
        most = max(len(prompt.tokens) for prompt in [*train, *held_out])
        count = self._worker.warm_up(self._training_requests(longest, 0), most)
        return count + (self._worker.warm_up(self._greedy_requests(held_out), most) if held_out else 0)

    def rollouts(self, prompts: Sequence[Prompt], step_index: int, show: Show) -> Generated:
        """One training step's groups. Seeds follow from (run seed, step, prompt): order and host don't matter."""
        with self._timer.phase("admit"):
            requests = self._training_requests(prompts, step_index)
        return self._generate(requests, prompts, show)

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

    def _generate(self, requests: Sequence[SampleRequest], prompts: Sequence[Prompt], show: Show) -> Generated:
        prompt_of = {request.request_id: prompt for request, prompt in zip(requests, prompts, strict=True)}
        total = sum(request.num_samples for request in requests)
        results: dict[str, SampleResult] = {}
        grades: dict[str, list[Future[Reward]]] = {}
        num_tokens, num_done, start = 0, 0, time.perf_counter()
        try:
            for result in self._worker.sample(requests):
                results[result.request_id] = result
                grades[result.request_id] = self._submit(prompt_of[result.request_id], result)
                num_tokens += sum(len(completion.tokens) for completion in result.completions)
                num_done += len(result.completions)
                show(num_done, total, num_tokens / (time.perf_counter() - start))
                self._check()
        finally:
            self._worker.abort([request for request in requests if request.request_id not in results])
        seconds = time.perf_counter() - start
        with self._timer.phase("reward"):
            groups = []
            for request, prompt in zip(requests, prompts, strict=True):
                rewards = self._grader.collect(grades[request.request_id])
                completions = results[request.request_id].completions
                groups.append(Group(prompt, tuple(map(Rollout, completions, rewards))))
        return Generated(tuple(groups), seconds)

    def _submit(self, prompt: Prompt, result: SampleResult) -> list[Future[Reward]]:
        text = self._worker.completion_text
        return self._grader.submit(
            [GradeInput(prompt, text(completion), completion.stop_reason) for completion in result.completions]
        )
