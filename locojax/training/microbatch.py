"""Packed data -> what a compiled program takes, and what it gives -> results in datum order. No jax arrays.

Legend: M micro-batches, R rows of one, T tokens of a row, N = R x T, K targets a position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from locojax.training.inputs import Checked
from locojax.training.packing import PADDING, Packed
from locojax.training.programs import MicroBatch, Outputs
from locojax.types import ForwardBackwardResult

Score = Literal["all", "active"]
"""Where log-probs are returned: `all` positions, or only those whose loss isn't 0 by its inputs (others: 0).
`active` is cheaper: the head runs, and data are computed, only where they matter. The gradient is the same."""


@dataclasses.dataclass(frozen=True)
class Widths:
    """What else a micro-batch's shape depends on; the same on all hosts.

    Attributes:
      num_targets: K.
      inputs: names of the loss's inputs -> their axes after T: (), or (K,).
    """

    num_targets: int
    inputs: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, checked: Sequence[Checked]) -> Widths:
        num_targets = max(datum.targets.shape[1] for datum in checked)
        widest = {name: array.shape[1:] and (num_targets,) for name, array in checked[0].inputs.items()}
        return cls(num_targets, widest)


def micro_batches(
    packed: Packed, checked: Sequence[Checked], score: Score, widths: Widths | None = None, num_shards: int = 1
) -> list[MicroBatch]:
    """The packed rows and the loss's inputs, micro-batch by micro-batch; numpy leaves.

    Args:
      widths: None: those of `checked`, which must then hold data.
      num_shards: devices that R is split over; each numbers its own segments.
    """
    widths = Widths.of(checked) if widths is None else widths
    segments = _local_segments(packed.segment, num_shards)
    targets = packed.scatter([datum.targets for datum in checked], np.int32, (widths.num_targets,))
    reads = packed.scatter([datum.reads for datum in checked], np.bool_, ())
    scored = packed.scatter([np.ones(len(datum.tokens), bool) for datum in checked], np.bool_, ())
    scored = scored if score == "all" else reads
    inputs = {
        name: packed.scatter([datum.inputs[name] for datum in checked], np.float32, trailing)
        for name, trailing in widths.inputs.items()
    }
    return [
        MicroBatch(
            tokens=packed.tokens[m],
            positions=packed.positions[m],
            until=packed.until[m],
            segments=segments[m],
            targets=targets[m],
            scored=scored[m],
            reads=reads[m],
            inputs={name: array[m] for name, array in inputs.items()},
        )
        for m in range(packed.num_micro_batches)
    ]


def _local_segments(segment: np.ndarray, num_shards: int) -> np.ndarray:
    """Data numbered from 0 within each device's rows of a micro-batch; its number of positions where there is none."""
    num_micro_batches, rows, row_tokens = segment.shape
    num_positions = rows // num_shards * row_tokens
    parts = segment.reshape(num_micro_batches * num_shards, num_positions)
    local = np.full_like(parts, num_positions)
    for own, part in zip(local, parts, strict=True):
        present, numbers = np.unique(part, return_inverse=True)
        own[:] = np.where(part == PADDING, num_positions, numbers.reshape(-1) - int(PADDING in present))
    return local.reshape(segment.shape)


def assemble(
    packed: Packed, checked: Sequence[Checked], outputs: Sequence[Outputs], with_entropy: bool
) -> ForwardBackwardResult:
    """Outputs back in datum order, and the micro-batches' metrics summed in double precision."""
    lengths = [len(datum.tokens) for datum in checked]
    shape = packed.tokens.shape
    num_targets = max((datum.targets.shape[1] for datum in checked), default=1)

    def gather(field: str, trailing: tuple[int, ...]) -> list[np.ndarray]:
        stacked = np.zeros((0, 0, *trailing), np.float32)
        if outputs:
            stacked = np.stack([np.asarray(getattr(output, field)) for output in outputs])
        return packed.gather(stacked.reshape(*shape, *stacked.shape[2:]), lengths)

    per_datum = []
    logprobs, elementwise = gather("logprobs", (num_targets,)), gather("elementwise", (num_targets,))
    entropy = gather("entropy", ())
    for i, datum in enumerate(checked):
        own = slice(0, datum.targets.shape[1])
        arrays = {
            "logprobs": logprobs[i][:, own].reshape(datum.target_shape),
            "elementwise_loss": elementwise[i][:, own].reshape(datum.target_shape),
        }
        per_datum.append({**arrays, "entropy": entropy[i]} if with_entropy else arrays)
    sums: dict[str, float] = {"loss": 0.0, "num_tokens": 0.0, "num_nonfinite": 0.0}
    for output in outputs:
        for name, value in output.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    sums |= {
        "num_datum_tokens": float(packed.num_datum_tokens),
        "num_computed_tokens": float(packed.num_computed_tokens),
        "num_row_tokens": float(packed.tokens.size),
        "num_micro_batches": float(packed.num_micro_batches),
    }
    return ForwardBackwardResult(tuple(per_datum), {f"{name}:sum": value for name, value in sums.items()})
