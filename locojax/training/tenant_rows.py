"""One tenant's call as rows that can stand beside other tenants' in a micro-batch. No jax arrays.

Legend: R rows, T tokens of a row, K targets a position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from locojax.errors import RequestError
from locojax.training.inputs import Checked
from locojax.training.losses import LOSSES, Loss, LossConfig, Options, read_options
from locojax.training.microbatch import Score, micro_batches
from locojax.training.packing import Packed
from locojax.training.programs import MicroBatch
from locojax.training.tenant_programs import OPTIONS, POLICY_INPUTS, WEIGHTS, Rows


@dataclasses.dataclass(frozen=True)
class Owner:
    """Whose a row is: slot and scale of its adapter, and whether that has a part in the head."""

    slot: int
    scale: float
    adapts_head: bool


class Row(NamedTuple):
    """A row to be computed: what is in it (R = 1), whose it is, its loss by name, its settings f32[len(OPTIONS)]."""

    batch: MicroBatch
    owner: Owner
    loss: str
    options: np.ndarray


def tenant_options(loss: Loss, config: LossConfig | None) -> Options:
    """As `losses.read_options`, for settings that a row may have to itself.

    Raises:
      RequestError: also for a setting that is compiled in.
    """
    options = read_options(loss, config)
    for name in config or {}:
        if name not in OPTIONS:
            raise RequestError(
                f"The setting {name!r} of {loss.name} is not offered to models that share a trainer",
                expected="one of " + ", ".join(f.name for f in dataclasses.fields(loss.options) if f.name in OPTIONS),
                remedy="Multiply a correction into the advantages, or add a KL term to the rewards",
            )
    return options


def option_values(options: Options) -> np.ndarray:
    """f32[len(OPTIONS)]; 0 for those that the loss doesn't have, and doesn't read."""
    named = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return np.asarray([float(named.get(name, 0.0)) for name in OPTIONS], np.float32)


def tenant_rows(packed: Packed, checked: Sequence[Checked], score: Score) -> list[MicroBatch]:
    """Each row of data packed one row to a micro-batch, with every input that any loss reads; K a power of two."""
    return [_complete(row) for row in micro_batches(packed, checked, score)]


def padded_targets(num_targets: int) -> int:
    """Room for this many targets a position: a power of two, so that few programs are compiled."""
    return 1 << (num_targets - 1).bit_length()


def _complete(row: MicroBatch) -> MicroBatch:
    """What isn't given is filled with what it stands for: no old policy is the sampler's, no mask is everywhere."""
    nothing, given = np.zeros(row.reads.shape, np.float32), row.inputs
    inputs: dict[str, np.ndarray] = {name: given.get(name, nothing) for name in POLICY_INPUTS}
    inputs["old_logprobs"] = given.get("old_logprobs", inputs["logprobs"])
    inputs["sequence_ratio_mask"] = given.get("sequence_ratio_mask", nothing + 1)
    weights = given.get(WEIGHTS, (inputs["advantages"] != 0).astype(np.float32))
    weights = weights.reshape(*row.reads.shape, -1)
    K = padded_targets(row.targets.shape[-1])
    return dataclasses.replace(row, targets=_widened(row.targets, K), inputs={**inputs, WEIGHTS: _widened(weights, K)})


def _widened(array: np.ndarray, K: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, 0), (0, K - array.shape[-1])))


def empty_row(row_tokens: int, num_targets: int) -> MicroBatch:
    """A row of padding."""
    ids, flags = np.zeros((1, row_tokens), np.int32), np.zeros((1, row_tokens), bool)
    inputs = {name: np.zeros((1, row_tokens), np.float32) for name in POLICY_INPUTS}
    return MicroBatch(
        tokens=ids,
        positions=ids,
        until=np.arange(1, row_tokens + 1, dtype=np.int32)[None],
        segments=ids + np.int32(row_tokens),
        targets=np.zeros((1, row_tokens, num_targets), np.int32),
        scored=flags,
        reads=flags,
        inputs={**inputs, WEIGHTS: np.zeros((1, row_tokens, num_targets), np.float32)},
    )


def stack_rows(rows: Sequence[Row], num_rows: int, row_tokens: int, num_targets: int) -> Rows:
    """A micro-batch of `num_rows` rows: the given ones, then padding. Numpy leaves."""
    num_empty = num_rows - len(rows)
    batches = [row.batch for row in rows] + [empty_row(row_tokens, num_targets)] * num_empty
    batch: MicroBatch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    owners = [row.owner for row in rows] + [Owner(0, 0.0, False)] * num_empty
    places: Mapping[str, int] = {name: place for place, name in enumerate(LOSSES)}
    options = np.zeros((num_rows, len(OPTIONS)), np.float32)
    options[:, OPTIONS.index("temperature")] = 1.0
    for r, row in enumerate(rows):
        options[r] = row.options
    return Rows(
        batch=batch,
        slots=np.asarray([owner.slot for owner in owners], np.int32),
        scale=np.asarray([owner.scale for owner in owners], np.float32),
        adapts_head=np.asarray([owner.adapts_head for owner in owners], bool),
        losses=np.asarray([places[row.loss] for row in rows] + [0] * num_empty, np.int32),
        options=options,
        num_used=np.asarray(len(rows), np.int32),
    )
