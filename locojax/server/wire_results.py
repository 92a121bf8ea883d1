"""The engine's results as the bytes that clients read: protobuf for the SDK from 0.25 on, JSON for those before.

Legend: N tokens of a datum or completion, P prompt tokens, K targets or alternatives a position.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from tinker.proto import tinker_public_pb2 as pb

from locojax.hosts.protocol import Sampled
from locojax.server.wire_content import JSON, PROTOBUF, media_type
from locojax.server.wire_tensors import Csr
from locojax.types import ForwardBackwardResult, StopReason

NOTHING_LOGPROB = -99999.0
"""With token id 0: no entry, in a top-k row (the SDK's MASK_LOGPROB)."""

OUTPUT_TYPE = "ArrayRecord"

# The API has two reasons, and a completion that was aborted is one that was cut.
_STOP_REASONS: Mapping[StopReason, pb.StopReason.ValueType] = {
    "stop": pb.STOP_REASON_STOP,
    "length": pb.STOP_REASON_LENGTH,
    "abort": pb.STOP_REASON_LENGTH,
}
_STOP_NAMES: Mapping[StopReason, str] = {"stop": "stop", "length": "length", "abort": "length"}


def wants_protobuf(accept: str | None) -> bool:
    """True if an Accept header names protobuf (SDK 0.18 on, which then wants it for these two results)."""
    return any(media_type(part) == PROTOBUF for part in (accept or "").split(","))


def encode(
    result: ForwardBackwardResult | Sampled, accept: str | None, target_layout: Csr | None = None
) -> tuple[str, bytes]:
    """The media type and the body of an answer to retrieve_future, as its Accept header asks.

    Args:
      target_layout: of the request (`SampleBody.target_layout`); target_prompt_logprobs then come in it.
    """
    as_protobuf = wants_protobuf(accept)
    if isinstance(result, Sampled):
        message = sampled_proto(result, target_layout) if as_protobuf else sampled_json(result, target_layout)
    else:
        message = training_proto(result) if as_protobuf else training_json(result)
    return (PROTOBUF if as_protobuf else JSON), message


def training_proto(result: ForwardBackwardResult) -> bytes:
    """ForwardBackwardOutput, one ArrayRecord for each run of data whose trailing shapes are the same."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in result.metrics.items():
        message.metrics[name] = value
    for shapes, run in itertools.groupby(result.outputs, _trailing_shapes):
        outputs = list(run)
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(outputs))
        for name, trailing in shapes:
            arrays = [np.asarray(output[name], "<f4") for output in outputs]
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(trailing)
    return message.SerializeToString()


def _trailing_shapes(output: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(sorted((name, array.shape[1:]) for name, array in output.items()))


def training_json(result: ForwardBackwardResult) -> bytes:
    """The same, as SDKs before 0.18 read it."""
    outputs = [{name: _json_tensor(array) for name, array in output.items()} for output in result.outputs]
    return _dump({"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": dict(result.metrics)})


def sampled_proto(sampled: Sampled, target_layout: Csr | None = None) -> bytes:
    """SampleResponse, sequences in sample order. A log-prob that was not asked for is NaN; see `protocol.Sampled`."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=sampled.num_cached_prompt_tokens)
    for i, completion in enumerate(sampled.completions):
        sequence = message.sequences.add(
            stop_reason=_STOP_REASONS[completion.stop_reason],
            tokens=np.asarray(completion.tokens, "<i4").tobytes(),
            logprobs=np.asarray(completion.logprobs, "<f4").tobytes(),
        )
        if sampled.topk_sample_logprobs is not None:
            sequence.topk_sampled_logprobs.CopyFrom(_topk_proto(sampled.topk_sample_logprobs[i]))
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(sampled.prompt_logprobs, "<f4").tobytes()
    if sampled.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk_proto(sampled.topk_prompt_logprobs))
    if sampled.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_targets_proto(sampled.target_prompt_logprobs, target_layout))
    if sampled.prompt_alt_tokens is not None:
        tokens, logprobs = _alternatives(sampled.prompt_alt_tokens)
        message.prompt_alt_tokens.tokens.CopyFrom(_tensor_proto(tokens, "<i8", pb.DTYPE_INT64))
        message.prompt_alt_tokens.logprobs.CopyFrom(_tensor_proto(logprobs, "<f4", pb.DTYPE_FLOAT32))
    return message.SerializeToString()


