"""The trainer's programs over a mesh of devices, of one process or many (see `models.sharding`).

Each device runs `programs.loss_and_outputs` on its own rows, with weights that it makes whole from all devices' parts;
the gradient is summed over the devices, each of which keeps its part. The programs are manual over the fsdp axis, so
that what is sent, and when, is written here; the tensor axis is left to the compiler.

A micro-batch holds `rows` rows for each device of the fsdp axis, so losses are sums over more rows and nothing else
changes. Every program is built from shapes: `abstract_state` and `abstract_batch` give its arguments without data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from locojax.models import sharding
from locojax.models.decoder import TRANSPOSED
from locojax.models.lora import adapter_parameters
from locojax.models.sharding import FSDP
from locojax.models.spec import Parameter, parameters
from locojax.training import programs
from locojax.training.losses import LOSSES, Options
from locojax.training.placement import Placement
from locojax.training.programs import Fixed, Hyper, MicroBatch, Outputs, ProgramSpec, Tree, Updated, Whole

Gather = Literal["layer", "program"]
"""When a program makes weights whole. `layer`: one layer at a time, again in the backward pass; the least memory.
`program`: all of them before the first layer; what isn't trained is whole on every device to begin with."""


@dataclasses.dataclass(frozen=True)
class Over:
    """The mesh that a program runs on, and when it makes weights whole."""

    mesh: Mesh
    gather: Gather


class Partitions(NamedTuple):
    """Trees of `PartitionSpec`: of what is trained, of the model's weights that are read only, of their transposes."""

    trainable: Tree
    base: Tree
    transposes: dict[str, PartitionSpec]


def partitions(spec: ProgramSpec, over: Over) -> Partitions:
    """Where the parameters of the model, and of the adapter that is trained, go."""
    model = sharding.partitions(parameters(spec.model), spec.model, over.mesh)
    trainable = model
    if spec.lora is not None:
        trainable = sharding.partitions(adapter_parameters(spec.model, spec.lora), spec.model, over.mesh)
    base = jax.tree.map(sharding.without_fsdp, model) if over.gather == "program" else model
    transposes = {name + TRANSPOSED: _swapped(of) for name, of in base["layers"].items() if len(of) == 3}
    return Partitions(trainable, base, transposes)


def _swapped(of: PartitionSpec) -> PartitionSpec:
    layers, first, second = of
    return PartitionSpec(layers, second, first)


def _constrained(tree: Tree, of: Tree, over: Over) -> Tree:
    return jax.lax.with_sharding_constraint(tree, sharding.shardings(of, over.mesh))


def _everywhere() -> Any:
    """For trees whose leaves' type is an array's."""
    return PartitionSpec()


def _manual(of: Tree) -> Tree:
    return jax.tree.map(sharding.only_fsdp, of)


def _whole(spec: ProgramSpec, own: Partitions, over: Over) -> Whole:
    """How the programs below make weights whole, in the compute dtype; adapters, which are small, in fp32."""
    dtype = jnp.dtype(spec.compute_dtype)

    def made_whole(tree: Tree, of: Tree, axes_gone: int = 0, to: DTypeLike | None = None) -> Tree:
        def one(leaf: Array, partition: PartitionSpec) -> Array:
            dimension = sharding.fsdp_dimension(partition) - axes_gone
            return leaf if dimension < 0 else sharding.whole(leaf, dimension, to or dtype)

        return jax.tree.map(one, tree, of)

    def model_first(params: Tree, of: Tree) -> Tree:
        if over.gather == "program":
            return made_whole(params, of)
        outside = {name: made_whole(leaf, of[name]) for name, leaf in params.items() if name != "layers"}
        return {**outside, "layers": params["layers"]}

    def first(trainable: Tree, fixed: Fixed) -> tuple[Tree, Fixed]:
        if spec.lora is not None:
            trainable = made_whole(trainable, own.trainable, to=jnp.float32)
        if fixed.base is not None:
            return trainable, fixed._replace(base=model_first(fixed.base, own.base))
        return model_first(trainable, own.trainable), fixed

    def layer(weights: Tree) -> Tree:
        if over.gather == "program":
            return weights
        of = {**own.base["layers"], **own.transposes}  # of the trained model's layers too: the same in this mode
        return made_whole(weights, {name: of[name] for name in weights}, axes_gone=1)

    return Whole(first, layer)


