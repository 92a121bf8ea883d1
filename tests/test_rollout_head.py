"""Logits that are computed a chunk at a time, and where they are asked for, against the plain ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models import decoder
from locojax.models.lora import empty_stack
from locojax.models.spec import ModelSpec
from locojax.rollout import head
from locojax.rollout.programs import pick_adapters
from locojax.rollout.sampling import SamplerRows, WholeLogits, key_of, likeliest, sample_from

B, RANK, ADAPTERS = 64, 4, 3
NARROW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(params=[(1375, 50_000, 3), (2944, 70_000, 6)], ids=str)
def model(monkeypatch, request):
    """Weights, hidden states, stacked adapters of random numbers; a vocabulary in chunks of so many blocks. A chunk of
    6 x 184 would itself be cut into other blocks."""
    V, in_cache, blocks = request.param
    monkeypatch.setattr(head, "LOGITS_IN_CACHE", in_cache)
    spec = ModelSpec.from_hf_config(NARROW | {"vocab_size": V})
    weights = decoder.unstack(decoder.init_params(spec, jax.random.key(0)), spec, jnp.float32)
    stack = empty_stack(spec, RANK, ADAPTERS, jnp.float32)
    keys = iter(jax.random.split(jax.random.key(1), 64))
    tree = jax.tree.map(lambda leaf: 0.3 * jax.random.normal(next(keys), leaf.shape), stack.tree)
    adapters = dataclasses.replace(stack, tree=tree, scale=jnp.asarray([1.0, 0.5, 2.0]))
    hidden = 3 * jax.random.normal(jax.random.key(2), (B, 32))
    assert head.chunk_size(V, 32, B) == blocks * head.block_size(V) and V % head.chunk_size(V, 32, B)
    return weights, hidden, adapters


def rows(temperature=1.0, **other):
    full = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **other}
    array = {name: jnp.full(B, value, jnp.int32 if name == "top_k" else jnp.float32) for name, value in full.items()}
    return SamplerRows(key=jnp.stack([key_of(0, i) for i in range(B)]), position=jnp.zeros(B, jnp.int32), **array)


def both(model, index):
    """(chunked, plain) logits; index: each row's adapter, or None for a model without adapters."""
    weights, hidden, adapters = model
    mine = None if index is None else pick_adapters(adapters, jnp.asarray(index, jnp.int32))
    chunked = head.logits(weights, hidden, mine)
    assert isinstance(chunked, head.ChunkedLogits)
    return chunked, WholeLogits(decoder.logits(weights, hidden[:, None], mine)[:, 0])


@pytest.mark.parametrize("index", [None, [2] * B, [0] * B, [i % ADAPTERS for i in range(B)]])
def test_chunks_find_what_the_whole_says(model, index):
    chunked, plain = both(model, index)
    np.testing.assert_allclose(chunked.values(), plain.values(), rtol=1e-5, atol=1e-5)
    scale = jnp.linspace(0.5, 2.0, B)
    found = [jax.tree.leaves(each.masses(scale, scale == 1)) for each in (chunked, plain)]
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
    V = plain.values().shape[1]
    blocks = jnp.arange(B, dtype=jnp.int32) % (V // head.block_size(V))
    np.testing.assert_allclose(chunked.block(blocks), plain.block(blocks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}])
@pytest.mark.parametrize("logprobs_of", ["raw", "tempered"])
def test_the_same_tokens_are_drawn(model, settings, logprobs_of):
    chunked, plain = both(model, [i % ADAPTERS for i in range(B)])
    truncates = "top_k" in settings or "top_p" in settings
    ours, expected = (sample_from(each, rows(**settings), logprobs_of, truncates) for each in (chunked, plain))
    np.testing.assert_array_equal(ours[0], expected[0])
    np.testing.assert_allclose(ours[1], expected[1], atol=1e-5)
    for one, other in zip(*(likeliest(each, rows().temperature, 3, "raw") for each in (chunked, plain)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_row_draws_the_same_to_the_bit_whoever_shares_the_batch(model):
    """Another's adapter full of NaN, and another's truncation, reach no row."""
    weights, hidden, adapters = model
    index = np.asarray([1, 2] * (B // 2))
    poisoned = jax.tree.map(lambda leaf: leaf, adapters.tree)
    poisoned["head"] = {name: leaf.at[2].set(jnp.nan) for name, leaf in adapters.tree["head"].items()}
    alone = sample_from(both(model, [1] * B)[0], rows(), "raw", False)
    mixed = head.logits(
        weights, hidden, pick_adapters(dataclasses.replace(adapters, tree=poisoned), jnp.asarray(index, jnp.int32))
    )
    cut = dataclasses.replace(rows(), top_k=jnp.asarray(np.where(index == 2, 3, 0), jnp.int32))
    for one, other in zip(alone, sample_from(mixed, cut, "raw", True), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[index == 1], np.asarray(other)[index == 1])


def test_wide_models_few_rows_and_small_vocabularies_are_not_cut():
    assert head.chunk_size(151_936, 32, 128) is not None
    assert head.chunk_size(151_936, 256, 128) is None
    assert head.chunk_size(151_936, 32, 16) is None
    assert head.chunk_size(1000, 32, 128) is None
