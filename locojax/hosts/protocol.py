"""What a front end asks of an engine process, and what that answers: plain values, no jax.

The front end (`server`) puts a model's operations in order before it submits them; the engine process runs each model's
in the order of their submission, and different models' in any. Samples join the running batch at once. Every submitted
operation is answered exactly once, by `Finished` or `Failed`, also when it was cancelled; a message is a pickled value
on a `multiprocessing.connection` between two processes of one user: nothing here may come from the network unchecked.

An engine keeps its answers until they are acknowledged (`Acknowledge`), and sends them again to a front end that
connects anew: an answer that was on its way to a front end that died is not lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from locojax.types import (
    AdamParams,
    Completion,
    Datum,
    ForwardBackwardResult,
    OptimStepResult,
    SamplingParams,
)

Category = Literal["user", "server"]
"""Who can mend a failure: the request is at fault, or the engine is."""


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter as a client asks for it; alpha is the server's choice. `seed` None: the engine picks one.

    Example: AdapterConfig(rank=32, seed=0, attention=True, mlp=True, unembed=False)
    """

    rank: int
    seed: int | None = None
    attention: bool = True
    mlp: bool = True
    unembed: bool = True


@dataclasses.dataclass(frozen=True)
class CreateModel:
    """A fresh adapter. Answer: `ModelState`. Fails (user) when every slot is taken or the rank is above the most."""

    model_id: str
    adapter: AdapterConfig


@dataclasses.dataclass(frozen=True)
class RestoreModel:
    """A model from a training checkpoint, or a PEFT directory (then without optimizer). Answer: `ModelState`."""

    model_id: str
    directory: str
    optimizer: bool  # also Adam's state and the step; else both begin anew


@dataclasses.dataclass(frozen=True)
class LoadWeights:
    """Replaces an existing model's weights by a checkpoint's of the same adapter settings. Answer: `ModelState`."""

    model_id: str
    directory: str
    optimizer: bool


@dataclasses.dataclass(frozen=True)
class RemoveModel:
    """Frees a model's slot; its queued operations fail. Answer: None. Samplers made from it live on."""

    model_id: str


@dataclasses.dataclass(frozen=True)
class ForwardBackward:
    """`gradient` False: a forward pass alone. Answer: `types.ForwardBackwardResult`."""

    model_id: str
    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    gradient: bool = True


@dataclasses.dataclass(frozen=True)
class OptimStep:
    """Applies what has been accumulated. Answer: `types.OptimStepResult`."""

    model_id: str
    adam: AdamParams


@dataclasses.dataclass(frozen=True)
class SaveState:
    """Writes weights, Adam's state and step into `directory`, which appears whole or not at all. Answer: `Saved`."""

    model_id: str
    directory: str


@dataclasses.dataclass(frozen=True)
class SaveAdapter:
    """Writes a PEFT directory of the current weights, which appears whole or not at all. Answer: `Saved`."""

    model_id: str
    directory: str


@dataclasses.dataclass(frozen=True)
class OpenSampler:
    """A sampler of the base model (no source), of a model as it is now (`model_id`) or of a PEFT `directory`.

    From then on its weights are fixed, whatever happens to the model; only another OpenSampler with the same
    `sampler_id` replaces them (an inflight sampler): samples that run go on under the new weights. Answer: None.
    """

    sampler_id: str
    model_id: str | None = None
    directory: str | None = None


@dataclasses.dataclass(frozen=True)
class CloseSampler:
    """Forgets a sampler; what it is sampling is aborted. Answer: None."""

    sampler_id: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """`num_samples` completions of one prompt. Answer: `Sampled`.

    Attributes:
      sampler_id: an open sampler's.
      params: `seed` None: each sample is drawn afresh.
      prompt_logprobs, topk_prompt_logprobs: as in `types.SampleRequest`; the latter is a number, 0 for none.
      prompt_logprobs_last_n: only the last n prompt positions need be scored; None: all.
      topk_sample_logprobs: how many likeliest tokens to report at each sampled position; 0 for none.
      target_prompt_logprobs: i64[len(prompt) - 1, K] token ids whose log-prob after each prompt prefix is wanted; -1:
        no token, answered by 0.
      prompt_alt_tokens: draw so many tokens at each prompt position from what is predicted there; 0 for none.
      stream: `Tokens` messages come as tokens are sampled.
    """

    sampler_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_tokens: int = 0
    stream: bool = False


ModelOperation: TypeAlias = (
    CreateModel | RestoreModel | LoadWeights | RemoveModel | ForwardBackward | OptimStep | SaveState | SaveAdapter
)
"""Operations of one model, run in the order of their submission. So is an OpenSampler with a `model_id`."""