def _fixed_partitions(fixed: Fixed, own: Partitions) -> Fixed:
    of: Any = {name: own.transposes[name] for name in fixed.transposes}
    return Fixed(None if fixed.base is None else own.base, of)


def _summed(gradient: Tree, of: Tree) -> Tree:
    """The gradient of leaves that every device has whole, over all rows; the others' is summed by `sharding.whole`."""
    leaves, treedef = jax.tree.flatten(gradient)
    replicated = [sharding.fsdp_dimension(partition) < 0 for partition in jax.tree.leaves(of)]
    sums = iter(jax.lax.psum([leaf for leaf, is_one in zip(leaves, replicated, strict=True) if is_one], FSDP))
    summed = [next(sums) if is_one else leaf for leaf, is_one in zip(leaves, replicated, strict=True)]
    return jax.tree.unflatten(treedef, summed)


def _of_outputs(metrics: Any) -> Outputs:
    """Positions stay on the devices that have their rows; metrics, given here as partitions, are everywhere."""
    rows: Any = PartitionSpec(FSDP)
    return Outputs(rows, rows, rows, metrics)


def _constrained_outputs(outputs: Outputs, over: Over) -> Outputs:
    return _constrained(outputs, _of_outputs(dict.fromkeys(outputs.metrics, PartitionSpec())), over)


@partial(jax.jit, static_argnames=("spec", "loss_name", "over"), donate_argnames=("accumulators",))
def accumulate(
    trainable: Tree,
    accumulators: Tree,
    fixed: Fixed,
    batch: MicroBatch,
    options: Options,
    *,
    spec: ProgramSpec,
    loss_name: str,
    over: Over,
) -> tuple[Tree, Outputs]:
    """As `programs.accumulate`; batch is global, and so are its outputs and metrics."""
    own = partitions(spec, over)
    whole = _whole(spec, own, over)

    def part(trainable: Tree, accumulators: Tree, fixed: Fixed, batch: MicroBatch, options: Options):
        def loss(weights: Tree) -> tuple[Array, Outputs]:
            return programs.loss_and_outputs(spec, loss_name, weights, fixed, batch, options, whole)

        gradient, outputs = jax.grad(loss, has_aux=True)(trainable)
        total = jax.tree.map(jnp.add, accumulators, _summed(gradient, own.trainable))
        return total, outputs._replace(metrics=jax.lax.psum(outputs.metrics, FSDP))

    weights, rest = _manual(own.trainable), _manual(_fixed_partitions(fixed, own))
    accumulators, outputs = jax.shard_map(
        part,
        mesh=over.mesh,
        in_specs=(weights, weights, rest, PartitionSpec(FSDP), PartitionSpec()),
        out_specs=(weights, _of_outputs(PartitionSpec())),
        axis_names={FSDP},
        check_vma=False,  # the loss's loops begin with constants, and differ in length between devices
    )(trainable, accumulators, fixed, batch, options)
    return _constrained(accumulators, own.trainable, over), _constrained_outputs(outputs, over)


@partial(jax.jit, static_argnames=("spec", "loss_name", "over"))
def score(
    trainable: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str, over: Over
) -> Outputs:
    """As `accumulate`, without a gradient. trainable: empty where `fixed.base` is the policy itself."""
    own = partitions(spec, over)
    whole = _whole(spec, own, over)

    def part(trainable: Tree, fixed: Fixed, batch: MicroBatch, options: Options) -> Outputs:
        outputs = programs.loss_and_outputs(spec, loss_name, trainable, fixed, batch, options, whole)[1]
        return outputs._replace(metrics=jax.lax.psum(outputs.metrics, FSDP))

    weights, rest = _manual(own.trainable), _manual(_fixed_partitions(fixed, own))
    outputs = jax.shard_map(
        part,
        mesh=over.mesh,
        in_specs=(weights if trainable else {}, rest, PartitionSpec(FSDP), PartitionSpec()),
        out_specs=_of_outputs(PartitionSpec()),
        axis_names={FSDP},
        check_vma=False,
    )(trainable, fixed, batch, options)
    return _constrained_outputs(outputs, over)


