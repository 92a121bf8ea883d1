"""Results, against the SDK's own decoders; and the JSON of SDKs before 0.18."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from locojax.hosts.protocol import Sampled
from locojax.server import wire
from locojax.types import Completion, ForwardBackwardResult

PROTOBUF = "application/x-protobuf"


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/x-protobuf", True),
        ("application/x-protobuf, application/json", True),
        ("application/json;q=0.5, Application/X-Protobuf;q=0.9", True),
        ("application/json", False),
        ("*/*", False),
        ("", False),
        (None, False),
    ],
)
def test_accept(accept, wanted):
    assert wire.wants_protobuf(accept) is wanted


@st.composite
def results(draw: st.DrawFn) -> ForwardBackwardResult:
    """Ragged outputs, some of shape [N], some of [N, K] with K of their own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    outputs = []
    for num_tokens, k in draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=6)):
        shape = (num_tokens, k) if k else (num_tokens,)
        outputs.append(
            {
                "logprobs": rng.normal(size=shape).astype(np.float32),
                "elementwise_loss": rng.normal(size=shape).astype(np.float32),
            }
        )
    return ForwardBackwardResult(tuple(outputs), {"loss:sum": draw(st.floats(-1e6, 1e6)), "x:mean": math.inf})


@settings(deadline=None, max_examples=60)
@given(results())
def test_the_sdk_reads_a_training_result_back(result):
    kind, body = wire.encode(result, PROTOBUF)
    assert kind == PROTOBUF
    read = deserialize_forward_backward_output(body)
    assert read.metrics == result.metrics
    assert read.loss_fn_output_type == "ArrayRecord"
    assert len(read.loss_fn_outputs) == len(result.outputs)
    for theirs, ours in zip(read.loss_fn_outputs, result.outputs, strict=True):
        assert set(theirs) == set(ours)
        for name, array in ours.items():
            np.testing.assert_array_equal(theirs[name].to_numpy(), array, strict=True)


@settings(deadline=None, max_examples=30)
@given(results())
def test_older_sdks_read_it_as_json(result):
    kind, body = wire.encode(result, "application/json")
    assert kind == "application/json"
    read = json.loads(body)
    assert read["metrics"] == result.metrics
    assert set(read) == {"loss_fn_output_type", "loss_fn_outputs", "metrics"}
    for theirs, ours in zip(read["loss_fn_outputs"], result.outputs, strict=True):
        for name, array in ours.items():
            assert theirs[name]["dtype"] == "float32"
            np.testing.assert_array_equal(
                np.array(theirs[name]["data"], np.float32).reshape(theirs[name]["shape"]), array, strict=True
            )


def completion(index: int, tokens: list[int], stop_reason="stop") -> Completion:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 3
    return Completion(index, tuple(tokens), logprobs, "", stop_reason, None, policy_version=0)


FULL = Sampled(
    completions=(completion(0, [5, 2]), completion(1, [6, 7, 8], "length"), completion(2, [9], "abort")),
    prompt_logprobs=np.array([np.nan, -0.25, -0.5], np.float32),
    topk_prompt_logprobs=(
        np.array([[0, 0], [4, 3], [7, 0]], np.int32),
        np.array([[-99999, -99999], [-0.1, -0.2], [-0.3, -99999]], np.float32),
    ),
    topk_sample_logprobs=tuple((np.full((n, 1), 7, np.int32), np.full((n, 1), -0.5, np.float32)) for n in (2, 3, 1)),
    target_prompt_logprobs=np.array([[-1.0, 0.0], [0.0, -2.0]], np.float32),
    prompt_alt_tokens=(
        np.array([[0, 0], [11, 12], [13, 14]], np.int32),
        np.array([[-99999, -99999], [-1, -2], [-3, -4]], np.float32),
    ),
    num_cached_prompt_tokens=2,
)


def layout() -> wire.Csr:
    return wire.Csr((2, 2), np.array([0, 1, 2]), np.array([0, 1]))


