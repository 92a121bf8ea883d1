"""forward_backward bodies, against the SDK's own encoder; malformed ones, by the text of their errors."""

from __future__ import annotations

import dataclasses
import gzip

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as pb
from wire_bodies import as_json, as_proto, csr_tensor, data, dense_tensor, json_bytes, policy_datum, train_request

from locojax.server import wire
from locojax.server.wire_content import MAX_BODY_BYTES


def dense_of(tensor: sdk.TensorData) -> np.ndarray:
    """A TensorData as a dense array, cell by cell."""
    if tensor.sparse_crow_indices is None:
        return np.array(tensor.data, tensor.dtype).reshape(tensor.shape)
    assert tensor.shape is not None and tensor.sparse_col_indices is not None
    out = np.zeros(tensor.shape, tensor.dtype)
    for row, (start, end) in enumerate(
        zip(tensor.sparse_crow_indices[:-1], tensor.sparse_crow_indices[1:], strict=True)
    ):
        for cell in range(start, end):
            out[row, tensor.sparse_col_indices[cell]] = tensor.data[cell]
    return out


def assert_same_data(body: wire.TrainBody, sent: list[sdk.Datum]) -> None:
    assert len(body.data) == len(sent)
    for ours, theirs in zip(body.data, sent, strict=True):
        assert ours.tokens.dtype == np.int32
        assert ours.tokens.tolist() == theirs.model_input.to_ints()
        assert set(ours.inputs) == set(theirs.loss_fn_inputs)
        for name, tensor in theirs.loss_fn_inputs.items():
            assert ours.inputs[name].dtype == tensor.dtype
            np.testing.assert_array_equal(ours.inputs[name], dense_of(tensor), strict=True)


CONFIGS = st.dictionaries(
    st.text(max_size=8), st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)), max_size=3
)


@settings(deadline=None, max_examples=60)
@given(st.lists(data(), max_size=4), CONFIGS, st.integers(1, 2**31 - 1))
def test_what_the_sdk_encodes_is_what_is_read(sent, config, seq_id):
    request = train_request(sent, "cross_entropy", config, seq_id)
    body = wire.decode_train(as_proto(request))
    assert (body.model_id, body.seq_id, body.loss, body.gradient) == ("s1:train:0", seq_id, "cross_entropy", True)
    assert body.loss_config == config
    assert body.provenance == (None,) * len(sent)
    assert_same_data(body, sent)


@settings(deadline=None, max_examples=60)
@given(st.lists(data(), max_size=4), CONFIGS)
def test_the_json_of_older_sdks_is_the_same_request(sent, config):
    request = train_request(sent, "cross_entropy", config)
    ours = wire.decode_train(json_bytes(as_json(request)), content_type="application/json; charset=utf-8")
    assert_same_data(ours, sent)
    assert ours.digest == wire.decode_train(as_proto(request)).digest


def test_forward_is_a_request_without_gradient():
    message = pb.ForwardBackwardRequest.FromString(as_proto(train_request([policy_datum()])))
    message.forward_only = True
    assert wire.decode_train(message.SerializeToString()).gradient is False
    legacy = as_json(train_request([policy_datum()]))
    legacy["forward_input"] = legacy.pop("forward_backward_input")
    body = wire.decode_train(json_bytes(legacy), content_type="application/json", gradient=False)
    assert body.gradient is False and len(body.data) == 1
    assert body.operation().gradient is False


def test_older_loss_config_is_read_and_the_newer_one_wins():
    message = pb.ForwardBackwardRequest.FromString(as_proto(train_request([policy_datum()])))
    message.loss_fn_config["beta"] = 0.5
    assert wire.decode_train(message.SerializeToString()).loss_config == {"beta": 0.5}
    message.loss_fn_config_v2["beta"].number = 0.25
    assert wire.decode_train(message.SerializeToString()).loss_config == {"beta": 0.25}