@partial(
    jax.jit, static_argnames=("spec", "over"), donate_argnames=("trainable", "optimizer", "accumulators")
)
def update(
    trainable: Tree,
    optimizer: optax.ScaleByAdamState,
    accumulators: Tree,
    hyper: Hyper,
    *,
    spec: ProgramSpec,
    over: Over,
) -> Updated:
    """As `programs.update`, each device on its part."""
    updated = programs.update(trainable, optimizer, accumulators, hyper)
    of, everywhere = partitions(spec, over).trainable, _everywhere()
    return _constrained(
        updated, Updated(of, optax.ScaleByAdamState(everywhere, of, of), of, everywhere, everywhere), over
    )


@partial(jax.jit, static_argnames=("spec", "over"))
def transposed(params: Tree, *, spec: ProgramSpec, over: Over) -> dict[str, Array]:
    """As `programs.transposed`, of the trained weights or of a base that is read only."""
    own = partitions(spec, over)
    cast = jax.tree.map(lambda leaf: leaf.astype(spec.compute_dtype), params["layers"])
    made = programs.transposed({"layers": cast}, spec.compute_dtype)
    return _constrained(made, {name: own.transposes[name] for name in made}, over)


@partial(jax.jit, static_argnames=("spec", "over"))
def zeros(trainable: Tree, *, spec: ProgramSpec, over: Over) -> Tree:
    """Accumulators of nothing."""
    return _constrained(jax.tree.map(jnp.zeros_like, trainable), partitions(spec, over).trainable, over)


@partial(jax.jit, static_argnames=("spec", "over"))
def new_optimizer(trainable: Tree, *, spec: ProgramSpec, over: Over) -> optax.ScaleByAdamState:
    """Adam's state, all zero, each part where its weights are."""
    of = partitions(spec, over).trainable
    return _constrained(programs.init_optimizer(trainable), optax.ScaleByAdamState(_everywhere(), of, of), over)


class AbstractState(NamedTuple):
    """Shapes, dtypes and shardings of what a trainer holds; for compiling its programs without data."""

    trainable: Tree
    accumulators: Tree
    optimizer: optax.ScaleByAdamState
    fixed: Fixed


def abstract_state(spec: ProgramSpec, over: Over, *, keep_transposes: bool) -> AbstractState:
    """The arguments of `accumulate` and `update` that hold weights."""
    own, model = partitions(spec, over), parameters(spec.model)

    def like(declared: Tree, of: Tree, dtype: DTypeLike) -> Tree:
        def one(parameter: Parameter, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=NamedSharding(over.mesh, partition))

        return jax.tree.map(one, declared, of)

    declared = model if spec.lora is None else adapter_parameters(spec.model, spec.lora)
    trainable = like(declared, own.trainable, jnp.float32)
    base = None if spec.lora is None else like(model, own.base, spec.compute_dtype)
    transposes = {}
    for name, parameter in model["layers"].items():
        if keep_transposes and len(parameter.shape) == 3:
            shape = (parameter.shape[0], parameter.shape[2], parameter.shape[1])
            transposes[name + TRANSPOSED] = Parameter(shape, parameter.axes)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(over.mesh, PartitionSpec()))
    return AbstractState(
        trainable,
        trainable,
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
    place = NamedSharding(over.mesh, PartitionSpec(FSDP))

    def like(dtype: DTypeLike, *trailing: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *trailing), dtype, sharding=place)

    trailing = (num_targets,) if LOSSES[loss_name].multi_target else ()
    return MicroBatch(
        tokens=like(jnp.int32),
        positions=like(jnp.int32),
        until=like(jnp.int32),
        segments=like(jnp.int32),
        targets=like(jnp.int32, num_targets),
        scored=like(jnp.bool_),
        reads=like(jnp.bool_),
        inputs={name: like(jnp.float32, *trailing) for name in inputs},
    )


