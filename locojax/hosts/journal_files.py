"""Append-only files of checksummed records, on this machine or on any file system that fsspec knows. No jax.

A file is `MAGIC`, then records: length (u32, little-endian), CRC-32 of the length's four bytes and the payload (u32),
payload. A crash while writing leaves at most one torn record, at the end: reading stops before it and says so.

On a local disk a record is handed to the operating system as it is appended, so that it survives this process, and
`sync` starts an fsync in a thread, so that it survives the machine. An object store knows no appending: there each
`sync` writes what has come since as one more object, whole or absent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import fsspec

from locojax.errors import CheckpointError

MAGIC = b"LOCOJAX journal 1\n"
_HEAD = struct.Struct("<II")
_LOCAL_SYNC_SECONDS = 0.2  # shortest time between two syncs that nobody waits for
_REMOTE_SYNC_SECONDS = 5.0


def frame(payload: bytes) -> bytes:
    """A record as it stands in a file."""
    length = struct.pack("<I", len(payload))
    return length + struct.pack("<I", zlib.crc32(payload, zlib.crc32(length))) + payload


def unframe(data: bytes) -> tuple[list[bytes], int]:
    """(payloads of the whole records, bytes of `data` up to their end); what is left of it is torn or damaged."""
    if not data.startswith(MAGIC):
        return [], 0
    payloads, at = [], len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(data[at : at + 4])) != checksum:
            break
        payloads.append(payload)
        at += _HEAD.size + length
    return payloads, at


class Appender(Protocol):
    """A file that records are appended to, by any thread."""

    def append(self, payload: bytes) -> None:
        """Raises CheckpointError when it can't be written, or an earlier sync failed."""

    def sync(self, *, wait: bool = False) -> None:
        """What was appended becomes durable: soon, or before this returns."""

    def close(self) -> None:
        """Syncs and closes."""


class Folder(Protocol):
    """Where a journal's files are. Names are relative, with forward slashes."""

    path: str

    def names(self) -> list[str]:
        """Of every file, parts of one file counted once; sorted."""

    def read(self, name: str) -> tuple[list[bytes], int]:
        """(the file's whole records, bytes of a torn tail that was passed over); ([], 0) if there is none."""

    def appender(self, name: str) -> Appender:
        """The file, made if absent, its torn tail cut off."""

    def remove(self, name: str) -> None:
        """The file; nothing if it isn't there."""


def open_folder(path: str) -> Folder:
    """The folder at a path of this machine, or at an fsspec URL such as gs://bucket/runs/a/journal."""
    if "://" in path and not path.startswith("file://"):
        return RemoteFolder(path)
    return LocalFolder(path.removeprefix("file://"))


class LocalFolder:
    """See `Folder`."""

    def __init__(self, path: str):
        self.path = path
        self._root = pathlib.Path(path)

    def names(self) -> list[str]:
        if not self._root.is_dir():
            return []
        found = (path for path in self._root.rglob("*.log") if path.is_file())
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def read(self, name: str) -> tuple[list[bytes], int]:
        with reporting(self.path, "read"):
            try:
                data = (self._root / name).read_bytes()
            except FileNotFoundError:
                return [], 0
        payloads, good = unframe(data)
        return payloads, len(data) - good

    def appender(self, name: str) -> LocalAppender:
        return LocalAppender(self._root / name, self.path)

    def remove(self, name: str) -> None:
        with reporting(self.path, "written"):
            (self._root / name).unlink(missing_ok=True)


