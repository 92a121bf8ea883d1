"""Hosts on this machine: starts one process each, shows what host 0 says, and ends them all when one fails. No jax."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from locojax.hosts.place import COORDINATOR, HOST_ID, LAUNCHED_AT, NUM_HOSTS, with_huge_pages

GRACE_SECONDS = 60.0  # for the others to end by themselves, with a message of their own
_KILL_SECONDS = 10.0  # from SIGTERM to SIGKILL
_POLL_SECONDS = 0.1
_NOISE = ("[Gloo]",)  # what a transport says when all is well

DEVICES_FLAG = "--xla_force_host_platform_device_count"


def launch(
    command: Sequence[str],
    num_hosts: int,
    *,
    devices_per_host: int | None = None,
    environment: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    errors: IO[str] | None = None,
) -> int:
    """Runs `command` once per host and returns an exit code: 0 if all ended well, else the first failure's.

    Host 0 has this process's terminal. Of the others, lines on stderr are passed on, after "[host 1] "; what they
    write to stdout is dropped. Ctrl-C and SIGTERM are passed on to all.

    Args:
      devices_per_host: CPU devices that each sees; None: as XLA_FLAGS says.
      environment: os.environ if None.
      grace_seconds: from the first failure to the end of those that are left.
      errors: where the launcher and hosts other than 0 write; sys.stderr if None.
    """
    out = sys.stderr if errors is None else errors
    base = dict(os.environ if environment is None else environment)
    if devices_per_host is not None:
        base["XLA_FLAGS"] = f"{base.get('XLA_FLAGS', '')} {DEVICES_FLAG}={devices_per_host}".strip()
    base |= with_huge_pages(base) | {COORDINATOR: f"127.0.0.1:{free_port()}", NUM_HOSTS: str(num_hosts)}
    base.setdefault(LAUNCHED_AT, datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    processes: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    with _passing_on(processes):
        for rank in range(num_hosts):
            process = _start(command, rank, {**base, HOST_ID: str(rank)})
            processes.append(process)
            if process.stderr is not None:
                thread = threading.Thread(target=_relay, args=(process.stderr, rank, out), daemon=True)
                thread.start()
                threads.append(thread)
        code = _wait(processes, grace_seconds, lambda text: print(text, file=out, flush=True))
    for thread in threads:
        thread.join(timeout=5)
    return code


def free_port() -> int:
    """A port on this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: Sequence[str], rank: int, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    first = rank == 0
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=None if first else subprocess.DEVNULL,
        stderr=None if first else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone, and is passed on once
    )


def _relay(stream: IO[str], rank: int, out: IO[str]) -> None:
    with stream:
        for line in stream:
            if line.strip() and not line.startswith(_NOISE):
                print(f"[host {rank}] {line.rstrip()}", file=out, flush=True)


def _wait(processes: Sequence[subprocess.Popen[str]], grace_seconds: float, say: Callable[[str], None]) -> int:
    """Until all have ended. After a failure those that are left have `grace_seconds`."""
    failed, deadline, code = False, 0.0, 0
    running = dict(enumerate(processes))
    while running:
        time.sleep(_POLL_SECONDS)
        for rank, process in list(running.items()):
            if (ended := process.poll()) is None:
                continue
            del running[rank]
            if ended != 0 and not failed:
                failed, deadline = True, time.monotonic() + grace_seconds
                code = ended if ended > 0 else 1
                if ended < 0:
                    say(f"Host {rank} of {len(processes)} was ended by {_signal_name(-ended)}")
        if failed and running and time.monotonic() > deadline:
            names = ", ".join(str(rank) for rank in running)
            say(f"Host {names} did not end within {grace_seconds:g} s of the first failure, and is ended now")
            _end(list(running.values()))
    return code


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _KILL_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _passing_on(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """SIGINT and SIGTERM go to every process, as often as they come; whatever else happens, none is left behind."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if left := [process for process in processes if process.poll() is None]:
            _end(left)
