"""A real server, started as a user starts it, on a tiny model or any other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx

MODEL = "local/tiny"  # its path where server and clients run: clients find the tokenizer under the model's name
ROOT = pathlib.Path(__file__).parents[2]
READY_IN = 420.0  # seconds, with no program compiled yet, on a machine that does other things too


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server. `pid` is the supervisor's, whose children are the engine process and the API process."""

    url: str
    pid: int
    log: pathlib.Path

    def child(self, role: str) -> int:
        """The pid of its "engine" or "api" process."""
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.pid and role in (path / "cmdline").read_bytes().decode().split("\0"):
                    return int(path.name)
        raise LookupError(f"the server has no {role} process now:\n{tail(self.log)}")


@contextlib.contextmanager
def serve(model: str, cwd: pathlib.Path, options: Sequence[str] = ()) -> Iterator[Server]:
    """`locojax serve MODEL` in `cwd` until the block ends, ready when it begins. Its log is `cwd`/server.log."""
    port = free_port()
    command = [sys.executable, "-m", "locojax", "serve", model, "--port", str(port), "--data-dir", "data", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    log = cwd / "server.log"
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", process.pid, log)
    try:
        wait_until_ready(server.url, process, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the server didn't stop within 30 s of SIGTERM:\n{tail(log)}") from None


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline = time.monotonic() + READY_IN
    with httpx.Client(base_url=url, timeout=5.0) as http:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise AssertionError(f"the server ended with {process.returncode}:\n{tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if http.get("/api/v1/healthz").status_code == 200:
                    return
            time.sleep(0.1)
    raise AssertionError(f"the server isn't ready after {READY_IN:.0f} s:\n{tail(log)}")


def tail(log: pathlib.Path, num_lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
