"""Results as bytes, without pickle: a JSON tree whose arrays follow it as raw memory.

    u64 little-endian length of the JSON | JSON | arrays, one after the other

In the tree an array is {"$array": [dtype, shape]}, taken from the arrays in order; a tuple is {"$tuple": [...]}; a
dataclass of `TYPES` is {"$type": name, fields...}. JSON's NaN and Infinity are Python's, in and out.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from locojax.hosts.protocol import Sampled
from locojax.types import Completion, ForwardBackwardResult

TYPES: Mapping[str, Any] = {kind.__name__: kind for kind in (ForwardBackwardResult, Sampled, Completion)}

_LENGTH = struct.Struct("<Q")


def encode(value: Any) -> bytes:
    """The bytes of a result: a `TYPES` dataclass, or plain JSON values."""
    arrays: list[np.ndarray] = []
    tree = json.dumps(_flatten(value, arrays), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(tree)), tree, *(array.tobytes() for array in arrays)])


def decode(content: bytes) -> Any:
    """The value that `encode` was given, its arrays read-only views of `content`."""
    (length,) = _LENGTH.unpack_from(content)
    tree = json.loads(content[_LENGTH.size : _LENGTH.size + length])
    return _restore(tree, _Arrays(content, _LENGTH.size + length))


class _Arrays:
    """Hands out the arrays behind the tree, in order."""

    def __init__(self, content: bytes, offset: int):
        self._content, self._offset = content, offset

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(self._content, np.dtype(dtype), size, self._offset).reshape(shape)
        self._offset += array.nbytes
        return array


def _flatten(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"$array": [value.dtype.str, value.shape]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        # Of whole numbers (a completion's tokens), as an array: fewer bytes, and no loop over tokens.
        if len(value) > 8 and all(type(item) is int for item in value):
            return {"$ints": _flatten(np.asarray(value, np.int64), arrays)}
        return {"$tuple": [_flatten(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_flatten(item, arrays) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _flatten(item, arrays) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and type(value).__name__ in TYPES:
        fields = {field.name: _flatten(getattr(value, field.name), arrays) for field in dataclasses.fields(value)}
        return {"$type": type(value).__name__, **fields}
    return value


def _restore(tree: Any, arrays: _Arrays) -> Any:
    if isinstance(tree, list):
        return [_restore(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$array" in tree:
        return arrays.take(*tree["$array"])
    if "$ints" in tree:
        return tuple(_restore(tree["$ints"], arrays).tolist())
    if "$tuple" in tree:
        return tuple(_restore(item, arrays) for item in tree["$tuple"])
    values = {key: _restore(item, arrays) for key, item in tree.items() if key != "$type"}
    return TYPES[tree["$type"]](**values) if "$type" in tree else values
