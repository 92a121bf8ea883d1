"""The hosts of one run: who is in it, what they agree on, and the deadline of every wait for one another.

Hosts meet in three places in a step: `agree` on integers, the training program, the publish. Each is entered through
`Group.waiting`, which starts the deadline; a watchdog ends this process with a message when a host is missing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import NoReturn

import numpy as np

from locojax.config import HostsConfig
from locojax.errors import ConfigError, DeadlineError, HostError, LocoError
from locojax.hosts import coordination
from locojax.hosts.interrupt import Stopped
from locojax.hosts.phases import Phase, StepAccount, StepTimer
from locojax.hosts.place import COORDINATOR, HOST_ID, NUM_HOSTS, Place, find_place
from locojax.hosts.watch import BEAT_SECONDS, SIGNS, Board, Sign, Watch, Watchdog

_LINGER_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0
_PARTING_SECONDS = 30.0
_POLL_SECONDS = 0.02
_SHOW_CURSOR = "\x1b[?25h"


class AgreedStop(Stopped):
    """Ctrl-C or SIGTERM on some host, with all hosts at the same place: they part as after a run's end."""


class Group:
    """The hosts of a run, seen from one of them.

    Args:
      rank: which host this is. size: how many there are.
      board: what they share; None for one host.
      deadline_seconds: longest wait in one meeting. silence_seconds: a host that is silent for longer is dead.

    Example:
      with Group.start(config.hosts) as group:
          rows = group.agree("rows", [num_rows])[:, 0].max()
          with group.waiting("train"):
              ...
    """

    def __init__(
        self,
        rank: int,
        size: int,
        board: Board | None = None,
        *,
        deadline_seconds: float = 600.0,
        silence_seconds: float = 30.0,
    ):
        self.rank, self.size = rank, size
        self._board, self._deadline, self._silence = board, deadline_seconds, silence_seconds
        self._num_exchanges = 0
        self._ending = threading.Lock()
        self._watchdog: Watchdog | None = None
        if board is not None:
            watch = Watch(rank, size, silence_seconds=silence_seconds, deadline_seconds=deadline_seconds)
            self._watchdog = Watchdog(watch, board, self._end)

    @classmethod
    def single(cls) -> Group:
        """One host: nothing is waited for."""
        return cls(0, 1)

    @classmethod
    def start(cls, config: HostsConfig, environment: Mapping[str, str] | None = None) -> Group:
        """Joins the hosts that the environment names; alone if it names none. Comes before any use of jax.

        Raises:
          ConfigError: see `find_place`; or `hosts.distributed` is "on" and jax finds no cluster.
          DeadlineError: the others didn't come.
        """
        place = find_place(config, os.environ if environment is None else environment)
        if place is None:
            return cls.single()
        late = threading.Timer(config.deadline_seconds, end_process, [_not_all_came(place, config.deadline_seconds)])
        late.daemon = True
        late.start()  # jax itself would end this process with a dump of its stack
        try:
            board = coordination.join(
                place.address,
                place.num_hosts,
                place.rank,
                seconds=config.deadline_seconds + _LINGER_SECONDS,
                linger_seconds=config.silence_seconds + _LINGER_SECONDS,
            )
        except ValueError as error:
            raise ConfigError(
                f"hosts.distributed is {config.distributed!r}, and jax finds no cluster: {error}",
                remedy=f"Set {COORDINATOR}, {NUM_HOSTS} and {HOST_ID}, or use `locojax launch`",
            ) from None
        finally:
            late.cancel()
        rank, size = coordination.place()
        return cls(rank, size, board, deadline_seconds=config.deadline_seconds, silence_seconds=config.silence_seconds)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, AgreedStop):
            self.close()
        else:
            self.fail(error)

    @property
    def is_first(self) -> bool:
        """Whether this host keeps what there is one of: the run log, checkpoints."""
        return self.rank == 0

    @property
    def board(self) -> Board | None:
        """What the hosts share; None with one."""
        return self._board

    @property
    def num_meetings(self) -> int:
        """Meetings entered so far; 0 with one host."""
        return 0 if self._watchdog is None else self._watchdog.num_meetings

    def agree(self, phase: str, ints: Sequence[int] | np.ndarray) -> np.ndarray:
        """What each host says: i64[size, n], by rank, the same on all. A meeting.

        Raises:
          HostError: the hosts say different numbers of integers, or are in different phases.
        """
        row = np.asarray(ints, np.int64)
        texts = self.exchange(phase, " ".join(str(value) for value in row.tolist()))
        rows = [np.array(text.split(), np.int64) for text in texts]
        if {len(each) for each in rows} != {len(row)}:
            told = ", ".join(f"host {rank}: {len(each)}" for rank, each in enumerate(rows))
            raise HostError(f"The hosts do not say the same number of things in phase '{phase}'", got=told)
        return np.stack(rows)

    def exchange(self, phase: str, text: str) -> list[str]:
        """What each host says, in words, by rank. A meeting."""
        if self._board is None:
            return [text]
        with self.waiting(phase):
            folder = f"exchange/{self._num_exchanges}"
            self._board.put(f"{folder}/{self.rank}", f"{phase}\n{text}")
            said = []
            for other in range(self.size):
                try:
                    said.append(self._board.get(f"{folder}/{other}", self._deadline).split("\n", 1))
                except TimeoutError:
                    problem = f"Host {other} of {self.size} did not come to phase '{phase}' in {self._deadline:g} s"
                    raise DeadlineError(problem) from None
            # All have read what was said two exchanges ago, or they would not be here.
            if self._num_exchanges >= 2:
                self._board.forget(f"exchange/{self._num_exchanges - 2}/{self.rank}")
            self._num_exchanges += 1
        phases = [phase for phase, _ in said]
        if set(phases) != {phase}:
            told = ", ".join(f"host {rank} in '{name}'" for rank, name in enumerate(phases))
            raise HostError("The hosts are out of step", got=told, expected=f"all in '{phase}'")
        return [text for _, text in said]

    @contextlib.contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """A meeting: what happens inside waits for the other hosts, and has `deadline_seconds` to end."""
        if self._watchdog is None:
            yield
            return
        before = self._watchdog.doing(phase)
        self._watchdog.enter(phase)
        try:
            with self.reaching(phase):
                yield
        finally:
            self._watchdog.leave()
            self._watchdog.doing(before)

    @contextlib.contextmanager
    def reaching(self, phase: str) -> Iterator[None]:
        """What happens inside reaches for other hosts or the board, without waiting for anybody: no meeting.

        A collective that breaks because a host died raises, on some transports, before anyone knows which, and so does
        a board that is gone: the error is held back until the watchdog has had the time to tell.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:  # jax raises either when a peer is gone
            if self._watchdog is not None:
                said = str(error).splitlines()[0]
                print(f"Host {self.rank}, in phase '{phase}': {said}", file=sys.stderr, flush=True)
                time.sleep(self._silence + 3 * BEAT_SECONDS)
            raise

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Tells the others what this host does, for their messages."""
        if self._watchdog is None:
            yield
            return
        before = self._watchdog.doing(phase)
        try:
            yield
        finally:
            self._watchdog.doing(before)

    def close(self) -> None:
        """Parts from the other hosts, once all have come to the end."""
        if self._watchdog is None:
            return
        with contextlib.suppress(DeadlineError, HostError):
            self.exchange("end", "")
        with contextlib.suppress(RuntimeError):  # the board is gone: host 0 has left already
            self._watchdog.stop("")
            if self.is_first:
                self._see_off()
        self._watchdog = None
        coordination.leave()

    def _see_off(self) -> None:
        """The board goes with host 0, which therefore is the last to leave."""
        assert self._board is not None
        deadline = time.monotonic() + _PARTING_SECONDS
        while time.monotonic() < deadline:
            if sum(Sign.decode(text).ended is not None for text in self._board.read(SIGNS).values()) == self.size:
                return
            time.sleep(_POLL_SECONDS)

    def fail(self, error: BaseException) -> None:
        """Tells the other hosts that this one ends, and why; they end too."""
        if self._watchdog is None:
            return
        with contextlib.suppress(RuntimeError):  # nobody to tell: the board is gone
            self._watchdog.stop(_in_words(error))
        self._watchdog = None
        coordination.abandon()

    def _end(self, verdict: LocoError) -> None:
        """Ends this process: the main thread may be inside a collective that never returns."""
        with self._ending:
            if (watchdog := self._watchdog) is not None:
                last = threading.Thread(target=watchdog.stop, args=(_in_words(verdict),), daemon=True)
                last.start()
                last.join(_LAST_WORDS_SECONDS)  # it hangs when the board does
            end_process(verdict)


