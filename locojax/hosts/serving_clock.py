"""Where an engine process's time goes: every second since its start is some phase's, "other" where none is open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

PHASES = ("load", "warm_up", "prefill", "decode", "pack", "train", "optim", "save", "publish", "idle", "other")
"""`publish`: a model's weights to a sampler. `other`: the loop itself, and whatever has no phase of its own."""


class PhaseClock:
    """Running totals of seconds by phase, of one thread. Phases nest: the inner one's time is not the outer one's.

    Args:
      clock: seconds from any origin, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = self._since = clock()
        self._open: list[str] = ["other"]
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Books the time of the block to `name`. Raises ValueError for one that is not of PHASES."""
        if name not in self._seconds:
            raise ValueError(f"{name!r} is not a phase; phases are {', '.join(PHASES)}")
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return self._clock() - self._start

    def seconds(self) -> Mapping[str, float]:
        """By phase, now; they add up to `elapsed`."""
        self._turn()
        return dict(self._seconds)

    def _turn(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
