"""Trainer and sampler give a sampled token the same log-prob: SmolLM2 itself, over a rollout batch, fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models import decoder
from locojax.models.hub import load_model
from locojax.rl.datums import sequence_datum
from locojax.rollout.engine import Engine
from locojax.rollout.settings import EXACT_ROWS, EngineSettings
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import SampleRequest, SamplingParams

pytestmark = pytest.mark.extended

QUESTIONS = ("Tell me a story.", "What is the capital of France?", "Why is the sky blue?", "2+2=")
SAMPLES, NEW_TOKENS = 16, 12


def test_the_gap_over_a_rollout_batch_is_rounding():
    model = load_model("smollm2-135m")
    settings = EngineSettings(max_context=128, max_slots=EXACT_ROWS, min_rows=EXACT_ROWS, max_iterations=NEW_TOKENS)
    engine = Engine(model.spec, settings, model.tokenizer)
    engine.load(jax.jit(lambda params: decoder.unstack(params, model.spec, jnp.float32))(model.params), 0)
    prompts = [tuple(model.tokenizer.chat([{"role": "user", "content": text}])) for text in QUESTIONS]
    params = SamplingParams(max_tokens=NEW_TOKENS, seed=7)
    results = engine.generate([SampleRequest(str(i), p, params, SAMPLES) for i, p in enumerate(prompts)])

    data = [
        sequence_datum(
            prompt + completion.tokens,
            [False] * len(prompt) + [True] * len(completion.tokens),
            completion.logprobs.tolist(),
            1.0,
        )
        for prompt, result in zip(prompts, results, strict=True)
        for completion in result.completions
    ]
    trainer = Trainer(model.spec, model.params, TrainerSettings(row_tokens=512, compute_dtype="float32"))
    scored = trainer.forward(data, "importance_sampling", score="active").outputs
    gaps = np.concatenate(
        [
            np.abs(output["logprobs"] - datum.inputs["logprobs"])[datum.inputs["weights"] > 0]
            for output, datum in zip(scored, data, strict=True)
        ]
    )
    assert gaps.size > 500
    # 5e-7 and 2e-6 with AVX2; with AVX-512, XLA's products of different numbers of rows add in different orders.
    assert gaps.mean() <= 2e-5 and gaps.max() <= 1e-4
