"""The trainer's programs over a mesh of devices, of one process or many (see `models.sharding`).

Each device runs `programs.loss_and_outputs` on its own rows, with weights made whole from all devices' parts; the
gradient is summed over the devices, each of which updates its part of the masters. The programs are manual over the
fsdp axis, so that what is sent, and when, is written here; the tensor axis is left to the compiler.

A micro-batch holds `rows` rows for each device of the fsdp axis, so losses are sums over more rows and nothing else
changes. Every program is built from shapes: `abstract_state` and `abstract_batch` give its arguments without data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from locojax.models import sharding
from locojax.models.decoder import TRANSPOSED
from locojax.models.lora import adapter_parameters
from locojax.models.sharding import FSDP, device_bytes
from locojax.models.spec import Parameter, parameters
from locojax.training import programs
from locojax.training.losses import LOSSES, Options
from locojax.training.programs import Fixed, Hyper, MicroBatch, Outputs, ProgramSpec, Tree, Updated, Whole

Gather = Literal["layer", "step"]
"""When weights are made whole, and the gradient summed. Masters and Adam's state are split over the devices either way.

`layer`: in every micro-batch, one layer at a time, forward and again backward; all else a device holds is its part.
`step`: once an optimizer step: between two of them each device keeps the whole weights, in the compute dtype, and the
sum of its own rows' gradients; a base that isn't trained is whole to begin with. Two copies of the model more on every
device, and what is sent no longer grows with the number of micro-batches.
"""


@dataclasses.dataclass(frozen=True)
class Over:
    """The mesh that a program runs on, and when it makes weights whole."""

    mesh: Mesh
    gather: Gather


class Partitions(NamedTuple):
    """Trees of `PartitionSpec`.

    Attributes:
      trainable: of the masters, and of Adam's moments.
      working: of what is trained, as programs read it. accumulators: of the gradient so far; in `step`, one from each
        device, along a leading axis.
      base: of the model's weights that are read only. transposes: of the layers' transposed weights.
    """

    trainable: Tree
    working: Tree
    accumulators: Tree
    base: Tree
    transposes: dict[str, PartitionSpec]


def partitions(spec: ProgramSpec, over: Over) -> Partitions:
    """Where the parameters of the model, and of the adapter that is trained, go."""
    base = sharding.partitions(parameters(spec.model), spec.model, over.mesh)
    trainable = base
    if spec.lora is not None:
        trainable = sharding.partitions(adapter_parameters(spec.model, spec.lora), spec.model, over.mesh)
    working = accumulators = trainable
    if over.gather == "step":
        base, working = (jax.tree.map(sharding.without_fsdp, tree) for tree in (base, trainable))
        accumulators = jax.tree.map(lambda of: PartitionSpec(FSDP, *of), working)
    transposes = {name + TRANSPOSED: _swapped(of) for name, of in base["layers"].items() if len(of) == 3}
    return Partitions(trainable, working, accumulators, base, transposes)


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


def _made_whole(tree: Tree, of: Tree, dtype: DTypeLike | None = None, *, axes_gone: int = 0) -> Tree:
    """Inside a program that is manual over fsdp. dtype: None: each leaf's own. axes_gone: leading ones, sliced off."""

    def one(leaf: Array, partition: PartitionSpec) -> Array:
        dimension = sharding.fsdp_dimension(partition) - axes_gone
        return leaf if dimension < 0 else sharding.whole(leaf, dimension, dtype or leaf.dtype)

    return jax.tree.map(one, tree, of)


def _model_whole(params: Tree, of: Tree, dtype: DTypeLike, *, layers: bool) -> Tree:
    """A model's weights made whole; not its layers, unless asked for.

    The embedding keeps its dtype: what tokens that occur often add to its gradient would be lost in bf16.
    """
    outside = {
        name: _made_whole(leaf, of[name], None if name == "embed" else dtype)
        for name, leaf in params.items()
        if name != "layers"
    }
    return {**outside, "layers": _made_whole(params["layers"], of["layers"], dtype) if layers else params["layers"]}


