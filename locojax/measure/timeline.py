"""Step accounting: every second of a step belongs to one named phase, or is shown as unaccounted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from locojax.hosts.phases import PHASES, Phase, StepAccount


class Timeline:
    """Records the phases of this host's steps (a `hosts.phases.StepTimer`).

    Only the thread that made it may enter a phase: one host's phases can't overlap, so they can add up. Work that other
    threads do in the background has no phase; waiting for it has.

    Example:
      timeline = Timeline()
      with timeline.step(0):
          with timeline.phase("decode"):
              ...
      print(describe(timeline.last()))
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """Args: clock: seconds from any origin, never going back."""
        self._clock = clock
        self._thread = threading.get_ident()
        self._open: list[Phase] = []
        self._since = 0.0  # when the innermost open phase, or the gap between two, began to run
        self._seconds: dict[Phase, float] = {}
        self._left_over: dict[Phase, float] = {}  # by the last step, for the next one's account
        self._in_step = False
        self.accounts: list[StepAccount] = []

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Times step `index`; its account is kept even if the step ends with an error.

        Raises:
          RuntimeError: a step or a phase is still open.
        """
        self._check_thread()
        if self._in_step or self._open:
            raise RuntimeError(f"step {index} begins inside a step or phase {self._open}: steps don't nest")
        self._in_step, self._seconds, self._left_over = True, self._left_over, {}
        start = self._clock() - sum(self._seconds.values())
        try:
            yield
        finally:
            self._in_step = False
            self.accounts.append(StepAccount(index, self._seconds, self._clock() - start))

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Times a part of the step; inside another phase, its time is taken off that one's.

        Raises:
          ValueError: not one of PHASES. RuntimeError: entered from another thread.
        """
        self._check_thread()
        if name not in PHASES:
            raise ValueError(f"{name!r} is not a phase; phases are {', '.join(PHASES)}")
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    @contextlib.contextmanager
    def after_step(self, name: Phase) -> Iterator[None]:
        """Times, between two steps, what the first one has left to do: the second one's account has it.

        Raises:
          RuntimeError: a step is open.
        """
        self._check_thread()
        if self._in_step:
            raise RuntimeError(f"phase {name!r} comes after a step, and one is open")
        start = self._clock()
        try:
            yield
        finally:
            self._left_over[name] = self._left_over.get(name, 0.0) + self._clock() - start

    def last(self) -> StepAccount:
        """The account of the step that ended last. Raises RuntimeError if none has."""
        if not self.accounts:
            raise RuntimeError("no step has ended yet")
        return self.accounts[-1]

    def _turn(self) -> None:
        """Books the time since the last turn to the phase that was running."""
        now = self._clock()
        if self._open and self._in_step:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a timeline belongs to the thread that made it: time the wait, not the background work")


def describe(account: StepAccount) -> str:
    """One line, largest phase first. Example: "3.00 s: decode 66.7 %, train 30.0 %, unaccounted 3.3 %"."""
    if account.wall <= 0:
        return f"{account.wall:.2f} s"
    parts = sorted(account.seconds.items(), key=lambda item: -item[1])
    shares = [f"{name} {100 * seconds / account.wall:.1f} %" for name, seconds in parts]
    return f"{account.wall:.2f} s: " + ", ".join(
        [*shares, f"unaccounted {100 * account.unaccounted / account.wall:.1f} %"]
    )
