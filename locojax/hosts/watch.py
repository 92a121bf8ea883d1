"""Who is alive, and how long this host has waited: signs of life between hosts, and the deadline of every wait. No jax.

Each host puts a `Sign` on a board that all can read, every `BEAT_SECONDS` or sooner. A `Watchdog` reads those of the
others and ends this process, with a message that names the host and the phase, when going on is impossible: a thread
inside a collective can't be interrupted any other way.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from locojax.errors import DeadlineError, HostError, LocoError

BEAT_SECONDS = 1.0
SIGN_SECONDS = 1.0  # longest wait for a sign that is being put
SIGNS = "signs"  # the folder of the board


class Board(Protocol):
    """A small key-value store that all hosts share. Keys are paths; a value appears whole."""

    def put(self, key: str, value: str) -> None:
        """Writes or overwrites a value."""

    def claim(self, key: str, value: str) -> bool:
        """Writes a value where there is none; False, changing nothing, where there is one. One of several wins."""

    def get(self, key: str, seconds: float) -> str:
        """A value, once it is there. Raises TimeoutError after `seconds`."""

    def read(self, folder: str) -> Mapping[str, str]:
        """What is in a folder now, by the last part of its key."""

    def forget(self, key: str) -> None:
        """Removes a value."""


@dataclasses.dataclass(frozen=True)
class Sign:
    """What a host tells of itself. Filled by its watchdog.

    Example: Sign(beats=17, meetings=5, phase="decode", ended=None)
    """

    beats: int  # goes up as long as the host lives
    meetings: int  # entered so far
    phase: str  # what it is doing
    ended: str | None = None  # why it ended; "" when it was done

    def encode(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def decode(cls, text: str) -> Sign:
        return cls(*json.loads(text))


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait of this host for the others. Example: Wait("publish", number=6, since=1234.5)"""

    phase: str
    number: int  # of the meeting, from 1
    since: float  # by the watch's clock


class Watch:
    """Judges from signs whether the run can go on. Starts no threads, has no board: see `Watchdog`.

    Args:
      silence_seconds: a host that gives no sign for longer is dead.
      deadline_seconds: longest wait in one meeting.
      clock: seconds from any origin, never going back.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        silence_seconds: float,
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rank, self.size, self.clock = rank, size, clock
        self.silence_seconds, self._deadline = silence_seconds, deadline_seconds
        start = clock()
        self._signs: dict[int, Sign] = {}
        self._heard = {other: start for other in range(size) if other != rank}
        self._read = start
        self._changed = threading.Lock()

    def saw(self, signs: Mapping[int, Sign]) -> None:
        """The board was read: what it holds of each host."""
        now = self.clock()
        with self._changed:
            for other, sign in signs.items():
                if other in self._heard and self._signs.get(other) != sign:
                    self._signs[other], self._heard[other] = sign, now
            self._read = now

    def held_up(self, seconds: float) -> None:
        """This process did not run for so long, and could hear nobody: that is no silence of the others."""
        now = self.clock()
        with self._changed:
            self._read = min(self._read + seconds, now)
            self._heard = {other: min(heard + seconds, now) for other, heard in self._heard.items()}

    def verdict(self, phase: str, wait: Wait | None) -> LocoError | None:
        """Why the run can't go on, or None. `phase`: what this host is doing."""
        with self._changed:
            return self._verdict(phase, wait)

    def _verdict(self, phase: str, wait: Wait | None) -> LocoError | None:
        here = f"This host, {self.rank}, was in phase '{phase}'"
        if wait is not None:
            waited = self.clock() - wait.since
            here = f"This host, {self.rank}, waited for it in phase '{wait.phase}' for {waited:.0f} s"
        for other, sign in self._signs.items():
            if sign.ended:
                return HostError(f"Host {other} of {self.size} ended: {sign.ended.rstrip('.')}. {here}")
        if (silent := self.clock() - self._read) > self.silence_seconds:
            return self._missing(0, silent, here) if self.rank else self._no_board(silent, here)
        for other, heard in self._heard.items():
            last = self._signs.get(other)
            done = last is not None and last.ended is not None
            if not done and (silent := self.clock() - heard) > self.silence_seconds:
                return self._missing(other, silent, here)
            if done and wait is not None and self.clock() - heard > self.silence_seconds:
                return HostError(f"Host {other} of {self.size} is done, and this one isn't. {here}")
        if wait is not None and (waited := self.clock() - wait.since) > self._deadline:
            return self._late(wait, waited)
        return None

    def _no_board(self, silent: float, here: str) -> DeadlineError:
        return DeadlineError(
            f"The coordinator of this run, a process that host 0 keeps, has not answered for {silent:.0f} s. {here}",
            remedy="If that process was ended from outside, see to it; continue with --resume",
        )

    def _missing(self, other: int, silent: float, here: str) -> DeadlineError:
        sign = self._signs.get(other)
        last = "" if sign is None else f", and was last seen in phase '{sign.phase}'"
        return DeadlineError(
            f"Host {other} of {self.size} is missing: it has given no sign of life for {silent:.0f} s{last}. {here}",
            remedy="Look at that host's own output; continue with --resume once it is back",
        )

    def _late(self, wait: Wait, waited: float) -> DeadlineError:
        late = [other for other, sign in sorted(self._signs.items()) if sign.meetings < wait.number]
        names = ", ".join(f"host {other} (alive, in phase '{self._signs[other].phase}')" for other in late)
        problem = f"Host {self.rank} of {self.size} waited {waited:.0f} s in phase '{wait.phase}', for "
        return DeadlineError(
            problem + (names or "what all hosts have entered"),
            expected=f"at most {self._deadline:g} s (hosts.deadline_seconds)",
            remedy="Look at what that host does; a longer hosts.deadline_seconds allows for long compilations",
        )