class OverMesh(Placement):
    """The `Placement` of a trainer over a mesh.

    Raises:
      ConfigError: the mesh doesn't divide the model.
    """

    def __init__(self, spec: ProgramSpec, over: Over):
        sharding.check_divides(spec.model, over.mesh)
        self._spec, self._over = spec, over
        self._partitions = partitions(spec, over)
        self.num_local_shards, self.num_shards = sharding.num_local_shards(over.mesh), over.mesh.shape[FSDP]

    def trainable(self, tree: Tree) -> Tree:
        return self._placed(tree, self._partitions.trainable, jnp.float32)

    def base(self, tree: Tree, dtype: DTypeLike) -> Tree:
        return self._placed(tree, self._partitions.base, dtype)

    def optimizer(self, state: Mapping[str, Any]) -> optax.ScaleByAdamState:
        moments = {name: self.trainable(state[name]) for name in ("mu", "nu")}
        return optax.ScaleByAdamState(count=self._placed(state["count"], PartitionSpec(), jnp.int32), **moments)

    def new_optimizer(self, trainable: Tree) -> optax.ScaleByAdamState:
        return new_optimizer(trainable, spec=self._spec, over=self._over)

    def copied(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: sharding.copied_to(leaf, leaf.sharding, leaf.dtype), tree)

    def zeros_like(self, trainable: Tree) -> Tree:
        return zeros(trainable, spec=self._spec, over=self._over)

    def transposed(self, params: Tree, spec: ProgramSpec) -> dict[str, Array]:
        return transposed({"layers": params["layers"]}, spec=spec, over=self._over)

    def accumulate(
        self,
        trainable: Tree,
        accumulators: Tree,
        fixed: Fixed,
        batch: MicroBatch,
        options: Options,
        *,
        spec: ProgramSpec,
        loss_name: str,
    ) -> tuple[Tree, Outputs]:
        rows = self._rows(batch)
        return accumulate(
            trainable, accumulators, fixed, rows, options, spec=spec, loss_name=loss_name, over=self._over
        )

    def score(
        self, trainable: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str
    ) -> Outputs:
        rows = self._rows(batch)
        return score(trainable, fixed, rows, options, spec=spec, loss_name=loss_name, over=self._over)

    def update(
        self, trainable: Tree, optimizer: optax.ScaleByAdamState, accumulators: Tree, hyper: Hyper
    ) -> Updated:
        return update(trainable, optimizer, accumulators, hyper, spec=self._spec, over=self._over)

    def fetch(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        def metric(value: Array) -> np.ndarray:
            return np.asarray(value.addressable_data(0))

        return [
            Outputs(
                _local_rows(output.logprobs),
                _local_rows(output.elementwise),
                _local_rows(output.entropy),
                jax.tree.map(metric, output.metrics),
            )
            for output in outputs
        ]

    def _placed(self, tree: Tree, of: Tree, dtype: DTypeLike) -> Tree:
        places = sharding.shardings(of, self._over.mesh)
        return jax.tree.map(lambda leaf, place: sharding.placed(leaf, place, dtype), tree, places)

    def _rows(self, batch: MicroBatch) -> MicroBatch:
        place = NamedSharding(self._over.mesh, PartitionSpec(FSDP))
        return jax.tree.map(
            lambda local: jax.make_array_from_process_local_data(
                place, local, (local.shape[0] // self.num_local_shards * self.num_shards, *local.shape[1:])
            ),
            batch,
        )


def _local_rows(array: Any) -> Any:
    """This process's part of an array that is split over fsdp along its first axis, and replicated over tensor."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