def test_bfloat16_and_int32_tensors():
    message = pb.ForwardBackwardRequest.FromString(as_proto(train_request([policy_datum()])))
    values = np.array([1.5, -2.0, 0.0, 3.0e38], np.float32)
    tensor = message.data[0].loss_fn_inputs["advantages"]
    tensor.dense, tensor.dtype = (values.view(np.uint32) >> 16).astype("<u2").tobytes(), pb.DTYPE_BFLOAT16
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([7, 8, 9, -1], "<i4").tobytes(), pb.DTYPE_INT32
    del targets.shape[:]  # left out: one dimension
    inputs = wire.decode_train(message.SerializeToString()).data[0].inputs
    assert inputs["advantages"].dtype == np.float32
    np.testing.assert_allclose(inputs["advantages"], values, rtol=2**-8)
    assert inputs["target_tokens"].tolist() == [7, 8, 9, -1]


def test_provenance_spans():
    spans = {
        "model_input": [
            sdk.PromptProvenanceSpan(sequence_id="q", length=3),
            sdk.SampledProvenanceSpan(sequence_id="q", length=1),
        ],
        "loss_fn_inputs": [
            sdk.PromptProvenanceSpan(sequence_id="q", offset=1, length=2),
            sdk.SampledProvenanceSpan(sequence_id="r", offset=5, length=2),
        ],
    }
    body = wire.decode_train(as_proto(train_request([policy_datum(4).with_provenance(**spans), policy_datum()])))
    assert body.provenance == (
        wire.Provenance(
            tokens=(wire.Span("prompt", "q", 0, 3), wire.Span("sampled", "q", 0, 1)),
            targets=(wire.Span("prompt", "q", 1, 2), wire.Span("sampled", "r", 5, 2)),
        ),
        None,
    )


def test_a_seq_id_that_is_left_out_is_none():
    """protobuf's 0 is an absent number; the first operation of a model is number 1."""
    assert wire.decode_train(message_with(seq_id=0).SerializeToString()).seq_id is None
    body = {name: value for name, value in JSON_REQUEST.items() if name != "seq_id"}
    assert wire.decode_train(json_bytes(body), content_type="application/json").seq_id is None


def test_the_digest_tells_requests_apart_by_what_they_ask():
    one = wire.decode_train(as_proto(train_request([policy_datum()], config={"a": 1.0, "b": 2.0})))
    reordered = train_request([policy_datum()], config={"b": 2.0, "a": 1.0}, seq_id=2)
    assert wire.decode_train(as_proto(reordered)).digest == one.digest
    others = [
        train_request([policy_datum()], config={"a": 1.0, "b": 2.5}),
        train_request([policy_datum()] * 2, config={"a": 1.0, "b": 2.0}),
        train_request([policy_datum()], "ppo", {"a": 1.0, "b": 2.0}),
        train_request([policy_datum(advantages=dense_tensor(np.zeros(4, np.float32)))], config={"a": 1.0, "b": 2.0}),
    ]
    digests = {wire.decode_train(as_proto(other)).digest for other in others}
    assert len(digests | {one.digest}) == 5


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("zstd", zstandard.ZstdCompressor().compress),
        ("zstd", lambda plain: zstandard.ZstdCompressor(write_content_size=False).compress(plain)),
        ("ZSTD", zstandard.ZstdCompressor(level=19, write_checksum=True).compress),
        ("gzip", gzip.compress),
        (None, bytes),
        ("identity", bytes),
    ],
)
def test_compressed_bodies(encoding, compress):
    sent = [policy_datum(31) for _ in range(40)]
    body = wire.decode_train(compress(as_proto(train_request(sent))), content_encoding=encoding)
    assert_same_data(body, sent)


BOMB = bytes(MAX_BODY_BYTES + 1)


