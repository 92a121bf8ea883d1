"""How long a run took from its start to its first new work, and what that time went to. No jax."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Startup:
    """Adds up seconds by name, from its making on.

    Example:
      startup = Startup()
      with startup.part("weights"):
          ...
      startup.line("resumed at step 37 of 200") == "resumed at step 37 of 200 in 21 s: 4 s weights, 17 s other"
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._start = clock, clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done inside counts as `name`; parts don't nest."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    def line(self, what: str) -> str:
        """What was reached, when, and where the time went; parts in the order in which they came."""
        total = self.seconds
        parts = {**self._seconds, "other": total - sum(self._seconds.values())}
        return f"{what} in {_shown(total)}: " + ", ".join(f"{_shown(each)} {name}" for name, each in parts.items())


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
