"""One process at a time in a folder, whichever way the one before ended."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from locojax.errors import CheckpointError, ConfigError
from locojax.hosts import folder_lock

HOLDER = """
import pathlib, subprocess, sys, time
from locojax.hosts import folder_lock
with folder_lock.hold(pathlib.Path(sys.argv[1]), "server", remedy="Stop it", say=print) as lock:
    child = subprocess.Popen(["sleep", "600"], pass_fds=(lock,))
    print("held", child.pid, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(folder: pathlib.Path):
    """Another process that holds the folder, and has a child that has inherited the lock: (process, child's pid)."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        try:
            yield process, child
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def hold(folder: pathlib.Path, said: list[str] | None = None, leaving: float = 30.0):
    say = [].append if said is None else said.append
    return folder_lock.hold(folder, "server", remedy="Stop it, or use another", say=say, leaving=leaving)


def test_another_process_is_refused_at_once_and_by_its_id(tmp_path):
    said: list[str] = []
    with holder(tmp_path) as (process, _):
        with pytest.raises(ConfigError) as refused, hold(tmp_path, said):
            pass
        assert not said  # nothing is waited for
    assert str(refused.value) == (
        f"The folder {tmp_path} is in use by another server. Got: process {process.pid}. Expected: one at a time. "
        "Stop it, or use another."
    )


def test_what_a_killed_process_leaves_behind_is_waited_for(tmp_path):
    said: list[str] = []
    with holder(tmp_path) as (process, child):
        process.kill()  # and not asked how it ended: it is a zombie
        with pytest.raises(ConfigError, match=f"in use by another server. Got: process {process.pid}"):
            with hold(tmp_path, said, leaving=2.0):
                pass
        assert said == [f"Waiting for what process {process.pid} left behind to end; it holds {tmp_path}"]
        os.kill(child, signal.SIGKILL)
        with hold(tmp_path):
            pass


def test_one_that_is_just_being_killed_is_waited_for(tmp_path):
    with holder(tmp_path) as (process, child):
        os.kill(child, signal.SIGKILL)
        killing = threading.Timer(0.3, process.kill)
        killing.start()
        with hold(tmp_path):
            killing.join()


def test_a_folder_that_was_let_go_of_can_be_had(tmp_path):
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        with hold(folder):
            assert (folder / folder_lock.NAME).read_text() == f"{os.getpid()} server\n"
            with pytest.raises(ConfigError, match=f"Got: process {os.getpid()}"), hold(folder):
                pass


def test_a_folder_that_cant_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    text = f"The folder {tmp_path}/file can't be written: File exists. Check the path and its permissions, or choose"
    with pytest.raises(CheckpointError, match=text), hold(tmp_path / "file"):
        pass

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    text = f"The folder {tmp_path} can't be written: No space left on device. Free some space."
    with pytest.raises(CheckpointError, match=text), hold(tmp_path):
        pass
