"""The store: one writer, batches, readers that wait for nobody, versions."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time

import pytest
import sqlalchemy as sa
from server_under_test import run

from locojax.errors import ConfigError
from locojax.server.store import Store, count
from locojax.server.store_tables import MODELS, SESSIONS, TABLES, FutureRecord, Session


def _url(folder) -> str:
    return f"sqlite:///{folder}/s.sqlite"


def _session(number: int) -> Session:
    return Session(f"s{number}", float(number), float(number), user_metadata={"n": number}, tags=["a", "b"])


def test_records_come_back_as_they_were(tmp_path):
    async def test():
        store = Store(_url(tmp_path))
        session = _session(1)
        await store.insert(session, _session(2))
        session.state, session.display_name = "finished", "é"
        await store.update(session, "state")
        store.close()
        store = Store(_url(tmp_path))
        found = store.load(Session, SESSIONS.c.session_id == "s1")
        assert found == [Session("s1", 1.0, 1.0, "finished", user_metadata={"n": 1}, tags=["a", "b"])]
        assert len(store.load(Session)) == 2 and store.read_now(lambda connection: count(connection, Session)) == 2
        await store.delete(session)
        assert [one.session_id for one in store.load(Session)] == ["s2"]
        store.close()

    run(test())


def test_each_field_is_a_column_and_each_column_a_field():
    for kind, table in TABLES.items():
        assert set(kind.__dataclass_fields__) == set(table.columns.keys()), kind


def test_writes_of_many_are_few_commits_and_never_locked(tmp_path):
    async def test():
        store = Store(_url(tmp_path))
        commits = []
        sa.event.listen(store._engine, "commit", commits.append)
        records = [FutureRecord(f"r{i}", "sample", "s", "o", i, "d", 0.0) for i in range(2000)]
        await asyncio.gather(*[store.insert(record) for record in records])
        assert len(store.load(FutureRecord)) == 2000 and len(commits) < 200
        store.close()

    run(test())


def test_reads_do_not_wait_for_a_write(tmp_path):
    async def test():
        store = Store(_url(tmp_path))
        await store.insert(_session(1))
        began, release = threading.Event(), threading.Event()

        def slow(connection):
            connection.execute(
                sa.insert(SESSIONS).values(session_id="slow", created_at=0.0, last_seen=0.0, state="active")
            )
            began.set()
            release.wait(10)

        writing = store.write(slow)
        await asyncio.to_thread(began.wait, 10)
        start = time.perf_counter()
        found = await store.read(
            lambda connection: connection.execute(sa.select(SESSIONS.c.session_id)).scalars().all()
        )
        assert found == ["s1"] and time.perf_counter() - start < 1
        release.set()
        await writing
        assert len(store.load(Session)) == 2
        store.close()

    run(test())


def test_a_write_that_fails_fails_alone(tmp_path):
    async def test():
        store = Store(_url(tmp_path))
        gate = threading.Event()
        first = store.write(lambda connection: gate.wait(10))
        writes = [store.insert(_session(1)), store.insert(_session(1)), store.insert(_session(2))]
        gate.set()
        await first
        found = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(one, Exception) for one in found] == [False, True, False]
        assert [one.session_id for one in store.load(Session)] == ["s1", "s2"]
        store.close()

    run(test())


def test_closing_writes_what_waits(tmp_path):
    async def test():
        store = Store(_url(tmp_path))
        for number in range(50):
            store.insert(_session(number))
        store.close()
        assert len(Store(_url(tmp_path)).load(Session)) == 50

    run(test())


def test_a_database_of_another_version_is_refused(tmp_path):
    Store(_url(tmp_path)).close()
    with sqlite3.connect(tmp_path / "s.sqlite") as connection:
        connection.execute("update meta set value = '99' where key = 'schema_version'")
    connection.close()
    with pytest.raises(ConfigError) as refused:
        Store(_url(tmp_path))
    text = str(refused.value)
    assert "Got: schema version 99. Expected: schema version 2." in text and "--data-dir" in text


def test_databases_that_cannot_be_used_are_told(tmp_path):
    with pytest.raises(ConfigError, match="can't be opened"):
        Store(f"sqlite:///{tmp_path}/no/such/folder/s.sqlite")
    with pytest.raises(ConfigError, match="in memory only"):
        Store("sqlite://")


def test_meta_values(tmp_path):
    async def test():
        store = Store(_url(tmp_path))
        assert store.meta("incarnation") is None
        await store.set_meta("incarnation", "a")
        await store.set_meta("incarnation", "b")
        assert store.meta("incarnation") == "b"
        assert MODELS.c.model_id.primary_key
        store.close()

    run(test())


def test_a_database_without_owners_is_brought_up_to_date(tmp_path):
    Store(_url(tmp_path)).close()
    with sqlite3.connect(tmp_path / "s.sqlite") as connection:
        for table in ("sessions", "models", "checkpoints"):
            connection.execute(f"alter table {table} drop column owner")
        connection.execute("insert into sessions (session_id, created_at, state) values ('s', 1, 'active')")
        connection.execute("update meta set value = '1' where key = 'schema_version'")
    connection.close()
    for _ in range(2):
        store = Store(_url(tmp_path))
        assert store.meta("schema_version") == "2"
        (session,) = store.load(Session)
        assert session.session_id == "s" and session.owner is None
        store.close()
