"""Keeps the two processes of a server alive: starts them, restarts the one that dies, stops both in order.

Each child reads its standard input and ends when that does, so that no child outlives a supervisor that was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

BAD_INPUT = 2  # a child that ends with it would end so again

_WAIT_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Child:
    """A process to keep alive. Filled by the command line.

    Attributes:
      name: as the terminal shows it.
      command: what to run.
      environment: added to the supervisor's own.
      pass_fds: file descriptors that it inherits.
      stop_seconds: how long it may take to end after SIGTERM.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    stop_seconds: float = 20.0


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """How soon a dead child is started again, and when to give up.

    Attributes:
      first_wait, longest_wait: seconds; doubled from one death to the next.
      steady_after: a child that lived so many seconds starts again from `first_wait`.
      max_deaths: deaths in a row, each before `steady_after`, after which the server ends.
    """

    first_wait: float = 0.5
    longest_wait: float = 30.0
    steady_after: float = 60.0
    max_deaths: int = 6


class _Running:
    """A child's present process, and how it has fared."""

    def __init__(self, child: Child):
        self.child = child
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.deaths = 0
        self.due = 0.0  # when to start it (again)

    def start(self) -> None:
        # A session of its own: Ctrl-C reaches the supervisor alone, which then stops the children in order.
        self.process = subprocess.Popen(
            self.child.command,
            stdin=subprocess.PIPE,
            env={**os.environ, **self.child.environment},
            pass_fds=self.child.pass_fds,
            start_new_session=True,
        )
        self.started = time.monotonic()

    def stop(self, hurry: Callable[[], bool]) -> None:
        """SIGTERM, and SIGKILL once its time is over or `hurry` says so."""
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + self.child.stop_seconds
            while process.poll() is None and time.monotonic() < deadline and not hurry():
                time.sleep(_WAIT_SECONDS)
            process.kill()
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


class Supervisor:
    """Runs children until told to stop.

    Example: `Supervisor([engine, api], say=print).run()`

    Args:
      children: in the order of their start; stopped in reverse order.
      say: shows a person a line.
      policy: when to restart.
      poll_seconds: how often the children are looked at.
    """

    def __init__(
        self,
        children: Sequence[Child],
        say: Callable[[str], None],
        policy: RestartPolicy | None = None,
        *,
        poll_seconds: float = 0.1,
    ):
        self._running = [_Running(child) for child in children]
        self._say = say
        self._policy = policy or RestartPolicy()
        self._poll_seconds = poll_seconds
        self._stopping = threading.Event()
        self._signalled = 0
        self.stopped_by: int | None = None  # the first signal that came

    def stop(self) -> None:
        """Makes `run` end; from any thread."""
        self._stopping.set()

    def processes(self) -> Mapping[str, int]:
        """Process ids of the children that live, by name."""
        alive = ((running.child.name, running.process) for running in self._running)
        return {name: process.pid for name, process in alive if process is not None and process.poll() is None}

    def run(self) -> int:
        """The exit code: 0 when told to stop, 2 when a child's input is at fault, 1 when a child dies too often."""
        with self._signals():
            try:
                return self._loop()
            finally:
                for running in reversed(self._running):
                    running.stop(lambda: self._signalled > 1)

    def _loop(self) -> int:
        while not self._stopping.is_set():
            now = time.monotonic()
            for running in self._running:
                if running.process is None:
                    if running.due <= now:
                        running.start()
                elif (code := running.process.poll()) is not None:
                    final = self._died(running, code, now)
                    if final is not None:
                        return final
            self._stopping.wait(self._poll_seconds)
        return 0

    def _died(self, running: _Running, code: int, now: float) -> int | None:
        """Plans a child's next start; or the exit code, when there is no use in one."""
        name, policy = running.child.name, self._policy
        lived = now - running.started
        running.deaths = 1 if lived >= policy.steady_after else running.deaths + 1
        running.stop(lambda: True)
        running.process = None
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if code == BAD_INPUT:
            self._say(f"The {name} {how}: starting it again would not help.")
            return BAD_INPUT
        if running.deaths >= policy.max_deaths:
            self._say(f"The {name} {how}. It has done so {running.deaths} times in a row: giving up.")
            return 1
        wait = min(policy.first_wait * 2 ** (running.deaths - 1), policy.longest_wait)
        running.due = now + wait
        self._say(f"The {name} {how} after {lived:.1f} s. Starting it again in {wait:g} s.")
        return None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end `run`; a second one does not wait for the children."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._signalled += 1
        if self._signalled == 1:
            self.stopped_by = number
            self._say("Stopping: requests in flight are answered and models saved first. Ctrl-C again stops at once.")
        self._stopping.set()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_with_parent(stdin: int = 0) -> None:
    """In a child: SIGTERM to itself when its standard input ends, which is when the supervisor is gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # a standard input that was closed has ended too
            while os.read(stdin, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
