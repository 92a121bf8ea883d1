"""The two large requests of the Tinker API, forward_backward and asample, as the values that the rest works with.

    bytes --wire_content--> plain bytes --wire_tensors--> arrays --here--> TrainBody, SampleBody
    --wire_checks--> the same, known to fit the engine;  engine's result --wire_results--> bytes

Everything here is a pure function of bytes, meant for a pool of threads: 3 MB take about ten milliseconds. Whatever the
bytes are, the only exception is `WireError`. The protobuf schema is the SDK's own module, `tinker_public_pb2`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from pydantic import Field
from tinker.proto import tinker_public_pb2 as pb

from locojax.hosts import protocol
from locojax.server.requests import Id, Request, Sequence, Text
from locojax.server.wire_content import JSON, MAX_BODY_BYTES, PROTOBUF, decompressed, json_object, media_type
from locojax.server.wire_errors import WireError, refused_fields, shortened
from locojax.server.wire_tensors import (
    Allowance,
    Csr,
    dense,
    json_parts,
    json_tensor,
    json_tokens,
    proto_tensor,
    proto_tokens,
)
from locojax.types import Datum, SamplingParams

MAX_DATA = 65_536
"""Of one request; the SDK cuts at 1024."""

MAX_NUM_SAMPLES = 4096
MAX_TOPK = 1024
MAX_STOPS = 256
MAX_STOP_CHARACTERS = 1024


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a run of a datum's tokens comes from: positions [offset, offset + length) of what `sequence_id` names.

    `prompt`: of the prompt that the sequence was sampled from; `sampled`: of the sampled tokens themselves.
    Example: Span("sampled", "s1:sample:0:7:2", offset=0, length=31)
    """

    source: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Of one datum: spans that tile its tokens, and spans that tile its target_tokens."""

    tokens: tuple[Span, ...]
    targets: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class TrainBody:
    """A forward_backward or forward request.

    Attributes:
      seq_id: 1 and up; None when the client gave none.
      loss_config: numbers as float.
      gradient: False: a forward pass alone.
      provenance: one a datum, None where the client sent none.
      digest: of everything above but the ids; equal for two bodies that ask for the same.
    """

    model_id: str
    seq_id: int | None
    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, float | str]
    gradient: bool
    provenance: tuple[Provenance | None, ...]
    digest: str

    def operation(self) -> protocol.ForwardBackward:
        """What the engine is asked for."""
        return protocol.ForwardBackward(self.model_id, self.data, self.loss, self.loss_config, self.gradient)


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


def decode_train(
    body: bytes,
    *,
    content_type: str | None = PROTOBUF,
    content_encoding: str | None = None,
    gradient: bool = True,
    max_bytes: int = MAX_BODY_BYTES,
) -> TrainBody:
    """POST /forward_backward, protobuf or (SDKs before 0.25) JSON, or POST /forward (`gradient=False`; JSON).

    Raises:
      WireError: 400 malformed, 413 too large, 415 another content type, 422 a JSON field of the wrong type.
    """
    kind = media_type(content_type)
    plain = decompressed(body, content_encoding, max_bytes)
    if kind in (PROTOBUF, "application/protobuf", "application/octet-stream"):
        return _train_of_proto(plain, gradient)
    if kind in (JSON, ""):
        return _train_of_json(plain, gradient)
    raise WireError(
        "The request's Content-Type is not one that is read",
        got=shortened(kind),
        expected=f"{PROTOBUF} or {JSON}",
        status=415,
    )


def _train_of_proto(plain: bytes, gradient: bool) -> TrainBody:
    try:
        request = pb.ForwardBackwardRequest.FromString(plain)
    except DecodeError as error:
        raise WireError("The request body is not a ForwardBackwardRequest", got=error) from None
    _check_num_data(len(request.data))
    allowance = Allowance()
    data, provenance = [], []
    for i, datum in enumerate(request.data):
        tokens = proto_tokens(datum.model_input, f"data[{i}].model_input", allowance)
        inputs = {
            name: proto_tensor(tensor, f"data[{i}].loss_fn_inputs[{shortened(name)}]", allowance)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        data.append(Datum(tokens, inputs))
        provenance.append(_proto_provenance(datum, i))
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        arm = value.WhichOneof("value")
        if arm is None:
            raise WireError(f"loss_fn_config_v2[{shortened(name)}] has neither a number nor a text")
        config[name] = value.number if arm == "number" else value.text
    return _train_body(
        request.model_id,
        request.seq_id or None,
        data,
        request.loss_fn,
        config,
        gradient and not request.forward_only,
        provenance,
    )


def _proto_provenance(datum: Any, i: int) -> Provenance | None:
    if not (datum.model_input_spans or datum.loss_fn_input_spans):
        return None

    def read(spans: Iterable[Any], field: str) -> tuple[Span, ...]:
        read_spans = []
        for j, span in enumerate(spans):
            arm = span.WhichOneof("span")
            if arm is None:
                raise WireError(f"data[{i}].{field}[{j}] has neither prompt_tokens nor sampled_tokens")
            part = getattr(span, arm)
            source: Literal["prompt", "sampled"] = "prompt" if arm == "prompt_tokens" else "sampled"
            read_spans.append(Span(source, part.sequence_id, part.offset, part.length))
        return tuple(read_spans)

    return Provenance(
        read(datum.model_input_spans, "model_input_spans"), read(datum.loss_fn_input_spans, "loss_fn_input_spans")
    )


def _check_num_data(num_data: int) -> None:
    if num_data > MAX_DATA:
        raise WireError("The request has too many data", got=num_data, expected=f"at most {MAX_DATA}", status=413)


class _TrainInput(Request):
    data: list[dict[str, Any]]
    loss_fn: Text
    loss_fn_config: dict[str, float | str] = {}


class _TrainHead(Request):
    """The JSON twin; `forward_input` is what POST /forward calls the same thing."""

    model_id: Id
    seq_id: Sequence | None = None
    forward_backward_input: _TrainInput = Field(
        validation_alias=pydantic.AliasChoices("forward_backward_input", "forward_input")
    )


def _train_of_json(plain: bytes, gradient: bool) -> TrainBody:
    try:
        head = _TrainHead.model_validate(json_object(plain))
    except pydantic.ValidationError as error:
        raise refused_fields(error) from None
    given = head.forward_backward_input
    _check_num_data(len(given.data))
    allowance = Allowance()
    data = []
    for i, datum in enumerate(given.data):
        tokens = json_tokens(datum.get("model_input"), f"data[{i}].model_input", allowance)
        inputs = datum.get("loss_fn_inputs")
        if type(inputs) is not dict:
            raise WireError(f"data[{i}].loss_fn_inputs is not an object", got=shortened(inputs), status=422)
        arrays = {
            name: json_tensor(tensor, f"data[{i}].loss_fn_inputs[{shortened(name)}]", allowance)
            for name, tensor in inputs.items()
        }
        data.append(Datum(tokens, arrays))
    return _train_body(
        head.model_id, head.seq_id, data, given.loss_fn, given.loss_fn_config, gradient, [None] * len(data)
    )


def _train_body(
    model_id: str,
    seq_id: int | None,
    data: list[Datum],
    loss: str,
    config: Mapping[str, float | str],
    gradient: bool,
    provenance: list[Provenance | None],
) -> TrainBody:
    if not model_id or len(model_id) > 512 or not model_id.isprintable():
        raise WireError("model_id is not a model's id", got=shortened(model_id))
    if seq_id is not None and seq_id < 1:
        raise WireError("seq_id is not a sequence number", got=seq_id, expected="1 or more")
    for i, (datum, spans) in enumerate(zip(data, provenance, strict=True)):
        if spans is not None:
            targets = datum.inputs.get("target_tokens")
            _check_tiling(spans.tokens, len(datum.tokens), f"data[{i}].model_input_spans")
            _check_tiling(spans.targets, 0 if targets is None else len(targets), f"data[{i}].loss_fn_input_spans")
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((loss, sorted(config.items()), gradient, provenance)).encode())
    for datum in data:
        _digest_arrays(digest, [("", datum.tokens), *sorted(datum.inputs.items())])
    return TrainBody(model_id, seq_id, tuple(data), loss, dict(config), gradient, tuple(provenance), digest.hexdigest())


def _digest_arrays(digest: hashlib.blake2b, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    for name, array in arrays:
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)


def _check_tiling(spans: tuple[Span, ...], length: int, field: str) -> None:
    for j, span in enumerate(spans):
        if not span.sequence_id or span.offset < 0 or span.length < 0:
            raise WireError(f"{field}[{j}] is not a span", got=shortened(span, 200))
    covered = sum(span.length for span in spans)
    if covered != length:
        raise WireError(f"{field} does not tile its tokens", got=f"{covered} positions", expected=f"{length}")


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
    prompt = json_tokens(asked.prompt, "prompt", allowance)
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
    _digest_arrays(digest, [("prompt", prompt), *([] if targets is None else [("targets", targets)])])
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
