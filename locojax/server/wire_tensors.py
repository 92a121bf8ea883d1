"""Tensors and token lists of a request, protobuf or JSON, as numpy arrays: never more memory than was paid for.

Legend: N rows (positions), K columns. A sparse tensor is CSR: crow i64[N + 1], columns i64[nnz], values[nnz].
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from locojax.server.wire_errors import WireError, shortened

MAX_DENSE_BYTES = 256 << 20
"""What all sparse tensors of one request may fill when written out."""

MAX_DIMENSION = (1 << 31) - 1

_BFLOAT16 = np.dtype("<u2")
_PROTO_DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: _BFLOAT16,
}
_INT32 = np.dtype("<i4")


@dataclasses.dataclass(frozen=True)
class Csr:
    """Which cells of an [N, K] tensor are listed: row i's columns are `columns[crow[i]:crow[i + 1]]`, ascending."""

    shape: tuple[int, int]
    crow: np.ndarray
    columns: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """i64[nnz]: each listed cell's row."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow))


class Allowance:
    """How much memory one request's sparse tensors may still turn into."""

    def __init__(self, dense_bytes: int = MAX_DENSE_BYTES):
        self._dense_bytes = dense_bytes

    def spend(self, num_bytes: int, field: str) -> None:
        self._dense_bytes -= num_bytes
        if self._dense_bytes < 0:
            raise WireError(
                f"{field}: the request's sparse tensors are too large when written out",
                expected=f"at most {MAX_DENSE_BYTES} bytes in one request",
                remedy="Send fewer data in one request",
                status=413,
            )


def proto_tokens(chunks: Sequence[Any], field: str) -> np.ndarray:
    """i32[N] of a `repeated Chunk`, text chunks joined. Raises WireError: an image or audio, or torn bytes."""
    parts = []
    for i, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise _not_text(f"{field}[{i}]", kind)
        tokens = chunk.encoded_text.tokens
        if len(tokens) % 4:
            raise WireError(f"{field}[{i}]: tokens are not int32 values", got=f"{len(tokens)} bytes")
        parts.append(tokens)
    return np.frombuffer(b"".join(parts), _INT32)


def json_tokens(model_input: Any, field: str) -> np.ndarray:
    """i32[N] of `{"chunks": [{"type": "encoded_text", "tokens": [int]}]}`, chunks joined.

    Raises WireError: another form, an image or audio, or an id that is no int32.
    """
    chunks = model_input.get("chunks") if type(model_input) is dict else None
    if type(chunks) is not list:
        raise WireError(f'{field} is not {{"chunks": [...]}}', got=shortened(model_input), status=422)
    lists = []
    for i, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text") if type(chunk) is dict else None
        if kind != "encoded_text":
            raise _not_text(f"{field}.chunks[{i}]", kind)
        if type(chunk.get("tokens")) is not list:
            raise WireError(f"{field}.chunks[{i}].tokens is not a list of token ids", status=422)
        lists.append(chunk["tokens"])
    tokens = lists[0] if len(lists) == 1 else list(itertools.chain.from_iterable(lists))
    array = integers(tokens, field)
    wrong = np.flatnonzero((array < -(1 << 31)) | (array >= 1 << 31))
    if wrong.size:
        raise WireError(f"{field} holds a token id that is no int32", got=f"{array[wrong[0]]} at position {wrong[0]}")
    return array.astype(_INT32)


def _not_text(field: str, kind: Any) -> WireError:
    names = {"image": "an image", "image_asset_pointer": "an image", "dmel": "audio", None: "an empty chunk"}
    return WireError(
        f"{field} is not text",
        got=names.get(kind if type(kind) in (str, type(None)) else "", shortened(kind)),
        expected="encoded_text chunks only: this server's models read text",
    )


def integers(values: list[Any], field: str) -> np.ndarray:
    """i64[len(values)]. Raises WireError if one is no int64."""
    odd = set(map(type, values)) - {int}
    if odd:
        where = next(i for i, value in enumerate(values) if type(value) is not int)
        raise WireError(f"{field} does not hold integers", got=f"{shortened(values[where])} at {where}", status=422)
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise WireError(f"{field} holds an integer beyond 64 bits", status=422) from None


def floats(values: list[Any], field: str) -> np.ndarray:
    """f32[len(values)]; what fp32 can't hold becomes inf. Raises WireError if one is no number."""
    if set(map(type, values)) - {int, float}:
        where = next(i for i, value in enumerate(values) if type(value) not in (int, float))
        raise WireError(f"{field} does not hold numbers", got=f"{shortened(values[where])} at {where}", status=422)
    try:
        with np.errstate(over="ignore"):
            return np.array(values, np.float64).astype(np.float32)
    except OverflowError:
        raise WireError(f"{field} holds a number beyond 64 bits", status=422) from None


def proto_tensor(tensor: Any, field: str, allowance: Allowance) -> np.ndarray:
    """A `Tensor`, f32 or integer, of rank 1 or 2; unlisted cells of a sparse one are 0.

    Raises WireError: no or another dtype, torn bytes, a shape that does not fit, a CSR that contradicts itself.
    """
    dtype = _PROTO_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WireError(
            f"{field}: this dtype is not one that is read",
            got=tensor.dtype,
            expected=", ".join(name for name, number in pb.DType.items() if number in _PROTO_DTYPES),
        )
    shape = tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        crow = _from_bytes(csr.crow_indices, np.dtype("<i8"), f"{field}.crow_indices")
        columns = _from_bytes(csr.col_indices, np.dtype("<i8"), f"{field}.col_indices")
        values = _widened(_from_bytes(csr.values, dtype, f"{field}.values"))
        return dense(checked_csr(shape, crow, columns, values, field), values, 0, field, allowance)
    return _shaped(_widened(_from_bytes(tensor.dense, dtype, field)), shape, field)


