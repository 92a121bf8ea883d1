"""An engine process's memory: how much keys and values get when nobody says, and giving back what was freed."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from locojax.models.spec import ModelSpec

KV_SHARE = 1 / 6
"""Of the memory: the rest is for weights, adapters with their Adam state, and what programs use while they run."""

GIB = 1 << 30
GIVE_BACK_EVERY = 60.0
"""Seconds at least between two times that a running engine gives memory back: pages are then faulted in again."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def auto_kv_bytes(spec: ModelSpec, dtype: str, *, max_slots: int, max_context: int, memory: int) -> int:
    """Bytes for keys and values: what every slot could use at full length, or a share of `memory` if that is less.

    Half of the engine's pool holds running samples, half computed prompts, so that "could use" is twice the samples'.
    A share of a GiB or more is rounded to whole ones: machines that are nearly alike then compile the same programs.
    """
    bytes_per_token = 2 * spec.num_layers * spec.kv_size * jnp.dtype(dtype).itemsize
    share = KV_SHARE * memory
    return min(2 * max_slots * max_context * bytes_per_token, round(share / GIB) * GIB if share >= GIB else int(share))


def device_memory() -> int:
    """Bytes of one device's memory; on a CPU, of the machine or of the container that this runs in."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(machine, int(limit)) if limit.isdecimal() else machine


class Freed:
    """Gives freed memory back at moments with nothing to do, if there was work since the last time.

    Steps of many shapes leave glibc's heap full of holes: a SmolLM2 engine that had served recipes for 15 minutes was
    resident with 15.2 GiB, of which 6.2 were holes.

    Args:
      clock: seconds; tests have their own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._worked, self._next = clock, False, clock() + GIVE_BACK_EVERY

    def worked(self) -> None:
        self._worked = True

    def idle(self) -> None:
        if self._worked and self._clock() >= self._next:
            give_back()
            self._worked, self._next = False, self._clock() + GIVE_BACK_EVERY


def give_back() -> None:
    """Returns to the machine what was freed in the C heap, e.g. by compiling; glibc alone keeps so much, and can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
