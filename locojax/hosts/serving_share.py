"""How sampling and training share the device: by time, while there is work for both. No jax."""

from __future__ import annotations

from typing import Literal

Side = Literal["sampling", "training"]

LONGEST_TURN = 10.0  # seconds that one turn counts for at most: one that compiled must not starve the other side


class Share:
    """Which side goes next, by the device time that each has had since there was work for both."""

    def __init__(self, sampling_share: float):
        self._weights = {"sampling": sampling_share, "training": 1.0 - sampling_share}
        self._spent = {"sampling": 0.0, "training": 0.0}
        self._contended = False

    def next(self, *, sampling: bool, training: bool) -> Side | None:
        """The side to serve; None if neither has work."""
        self._contended = sampling and training
        if not self._contended:
            self._spent = dict.fromkeys(self._spent, 0.0)
            return "sampling" if sampling else "training" if training else None
        used = {side: self._spent[side] / self._weights[side] for side in self._spent}
        return "training" if used["sampling"] > used["training"] else "sampling"

    def spent(self, side: Side, seconds: float) -> None:
        if self._contended:
            self._spent[side] += min(seconds, LONGEST_TURN)