@pytest.mark.parametrize(
    ("encoding", "compressed", "status", "problem"),
    [
        ("zstd", zstandard.ZstdCompressor().compress(BOMB), 413, "after zstd"),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(BOMB), 413, "after zstd"),
        ("gzip", gzip.compress(BOMB, mtime=0), 413, "after gzip"),
        (None, BOMB, 413, "The request body is too long. Got: 33554433 bytes."),
        ("zstd", zstandard.ZstdCompressor().compress(bytes(100))[:-3], 400, "not valid zstd"),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))[:-3], 400, "not valid zstd"),
        ("zstd", zstandard.ZstdCompressor().compress(bytes(100)) + b"x", 400, "not valid zstd"),
        ("zstd", b"", 400, "not valid zstd"),
        ("zstd", b"plain", 400, "not valid zstd"),
        ("gzip", gzip.compress(bytes(100), mtime=0)[:-9], 400, "not valid gzip"),
        ("gzip", b"plain", 400, "not valid gzip"),
        ("br", b"", 415, "Content-Encoding is not one that is read. Got: 'br'. Expected: zstd, gzip or none."),
    ],
)
def test_damaged_and_oversized_bodies(encoding, compressed, status, problem):
    with pytest.raises(wire.WireError, match="(?s)") as caught:
        wire.decode_train(compressed, content_encoding=encoding)
    assert problem in str(caught.value)
    assert caught.value.status == status


def test_an_unknown_content_type_is_refused():
    with pytest.raises(wire.WireError, match=r"Got: 'text/plain'. Expected: application/x-protobuf") as caught:
        wire.decode_train(b"", content_type="text/plain; charset=x")
    assert caught.value.status == 415


def message_with(**fields):
    message = pb.ForwardBackwardRequest.FromString(as_proto(train_request([policy_datum()])))
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def refusal(message: pb.ForwardBackwardRequest) -> str:
    with pytest.raises(wire.WireError) as caught:
        wire.decode_train(message.SerializeToString())
    assert caught.value.status in (400, 413)
    return str(caught.value)


def test_messages_that_contradict_themselves():
    assert "model_id is not a model's id" in refusal(message_with(model_id=""))
    assert "seq_id is not a sequence number. Got: -1" in refusal(message_with(seq_id=-1))
    torn = message_with()
    torn.data[0].model_input[0].encoded_text.tokens = b"12345"
    assert "data[0].model_input[0]: tokens are not int32 values. Got: 5 bytes" in refusal(torn)
    image = message_with()
    image.data[0].model_input.add().image.data = b"png"
    assert "data[0].model_input[1] is not text. Got: an image" in refusal(image)
    sound = message_with()
    sound.data[0].model_input.add().dmel.dmel = b"x"
    assert "data[0].model_input[1] is not text. Got: audio" in refusal(sound)
    empty = message_with()
    empty.data[0].model_input.add()
    assert "Got: an empty chunk" in refusal(empty)
    nothing = message_with()
    nothing.loss_fn_config_v2["x"].SetInParent()
    assert "loss_fn_config_v2['x'] has neither a number nor a text" in refusal(nothing)
    span = message_with()
    span.data[0].model_input_spans.add()
    assert "data[0].model_input_spans[0] has neither" in refusal(span)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sequence_id": "q", "offset": -1, "length": 4}, "is not a span"),
        ({"sequence_id": "", "length": 4}, "is not a span"),
        ({"sequence_id": "q", "length": 3}, "does not tile its tokens. Got: 3 positions. Expected: 4"),
        ({"sequence_id": "q", "length": 2**62}, "does not tile its tokens"),
    ],
)
def test_spans_must_tile(fields, problem):
    message = message_with()
    message.data[0].model_input_spans.add().sampled_tokens.CopyFrom(pb.SampledProvenanceSpan(**fields))
    message.data[0].loss_fn_input_spans.add().sampled_tokens.CopyFrom(
        pb.SampledProvenanceSpan(sequence_id="q", length=4)
    )
    assert problem in refusal(message)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (pb.Tensor(dense=b"1234"), "this dtype is not one that is read. Got: 0"),
        (pb.Tensor(dense=b"1234", dtype=77), "this dtype is not one that is read. Got: 77"),  # type: ignore[arg-type]
        (pb.Tensor(dense=b"12345", dtype=pb.DTYPE_FLOAT32), "not a whole number of values. Got: 5 bytes of 4 each"),
        (pb.Tensor(dense=bytes(16), dtype=pb.DTYPE_FLOAT32, shape=[5]), "the shape does not fit"),
        (pb.Tensor(dense=bytes(16), dtype=pb.DTYPE_FLOAT32, shape=[-2, -2]), "the shape does not fit"),
        (pb.Tensor(dense=bytes(16), dtype=pb.DTYPE_FLOAT32, shape=[1, 2, 2]), "the shape does not fit"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_FLOAT32, shape=[0, 2**62]), "the shape does not fit"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2**40, 2**40]), "the shape does not fit"),
    ],
)
def test_tensors_that_do_not_fit(tensor, problem):
    message = message_with()
    message.data[0].loss_fn_inputs["advantages"].CopyFrom(tensor)
    assert "data[0].loss_fn_inputs['advantages']" in refusal(message)
    assert problem in refusal(message)


