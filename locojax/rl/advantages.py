"""How much better a completion is than its group: rewards of one prompt's samples -> advantages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from locojax.errors import ConfigError

AdvantageKind = Literal["mean", "std", "rloo"]
"""`mean`: reward - mean (Dr. GRPO, arXiv 2503.20783, section 3.2; the default).
`std`: that over (population std + 1e-6) (GRPO, arXiv 2402.03300, section 4.1.2).
`rloo`: reward - mean of the *other* rewards (arXiv 2402.14740, section 3.2) = G/(G-1) x `mean`."""

STD_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class AdvantageResult:
    """Advantages of one group of G, with what the loop counts.

    `values` f32[G], 0 where unscorable. `scorable` bool[G]. `zero_variance`: all scorable rewards are equal (decided
    on the rewards, exactly, not on what is left after subtraction), so every value is 0. `mean_reward` is over the
    scorable ones, NaN if there are none.
    Example: rewards [1, nan, 0] -> values [0.5, 0, -0.5], scorable [True, False, True], zero_variance False, 0.5
    """

    values: np.ndarray
    scorable: np.ndarray
    zero_variance: bool
    mean_reward: float

    @property
    def num_unscorable(self) -> int:
        return int(np.sum(~self.scorable))

    @property
    def has_signal(self) -> bool:
        """Whether anything can be learnt from this group: False for zero variance and for a wholly unscorable one."""
        return bool(self.scorable.any()) and not self.zero_variance


def check_advantage_kind(kind: str, group_size: int) -> None:
    """Refuse settings under which no group could ever have an advantage, before the run starts.

    There is no leave-one-out baseline *with* normalisation: where the other rewards are equal their deviation is 0,
    and one reward of [1, 0, 0, 0] would get an advantage of 1,000,000.
    """
    if kind not in get_args(AdvantageKind):
        raise ConfigError(f"Unknown kind of advantage '{kind}'", expected=", ".join(get_args(AdvantageKind)))
    if group_size < 1:
        raise ConfigError("A group must hold at least one sample", got=f"group size {group_size}")
    if group_size == 1 and kind != "mean":
        needs = "a standard deviation" if kind == "std" else "the other samples' mean"
        raise ConfigError(
            f"Advantages of kind '{kind}' need {needs}, which a group of one has not",
            got="group size 1",
            expected="group size 2 or more",
            remedy="Raise the group size, to 8 for instance",
        )


def advantages(rewards: Sequence[float | None], kind: AdvantageKind = "mean") -> AdvantageResult:
    """Advantages of one group's rewards, in sample order. None and non-finite rewards are unscorable.

    Unscorable samples are left out of baseline and deviation and get 0. A group with one scorable sample, or with
    equal ones, has zero variance: all 0, of any kind.
    """
    check_advantage_kind(kind, max(2, len(rewards)))
    raw = np.array([math.nan if reward is None else float(reward) for reward in rewards], dtype=np.float64)
    scorable = np.isfinite(raw)
    values = np.zeros(len(raw), dtype=np.float64)
    scored = raw[scorable]
    if scored.size == 0:
        return AdvantageResult(values.astype(np.float32), scorable, False, math.nan)
    mean_reward = float(np.mean(scored))
    zero_variance = bool(np.all(scored == scored[0]))
    if not zero_variance:
        centred = scored - mean_reward
        if kind == "std":
            centred = centred / (np.std(scored) + STD_EPSILON)
        elif kind == "rloo":
            centred = centred * (scored.size / (scored.size - 1))
        values[scorable] = centred
    return AdvantageResult(values.astype(np.float32), scorable, zero_variance, mean_reward)
