"""asample requests, JSON, as `SampleBody`. Legend: P prompt tokens, K targets a position."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Annotated, Any, TypeAlias

import numpy as np
import pydantic
from pydantic import Field

from locojax.hosts import protocol
from locojax.server.requests import Id, Request, Sequence, Text
from locojax.server.wire_content import MAX_BODY_BYTES, decompressed, json_object
from locojax.server.wire_errors import WireError, refused_fields, shortened
from locojax.server.wire_tensors import Allowance, Csr, dense, digest_arrays, json_parts, json_tokens
from locojax.types import SamplingParams

MAX_NUM_SAMPLES = 4096
MAX_TOPK = 1024
MAX_STOPS = 256
MAX_STOP_CHARACTERS = 1024


@dataclasses.dataclass(frozen=True)
class SampleBody:
    """An asample request: of a sampling session, or (older clients) of a base model or a path.

    Attributes:
      sample: what the engine is asked for, `sampler_id` still "".
      record_stability_info: remember what was sampled, for stable_reinforce.
      target_layout: the layout of target_prompt_logprobs if it came sparse; the answer's is to be the same.
      digest: of what is asked, without session and seq_id.
    """

    sampling_session_id: str | None
    base_model: str | None
    model_path: str | None
    seq_id: int | None
    sample: protocol.Sample
    record_stability_info: bool
    target_layout: Csr | None
    digest: str


class _SamplingParams(Request):
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31, strict=True)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, strict=True)] | None = None
    stop: str | list[Any] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31, strict=True)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    def noun(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=_stops(self.stop),
            seed=self.seed,
        )


TopK: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOPK, strict=True)]


class _SampleRequest(Request):
    prompt: dict[str, Any]
    sampling_params: _SamplingParams = _SamplingParams()
    num_samples: Annotated[int, Field(ge=1, le=MAX_NUM_SAMPLES, strict=True)] = 1
    sampling_session_id: Id | None = None
    base_model: Text | None = None
    model_path: Text | None = None
    seq_id: Sequence | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: TopK = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, strict=True)] | None = None
    record_stability_info: bool = False


def decode_sample(body: bytes, *, content_encoding: str | None = None, max_bytes: int = MAX_BODY_BYTES) -> SampleBody:
    """POST /asample, JSON.

    Raises:
      WireError: 400 malformed or contradictory, 413 too large, 422 a field of the wrong type or out of range.
    """
    try:
        asked = _SampleRequest.model_validate(json_object(decompressed(body, content_encoding, max_bytes)))
    except pydantic.ValidationError as error:
        raise refused_fields(error) from None
    if asked.sampling_session_id is None and asked.base_model is None and asked.model_path is None:
        raise WireError(
            "The request does not say what to sample from", expected="sampling_session_id, base_model or model_path"
        )
    if asked.sampling_session_id is not None and asked.seq_id is None:
        raise WireError("seq_id is missing", expected="0 for a sampling session's first request, then 1, 2, ...")
    allowance = Allowance()
    prompt = json_tokens(asked.prompt, "prompt")
    if not prompt.size:
        raise WireError("The prompt is empty", expected="at least one token, such as the model's BOS")
    last_n = asked.prompt_logprobs_last_n
    if last_n is not None and not (asked.prompt_logprobs or asked.topk_prompt_logprobs):
        raise WireError("prompt_logprobs_last_n asks for nothing", remedy="Set prompt_logprobs to true with it")
    if last_n is not None and last_n >= len(prompt):
        raise WireError(
            "prompt_logprobs_last_n is more than can be scored: nothing predicts the first token",
            got=last_n,
            expected=f"1 to {len(prompt) - 1} for a prompt of {len(prompt)} tokens",
        )
    targets, layout = _targets(asked.target_prompt_logprobs, len(prompt), allowance)
    sample = protocol.Sample(
        sampler_id="",
        prompt=tuple(prompt.tolist()),
        params=asked.sampling_params.noun(),
        num_samples=asked.num_samples,
        prompt_logprobs=asked.prompt_logprobs,
        topk_prompt_logprobs=asked.topk_prompt_logprobs,
        prompt_logprobs_last_n=last_n,
        topk_sample_logprobs=asked.topk_sample_logprobs,
        target_prompt_logprobs=targets,
        prompt_alt_tokens=asked.prompt_alt_tokens_k,
    )
    return SampleBody(
        asked.sampling_session_id,
        asked.base_model,
        asked.model_path,
        asked.seq_id,
        sample,
        asked.record_stability_info,
        layout,
        _sample_digest(asked, prompt, targets),
    )


def _sample_digest(asked: _SampleRequest, prompt: np.ndarray, targets: np.ndarray | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    rest = asked.model_dump(exclude={"prompt", "target_prompt_logprobs", "sampling_session_id", "seq_id"})
    digest.update(repr(rest).encode())
    digest_arrays(digest, [("prompt", prompt), *([] if targets is None else [("targets", targets)])])
    return digest.hexdigest()


def _targets(tensor: Any, num_prompt: int, allowance: Allowance) -> tuple[np.ndarray | None, Csr | None]:
    """i64[P - 1, K], -1 where nothing is asked, and the layout if it came sparse."""
    if tensor is None:
        return None, None
    field = "target_prompt_logprobs"
    values, shape, csr = json_parts(tensor, field)
    if values.dtype != np.int64 or len(shape) != 2 or shape[0] != num_prompt - 1:
        raise WireError(
            f"{field} does not match the prompt",
            got=f"{values.dtype} of shape {shortened(list(shape))}",
            expected=f"int64 of shape [{num_prompt - 1}, K]: one row for each prompt token but the first",
        )
    if csr is not None:
        return dense(csr, values, -1, field, allowance), csr
    if math.prod(shape) != values.size or min(shape) < 0:
        raise WireError(f"{field}: the shape does not fit", got=f"{values.size} values for shape {list(shape)}")
    return values.reshape(shape), None


def _stops(stop: str | list[Any] | None) -> str | tuple[str, ...] | tuple[int, ...] | None:
    """None stays: EOS stops. [] stays: nothing does."""
    if stop is None:
        return None
    listed = [stop] if isinstance(stop, str) else stop
    if len(listed) > MAX_STOPS:
        raise WireError("sampling_params.stop has too many entries", got=len(listed), expected=f"at most {MAX_STOPS}")
    kinds = set(map(type, listed))
    if len(kinds) > 1 or kinds - {str, int}:
        raise WireError(
            "sampling_params.stop mixes kinds", got=shortened(listed), expected="a string, strings only, or ids only"
        )
    for one in listed:
        if (isinstance(one, str) and not 0 < len(one) <= MAX_STOP_CHARACTERS) or (isinstance(one, int) and one < 0):
            raise WireError(
                "sampling_params.stop has an entry that can stop nothing",
                got=shortened(one),
                expected=f"1 to {MAX_STOP_CHARACTERS} characters, or a token id",
            )
    return stop if isinstance(stop, str) else tuple(stop)
