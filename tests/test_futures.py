"""Futures: waiting, retention, and what it costs when thousands wait."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from server_under_test import run

from locojax.hosts.protocol import Sampled
from locojax.server import store_results
from locojax.server.futures import MAX_RESULTS_IN_MEMORY, FutureAnswer, Futures
from locojax.server.service_errors import ServiceError
from locojax.server.service_settings import ServiceSettings
from locojax.server.store import Store
from locojax.server.store_tables import FutureRecord
from locojax.types import Completion, ForwardBackwardResult


class Book:
    """A `Futures` with a store, and desks that say little."""

    def __init__(self, folder, **settings):
        self.store = Store(f"sqlite:///{folder}/f.sqlite")
        self.futures = Futures(self.store, ServiceSettings(folder, **settings))
        self.stored = []
        self.futures.explain = lambda record: ("active", "because")
        self.futures.missing = lambda request_id: ServiceError(404, f"There is no request {request_id!r}")
        self.futures.may_see = lambda session_id: True
        self.futures.stop = lambda record: self.futures.fail(record, "stopped", "user")
        self.futures.find_sampler = lambda sampler_id: None
        self.futures.stored = self.stored.append

    async def add(self, request_id, kind="optim_step", owner="m", seq=1):
        record = FutureRecord(request_id, kind, "s", owner, seq, "d", time.time(), operation_id=f"{request_id}#1")
        self.futures.add(record)
        await self.futures.save(record)
        return record

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.to_thread(self.store.close)


def test_thousands_of_polls_wait_without_threads_or_queries(tmp_path):
    async def test():
        async with Book(tmp_path) as book:
            records = [await book.add(f"r{i}") for i in range(200)]
            before = threading.active_count()
            polls = [asyncio.ensure_future(book.futures.retrieve(f"r{i % 200}", timeout=20)) for i in range(4000)]
            await asyncio.sleep(0.2)
            assert threading.active_count() <= before + 1
            began = time.perf_counter()
            for record in records:
                book.futures.finish(record, {"n": record.request_id})
            answers = await asyncio.gather(*polls)
            assert time.perf_counter() - began < 5
            assert all(one.state == "done" and one.result == {"n": one.request_id} for one in answers)

    run(test())


def test_a_poll_that_waits_in_vain_says_why(tmp_path):
    async def test():
        async with Book(tmp_path, long_poll=0.05) as book:
            await book.add("r")
            began = time.perf_counter()
            found = await book.futures.retrieve("r")
            assert time.perf_counter() - began >= 0.05
            assert found.try_again() == {
                "type": "try_again", "request_id": "r", "queue_state": "active", "queue_state_reason": "because"
            }  # fmt: skip
            with pytest.raises(ServiceError, match="There is no request 'x'"):
                await book.futures.retrieve("x")

    run(test())


def test_an_answer_is_acknowledged_once_it_is_on_disk(tmp_path):
    async def test():
        async with Book(tmp_path) as book:
            record = await book.add("r")
            block = threading.Event()
            book.store.submit(lambda connection: block.wait(5))
            book.futures.finish(record, {"a": 1})
            # It is answered from memory while the disk is busy, but not acknowledged.
            assert (await book.futures.retrieve("r")).result == {"a": 1}
            await asyncio.sleep(0.05)
            assert book.stored == []
            block.set()
            while not book.stored:
                await asyncio.sleep(0.01)
            assert book.stored == ["r#1"]

    run(test())


def test_what_can_not_be_stored_stays_in_memory_and_is_not_acknowledged(tmp_path, caplog):
    async def test():
        async with Book(tmp_path) as book:
            record = await book.add("r")
            book.futures.finish(record, {"a": {1, 2}})  # no JSON
            await asyncio.sleep(0.2)
            assert book.stored == [] and "could not be stored" in caplog.text
            assert (await book.futures.retrieve("r")).result == {"a": {1, 2}}
            other = await book.add("ok")
            book.futures.finish(other, {})
            while not book.stored:
                await asyncio.sleep(0.01)

    run(test())


def test_retention_counts_from_delivery(tmp_path):
    async def test():
        async with Book(tmp_path, delivered_retention=10.0, undelivered_retention=100.0) as book:
            for name in ("fetched", "not", "open"):
                record = await book.add(name)
                if name != "open":
                    book.futures.finish(record, {"n": name})
            book.futures.delivered("fetched")
            book.futures.delivered("open")  # no answer was given: nothing begins
            now = time.time()
            assert await book.futures.trim(now + 9) == 0
            assert (await book.futures.retrieve("fetched")).result == {"n": "fetched"}
            assert await book.futures.trim(now + 11) == 1
            with pytest.raises(ServiceError):
                await book.futures.retrieve("fetched")
            assert (await book.futures.retrieve("not")).result == {"n": "not"}
            assert await book.futures.trim(now + 101) == 1
            assert book.futures.counts() == {"pending": 1, "done": 0, "failed": 0}
            rows = book.store.load(FutureRecord)
            assert [row.request_id for row in rows] == ["open"]

    run(test())


def test_results_leave_memory_and_are_read_from_disk(tmp_path):
    async def test():
        async with Book(tmp_path) as book:
            total = MAX_RESULTS_IN_MEMORY + 100
            records = [FutureRecord(f"r{i}", "optim_step", "s", "m", i, "d", time.time()) for i in range(total)]
            for record in records:
                book.futures.add(record)
                book.futures.finish(record, {"n": record.seq})
            await asyncio.gather(*[book.futures.save(record) for record in records[:1]])
            assert len(book.futures._results) <= MAX_RESULTS_IN_MEMORY
            assert (await book.futures.retrieve("r5")).result == {"n": 5}

    run(test())


def test_failures_are_answers(tmp_path):
    async def test():
        async with Book(tmp_path) as book:
            record = await book.add("r")
            book.futures.fail(record, "Rank 64 is above 32.", "user")
            book.futures.finish(record, {"late": True})  # the first end counts
            found = await book.futures.retrieve("r")
            assert found.error_body() == {"error": "Rank 64 is above 32.", "category": "user"}
            assert book.futures.last_errors[0]["error"] == "Rank 64 is above 32."
            assert await book.futures.cancel("r") == {}

    run(test())


def test_cursors_grow_over_restarts(tmp_path):
    async def test():
        async with Book(tmp_path) as book:
            first = await book.add("s:0", "sample", "s", 0)
            book.futures.finish(first, {})
            cursor = (await book.futures.retrieve_many("s"))["cursor"]
            second = await book.add("s:1", "sample", "s", 1)
            book.futures.finish(second, {})
        async with Book(tmp_path) as book:
            book.futures.load()
            found = await book.futures.retrieve_many("s", prev_cursor=cursor, timeout=0)
            assert "s:1" in [one["request_id"] for one in found["completions"]] and found["cursor"] > cursor

    run(test())


def test_both_forms_of_a_poll_answer_are_plain():
    pending = FutureAnswer("r", "pending", "sample")
    assert pending.try_again() == {"type": "try_again", "request_id": "r", "queue_state": "active"}


def test_results_come_back_as_they_were():
    values = np.array([np.nan, -0.5, -np.inf], np.float32)
    trained = ForwardBackwardResult(
        ({"logprobs": values, "elementwise_loss": np.ones((3, 2), np.float32)}, {"logprobs": values[:0]}),
        {"loss:sum": float("nan"), "num_tokens:sum": 3.0},
    )
    back = store_results.decode(store_results.encode(trained))
    np.testing.assert_array_equal(back.outputs[0]["logprobs"], values)
    assert back.outputs[0]["elementwise_loss"].shape == (3, 2) and back.outputs[1]["logprobs"].shape == (0,)
    assert np.isnan(back.metrics["loss:sum"]) and back.metrics["num_tokens:sum"] == 3.0
    tokens = tuple(range(100))
    sampled = Sampled(
        (Completion(0, tokens, np.zeros(100, np.float32), "é", "stop", "\n\nUser:", 3, "tempered"),
         Completion(1, (2,), np.zeros(1, np.float32), "", "length", None, 3)),
        prompt_logprobs=values,
        topk_prompt_logprobs=(np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)),
        num_cached_prompt_tokens=7,
    )  # fmt: skip
    back = store_results.decode(store_results.encode(sampled))
    assert back.completions[0].tokens == tokens and type(back.completions[0].tokens[0]) is int
    assert (back.completions[0].stopped_by, back.completions[1].tokens, back.num_cached_prompt_tokens) == (
        "\n\nUser:",
        (2,),
        7,
    )
    assert back.topk_prompt_logprobs[0].dtype == np.int32 and back.topk_sample_logprobs is None
    assert store_results.decode(store_results.encode({"path": "x", "list": [1, None, 2.5]})) == {
        "path": "x", "list": [1, None, 2.5]
    }  # fmt: skip
