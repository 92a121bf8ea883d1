"""What the engine is handed: the masters, unstacked, as memory of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models import decoder
from locojax.models.lora import Adapters, LoraSpec
from locojax.models.spec import ModelSpec, RopeSpec
from locojax.training.publish import Publisher
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

SPEC = ModelSpec(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0),
    max_context=64,
    tied_embeddings=True,
)
SETTINGS = TrainerSettings(row_tokens=16, compute_dtype="float32", tile_tokens=16)
DATA = [Datum(np.arange(10), {"target_tokens": np.arange(1, 11)})]


def trained(lora=None, steps=2):
    trainer = Trainer(SPEC, decoder.init_params(SPEC, jax.random.key(0)), SETTINGS, lora=lora)
    for _ in range(steps):
        step(trainer)
    return trainer


def step(trainer):
    trainer.forward_backward(DATA, "cross_entropy")
    assert trainer.optim_step(AdamParams(learning_rate=1e-2)).applied


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def logits(weights, adapters=None):
    tokens = jnp.asarray(DATA[0].tokens, jnp.int32)[None]
    positions, until = jnp.arange(10, dtype=jnp.int32)[None], jnp.full((1, 10), 10, jnp.int32)
    hidden, _ = decoder.forward(weights, SPEC, tokens, positions, until, adapters=adapters)
    return decoder.logits(weights, hidden, adapters)


def test_what_is_published_is_the_masters_unstacked():
    trainer = trained()
    published = Publisher(trainer).publish()
    assert published.version == trainer.policy_version == 2 and published.adapters is None
    equal(published.weights, decoder.unstack(trainer.trainable, SPEC, jnp.float32))


def test_a_published_policy_outlives_the_next_step():
    trainer = trained()
    publisher = Publisher(trainer)
    first = publisher.publish()
    before = jax.tree.map(np.array, first.weights)
    step(trainer)
    equal(first.weights, before)
    second = publisher.publish()
    assert second.version == 3
    assert not np.array_equal(second.weights["final_norm"], before["final_norm"])


def test_the_engine_dtype_is_applied():
    published = Publisher(trained(), dtype="bfloat16").publish()
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(published.weights))


@pytest.mark.parametrize("unembed", [False, True])
def test_an_adapter_is_published_beside_its_base_or_merged_into_it(unembed):
    trainer = trained(LoraSpec(rank=4, alpha=8.0, unembed=unembed))
    publisher = Publisher(trainer)
    published = publisher.publish()
    equal(published.adapters.tree, trainer.trainable)
    expected = logits(trainer.frozen, Adapters(trainer.trainable, published.adapters.scale))
    merged = Publisher(trainer, merge=True).publish()
    assert merged.adapters is None
    stacked = {**merged.weights, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *merged.weights["layers"])}
    np.testing.assert_allclose(logits(stacked), expected, atol=1e-5)
    adapter = jax.tree.map(np.array, published.adapters.tree)
    step(trainer)
    equal(published.adapters.tree, adapter)  # donated memory was not shared
    again = publisher.publish()
    assert again.weights is published.weights and again.version == 3
    assert not np.array_equal(again.adapters.tree["q"]["b"], adapter["q"]["b"])


def test_publishing_again_compiles_nothing():
    from jax._src import test_util

    trainer = trained()
    publisher = Publisher(trainer)
    publisher.publish()
    step(trainer)
    with test_util.count_jit_compilation_cache_miss() as count:
        publisher.publish()
    assert count() == 0
