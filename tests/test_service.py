"""The service over a fake engine: a client's whole way, order, idempotency, and what is refused."""

from __future__ import annotations

import asyncio

import fake_engine
import numpy as np
import pytest
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
    train_body,
    with_service,
)

from locojax.hosts import protocol as p
from locojax.server.service_errors import ServiceError


@with_service()
async def test_a_clients_whole_way(service, engine, tmp_path):
    session = await session_of(service)
    model = await model_of(service, session)
    assert model == f"{session}:train:0"
    info = await service.training.get_info(model)
    assert info["model_data"]["model_name"] == MODEL and info["lora_rank"] == 8 and info["is_lora"] is True

    first = await service.training.forward_backward(train_body(model, 1))
    step = await service.training.optim_step(model, 2, ADAM)
    trained = await result(service, first)
    np.testing.assert_array_equal(
        trained.outputs[0]["logprobs"], fake_engine.target_logprob(np.array([6, 7, 9]), 0)
    )
    assert (await result(service, step))["metrics"]["grad_norm"] == 1.0

    saved = await result(
        service, await service.training.save_weights_for_sampler(model, 3, sampling_session_seq_id=0)
    )
    sampler = saved["sampling_session_id"]
    assert saved.get("path") is None
    promise = await service.sampling.asample(sample_body(sampler, 0, num_samples=3))
    assert len(set(promise.sample_sequence_ids)) == 3
    sampled = await result(service, promise)
    tokens = fake_engine.sampled_tokens((5, 6, 7), 1, 2, 4)
    assert sampled.completions[2].tokens == tokens
    np.testing.assert_array_equal(sampled.completions[2].logprobs, fake_engine.sampled_logprobs(tokens, 1))

    path = (await result(service, await service.training.save_weights(model, 4, "final")))["path"]
    assert path == f"tinker://{model}/weights/final"
    assert (tmp_path / "checkpoints" / model.replace(":", "%3A") / "weights" / "final" / "fake.json").exists()
    other = await service.training.create_model_from(session, 1, path, optimizer_state=True)
    assert (await result(service, other))["model_id"] == f"{session}:train:1"
    await service.sessions.finish(session, {"type": "success"}, None)
    await asyncio.sleep(0.05)
    assert engine.models == {}


@with_service()
async def test_chunks_in_any_order_of_arrival_run_in_order_of_their_number(service, engine):
    model = await model_of(service, await session_of(service))
    step = await service.training.optim_step(model, 4, ADAM)
    third, second = [await service.training.forward_backward(train_body(model, seq)) for seq in (3, 2)]
    waiting = await answer(service, third, timeout=0.05)
    assert waiting.state == "pending" and engine.ran_of(p.ForwardBackward) == []
    assert waiting.queue_state_reason == f"waiting for seq_id 1 of model {model}"
    first = await service.training.forward_backward(train_body(model, 1))
    for promise in (first, second, third):
        await result(service, promise)
    # The step saw the gradients of all three.
    assert (await result(service, step))["metrics"]["grad_norm"] == 3.0
    order = [type(one).__name__ for _, one in engine.ran]
    assert order == ["CreateModel", "ForwardBackward", "ForwardBackward", "ForwardBackward", "OptimStep"]
    assert [promise.request_id for promise in (first, second, third)] == [f"{model}:{i}" for i in (1, 2, 3)]


@with_service()
async def test_pipelined_steps_run_as_if_each_was_awaited(service, engine):
    model = await model_of(service, await session_of(service))
    promises = []
    for seq in (1, 3, 5):
        promises.append(await service.training.forward_backward(train_body(model, seq)))
        promises.append(await service.training.optim_step(model, seq + 1, ADAM))
    results = [await result(service, promise) for promise in promises]
    for steps, trained in enumerate(results[::2]):
        np.testing.assert_array_equal(
            trained.outputs[0]["logprobs"], fake_engine.target_logprob(np.array([6, 7, 9]), steps)
        )


@with_service()
async def test_a_repeated_request_is_the_first_one(service, engine):
    session = await session_of(service)
    creation = [await service.training.create_model(session, 0, MODEL, ADAPTER) for _ in range(2)]
    assert creation[0] == creation[1]
    model = creation[0].model_id
    # Both at once, as when a client gives up on a connection too early; and once more after the result.
    same = await asyncio.gather(*[service.training.forward_backward(train_body(model, 1)) for _ in range(5)])
    assert len(set(same)) == 1
    await result(service, same[0])
    assert await service.training.forward_backward(train_body(model, 1)) == same[0]
    step = await service.training.optim_step(model, 2, ADAM)
    assert await service.training.optim_step(model, 2, ADAM) == step
    assert (await result(service, step))["metrics"]["grad_norm"] == 1.0
    saved = [await service.training.save_weights(model, 3, "a") for _ in range(2)]
    assert saved[0] == saved[1]
    await result(service, saved[0])
    assert len(engine.ran) == 4


