"""Sampling over the service: snapshots, sessions, provenance, streams, and many at once."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import fake_engine
import numpy as np
import pytest
from fake_engine import FakeEngine
from server_under_test import (
    ADAM,
    MODEL,
    answer,
    datum,
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
from locojax.server.service_sampling import target_layout
from locojax.server.wire import Csr, Provenance, Span
from locojax.types import SamplingParams


async def _ephemeral(service, model, seq, number, kind="snapshot"):
    promise = await service.training.save_weights_for_sampler(model, seq, sampling_session_seq_id=number, kind=kind)
    return (await result(service, promise))["sampling_session_id"]


async def _policy(service, sampler, seq) -> int:
    return (
        (await result(service, await service.sampling.asample(sample_body(sampler, seq)))).completions[0].policy_version
    )


async def _train(service, model, seq) -> None:
    await service.training.forward_backward(train_body(model, seq))
    await result(service, await service.training.optim_step(model, seq + 1, ADAM))


@with_service()
async def test_a_snapshot_stays_and_inflight_samplers_move(service):
    model = await model_of(service, await session_of(service))
    snapshot = await _ephemeral(service, model, 1, 0)
    moving = await _ephemeral(service, model, 2, 1, "inflight")
    named = await result(service, await service.training.save_weights_for_sampler(model, 3, path="a"))
    await _train(service, model, 4)
    later = await _ephemeral(service, model, 6, 2, "inflight")
    assert [await _policy(service, one, 0) for one in (snapshot, moving, later)] == [0, 1, 1]
    opened = await service.sampling.create_session(model.split(":")[0], 7, model_path=named["path"])
    assert await _policy(service, opened["sampling_session_id"], 0) == 0


@with_service()
async def test_sampling_sessions(service, engine):
    session = await session_of(service)
    base = await service.sampling.create_session(session, 0, base_model=f"{MODEL}:x")
    assert base == await service.sampling.create_session(session, 0, base_model=f"{MODEL}:x")
    sampler = base["sampling_session_id"]
    assert await service.sampling.sampler(sampler) == {"sampler_id": sampler, "base_model": f"{MODEL}:x"}
    assert [(await service.sampling.join_session(sampler))["client_counter"] for _ in range(2)] == [1, 2]
    with pytest.raises(ServiceError, match="was opened before, on other weights"):
        await service.sampling.create_session(session, 0, base_model=MODEL)
    model = await model_of(service, session)
    weights = (await result(service, await service.training.save_weights(model, 1, "w")))["path"]
    with pytest.raises(ServiceError) as refused:
        await service.sampling.create_session(session, 1, model_path=weights)
    assert refused.value.status == 400 and "is a training checkpoint" in refused.value.detail
    assert (
        "sampler_weights/<name>" in refused.value.detail and "save_weights_for_sampler" in refused.value.detail
    )
    with pytest.raises(ServiceError, match="There is no checkpoint") as refused:
        await service.sampling.create_session(session, 1, model_path=f"tinker://{model}/sampler_weights/none")
    assert refused.value.status == 404
    path = (await result(service, await service.training.save_weights_for_sampler(model, 2, path="s")))["path"]
    both = [await service.sampling.create_session(session, n, model_path=path) for n in (1, 2)]
    for one in both:
        await result(service, await service.sampling.asample(sample_body(one["sampling_session_id"], 0)))
    assert len([one for one in engine.ran_of(p.OpenSampler) if one.directory is not None]) == 1
    assert (await service.sampling.sampler(both[0]["sampling_session_id"]))["model_path"] == path
    assert path in service.sampling.names() and MODEL in service.sampling.names()
    got = await service.sessions.get(session)
    assert got["sampler_ids"] == [sampler, *(one["sampling_session_id"] for one in both)]


@with_service(max_snapshots_per_model=3)
async def test_old_snapshots_are_dropped_and_say_so(service, engine):
    """Each step of an RL loop makes one, and no client ever closes one."""

    model = await model_of(service, await session_of(service))
    samplers = []
    for number in range(6):
        samplers.append(await _ephemeral(service, model, number + 1, number))
        await _policy(service, samplers[0], number)  # a reference that is used all along
    await until(lambda: len([one for one in engine.samplers if ":sample:" in one]) == 3)
    assert set(engine.samplers) == {samplers[0], samplers[4], samplers[5]}
    with pytest.raises(ServiceError, match="only the 3 snapshots of a model") as gone:
        await service.sampling.asample(sample_body(samplers[2], 0))
    assert gone.value.status == 410 and "save_weights_for_sampler" in gone.value.detail


@with_service()
async def test_an_answer_that_makes_no_sense_fails_its_request(service, engine, caplog):
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    engine._sample = lambda operation: p.Sampled(())
    promise = await service.sampling.asample(sample_body(sampler, 0, record=True))
    category, text = await failure(service, promise)
    assert category == "server" and "could not use the engine's answer" in text


@with_service()
async def test_older_clients_sample_without_a_session(service):
    promise = await service.sampling.asample(sample_body(None, None, base_model=MODEL))
    assert len((await result(service, promise)).completions) == 1


@with_service()
async def test_a_repeated_sample_is_the_first_one_and_a_failed_one_runs_again(service, engine):
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    large = 55_868_337_000_000_000  # a clone's number
    same = await asyncio.gather(*[service.sampling.asample(sample_body(sampler, large)) for _ in range(4)])
    assert len(set(same)) == 1 and same[0].request_id == f"{sampler}:{large}"
    await result(service, same[0])
    assert len(engine.ran_of(p.Sample)) == 1
    with pytest.raises(ServiceError, match="another payload"):
        await service.sampling.asample(sample_body(sampler, large, max_tokens=5))
    engine.failures[p.Sample] = "out of memory"
    failed = await service.sampling.asample(sample_body(sampler, 1))
    assert await failure(service, failed) == ("server", "out of memory")
    engine.failures.clear()
    again = await service.sampling.asample(sample_body(sampler, 1))
    assert again.request_id == failed.request_id
    assert len((await result(service, again)).completions) == 1


@with_service(delivered_retention=0.1)
async def test_a_sample_whose_result_was_given_up_runs_again(service):
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    first = await service.sampling.asample(sample_body(sampler, 0))
    before = await result(service, first)
    await asyncio.sleep(0.5)
    with pytest.raises(ServiceError, match="no longer kept") as gone:
        await answer(service, first)
    assert gone.value.status == 410
    again = await service.sampling.asample(sample_body(sampler, 0))
    after = await result(service, again)
    assert after.completions[0].tokens == before.completions[0].tokens


def test_five_hundred_samples_at_once_and_heartbeats_beside_them(tmp_path):
    """peer-failures 3.16: none is lost, and heartbeats don't wait."""

    async def test():
        with FakeEngine(socket_path(), sample_seconds=0.2) as engine:
            async with serving(tmp_path, engine) as (service, _):
                session = await session_of(service)
                sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
                times = []

                async def beat():
                    while True:
                        began = time.perf_counter()
                        await service.sessions.heartbeat(session)
                        times.append(time.perf_counter() - began)
                        await asyncio.sleep(0.01)

                async def one(seq):
                    promise = await service.sampling.asample(sample_body(sampler, seq, num_samples=2))
                    return await result(service, promise)

                beating = asyncio.create_task(beat())
                results = await asyncio.gather(*map(one, range(512)))
                beating.cancel()
                assert len(results) == 512 and all(len(one.completions) == 2 for one in results)
                assert sorted(times)[int(0.95 * len(times))] < 0.2
                await until(lambda: not engine.answers)  # all were acknowledged
                assert service.futures.counts() == {"pending": 0, "done": 512, "failed": 0}

    run(test())


