"""The forward pass against a numpy oracle written from the papers, and what packing promises."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG

from locojax.models import attention, decoder
from locojax.models.dense import head_product, matmul
from locojax.models.lora import Adapters, LoraSpec, init_adapter
from locojax.models.spec import ModelSpec

SPEC = ModelSpec.from_hf_config(CONFIG)


@pytest.fixture(scope="module")
def params():
    drawn = decoder.init_params(SPEC, jax.random.key(1))
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, drawn)  # far from linear


def rows(*segments: list[int]):
    """Plain packing of segments into one row: tokens, positions, until."""
    tokens = np.concatenate(segments).astype(np.int32)[None]
    positions = np.concatenate([np.arange(len(s)) for s in segments]).astype(np.int32)[None]
    ends = np.cumsum([len(s) for s in segments])
    until = np.concatenate([[end] * len(s) for s, end in zip(segments, ends, strict=True)]).astype(np.int32)[None]
    return jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(until)


def hidden(params, tokens, positions, until, **kwargs):
    return np.asarray(decoder.forward(params, SPEC, tokens, positions, until, **kwargs)[0])


def oracle(params, tokens: list[int]) -> np.ndarray:
    """One sequence, float64 numpy, loops instead of tricks: Llama as its paper tells it."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    heads, kv, h = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + SPEC.norm_eps) * w

    def rotate(x):
        out = x.copy()
        for t in range(len(x)):
            for i in range(h // 2):
                angle = t / SPEC.rope.theta ** (2 * i / h)
                a, b = x[t, :, i].copy(), x[t, :, i + h // 2].copy()
                out[t, :, i] = a * np.cos(angle) - b * np.sin(angle)
                out[t, :, i + h // 2] = b * np.cos(angle) + a * np.sin(angle)
        return out

    x = p["embed"][tokens]
    for layer in range(SPEC.num_layers):
        w = {name: leaf[layer] for name, leaf in p["layers"].items()}
        n = norm(x, w["attn_norm"])
        q, k = rotate((n @ w["q"]).reshape(-1, heads, h)), rotate((n @ w["k"]).reshape(-1, kv, h))
        v = (n @ w["v"]).reshape(-1, kv, h)
        out = np.zeros_like(q)
        for t in range(len(x)):
            for head in range(heads):
                group = head // (heads // kv)
                scores = k[: t + 1, group] @ q[t, head] / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                out[t, head] = (weights / weights.sum()) @ v[: t + 1, group]
        x = x + out.reshape(len(x), -1) @ w["o"]
        n = norm(x, w["mlp_norm"])
        gate = n @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w["up"])) @ w["down"]
    return norm(x, p["final_norm"])


def test_forward_equals_the_oracle(params):
    tokens = [5, 9, 200, 31, 7, 7, 120]
    np.testing.assert_allclose(hidden(params, *rows(tokens))[0], oracle(params, tokens), atol=2e-5)


def test_packed_sequences_do_not_see_each_other(params):
    """C30: bit-equal whatever the neighbour holds, and equal to the sequence alone."""
    first, second = [3, 1, 4, 1, 5], [9, 2, 6, 5]
    packed = hidden(params, *rows(first, second))[0]
    changed = hidden(params, *rows([8, 8, 8, 8, 8], second))[0]
    assert np.array_equal(packed[5:], changed[5:])
    np.testing.assert_allclose(packed[:5], oracle(params, first), atol=2e-5)
    np.testing.assert_allclose(packed[5:], oracle(params, second), atol=2e-5)


def test_a_shared_prefix_is_what_each_continuation_would_have_had(params):
    prefix, a, b = [10, 11, 12], [20, 21], [30, 31, 32]
    tokens = jnp.asarray([prefix + a + b], jnp.int32)
    positions = jnp.asarray([[0, 1, 2, 3, 4, 3, 4, 5]], jnp.int32)
    until = jnp.asarray([[8, 8, 8, 5, 5, 8, 8, 8]], jnp.int32)
    shared = hidden(params, tokens, positions, until)[0]
    np.testing.assert_allclose(shared[:5], oracle(params, prefix + a), atol=2e-5)
    np.testing.assert_allclose(shared[5:], oracle(params, prefix + b)[3:], atol=2e-5)


def test_blocks_of_queries_change_nothing(params, monkeypatch):
    tokens = rows(list(range(40, 53)), list(range(90, 101)))
    whole = hidden(params, *tokens)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    np.testing.assert_allclose(hidden(params, *tokens), whole, atol=5e-5)


def naive_attention(q, k, v, until):
    """Softmax over whole rows, to be differentiated by jax."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("rthd,rshd->rhts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(attention.visible(until, 0, q.shape[1])[:, None], scores, -1e30)
    return jnp.einsum("rhts,rshd->rthd", jax.nn.softmax(scores, axis=-1), v)


@pytest.mark.parametrize("sizes", [(512, 128), (512, 5), (5, 5)])
def test_attention_and_its_gradient_are_the_naive_ones(monkeypatch, sizes):
    """In one block, in causal blocks, and block of queries by block; a tree of prefixes, and padding."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", sizes[0])
    monkeypatch.setattr(attention, "CAUSAL_BLOCK", sizes[1])
    keys = jax.random.split(jax.random.key(3), 4)
    q = jax.random.normal(keys[0], (2, 13, 6, 8))
    k, v = (jax.random.normal(key, (2, 13, 2, 8)) for key in keys[1:3])
    until = jnp.asarray([[9, 9, 9, 6, 6, 6, 9, 9, 9, 12, 12, 12, 13], [13] * 13], jnp.int32)
    towards = jax.random.normal(keys[3], q.shape)

    def total(function, q, k, v):
        return jnp.sum(function(q, k, v, until) * towards)

    np.testing.assert_allclose(attention.packed(q, k, v, until), naive_attention(q, k, v, until), atol=1e-5)
    ours, naive = (jax.grad(partial(total, f), argnums=(0, 1, 2))(q, k, v) for f in (attention.packed, naive_attention))
    for a, b in zip(ours, naive, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("policy", ["linear", "dots", "attention", "full"])
def test_recomputation_changes_no_gradient(params, policy):
    tokens = rows([5, 9, 200, 31])

    def total(params, remat):
        return jnp.sum(decoder.forward(params, SPEC, *tokens, remat=remat)[0] ** 2)

    kept, recomputed = jax.grad(total)(params, "none"), jax.grad(total)(params, policy)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_fresh_adapter_is_the_base_bit_for_bit(params):
    """C31: b is zero at the start."""
    tokens = rows([5, 9, 200, 31])
    lora = LoraSpec(4, unembed=True)
    adapters = Adapters(init_adapter(SPEC, lora, 0), jnp.float32(lora.scale))
    base, adapted = hidden(params, *tokens), hidden(params, *tokens, adapters=adapters)
    assert np.array_equal(base, adapted)
    of_base = decoder.logits(params, jnp.asarray(base))
    assert np.array_equal(of_base, decoder.logits(params, jnp.asarray(adapted), adapters))


def test_stacked_adapters_are_picked_by_row(params):
    lora = LoraSpec(4, unembed=True)
    one, two = (jax.tree.map(lambda leaf: leaf + 0.1, init_adapter(SPEC, lora, seed)) for seed in (0, 1))
    scale = jnp.float32(lora.scale)
    stacked = {
        name: jax.tree.map(lambda a, b, at=int(name != "head"): jnp.stack([a, b], at), one[name], two[name])
        for name in one
    }
    both = Adapters(stacked, jnp.stack([scale, scale]), jnp.asarray([1, 0], jnp.int32))
    tokens, positions, until = (jnp.concatenate([part, part]) for part in rows([5, 9, 200, 31]))
    picked = hidden(params, tokens, positions, until, adapters=both)
    for row, adapter in enumerate((two, one)):
        alone = hidden(params, *rows([5, 9, 200, 31]), adapters=Adapters(adapter, scale))
        np.testing.assert_allclose(picked[row], alone[0], atol=2e-5)


def test_lora_scale():
    """C31: 64 by alpha / r; 181.02 by alpha / sqrt(r)."""
    from locojax.models.lora import delta

    weights = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 4))}
    for rslora, expected in ((False, 64.0), (True, 181.0193)):
        scale = jnp.float32(LoraSpec(8, alpha=16.0, rslora=rslora).scale)
        out = delta(jnp.ones((1, 1, 4)), weights, scale, None)
        np.testing.assert_allclose(out, np.full((1, 1, 4), expected), rtol=1e-5)


