"""The server's memory on disk: one writer thread, cheap reads, any database that SQLAlchemy speaks to.

Writes are queued and committed in batches by one thread: SQLite then never meets a second writer ("database is
locked"), five hundred futures cost a few commits, and a heartbeat never waits behind a large result because it writes
nothing at once. Reads run on a few threads of their own; under SQLite's write-ahead log they wait for no writer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from locojax.errors import ConfigError
from locojax.server import store_tables as tables

log = logging.getLogger(__name__)

T = TypeVar("T")
Record = TypeVar("Record")
Job = Callable[[sa.Connection], Any]

MAX_BATCH = 512
NUM_READERS = 4


class Store:
    """Opened by the constructor, which makes the tables where there are none; `close` writes what waits.

    Args:
      url: an SQLAlchemy URL, e.g. "sqlite:////srv/locojax/locojax.sqlite" or "postgresql+psycopg://...".

    Raises:
      ConfigError: the database can't be opened, or holds another schema version.
    """

    def __init__(self, url: str):
        self._engine = _engine(url)
        try:
            with self._engine.begin() as connection:
                tables.METADATA.create_all(connection)
                _check_version(connection, url)
        except sa.exc.OperationalError as error:
            raise ConfigError(
                f"The database {_without_password(url)} can't be opened: {error.orig}",
                remedy="Check the folder and its permissions, or that the database server runs",
            ) from error
        self._jobs: queue.SimpleQueue[tuple[Job, concurrent.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._readers = concurrent.futures.ThreadPoolExecutor(NUM_READERS, thread_name_prefix="store-read")
        self._writer = threading.Thread(target=self._write, name="store-write", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Waits until everything queued is committed."""
        self._jobs.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._engine.dispose()

    # Writing.

    def submit(self, job: Job) -> concurrent.futures.Future[Any]:
        """Queues a write; the future holds what `job(connection)` returned once it is committed."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put((job, done))
        return done

    def write(self, job: Job) -> asyncio.Future[Any]:
        """`submit` for coroutines: await it to know that it is committed, or don't: a failure is logged."""
        written = asyncio.wrap_future(self.submit(job))
        written.add_done_callback(_report)
        return written

    def insert(self, *records: Any) -> asyncio.Future[Any]:
        """Adds rows as one write. The rows are taken now: later changes of the records don't matter."""
        rows = [(tables.TABLES[type(record)], row(record)) for record in records]
        return self.write(lambda connection: [connection.execute(sa.insert(table), values) for table, values in rows])

    def update(self, record: Any, *fields: str) -> asyncio.Future[Any]:
        """Writes these fields of a record to its row, as they are now."""
        return self.write(self.updating(record, *fields))

    @staticmethod
    def updating(record: Any, *fields: str) -> Job:
        """The same as a job, to be part of another write."""
        table = tables.TABLES[type(record)]
        values = {name: getattr(record, name) for name in fields}
        statement = sa.update(table).where(_same_row(table, record)).values(values)
        return lambda connection: connection.execute(statement)

    def delete(self, record: Any) -> asyncio.Future[Any]:
        """Removes a record's row."""
        table = tables.TABLES[type(record)]
        statement = sa.delete(table).where(_same_row(table, record))
        return self.write(lambda connection: connection.execute(statement))

    def set_meta(self, key: str, value: str) -> asyncio.Future[Any]:
        """Sets one value of the `meta` table."""
        return self.write(lambda connection: _put_meta(connection, key, value))

    def submit_meta(self, key: str, value: str) -> concurrent.futures.Future[Any]:
        """The same outside an event loop."""
        return self.submit(lambda connection: _put_meta(connection, key, value))

    def change_meta(self, key: str, change: Callable[[str | None], str | None]) -> concurrent.futures.Future[bool]:
        """Sets one value of the `meta` table to what `change` makes of it, unless that is None; the future: whether."""

        def job(connection: sa.Connection) -> bool:
            value = change(_meta(connection, key))
            if value is not None:
                _put_meta(connection, key, value)
            return value is not None

        return self.submit(job)

    # Reading.

    async def read(self, query: Callable[[sa.Connection], T]) -> T:
        """Runs `query(connection)` on a reader thread. What was queued before and isn't committed isn't seen."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read_now, query)

    def read_now(self, query: Callable[[sa.Connection], T]) -> T:
        """The same on this thread: for start-up and tests."""
        with self._engine.connect() as connection:
            return query(connection)

    def load(self, kind: type[Record], *where: Any, order_by: Any = None) -> list[Record]:
        """All records of a kind that meet the conditions, on this thread."""
        return self.read_now(lambda connection: select(connection, kind, *where, order_by=order_by))

    def meta(self, key: str) -> str | None:
        """One value of the `meta` table, on this thread."""
        return self.read_now(lambda connection: _meta(connection, key))

    # The writer thread.

    def _write(self) -> None:
        while (first := self._jobs.get()) is not None:
            batch, ended = [first], False
            while len(batch) < MAX_BATCH and not ended:
                try:
                    following = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    ended = True
                else:
                    batch.append(following)
            self._commit(batch)
            if ended:
                return

    def _commit(self, batch: Sequence[tuple[Job, concurrent.futures.Future[Any]]]) -> None:
        """One transaction for the batch; if it fails, one for each job, so that a bad one fails alone."""
        try:
            with self._engine.begin() as connection:
                results = [job(connection) for job, _ in batch]
        except Exception as error:  # whatever a driver raises belongs to the writes that caused it, not to this thread
            if len(batch) == 1:
                _resolve(batch[0][1], error=error)
                return
            for entry in batch:
                self._commit([entry])
            return
        for (_, done), result in zip(batch, results, strict=True):
            _resolve(done, result=result)


def row(record: Any) -> dict[str, Any]:
    """A record's fields by name; nested values are not copied."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def select(
    connection: sa.Connection, kind: type[Record], *where: Any, order_by: Any = None, limit: int | None = None,
    offset: int = 0,
) -> list[Record]:  # fmt: skip
    """Records of a kind that meet the conditions."""
    statement = sa.select(tables.TABLES[kind]).where(*where).offset(offset)
    if order_by is not None:
        statement = statement.order_by(order_by)
    if limit is not None:
        statement = statement.limit(limit)
    return [kind(**found._mapping) for found in connection.execute(statement)]


