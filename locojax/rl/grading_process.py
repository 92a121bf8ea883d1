"""The parent's end of one grading process: start it, hand it work, kill it when a grade runs past its deadline.

The process is started afresh, never forked (jax's threads do not survive a fork), with the parent's import path, and
in its own session: killing it takes along whatever a reward started, and Ctrl-C in the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from locojax.errors import GradingError

LOAD_DEADLINE_SECONDS = 120.0  # importing a reward's libraries may take long, once
_PROGRAM = "import sys; from locojax.rl.grading_worker import main; main(int(sys.argv[1]))"


class GradingProcess:
    """One process with one reward function loaded. `run` and `wait_until_loaded` are for one thread; `kill` for any."""

    def __init__(self, spec: str, deadline_seconds: float):
        self._spec, self._deadline_seconds = spec, deadline_seconds
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
            )
        self._connection = Connection(ours.detach())
        self._kill_lock = threading.Lock()
        self.alive = True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `wait_until_loaded` says how it ended
            self._connection.send((spec, 2 * deadline_seconds + 1))

    def wait_until_loaded(self) -> None:
        """Raises GradingError when the reward can't be loaded, or takes longer than two minutes."""
        problem: str | None
        if not self._connection.poll(LOAD_DEADLINE_SECONDS):
            problem = f"Loading the reward '{self._spec}' took longer than {LOAD_DEADLINE_SECONDS:.0f} s"
        else:
            try:
                problem = self._connection.recv()
            except (EOFError, ConnectionResetError):
                problem = f"The grading process ended while it loaded the reward '{self._spec}' ({self._exit_text()})"
        if problem is not None:
            self.kill()
            raise GradingError(problem)

    def run(self, pickled: Sequence[bytes]) -> Iterator[float | str]:
        """Grade in order: yields a value or the text of an error for each. Stops short after killing a grade.

        A grade past its deadline, or that ended the process, yields an error as the last item; the process is then
        dead (`alive` False), and the grades after it have not been tried.
        """
        try:
            self._connection.send(pickled)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died idle or mid-message; the first `recv` below says how
        for _ in pickled:
            if not self._connection.poll(self._deadline_seconds):
                self.kill()
                yield f"the grade ran past its deadline of {self._deadline_seconds:g} s and was killed"
                return
            try:
                result = self._connection.recv()
            except (EOFError, ConnectionResetError):
                died = f"the grading process died during this grade ({self._exit_text()})"
                self.kill()
                yield died
                return
            yield result

    def kill(self) -> None:
        """End the process and everything it started. May be called twice, and from another thread than `run`'s."""
        with self._kill_lock:
            self.alive = False
            with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """`kill`, and give the connection back. Only for the thread that uses it."""
        self.kill()
        self._connection.close()

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
