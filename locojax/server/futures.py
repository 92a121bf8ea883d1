"""Futures: a request that was accepted, and later its answer. Thousands may be polled at once; a poll is one task.

What futures there are is known in memory, so that a poll that waits costs neither a query nor a thread; what they
resulted in is written to the store, and is read from there once it is too old for memory.

A sampling session's finished requests are also events in its log, in the order in which they finished, so that one poll
can wait for all of them (`retrieve_many`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import sqlalchemy as sa

from locojax.server import store_results
from locojax.server.service_errors import ServiceError
from locojax.server.service_settings import ServiceSettings
from locojax.server.store import Job, Store, row
from locojax.server.store_tables import FUTURES, RESULTS, FutureRecord

log = logging.getLogger(__name__)

FutureState = Literal["pending", "done", "failed"]
Category = Literal["user", "server", "unknown"]

MAX_RESULTS_IN_MEMORY = 2048
CLONE = 1_000_000_000
"""Clones of a sampling client number their requests from a multiple of this."""

DELETED_AT_ONCE = 500  # rows of one statement: databases limit the number of its parameters


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a POST that starts an operation returns."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """The UntypedAPIFuture of the contract, without what is None."""
        body: dict[str, Any] = {"request_id": self.request_id}
        if self.model_id is not None:
            body["model_id"] = self.model_id
        if self.sample_sequence_ids is not None:
            body["sample_sequence_ids"] = list(self.sample_sequence_ids)
        return body


@dataclasses.dataclass(frozen=True)
class FutureAnswer:
    """What a poll found.

    Attributes:
      state: `pending`: answer 408 with `try_again()`. `failed`: answer 200 with `error_body()`. `done`: `result`.
      kind: the operation: create_model, forward_backward, forward, optim_step, save_weights, load_weights,
        save_weights_for_sampler, save_weights_external, unload_model, sample.
      result: for `forward_backward` and `forward` a `types.ForwardBackwardResult`, for `sample` a `protocol.Sampled`
        (encode either by Accept); for all others the JSON body as a dict.
      detail: what was remembered of the request, e.g. a sample's `target_layout`.
    """

    request_id: str
    state: FutureState
    kind: str
    result: Any = None
    error: str | None = None
    category: Category | None = None
    queue_state: str = "active"
    queue_state_reason: str | None = None
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)

    def try_again(self) -> dict[str, Any]:
        """The 408 body of a future that isn't done."""
        body = {"type": "try_again", "request_id": self.request_id, "queue_state": self.queue_state}
        if self.queue_state_reason is not None:
            body["queue_state_reason"] = self.queue_state_reason
        return body

    def error_body(self) -> dict[str, Any]:
        """The 200 body of a future that failed."""
        return {"error": self.error, "category": self.category}


class _EventLog:
    """What finished in one sampling session (of one clone of its client), and who waits for more."""

    def __init__(self) -> None:
        self.events: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        self.more = asyncio.Event()
        self.cursor = 0

    def add(self, event: dict[str, Any]) -> None:
        # Microseconds since 1970, so that cursors also grow from one API process to the next.
        self.cursor = max(self.cursor + 1, int(time.time() * 1e6))
        self.events.append((self.cursor, event))
        self.more.set()