def end_process(error: LocoError) -> NoReturn:
    """Says why, and ends this process from whatever thread."""
    if sys.stdout.isatty():  # a live line has hidden the cursor, and nobody else will bring it back
        print(_SHOW_CURSOR, flush=True)
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def _not_all_came(place: Place, seconds: float) -> DeadlineError:
    this = "this host" if place.rank is None else f"this is host {place.rank}"
    where = "" if place.address is None else f" at {place.address}"
    return DeadlineError(
        f"Not all hosts of the run came together within {seconds:g} s; {this}",
        expected="all hosts" if place.num_hosts is None else f"{place.num_hosts} hosts, host 0 reachable{where}",
        remedy="Start the same command on every host, and check that each reaches host 0's address",
    )


def _in_words(error: BaseException) -> str:
    words = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {words[0]}"


class Announcing:
    """A StepTimer whose phases the other hosts hear of, for their messages."""

    def __init__(self, timer: StepTimer, group: Group):
        self._timer, self._group = timer, group

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        with self._group.doing(f"step {index}"), self._timer.step(index):
            yield

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with self._group.doing(name), self._timer.phase(name):
            yield

    @contextlib.contextmanager
    def after_step(self, name: Phase) -> Iterator[None]:
        with self._group.doing(name), self._timer.after_step(name):
            yield

    def last(self) -> StepAccount:
        return self._timer.last()
