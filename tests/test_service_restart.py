"""Either process dies and comes back: what is lost is said, what isn't is there."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys

import fake_engine
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
from locojax.server.connection import EngineLink
from locojax.server.service_errors import ServiceError


def test_an_engine_that_dies_takes_its_models_and_says_so(tmp_path):
    async def test():
        address = socket_path()
        first = FakeEngine(address).start()
        async with serving(tmp_path, first) as (service, _):
            session = await session_of(service)
            model = await model_of(service, session)
            path = (await result(service, await service.training.save_weights(model, 1, "kept")))["path"]
            saved = await service.training.save_weights_for_sampler(model, 2, sampling_session_seq_id=0)
            ephemeral = (await result(service, saved))["sampling_session_id"]
            first.held.update({p.ForwardBackward, p.Sample})
            work = await service.training.forward_backward(train_body(model, 3))
            behind = await service.training.optim_step(model, 4, ADAM)
            gap = await service.training.optim_step(model, 9, ADAM)
            base = (await service.sampling.create_session(session, 1, base_model=MODEL))["sampling_session_id"]
            lost_sample = await service.sampling.asample(sample_body(ephemeral, 0))
            kept_sample = await service.sampling.asample(sample_body(base, 0))
            await until(lambda: len(first._queued) >= 3)
            first.crash()
            await until(lambda: not service.health()[0])
            waiting = await answer(service, work, timeout=0.01)
            assert waiting.state == "pending"
            with FakeEngine(address):
                await until(lambda: service.health()[0])
                for promise in (work, behind, gap):
                    category, text = await failure(service, promise)
                    assert category == "server" and "the engine process was restarted" in text and path in text
                category, text = await failure(service, lost_sample)
                assert category == "server" and "restarted" in text
                # The base model is there again, so this one was simply run again.
                assert len((await result(service, kept_sample)).completions) == 1
                with pytest.raises(ServiceError) as gone:
                    await service.training.optim_step(model, 5, ADAM)
                assert gone.value.status == 410 and f"its last training checkpoint is {path}" in gone.value.detail
                with pytest.raises(ServiceError, match="its weights were only in memory") as gone:
                    await service.sampling.asample(sample_body(ephemeral, 1))
                assert gone.value.status == 410
                restored = await service.training.create_model_from(session, 1, path, optimizer_state=True)
                assert (await result(service, restored))["model_id"] == f"{session}:train:1"
                assert service.status()["engine"]["num_restarts"] == 1

    run(test())


async def named_sampler(service, session: str) -> str:
    """A sampling session of a saved checkpoint, which has sampled once."""
    model = await model_of(service, session)
    path = (await result(service, await service.training.save_weights_for_sampler(model, 1, path="a")))["path"]
    sampler = (await service.sampling.create_session(session, 0, model_path=path))["sampling_session_id"]
    await result(service, await service.sampling.asample(sample_body(sampler, 0)))
    return sampler


def test_named_samplers_open_again_after_the_engine_died(tmp_path):
    async def test():
        address = socket_path()
        first = FakeEngine(address).start()
        async with serving(tmp_path, first) as (service, _):
            sampler = await named_sampler(service, await session_of(service))
            first.crash()
            # Asked while there is no engine: it waits, and says for what.
            promise = await service.sampling.asample(sample_body(sampler, 1))
            waiting = await answer(service, promise, timeout=0.3)
            assert waiting.queue_state == "paused_capacity" and "the engine isn't ready" in waiting.queue_state_reason
            with FakeEngine(address):
                await result(service, promise)

    run(test())


def test_samples_asked_between_two_engines_find_their_samplers_open(tmp_path):
    async def test():
        address = socket_path()
        first = FakeEngine(address).start()
        async with serving(tmp_path, first) as (service, _):
            session = await session_of(service)
            named = await named_sampler(service, session)
            base = (await service.sampling.create_session(session, 1, base_model=MODEL))["sampling_session_id"]
            await result(service, await service.sampling.asample(sample_body(base, 0)))
            first.crash()
            await until(lambda: not service.health()[0])
            asked = [await service.sampling.asample(sample_body(sampler, 1)) for sampler in (named, base)]
            with FakeEngine(address) as second:
                for promise in asked:
                    assert len((await result(service, promise)).completions) == 1
                kinds = [type(operation) for _, operation in second.ran]
                assert kinds.count(p.OpenSampler) == kinds.count(p.Sample) == 2

    run(test())


def test_what_is_asked_before_the_engine_is_there_waits_for_it(tmp_path):
    async def test():
        engine = FakeEngine(socket_path(), start_seconds=0.5).start()
        async with serving(tmp_path, engine, wait=False) as (service, _):
            ready, body = service.health()
            assert not ready and body["status"] == "starting" and body["doing"]
            session = await session_of(service)
            promise = await service.training.create_model(session, 0, MODEL, ADAPTER)
            work = await service.training.forward_backward(train_body(promise.model_id, 1))
            waiting = await answer(service, work, timeout=0.01)
            assert waiting.queue_state == "paused_capacity"
            await result(service, promise)
            await result(service, work)
        await asyncio.to_thread(engine.stop)

    run(test())


@with_service()
async def test_a_broken_connection_loses_no_answer(service, engine):
    model = await model_of(service, await session_of(service))
    engine.held.add(p.ForwardBackward)
    work = await service.training.forward_backward(train_body(model, 1))
    await until(lambda: engine._queued)
    engine.drop_connection()
    await until(lambda: not service.health()[0])
    engine.release()
    await result(service, work)
    await result(service, await service.training.optim_step(model, 2, ADAM))
    assert len(engine.ran_of(p.ForwardBackward)) == 1


def test_results_and_running_work_survive_a_restart_of_the_api(tmp_path):
    async def test():
        with FakeEngine(socket_path()) as engine:
            async with serving(tmp_path, engine) as (service, _):
                session = await session_of(service)
                model = await model_of(service, session, user_metadata={"renderer_name": "role_colon"})
                done = await service.training.forward_backward(train_body(model, 1))
                before = await answer(service, done)
                saved = await service.training.save_weights_for_sampler(model, 2, sampling_session_seq_id=0)
                sampler = (await result(service, saved))["sampling_session_id"]
                sampled = await service.sampling.asample(sample_body(sampler, 0, num_samples=2, record=True))
                first = await answer(service, sampled)
                engine.held.update({p.OptimStep, p.SaveState})
                running = await service.training.optim_step(model, 3, ADAM)
                saving = await service.training.save_weights(model, 4, "through")
                held = await service.training.optim_step(model, 6, ADAM)
                await until(lambda: len(engine._queued) == 2)
            engine.release()
            await until(lambda: len(engine.ran_of(p.SaveState)) == 1)
            async with serving(tmp_path, engine) as (service, _):
                again = await answer(service, done)
                assert again.kind == "forward_backward"
                assert again.result.metrics == before.result.metrics
                assert (again.result.outputs[0]["logprobs"] == before.result.outputs[0]["logprobs"]).all()
                sample = await answer(service, sampled)
                assert sample.result.completions[1].tokens == first.result.completions[1].tokens
                assert (await result(service, running))["metrics"]["grad_norm"] == 1.0
                assert (await result(service, saving))["path"] == f"tinker://{model}/weights/through"
                assert engine.num_resent >= 2
                category, text = await failure(service, held)
                assert category == "server" and "API process was restarted" in text
                # Order and idempotency go on where they were: 5 is awaited, 6 has failed and is passed over.
                assert await service.training.forward_backward(train_body(model, 1)) == done
                seventh = await service.training.optim_step(model, 7, ADAM)
                assert (await answer(service, seventh, timeout=0.05)).state == "pending"
                await result(service, await service.training.forward_backward(train_body(model, 5)))
                assert (await result(service, seventh))["metrics"]["grad_norm"] == 1.0
                assert await service.sampling.asample(sample_body(sampler, 0, num_samples=2, record=True)) == sampled
                await result(service, await service.sampling.asample(sample_body(sampler, 1)))
                many = await service.futures.retrieve_many(sampler)
                assert f"{sampler}:0" in [one["request_id"] for one in many["completions"]]
                await service.sessions.heartbeat(session)
                one = await service.checkpoints.training_run(model)
                assert one["user_metadata"] == {"renderer_name": "role_colon"}
                await until(lambda: not engine.answers)

    run(test())


def test_an_answer_that_comes_again_changes_nothing(tmp_path):
    """It was stored, and the process died before it was acknowledged."""

    async def test():
        with FakeEngine(socket_path()) as engine:
            async with serving(tmp_path, engine) as (service, _):
                model = await model_of(service, await session_of(service))
                saving = await service.training.save_weights(model, 1, "a")
                path = (await result(service, saving))["path"]
                operation_id = next(one for one, operation in engine.ran if isinstance(operation, p.SaveState))
                await until(lambda: not engine.answers)
            engine.answers[operation_id] = p.Finished(operation_id, p.Saved(1))
            async with serving(tmp_path, engine) as (service, _):
                await until(lambda: engine.num_resent and not engine.answers)
                assert (await result(service, saving))["path"] == path
                restored = await service.training.create_model_from(model.split(":")[0], 1, path)
                await result(service, restored)

    run(test())


def test_an_api_that_was_away_frees_what_its_dead_clients_held(tmp_path):
    """A model and a sampler that the engine has, and no session of ours, are removed."""

    async def test():
        with FakeEngine(socket_path()) as engine:
            engine.models["stranger:train:0"] = fake_engine._Model(ADAPTER)
            engine.samplers["stranger:sample:0"] = 0
            async with serving(tmp_path, engine):
                await until(lambda: not engine.models and not engine.samplers)

    run(test())


def test_both_restart_at_once(tmp_path):
    async def test():
        address = socket_path()
        first = FakeEngine(address).start()
        async with serving(tmp_path, first) as (service, _):
            model = await model_of(service, await session_of(service))
            first.held.add(p.OptimStep)
            work = await service.training.optim_step(model, 1, ADAM)
            await until(lambda: first._queued)
        first.crash()
        with FakeEngine(address) as second:
            async with serving(tmp_path, second) as (service, _):
                category, text = await failure(service, work)
                assert category == "server" and "the engine process was restarted" in text
                with pytest.raises(ServiceError, match="is not there: the engine process was restarted"):
                    await service.training.get_info(model)

    run(test())


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_process_that_is_killed(tmp_path, signal_number):
    async def test():
        address = socket_path()
        script = pathlib.Path(fake_engine.__file__)
        environment = {**os.environ, "PYTHONPATH": str(script.parent.parent)}

        def engine() -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, str(script), address], env=environment)

        process = engine()
        try:
            shell = FakeEngine.__new__(FakeEngine)
            shell.address = address
            async with serving(tmp_path, shell, wait=False) as (service, _):
                await until(lambda: service.health()[0], 30)
                session = await session_of(service)
                model = await model_of(service, session)
                done = await service.training.forward_backward(train_body(model, 1))
                await answer(service, done)
                process.send_signal(signal_number)
                process.wait(10)
                process = engine()
                await until(lambda: service.status()["engine"]["num_restarts"] == 1, 30)
                with pytest.raises(ServiceError, match="restarted"):
                    await service.training.optim_step(model, 2, ADAM)
                await result(service, done)
                await model_of(service, session, 1)
        finally:
            process.kill()
            process.wait()

    run(test(), 90)


def test_another_key_is_told_apart_from_no_engine(tmp_path):
    async def test():
        with FakeEngine(socket_path(), b"another") as engine:
            link = EngineLink(engine.address, b"wrong", None)  # type: ignore[arg-type]
            link.start()
            await until(lambda: "another connection key" in link.doing)
            await link.stop()
        gone = EngineLink(socket_path(), b"wrong", None)  # type: ignore[arg-type]
        gone.start()
        await until(lambda: "No such file" in gone.doing)
        await gone.stop()

    run(test())
