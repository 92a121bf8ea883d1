"""The trainer's programs over a mesh of devices, of one process or many (see `models.sharding`).

Each device runs `programs.loss_and_outputs` on its own rows, or its own part of them, with weights made whole from all
devices' parts; the gradient is summed over the devices, each of which updates its part of the masters. The programs are
manual over the axes fsdp and sequence, so that what is sent, and when, is written here; the tensor axis is left to the
compiler.

A micro-batch holds `rows` rows for each device of the fsdp axis, so losses are sums over more rows and nothing else
changes. Over a sequence axis each device has a part of its rows' tokens, and the loss, which is cheap, is computed of
the whole rows by all of them. Every program is built from shapes; `shapes` gives its arguments without data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from locojax.models import sharding
from locojax.models.decoder import TRANSPOSED
from locojax.models.lora import adapter_parameters
from locojax.models.sharding import DATA, FSDP, SEQUENCE
from locojax.models.spec import parameters
from locojax.training import programs
from locojax.training.losses import Options
from locojax.training.programs import (
    WHOLE_ROWS,
    Fixed,
    Hyper,
    MicroBatch,
    Outputs,
    ProgramSpec,
    Tree,
    Updated,
    Whole,
)

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
        base, working = (jax.tree.map(sharding.without_data, tree) for tree in (base, trainable))
        accumulators = jax.tree.map(lambda of: PartitionSpec(DATA, *of), working)
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
    return jax.tree.map(sharding.only_data, of)


def _made_whole(tree: Tree, of: Tree, dtype: DTypeLike | None = None, *, axes_gone: int = 0) -> Tree:
    """Inside a program manual over `DATA`. dtype: None: each leaf's own. axes_gone: leading ones, sliced off."""

    def one(leaf: Array, partition: PartitionSpec) -> Array:
        dimension = sharding.data_dimension(partition) - axes_gone
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
        axis_names=set(DATA),
        check_vma=False,  # the loss's loops begin with constants, and differ in length between devices
    )


def _fixed_partitions(fixed: Fixed, own: Partitions) -> Fixed:
    of: Any = {name: own.transposes[name] for name in fixed.transposes}
    return Fixed(None if fixed.base is None else own.base, of)


def _summed(gradient: Tree, of: Tree, *, parts_too: bool) -> Tree:
    """Each device's part of the gradient's sum over devices. parts_too False: only of leaves that are whole on every
    device; where a weight was made whole from parts, the sum came with it."""
    leaves, places = jax.tree.leaves(gradient), [sharding.data_dimension(part) for part in jax.tree.leaves(of)]
    replicated = [leaf for leaf, place in zip(leaves, places, strict=True) if place < 0]
    sums = iter(jax.lax.psum(replicated, DATA))

    def one(leaf: Array, place: int) -> Array:
        if place < 0:
            return next(sums)
        return jax.lax.psum_scatter(leaf, DATA, scatter_dimension=place, tiled=True) if parts_too else leaf

    summed = [one(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(gradient), summed)


def _metrics_summed(metrics: Mapping[str, Array], after: Tree) -> dict[str, Array]:
    """f32[] each, over all rows; in one message. Devices that share rows have the same: of their whole rows.

    after: what is computed before; see `sharding.whole_rows` on messages that don't wait for each other.
    """
    last = [jnp.ravel(leaf)[:1].astype(jnp.float32) for leaf in jax.tree.leaves(after)[:1]]
    sent = jnp.concatenate([jnp.stack([value.astype(jnp.float32) for value in metrics.values()]), *last])
    return dict(zip(metrics, jax.lax.psum(sent, FSDP)[: len(metrics)], strict=True))


ROWS = PartitionSpec(FSDP, SEQUENCE)
"""Where [R, T, ...] of a micro-batch goes, into a program and out of it."""


def placed_batch(batch: MicroBatch, place: Callable[[Any, PartitionSpec], Any]) -> MicroBatch:
    """place(array, where it goes) of each array: its rows' tokens to their devices, but for what all have whole."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        return place(leaf, PartitionSpec(FSDP) if path[0].name in WHOLE_ROWS else ROWS)

    return jax.tree_util.tree_map_with_path(one, batch)


def _apart(batch: MicroBatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a micro-batch that go to `ROWS`, and those of whole rows: two trees with a partition each."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    whole = {name: fields.pop(name) for name in WHOLE_ROWS}
    return fields, whole


_OF_BATCH = (ROWS, PartitionSpec(FSDP))


def _of_outputs(metrics: Any) -> Outputs:
    """Positions stay on the devices that have them; metrics, given here as partitions, are everywhere."""
    rows: Any = ROWS
    return Outputs(rows, rows, rows, metrics)


def _in_rows(flat: Array, batch: MicroBatch) -> Array:
    """A device's positions [N, ...] as its part of the rows, [R, T, ...]."""
    return flat.reshape(*batch.tokens.shape, *flat.shape[1:])


def _outputs_in_rows(outputs: Outputs, batch: MicroBatch, after: Tree = None) -> Outputs:
    logprobs, elementwise, entropy = (_in_rows(flat, batch) for flat in outputs[:3])
    return Outputs(logprobs, elementwise, entropy, _metrics_summed(outputs.metrics, after))


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
    """As `programs.accumulate`; batch is global, and so are its outputs, [R, T, ...], and metrics."""
    own = partitions(spec, over)
    whole = None if over.gather == "step" else _layerwise(spec, own)

    def part(working: Tree, accumulators: Tree, fixed: Fixed, fields: Tree, of_rows: Tree, options: Options):
        batch = MicroBatch(**fields, **of_rows)

        def loss(weights: Tree) -> tuple[Array, Outputs]:
            return programs.loss_and_outputs(spec, loss_name, weights, fixed, batch, options, whole)

        gradient, outputs = jax.grad(loss, has_aux=True)(working)
        if over.gather == "step":
            gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32)[None], gradient)
        else:
            gradient = _summed(gradient, own.trainable, parts_too=False)
        total = jax.tree.map(jnp.add, accumulators, gradient)
        return total, _outputs_in_rows(outputs, batch, gradient)

    sums, rest = _manual(own.accumulators), _manual(_fixed_partitions(fixed, own))
    in_specs = (_manual(own.working), sums, rest, *_OF_BATCH, PartitionSpec())
    mapped = _mapped(part, over, in_specs, (sums, _of_outputs(PartitionSpec())))
    accumulators, outputs = mapped(working, accumulators, fixed, *_apart(batch), options)
    return _constrained(accumulators, own.accumulators, over), _constrained_outputs(outputs, over)