def csr(values: int, crow: list[int], columns: list[int], shape: list[int]) -> pb.Tensor:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape)
    tensor.sparse_csr.values = bytes(4 * values)
    tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    return tensor


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (csr(1, [0, 1], [0], []), "Expected: a shape [N, K]"),
        (csr(1, [0, 1], [0], [-1, 3]), "Expected: a shape [N, K]"),
        (csr(1, [0, 1], [0], [1, 2**40]), "Expected: a shape [N, K]"),
        (csr(1, [0, 1], [0], [2, 3]), "Got: 2 row pointers. Expected: 3"),
        (csr(1, [0, -1, 1], [0], [2, 3]), "row pointers that rise"),
        (csr(1, [1, 1, 1], [0], [2, 3]), "row pointers that rise"),
        (csr(1, [0, 1, 2], [0], [2, 3]), "row pointers that rise"),
        (csr(2, [0, 1, 1], [0], [2, 3]), "row pointers that rise"),
        (csr(1, [0, 2**62, 1], [0], [2, 3]), "row pointers that rise"),
        (csr(1, [0, 1, 1], [3], [2, 3]), "columns 3 to 3. Expected: 0 to 2"),
        (csr(1, [0, 1, 1], [-1], [2, 3]), "columns -1 to -1. Expected: 0 to 2"),
        (csr(2, [0, 2, 2], [1, 1], [2, 3]), "columns out of order"),
        (csr(2, [0, 2, 2], [2, 1], [2, 3]), "columns out of order"),
        (csr(0, [0, 0], [], [1, 2**31 - 1]), "too large when written out"),
    ],
)
def test_sparse_tensors_that_contradict_themselves(tensor, problem):
    message = message_with()
    message.data[0].loss_fn_inputs["weights"].CopyFrom(tensor)
    assert problem in refusal(message)


def test_columns_begin_anew_in_each_row():
    array = np.array([[0, 5, 0], [7, 0, 0], [0, 0, 0], [1, 2, 3]])
    body = wire.decode_train(as_proto(train_request([policy_datum(target_tokens=csr_tensor(array))])))
    np.testing.assert_array_equal(body.data[0].inputs["target_tokens"], array)


JSON_REQUEST = as_json(train_request([policy_datum()]))


def with_tensor(**fields):
    datum = JSON_REQUEST["forward_backward_input"]["data"][0]
    tensor = datum["loss_fn_inputs"]["target_tokens"] | fields
    inputs = datum["loss_fn_inputs"] | {"target_tokens": tensor}
    return JSON_REQUEST | {"forward_backward_input": {"data": [datum | {"loss_fn_inputs": inputs}], "loss_fn": "ppo"}}