@with_service()
async def test_one_poll_for_all_samples_of_a_session(service, engine):
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    clone = 3_000_000_000
    polling = asyncio.create_task(service.futures.retrieve_many(sampler))
    await asyncio.sleep(0.01)
    promises = [await service.sampling.asample(sample_body(sampler, seq)) for seq in (0, 1, clone)]
    seen, cursor = [], 0
    while len(seen) < 2:
        found = await polling
        assert found["cursor"] > cursor
        cursor = found["cursor"]
        seen += [(one["request_id"], one["state"]) for one in found["completions"]]
        polling = asyncio.create_task(service.futures.retrieve_many(sampler, prev_cursor=cursor, timeout=0.2))
    assert sorted(seen) == sorted((one.request_id, "finished") for one in promises[:2])
    await polling
    of_clone = await service.futures.retrieve_many(sampler, cloned_sampler_id=3)
    assert [one["request_id"] for one in of_clone["completions"]] == [promises[2].request_id]
    nothing = await service.futures.retrieve_many(sampler, prev_cursor=cursor, timeout=0.0)
    assert nothing == {"completions": [], "cursor": cursor}
    engine.failures[p.Sample] = "no"
    await service.sampling.asample(sample_body(sampler, 9))
    failed = await service.futures.retrieve_many(sampler, prev_cursor=cursor)
    assert failed["completions"] == [{"state": "failed", "request_id": f"{sampler}:9"}]