def json_tensor(tensor: Any, field: str, allowance: Allowance) -> np.ndarray:
    """A `TensorData`, as `proto_tensor`."""
    values, shape, csr = json_parts(tensor, field)
    return _shaped(values, shape, field) if csr is None else dense(csr, values, 0, field, allowance)


def json_parts(tensor: Any, field: str) -> tuple[np.ndarray, tuple[int, ...], Csr | None]:
    """A `TensorData`'s values (flat), its shape (() if not said), and its layout if it is sparse."""
    if type(tensor) is not dict or type(tensor.get("data")) is not list:
        raise WireError(
            f'{field} is not {{"data": [...], "dtype": ..., "shape": [...]}}', got=shortened(tensor), status=422
        )
    dtype = tensor.get("dtype")
    if dtype not in ("float32", "int64"):
        raise WireError(
            f"{field}.dtype is not one that is read",
            got=shortened(dtype),
            expected="float32 or int64",
            status=422,
        )
    read = floats if dtype == "float32" else integers
    values = read(tensor["data"], f"{field}.data")
    shape = tuple(_integer_list(tensor, "shape", field).tolist())
    if tensor.get("sparse_crow_indices") is None:
        return values, shape, None
    crow = _integer_list(tensor, "sparse_crow_indices", field)
    columns = _integer_list(tensor, "sparse_col_indices", field)
    return values, shape, checked_csr(shape, crow, columns, values, field)


def _integer_list(tensor: Mapping[str, Any], name: str, field: str) -> np.ndarray:
    values = tensor.get(name)
    if values is not None and type(values) is not list:
        raise WireError(f"{field}.{name} is not a list of integers", got=shortened(values), status=422)
    return integers(values or [], f"{field}.{name}")


def _from_bytes(data: bytes, dtype: np.dtype[Any], field: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise WireError(f"{field} is not a whole number of values", got=f"{len(data)} bytes of {dtype.itemsize} each")
    return np.frombuffer(data, dtype)


def _widened(values: np.ndarray) -> np.ndarray:
    """bf16, which numpy lacks and which came as u16, as f32."""
    return (values.astype("<u4") << 16).view("<f4") if values.dtype == _BFLOAT16 else values


def _shaped(values: np.ndarray, shape: Sequence[int], field: str) -> np.ndarray:
    if not shape or shape == values.shape:
        return values
    if len(shape) > 2 or min(shape) < 0 or max(shape) > MAX_DIMENSION or math.prod(shape) != values.size:
        raise WireError(
            f"{field}: the shape does not fit",
            got=f"shape {shortened(list(shape))} and {values.size} values",
            expected="one or two dimensions whose product is the number of values",
        )
    return values.reshape(shape)


def checked_csr(shape: Sequence[int], crow: np.ndarray, columns: np.ndarray, values: np.ndarray, field: str) -> Csr:
    """The layout, if it contradicts neither itself nor the number of values. Raises WireError."""
    if len(shape) != 2 or min(shape) < 0 or max(shape) > MAX_DIMENSION:
        raise _bad_csr(field, f"shape {shortened(list(shape))}", "a shape [N, K]")
    num_rows, num_columns = int(shape[0]), int(shape[1])
    if len(crow) != num_rows + 1:
        raise _bad_csr(field, f"{len(crow)} row pointers", f"{num_rows + 1}")
    if crow[0] != 0 or crow[-1] != len(columns) or len(columns) != len(values) or (crow[1:] < crow[:-1]).any():
        raise _bad_csr(
            field,
            f"row pointers from {crow[0]} to {crow[-1]}, {len(columns)} columns, {len(values)} values",
            "row pointers that rise from 0 to the number of columns and of values",
        )
    if columns.size and (columns.min() < 0 or columns.max() >= num_columns):
        raise _bad_csr(field, f"columns {columns.min()} to {columns.max()}", f"0 to {num_columns - 1}")
    falls = columns[1:] <= columns[:-1]
    starts = crow[1:-1]
    falls[starts[(starts > 0) & (starts < len(columns))] - 1] = False  # a new row begins anew
    if falls.any():
        raise _bad_csr(field, "columns out of order", "ascending columns within a row, each once")
    return Csr((num_rows, num_columns), crow, columns)


def _bad_csr(field: str, got: str, expected: str) -> WireError:
    return WireError(f"{field}: the sparse tensor contradicts itself", got=got, expected=expected)


def dense(csr: Csr, values: np.ndarray, fill: int, field: str, allowance: Allowance) -> np.ndarray:
    """[N, K]: `values` at the listed cells, `fill` elsewhere."""
    allowance.spend(math.prod(csr.shape) * values.dtype.itemsize, field)
    out = np.full(csr.shape, fill, values.dtype)
    out[csr.rows, csr.columns] = values
    return out


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """All values, flat, one array after the other."""
    flat = [array.reshape(-1) for array in arrays]
    return np.concatenate(flat) if flat else np.empty(0, np.float32)


def digest_arrays(digest: hashlib.blake2b, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Adds named arrays, types and shapes included, to a digest."""
    listed = list(arrays)
    digest.update(repr([(name, array.dtype.str, array.shape) for name, array in listed]).encode())
    digest.update(b"".join([array.tobytes() for _, array in listed]))
