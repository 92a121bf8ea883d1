"""A server that is told to stop saves what its models have learnt."""

from __future__ import annotations

import logging

import pytest
from fake_engine import FakeEngine
from server_under_test import (
    ADAM,
    model_of,
    result,
    run,
    serving,
    session_of,
    socket_path,
    train_body,
    until,
    with_service,
)

from locojax.hosts import protocol as p
from locojax.server.service_errors import ServiceError


async def learnt(service, session, number=0):
    """A model after one optimizer step; its next seq_id is 3."""
    model = await model_of(service, session, number)
    await result(service, await service.training.forward_backward(train_body(model, 1)))
    await result(service, await service.training.optim_step(model, 2, ADAM))
    return model


@with_service()
async def test_models_are_saved_that_have_learnt_since_they_were_last(service, engine, caplog):
    session = await session_of(service)
    model, saved, idle = await learnt(service, session), await learnt(service, session, 1), None
    idle = await model_of(service, session, 2)
    await result(service, await service.training.save_weights(saved, 3, "mine"))
    with caplog.at_level(logging.INFO):
        kept = await service.keep_models()
    path = f"tinker://{model}/weights/interrupted-3"
    assert kept == [path] and idle not in caplog.text
    assert "Saving 1 models before the end, for up to 15 s" in caplog.text and f"Kept {model} as {path}" in caplog.text
    found = (await service.checkpoints.of_run(model))["checkpoints"]
    assert [one["checkpoint_id"] for one in found] == ["weights/interrupted-3"] and found[0]["expires_at"] is not None
    assert await service.keep_models() == kept  # again, as nobody says that it is no use: the same name
    await result(service, await service.training.save_weights(model, 3, "by its client"))
    assert await service.keep_models() == []
    await result(service, await service.training.optim_step(model, 4, ADAM))  # without a gradient: nothing learnt
    restored = await service.training.create_model_from(session, 3, path, optimizer_state=True)
    assert (await result(service, restored))["model_id"] == f"{session}:train:3"


@with_service(keep_seconds=0.1)
async def test_what_can_not_be_saved_in_time_is_named(service, engine, caplog):
    session = await session_of(service)
    slow = await learnt(service, session)
    engine.held.add(p.SaveState)
    assert await service.keep_models() == []
    assert f"{slow} is not kept: it was not written within 0.1 s" in caplog.text
    engine.release()
    engine.failures[p.SaveState] = "The disk is full"
    assert await service.keep_models() == []
    assert f"{slow} is not kept: The disk is full" in caplog.text
    engine.failures.clear()
    assert await service.keep_models() == [f"tinker://{slow}/weights/interrupted-3"]
    engine.crash()
    await until(lambda: not service.health()[0])
    assert await service.keep_models() == []
    assert f"{slow} is not kept: the engine does not answer" in caplog.text


def test_whoever_comes_back_is_told_where_it_is(tmp_path):
    async def test():
        address = socket_path()
        with FakeEngine(address) as engine:
            async with serving(tmp_path, engine) as (service, _):
                model = await learnt(service, await session_of(service))
                (path,) = await service.keep_models()
        with FakeEngine(address) as engine:
            async with serving(tmp_path, engine) as (service, _):
                with pytest.raises(ServiceError) as lost:
                    await service.training.optim_step(model, 3, ADAM)
                assert lost.value.status == 410 and f"its last training checkpoint is {path}" in lost.value.detail

    run(test())
