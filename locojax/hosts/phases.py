"""The named phases of a step, and what the loop needs of whoever times them.

The loop is handed a `StepTimer` and never imports the one that `measure` provides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol, get_args

Phase = Literal[
    "admit",  # prompts drawn, tokenized and handed to the engine
    "prefill",
    "decode",  # the engine's own books too
    "reward",  # waiting for grades that decoding didn't hide, and advantages
    "pack",
    "train",  # forward, backward, optimizer
    "publish",  # new weights to the engine
    "evaluate",
    "checkpoint",
    "collect",  # Python's garbage
    "wait",  # for another host
    "record",  # written down and shown: the journal; of the step before, metrics, samples and curves
]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclasses.dataclass(frozen=True)
class StepAccount:
    """Where one step's wall time went on one host: `seconds` and `unaccounted` add up to `wall`.

    Filled by a StepTimer when the step ends. Example: StepAccount(3, {"decode": 2.0, "train": 0.9}, wall=3.0)
    """

    step: int
    seconds: Mapping[Phase, float]  # phases that didn't happen are absent
    wall: float

    @property
    def unaccounted(self) -> float:
        """Seconds in no phase: the loop's own overhead, or a phase nobody named."""
        return self.wall - sum(self.seconds.values())


class StepTimer(Protocol):
    """Times a step's phases. Phases may nest: the inner one's time is taken off the outer one's."""

    def step(self, index: int) -> AbstractContextManager[None]:
        """The whole of a training step; phases outside of one are kept apart (`load` and `compile` come before)."""

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A part of the step."""

    def after_step(self, name: Phase) -> AbstractContextManager[None]:
        """What a step leaves to be done once its account is closed; the next step's account has it."""

    def last(self) -> StepAccount:
        """The account of the step that ended last."""