Operation: TypeAlias = ModelOperation | OpenSampler | CloseSampler | Sample


@dataclasses.dataclass(frozen=True)
class ModelState:
    """What an adapter is, once made. Example: ModelState(AdapterConfig(32, seed=7), alpha=32.0, policy_version=0)"""

    adapter: AdapterConfig  # with the seed that was used
    alpha: float
    policy_version: int  # optimizer steps taken


@dataclasses.dataclass(frozen=True)
class Saved:
    """Example: Saved(size_bytes=39_321_600)"""

    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A finished `Sample`, completions in sample order. P: prompt tokens.

    Attributes:
      prompt_logprobs: f32[P], entry 0 and those not asked for NaN.
      topk_prompt_logprobs: ids i32[P, k] and log-probs f32[P, k], likeliest first; row 0 is id 0, log-prob -99999.
      topk_sample_logprobs: for each completion, ids i32[N, k] and log-probs f32[N, k].
      target_prompt_logprobs: f32[P - 1, K].
      prompt_alt_tokens: ids i32[P, k] and log-probs f32[P, k]; row 0 is id 0, log-prob -99999.
      num_cached_prompt_tokens: prompt tokens that had been computed before.
    """

    completions: tuple[Completion, ...]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: tuple[np.ndarray, np.ndarray] | None = None
    topk_sample_logprobs: tuple[tuple[np.ndarray, np.ndarray], ...] | None = None
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_tokens: tuple[np.ndarray, np.ndarray] | None = None
    num_cached_prompt_tokens: int = 0


Result: TypeAlias = ModelState | ForwardBackwardResult | OptimStepResult | Saved | Sampled | None


# To the engine process.


@dataclasses.dataclass(frozen=True)
class Submit:
    """Asks for an operation; `operation_id` is the front end's, unique for ever."""

    operation_id: str
    operation: Operation


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Ends an operation early if it can be: one that waits fails, a Sample finishes with what it has."""

    operation_id: str


@dataclasses.dataclass(frozen=True)
class Acknowledge:
    """The answers to these have been stored; the engine may forget them."""

    operation_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """Finish what runs, then exit."""


ToEngine: TypeAlias = Submit | Cancel | Acknowledge | Shutdown


# From the engine process.


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """What the engine serves; sent first on every connection, once the model is loaded.

    Attributes:
      incarnation: differs from one start of the engine process to the next: what it held in memory is then gone.
      open_models, open_samplers: what it holds now.
      running: operations submitted and not yet answered.
      losses: the names that ForwardBackward.loss may have; (): whoever asks leaves that check to the engine.
    """

    incarnation: str
    model_name: str
    family: str
    vocab_size: int
    max_context: int
    max_row_tokens: int  # a datum's limit
    max_adapters: int
    max_rank: int
    eos_ids: tuple[int, ...]
    open_models: tuple[str, ...]
    open_samplers: tuple[str, ...]
    running: tuple[str, ...]
    losses: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the engine is doing while it starts. Example: Progress("loading smollm2-135m", 3.1)"""

    doing: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Finished:
    operation_id: str
    result: Result


@dataclasses.dataclass(frozen=True)
class Failed:
    """Example: Failed("m1:4", "user", "Unknown loss 'pp0'. Expected: ppo, ...")"""

    operation_id: str
    category: Category
    message: str


@dataclasses.dataclass(frozen=True)
class Tokens:
    """New tokens of one sample of a streamed Sample; `text` is what they add, whole characters only."""

    operation_id: str
    sample_index: int
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    text: str
    finished: bool


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """Sent about once a second: gauges and running totals, by name, for metrics and the web page.

    Attributes:
      gauges: e.g. num_running_samples, num_waiting_samples, num_models, num_samplers, num_queued_operations.
      totals: e.g. sampled_tokens, prompt_tokens, trained_tokens, optimizer_steps, compilations, failures.
      seconds: time by phase since the start: prefill, decode, train, optim, save, idle, other.
      queues: operations waiting, by model.
    """

    gauges: Mapping[str, float]
    totals: Mapping[str, float]
    seconds: Mapping[str, float]
    queues: Mapping[str, int]


FromEngine: TypeAlias = EngineInfo | Progress | Finished | Failed | Tokens | EngineStatus

ANSWERS: Mapping[type, Any] = {
    CreateModel: ModelState, RestoreModel: ModelState, LoadWeights: ModelState, RemoveModel: type(None),
    ForwardBackward: ForwardBackwardResult, OptimStep: OptimStepResult, SaveState: Saved, SaveAdapter: Saved,
    OpenSampler: type(None), CloseSampler: type(None), Sample: Sampled,
}  # fmt: skip
"""The type of each operation's result."""
