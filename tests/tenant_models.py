"""What the tests of the multi-tenant trainer share: a tiny base, one shape of rows, and a trainer of two models."""

from __future__ import annotations

import functools

import jax
import numpy as np
from test_trainer import SETTINGS, SPEC

from locojax.models import decoder
from locojax.models.lora import LoraSpec
from locojax.training.tenants import TenantSettings, TenantTrainer

TENANTS = TenantSettings(
    row_tokens=SETTINGS.row_tokens, rows=4, max_adapters=3, max_rank=8, compute_dtype="float32", tile_tokens=16
)
LORA_A = LoraSpec(rank=4, alpha=8.0, unembed=True)
LORA_B = LoraSpec(rank=8, alpha=16.0, mlp=False)


@functools.cache
def base():
    drawn = decoder.init_params(SPEC, jax.random.key(1))
    # Larger than a fresh model's, so that attention and log-probs are far from uniform.
    return jax.tree.map(lambda leaf: np.asarray(leaf) * (4.0 if leaf.ndim > 1 else 1.0), drawn)


def drawn_state(trainer, model_id, seed):
    """The model's state with every weight drawn anew: with b zero, as in a fresh adapter, a would get no gradient."""
    rng = np.random.default_rng(seed)
    state = trainer.state(model_id)
    state["trainable"] = jax.tree.map(
        lambda leaf: (0.1 * rng.normal(size=leaf.shape)).astype(np.float32), state["trainable"]
    )
    return state


def tenants(*, with_a=True, loras=(LORA_A, LORA_B)):
    """Models "a" and "b"; b is in the second slot also without a."""
    trainer = TenantTrainer(SPEC, base(), TENANTS)
    for i, (model_id, lora) in enumerate(zip("ab", loras, strict=True)):
        trainer.create(model_id, lora, seed=i)
        trainer.restore(model_id, drawn_state(trainer, model_id, i), optimizer=False)
    if not with_a:
        trainer.remove("a")
    return trainer


def run(trainer, *works):
    """The works' results, after as many micro-batches as they take."""
    while not all(work.done for work in works):
        trainer.advance(works)
    return [work.result() for work in works]