class Futures:
    """The future endpoints, and the book in which the desks enter requests and their ends.

    Args:
      store, settings: see there.
      explain: why a request isn't done: its queue state and a sentence, for the 408 body.
      missing: the error for a request id that isn't in the book: 404 (never was) or 410 (is no longer kept).
      may_see: whether the caller may know of what belongs to a session.
      stop: ends a pending request early, if that can be.
      find_sampler: raises ServiceError for a sampling session that never was.
      stored: told an operation's id once its answer is on disk.
    """

    def __init__(self, store: Store, settings: ServiceSettings):
        self._store, self._settings = store, settings
        self.explain: Callable[[FutureRecord], tuple[str, str | None]]
        self.missing: Callable[[str], ServiceError]
        self.may_see: Callable[[str], bool]
        self.stop: Callable[[FutureRecord], None]
        self.find_sampler: Callable[[str], None]
        self.stored: Callable[[str], None]
        self._records: dict[str, FutureRecord] = {}
        self._by_operation: dict[str, FutureRecord] = {}
        self._waiters: dict[str, asyncio.Event] = {}
        self._results: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._unstored: set[str] = set()
        self._unsaved: set[str] = set()  # entered, and `save` is still to come
        self._delivered: list[dict[str, Any]] = []  # rows to be written at the next trim: it only matters by then
        self._logs: dict[tuple[str, int], _EventLog] = {}
        self.last_errors: collections.deque[dict[str, Any]] = collections.deque(maxlen=50)

    # The endpoints.

    async def retrieve(self, request_id: str, *, timeout: float | None = None) -> FutureAnswer:
        """POST /retrieve_future: waits until done, at most `timeout` (None: the setting). 404: unknown. 410: expired.

        Call `delivered` once the answer has been written out.
        """
        record = self._seen(request_id)
        if record.state == "pending":
            event = self._waiters.setdefault(request_id, asyncio.Event())
            try:
                async with asyncio.timeout(self._settings.long_poll if timeout is None else timeout):
                    await event.wait()
            except TimeoutError:
                state, reason = self.explain(record)
                return FutureAnswer(request_id, "pending", record.kind, queue_state=state, queue_state_reason=reason)
            # A request that was asked for again meanwhile is another record under the same id.
            record = self._records.get(request_id, record)
        return await self._answer(record)

    async def _answer(self, record: FutureRecord) -> FutureAnswer:
        if record.state == "failed":
            category: Any = record.category or "unknown"
            return FutureAnswer(record.request_id, "failed", record.kind, error=record.error, category=category)
        if record.state == "pending":
            state, reason = self.explain(record)
            return FutureAnswer(record.request_id, "pending", record.kind, queue_state=state, queue_state_reason=reason)
        result = self._results.get(record.request_id)
        if result is None:
            result = await self._store.read(lambda connection: _read_result(connection, record.request_id))
            if result is None:
                raise self.missing(record.request_id)
        return FutureAnswer(record.request_id, "done", record.kind, result=result, detail=record.detail)

    def delivered(self, request_id: str) -> None:
        """The client has the answer: from now on the short retention counts."""
        record = self._records.get(request_id)
        if record is None or record.state == "pending" or record.delivered_at is not None:
            return
        if not self.may_see(record.session_id):
            return
        record.delivered_at = time.time()
        self._delivered.append({"id": request_id, "at": record.delivered_at})
        if request_id not in self._unstored:
            self._results.pop(request_id, None)

    async def retrieve_many(
        self,
        sampling_session_id: str,
        *,
        cloned_sampler_id: int = 0,
        prev_cursor: int = 0,
        timeout: float | None = None,
        retrieved_request_ids: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """POST /retrieve_futures -> {"completions": [{"state", "request_id", ...}], "cursor"}; long-polls."""
        self.find_sampler(sampling_session_id)
        for request_id in retrieved_request_ids:
            self.delivered(request_id)
        events = self._logs.setdefault((sampling_session_id, cloned_sampler_id), _EventLog())
        while events.events and events.events[0][0] <= prev_cursor:
            events.events.popleft()
        longest = self._settings.long_poll if timeout is None else min(timeout, self._settings.long_poll)
        if not events.events and longest > 0:
            events.more.clear()
            try:
                async with asyncio.timeout(longest):
                    await events.more.wait()
            except TimeoutError:
                pass
        found = [(cursor, event) for cursor, event in events.events if cursor > prev_cursor]
        return {
            "completions": [event for _, event in found],
            "cursor": found[-1][0] if found else prev_cursor,
        }

    async def cancel(self, request_id: str) -> dict[str, Any]:
        """POST /cancel_future: a sample ends with what it has; what waits fails; what is done stays. 404: unknown."""
        record = self._seen(request_id)
        if record.state == "pending":
            self.stop(record)
        return {}

    def _seen(self, request_id: str) -> FutureRecord:
        record = self._records.get(request_id)
        if record is None or not self.may_see(record.session_id):
            raise self.missing(request_id)
        return record

    # The book.

    def known(self, request_id: str, digest: str) -> FutureRecord | None:
        """The same request as it came first, if it did. ServiceError 400: it came with another payload."""
        record = self._records.get(request_id)
        if record is not None and record.digest != digest:
            raise ServiceError(
                400,
                f"The request {request_id} was sent before, with another payload",
                expected=f"the same payload for a repeated seq_id {record.seq}, or a new seq_id",
                remedy="Two clients may be using one model or sampling session: give each its own",
            )
        return record

    def get(self, request_id: str) -> FutureRecord | None:
        return self._records.get(request_id)

    def pending(self) -> Iterable[FutureRecord]:
        """Those that aren't done, in the order of their acceptance."""
        return [record for record in self._records.values() if record.state == "pending"]

    def by_operation(self, operation_id: str) -> FutureRecord | None:
        """The pending request that an engine operation was started for."""
        return self._by_operation.get(operation_id)

    def add(self, record: FutureRecord) -> None:
        """Enters a request. `save` it when what there is to know of it at once is in it."""
        if record.request_id in self._records:
            self._drop([record.request_id])  # a sample that failed is tried again, in its own place
        self._records[record.request_id] = record
        self._unsaved.add(record.request_id)
        if record.operation_id is not None and record.state == "pending":
            self._by_operation[record.operation_id] = record

    async def save(self, record: FutureRecord, together: Job | None = None) -> None:
        """Returns when the request is on disk: it is then safe to promise an answer.

        `together`: what must be written with it, or not at all.
        """
        values = row(record)
        self._unsaved.discard(record.request_id)

        def job(connection: sa.Connection) -> None:
            connection.execute(sa.insert(FUTURES), values)
            if together is not None:
                together(connection)

        await self._store.write(job)

    def submitted(self, record: FutureRecord, operation_id: str) -> None:
        """The request has been handed to the engine under this id."""
        if record.operation_id is not None:
            self._by_operation.pop(record.operation_id, None)
        record.operation_id = operation_id
        self._by_operation[operation_id] = record
        if record.request_id not in self._unsaved:
            self._store.update(record, "operation_id")

    def finish(self, record: FutureRecord, result: Any) -> None:
        """The request's result: JSON as a dict, or one of the two large results."""
        if record.state == "pending":
            self._end(record, "done", result)

    def fail(self, record: FutureRecord, message: str, category: str) -> None:
        """The request has failed: for its own fault (`user`) or the server's."""
        if record.state == "pending":
            record.error, record.category = message, category
            self.last_errors.append(
                {"time": time.time(), "request_id": record.request_id, "kind": record.kind, "error": message,
                 "category": category}
            )  # fmt: skip
            self._end(record, "failed", None)

    def _end(self, record: FutureRecord, state: str, result: Any) -> None:
        record.state, record.finished_at = state, time.time()
        request_id, operation_id = record.request_id, record.operation_id
        if result is not None:
            self._results[request_id] = result
            self._unstored.add(request_id)
        if operation_id is not None:
            self._by_operation.pop(operation_id, None)
        if (event := self._waiters.pop(request_id, None)) is not None:
            event.set()
        if record.kind == "sample":
            self._log(record)
        written = self._store.write(_end_job(record, result))
        written.add_done_callback(lambda done: self._on_disk(done, record, operation_id))

    def _on_disk(self, done: asyncio.Future[Any], record: FutureRecord, operation_id: str | None) -> None:
        if done.cancelled() or (error := done.exception()) is not None:
            # Kept in memory, and not acknowledged: a restarted API process gets it from the engine once more.
            log.error("The result of %s could not be stored: %s", record.request_id, error)
            return
        self._unstored.discard(record.request_id)
        if operation_id is not None:
            self.stored(operation_id)
        if record.delivered_at is not None:
            self._results.pop(record.request_id, None)
        for request_id in list(self._results)[: max(len(self._results) - MAX_RESULTS_IN_MEMORY, 0)]:
            if request_id not in self._unstored:
                del self._results[request_id]

    def _log(self, record: FutureRecord) -> None:
        key = (record.owner, record.seq // CLONE)
        event = {"state": "failed" if record.state == "failed" else "finished", "request_id": record.request_id}
        self._logs.setdefault(key, _EventLog()).add(event)

    def forget_logs(self, sampling_session_id: str) -> None:
        """A sampling session has ended: nobody polls its log any more, but for who does now."""
        for key in [key for key in self._logs if key[0] == sampling_session_id]:
            self._logs.pop(key).more.set()

    # Start-up and upkeep.

    def load(self) -> None:
        """Reads the book that an earlier process left."""
        for record in self._store.load(FutureRecord, order_by=FUTURES.c.created_at):
            record.detail = record.detail or {}
            self.add(record)
            self._unsaved.discard(record.request_id)
            if record.state != "pending" and record.kind == "sample" and record.delivered_at is None:
                self._log(record)

    async def trim(self, now: float) -> int:
        """Forgets results past their retention; returns how many."""
        settings = self._settings
        old = []
        for record in self._records.values():
            if record.state == "pending" or record.finished_at is None:
                continue
            if record.delivered_at is not None:
                is_old = record.delivered_at + settings.delivered_retention < now
            else:
                is_old = record.finished_at + settings.undelivered_retention < now
            if is_old:
                old.append(record.request_id)
        self.write_deliveries()
        if old:
            await asyncio.wrap_future(self._drop(old))
        return len(old)

    def write_deliveries(self) -> None:
        """Writes which results were fetched, all at once; `trim` does, and so should who ends."""
        delivered, self._delivered = self._delivered, []
        if delivered:
            self._store.submit(lambda connection: connection.execute(_MARK_DELIVERED, delivered))

    def counts(self) -> dict[str, int]:
        """How many futures there are in each state."""
        counter = collections.Counter(record.state for record in self._records.values())
        return {state: counter[state] for state in ("pending", "done", "failed")}

    def _drop(self, request_ids: list[str]) -> Any:
        logs = set()
        for request_id in request_ids:
            record = self._records.pop(request_id, None)
            self._results.pop(request_id, None)
            self._unstored.discard(request_id)
            if record is not None and record.kind == "sample":
                logs.add((record.owner, record.seq // CLONE))
        for events in [self._logs[key].events for key in logs if key in self._logs]:
            # A client that polls each request by itself never reads its log.
            while events and events[0][1]["request_id"] not in self._records:
                events.popleft()
        return self._store.submit(lambda connection: _delete(connection, request_ids))


_MARK_DELIVERED = (
    sa.update(FUTURES).where(FUTURES.c.request_id == sa.bindparam("id")).values(delivered_at=sa.bindparam("at"))
)


def _end_job(record: FutureRecord, result: Any) -> Callable[[sa.Connection], None]:
    values = {name: getattr(record, name) for name in ("state", "finished_at", "error", "category")}
    request_id = record.request_id

    def job(connection: sa.Connection) -> None:
        connection.execute(sa.update(FUTURES).where(FUTURES.c.request_id == request_id).values(values))
        if result is not None:
            content = store_results.encode(result)
            connection.execute(sa.insert(RESULTS), {"request_id": request_id, "content": content})

    return job


def _read_result(connection: sa.Connection, request_id: str) -> Any:
    content = connection.execute(
        sa.select(RESULTS.c.content).where(RESULTS.c.request_id == request_id)
    ).scalar_one_or_none()
    return None if content is None else store_results.decode(content)


def _delete(connection: sa.Connection, request_ids: list[str]) -> None:
    for first in range(0, len(request_ids), DELETED_AT_ONCE):
        some = request_ids[first : first + DELETED_AT_ONCE]
        for table in (FUTURES, RESULTS):
            connection.execute(sa.delete(table).where(table.c.request_id.in_(some)))