def with_tokens(*tokens):
    datum = JSON_REQUEST["forward_backward_input"]["data"][0]
    chunk = {"type": "encoded_text", "tokens": list(tokens)}
    return JSON_REQUEST | {
        "forward_backward_input": {"data": [datum | {"model_input": {"chunks": [chunk]}}], "loss_fn": "ppo"}
    }


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        (b"{", 400, "The request body is not JSON"),
        (b"[" * 100_000, 400, "The request body is not JSON"),
        (b"[]", 422, "not a JSON object. Got: list"),
        (b"{}", 422, "model_id: Field required; forward_backward_input: Field required"),
        (json_bytes(JSON_REQUEST | {"seq_id": -1}), 422, "seq_id: Input should be greater than or equal to 0 (got -1)"),
        (json_bytes(JSON_REQUEST | {"seq_id": True}), 422, "seq_id: Input should be a valid integer (got True)"),
        (json_bytes(with_tensor(data=[1, 2, 3, 4.5])), 422, "data does not hold integers. Got: 4.5 at 3"),
        (json_bytes(with_tensor(data=[1, 2, 3, None])), 422, "data does not hold integers. Got: None at 3"),
        (json_bytes(with_tensor(data=[1, 2, 3, "4" * 999])), 422, "data does not hold integers. Got: '44444"),
        (json_bytes(with_tensor(data=[[1, 2, 3, 4]])), 422, "data does not hold integers. Got: [1, 2, 3, 4] at 0"),
        (json_bytes(with_tensor(data="1234")), 422, "['target_tokens'] is not {"),
        (json_bytes(with_tensor(data=[1, 2, 3, 2**63])), 422, "data holds an integer beyond 64 bits"),
        (json_bytes(with_tensor(dtype="bfloat16")), 422, "Got: 'bfloat16'. Expected: float32 or int64"),
        (json_bytes(with_tensor(dtype=[])), 422, "Expected: float32 or int64"),
        (json_bytes(with_tensor(shape="4")), 422, "shape is not a list of integers"),
        (json_bytes(with_tensor(shape=[2, 3])), 400, "Got: shape [2, 3] and 4 values"),
        (json_bytes(with_tensor(sparse_crow_indices=[0, 4])), 400, "contradicts itself"),
        (json_bytes(with_tensor(sparse_crow_indices=[0, "4"])), 422, "does not hold integers"),
        (json_bytes(with_tokens(1, 2.0)), 422, "data[0].model_input does not hold integers. Got: 2.0 at 1"),
        (json_bytes(with_tokens(1, 2**31)), 400, "a token id that is no int32. Got: 2147483648 at position 1"),
        (json_bytes(with_tokens(1, -(2**63))), 400, "a token id that is no int32. Got: -9223372036854775808"),
        (json_bytes(JSON_REQUEST | {"forward_backward_input": {"data": [{}], "loss_fn": "ppo"}}), 422, "is not {"),
    ],
)  # fmt: skip
def test_json_that_is_not_a_request(body, status, problem):
    with pytest.raises(wire.WireError) as caught:
        wire.decode_train(body, content_type="application/json")
    assert problem in str(caught.value)
    assert caught.value.status == status


def test_a_body_is_plain_values():
    body = wire.decode_train(as_proto(train_request([policy_datum()])))
    assert dataclasses.is_dataclass(body)
    with pytest.raises(dataclasses.FrozenInstanceError):
        body.loss = "ppo"  # type: ignore[misc]


def test_a_large_body_may_not_be_all_parts():
    """Each of these two million parts would cost the parser 50 bytes for 2."""
    few = message_with()
    few.data[0].model_input.extend([few.data[0].model_input[0]] * 199_000)
    assert len(wire.decode_train(few.SerializeToString()).data[0].tokens) == 199_001 * 4
    few.data[0].model_input.extend([pb.Chunk()] * 2_000_000)
    assert "The request has too many parts: data, chunks and tensors. Expected: at most 200000" in refusal(few)
    with pytest.raises(wire.WireError, match="too many parts") as caught:
        wire.decode_train(b"[" + b"{}," * 2_000_000 + b"{}]", content_type="application/json")
    assert caught.value.status == 413
