"""The API's end of the connection to the engine process.

One thread connects (again and again, with growing pauses), and receives; one sends, so that pickling a large batch
never holds the event loop. All else happens on the event loop: `EngineLink` hands on what arrives to a listener.

Operations that are submitted while there is no engine wait here, in order. When the engine has died and another has
started (a new `incarnation`), nothing that the old one had in hand is known to the new one: the listener is told first,
and decides what to withdraw or to submit again, before anything waiting is sent.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import socket
import threading
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

from locojax.hosts.protocol import (
    Acknowledge,
    Cancel,
    EngineInfo,
    EngineStatus,
    Failed,
    Finished,
    FromEngine,
    Operation,
    Progress,
    Sample,
    Submit,
    Tokens,
)

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
POLL_SECONDS = 0.2

Lost = tuple[str, Operation | None]
"""An operation's id, and what it was; None: it was submitted by an earlier API process."""


class EngineListener(Protocol):
    """Who is told, on the event loop, what comes from the engine."""

    def engine_started(self, info: EngineInfo, lost: list[Lost]) -> None:
        """An engine that we did not know is there; `lost`, in order, was in the hands of its predecessor."""

    def engine_ready(self, info: EngineInfo) -> None:
        """Connected, and what waited has been sent. Also after `engine_started`."""

    def engine_answer(self, answer: Finished | Failed) -> None:
        """An operation's answer, perhaps a second time: acknowledge it once it is stored."""

    def engine_tokens(self, tokens: Tokens) -> None:
        """Tokens of a streamed sample."""

    def engine_gone(self) -> None:
        """The connection broke. Nothing is lost yet."""


class EngineLink:
    """Everything here is called on the event loop that `start` was called on.

    Args:
      address: the path of the engine's `multiprocessing.connection` listener.
      authkey: shared with it.
      listener: see there.
      incarnation: the engine that an earlier API process was last connected to, if that is known.
    """

    def __init__(self, address: str, authkey: bytes, listener: EngineListener, *, incarnation: str | None = None):
        self._address, self._authkey, self._listener = address, authkey, listener
        self.incarnation = incarnation
        self.info: EngineInfo | None = None  # the last that came, also while disconnected
        self.ready = False
        self.doing = "waiting for the engine process"
        self.status: EngineStatus | None = None
        self.num_starts = 0  # of engine processes seen
        self._inflight: dict[str, Operation | None] = {}
        self._waiting: dict[str, Operation] = {}
        self._unconfirmed: set[str] = set()
        self._answered: list[str] = []
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = [
            threading.Thread(target=self._receive, name="engine-receive", daemon=True),
            threading.Thread(target=self._send, name="engine-send", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Closes the connection; the engine goes on, and answers whoever connects next."""
        self._stopping.set()
        self._outbox.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 2.0)

    # What the service asks.

    def expect(self, operation_id: str) -> None:
        """An operation that an earlier API process submitted, whose answer is still to come."""
        self._inflight[operation_id] = None

    def submit(self, operation_id: str, operation: Operation) -> None:
        """Sends an operation, now or when the engine is there."""
        if self.ready:
            self._inflight[operation_id] = operation
            self._outbox.put(Submit(operation_id, operation))
        else:
            self._waiting[operation_id] = operation

    def withdraw(self, operation_id: str) -> bool:
        """Takes back what hasn't been sent. False: it has been, or isn't known."""
        return self._waiting.pop(operation_id, None) is not None

    def cancel(self, operation_id: str) -> None:
        """Asks the engine to end an operation early; it is answered all the same."""
        if self.ready and operation_id in self._inflight:
            self._outbox.put(Cancel(operation_id))

    def acknowledge(self, operation_id: str) -> None:
        """This answer is stored. Sent with others of the same turn of the event loop."""
        if not self._answered and self._loop is not None:
            self._loop.call_soon(self._send_acknowledgements)
        self._answered.append(operation_id)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # On the event loop, from the receiving thread.

    def _received(self, message: FromEngine) -> None:
        if isinstance(message, (Finished, Failed)):
            self._inflight.pop(message.operation_id, None)
            self._listener.engine_answer(message)
        elif isinstance(message, Tokens):
            self._listener.engine_tokens(message)
        elif isinstance(message, EngineStatus):
            self.status = message
            self._settle()
        elif isinstance(message, Progress):
            self.doing = message.doing
        else:
            self._welcome(message)

    def _welcome(self, info: EngineInfo) -> None:
        self.info = info
        if info.incarnation != self.incarnation:
            self.incarnation = info.incarnation
            self.num_starts += 1
            lost, self._inflight = list(self._inflight.items()), {}
            # Samples that wait to be sent count, too: the samplers they name were open in the engine that is gone.
            lost += [(id, operation) for id, operation in self._waiting.items() if isinstance(operation, Sample)]
            self._waiting = {id: one for id, one in self._waiting.items() if not isinstance(one, Sample)}
            self._unconfirmed = set()
            self._listener.engine_started(info, lost)
        else:
            # What the engine neither runs nor answers now was on the broken connection. Answers that it still keeps
            # come before its first status, so that is when we know.
            self._unconfirmed = set(self._inflight).difference(info.running)
        self.ready, self.doing = True, "serving"
        waiting, self._waiting = self._waiting, {}
        for operation_id, operation in waiting.items():
            self.submit(operation_id, operation)
        self._listener.engine_ready(info)

    def _settle(self) -> None:
        for operation_id in self._unconfirmed.intersection(self._inflight):
            del self._inflight[operation_id]
            message = "The connection to the engine broke while this was on its way, and it was not run. Send it again."
            self._listener.engine_answer(Failed(operation_id, "server", message))
        self._unconfirmed = set()

    def _broke(self) -> None:
        if self.ready:
            self.ready, self.doing = False, "waiting for the engine process"
            self._listener.engine_gone()

    def _send_acknowledgements(self) -> None:
        answered, self._answered = self._answered, []
        if self.ready:
            self._outbox.put(Acknowledge(tuple(answered)))

    # The threads.

    def _post(self, callback: Any, *arguments: Any) -> None:
        assert self._loop is not None
        if not self._stopping.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _receive(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            try:
                connection = self._connect()
            except (OSError, EOFError) as error:
                self._post(setattr, self, "doing", f"waiting for the engine process ({error or 'no answer'})")
            except multiprocessing.AuthenticationError:
                self._post(setattr, self, "doing", "refused by the engine process: another connection key")
            else:
                pause = FIRST_PAUSE
                self._outbox.put(connection)
                self._listen(connection)
                connection.close()
                self._post(self._broke)
            self._stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _connect(self) -> Connection:
        """As `multiprocessing.connection.Client`, but the wait for an engine that serves another can be ended."""
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(self._address)
            connection = Connection(plain.detach())
        while not connection.poll(POLL_SECONDS):
            if self._stopping.is_set():
                raise EOFError("stopping")
        answer_challenge(connection, self._authkey)
        deliver_challenge(connection, self._authkey)
        return connection

    def _listen(self, connection: Any) -> None:
        try:
            while not self._stopping.is_set():
                if connection.poll(POLL_SECONDS):
                    self._post(self._received, connection.recv())
        except (EOFError, OSError):
            return

    def _send(self) -> None:
        """Sends to the newest connection. What fails to be sent is found missing when the engine is met again."""
        connection = None
        while (item := self._outbox.get()) is not None:
            if isinstance(item, Connection):
                connection = item
            elif connection is not None:
                try:
                    connection.send(item)
                except (OSError, ValueError):
                    connection = None
