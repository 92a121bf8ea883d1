"""Between the desks and the engine: who asked for which operation, and what becomes of its answer.

A request's operation ends in its future, by way of the handler that its desk registered for its kind; that works from
what the future's record remembers, so an answer also finds its way when the API process was restarted meanwhile.
What the server asks on its own account (freeing a model, opening a sampler) is a call, awaited in memory.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from locojax.errors import LocoError
from locojax.hosts.protocol import EngineInfo, Failed, Finished, Operation, Sample, Tokens
from locojax.server.connection import EngineLink, Lost
from locojax.server.futures import Futures
from locojax.server.service_errors import ServiceError
from locojax.server.store_tables import FutureRecord

log = logging.getLogger(__name__)

Done = Callable[[FutureRecord, Any], Any]
"""(record, the engine's result) -> the future's result, or a coroutine of it."""

NotDone = Callable[[FutureRecord, str, str], tuple[str, str]]
"""(record, category, message) -> the category and message to tell."""

RESTARTED = "The engine process was restarted while this was in its hands, and what it held in memory is gone."


class EngineFailed(LocoError):
    """A call was answered by `Failed`."""

    def __init__(self, category: str, message: str):
        super().__init__(message)
        self.category, self.message = category, message


class EngineDesk:
    """Listens to the engine link. The desks register their handlers before anything is submitted.

    Attributes:
      started: called with the info of an engine that is new to us, before anything is sent to it; what its predecessor
        held is gone.
      ready: called whenever operations can be sent again.
      rerun: takes a sample that the last engine had in hand; True: it has seen to it, False: it can't be run again.
    """

    def __init__(self, futures: Futures):
        self._futures = futures
        self.link: EngineLink  # set by the service, which makes both
        self.started: list[Callable[[EngineInfo], None]] = []
        self.ready: list[Callable[[EngineInfo], None]] = []
        self.rerun: Callable[[FutureRecord, Sample], bool]
        self._done: dict[str, Done] = {}
        self._not_done: dict[str, NotDone] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._streams: dict[str, asyncio.Queue[Tokens | Finished | Failed]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def handle(self, kind: str, done: Done, not_done: NotDone | None = None) -> None:
        """How futures of this kind end."""
        self._done[kind] = done
        if not_done is not None:
            self._not_done[kind] = not_done

    @property
    def info(self) -> EngineInfo | None:
        """What the engine is; None before the first has answered."""
        return self.link.info

    # Asking.

    def run(self, record: FutureRecord, operation: Operation) -> None:
        """Hands over the operation of a request."""
        operation_id = f"{record.request_id}#{uuid.uuid4().hex[:12]}"
        self._futures.submitted(record, operation_id)
        self.link.submit(operation_id, operation)

    def call(self, operation: Operation) -> asyncio.Future[Any]:
        """Hands over an operation of the server's own. The future raises EngineFailed."""
        operation_id = f"#{uuid.uuid4().hex}"
        answer = self._calls[operation_id] = asyncio.get_running_loop().create_future()
        # Whoever doesn't wait for it may ignore that it failed.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.link.submit(operation_id, operation)
        return answer

    def open_stream(self, sample: Sample) -> tuple[str, asyncio.Queue[Tokens | Finished | Failed]]:
        """Hands over a sample whose tokens are wanted as they come; `close_stream` it."""
        operation_id = f"#stream-{uuid.uuid4().hex}"
        queue: asyncio.Queue[Tokens | Finished | Failed] = asyncio.Queue()
        self._streams[operation_id] = queue
        self.link.submit(operation_id, sample)
        return operation_id, queue

    def close_stream(self, operation_id: str) -> None:
        """No more of it is wanted."""
        if self._streams.pop(operation_id, None) is not None and not self.link.withdraw(operation_id):
            self.link.cancel(operation_id)

    def stop(self, record: FutureRecord) -> bool:
        """Ends an operation early. False: the engine has it, and will say how it ended."""
        if record.operation_id is None:
            return True
        if self.link.withdraw(record.operation_id):
            return True
        self.link.cancel(record.operation_id)
        return False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # Being answered: the EngineListener.

    def engine_answer(self, answer: Finished | Failed) -> None:
        operation_id = answer.operation_id
        if (record := self._futures.by_operation(operation_id)) is not None:
            self._end(record, answer)
            return
        if (call := self._calls.pop(operation_id, None)) is not None and not call.done():
            if isinstance(answer, Finished):
                call.set_result(answer.result)
            else:
                call.set_exception(EngineFailed(answer.category, answer.message))
        elif (queue := self._streams.get(operation_id)) is not None:
            queue.put_nowait(answer)
        # Also what nobody waits for any more: an answer to an earlier process's call, or one that came twice.
        self.link.acknowledge(operation_id)

    def engine_tokens(self, tokens: Tokens) -> None:
        if (queue := self._streams.get(tokens.operation_id)) is not None:
            queue.put_nowait(tokens)

    def engine_started(self, info: EngineInfo, lost: list[Lost]) -> None:
        for told in self.started:
            told(info)
        for operation_id, operation in lost:
            record = self._futures.by_operation(operation_id)
            if record is None:
                self.engine_answer(Failed(operation_id, "server", RESTARTED))
            elif not (isinstance(operation, Sample) and self.rerun(record, operation)):
                self._end(record, Failed(operation_id, "server", RESTARTED))

    def engine_ready(self, info: EngineInfo) -> None:
        for told in self.ready:
            told(info)

    def engine_gone(self) -> None:
        log.warning("The connection to the engine process broke; what is submitted now waits for it to come back.")

    def _end(self, record: FutureRecord, answer: Finished | Failed) -> None:
        if isinstance(answer, Failed):
            category, message = answer.category, answer.message
            if (not_done := self._not_done.get(record.kind)) is not None:
                category, message = not_done(record, category, message)  # type: ignore[assignment]
            self._futures.fail(record, message, category)
            return
        try:
            result = self._done[record.kind](record, answer.result)
        except Exception as error:  # an answer that isn't what was asked for must end its request all the same
            log.exception("The answer to %s could not be used", record.request_id)
            self._futures.fail(record, f"The server could not use the engine's answer: {error}", "server")
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._end_later(record, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._futures.finish(record, result)

    async def _end_later(self, record: FutureRecord, result: Awaitable[Any]) -> None:
        try:
            self._futures.finish(record, await result)
        except ServiceError as error:
            self._futures.fail(record, str(error), "user")
        except OSError as error:
            self._futures.fail(record, f"The server could not keep the result of {record.kind}: {error}", "server")

    async def settle(self) -> None:
        """Waits for ends that take their time, so that a stopping process leaves none half done."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