def test_the_sdk_reads_samples_back():
    read = deserialize_sample_response(wire.encode(FULL, PROTOBUF)[1])
    assert [sequence.tokens for sequence in read.sequences] == [[5, 2], [6, 7, 8], [9]]
    assert [sequence.stop_reason for sequence in read.sequences] == ["stop", "length", "length"]
    for sequence, ours in zip(read.sequences, FULL.completions, strict=True):
        np.testing.assert_array_equal(sequence.logprobs_np, ours.logprobs, strict=True)
        assert sequence.topk_logprobs == [[(7, -0.5)]] * len(ours.tokens)
    assert read.prompt_logprobs == [None, -0.25, -0.5]
    assert read.topk_prompt_logprobs == [
        None,
        [(4, pytest.approx(-0.1)), (3, pytest.approx(-0.2))],
        [(7, pytest.approx(-0.3))],
    ]
    assert read.prompt_cache_hit_tokens == 2
    assert read.target_prompt_logprobs is not None and read.prompt_alt_tokens is not None
    assert read.target_prompt_logprobs.to_numpy().tolist() == [[-1.0, 0.0], [0.0, -2.0]]
    assert read.prompt_alt_tokens.tokens.to_numpy().tolist() == [[11, 12], [13, 14]]
    assert read.prompt_alt_tokens.tokens.dtype == "int64"
    assert read.prompt_alt_tokens.logprobs.to_numpy().tolist() == [[-1.0, -2.0], [-3.0, -4.0]]


def test_target_logprobs_come_in_the_layout_they_were_asked_in():
    tensor = deserialize_sample_response(wire.encode(FULL, PROTOBUF, layout())[1]).target_prompt_logprobs
    assert tensor is not None
    assert (tensor.data, tensor.shape) == ([-1.0, -2.0], [2, 2])
    assert (tensor.sparse_crow_indices, tensor.sparse_col_indices) == ([0, 1, 2], [0, 1])
    sparse = json.loads(wire.encode(FULL, None, layout())[1])["target_prompt_logprobs"]
    assert sparse == {
        "data": [-1.0, -2.0],
        "dtype": "float32",
        "shape": [2, 2],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [0, 1],
    }


def test_what_was_not_asked_for_is_absent():
    plain = Sampled((completion(0, [5]),))
    read = deserialize_sample_response(wire.encode(plain, PROTOBUF)[1])
    assert read.prompt_logprobs is None
    assert read.topk_prompt_logprobs is None
    assert read.target_prompt_logprobs is None
    assert read.prompt_alt_tokens is None
    assert read.sequences[0].topk_logprobs is None
    assert set(json.loads(wire.encode(plain, None)[1])) == {"type", "sequences", "prompt_cache_hit_tokens"}


def test_samples_as_json():
    read = json.loads(wire.encode(FULL, "application/json")[1])
    assert read["prompt_logprobs"] == [None, -0.25, -0.5]
    assert [sequence["stop_reason"] for sequence in read["sequences"]] == ["stop", "length", "length"]
    assert read["sequences"][1]["tokens"] == [6, 7, 8]
    np.testing.assert_allclose(read["sequences"][1]["logprobs"], FULL.completions[1].logprobs, rtol=1e-7)
    assert read["topk_prompt_logprobs"][0] is None
    assert read["topk_prompt_logprobs"][1] == [[4, pytest.approx(-0.1)], [3, pytest.approx(-0.2)]]
    assert read["topk_prompt_logprobs"][2] == [[7, pytest.approx(-0.3)]]
    assert read["prompt_alt_tokens"]["tokens"] == {"data": [11, 12, 13, 14], "dtype": "int64", "shape": [2, 2]}


def test_json_has_no_null_where_a_client_wants_a_number():
    """A null makes the client's types fail on every poll; NaN is what Python's JSON reader understands."""
    lost = Sampled((Completion(0, (5,), np.array([np.nan], np.float32), "", "stop", None, 0),))
    assert math.isnan(json.loads(wire.encode(lost, None)[1])["sequences"][0]["logprobs"][0])
    result = ForwardBackwardResult(({"logprobs": np.array([-np.inf], np.float32)},), {"loss:sum": math.nan})
    read = json.loads(wire.encode(result, None)[1])
    assert math.isnan(read["metrics"]["loss:sum"])
    assert read["loss_fn_outputs"][0]["logprobs"]["data"] == [-math.inf]