def test_decoding_attention_is_the_packed_one():
    """A slot's shared prompt and own tokens, against the row that holds both; capacities exceed what is held."""
    heads, kv, h, prompt, total, P, C = 6, 2, 16, 11, 20, 16, 32
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((total, n, h)), jnp.float32) for n in (heads, kv, kv))
    whole = attention.packed(q[None], k[None], v[None], jnp.full((1, total), total, jnp.int32))[0]

    def cached(x, before, capacity):
        return jnp.pad(x, ((before, capacity - len(x)), (0, 0), (0, 0))).swapaxes(0, 1)[None]

    slots = jnp.arange(total - prompt, dtype=jnp.int32)
    own_k, own_v = (jnp.repeat(cached(x[prompt:], n, C), len(slots), 0) for x, n in ((k, 0), (v, heads // kv)))
    decoded, _ = attention.decode_shared(
        q[prompt:], cached(k[:prompt], 0, P), cached(v[:prompt], 0, P), jnp.full((1,), prompt, jnp.int32),
        slots[None], jnp.zeros_like(slots), slots, own_k, own_v, slots + 1,
    )  # fmt: skip
    np.testing.assert_allclose(decoded, whole[prompt:], atol=1e-6)


def test_one_row_of_a_narrow_type_is_multiplied_as_one_of_two():
    """XLA's CPU backend would have the weights in fp32 for it, at a tenth of the speed."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(32, 48)), jnp.bfloat16)
    for rows, dtype, padded in ((1, jnp.bfloat16, True), (2, jnp.bfloat16, False), (1, jnp.float32, False)):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 1, 32)), dtype)
        for product, weight, out in ((matmul, w.astype(dtype), dtype), (head_product, w.T.astype(dtype), jnp.float32)):
            assert ("concatenate" in str(jax.make_jaxpr(product)(x, weight))) == padded
            found = product(x, weight)
            assert (found.shape, found.dtype) == ((rows, 1, 48), out)
            exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
            np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1e-2, atol=2e-2)


def test_attention_of_one_head_a_group_is_no_single_row_either():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 4, 8), (3, 4, 5, 8), (3, 4, 5, 8)))
    length = jnp.asarray([5, 2, 1], jnp.int32)

    def attend(q, k, v):
        return attention.decode_rows(q, [k], [v], length)

    assert str(jax.make_jaxpr(attend)(q, k, v)).count("concatenate") == 2
    wide = [leaf.astype(jnp.float32) for leaf in (q, k, v)]
    assert "concatenate" not in str(jax.make_jaxpr(attend)(*wide))
    np.testing.assert_allclose(attend(q, k, v).astype(jnp.float32), attend(*wide), rtol=2e-2, atol=2e-2)
