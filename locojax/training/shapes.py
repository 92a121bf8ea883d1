"""The arguments of a trainer's programs over a mesh as shapes, for compiling them without data (see `sharded`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from locojax.models import sharding
from locojax.models.decoder import TRANSPOSED
from locojax.models.lora import adapter_parameters
from locojax.models.sharding import FSDP, device_bytes
from locojax.models.spec import Parameter, parameters
from locojax.training import sharded
from locojax.training.losses import LOSSES
from locojax.training.programs import Fixed, MicroBatch, ProgramSpec, Tree
from locojax.training.sharded import Over


class AbstractState(NamedTuple):
    """Shapes, dtypes and shardings of what a trainer holds; for compiling its programs without data."""

    trainable: Tree
    working: Tree
    accumulators: Tree
    optimizer: optax.ScaleByAdamState
    fixed: Fixed

    def held(self, over: Over) -> dict[str, int]:
        """Bytes of each part on one device."""
        held = {
            "masters": device_bytes(self.trainable),
            "optimizer": device_bytes(self.optimizer),
            "accumulators": device_bytes(self.accumulators),
            "base": device_bytes(self.fixed.base) + device_bytes(self.fixed.transposes),
        }
        if over.gather == "step":  # else the masters themselves are read
            held["working"] = device_bytes(self.working)
        return held

def abstract_state(spec: ProgramSpec, over: Over, *, keep_transposes: bool) -> AbstractState:
    """The arguments of `accumulate` and `update` that hold weights."""
    own, model = sharded.partitions(spec, over), parameters(spec.model)

    def like(declared: Tree, of: Tree, dtype: DTypeLike) -> Tree:
        def one(parameter: Parameter, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=NamedSharding(over.mesh, partition))

        return jax.tree.map(one, declared, of)

    declared = model if spec.lora is None else adapter_parameters(spec.model, spec.lora)
    trainable = like(declared, own.trainable, jnp.float32)
    read = trainable
    if over.gather == "step":
        read = jax.tree.map(
            lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(over.mesh, of)),
            sharded.working.eval_shape(trainable, spec=spec, over=over),
            own.working,
        )
    leading = (sharding.num_parts(over.mesh),) if over.gather == "step" else ()
    accumulated = jax.tree.map(lambda part: Parameter((*leading, *part.shape), part.axes), declared)
    base = None if spec.lora is None else like(model, own.base, spec.compute_dtype)
    matrices = {name: part for name, part in model["layers"].items() if keep_transposes and len(part.shape) == 3}
    transposes = {
        name + TRANSPOSED: Parameter((part.shape[0], part.shape[2], part.shape[1]), part.axes)
        for name, part in matrices.items()
    }
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(over.mesh, PartitionSpec()))
    return AbstractState(
        trainable,
        read,
        like(accumulated, own.accumulators, jnp.float32),
        optax.ScaleByAdamState(count, trainable, trainable),
        Fixed(base, {name: like(part, own.transposes[name], spec.compute_dtype) for name, part in transposes.items()}),
    )


def abstract_batch(
    over: Over, *, rows: int, row_tokens: int, loss_name: str, inputs: Sequence[str], num_targets: int = 1
) -> MicroBatch:
    """A micro-batch of `rows` rows for each device of the fsdp axis.

    inputs: the names of the loss's inputs that the data have, target_tokens left out.
    """
    shape = (rows * over.mesh.shape[FSDP], row_tokens)

    def like(dtype: DTypeLike, *trailing: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *trailing), dtype)

    def placed(leaf: jax.ShapeDtypeStruct, of: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(over.mesh, of))

    trailing = (num_targets,) if LOSSES[loss_name].multi_target else ()
    batch = MicroBatch(
        tokens=like(jnp.int32),
        positions=like(jnp.int32),
        until=like(jnp.int32),
        segments=like(jnp.int32),
        targets=like(jnp.int32, num_targets),
        scored=like(jnp.bool_),
        reads=like(jnp.bool_),
        inputs={name: like(jnp.float32, *trailing) for name in inputs},
    )
    return sharded.placed_batch(batch, placed)
