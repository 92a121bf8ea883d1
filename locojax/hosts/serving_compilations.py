"""The programs of an engine process: how many XLA compiles, and when those of an earlier process may be read ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

_BUILT = "/jax/core/compile/backend_compile_duration"  # also when the program was found in the persistent cache
_FOUND = "/jax/compilation_cache/cache_hits"


class CompilationCounter:
    """Counts from when it is entered. Programs found in the persistent cache don't count: they cost no pause.

    Example: `with CompilationCounter() as counter: ...; counter.num_compilations`
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # programs are compiled on several threads
        self._num_built = self._num_found = 0

    @property
    def num_compilations(self) -> int:
        return self._num_built - self._num_found

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._took)
        jax.monitoring.register_event_listener(self._happened)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._took)
        jax.monitoring.unregister_event_listener(self._happened)

    def _took(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _BUILT:
            with self._lock:
                self._num_built += 1

    def _happened(self, event: str, **_: Any) -> None:
        if event == _FOUND:
            with self._lock:
                self._num_found += 1


READ_AHEAD_AFTER = 1.0
"""Seconds of nothing to do before the next program is read: a client's next request mostly comes sooner."""


class ReadAhead:
    """Sets `leisure` once there has been nothing to do for a while, and clears it when there is.

    A program that is called is read at once. All others together take 40 s of a core for SmolLM2, and took them from
    the first requests: 128 samples of 128 tokens right after the start lasted 68 s, later ones 33.

    Args:
      leisure, num_behind: see `models.executables.Executables`.
      clock: seconds; tests have their own.
    """

    def __init__(
        self, leisure: threading.Event, num_behind: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ):
        self.num_behind = num_behind
        self._leisure, self._clock, self._idle_since = leisure, clock, clock()

    def worked(self) -> None:
        """There was something to do until now."""
        self._leisure.clear()
        self._idle_since = self._clock()

    def idle(self) -> None:
        """There is nothing to do."""
        if self._clock() >= self._idle_since + READ_AHEAD_AFTER:
            self._leisure.set()
