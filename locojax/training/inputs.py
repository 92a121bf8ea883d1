"""A request's data, checked before anything runs: errors name the datum and the field. No jax arrays.

Legend: N tokens of a datum, K targets a position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from locojax.errors import RequestError
from locojax.training.losses import Loss, Options, needed_inputs
from locojax.types import Datum


@dataclasses.dataclass(frozen=True)
class Checked:
    """One datum, valid and in the types that training computes in.

    Attributes:
      tokens: i32[N]. targets: i32[N, K]. target_shape: (N,) or (N, K), as the request had them.
      inputs: f32[N], or f32[N, K] for cross_entropy's weights; every input that the loss uses, in every datum alike.
      reads: bool[N]: positions whose log-prob can matter to the loss.
    """

    tokens: np.ndarray
    targets: np.ndarray
    target_shape: tuple[int, ...]
    inputs: Mapping[str, np.ndarray]
    reads: np.ndarray

    @property
    def num_free(self) -> int:
        """How many leading positions the loss does not read."""
        where = np.flatnonzero(self.reads)
        return int(where[0]) if where.size else len(self.tokens)


def check_data(data: Sequence[Datum], loss: Loss, options: Options, vocab_size: int) -> list[Checked]:
    """Every datum checked and converted.

    Raises:
      RequestError: no data; a datum that is empty, lacks an input, or holds one of the wrong length, type or range.
    """
    if not data:
        raise RequestError(
            "There is nothing to train on", got="an empty list of data", remedy="Skip the call when a batch is empty"
        )
    needed = needed_inputs(loss, options)
    # An input is used if any datum has it, so that one program serves the call; it must then be in all of them.
    for name in loss.optional:
        having = next((i for i, datum in enumerate(data) if name in datum.inputs), None)
        if having is not None and name not in needed and not (loss.multi_target and name == "weights"):
            needed[name] = f"datum {having}, which has it"
    return [_check(i, datum, loss, options, needed, vocab_size) for i, datum in enumerate(data)]


def _check(
    i: int, datum: Datum, loss: Loss, options: Options, needed: Mapping[str, str], vocab_size: int
) -> Checked:
    tokens = _ids(i, "tokens", datum.tokens, vocab_size)
    if tokens.ndim != 1 or len(tokens) == 0:
        raise RequestError(f"Datum {i}: tokens is not a list of at least 1 token", got=f"shape {list(tokens.shape)}")
    if "target_tokens" not in datum.inputs:
        raise RequestError(f"Datum {i} has no input 'target_tokens'", got=", ".join(datum.inputs) or "no inputs")
    targets = _ids(i, "target_tokens", datum.inputs["target_tokens"], vocab_size)
    shapes = f"({len(tokens)},)" + (f" or ({len(tokens)}, K)" if loss.multi_target else "")
    allowed_ranks = (1, 2) if loss.multi_target else (1,)
    if targets.ndim not in allowed_ranks or len(targets) != len(tokens) or 0 in targets.shape:
        raise RequestError(
            f"Datum {i}: target_tokens does not match its {len(tokens)} tokens",
            got=f"shape {targets.shape}",
            expected=f"shape {shapes}",
        )
    inputs = {name: _floats(i, name, datum, needed[name], targets.shape) for name in needed}
    if loss.multi_target:
        given = "weights" in datum.inputs
        weights = _floats(i, "weights", datum, "", targets.shape) if given else np.ones(targets.shape, np.float32)
        inputs["weights"] = weights.reshape(len(tokens), -1)
    return Checked(tokens, targets.reshape(len(tokens), -1), targets.shape, inputs, loss.reads(inputs, options))


def _ids(i: int, field: str, values: np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise RequestError(f"Datum {i}: {field} does not hold integers", got=f"dtype {array.dtype}")
    wrong = np.argwhere((array < 0) | (array >= vocab_size))
    if wrong.size:
        where = tuple(int(axis) for axis in wrong[0])
        raise RequestError(
            f"Datum {i}: {field} holds a token id outside the vocabulary",
            got=f"{array[where]} at position {where[0]}",
            expected=f"0 to {vocab_size - 1}",
        )
    return array.astype(np.int32)


def _floats(i: int, name: str, datum: Datum, reason: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in datum.inputs:
        raise RequestError(
            f"Datum {i} has no input {name!r}, which is needed by {reason}", got=", ".join(datum.inputs)
        )
    array = np.asarray(datum.inputs[name])
    if array.shape != shape:
        raise RequestError(
            f"Datum {i}: {name} does not match target_tokens", got=f"shape {array.shape}", expected=f"shape {shape}"
        )
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool) or np.iscomplexobj(array):
        raise RequestError(f"Datum {i}: {name} does not hold numbers", got=f"dtype {array.dtype}")
    with np.errstate(over="ignore"):  # a float64 beyond fp32's range becomes inf, and is refused below
        array = array.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(array))
    if wrong.size:
        where = tuple(int(axis) for axis in wrong[0])
        raise RequestError(
            f"Datum {i}: {name} holds a value that is not finite", got=f"{array[where]} at position {where[0]}"
        )
    return array
