"""A database that several servers can reach is written by one of them at a time."""

from __future__ import annotations

import logging
import pathlib
import threading
import time

import pytest

from locojax.errors import ConfigError
from locojax.server import service_tenure
from locojax.server.service import Service, ServiceSettings
from locojax.server.service_tenure import KEY, Tenure
from locojax.server.store import Store


@pytest.fixture
def store(tmp_path):
    made = Store(f"sqlite:///{tmp_path / 'shared.sqlite'}")
    yield made
    made.close()


def tenure(store: Store, folder: str, silent_after: float = 1.5) -> Tenure:
    return Tenure(store, pathlib.Path("/srv") / folder, silent_after=silent_after)


def test_a_new_database_ones_own_and_one_that_was_let_go_of_are_taken_at_once(store, caplog):
    with caplog.at_level(logging.INFO):
        first = tenure(store, "a", 600.0)
        first.take()
        tenure(store, "a", 600.0).take()
        first.release()
        store.submit(lambda _: None).result()
        tenure(store, "b", 600.0).take()
    assert "Waiting" not in caplog.text and ":/srv/b" in store.meta(KEY)


def test_one_that_is_let_go_of_meanwhile_is_taken(store):
    first = tenure(store, "a")
    first.take()
    letting_go = threading.Timer(0.7, first.release)
    letting_go.start()
    tenure(store, "b", 3600.0).take()
    letting_go.join()
    assert ":/srv/b" in store.meta(KEY)


def test_a_server_that_lives_is_not_replaced(store, monkeypatch):
    monkeypatch.setattr(service_tenure, "RENEWED_EVERY", 0.2)
    first, stop = tenure(store, "a"), threading.Event()
    first.take()

    def live() -> None:
        while not stop.wait(0.1):
            first.renew()

    living = threading.Thread(target=live)
    living.start()
    try:
        with pytest.raises(ConfigError, match="Another server uses this database. Got: .*:/srv/a. Expected: one"):
            tenure(store, "b", 60.0).take()
    finally:
        stop.set()
        living.join()
    assert ":/srv/a" in store.meta(KEY)


def test_a_silent_one_is_replaced_and_told_so_when_it_wakes(store, monkeypatch, caplog):
    monkeypatch.setattr(service_tenure, "RENEWED_EVERY", 0.0)
    first = tenure(store, "a")
    first.take()
    with caplog.at_level(logging.INFO):
        started = time.monotonic()
        tenure(store, "b").take()
        assert time.monotonic() - started >= 1.5
        assert "Waiting 1.5 s for a sign of the server that used this database: " in caplog.text
        first.renew()
        first.release()
        store.submit(lambda _: None).result()
    assert "/srv/b, has taken this database over while this one was silent: stop one of them" in caplog.text
    assert ":/srv/b" in store.meta(KEY) and "null" not in store.meta(KEY)


def test_a_service_with_a_database_of_its_own_address_claims_it(tmp_path):
    url = f"sqlite:///{tmp_path / 'shared.sqlite'}"
    Service(ServiceSettings(tmp_path / "a", database=url), str(tmp_path / "socket"), b"key")
    store = Store(url)
    assert f":{tmp_path}/a" in store.meta(KEY)
    store.close()
