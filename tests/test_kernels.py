"""TPU kernels against their plain twins, in Pallas' interpret mode; and compiled for TPU: that is the check."""

from __future__ import annotations

import dataclasses
from functools import partial

import fit_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged_lib
from jax.sharding import PartitionSpec

from locojax.errors import ConfigError
from locojax.measure import fit_apart, fit_chips
from locojax.measure.fit_programs import Plan, RolloutPlan
from locojax.models import attention, kernels
from locojax.models.sharding import DATA, FSDP, MeshSpec, make_mesh
from locojax.models.spec import ModelSpec
from locojax.rollout.settings import EngineSettings, memory_and_layout

R, T, HEAD = 2, 200, 128  # not a multiple of a block: padded
splash = partial(kernels.splash, name=attention.ATTENDED, interpret=True)


def drawn(num_heads, num_kv_heads, rows=R, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.normal(size=(rows, T, n, HEAD)), jnp.float32) for n in (num_heads, *[num_kv_heads] * 2))
    until = np.zeros((rows, T), np.int32)
    until[0, :90], until[0, 90:170], until[0, 170:] = 90, 170, np.arange(171, T + 1)  # the last 30: padding
    until[1:] = T
    return (q, k, v), jnp.asarray(until)


def both(form, operands):
    """Output and gradients, of a scalar that no two positions enter alike."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=operands[0].shape), jnp.float32)

    def total(operands):
        out = form(*operands)
        return jnp.sum(out * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(operands)
    return [out, *gradients]


@pytest.mark.parametrize("num_heads, num_kv_heads, window", [(4, 2, None), (2, 2, 24)])
def test_splash_is_its_plain_twin(num_heads, num_kv_heads, window):
    """Segments, padding, groups of query heads, a sliding window: values and gradients."""
    operands, until = drawn(num_heads, num_kv_heads)
    plain = both(lambda q, k, v: attention.packed(q, k, v, until, window=window), operands)
    for ours, twin in zip(both(lambda q, k, v: splash(q, k, v, until, window=window), operands), plain, strict=True):
        np.testing.assert_allclose(ours, twin, atol=2e-5)


def test_the_plain_twin_of_long_rows_has_the_window_too(monkeypatch):
    operands, until = drawn(2, 1)
    whole = attention.packed(*operands, until, window=24)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 64)
    np.testing.assert_allclose(attention.packed(*operands, until, window=24), whole, atol=1e-5)
    assert np.abs(whole - attention.packed(*operands, until)).max() > 0.1


@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_splash_splits_heads_over_a_mesh(num_kv_heads):
    """As training calls it: manual over fsdp, tensor the compiler's; kv heads that don't divide are replicated."""
    operands, until = drawn(4, num_kv_heads)
    mesh = make_mesh(MeshSpec(2, 2), jax.devices()[:4])
    rows = PartitionSpec(FSDP)
    form = jax.shard_map(
        splash, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, axis_names=set(DATA), check_vma=False
    )  # fmt: skip
    plain = both(lambda q, k, v: attention.packed(q, k, v, until), operands)
    for ours, twin in zip(both(lambda q, k, v: form(q, k, v, until), operands), plain, strict=True):
        np.testing.assert_allclose(ours, twin, atol=2e-5)


def test_ragged_paged_asks_the_kernel_for_what_its_plain_twin_computes(monkeypatch):
    """The kernel uses what Pallas' interpreters lack, so its own reference stands in: it takes the same arguments."""
    rng = np.random.default_rng(0)
    B, H, K, page, num_pages, width = 3, 4, 2, 16, 24, 8
    pages = jnp.asarray(rng.normal(size=(num_pages, page, 2 * K, HEAD)), jnp.float32)
    table = np.full((B, width), num_pages, np.int32)  # beyond a slot's pages: no page's number
    num_tokens = np.array([1, 17, 100], np.int32)
    order = rng.permutation(num_pages)
    for b, used in enumerate(-(-num_tokens // page)):
        table[b, :used], order = order[:used], order[used:]
    q = jnp.asarray(rng.normal(size=(B, H, HEAD)), jnp.float32)
    given = []

    def reference(*args, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, **settings):
        given.append((num_kv_pages_per_block, num_queries_per_block))
        with jax.numpy_rank_promotion("allow"):
            return ragged_lib.ref_ragged_paged_attention(*args, **settings)

    monkeypatch.setattr(ragged_lib, "ragged_paged_attention", reference)
    plain, kernel = (
        attention.decode_paged(q, pages, jnp.asarray(table), jnp.asarray(num_tokens), kernel=form)
        for form in ("plain", "tpu")
    )
    np.testing.assert_allclose(kernel, plain, atol=1e-5)
    assert given == [(8, 3)]


def model(num_kv_heads, head_dim):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }  # fmt: skip
    return ModelSpec.from_hf_config(config)


def test_an_engine_takes_the_kernel_where_it_can_be_compiled():
    settings = partial(EngineSettings, layout="paged", kv_bytes=1 << 24, dtype=jnp.bfloat16)
    kernel = [memory_and_layout(model(8, 128), settings(attention=form))[1].kernel for form in ("auto", "plain", "tpu")]
    assert kernel == ["plain", "plain", "tpu"]  # auto: this is a CPU
    with pytest.raises(ConfigError, match="3 kv heads of 64 in bfloat16.*attention=\"plain\""):
        memory_and_layout(model(3, 64), settings(attention="tpu"))


@pytest.mark.extended
def test_a_step_on_parts_of_rows_compiles_for_tpu():
    """Four devices, one row: the kernel on each one's queries; what is kept between passes is a fourth."""
    tiny = dataclasses.replace(model(2, 128), num_layers=8)
    plan = Plan(tiny, None, 4096, rollout=RolloutPlan("none"))
    plans = {n: (dataclasses.replace(plan, sequence=n), ("forward_backward",)) for n in (1, 4)}
    done = []
    slice = fit_chips.parse("v5p:2x2x1")
    assert fit_apart.run(fit_steps.compile_plans, (plans, slice), done.append, lambda text: None) is None
    taken = {name: program.temporaries for name, program in done if not program.refused}
    assert taken[4] < 0.5 * taken[1]


@pytest.mark.extended
def test_kernels_compile_for_tpu():
    """What training and decoding run of them at the sizes of a real model, and a policy that only TPU has."""
    done = []
    assert fit_apart.run(fit_steps.compile_kernels, (), done.append, lambda text: None) is None
    texts = {name: found for name, found in done if name in ("splash", "ragged")}
    assert all("tpu_custom_call" in text for text in texts.values()) and len(texts) == 2
    memory = {name: found for name, found in done if name in ("full", "offload")}
    (full, full_host), (offload, offload_host) = memory["full"], memory["offload"]
    kept = 4 * 4096 * 256 * 2  # layers, tokens, hidden, bytes: in the host's memory instead of the device's
    assert offload_host >= kept > full_host and offload < full
