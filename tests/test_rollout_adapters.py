"""Adapters in the rollout engine: picked by row, and apart from one another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_models import SPEC, oracle_logprobs, prompts, weights
from test_rollout_engine import (
    LAYOUTS,
    assert_same,
    batch,
    engine,
    request,
)

from locojax.errors import RequestError
from locojax.models.lora import Adapters, LoraSpec, init_adapter

LORA = LoraSpec(rank=4, alpha=8.0, unembed=True)


def adapter(seed):
    """Both factors random: a fresh adapter's `b` is zero and would show nothing."""
    keys = iter(jax.random.split(jax.random.key(seed), 32))
    tree = init_adapter(SPEC, LORA, seed)
    return jax.tree.map(lambda leaf: 0.2 * jax.random.normal(next(keys), leaf.shape), tree)


def stacked(trees):
    """N adapters: the new axis after the layers', first for the head's."""
    layers = {k: jax.tree.map(lambda *x: jnp.stack(x, 1), *(t[k] for t in trees)) for k in trees[0] if k != "head"}
    return {**layers, "head": jax.tree.map(lambda *x: jnp.stack(x, 0), *(t["head"] for t in trees))}


@LAYOUTS
@pytest.mark.parametrize("count", [1, 3])
def test_adapters_are_picked_by_row(settings, count):
    """Samples with and without adapters in one batch, long prompts in chunks, one prompt under several adapters."""
    trees = [adapter(i) for i in range(1, count + 1)]
    scale = jnp.float32(LORA.scale)
    if count == 1:
        adapters = Adapters(trees[0], scale)
    else:
        zero = jax.tree.map(jnp.ones_like, trees[0])  # whatever row 0 holds, it is no adapter
        adapters = Adapters(stacked([zero, *trees]), jnp.full(count + 1, scale))
    made = engine(settings, share=False)
    made.load(weights(), version=1, adapters=adapters)
    cases = [(p, a) for a in range(count + 1) for p in ((5, 6, 7, 8), prompts(1, shortest=70, longest=70)[0])]
    requests = [
        dataclasses.replace(request(f"r{i}", p, 2), adapter=a, prompt_logprobs=True) for i, (p, a) in enumerate(cases)
    ]
    for (prompt, a), result in zip(cases, made.generate(requests), strict=True):
        applied = None if a == 0 else Adapters(trees[a - 1], scale)
        for completion in result.completions:
            expected = oracle_logprobs(prompt, completion.tokens, adapters=applied)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        expected = oracle_logprobs(prompt[:1], prompt[1:], adapters=applied)
        np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=1e-5)
    refused = f"no such adapter is loaded. Got: {count + 1}. Expected: 0 .none. to {count}"
    with pytest.raises(RequestError, match=refused):
        made.add(dataclasses.replace(requests[0], adapter=count + 1))


@LAYOUTS
def test_a_broken_adapter_does_not_reach_its_neighbours(settings):
    """NaN from one request must not stay in memory that the next owner reads past its own tokens."""
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, adapter(1))
    made = engine(settings, share=False)
    made.load(weights(), version=0, adapters=Adapters(broken, jnp.float32(1)))
    requests = batch(count=4)
    poison = [dataclasses.replace(request(f"bad{i}", p, 3), adapter=1) for i, p in enumerate(prompts(4, seed=8))]
    first = made.generate([*poison, *requests])
    assert all(np.isnan(c.logprobs).all() for r in first[:4] for c in r.completions)
    expected = engine(settings).generate(requests)
    assert_same(first[4:], expected)
    assert_same(made.generate(requests), expected)
