"""The engine against an oracle that recomputes whole sequences without a cache, in every layout and under pressure."""

import dataclasses

import numpy as np
import pytest

from locojax.errors import RequestError
from locojax.rollout.engine import Engine
from locojax.rollout.settings import EngineSettings
from locojax.types import SampleRequest, SamplingParams
from rollout_models import EOS, SPEC, VOCAB, Bytes, oracle_logits, oracle_logprobs, prompts, weights

BYTES_PER_TOKEN = 2 * SPEC.num_layers * SPEC.kv_size * 4
SMALL = EngineSettings(max_slots=16, max_prefill_tokens=64, max_iterations=8, kv_bytes=4096 * BYTES_PER_TOKEN)
PAGED = dataclasses.replace(SMALL, layout="paged", page_size=4)
LAYOUTS = pytest.mark.parametrize("settings", [SMALL, PAGED], ids=["contiguous", "paged"])


def engine(settings=SMALL, tokens=None, seed=0, **kwargs):
    made = Engine(SPEC, settings, tokens or Bytes(), **kwargs)
    made.load(weights(seed), version=seed)
    return made


def request(name, prompt, num_samples=1, **params):
    params.setdefault("max_tokens", 12)
    params.setdefault("seed", 7)
    return SampleRequest(name, tuple(prompt), SamplingParams(**params), num_samples)


def batch(count=5, num_samples=3, **params):
    return [request(f"r{i}", p, num_samples, **{"seed": i, **params}) for i, p in enumerate(prompts(count))]


def tokens_of(results):
    return [[c.tokens for c in result.completions] for result in results]


def logprobs_of(results):
    return np.concatenate([c.logprobs for result in results for c in result.completions])


def assert_same(results, expected):
    assert tokens_of(results) == tokens_of(expected)
    np.testing.assert_allclose(logprobs_of(results), logprobs_of(expected), atol=1e-5)


@LAYOUTS
def test_log_probs_equal_those_of_a_plain_forward_pass(settings):
    requests = batch(temperature=0.8)
    for asked, result in zip(requests, engine(settings).generate(requests), strict=True):
        for completion in result.completions:
            expected = oracle_logprobs(asked.prompt, completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            assert completion.logprobs.dtype == np.float32


@LAYOUTS
def test_greedy_follows_the_oracle(settings):
    requests = batch(temperature=0.0, num_samples=1, stop=())
    for asked, result in zip(requests, engine(settings).generate(requests), strict=True):
        sequence = list(asked.prompt)
        for _ in range(12):
            sequence.append(int(np.argmax(oracle_logits(sequence)[-1])))
        assert result.completions[0].tokens == tuple(sequence[len(asked.prompt) :])


def test_layouts_agree():
    requests = batch(count=6)
    assert_same(engine(PAGED).generate(requests), engine(SMALL).generate(requests))
