"""Counts the programs that XLA compiles in this process: of the trainer, of the samplers, and of anything else."""

from __future__ import annotations

import threading
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