def test_a_sample_cancelled_while_it_runs_ends_with_what_it_has(tmp_path):
    async def test():
        with FakeEngine(socket_path(), sample_seconds=60.0) as engine:
            async with serving(tmp_path, engine) as (service, _):
                session = await session_of(service)
                sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
                promise = await service.sampling.asample(sample_body(sampler, 0))
                await until(lambda: engine._sampling)  # submitted is not yet begun
                await service.futures.cancel(promise.request_id)
                await result(service, promise)
                await service.futures.cancel(promise.request_id)

    run(test())


@with_service()
async def test_a_sample_cancelled_before_it_runs_fails(service, engine):
    engine.held.add(p.Sample)
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    promise = await service.sampling.asample(sample_body(sampler, 0))
    await until(lambda: engine._queued)
    await service.futures.cancel(promise.request_id)
    assert await failure(service, promise) == ("user", "Cancelled.")
    assert engine.ran_of(p.Sample) == []


def test_too_many_waiting_samples_are_put_off(tmp_path):
    async def test():
        with FakeEngine(socket_path(), sample_seconds=60.0) as engine:
            async with serving(tmp_path, engine, max_waiting_samples=3) as (service, _):
                session = await session_of(service)
                sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
                for seq in range(3):
                    await service.sampling.asample(sample_body(sampler, seq))
                with pytest.raises(ServiceError, match="Too many samples") as refused:
                    await service.sampling.asample(sample_body(sampler, 3))
                assert refused.value.status == 429

    run(test())


@with_service()
async def test_prompts_that_do_not_fit_are_refused_at_once(service, engine):
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    for prompt in ((99_999,), (5,) * 5000):
        with pytest.raises(Exception, match="prompt") as refused:
            await service.sampling.asample(sample_body(sampler, 0, prompt=prompt))
        assert refused.value.status == 400
    assert engine.ran_of(p.Sample) == []


@with_service()
async def test_what_was_sampled_is_what_stable_reinforce_trains_against(service, engine):
    session = await session_of(service)
    model = await model_of(service, session)
    sampler = await _ephemeral(service, model, 1, 0)
    promise = await service.sampling.asample(sample_body(sampler, 0, record=True, num_samples=2))
    sampled = await result(service, promise)
    tokens = sampled.completions[1].tokens
    sequence_id = promise.sample_sequence_ids[1]
    # Prompt 5 6 7, then the four sampled tokens; targets are the next tokens.
    inputs = np.array([5, 6, 7, *tokens[:3]], np.int32)
    targets = np.array([6, 7, *tokens], np.int64)
    advantages = np.array([0, 0, 1, 1, -1, 0], np.float32)
    body = train_body(
        model, 2, loss="stable_reinforce",
        data=(dataclasses.replace(datum(), tokens=inputs, inputs={
            "target_tokens": targets, "advantages": advantages, "logprobs": np.zeros(6, np.float32)}),),
        provenance=(Provenance(
            (Span("prompt", sequence_id, 0, 3), Span("sampled", sequence_id, 0, 3)),
            (Span("prompt", sequence_id, 1, 2), Span("sampled", sequence_id, 0, 4))),),
    )  # fmt: skip
    await result(service, await service.training.forward_backward(body))
    (sent,) = engine.ran_of(p.ForwardBackward)
    expected = np.concatenate([np.zeros(2), sampled.completions[1].logprobs]).astype(np.float32)
    np.testing.assert_array_equal(sent.data[0].inputs["logprobs"], expected)
    np.testing.assert_array_equal(sent.data[0].inputs["weights"], np.array([0, 0, 1, 1, 1, 1], np.float32))
    assert "temperature" not in sent.loss_config

    async def refused(text, seq, provenance=body.provenance, **changes):
        changed = dataclasses.replace(body.data[0], inputs={**body.data[0].inputs, **changes})
        with pytest.raises(ServiceError) as error:
            await service.training.forward_backward(
                dataclasses.replace(body, seq_id=seq, data=(changed,), provenance=provenance, digest=str(seq))
            )
        assert error.value.status == 400 and text in error.value.detail, error.value.detail

    await refused("advantages[1] is not zero, but its token was not sampled", 3,
                  advantages=np.array([0, 1, 1, 1, 1, 1], np.float32))  # fmt: skip
    await refused("target_tokens[3] is not what was sampled", 4, target_tokens=targets + (np.arange(6) == 3))
    unknown = (Span("prompt", "x", 0, 2), Span("sampled", "nobody", 0, 4))
    await refused("no record of sampling the sequence 'nobody'", 5, (Provenance((), unknown),))
    beyond = (Span("prompt", sequence_id, 0, 2), Span("sampled", sequence_id, 1, 4))
    await refused("names tokens 1 to 5", 6, (Provenance((), beyond),))
    await result(service, await service.training.optim_step(model, 7, ADAM))


