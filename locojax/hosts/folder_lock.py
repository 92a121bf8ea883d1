"""One process at a time writes a folder: a lock that the kernel lets go of when its holders have ended, however."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import time
from collections.abc import Callable, Iterator

from locojax.errors import CheckpointError, ConfigError

NAME = ".lock"
LEAVING_SECONDS = 30.0  # the rest of a server or a run, whose first process was killed, has so long to end
DYING_SECONDS = 1.0  # a process that was just killed is there for a moment longer
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def hold(
    folder: pathlib.Path, owner: str, *, remedy: str, say: Callable[[str], None], leaving: float = LEAVING_SECONDS
) -> Iterator[int]:
    """The folder, which is made if need be, is this process's; yields a file descriptor.

    The lock lasts until this process and all that have inherited the descriptor have ended or left the block. It keeps
    out who asks for it, on this machine; between machines as far as the file system passes flock(2) on, and where it
    has none at all, not.

    Args:
      owner: what takes the folder, e.g. "server".
      say: is told whom it waits for: a holder whose process is gone but whose children aren't.
      leaving: for so many seconds.

    Raises:
      ConfigError: another holds it; `remedy` says what to do then.
      CheckpointError: the folder can't be written.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, folder, owner, remedy, say, leaving)
        with _writing(folder):
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {owner}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise CheckpointError(
            f"The folder {folder} can't be written: {error.strerror or error}",
            remedy="Free some space" if is_full else "Check the path and its permissions, or choose another folder",
        ) from error


def _take(
    descriptor: int, folder: pathlib.Path, owner: str, remedy: str, say: Callable[[str], None], leaving: float
) -> None:
    started, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        except OSError:
            return  # a file system without locks
        pid, waited = holder.partition(" ")[0], time.monotonic() - started
        is_alive = _is_alive(pid)
        if waited > (DYING_SECONDS if is_alive else leaving):
            raise ConfigError(
                f"The folder {folder} is in use by another {owner}", got=f"process {pid or 'unknown'}",
                expected="one at a time", remedy=remedy,
            )  # fmt: skip
        if pid and not told and not is_alive:
            say(f"Waiting for what process {pid} left behind to end; it holds {folder}")
            told = True
        time.sleep(_POLL_SECONDS)


def _is_alive(pid: str) -> bool:
    """False too of one that has ended and that its parent has yet to ask, and while no id has been written."""
    if not pid.isdecimal() or int(pid) == 0:
        return False
    try:
        os.kill(int(pid), 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
