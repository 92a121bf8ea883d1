"""forward_backward and forward requests, protobuf or JSON, as `TrainBody`.

The protobuf schema is the SDK's own module, `tinker_public_pb2`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pydantic
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tinker.proto import tinker_public_pb2 as pb

from locojax.hosts import protocol
from locojax.server.requests import Id, Request, Sequence, Text
from locojax.server.wire_content import JSON, MAX_BODY_BYTES, PROTOBUF, decompressed, json_object, media_type
from locojax.server.wire_counts import check_proto_parts
from locojax.server.wire_errors import WireError, refused_fields, shortened
from locojax.server.wire_tensors import Allowance, digest_arrays, json_tensor, json_tokens, proto_tensor, proto_tokens
from locojax.types import Datum


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
    check_proto_parts(plain)
    try:
        request = pb.ForwardBackwardRequest.FromString(plain)
    except DecodeError as error:
        raise WireError("The request body is not a ForwardBackwardRequest", got=error) from None
    allowance = Allowance()
    data, provenance = [], []
    for i, datum in enumerate(request.data):
        tokens = proto_tokens(datum.model_input, f"data[{i}].model_input")
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


class _TrainInput(Request):
    data: list[dict[str, Any]]
    loss_fn: Text
    loss_fn_config: dict[str, float | str] = {}


class _TrainHead(Request):
    """The JSON twin; `forward_input` is what POST /forward calls the same thing."""

    model_id: Id
    seq_id: Sequence | None = None
    forward_backward_input: _TrainInput = pydantic.Field(
        validation_alias=pydantic.AliasChoices("forward_backward_input", "forward_input")
    )


def _train_of_json(plain: bytes, gradient: bool) -> TrainBody:
    try:
        head = _TrainHead.model_validate(json_object(plain))
    except pydantic.ValidationError as error:
        raise refused_fields(error) from None
    given = head.forward_backward_input
    allowance = Allowance()
    data = []
    for i, datum in enumerate(given.data):
        tokens = json_tokens(datum.get("model_input"), f"data[{i}].model_input")
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
    digest_arrays(digest, _arrays(data))
    return TrainBody(model_id, seq_id, tuple(data), loss, dict(config), gradient, tuple(provenance), digest.hexdigest())


def _check_tiling(spans: tuple[Span, ...], length: int, field: str) -> None:
    for j, span in enumerate(spans):
        if not span.sequence_id or span.offset < 0 or span.length < 0:
            raise WireError(f"{field}[{j}] is not a span", got=shortened(span, 200))
    covered = sum(span.length for span in spans)
    if covered != length:
        raise WireError(f"{field} does not tile its tokens", got=f"{covered} positions", expected=f"{length}")


def _arrays(data: Iterable[Datum]) -> Iterator[tuple[str, np.ndarray]]:
    """Every array of every datum, named, in an order that does not depend on that of the inputs in the body."""
    for datum in data:
        yield "", datum.tokens
        for name in sorted(datum.inputs):
            yield name, datum.inputs[name]
