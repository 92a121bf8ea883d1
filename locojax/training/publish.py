"""New weights to the engine, in process: one compiled call from the trainer's tree to the one that decoding wants.

The trainer's stacked masters become a list of layers in the engine's dtype (`decoder.unstack`), with memory of their
own: the trainer donates its own at the next step, and a published tree stays what it was. With LoRA only the adapter
moves; the base was unstacked once, at the first publish.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from locojax.models import decoder
from locojax.models.lora import HEAD, Adapters
from locojax.models.spec import ModelSpec
from locojax.training.programs import Tree
from locojax.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Published:
    """One policy, for `Engine.load`.

    Attributes:
      weights: the tree of `decoder.unstack`.
      adapters: one fp32 adapter for all rows (`index` None); None in full fine-tuning and when merged.
      version: the trainer's policy version.
    """

    weights: Tree
    adapters: Adapters | None
    version: int


class Publisher:
    """Publishes one trainer's weights.

    Args:
      dtype: the engine's; None: the trainer's compute dtype, so that both compute the same.
      merge: fold LoRA into the base's weights (decoding then costs no more than the base's, and trainer and sampler
        differ by rounding); else publish the adapter beside it.
    """

    def __init__(self, trainer: Trainer, *, dtype: str | None = None, merge: bool = False):
        self._trainer = trainer
        self._dtype = dtype or trainer.program.compute_dtype
        self._merge = merge
        self._base: Tree = None  # LoRA's, unstacked: it never changes

    def publish(self) -> Published:
        """The current policy. Returns when it is complete."""
        trainer = self._trainer
        spec, dtype = trainer.spec, self._dtype
        adapters = None
        if trainer.lora is None:
            weights = _unstacked(trainer.trainable, spec, dtype)
        elif self._merge:
            scale = jnp.asarray(trainer.lora.scale, jnp.float32)
            weights = _merged(trainer.frozen, trainer.trainable, scale, spec, dtype)
        else:
            if self._base is None:
                self._base = _unstacked(trainer.frozen, spec, dtype)
            scale = jnp.asarray(trainer.lora.scale, jnp.float32)
            weights, adapters = self._base, Adapters(_copied(trainer.trainable), scale)
        jax.block_until_ready((weights, adapters))
        return Published(weights, adapters, trainer.policy_version)


@partial(jax.jit, static_argnames=("spec", "dtype"))
def _unstacked(params: Tree, spec: ModelSpec, dtype: str) -> Tree:
    # Copied inside the program: a leaf that it only passed on would be the trainer's own buffer.
    return jax.tree.map(jnp.copy, decoder.unstack(params, spec, jnp.dtype(dtype)))


@jax.jit
def _copied(tree: Tree) -> Tree:
    return jax.tree.map(jnp.copy, tree)


@partial(jax.jit, static_argnames=("spec", "dtype"))
def _merged(base: Tree, adapter: Tree, scale: Array, spec: ModelSpec, dtype: str) -> Tree:
    """base + scale x a @ b, summed in fp32, then unstacked in the engine's dtype."""

    def add(weight: Array, part: Any) -> Array:
        return weight.astype(jnp.float32) + scale * jnp.matmul(part["a"], part["b"])

    layers = {**base["layers"], **{name: add(base["layers"][name], adapter[name]) for name in adapter if name != HEAD}}
    merged = {**base, "layers": layers}
    if HEAD in adapter:  # a tied embedding stays as it is: the adapter is of the head alone
        merged["head"] = add(decoder.head_weight(base), adapter[HEAD])
    return jax.tree.map(jnp.copy, decoder.unstack(merged, spec, jnp.dtype(dtype)))