def _topk_proto(topk: tuple[np.ndarray, np.ndarray]) -> pb.TopkLogprobs:
    ids, logprobs = topk
    length, k = ids.shape
    return pb.TopkLogprobs(
        token_ids=np.asarray(ids, "<i4").tobytes(),
        logprobs=np.asarray(logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )


def _tensor_proto(array: np.ndarray, dtype: str, dtype_tag: pb.DType.ValueType) -> pb.Tensor:
    return pb.Tensor(dense=np.asarray(array, dtype).tobytes(), dtype=dtype_tag, shape=array.shape)


def _targets_proto(logprobs: np.ndarray, layout: Csr | None) -> pb.Tensor:
    if layout is None:
        return _tensor_proto(logprobs, "<f4", pb.DTYPE_FLOAT32)
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=layout.shape)
    tensor.sparse_csr.values = np.asarray(logprobs[layout.rows, layout.columns], "<f4").tobytes()
    tensor.sparse_csr.crow_indices = layout.crow.astype("<i8").tobytes()
    tensor.sparse_csr.col_indices = layout.columns.astype("<i8").tobytes()
    return tensor


def _alternatives(drawn: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """[P, k] -> [P - 1, k]: on the wire the first prompt token, which nothing predicts, has no row."""
    return drawn[0][1:], drawn[1][1:]


def sampled_json(sampled: Sampled, target_layout: Csr | None = None) -> bytes:
    """The same, as SDKs before 0.18 read it: null where there is no log-prob."""
    sequences = []
    for i, completion in enumerate(sampled.completions):
        sequence = {
            "stop_reason": _STOP_NAMES[completion.stop_reason],
            "tokens": list(completion.tokens),
            "logprobs": np.asarray(completion.logprobs, np.float32),
        }
        if sampled.topk_sample_logprobs is not None:
            sequence["topk_logprobs"] = _topk_lists(sampled.topk_sample_logprobs[i])
        sequences.append(sequence)
    message: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_cache_hit_tokens": sampled.num_cached_prompt_tokens,
    }
    if sampled.prompt_logprobs is not None:
        scored = ~np.isnan(sampled.prompt_logprobs)
        message["prompt_logprobs"] = [
            value if known else None
            for value, known in zip(sampled.prompt_logprobs.tolist(), scored.tolist(), strict=True)
        ]
    if sampled.topk_prompt_logprobs is not None:
        message["topk_prompt_logprobs"] = _topk_lists(sampled.topk_prompt_logprobs)
    if sampled.target_prompt_logprobs is not None:
        message["target_prompt_logprobs"] = _targets_json(sampled.target_prompt_logprobs, target_layout)
    if sampled.prompt_alt_tokens is not None:
        tokens, logprobs = _alternatives(sampled.prompt_alt_tokens)
        message["prompt_alt_tokens"] = {"tokens": _json_tensor(tokens), "logprobs": _json_tensor(logprobs)}
    return _dump(message)


def _topk_lists(topk: tuple[np.ndarray, np.ndarray]) -> list[list[tuple[int, float]] | None]:
    """Rows of (id, log-prob), without the entries that are none; None for a row that has nothing else."""
    ids, logprobs = topk
    present = ~((ids == 0) & (logprobs == np.float32(NOTHING_LOGPROB)))
    rows = zip(ids.tolist(), logprobs.tolist(), present.sum(axis=1).tolist(), strict=True)
    return [list(zip(row_ids[:n], row[:n], strict=True)) if n else None for row_ids, row, n in rows]


def _targets_json(logprobs: np.ndarray, layout: Csr | None) -> dict[str, Any]:
    if layout is None:
        return _json_tensor(logprobs)
    tensor = _json_tensor(logprobs[layout.rows, layout.columns])
    return tensor | {
        "shape": list(layout.shape),
        "sparse_crow_indices": layout.crow.tolist(),
        "sparse_col_indices": layout.columns.tolist(),
    }


def _json_tensor(array: np.ndarray) -> dict[str, Any]:
    """`TensorData`: flat data, float32 or int64."""
    is_float = np.issubdtype(array.dtype, np.floating)
    flat = np.ascontiguousarray(array, np.float32 if is_float else np.int64).reshape(-1)
    return {"data": flat, "dtype": "float32" if is_float else "int64", "shape": list(array.shape)}


def _dump(message: Mapping[str, Any]) -> bytes:
    """JSON, with NaN and Infinity as Python writes and reads them: null would be refused by the client's types."""
    if _is_finite(message):
        return orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(message, default=np.ndarray.tolist, separators=(",", ":")).encode()


def _is_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(np.isfinite(value).all())
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, Sequence) and not isinstance(value, str) else True