def _layerwise(spec: ProgramSpec, own: Partitions) -> Whole:
    """How a program makes weights whole that come to it in parts."""

    def first(trainable: Tree, fixed: Fixed) -> tuple[Tree, Fixed]:
        if spec.lora is not None:  # adapters are small
            trainable = _made_whole(trainable, own.trainable)
        if fixed.base is not None:
            return trainable, fixed._replace(base=_model_whole(fixed.base, own.base, spec.compute_dtype, layers=False))
        return _model_whole(trainable, own.trainable, spec.compute_dtype, layers=False), fixed

    def layer(weights: Tree) -> Tree:
        of = {**own.base["layers"], **own.transposes}  # of trained layers too: in this mode theirs are the same
        return _made_whole(weights, {name: of[name] for name in weights}, spec.compute_dtype, axes_gone=1)

    return Whole(first, layer)


@partial(jax.jit, static_argnames=("spec", "over"))
def working(trainable: Tree, *, spec: ProgramSpec, over: Over) -> Tree:
    """For `step`: the masters whole on every device, matrices in the compute dtype; adapters in fp32."""
    own = partitions(spec, over)

    def part(trainable: Tree) -> Tree:
        if spec.lora is not None:
            return _made_whole(trainable, own.trainable)
        return _model_whole(trainable, own.trainable, spec.compute_dtype, layers=True)

    made = _mapped(part, over, (_manual(own.trainable),), _manual(own.working))(trainable)
    return _constrained(made, own.working, over)


def _mapped(part: Callable[..., Any], over: Over, in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        part,
        mesh=over.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={FSDP},
        check_vma=False,  # the loss's loops begin with constants, and differ in length between devices
    )


def _fixed_partitions(fixed: Fixed, own: Partitions) -> Fixed:
    of: Any = {name: own.transposes[name] for name in fixed.transposes}
    return Fixed(None if fixed.base is None else own.base, of)


