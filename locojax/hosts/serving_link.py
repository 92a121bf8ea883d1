"""The engine process's end of the connection to its front end. No jax.

Two threads a connection: one reads messages into `inbox`, one sends. The device loop takes from the inbox and hands
over answers; it never touches the socket, so neither a slow front end nor a large message holds up a program.

One front end is served at a time; another one's connection waits until the first hangs up or dies. Answers are kept
until they are acknowledged: a front end that connects is sent `EngineInfo`, then every answer that is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import stat
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, TypeAlias

from locojax.errors import ConfigError
from locojax.hosts.protocol import (
    Acknowledge,
    Cancel,
    EngineInfo,
    EngineStatus,
    Failed,
    Finished,
    FromEngine,
    Progress,
    Shutdown,
    Submit,
    ToEngine,
    Tokens,
)

log = logging.getLogger(__name__)

Outbox: TypeAlias = "queue.SimpleQueue[FromEngine | None]"
MAX_UNSENT = 10_000
FLUSH_SECONDS = 5.0  # how long `close` waits for what is still to be sent


@dataclasses.dataclass(frozen=True)
class DiskDone:
    """How a job of `serving_disk.Disk` ended. `error` None: `value` is what it returned."""

    operation_id: str
    value: Any = None
    error: Exception | None = None


class Link:
    """Listens at `address`, a path for a Unix socket, from the moment it is made.

    Args:
      authkey: what a front end must know.

    Attributes:
      inbox: what the front ends ask for, in order: Submit (each operation once), Cancel and Shutdown. The device loop
        has what its disk thread did put in there too, so that it waits in one place.

    Raises:
      ConfigError: the address can't be listened at, or another engine does already.
    """

    def __init__(self, address: str, authkey: bytes):
        self.inbox: queue.SimpleQueue[Submit | Cancel | Shutdown | DiskDone] = queue.SimpleQueue()
        self._address = address
        self._lock = threading.Lock()
        self._outbox: Outbox | None = None  # the present connection's
        self._info: EngineInfo | None = None  # None: still starting
        self._progress: Progress | None = None
        self._running: dict[str, None] = {}  # submitted and not answered, in order
        self._answers: dict[str, Finished | Failed] = {}  # not acknowledged, in order
        self._closing = False
        self._writer: threading.Thread | None = None
        self._connection: Connection | None = None
        self._listener = _listen(address, authkey)
        self._server = threading.Thread(target=self._serve, name="front end: accept and read", daemon=True)
        self._server.start()

    def publish(self, info: EngineInfo) -> None:
        """What a front end is told when it connects. The first time, the one that waits is told at once."""
        with self._lock:
            first, self._info = self._info is None, info
            if first:
                self._send(self._current_info())

    @property
    def is_ready(self) -> bool:
        """Whether `publish` has been called: there is someone to take from the inbox."""
        return self._info is not None

    def tell(self, message: Tokens | EngineStatus | Progress) -> None:
        """Sends news, which nobody misses when there is no front end."""
        with self._lock:
            if isinstance(message, Progress):
                self._progress = message
            if isinstance(message, EngineStatus) and self._outbox and self._outbox.qsize() > MAX_UNSENT:
                return  # a front end that has stopped reading must not cost ever more memory
            self._send(message)

    def answer(self, message: Finished | Failed) -> None:
        """Sends an operation's one answer, now or whenever there is a front end to acknowledge it."""
        with self._lock:
            self._running.pop(message.operation_id, None)
            self._answers[message.operation_id] = message
            self._send(message)

    @property
    def num_unacknowledged(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        """Sends what is still to be sent, hangs up, and stops listening."""
        with self._lock:
            self._closing = True
            writer, outbox = self._writer, self._outbox
            self._outbox = None
            if outbox is not None:
                outbox.put(None)
        if writer is not None:
            writer.join(FLUSH_SECONDS)
        if self._connection is not None:
            _hang_up(self._connection)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as waking:  # the thread that accepts
            waking.connect(self._address)
        self._server.join(FLUSH_SECONDS)
        self._listener.close()

    def _send(self, message: FromEngine | None) -> None:
        """Called with the lock held, so that what is sent keeps its order."""
        if self._outbox is not None and message is not None:
            self._outbox.put(message)

    def _current_info(self) -> EngineInfo | None:
        return self._info and dataclasses.replace(self._info, running=tuple(self._running))

    def _serve(self) -> None:
        """One front end after another."""
        while not self._closing:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError) as error:
                if not self._closing:
                    log.warning("A connection to the engine was refused: %r", error)
                continue
            with connection:
                self._connection = connection
                self._talk(connection)
                self._connection = None

    def _talk(self, connection: Connection) -> None:
        """Serves one front end until it is gone."""
        outbox: Outbox = queue.SimpleQueue()
        writer = threading.Thread(target=_write, args=(connection, outbox), name="front end: write", daemon=True)
        with self._lock:
            if self._closing:
                return
            self._writer, self._outbox = writer, outbox
            self._send(self._current_info() if self._info else self._progress)
            for answer in self._answers.values():
                self._send(answer)
        writer.start()
        try:
            while True:
                self._take(connection.recv())
        except (EOFError, OSError):
            pass  # it hung up, or died
        except Exception:  # unpickling runs the message's own classes, and one of another version may raise anything:
            # that costs the front end its connection, not the engine its work.
            log.exception("The front end sent what can't be read; hanging up")
        with self._lock:
            if self._outbox is outbox:
                self._outbox = None
        outbox.put(None)
        writer.join(FLUSH_SECONDS)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Acknowledge):
            with self._lock:
                for operation_id in message.operation_ids:
                    self._answers.pop(operation_id, None)
            return
        if isinstance(message, Submit):
            with self._lock:
                if message.operation_id in self._running:
                    return  # sent again by a front end that did not know: it is answered once
                if message.operation_id in self._answers:
                    self._send(self._answers[message.operation_id])
                    return
                self._running[message.operation_id] = None
        self.inbox.put(message)


def _listen(address: str, authkey: bytes) -> Listener:
    """A listener at a path that only this user may open; one left by a dead engine is replaced."""
    try:
        if stat.S_ISSOCK(os.stat(address).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(address)
            raise ConfigError(f"Another engine listens at {address}", remedy="Stop it, or choose another data folder")
    except FileNotFoundError:
        pass
    except OSError:  # nobody answers: what is left of one that was killed
        os.unlink(address)
    try:
        # The backlog: front ends that wait while one is served.
        listener = Listener(address, family="AF_UNIX", backlog=8, authkey=authkey)
        os.chmod(address, 0o600)
    except OSError as error:
        raise ConfigError(
            f"The engine can't listen at {address} ({error})", remedy="Choose a shorter or writable path"
        ) from error
    return listener


def _hang_up(connection: Connection) -> None:
    """Ends a connection that another thread reads from: closing it would not wake that thread."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def _write(connection: Connection, outbox: Outbox) -> None:
    """Sends until told None or the front end is gone."""
    try:
        while (message := outbox.get()) is not None:
            connection.send(message)
    except OSError:
        pass  # the reader sees the same end, and answers are kept