class Watchdog:
    """Gives this host's signs of life and watches the others', in threads of its own, until `stop`.

    Args:
      end: called with the verdict, from a thread; must not return to a process that goes on.
    """

    def __init__(self, watch: Watch, board: Board, end: Callable[[LocoError], None]):
        self._watch, self._board, self._end = watch, board, end
        self._beat_seconds = min(BEAT_SECONDS, watch.silence_seconds / 5)  # a silence is several beats long
        self._changed = threading.Lock()
        self._saying = threading.Lock()
        self._phase, self._num_meetings, self._num_beats = "start", 0, 0
        self._wait: Wait | None = None
        self._stopping = threading.Event()
        # Two, because the one that reads the board hangs in it when the host that keeps it does.
        self._threads = [
            threading.Thread(target=target, name=f"locojax-{target.__name__}", daemon=True)
            for target in (self._beat, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_meetings(self) -> int:
        """Meetings entered so far."""
        return self._num_meetings

    def doing(self, phase: str) -> str:
        """Says what this host is doing; returns what it said before."""
        before, self._phase = self._phase, phase
        return before

    def enter(self, phase: str) -> None:
        """A meeting begins: its deadline runs from now."""
        with self._changed:
            self._num_meetings += 1
            self._wait = Wait(phase, self._num_meetings, self._watch.clock())

    def leave(self) -> None:
        """The meeting is over."""
        with self._changed:
            self._wait = None

    def stop(self, ended: str) -> None:
        """The last sign: `ended` is why, "" when all is done. Nothing is watched any more."""
        self._stopping.set()
        self._say(ended)

    def _say(self, ended: str | None = None) -> None:
        # One at a time, or a beat that is under way overwrites the last sign; one that hangs isn't waited for longer.
        held = self._saying.acquire(timeout=SIGN_SECONDS)
        try:
            if ended is None and self._stopping.is_set():
                return
            self._num_beats += 1
            sign = Sign(self._num_beats, self._num_meetings, self._phase, ended)
            self._board.put(f"{SIGNS}/{self._watch.rank}", sign.encode())
        finally:
            if held:
                self._saying.release()

    def _beat(self) -> None:
        while not self._stopping.wait(self._beat_seconds):
            try:
                self._say()
                signs = {int(rank): Sign.decode(text) for rank, text in self._board.read(SIGNS).items()}
            except RuntimeError:  # the board is out of reach: `_judge` sees that it was not read
                continue
            self._watch.saw(signs)

    def _judge(self) -> None:
        due = self._watch.clock() + self._beat_seconds
        while not self._stopping.wait(self._beat_seconds):
            late = self._watch.clock() - due
            if late > self._beat_seconds:
                # The machine was busy elsewhere, or this process stopped: let `_beat` run before anything is judged.
                self._watch.held_up(late)
                if self._stopping.wait(self._beat_seconds):
                    return
            with self._changed:
                wait = self._wait
            verdict = self._watch.verdict(self._phase, wait)
            if verdict is not None and not self._stopping.is_set():
                self._end(verdict)
                return
            due = self._watch.clock() + self._beat_seconds
