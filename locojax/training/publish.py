"""New weights to the engine, in process: one compiled call from the trainer's tree to the one that decoding wants.

The trainer's stacked masters become a list of layers in the engine's dtype (`decoder.unstack`), with memory of their
own: the trainer donates its own at the next step, and a published tree stays what it was. With LoRA only the adapter
moves; the base was unstacked once, at the first publish.

Over a mesh that call is also the gather: every host ends up with the whole tree on its first device, where its engine
runs. Every host must make it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from locojax.errors import ConfigError
from locojax.models import decoder, sharding
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
      at_once: False: every weight of every layer in a call of its own. It is slower, and there to measure how much.
    """

    def __init__(
        self, trainer: Trainer, *, dtype: str | None = None, merge: bool = False, at_once: bool = True
    ):
        if merge and not at_once:
            raise ConfigError("Weights that LoRA is merged into are published at once", got="at_once=False")
        self._trainer, self._at_once = trainer, at_once
        self._dtype = dtype or trainer.program.compute_dtype
        self._merge = merge
        self._base: Tree = None  # LoRA's, unstacked: it never changes

    def publish(self) -> Published:
        """The current policy. Returns when it is complete."""
        trainer = self._trainer
        spec, dtype, mesh = trainer.spec, self._dtype, trainer.mesh
        adapters = None
        if trainer.lora is None:
            weights = self._unstacked(trainer.trainable)
        elif self._merge:
            folded = np.float32(trainer.lora.scale)
            weights = _own(_merged(trainer.frozen, trainer.trainable, folded, spec, dtype, mesh), mesh)
        else:
            if self._base is None:
                self._base = self._unstacked(trainer.frozen)
            scale = jnp.asarray(trainer.lora.scale, jnp.float32)
            weights, adapters = self._base, Adapters(_own(_copied(trainer.trainable, mesh), mesh), scale)
        jax.block_until_ready((weights, adapters))
        return Published(weights, adapters, trainer.policy_version)

    def _unstacked(self, params: Tree) -> Tree:
        spec, dtype, mesh = self._trainer.spec, self._dtype, self._trainer.mesh
        if self._at_once:
            return _own(_unstacked(params, spec, dtype, mesh), mesh)

        def one(leaf: Array, layer: int | None = None) -> Array:
            return _own(_piece(leaf, None if layer is None else np.int32(layer), dtype, mesh), mesh)

        def layer_of(i: int) -> Tree:
            return _joined({name: one(leaf, i) for name, leaf in params["layers"].items()})

        tree = {
            "embed": one(params["embed"]),
            "layers": [layer_of(i) for i in range(spec.num_layers)],
            "final_norm": one(params["final_norm"]),
        }
        return tree | ({decoder.UNEMBED: _transposed(one(params["head"]))} if "head" in params else {})


def tracers(
    trainable: Tree, base: Tree, spec: ModelSpec, dtype: str, mesh: Mesh | None, *, merge: bool = False
) -> dict[str, Callable[[], Any]]:
    """The programs that a publish runs, by name, for compiling them from shapes: each gives a `jax.stages.Traced`.

    Args:
      trainable, base: as `shapes.abstract_state` has them; base None in full fine-tuning.
    """
    if base is None:
        return {"publish": partial(_unstacked.trace, trainable, spec, dtype, mesh)}
    if merge:
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        return {"publish": partial(_merged.trace, base, trainable, scale, spec, dtype, mesh)}
    return {
        "publish": partial(_copied.trace, trainable, mesh),
        "publish_base": partial(_unstacked.trace, base, spec, dtype, mesh),
    }


def _everywhere(tree: Tree, mesh: Mesh | None) -> Tree:
    """Inside a program: whole on every device."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, PartitionSpec()))


def _own(tree: Tree, mesh: Mesh | None) -> Tree:
    """Of a program's results: those on this host's first device."""
    return tree if mesh is None else jax.tree.map(sharding.own_copy, tree)


@partial(jax.jit, static_argnames=("spec", "dtype", "mesh"))
def _unstacked(params: Tree, spec: ModelSpec, dtype: str, mesh: Mesh | None) -> Tree:
    if mesh is not None:  # cast before it is sent; and stacked: a few large arrays travel faster than many small ones
        params = _everywhere(jax.tree.map(lambda leaf: leaf.astype(dtype), params), mesh)
    # Copied inside the program: a leaf that it only passed on would be the trainer's own buffer.
    return _everywhere(jax.tree.map(jnp.copy, decoder.unstack(params, spec, jnp.dtype(dtype))), mesh)


@partial(jax.jit, static_argnames=("dtype", "mesh"))
def _piece(leaf: Array, layer: Array | None, dtype: str, mesh: Mesh | None) -> Array:
    """One weight, or one layer's part of it."""
    part = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return _everywhere(jnp.copy(part.astype(dtype)), mesh)


_joined = jax.jit(decoder.join)
_transposed = jax.jit(jnp.transpose)


@partial(jax.jit, static_argnames=("mesh",))
def _copied(tree: Tree, mesh: Mesh | None) -> Tree:
    return _everywhere(jax.tree.map(jnp.copy, tree), mesh)


@partial(jax.jit, static_argnames=("spec", "dtype", "mesh"))
def _merged(
    base: Tree, adapter: Tree, scale: Array | np.float32, spec: ModelSpec, dtype: str, mesh: Mesh | None
) -> Tree:
    """base + scale x a @ b, summed in fp32, then unstacked in the engine's dtype."""

    def add(weight: Array, part: Any) -> Array:
        return weight.astype(jnp.float32) + scale * jnp.matmul(part["a"], part["b"])

    layers = {**base["layers"], **{name: add(base["layers"][name], adapter[name]) for name in adapter if name != HEAD}}
    merged = {**base, "layers": layers}
    if HEAD in adapter:  # a tied embedding stays as it is: the adapter is of the head alone
        merged["head"] = add(decoder.head_weight(base), adapter[HEAD])
    return _unstacked(merged, spec, dtype, mesh)