@with_service()
async def test_another_payload_under_a_used_number_is_refused(service):
    session = await session_of(service)
    model = await model_of(service, session)
    await service.training.forward_backward(train_body(model, 1))
    with pytest.raises(ServiceError, match="was sent before, with another payload") as refused:
        await service.training.forward_backward(train_body(model, 1, tokens=(8, 8, 8)))
    assert refused.value.status == 400 and "a new seq_id" in refused.value.detail
    with pytest.raises(ServiceError, match="another payload"):
        await service.training.optim_step(model, 1, ADAM)
    with pytest.raises(ServiceError, match="another payload"):
        await service.training.create_model(session, 0, MODEL, p.AdapterConfig(16))


@with_service()
async def test_two_clients_that_race_on_one_model_get_one_each(service, engine):
    """Of two different requests with one number, one is run and the other is told so."""

    model = await model_of(service, await session_of(service))
    bodies = [train_body(model, 1, tokens=tokens) for tokens in ((5, 6, 7), (8, 9, 10))]
    found = await asyncio.gather(*map(service.training.forward_backward, bodies), return_exceptions=True)
    assert [type(one) for one in found].count(ServiceError) == 1
    await result(service, next(one for one in found if not isinstance(one, ServiceError)))
    assert len(engine.ran_of(p.ForwardBackward)) == 1


@with_service()
async def test_a_refused_request_holds_up_nobody(service):
    model = await model_of(service, await session_of(service))
    step = await service.training.optim_step(model, 3, ADAM)
    with pytest.raises(Exception, match="outside the vocabulary"):
        await service.training.forward_backward(train_body(model, 1, tokens=(5, 99_999, 7)))
    with pytest.raises(ServiceError, match="can't have this name"):
        await service.training.save_weights(model, 2, "../../etc")
    assert (await result(service, step))["type"] == "optim_step"


@with_service()
async def test_a_failed_operation_fails_alone(service, engine):
    session = await session_of(service)
    one, other = await model_of(service, session, 0), await model_of(service, session, 1)
    engine.failures[p.ForwardBackward] = "user: Unknown loss 'pp0'. Expected: ppo"
    failed = await service.training.forward_backward(train_body(one, 1))
    assert await failure(service, failed) == ("user", "Unknown loss 'pp0'. Expected: ppo")
    engine.failures.clear()
    later = [
        await service.training.forward_backward(train_body(model, seq)) for model, seq in ((one, 2), (other, 1))
    ]
    for promise in later:
        await result(service, promise)


@with_service()
async def test_models_do_not_wait_for_each_other(service, engine):
    session = await session_of(service)
    one, other = await model_of(service, session, 0), await model_of(service, session, 1)
    gap = await service.training.forward_backward(train_body(one, 2))
    await result(service, await service.training.forward_backward(train_body(other, 1)))
    assert (await answer(service, gap, timeout=0.05)).state == "pending"


@with_service()
async def test_what_cannot_be_asked_is_told(service):
    session = await session_of(service)
    model = await model_of(service, session)
    refusals = [
        (404, "There is no session 'x'", service.training.create_model("x", 0, MODEL, ADAPTER)),
        (400, "doesn't serve the model 'gpt'. Expected: 'test/tiny-model'",
         service.training.create_model(session, 1, "gpt", ADAPTER)),
        (400, "no such optimizer",
         service.training.create_model(session, 1, MODEL, ADAPTER, optimizer="dimuon")),
        (404, "There is no model 'm'", service.training.get_info("m")),
        (404, "There is no model 'm'", service.training.forward_backward(train_body("m", 1))),
        (400, "too far ahead", service.training.optim_step(model, 99_999, ADAM)),
        (404, "There is no request 'r'", service.futures.retrieve("r")),
        (404, f"There is no request '{model}:7'", service.futures.retrieve(f"{model}:7")),
        (404, "There is no request 'r'", service.futures.cancel("r")),
        (404, "There is no sampling session 's'", service.futures.retrieve_many("s")),
        (404, "There is no sampling session 's'", service.sampling.asample(sample_body("s", 0))),
        (400, "LoadWeights is not permitted with seq_id 2", service.training.load_weights(model, 2, "tinker://a")),
        (400, "no path of a checkpoint", service.training.create_model_from(session, 1, "/etc/passwd")),
        (404, "There is no checkpoint tinker://a/weights/b",
         service.training.create_model_from(session, 1, "tinker://a/weights/b")),
    ]  # fmt: skip
    for status, text, call in refusals:
        with pytest.raises(ServiceError) as refused:
            await call
        assert (refused.value.status, text in refused.value.detail) == (status, True), refused.value.detail


def test_names_with_a_suffix_and_aliases_are_served(tmp_path):
    async def test():
        names = ("test/tiny-model", "Qwen/Qwen3-8B")
        async with serving(tmp_path, model_names=names, tokenizer_id="local/tok") as (service, _):
            session = await session_of(service)
            for number, name in enumerate(("Qwen/Qwen3-8B", "Qwen/Qwen3-8B:peft:262144")):
                promise = await service.training.create_model(session, number, name, ADAPTER)
                await result(service, promise)
                info = await service.training.get_info(promise.model_id)
                assert info["model_data"]["model_name"] == name and info["model_data"]["tokenizer_id"] == "local/tok"
            shown = service.capabilities()["supported_models"]
            assert [one["model_name"] for one in shown] == list(names) and shown[0]["max_context_length"] == 4096

    run(test())