@with_service()
async def test_records_are_of_one_session_and_know_the_temperature(service, engine):
    session, stranger = await session_of(service), await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    promise = await service.sampling.asample(sample_body(sampler, 0, record=True, temperature=0.5))
    tokens = (await result(service, promise)).completions[0].tokens
    sequence_id = promise.sample_sequence_ids[0]
    spans = (Span("sampled", sequence_id, 0, 4),)
    for owner, is_own in ((session, True), (stranger, False)):
        model = await model_of(service, owner)
        inputs = {"target_tokens": np.array(tokens), "advantages": np.ones(4, np.float32),
                  "logprobs": np.zeros(4, np.float32)}  # fmt: skip
        data = (dataclasses.replace(datum(), tokens=np.array([7, *tokens[:3]], np.int32), inputs=inputs),)
        body = train_body(model, 1, loss="stable_reinforce", data=data, provenance=(Provenance((), spans),))
        if is_own:
            await result(service, await service.training.forward_backward(body))
            assert engine.ran_of(p.ForwardBackward)[-1].loss_config["temperature"] == 0.5
        else:
            with pytest.raises(ServiceError, match="a sequence_id of this session"):
                await service.training.forward_backward(body)


@with_service()
async def test_streams(service, engine):
    sample = p.Sample("", (5, 6), SamplingParams(max_tokens=3, seed=1), 2, stream=True)
    items = [item async for item in service.sampling.stream(sample, base_model=MODEL)]
    tokens = [item for item in items if isinstance(item, p.Tokens)]
    assert [one.sample_index for one in tokens] == [0, 0, 0, 1, 1, 1] and tokens[2].finished
    assert tuple(one.tokens[0] for one in tokens[:3]) == fake_engine.sampled_tokens((5, 6), 1, 0, 3)
    assert isinstance(items[-1], p.Sampled) and len(items) == 7
    with pytest.raises(ServiceError, match="doesn't serve the model 'gpt'"):
        await anext(service.sampling.stream(sample, base_model="gpt"))
    engine.failures[p.Sample] = "user: prompt and max_tokens don't fit"
    with pytest.raises(ServiceError, match="don't fit") as refused:
        await anext(service.sampling.stream(sample, base_model=MODEL))
    assert refused.value.status == 400


def test_closing_a_stream_cancels_its_sample(tmp_path):
    async def test():
        with FakeEngine(socket_path(), sample_seconds=60.0) as engine:
            async with serving(tmp_path, engine) as (service, _):
                sample = p.Sample("", (5, 6), SamplingParams(max_tokens=3), stream=True)
                stream = service.sampling.stream(sample, base_model=MODEL)
                first = asyncio.ensure_future(anext(stream))
                await until(lambda: engine._sampling)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await stream.aclose()
                await until(lambda: not engine._sampling)

    run(test())


@with_service()
async def test_the_layout_of_sparse_targets_is_remembered(service):
    session = await session_of(service)
    sampler = (await service.sampling.create_session(session, 0, base_model=MODEL))["sampling_session_id"]
    layout = Csr((2, 3), np.array([0, 1, 2]), np.array([2, 0]))
    promise = await service.sampling.asample(sample_body(sampler, 0, target_layout=layout))
    found = target_layout((await answer(service, promise)).detail)
    assert found is not None and found.shape == (2, 3)
    np.testing.assert_array_equal(found.columns, layout.columns)
