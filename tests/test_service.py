"""The service over a fake engine: a client's whole way, order, idempotency, and what is refused."""

from __future__ import annotations

import asyncio

import fake_engine
import numpy as np
from server_under_test import (
    ADAM,
    MODEL,
    model_of,
    result,
    run,
    sample_body,
    serving,
    session_of,
    train_body,
)


def test_a_clients_whole_way(tmp_path):
    async def test():
        async with serving(tmp_path) as (service, engine):
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

    run(test())
