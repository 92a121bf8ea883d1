"""The engine's end of the connection: what a front end that comes, dies and comes back is told."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest
from serving_fakes import INFO

from locojax.errors import ConfigError
from locojax.hosts.protocol import (
    Acknowledge,
    Cancel,
    EngineInfo,
    Failed,
    Finished,
    OpenSampler,
    Progress,
    Submit,
)
from locojax.hosts.serving_link import Link

KEY = b"key"
SECONDS = 10


@pytest.fixture
def link(tmp_path):
    link = Link(str(tmp_path / "engine.sock"), KEY)
    link.path = str(tmp_path / "engine.sock")
    yield link
    link.close()


@contextlib.contextmanager
def front_end(link):
    with Client(link.path, family="AF_UNIX", authkey=KEY) as client:
        yield client


def receive(client):
    assert client.poll(SECONDS), "nothing came"
    return client.recv()


def submit(op):
    return Submit(op, OpenSampler(op))


def test_a_front_end_that_comes_early_is_told_of_the_progress_then_what_is_served(link):
    link.tell(Progress("loading", 1.5))
    with front_end(link) as client:
        assert receive(client) == Progress("loading", 1.5)
        link.tell(Progress("compiling", 2.5))
        assert receive(client) == Progress("compiling", 2.5)
        link.publish(INFO)
        assert receive(client) == INFO


def test_what_is_not_acknowledged_is_sent_again_in_order(link):
    link.publish(INFO)
    with front_end(link) as client:
        receive(client)
        for op in "abcd":
            client.send(submit(op))
        assert [link.inbox.get(timeout=SECONDS).operation_id for _ in "abcd"] == list("abcd")
        link.answer(Finished("a", None))
        link.answer(Failed("b", "user", "no"))
        assert [receive(client), receive(client)] == [Finished("a", None), Failed("b", "user", "no")]
        client.send(Acknowledge(("a",)))
        client.send(Cancel("c"))
        assert link.inbox.get(timeout=SECONDS) == Cancel("c")
    link.answer(Finished("c", None))  # while there is nobody
    with front_end(link) as client:
        info = receive(client)
        assert isinstance(info, EngineInfo) and info.running == ("d",)
        assert [receive(client), receive(client)] == [Failed("b", "user", "no"), Finished("c", None)]
        client.send(Acknowledge(("b", "c")))
        link.answer(Finished("d", None))
        assert receive(client) == Finished("d", None)
    with front_end(link) as client:
        assert receive(client).running == ()
        assert receive(client) == Finished("d", None)
        assert not client.poll(0.05)


def test_what_is_submitted_twice_runs_once(link):
    link.publish(INFO)
    with front_end(link) as client:
        receive(client)
        client.send(submit("a"))
        client.send(submit("a"))
        client.send(submit("b"))
        assert link.inbox.get(timeout=SECONDS).operation_id == "a"
        assert link.inbox.get(timeout=SECONDS).operation_id == "b"
        link.answer(Finished("a", None))
        assert receive(client) == Finished("a", None)
        client.send(submit("a"))
        assert receive(client) == Finished("a", None), "it is answered again"
        assert link.inbox.empty()


def test_one_front_end_at_a_time(link):
    link.publish(INFO)
    first = Client(link.path, family="AF_UNIX", authkey=KEY)
    receive(first)
    with socket.socket(socket.AF_UNIX) as second:
        second.connect(link.path)
        second.settimeout(0.1)
        with pytest.raises(TimeoutError):
            second.recv(1)  # waits in line
        first.close()
        second.settimeout(SECONDS)
        assert second.recv(1), "its turn has come"


def test_a_wrong_key_is_refused_and_the_next_one_served(link):
    link.publish(INFO)
    with pytest.raises(AuthenticationError):
        Client(link.path, family="AF_UNIX", authkey=b"wrong")
    with front_end(link) as client:
        assert receive(client) == INFO


def test_garbage_ends_that_connection_alone(link):
    link.publish(INFO)
    with front_end(link) as client:
        receive(client)
        client.send_bytes(b"no pickle")
        with pytest.raises(EOFError):
            client.recv()
    with front_end(link) as client:
        assert receive(client) == INFO


def test_answers_don_t_wait_for_a_front_end_that_does_not_read(link):
    link.publish(INFO)
    with front_end(link) as client:
        receive(client)
        start = time.monotonic()
        for i in range(20):
            link.answer(Failed(str(i), "user", "x" * 1_000_000))
        assert time.monotonic() - start < 1.0
        assert [receive(client).operation_id for _ in range(20)] == [str(i) for i in range(20)]


def test_closing_sends_what_is_left_and_hangs_up(tmp_path):
    path = str(tmp_path / "engine.sock")
    link = Link(path, KEY)
    link.path = path
    link.publish(INFO)
    with front_end(link) as client:
        receive(client)
        link.answer(Finished("a", None))
        link.close()
        assert receive(client) == Finished("a", None)
        with pytest.raises(EOFError):
            client.recv()
    assert not os.path.exists(path)


def test_the_socket_is_this_users_alone(link):
    assert stat.S_IMODE(os.stat(link.path).st_mode) == 0o600


def test_a_second_engine_is_refused_and_a_dead_ones_socket_replaced(link, tmp_path):
    with pytest.raises(ConfigError, match="Another engine listens at .*Stop it, or choose another data folder"):
        Link(link.path, KEY)
    left = str(tmp_path / "left.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(left)
    Link(left, KEY).close()
    with pytest.raises(ConfigError, match="can't listen at .*Choose a shorter or writable path"):
        Link(str(tmp_path / "missing" / "engine.sock"), KEY)