@partial(jax.jit, static_argnames=("spec", "loss_name", "over"))
def score(
    working: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str, over: Over
) -> Outputs:
    """As `accumulate`, without a gradient. working: empty where `fixed.base` is the policy itself."""
    own = partitions(spec, over)
    whole = None if over.gather == "step" else _layerwise(spec, own)

    def part(working: Tree, fixed: Fixed, fields: Tree, of_rows: Tree, options: Options) -> Outputs:
        batch = MicroBatch(**fields, **of_rows)
        outputs = programs.loss_and_outputs(spec, loss_name, working, fixed, batch, options, whole)[1]
        return _outputs_in_rows(outputs, batch)

    weights, rest = _manual(own.working) if working else {}, _manual(_fixed_partitions(fixed, own))
    in_specs = (weights, rest, *_OF_BATCH, PartitionSpec())
    outputs = _mapped(part, over, in_specs, _of_outputs(PartitionSpec()))(working, fixed, *_apart(batch), options)
    return _constrained_outputs(outputs, over)


@partial(jax.jit, static_argnames=("spec", "num_top", "over"))
def likeliest(
    working: Tree, fixed: Fixed, batch: MicroBatch, *, spec: ProgramSpec, num_top: int, over: Over
) -> tuple[Array, Array]:
    """As `programs.likeliest`, [R, T, k]; batch is global, and positions stay on the devices that have them."""
    own = partitions(spec, over)
    whole = None if over.gather == "step" else _layerwise(spec, own)

    def part(working: Tree, fixed: Fixed, fields: Tree, of_rows: Tree) -> tuple[Array, Array]:
        batch = MicroBatch(**fields, **of_rows)
        ids, logprobs = programs.likeliest_tokens(spec, num_top, working, fixed, batch, whole)
        return _in_rows(ids, batch), _in_rows(logprobs, batch)

    in_specs = (_manual(own.working), _manual(_fixed_partitions(fixed, own)), *_OF_BATCH)
    found = _mapped(part, over, in_specs, ROWS)(working, fixed, *_apart(batch))
    return _constrained(found, (ROWS,) * 2, over)


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
    leading = (sharding.num_parts(over.mesh),) if over.gather == "step" else ()
    nothing = jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), trainable)
    return _constrained(nothing, partitions(spec, over).accumulators, over)


@partial(jax.jit, static_argnames=("spec", "over"))
def new_optimizer(trainable: Tree, *, spec: ProgramSpec, over: Over) -> optax.ScaleByAdamState:
    """Adam's state, all zero, each part where its weights are."""
    of = partitions(spec, over).trainable
    return _constrained(programs.init_optimizer(trainable), optax.ScaleByAdamState(_everywhere(), of, of), over)