class LocalAppender:
    """See `Appender`."""

    def __init__(self, path: pathlib.Path, folder: str):
        self._folder = folder
        with reporting(folder, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            data = path.read_bytes()
            if not MAGIC.startswith(data[: len(MAGIC)]):
                raise ValueError(f"{path.name} does not begin as a journal does")
            _, good = unframe(data)
            if good < len(data):
                os.ftruncate(self._file, good)
            if good == 0:
                _write(self._file, MAGIC)
        self._not_synced = [path.parent, path.parent.parent]
        self._has_new = True
        self._syncer = _Syncer(self._fsync, _LOCAL_SYNC_SECONDS)
        self._lock = threading.Lock()  # a record is whole before the next one begins

    def append(self, payload: bytes) -> None:
        with self._lock, reporting(self._folder, "written"):
            self._syncer.check()
            try:
                _write(self._file, frame(payload))
                self._has_new = True
            except OSError as error:  # what follows a torn record would not be read: no other may be written
                self._syncer.fail(error)
                raise

    def sync(self, *, wait: bool = False) -> None:
        with reporting(self._folder, "written"):
            self._syncer.sync(wait)

    def close(self) -> None:
        with reporting(self._folder, "written"):
            try:
                self._syncer.close(sync=self._has_new)
            finally:
                os.close(self._file)

    def _fsync(self) -> None:
        self._has_new = False
        os.fsync(self._file)
        while self._not_synced:  # once: a new file's name is durable when its folder is
            _sync_folder(self._not_synced.pop())


def _write(file: int, data: bytes) -> None:
    """All of it, or OSError: a full disk takes a part."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _sync_folder(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class NoFolder:
    """A `Folder` that keeps nothing: for a run without a journal."""

    path = ""

    def names(self) -> list[str]:
        return []

    def read(self, name: str) -> tuple[list[bytes], int]:
        return [], 0

    def appender(self, name: str) -> NoFile:
        return NoFile()

    def remove(self, name: str) -> None:
        pass


class NoFile:
    """See `NoFolder`."""

    def append(self, payload: bytes) -> None:
        pass

    def sync(self, *, wait: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class RemoteFolder:
    """See `Folder`. A file is a series of objects: name.00000, name.00001, ..."""

    def __init__(self, path: str):
        self.path = path
        with reporting(path, "opened"):
            self._files, self._root = fsspec.core.url_to_fs(path)

    def names(self) -> list[str]:
        return sorted(self._parts())

    def read(self, name: str) -> tuple[list[bytes], int]:
        payloads, torn = [], 0
        with reporting(self.path, "read"):
            for part in self._parts().get(name, ()):
                found, good = unframe(data := self._files.cat_file(part))
                payloads += found
                torn += len(data) - good
        return payloads, torn

    def appender(self, name: str) -> RemoteAppender:
        with reporting(self.path, "read"):
            num_parts = len(self._parts().get(name, ()))
        return RemoteAppender(self._files, f"{self._root}/{name}", num_parts, self.path)

    def remove(self, name: str) -> None:
        with reporting(self.path, "written"):
            for part in self._parts().get(name, ()):
                with contextlib.suppress(FileNotFoundError):  # another host was first
                    self._files.rm_file(part)

    def _parts(self) -> dict[str, list[str]]:
        with reporting(self.path, "read"):
            self._files.invalidate_cache()
            try:
                found = sorted(self._files.find(self._root))
            except FileNotFoundError:
                return {}
        parts: dict[str, list[str]] = {}
        for path in found:
            if match := re.fullmatch(r"(.+\.log)\.\d{5}", path[len(self._root) :].lstrip("/")):
                parts.setdefault(match[1], []).append(path)
        return parts


class RemoteAppender:
    """See `Appender`."""

    def __init__(self, files: Any, path: str, num_parts: int, folder: str):
        self._files, self._path, self._num_parts, self._folder = files, path, num_parts, folder
        self._new: list[bytes] = []
        self._lock = threading.Lock()
        self._syncer = _Syncer(self._upload, _REMOTE_SYNC_SECONDS)

    def append(self, payload: bytes) -> None:
        with self._lock, reporting(self._folder, "written"):
            self._syncer.check()
            self._new.append(frame(payload))

    def sync(self, *, wait: bool = False) -> None:
        with reporting(self._folder, "written"):
            self._syncer.sync(wait)

    def close(self) -> None:
        with reporting(self._folder, "written"):
            self._syncer.close(sync=True)

    def _upload(self) -> None:
        with self._lock:
            records, self._new = self._new, []
        if records:
            self._files.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(f"{self._path}.{self._num_parts:05d}", MAGIC + b"".join(records))
            self._num_parts += 1


class _Syncer:
    """Runs `work` in a thread, at most once in `seconds` when nobody waits; tells its failure to the next call."""

    def __init__(self, work: Callable[[], None], seconds: float):
        self._work, self._seconds = work, seconds
        self._changed = threading.Condition()
        self._asked, self._done, self._is_awaited, self._closing = 0, 0, False, False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None  # started by the first sync: many files are short-lived

    def check(self) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error

    def fail(self, error: Exception) -> None:
        """From now on every call raises it."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def sync(self, wait: bool) -> None:
        with self._changed:
            self._asked += 1
            mine = self._asked
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="locojax-journal", daemon=True)
                self._thread.start()
            self._is_awaited |= wait
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._done >= mine or self._error is not None)
        self.check()

    def close(self, *, sync: bool) -> None:
        try:
            if sync:
                self.sync(wait=True)
            self.check()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()

    def _run(self) -> None:
        last = -self._seconds
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._asked > self._done)
                if self._closing:
                    return
                pause = last + self._seconds - time.monotonic()
                self._changed.wait_for(lambda: self._closing or self._is_awaited, max(pause, 0))
                until, self._is_awaited = self._asked, False
            try:
                self._work()
            except Exception as error:  # storage drivers have no common error; the next call raises it
                self.fail(error)
                return
            last = time.monotonic()
            with self._changed:
                self._done = until
                self._changed.notify_all()


@contextlib.contextmanager
def reporting(folder: str, what: str) -> Iterator[None]:
    """Turns a storage failure inside into a CheckpointError that names the journal's folder and a way on."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, ImportError) as error:  # fsspec: an unknown protocol, one whose package is missing
        number = error.errno if isinstance(error, OSError) else None
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        remedy = "Check its permissions, or keep the journal elsewhere with run.journal"
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free some space and continue with --resume; nothing graded so far is lost"
        raise CheckpointError(f"The journal in {folder!r} can't be {what}: {reason}", remedy=remedy) from error
