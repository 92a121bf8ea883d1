"""A call's data, checked and laid out in rows: what a host can do of it before it hears of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from locojax.errors import RequestError
from locojax.training.agreement import Counts
from locojax.training.inputs import Checked
from locojax.training.microbatch import Score
from locojax.training.packing import Packed, pack


@dataclasses.dataclass(frozen=True)
class Plan:
    """Made by `planned`, and by `Trainer.plan`.

    Attributes:
      checked, packed: the data, and where they are computed.
      score: the layout depends on it.
      counts: this host's; `counts.ints` is what an `Agree` tells the others.
    """

    checked: tuple[Checked, ...]
    packed: Packed
    score: Score
    counts: Counts


def planned(checked: Sequence[Checked], score: Score, row_tokens: int, rows: int, *, share_prefixes: bool) -> Plan:
    """The data packed in micro-batches of [rows, row_tokens]."""
    scores_all = score == "all"
    packed = pack(
        [datum.tokens for datum in checked],
        [datum.num_free for datum in checked],
        row_tokens=row_tokens,
        rows=rows,
        targets=[datum.targets for datum in checked] if scores_all else None,
        share_prefixes=share_prefixes,
        skip=None if scores_all else [not datum.reads.any() for datum in checked],
    )
    return Plan(tuple(checked), packed, score, Counts.of(checked, packed))


def replanned(plan: Plan, checked: Sequence[Checked], score: Score) -> Plan:
    """The plan's rows with other inputs of the loss in them.

    Raises:
      RequestError: the data are not those that were planned, or have a loss where those had none.
    """
    if len(checked) != len(plan.checked) or score != plan.score:
        raise RequestError(
            "The data are not those of the plan",
            got=f"{len(checked)} data and score {score!r}",
            expected=f"{len(plan.checked)} data and score {plan.score!r}",
        )
    for i, (now, then) in enumerate(zip(checked, plan.checked, strict=True)):
        if not np.array_equal(now.tokens, then.tokens) or not np.array_equal(now.targets, then.targets):
            raise RequestError(f"Datum {i} has other tokens or targets than the plan's")
        if now.num_free < then.num_free or (now.reads.any() and not len(plan.packed.index[i])):
            raise RequestError(f"Datum {i} has a loss where the plan's had none")
    return dataclasses.replace(plan, checked=tuple(checked))
