"""Python's garbage collector kept out of the step: what lives for the whole run is frozen, the rest collected between.

The collector's full passes walk every object that jax traced and stop all threads of a host, at a time of its own
choosing; the other hosts wait for it in the next collective.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType
from typing import Any

_YOUNG, _ALL = 1, 2  # generations: what a step leaves behind; everything that isn't frozen
_ALL_EVERY = 50  # steps: what outlives one step and then ends would never be found


class Collector:
    """While open and after `freeze`, garbage is collected only by `collect`.

    Args:
      active: False: Python's own collector goes on as it was.
    """

    def __init__(self, active: bool):
        self._active, self._frozen, self._num_collected = active, False, 0
        self._since, self._seconds = 0.0, 0.0

    def __enter__(self) -> Collector:
        gc.callbacks.append(self._clock)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._clock)
        if self._frozen:
            gc.enable()
            gc.unfreeze()
            self._frozen = False

    def _clock(self, moment: str, info: dict[str, Any]) -> None:
        if moment == "start":
            self._since = time.perf_counter()
        else:
            self._seconds += time.perf_counter() - self._since

    def seconds_since_asked(self) -> float:
        """What collections took since this was last asked, whoever began them, while this is open."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def is_frozen(self) -> bool:
        """Whether garbage is collected by `collect` only; also when nothing was asked for."""
        return self._frozen or not self._active

    def freeze(self) -> None:
        """What exists now is kept for good."""
        if self._active:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._frozen = True

    def collect(self) -> None:
        """Between two steps."""
        if self._frozen:
            self._num_collected += 1
            gc.collect(_ALL if self._num_collected % _ALL_EVERY == 0 else _YOUNG)
