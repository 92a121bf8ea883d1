"""The head's orders to the other hosts, through the run's key-value store: what a remote call is to other engines."""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from locojax.hosts.group import Group
from locojax.hosts.watch import Board

_FOLDER = "orders"
_PHASE = "lockstep"


class Orders:
    """Orders in waves: a wave is one generation, from its first order to `end`. The head writes, the others read.

    Each order is one meeting on every host. What is sent is pickled, as processes of one run send it: its readers run
    the same program, and trust the store that jax's own set-up goes through.

    Args:
      group: the hosts; with one, nobody is told anything.
    """

    def __init__(self, group: Group):
        self._group = group
        # What an earlier run of these hosts left unheard has another number; all hosts count alike.
        self._folder = f"{_FOLDER}/{group.num_meetings}"
        self._wave, self._num_orders = 0, 0

    @contextlib.contextmanager
    def order(self, action: str, *arguments: Any) -> Iterator[None]:
        """Tells the others; what the head does inside waits for them."""
        if self._board is None:
            yield
            return
        with self._group.waiting(_PHASE):
            self._put((action, arguments))
            yield

    @contextlib.contextmanager
    def heard(self, seconds: float) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The next order: its action and arguments. What is done inside waits for the other hosts."""
        with self._group.waiting(_PHASE):
            yield self._get(seconds)

    def end(self, for_each: Sequence[Any]) -> Any:
        """Ends a wave, handing each host its part, by rank; returns the head's."""
        if self._board is not None:
            with self._group.waiting(_PHASE):
                self._put(("end", tuple(for_each)))
            self._next_wave()
        return for_each[self._group.rank]

    def ended(self, for_each: tuple[Any, ...]) -> Any:
        """The end of a wave was heard; returns this host's part."""
        self._next_wave()
        return for_each[self._group.rank]

    @property
    def _board(self) -> Board | None:
        return self._group.board

    def _next_wave(self) -> None:
        # All heard the end of the wave before the last: the hosts have met since.
        if self._group.is_first and self._wave > 1 and self._board is not None:
            self._board.forget(f"{self._folder}/{self._wave - 2}")
        self._wave, self._num_orders = self._wave + 1, 0

    def _put(self, order: Any) -> None:
        assert self._board is not None
        self._board.put(self._key(), base64.b64encode(pickle.dumps(order)).decode("ascii"))
        self._num_orders += 1

    def _get(self, seconds: float) -> Any:
        assert self._board is not None
        order = pickle.loads(base64.b64decode(self._board.get(self._key(), seconds)))
        self._num_orders += 1
        return order

    def _key(self) -> str:
        return f"{self._folder}/{self._wave}/{self._num_orders}"
