"""Whatever the bytes are: a request, or a WireError, and soon."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as pb
from wire_bodies import (
    INFO,
    as_json,
    as_proto,
    csr_tensor,
    json_bytes,
    model_input,
    policy_datum,
    sample_body,
    train_request,
)

from locojax.server import requests, wire
from locojax.server.wire_content import MAX_BODY_BYTES

MAX_SECONDS = 2.0
"""Of this thread. A kilobyte takes under a millisecond, the largest bodies some tenths of a second."""


def whole_request() -> Any:
    """Has something of everything: chunks, policy inputs, a sparse tensor, spans, settings."""
    spans = [sdk.PromptProvenanceSpan(sequence_id="q", length=1), sdk.SampledProvenanceSpan(sequence_id="q", length=3)]
    sparse = sdk.Datum(
        model_input=model_input([1, 2, 3], [1]),
        loss_fn_inputs={
            "target_tokens": csr_tensor(np.array([[0, 5, 0], [7, 0, 0], [0, 0, 9]])),
            "weights": csr_tensor(np.array([[0, 1, 0], [1, 0, 0], [0, 0, -1]], np.float32)),
        },
    )
    tiled = policy_datum().with_provenance(model_input=spans, loss_fn_inputs=spans)
    return train_request([tiled, sparse], "ppo", {"clip_low_threshold": 0.8, "mode": "text"})


PROTO = as_proto(whole_request())
WITHOUT_SPANS = as_json(whole_request())
SAMPLE = sample_body(
    target_prompt_logprobs={
        "data": [5, 6],
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 2],
    },
    topk_prompt_logprobs=2,
    prompt_logprobs_last_n=2,
)


def train_proto(body: bytes) -> None:
    wire.validate_train(wire.decode_train(body), INFO)


def train_json(body: bytes) -> None:
    wire.validate_train(wire.decode_train(body, content_type="application/json"), INFO)


def sample(body: bytes) -> None:
    wire.validate_sample(wire.decode_sample(body), INFO)


def answered(read: Callable[[bytes], None], body: bytes) -> bool:
    """True if it was a request. Fails on any exception but WireError, an odd status, an overlong text, or slowness."""
    start = time.thread_time()
    try:
        read(body)
    except wire.WireError as error:
        assert error.status in (400, 413, 415, 422)
        assert 0 < len(str(error)) < 4000
        assert not any(name in str(error) for name in ("Traceback", "object at 0x"))
        return False
    finally:
        assert time.thread_time() - start < MAX_SECONDS
    return True


def test_the_bodies_that_are_mutated_are_good_ones():
    body = wire.decode_train(PROTO)
    assert [len(datum.tokens) for datum in body.data] == [4, 3]
    assert body.provenance[0] is not None
    assert answered(sample, json_bytes(SAMPLE))
    assert wire.decode_train(json_bytes(WITHOUT_SPANS), content_type="application/json").loss == "ppo"


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.sampled_from([None, "zstd", "gzip", "identity", "deflate, gzip"]))
def test_any_bytes(body, encoding):
    for content_type in ("application/x-protobuf", "application/json", "", "text/html"):
        answered(lambda b: wire.decode_train(b, content_type=content_type, content_encoding=encoding), body)  # noqa: B023
    answered(lambda b: wire.decode_sample(b, content_encoding=encoding), body)
    answered(lambda b: requests.parse(requests.CreateModel, b), body)


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """The body with a few bytes changed, cut out, doubled or put in."""
    damaged_body = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.integers(0, len(damaged_body)))
        length = draw(st.integers(0, 12))
        piece = draw(st.one_of(st.binary(max_size=12), st.just(bytes(damaged_body[where : where + length]) * 2)))
        damaged_body[where : where + length] = piece
    return bytes(damaged_body)


@settings(deadline=None, max_examples=400)
@given(damaged(PROTO))
def test_damaged_protobuf(body):
    answered(train_proto, body)


@settings(deadline=None, max_examples=200)
@given(damaged(json_bytes(WITHOUT_SPANS)), damaged(json_bytes(SAMPLE)))
def test_damaged_json(train_body, sample_body):
    answered(train_json, train_body)
    answered(sample, sample_body)


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.integers(-2, 5),
        st.sampled_from([2**31, -(2**31), 2**63, -(2**63), 2**62]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=4),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in inner for place in places(item, (*path, key))]


@st.composite
def misshapen(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """The body with one or two of the values inside it replaced, or left out."""
    changed = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from(places(changed)))
        holder = changed
        for key in above:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(ANYTHING)
        else:
            del holder[last]
    return changed


@settings(deadline=None, max_examples=200)
@given(misshapen(WITHOUT_SPANS), misshapen(SAMPLE))
def test_misshapen_json(train_body, sample_body):
    answered(train_json, json_bytes(train_body))
    answered(sample, json_bytes(sample_body))


AS_MESSAGE = json_format.MessageToDict(pb.ForwardBackwardRequest.FromString(PROTO), preserving_proto_field_name=True)


@settings(deadline=None, max_examples=200)
@given(misshapen(AS_MESSAGE))
def test_misshapen_protobuf(message):
    """Well-formed messages that make no sense, which random bytes seldom are."""
    try:
        body = json_format.ParseDict(message, pb.ForwardBackwardRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, TypeError, AttributeError):
        return  # no such message can be sent
    answered(train_proto, body.SerializeToString())


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


NEAR_LIMIT = MAX_BODY_BYTES - 64


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (train_proto, field(3, b"") * (NEAR_LIMIT // 2)),
        (train_proto, field(3, field(1, b"") * (NEAR_LIMIT // 2))),
        (train_proto, field(3, field(2, b"") * (NEAR_LIMIT // 2))),
        (train_proto, b"\x1a\x80" * (NEAR_LIMIT // 2)),
        (train_json, b'{"forward_backward_input":{"data":[' + b"{}," * (NEAR_LIMIT // 3) + b"{}]}}"),
        (sample, b'{"prompt":{"chunks":[' + b"{}," * (NEAR_LIMIT // 8) + b"{}]}}"),
        (sample, b'{"x":' + b"[" * NEAR_LIMIT),
        (sample, b'{"prompt":"' + b"\\" * NEAR_LIMIT),
    ],
    ids=["data", "chunks", "inputs", "truncated", "json data", "json chunks", "nesting", "text"],
)
def test_the_largest_bodies_are_refused_soon(read, body):
    assert not answered(read, body)


def test_a_small_body_cannot_ask_for_much_memory():
    """A sparse tensor of 2^31 - 1 columns, and a list with one long text among many numbers."""
    message = pb.ForwardBackwardRequest.FromString(PROTO)
    message.data[1].loss_fn_inputs["weights"].shape[1] = 2**31 - 1
    numbers = copy.deepcopy(WITHOUT_SPANS)
    tensor = numbers["forward_backward_input"]["data"][0]["loss_fn_inputs"]["advantages"]
    tensor["data"] = [0.5] * 10_000 + ["x" * 100_000]
    tracemalloc.start()
    try:
        assert not answered(train_proto, message.SerializeToString())
        assert not answered(train_json, json_bytes(numbers))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_three_megabytes_are_read_quickly():
    """128 data of 1024 tokens, 10 ms of an idle core; as JSON, of older SDKs, 100 ms."""
    request = train_request([policy_datum(1024)] * 128)
    for body, content_type, limit in (
        (as_proto(request), "application/x-protobuf", 0.2),
        (json.dumps(as_json(request)).encode(), "application/json", 2.0),
    ):
        seconds = []
        for _ in range(3):
            start = time.thread_time()
            assert len(wire.decode_train(body, content_type=content_type).data) == 128
            seconds.append(time.thread_time() - start)
        assert min(seconds) < limit
