"""A request that the engine has yet to answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from locojax.errors import RequestError
from locojax.rollout.prefilling import PromptScores
from locojax.rollout.request import Begun, Sample, StopRule, TokenBytes
from locojax.rollout.sampling import key_of
from locojax.types import LogprobsOf, SampleRequest, SampleResult


@dataclasses.dataclass(eq=False)
class Pending:
    """A request in the engine: its samples, and what the prefill pass gave."""

    request: SampleRequest
    samples: list[Sample]
    seed: int | str
    scores: PromptScores | None = None

    @classmethod
    def of(
        cls,
        request: SampleRequest,
        seed: int | str,
        max_tokens: int,
        vocabulary: TokenBytes,
        stream: bool,
        begun: Mapping[int, Begun],
    ) -> Pending:
        """A request's samples, of which some may have been begun elsewhere.

        Raises:
          RequestError: it asks for what begun samples lack.
        """
        if begun and request.topk_sample_logprobs:
            raise RequestError(f"Request {request.request_id!r} asks for likeliest tokens, which begun samples lack")
        stop = StopRule.of(request.params.stop, vocabulary.eos_ids)
        samples = [
            Sample(request, i, key_of(seed, i), stop, max_tokens, request.prompt, stream)
            for i in range(request.num_samples)
        ]
        for i, part in begun.items():
            samples[i].begin(part, vocabulary)
        return cls(request, samples, seed)

    @property
    def done(self) -> bool:
        return all(sample.stop_reason is not None for sample in self.samples)

    def result(self, version: int, logprobs_of: LogprobsOf) -> SampleResult:
        """The answer, from what there is. `version`: of samples that have no token yet."""
        request, scores = self.request, self.scores
        return SampleResult(
            request.request_id,
            tuple(sample.completion(version, logprobs_of) for sample in self.samples),
            scores.logprobs if scores is not None and request.prompt_logprobs else None,
            scores.top if scores is not None and request.topk_prompt_logprobs else None,
            tuple(sample.likeliest() for sample in self.samples) if request.topk_sample_logprobs else None,
            scores.targets if scores is not None and request.target_prompt_logprobs is not None else None,
            scores.drawn if scores is not None and request.prompt_alt_tokens else None,
            self.samples[0].num_cached,
        )