def count(connection: sa.Connection, kind: type, *where: Any) -> int:
    """How many records of a kind meet the conditions."""
    return connection.execute(sa.select(sa.func.count()).select_from(tables.TABLES[kind]).where(*where)).scalar_one()


def _same_row(table: sa.Table, record: Any) -> sa.ColumnElement[bool]:
    return sa.and_(*(column == getattr(record, column.name) for column in table.primary_key))


def _resolve(done: concurrent.futures.Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    # False: whoever waited for this write was cancelled, which doesn't undo it.
    if done.set_running_or_notify_cancel():
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)


def _report(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("The database refused a write: %s", error)


def _engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return sa.create_engine(parsed, pool_size=NUM_READERS + 2, pool_pre_ping=True)
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError(
            "The server can't keep its state in memory only",
            got=url,
            expected="a file, e.g. sqlite:////srv/loco.sqlite",
        )
    engine = sa.create_engine(parsed, pool_size=NUM_READERS + 2)

    @sa.event.listens_for(engine, "connect")
    def _tune(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        # A commit is safe when this process dies; only a power cut can lose the last ones, and it can't corrupt.
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA busy_timeout=30000")
        cursor.close()

    return engine


def _check_version(connection: sa.Connection, url: str) -> None:
    """Brings an older schema up to date; ConfigError for one that isn't known."""
    found = _meta(connection, "schema_version")
    if found == "1":  # of before there were owners: what it holds is everybody's
        for table in tables.OWNED:
            kind = table.c.owner.type.compile(connection.dialect)
            connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN owner {kind}"))
        found = None
    if found is None:
        _put_meta(connection, "schema_version", str(tables.SCHEMA_VERSION))
    elif found != str(tables.SCHEMA_VERSION):
        raise ConfigError(
            f"The database {_without_password(url)} was written by another version of LoCoJAX",
            got=f"schema version {found}",
            expected=f"schema version {tables.SCHEMA_VERSION}",
            remedy="Use the version that wrote it, or another --data-dir or --database",
        )


def _meta(connection: sa.Connection, key: str) -> str | None:
    return connection.execute(sa.select(tables.META.c.value).where(tables.META.c.key == key)).scalar_one_or_none()


def _put_meta(connection: sa.Connection, key: str, value: str) -> None:
    changed = connection.execute(sa.update(tables.META).where(tables.META.c.key == key).values(value=value))
    if changed.rowcount == 0:
        connection.execute(sa.insert(tables.META).values(key=key, value=value))


def _without_password(url: str) -> str:
    return sa.make_url(url).render_as_string(hide_password=True)
