"""What hosts tell each other before they run a program together: its shape, and how many times.

Legend: H hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from locojax.errors import RequestError
from locojax.training.inputs import Checked
from locojax.training.losses import CrossEntropyInputs, Loss, PolicyInputs
from locojax.training.microbatch import Widths
from locojax.training.packing import Packed

Agree = Callable[[str, Sequence[int]], np.ndarray]
"""(phase, this host's integers) -> i64[H, n]: those of every host, in the order of their ranks."""

INPUTS = tuple(
    dict.fromkeys(field.name for kind in (CrossEntropyInputs, PolicyInputs) for field in dataclasses.fields(kind))
)
"""Names of losses' inputs; a set of them is told as one bit a name."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """One host's part of a call, or, from `agreed`, all hosts' together.

    Attributes:
      num_data: 0: this host has nothing to train on, and takes part all the same.
      num_micro_batches, num_datum_tokens, num_computed_tokens: see `Packed`.
      num_targets, inputs: see `Widths`; inputs as a set of bits.
      refused: hosts whose data were refused.
    """

    num_data: int
    num_micro_batches: int
    num_targets: int
    inputs: int
    num_datum_tokens: int
    num_computed_tokens: int
    refused: int = 0

    @classmethod
    def of(cls, checked: Sequence[Checked], packed: Packed) -> Counts:
        widths = Widths.of(checked) if checked else Widths(1, {})
        return cls(
            num_data=len(checked),
            num_micro_batches=packed.num_micro_batches,
            num_targets=widths.num_targets,
            inputs=sum({1 << INPUTS.index(name) for name in widths.inputs}),
            num_datum_tokens=packed.num_datum_tokens,
            num_computed_tokens=packed.num_computed_tokens,
        )

    @classmethod
    def refusal(cls) -> Counts:
        """Of a host whose data were refused: the others raise too, instead of waiting for it."""
        return cls(0, 0, 1, 0, 0, 0, refused=1)

    @property
    def ints(self) -> tuple[int, ...]:
        """What `Agree` takes."""
        return dataclasses.astuple(self)

    def widths(self, loss: Loss) -> Widths:
        trailing = (self.num_targets,) if loss.multi_target else ()
        names = (name for i, name in enumerate(INPUTS) if self.inputs >> i & 1)
        return Widths(self.num_targets, dict.fromkeys(names, trailing))


NUM_COUNTS = len(dataclasses.fields(Counts))


def agreed(told: np.ndarray) -> Counts:
    """All hosts' counts, from what each told: i64[H, NUM_COUNTS].

    Raises:
      RequestError: a host refused its data, or hosts have different inputs.
    """
    columns: Mapping[str, np.ndarray] = dict(
        zip((field.name for field in dataclasses.fields(Counts)), np.asarray(told, np.int64).T, strict=True)
    )
    if columns["refused"].any():
        raise RequestError(
            f"Host {int(np.argmax(columns['refused']))} refused its training data",
            remedy="Its own error says which datum; nothing was computed on any host",
        )
    having = np.flatnonzero(columns["num_data"])
    sets = [int(columns["inputs"][host]) for host in having]
    other = next((i for i, inputs in enumerate(sets) if inputs != sets[0]), None)
    if other is not None:
        name = next(name for i, name in enumerate(INPUTS) if (sets[0] ^ sets[other]) >> i & 1)
        has, lacks = (0, other) if sets[0] >> INPUTS.index(name) & 1 else (other, 0)
        raise RequestError(
            f"The data of host {having[has]} have the input {name!r}, those of host {having[lacks]} have not",
            expected="the same inputs on every host",
        )
    return Counts(
        num_data=int(columns["num_data"].sum()),
        num_micro_batches=int(columns["num_micro_batches"].max()),
        num_targets=int(columns["num_targets"].max()),
        inputs=sets[0] if sets else 0,
        num_datum_tokens=int(columns["num_datum_tokens"].sum()),
        num_computed_tokens=int(columns["num_computed_tokens"].sum()),
    )