def _summed(gradient: Tree, of: Tree, *, parts_too: bool) -> Tree:
    """Each device's part of the gradient's sum over devices. parts_too False: only of leaves that are whole on every
    device; where a weight was made whole from parts, the sum came with it."""
    leaves, places = jax.tree.leaves(gradient), [sharding.fsdp_dimension(part) for part in jax.tree.leaves(of)]
    replicated = [leaf for leaf, place in zip(leaves, places, strict=True) if place < 0]
    sums = iter(jax.lax.psum(replicated, FSDP))

    def one(leaf: Array, place: int) -> Array:
        if place < 0:
            return next(sums)
        return jax.lax.psum_scatter(leaf, FSDP, scatter_dimension=place, tiled=True) if parts_too else leaf

    summed = [one(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(gradient), summed)


def _metrics_summed(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """f32[] each, over all devices; in one message."""
    total = jax.lax.psum(jnp.stack([value.astype(jnp.float32) for value in metrics.values()]), FSDP)
    return dict(zip(metrics, total, strict=True))


def _of_outputs(metrics: Any) -> Outputs:
    """Positions stay on the devices that have their rows; metrics, given here as partitions, are everywhere."""
    rows: Any = PartitionSpec(FSDP)
    return Outputs(rows, rows, rows, metrics)


def _constrained_outputs(outputs: Outputs, over: Over) -> Outputs:
    return _constrained(outputs, _of_outputs(dict.fromkeys(outputs.metrics, PartitionSpec())), over)


@partial(jax.jit, static_argnames=("spec", "loss_name", "over"), donate_argnames=("accumulators",))
def accumulate(
    working: Tree,
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
    whole = None if over.gather == "step" else _layerwise(spec, own)

    def part(working: Tree, accumulators: Tree, fixed: Fixed, batch: MicroBatch, options: Options):
        def loss(weights: Tree) -> tuple[Array, Outputs]:
            return programs.loss_and_outputs(spec, loss_name, weights, fixed, batch, options, whole)

        gradient, outputs = jax.grad(loss, has_aux=True)(working)
        if over.gather == "step":
            gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32)[None], gradient)
        else:
            gradient = _summed(gradient, own.trainable, parts_too=False)
        total = jax.tree.map(jnp.add, accumulators, gradient)
        return total, outputs._replace(metrics=_metrics_summed(outputs.metrics))

    sums, rest = _manual(own.accumulators), _manual(_fixed_partitions(fixed, own))
    in_specs = (_manual(own.working), sums, rest, PartitionSpec(FSDP), PartitionSpec())
    mapped = _mapped(part, over, in_specs, (sums, _of_outputs(PartitionSpec())))
    accumulators, outputs = mapped(working, accumulators, fixed, batch, options)
    return _constrained(accumulators, own.accumulators, over), _constrained_outputs(outputs, over)


@partial(jax.jit, static_argnames=("spec", "loss_name", "over"))
def score(
    working: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str, over: Over
) -> Outputs:
    """As `accumulate`, without a gradient. working: empty where `fixed.base` is the policy itself."""
    own = partitions(spec, over)
    whole = None if over.gather == "step" else _layerwise(spec, own)

    def part(working: Tree, fixed: Fixed, batch: MicroBatch, options: Options) -> Outputs:
        outputs = programs.loss_and_outputs(spec, loss_name, working, fixed, batch, options, whole)[1]
        return outputs._replace(metrics=_metrics_summed(outputs.metrics))

    weights, rest = _manual(own.working) if working else {}, _manual(_fixed_partitions(fixed, own))
    in_specs = (weights, rest, PartitionSpec(FSDP), PartitionSpec())
    outputs = _mapped(part, over, in_specs, _of_outputs(PartitionSpec()))(working, fixed, batch, options)
    return _constrained_outputs(outputs, over)


@partial(jax.jit, static_argnames=("spec", "num_top", "over"))
def likeliest(
    working: Tree, fixed: Fixed, batch: MicroBatch, *, spec: ProgramSpec, num_top: int, over: Over
) -> tuple[Array, Array]:
    """As `programs.likeliest`; batch is global, and positions stay on the devices that have their rows."""
    own = partitions(spec, over)
    whole = None if over.gather == "step" else _layerwise(spec, own)

    def part(working: Tree, fixed: Fixed, batch: MicroBatch) -> tuple[Array, Array]:
        return programs.likeliest_tokens(spec, num_top, working, fixed, batch, whole)

    in_specs = (_manual(own.working), _manual(_fixed_partitions(fixed, own)), PartitionSpec(FSDP))
    found = _mapped(part, over, in_specs, PartitionSpec(FSDP))(working, fixed, batch)
    return _constrained(found, (PartitionSpec(FSDP),) * 2, over)


@partial(jax.jit, static_argnames=("spec", "over"))
def gradient(accumulators: Tree, *, spec: ProgramSpec, over: Over) -> Tree:
    """The accumulated gradient over all rows, each device holding what it updates."""
    own = partitions(spec, over)
    if over.gather == "layer":
        return _constrained(accumulators, own.trainable, over)

    def part(accumulators: Tree) -> Tree:
        return _summed(jax.tree.map(lambda leaf: leaf[0], accumulators), own.trainable, parts_too=True)

    mapped = _mapped(part, over, (_manual(own.accumulators),), _manual(own.trainable))
    return _constrained(mapped(accumulators), own.trainable, over)


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
    updated = programs.update(trainable, optimizer, gradient(accumulators, spec=spec, over=over), hyper)
    updated = updated._replace(accumulators=jax.tree.map(jnp.zeros_like, accumulators))
    own, everywhere = partitions(spec, over), _everywhere()
    moments = optax.ScaleByAdamState(everywhere, own.trainable, own.trainable)
    return _constrained(updated, Updated(own.trainable, moments, own.accumulators, everywhere, everywhere), over)


@partial(jax.jit, static_argnames=("spec", "over"))
def transposed(params: Tree, *, spec: ProgramSpec, over: Over) -> dict[str, Array]:
    """As `programs.transposed`, of the weights that programs read, or of a base."""
    own = partitions(spec, over)
    made = programs.transposed(params, spec.compute_dtype)
    return _constrained(made, {name: own.transposes[name] for name in made}, over)


@partial(jax.jit, static_argnames=("spec", "over"))
def zeros(trainable: Tree, *, spec: ProgramSpec, over: Over) -> Tree:
    """Accumulators of nothing."""
    leading = (over.mesh.shape[FSDP],) if over.gather == "step" else ()
    nothing = jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), trainable)
    return _constrained(nothing, partitions(spec, over).accumulators, over)


@partial(jax.jit, static_argnames=("spec", "over"))
def new_optimizer(trainable: Tree, *, spec: ProgramSpec, over: Over) -> optax.ScaleByAdamState:
    """Adam's state, all zero, each part where its weights are."""
    of = partitions(spec, over).trainable
    return _constrained(programs.init_optimizer(trainable), optax.ScaleByAdamState(_everywhere(), of, of), over)


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
    own, model = partitions(spec, over), parameters(spec.model)

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
            working.eval_shape(trainable, spec=spec, over=over),
            own.working,
        )
    leading = (over.mesh.shape[FSDP],) if over.gather == "step" else ()
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
