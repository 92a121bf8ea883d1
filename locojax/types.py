"""The nouns that cross a border between rooms: who fills each field, and an example of each.

Nothing here imports jax. Arrays are numpy, host-side.
Alignment, everywhere: position i of `Datum.tokens` (the model's input) predicts `target_tokens[i]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

StopReason = Literal["stop", "length", "abort"]
"""`stop`: the model ended it (EOS, a stop id or a stop string). `length`: cut by max_tokens or the context. `abort`."""

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter in PEFT's format: its settings, its weights."""

Kernels = Literal["auto", "native", "xla"]
"""Whose products and attention on CPU: ours in C++, where machine and dtype are such, or XLA's; see `models.native`."""

LogprobsOf = Literal["raw", "tempered"]
"""Which distribution a sampled token's log-prob is of: the model's own, or the one after division by temperature."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. Filled by the loop or a client; read by the engine.

    Example: SamplingParams(max_tokens=64, temperature=1.0, stop=["\\n\\nUser:"])
    """

    max_tokens: int | None = None  # None: until the context is full
    temperature: float = 1.0  # 0: argmax of the raw logits, ties to the lowest id
    top_k: int = -1  # -1 or 0: off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1): drop tokens below min_p x the likeliest token's probability
    stop: str | tuple[str, ...] | tuple[int, ...] | None = None  # None: EOS stops. (): nothing stops, not even EOS
    seed: int | None = None  # None: the engine picks one. Sample i of a request draws from (seed, i)


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One prompt to sample `num_samples` completions of: a group. Filled by the caller of `Engine.add`.

    Example: SampleRequest("step3/prompt17", (1, 9690, 198), SamplingParams(max_tokens=8), num_samples=8)
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    num_samples: int = 1
    adapter: int = 0  # row of the engine's stacked adapters; 0 is always "no adapter"
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None  # score only the last n prompt positions; None: all
    topk_sample_logprobs: int = 0  # how many likeliest tokens to report at each sampled position
    target_prompt_logprobs: np.ndarray | None = None  # i64[P - 1, K]: score these after each prefix; -1: none
    prompt_alt_tokens: int = 0  # tokens to draw at each prompt position from what is predicted there

    @property
    def scores_prompt(self) -> bool:
        """Whether something is asked about the prompt's own positions."""
        wanted = self.prompt_logprobs or self.topk_prompt_logprobs or self.prompt_alt_tokens
        return bool(wanted) or self.target_prompt_logprobs is not None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation. Filled by the engine when the sample finishes.

    `tokens` includes the token that stopped it. `logprobs[i]` is fp32, of `tokens[i]`, under the distribution that
    `logprobs_of` names. `text` is `tokens` decoded, stop included.
    Example: Completion(0, (24, 2), f32[-0.1, -0.0], "7<|im_end|>", "stop", 2, policy_version=3, logprobs_of="raw")
    """

    sample_index: int
    tokens: tuple[int, ...]
    logprobs: np.ndarray  # f32[len(tokens)]
    text: str
    stop_reason: StopReason
    stopped_by: int | str | None  # the stop id (EOS included) or stop string that ended it
    policy_version: int
    logprobs_of: LogprobsOf = "raw"


MASKED_LOGPROB = -99999.0
"""Stands, beside token id 0, where a table of alternatives has nothing to say: at the first token, or not scored."""


@dataclasses.dataclass(frozen=True)
class SampleResult:
    """A finished request: its completions in sample order. Filled by the engine.

    Prompt log-probs are of the engine's `logprobs_of` (at the request's temperature if tempered; 0 counts as 1).
    Alternatives' rows that aren't scored hold id 0 and MASKED_LOGPROB; `prompt_logprobs` holds NaN there.
    Example: SampleResult("step3/prompt17", (completion0, completion1), None, None)
    """

    request_id: str
    completions: tuple[Completion, ...]
    prompt_logprobs: np.ndarray | None  # f32[len(prompt)], entry 0 is NaN: nothing predicts the first token
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None  # ids i32[P, k], log-probs f32[P, k]; likeliest first
    topk_sample_logprobs: tuple[tuple[np.ndarray, np.ndarray], ...] | None = None  # for each: ids, log-probs [N, k]
    target_prompt_logprobs: np.ndarray | None = None  # f32[P - 1, K]; 0 where the target is -1
    prompt_alt_tokens: tuple[np.ndarray, np.ndarray] | None = None  # ids i32[P, k], log-probs f32[P, k]
    num_cached_prompt_tokens: int = 0  # of the prompt, had been computed before


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem to be solved. Filled by `rl.datasets` and `rl.tasks`; `tokens` by whoever holds the tokenizer.

    `answer` and `meta` are what the grader needs and are never shown to the model. With `messages` (role and content
    of each) the tokens come from the tokenizer's chat template, else from `text`; `text` is then the last message's.
    Example: Prompt("addition/17", "3+4=", tokens=(35, 27, 36, 45), answer="7", meta={})
    """

    prompt_id: str
    text: str
    tokens: tuple[int, ...] = ()
    answer: str | None = None
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Reward:
    """A grade. Filled by `rl.grading`. `value` None means unscorable: not zero, left out of the baseline and the loss.

    Example: Reward(1.0) or Reward(None, error="grader ran past its 5 s deadline")
    """

    value: float | None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A completion and its grade. Example: Rollout(completion, Reward(1.0))"""

    completion: Completion
    reward: Reward


@dataclasses.dataclass(frozen=True)
class Group:
    """All rollouts of one prompt: what advantages are computed over. Example: Group(prompt, (rollout0, rollout1))"""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclasses.dataclass(frozen=True)
class Datum:
    """One training sequence, in Tinker's form: next-token alignment is the caller's. Filled by `rl` or a client.

    `tokens` i32[N]. `inputs` holds what the loss needs, each with leading dimension N: `target_tokens` int[N] (or
    [N, K] for cross_entropy), `weights` f32, `logprobs` f32 (the sampler's), `advantages` f32, ...
    Example: Datum(np.array([5, 6, 7]), {"target_tokens": np.array([6, 7, 8]), "weights": np.array([0., 1., 1.])})
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ForwardBackwardResult:
    """What `Trainer.forward_backward` and `Trainer.forward` return, in datum order.

    `outputs[i]` holds `logprobs` f32 and `elementwise_loss` f32, shaped like the datum's `target_tokens`, and
    `entropy` f32[N] where asked for. `metrics` keys are `name:reduction`; `loss:sum` is always there.
    """

    outputs: tuple[Mapping[str, np.ndarray], ...]
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class AdamParams:
    """AdamW's settings for one optimizer step; they may change every step. Defaults are Tinker's.

    Example: AdamParams(learning_rate=2e-5, grad_clip_norm=1.0)
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # global norm; 0: off


@dataclasses.dataclass(frozen=True)
class OptimStepResult:
    """What `Trainer.optim_step` did. `applied` False: nothing to apply, or a non-finite gradient; weights unchanged.

    Example: OptimStepResult(True, 4, {"grad_norm": 0.7, "learning_rate": 2e-5}, None)
    """

    applied: bool
    policy_version: int
    metrics: Mapping[str, float]
    skipped_because: str | None
