"""Sessions: heartbeats, expiry, finish, what they free, and how they are found."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_engine import FakeEngine
from server_under_test import (
    ADAM,
    ADAPTER,
    MODEL,
    answer,
    failure,
    model_of,
    result,
    run,
    sample_body,
    serving,
    session_of,
    socket_path,
    train_body,
    until,
    with_service,
)

from locojax.hosts import protocol as p
from locojax.server.service_errors import ServiceError


@with_service(session_timeout=0.4)
async def test_a_silent_session_expires_and_frees_what_it_held(service, engine):
    silent, alive = await session_of(service), await session_of(service)
    model = await model_of(service, silent)
    kept = await model_of(service, alive)
    path = (await result(service, await service.training.save_weights(model, 1, "kept")))["path"]
    saved = await service.training.save_weights_for_sampler(model, 2, sampling_session_seq_id=0)
    sampler = (await result(service, saved))["sampling_session_id"]
    gap = await service.training.optim_step(model, 9, ADAM)
    deadline = time.monotonic() + 5
    while engine.models.keys() != {kept} or sampler in engine.samplers:
        assert time.monotonic() < deadline
        await service.sessions.heartbeat(alive)
        await asyncio.sleep(0.02)
    with pytest.raises(ServiceError, match="expired: no heartbeat came") as gone:
        await service.sessions.heartbeat(silent)
    assert gone.value.status == 410
    with pytest.raises(ServiceError, match="is not there: the session expired") as gone:
        await service.training.optim_step(model, 3, ADAM)
    assert gone.value.status == 410
    with pytest.raises(ServiceError, match="expired"):
        await service.sampling.asample(sample_body(sampler, 0))
    category, text = await failure(service, gap)
    assert category == "user" and "seq_id 9" in text and "the session expired" in text
    other = await service.training.create_model_from(alive, 1, path)
    assert (await result(service, other))["path"] == path


@with_service()
async def test_finish_frees_and_the_first_reason_wins(service, engine):
    session = await session_of(service)
    await model_of(service, session)
    await service.sessions.finish(session, {"type": "errored"}, "boom")
    await service.sessions.finish(session, {"type": "success"}, None)
    await until(lambda: not engine.models)
    with pytest.raises(ServiceError, match="was finished by its client") as gone:
        await service.sessions.heartbeat(session)
    assert gone.value.status == 410
    found = (await service.sessions.search({"session_id": session}))["sessions"][0]
    assert found["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "boom"}
    with pytest.raises(ServiceError, match="There is no session"):
        await service.sessions.heartbeat("never")


def test_more_runs_than_slots_one_after_the_other(tmp_path):
    """peer-failures 3.19: after N runs a model can still be created, though the engine frees slots late."""

    async def test():
        with FakeEngine(socket_path(), max_adapters=2) as engine:
            async with serving(tmp_path, engine) as (service, _):
                for _ in range(5):
                    session = await session_of(service)
                    for number in range(2):
                        await model_of(service, session, number)
                    await service.sessions.finish(session, None, None)
                await until(lambda: not engine.models)

    run(test())


def test_a_creation_waits_for_slots_that_are_being_freed(tmp_path):
    async def test():
        with FakeEngine(socket_path(), max_adapters=1) as engine:
            async with serving(tmp_path, engine) as (service, _):
                first, second = await session_of(service), await session_of(service)
                await model_of(service, first)
                engine.held.add(p.RemoveModel)
                await service.sessions.finish(first, None, None)
                promise = await service.training.create_model(second, 0, MODEL, ADAPTER)
                operation = await service.training.forward_backward(train_body(promise.model_id, 1))
                waiting = await answer(service, promise, timeout=0.1)
                assert waiting.state == "pending" and waiting.queue_state == "paused_capacity"
                engine.release()
                await result(service, promise)
                await result(service, operation)

    run(test())


def test_no_slot_left_says_who_holds_them(tmp_path):
    async def test():
        with FakeEngine(socket_path(), max_adapters=2) as engine:
            async with serving(tmp_path, engine) as (service, _):
                session = await session_of(service)
                held = [await model_of(service, session, number) for number in range(2)]
                promise = await service.training.create_model(session, 2, MODEL, ADAPTER)
                category, text = await failure(service, promise)
                assert category == "user"
                assert text.startswith("All 2 adapter slots of this server are taken.")
                assert all(model in text for model in held) and "--max-adapters" in text and "last used" in text
                with pytest.raises(ServiceError, match="it was never made: All 2 adapter slots") as refused:
                    await service.training.optim_step(promise.model_id, 1, ADAM)
                assert refused.value.status == 400

    run(test())


@with_service()
async def test_unload_frees_after_what_was_submitted(service, engine):
    model = await model_of(service, await session_of(service))
    engine.held.add(p.ForwardBackward)
    work = await service.training.forward_backward(train_body(model, 1))
    unload = await service.training.unload_model(model)
    assert await service.training.unload_model(model) == unload
    assert (await answer(service, unload, timeout=0.05)).state == "pending"
    engine.release()
    await result(service, work)
    assert await result(service, unload) == {"type": "unload_model", "model_id": model}
    assert engine.models == {}
    with pytest.raises(ServiceError, match="it was unloaded") as gone:
        await service.training.get_info(model)
    assert gone.value.status == 410


@with_service()
async def test_sessions_are_listed_and_searched(service):
    ids = []
    for number in range(5):
        made = await service.sessions.create(
            display_name=f"Math RL run {number}",
            user_metadata={"recipe": "rl", "lr": 1},
            project_id=f"p{number % 2}",
        )
        ids.append(made["session_id"])
    assert (await service.sessions.list(limit=2, offset=1))["sessions"] == [ids[3], ids[2]]
    page = await service.sessions.search({"limit": 3, "display_name": "rl math"})
    assert [one["session_id"] for one in page["sessions"]] == ids[:1:-1]
    rest = await service.sessions.search({"limit": 3, "cursor": page["next_cursor"]})
    assert [one["session_id"] for one in rest["sessions"]] == [ids[1], ids[0]] and "next_cursor" not in rest
    assert len((await service.sessions.search({"project_ids": ["p1"]}))["sessions"]) == 2
    assert (await service.sessions.search({"user_metadata": {"recipe": "sl"}}))["sessions"] == []
    assert len((await service.sessions.search({"user_metadata": {"lr": "1"}}))["sessions"]) == 5
    either = await service.sessions.search({"session_id": ids[0], "display_name": "run 4"})
    assert {one["session_id"] for one in either["sessions"]} == {ids[0], ids[4]}
    await service.sessions.finish(ids[0], {"type": "interrupted"}, None)
    finished = {"type": "client_finished", "reasons": ["interrupted"]}
    found = (await service.sessions.search({"statuses": [finished]}))["sessions"]
    assert [one["session_id"] for one in found] == [ids[0]] and found[0]["checkpoints_count"] == 0
    await service.sessions.set_project(ids[1], "moved")
    assert len((await service.sessions.search({"project_ids": ["moved"]}))["sessions"]) == 1
    model = await model_of(service, ids[1])
    got = await service.sessions.get(ids[1])
    assert got["training_run_ids"] == [model] and got["user_metadata"] == {"recipe": "rl", "lr": "1"}


@with_service()
async def test_a_session_is_made_once_for_one_idempotency_key(service):
    made = [await service.sessions.create(idempotency_key=key) for key in ("a", "a", "b", None, None)]
    ids = [one["session_id"] for one in made]
    assert ids[0] == ids[1] and len(set(ids)) == 4
