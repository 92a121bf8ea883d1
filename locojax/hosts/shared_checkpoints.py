"""A run's checkpoints when several hosts train it: gathered from all, kept by the first, and read by it for all.

Host 0's memory holds the whole state once while it is written or read; no folder need be shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from locojax.config import Config, run_folder
from locojax.hosts.checkpoint import Checkpoints, Position
from locojax.hosts.group import Group
from locojax.models.sharding import gathered

CHECKPOINTS = "checkpoints"
_CAUTIOUS_BYTES_A_SECOND = 100e6  # of a disk in the network


class SharedCheckpoints:
    """The checkpoints of a run. With several hosts every host calls every method; each call is a meeting.

    Raises:
      CheckpointError: on host 0, which keeps them; the other hosts then end with it.
    """

    def __init__(self, config: Config, group: Group):
        self._group = group
        self._own: Checkpoints | None = None
        if group.is_first:
            self._own = Checkpoints(run_folder(config) / CHECKPOINTS, config, alone=group.size > 1)
        self.folder = run_folder(config) / CHECKPOINTS
        self._keep_last = config.run.keep_last
        self._newest: int | None = None
        self._saved: list[int] = []  # that this process knows of, the last one perhaps not whole yet

    def __enter__(self) -> SharedCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.close()

    @property
    def newest(self) -> int | None:
        """The step of the checkpoint that was read or written last in this process."""
        return self._newest

    @property
    def oldest_kept(self) -> int:
        """The step of the oldest of the last whole checkpoints that are kept: no resume goes further back."""
        whole = self._saved[:-1][-self._keep_last :]
        return whole[0] if whole else 0

    def save(self, state: Mapping[str, Any], position: Position) -> None:
        """Begins to write a checkpoint of the trainer's state."""
        if self._group.size > 1:
            with self._group.waiting("checkpoint"):
                state = gathered(state)
        if self._own is not None:
            self._own.save(state, position)
        self._newest = position.next_step
        self._saved.append(position.next_step)

    def seconds_needed(self, state: Mapping[str, Any]) -> float:
        """How long a save will take on host 0: as the last one, or by a guess; 0 elsewhere."""
        if self._own is None:
            return 0.0
        if self._own.last_seconds is not None:
            return self._own.last_seconds
        return sum(leaf.nbytes for leaf in jax.tree.leaves(dict(state))) / _CAUTIOUS_BYTES_A_SECOND

    def wait(self) -> None:
        """Returns when what was saved is on disk; needs no other host."""
        if self._own is not None:
            self._own.wait()

    def newest_sound(self) -> tuple[list[str], Position | None]:
        """(what is wrong with newer ones, the position of the newest sound checkpoint or None); host 0's alone."""
        assert self._own is not None
        damaged = self._own.check()
        return damaged, None if self._own.latest() is None else self._own.position()

    def goes_on_from(self, position: Position) -> None:
        """All hosts agree to go on from this checkpoint."""
        self._newest = position.next_step
        self._saved = [position.next_step]

    def restore(self, like: Mapping[str, Any]) -> Mapping[str, Any]:
        """The newest checkpoint's state, for a trainer whose own is `like`; with several hosts, in numpy."""
        if self._group.size == 1:
            assert self._own is not None
            return self._own.restore(like)
        # Zeros without memory: only shapes and dtypes of `like` are of use, and its arrays are not this host's alone.
        empty = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), dict(like))
        state = empty if self._own is None else self._own.restore(empty)
        with self._group.waiting("resume"):
            return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(state))
