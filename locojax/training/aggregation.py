"""What turns a sum of per-token losses into a mean: weights, computed before the first micro-batch. No jax.

Losses here are sums, as in Tinker. A mean is a sum of pre-divided weights, whose denominators are known for the whole
batch before any of it is trained on; so no cut into micro-batches, rows or hosts can change it (C07, C08).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from locojax.errors import RequestError

Aggregation = Literal["sum", "tokens", "completions", "constant"]
"""`sum`: 1 a token. `tokens`: 1 / trained tokens of the batch (DAPO, arXiv 2503.14476, section 3.3).
`completions`: 1 / (its own trained tokens x completions), the mean of means (GRPO, arXiv 2402.03300).
`constant`: 1 / (completions x max_tokens), whatever the lengths (Dr. GRPO, arXiv 2503.20783)."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """The denominators: over all hosts, when there are several. Add those of the hosts up.

    Example: Totals(num_tokens=5, num_completions=2, max_tokens=8)
    """

    num_tokens: int
    num_completions: int
    max_tokens: int = 1  # of one completion; the same on every host

    @classmethod
    def of(cls, masks: Sequence[np.ndarray], max_tokens: int = 1) -> Totals:
        """Counts of what the masks (nonzero: trained) leave; a completion of which nothing is left is not counted."""
        counts = [int(np.count_nonzero(mask)) for mask in masks]
        return cls(sum(counts), sum(count > 0 for count in counts), max_tokens)

    def __add__(self, other: Totals) -> Totals:
        return dataclasses.replace(
            self,
            num_tokens=self.num_tokens + other.num_tokens,
            num_completions=self.num_completions + other.num_completions,
        )

    def denominator(self, kind: str) -> float:
        """What `sum`, `tokens` and `constant` divide every token by.

        Raises:
          RequestError: the kind has no denominator common to all tokens.
        """
        one_for_all = {
            "sum": 1.0,
            "tokens": float(max(self.num_tokens, 1)),
            "constant": float(max(self.num_completions, 1) * self.max_tokens),
        }
        if kind not in one_for_all:
            raise RequestError(
                f"The aggregation {kind!r} has no common denominator", expected=", ".join(one_for_all)
            )
        return one_for_all[kind]


def aggregation_weights(masks: Sequence[np.ndarray], kind: str, totals: Totals | None = None) -> list[np.ndarray]:
    """Per-token weights f32[N], one array per sequence: multiply advantages (or cross-entropy weights) by them.

    Masked positions get 0 and are in no denominator (C18); a batch of which nothing is left gives zeros (C15).

    Args:
      masks: of each sequence, [N]: nonzero where the token is trained.
      kind: an Aggregation.
      totals: the denominators of the whole batch, where `masks` are only a part of it.

    Raises:
      RequestError: unknown kind.
    """
    if kind not in get_args(Aggregation):
        raise RequestError(f"Unknown aggregation {kind!r}", expected=", ".join(get_args(Aggregation)))
    totals = Totals.of(masks) if totals is None else totals
    weights = []
    for mask in masks:
        on = (np.asarray(mask) != 0).astype(np.float64)
        if kind == "completions":
            on /= max(float(on.sum()), 1.0) * max(totals.num_completions, 1)
        else:
            on /= totals.denominator(kind)
        weights.append(on.astype(np.float32))
    return weights
