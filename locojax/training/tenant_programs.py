"""The tenants' compiled programs: a micro-batch whose rows have adapters of their own, and one adapter's update.

A row is its own world: it reads its own adapter's copy, its head and its loss run by themselves (a loop over rows, a
branch by the row's loss), its gradient comes out apart and is added to its own slot's accumulators, in the order of
rows. Rows meet only in products with the frozen base, where each is a line of its own. So no value of one row can reach
another's, NaN included, and one program serves every mix of adapters, losses and settings.

Legend: S slots, L layers, R rows, T tokens of a row, K targets a position, D hidden, V vocab, r the largest rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from locojax.models import decoder
from locojax.models.logprobs import target_logprobs
from locojax.models.lora import HEAD, Adapters, empty_stack, stack_axis
from locojax.models.packed_logprobs import packed_target_logprobs, suits
from locojax.models.spec import ModelSpec
from locojax.training import programs
from locojax.training.losses import LOSSES, Loss, LossOutput
from locojax.training.programs import Fixed, HostOrDevice, Hyper, MicroBatch, Outputs, ProgramSpec, Tree, quarantine

WEIGHTS = "weights"

PACKED_HEAD = "packed_head"
"""In the base's tree, the unembedding for the C++ kernels, where they are used."""

POLICY_INPUTS = ("logprobs", "advantages", "old_logprobs", "sequence_ratio_mask")
"""Inputs that every row carries, f32[R, T], whatever its loss; besides `weights` f32[R, T, K]."""

OPTIONS = ("temperature", "clip_low_threshold", "clip_high_threshold", "beta", "ratio_cap", "kl_coeff")
"""Settings of losses that a row may choose, in the order of `Rows.options`."""


class Bank(NamedTuple):
    """All that is kept of the adapters: stacked trees as `lora.empty_stack` lays them out, fp32; steps i32[S]: Adam's.

    Columns beyond an adapter's own rank, and modules that it doesn't adapt, hold 0.
    """

    weights: Tree
    mu: Tree
    nu: Tree
    accumulators: Tree
    steps: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """A micro-batch of rows that each have an adapter, a loss and settings of their own; the unused ones come last.

    Attributes:
      batch: segments are numbered within a row, T at padding; inputs are POLICY_INPUTS and `weights`.
      slots: i32[R]. scale: f32[R], of the row's adapter. adapts_head: bool[R].
      losses: i32[R], places in LOSSES. options: f32[R, len(OPTIONS)].
      num_used: i32[].
    """

    batch: MicroBatch
    slots: Int[HostOrDevice, " R"]
    scale: Float[HostOrDevice, " R"]
    adapts_head: Bool[HostOrDevice, " R"]
    losses: Int[HostOrDevice, " R"]
    options: Float[HostOrDevice, "R O"]
    num_used: HostOrDevice


def empty_bank(spec: ModelSpec, max_adapters: int, max_rank: int) -> Bank:
    """All slots free, each tree with memory of its own."""
    weights, mu, nu, accumulators = (empty_stack(spec, max_rank, max_adapters, jnp.float32).tree for _ in range(4))
    return Bank(weights, mu, nu, accumulators, jnp.zeros(max_adapters, jnp.int32))


def metric_names() -> dict[str, tuple[str, ...]]:
    """The sums that each loss reports of itself."""
    f32, i32 = (partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    inputs = {name: f32((1,)) for name in POLICY_INPUTS} | {WEIGHTS: f32((1, 1))}
    on = jax.ShapeDtypeStruct((1,), jnp.bool_)
    arguments = (f32((1, 1)), on, inputs, i32((1,)), f32((len(OPTIONS),)))
    return {name: tuple(jax.eval_shape(partial(_apply_loss, loss), *arguments)[1]) for name, loss in LOSSES.items()}


def _apply_loss(
    loss: Loss, lp: Array, on: Array, inputs: Mapping[str, Array], segments: Array, options: Array
) -> tuple[Array, dict[str, Array]]:
    """One loss on a row: lp [T, K] -> elementwise [T, K], and its metrics."""
    chosen = {
        field.name: options[OPTIONS.index(field.name)]
        for field in dataclasses.fields(loss.options)
        if field.name in OPTIONS
    }
    settings = loss.options(**chosen)
    if loss.multi_target:
        result: LossOutput = loss.function(lp, on, loss.inputs({WEIGHTS: inputs[WEIGHTS]}), segments, settings)
        return result.elementwise, result.metrics
    typed = loss.inputs({**{name: inputs[name] for name in POLICY_INPUTS}, WEIGHTS: inputs[WEIGHTS][:, 0]})
    result = loss.function(lp[:, 0], on, typed, segments, settings)
    return jnp.pad(result.elementwise[:, None], ((0, 0), (0, lp.shape[1] - 1))), result.metrics


def _branch(
    loss: Loss,
    names: tuple[str, ...],
    lp: Array,
    on: Array,
    inputs: Mapping[str, Array],
    segments: Array,
    options: Array,
) -> tuple[Array, dict[str, Array]]:
    """`_apply_loss` with every loss's metrics, 0 for those of others: the branches of a switch are alike."""
    elementwise, metrics = _apply_loss(loss, lp, on, inputs, segments, options)
    zero = jnp.zeros((), jnp.float32)
    return elementwise, {name: metrics.get(name, zero) for name in names}


class _Row(NamedTuple):
    """What the head and the loss read of one row of `Rows`: without the axis R."""

    targets: Array
    scored: Array
    reads: Array
    segments: Array
    inputs: Mapping[str, Array]
    loss: Array
    options: Array
    scale: Array


def _row_loss(
    spec: ProgramSpec, params: Tree, hidden: Array, head: Mapping[str, Array] | None, row: _Row
) -> tuple[Array, Outputs]:
    """The row's summed loss and what is reported of it. hidden [T, D]; head: its adapter's part, a [D, r], b [r, V]."""
    temperature = row.options[OPTIONS.index("temperature")]
    hidden = hidden / temperature.astype(hidden.dtype)
    low_rank = None
    if head is not None:
        low_rank = ((hidden @ head["a"].astype(hidden.dtype)) * row.scale.astype(hidden.dtype), head["b"])
    logprobs, entropy = _logprobs(spec, params, hidden, low_rank, row)
    on, num_nonfinite = quarantine(logprobs, row.reads, row.segments)
    lp = jnp.where(on[:, None], logprobs, 0.0)
    names = tuple(sorted({name for own in metric_names().values() for name in own}))
    branches = [partial(_branch, loss, names) for loss in LOSSES.values()]
    elementwise, sums = jax.lax.switch(row.loss, branches, lp, on, row.inputs, row.segments, row.options)
    total = jnp.sum(elementwise)
    metrics = {
        **sums,
        "loss": total,
        "num_tokens": jnp.sum(on, dtype=jnp.int32),
        "num_nonfinite": num_nonfinite,
        "entropy": jnp.sum(jnp.where(on, entropy, 0.0)),
    }
    return total, Outputs(logprobs, elementwise, entropy, metrics)


def _logprobs(
    spec: ProgramSpec, params: Tree, hidden: Array, low_rank: tuple[Array, Array] | None, row: _Row
) -> tuple[Array, Array]:
    """Of the row's targets [T, K], and the entropy [T] or zeros."""
    packed = params.get(PACKED_HEAD)
    if suits(packed, low_rank, row.targets.shape[1]) and not spec.with_entropy:
        found = packed_target_logprobs(hidden, packed, low_rank, row.targets, row.scored, row.reads)
        return found, jnp.zeros(found.shape[0], jnp.float32)
    return target_logprobs(
        hidden,
        params["embed"] if spec.model.tied_embeddings else params["head"],
        row.targets,
        row.scored,
        tile=min(spec.tile_tokens, hidden.shape[0]),
        low_rank=low_rank,
        with_entropy=spec.with_entropy,
        train_head=False,
        vocab_first=spec.model.tied_embeddings,
        learning=row.reads,
    )


def _forward(spec: ProgramSpec, layers: Tree, params: Tree, rows: Rows) -> Array:
    """Final hidden states [R, T, D]; layers: the adapters' part, one for each row."""
    batch = rows.batch
    hidden, _ = decoder.forward(
        params,
        spec.model,
        batch.tokens,
        batch.positions,
        batch.until,
        adapters=Adapters(layers, rows.scale, lengths=_lengths(batch)),
        dtype=jnp.dtype(spec.compute_dtype),
        remat=spec.remat,
        kernel=spec.attention,
    )
    return hidden


def _lengths(batch: MicroBatch) -> Int[Array, " R"]:
    """Tokens of each row up to the last that belongs to a datum or is seen by one: what comes after them is padding."""
    T = batch.tokens.shape[1]
    end = jnp.arange(1, T + 1, dtype=jnp.int32)[None]
    counts = (batch.segments < T) | (batch.until > end) | batch.scored
    return jnp.max(jnp.where(counts, end, 0), axis=1)


def _own(weights: Tree, slots: Array) -> Tree:
    """The layers' adapters of each row: [L, S, ...] -> [L, R, ...]."""
    layers = {module: parts for module, parts in weights.items() if module != HEAD}
    return jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=stack_axis(""), mode="clip"), layers)


def _take(tree: Tree, slot: Array) -> Tree:
    """One adapter out of a stacked tree."""
    return {
        module: {name: jax.lax.dynamic_index_in_dim(leaf, slot, stack_axis(module), False) for name, leaf in p.items()}
        for module, p in tree.items()
    }


def _put(tree: Tree, slot: Array, own: Tree) -> Tree:
    """The stacked tree with one adapter replaced."""
    return {
        module: {
            name: jax.lax.dynamic_update_index_in_dim(leaf, own[module][name], slot, stack_axis(module))
            for name, leaf in parts.items()
        }
        for module, parts in tree.items()
    }


def _put_all(bank: Bank, slot: Array, weights: Tree, mu: Tree, nu: Tree, accumulators: Tree, *, steps: Array) -> Bank:
    """The bank with all of one slot replaced."""
    return Bank(
        _put(bank.weights, slot, weights),
        _put(bank.mu, slot, mu),
        _put(bank.nu, slot, nu),
        _put(bank.accumulators, slot, accumulators),
        bank.steps.at[slot].set(steps),
    )


def _each_row(rows: Rows) -> _Row:
    batch = rows.batch
    own = (batch.targets, batch.scored, batch.reads, batch.segments, batch.inputs)
    return _Row(*own, rows.losses, rows.options, rows.scale)


@partial(jax.jit, static_argnames=("spec",), donate_argnames=("accumulators",))
def accumulate(
    weights: Tree, accumulators: Tree, fixed: Fixed, rows: Rows, *, spec: ProgramSpec
) -> tuple[Tree, Outputs]:
    """Adds each used row's gradient to its slot's accumulators, which are donated, row after row.

    Outputs have a leading R: logprobs [R, T, K], ..., metrics [R].
    """
    params = {**fixed.base, "layers": {**fixed.base["layers"], **fixed.transposes}}
    hidden, pull = jax.vjp(lambda layers: _forward(spec, layers, params, rows), _own(weights, rows.slots))

    def with_head(x: Array, slot: Array, row: _Row) -> tuple[Array, Tree, Outputs]:
        head = _take({HEAD: weights[HEAD]}, slot)[HEAD]
        loss = jax.grad(lambda x, head: _row_loss(spec, params, x, head, row), argnums=(0, 1), has_aux=True)
        (d_x, d_head), outputs = loss(x, head)
        return d_x, d_head, outputs

    def without_head(x: Array, slot: Array, row: _Row) -> tuple[Array, Tree, Outputs]:
        d_x, outputs = jax.grad(lambda x: _row_loss(spec, params, x, None, row), has_aux=True)(x)
        return d_x, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), weights[HEAD]), outputs

    def one(row: tuple[Array, Array, Array, _Row]) -> tuple[Array, Tree, Outputs]:
        adapts_head, *rest = row
        return jax.lax.cond(adapts_head, with_head, without_head, *rest)

    d_hidden, d_head, outputs = jax.lax.map(one, (rows.adapts_head, hidden, rows.slots, _each_row(rows)))
    (d_layers,) = pull(d_hidden)
    gradient = {**d_layers, HEAD: d_head}

    def add(r: Array, accumulators: Tree) -> Tree:
        slot = rows.slots[r]
        return _put(accumulators, slot, jax.tree.map(jnp.add, _take(accumulators, slot), _take(gradient, r)))

    return jax.lax.fori_loop(0, rows.num_used, add, accumulators), outputs


@partial(jax.jit, static_argnames=("spec",))
def score(weights: Tree, fixed: Fixed, rows: Rows, *, spec: ProgramSpec) -> Outputs:
    """As `accumulate`, without a gradient."""
    hidden = _forward(spec, _own(weights, rows.slots), fixed.base, rows)

    def one(row: tuple[Array, Array, Array, _Row]) -> Outputs:
        adapts_head, x, slot, row_itself = row
        return jax.lax.cond(
            adapts_head,
            lambda: _row_loss(spec, fixed.base, x, _take({HEAD: weights[HEAD]}, slot)[HEAD], row_itself)[1],
            lambda: _row_loss(spec, fixed.base, x, None, row_itself)[1],
        )

    return jax.lax.map(one, (rows.adapts_head, hidden, rows.slots, _each_row(rows)))


@partial(jax.jit, donate_argnames=("bank",))
def update(bank: Bank, slot: Array, ranks: Mapping[str, Array], hyper: Hyper) -> tuple[Bank, Array, Array]:
    """`programs.update` on one slot; (the bank, whether applied, the gradient's norm). The bank is donated.

    ranks: i32[] by module, 0 where the adapter has none of it. What is beyond them is selected to be 0, so that no
    setting (an eps of 0: 0 / 0) can make anything of it.
    """
    # The barriers make the slot's part an array of its own, read before anything is written: without them XLA fuses
    # reads into writes and must then copy the whole bank.
    weights, mu, nu, gradient = jax.lax.optimization_barrier([_take(tree, slot) for tree in bank[:4]])
    state = optax.ScaleByAdamState(bank.steps[slot], mu, nu)
    updated = programs.update(weights, state, _within(gradient, ranks), hyper)
    new = (updated.trainable, updated.optimizer.mu, updated.optimizer.nu, updated.accumulators)
    new = jax.lax.optimization_barrier([_within(tree, ranks) for tree in new])
    bank = _put_all(bank, slot, *new, steps=updated.optimizer.count)
    return bank, updated.applied, updated.grad_norm


def _within(tree: Tree, ranks: Mapping[str, Array]) -> Tree:
    """The tree with 0 beyond each module's rank; a [..., r], b [..., r, out]."""

    def select(leaf: Array, rank: Array, axis: int) -> Array:
        column = jax.lax.broadcasted_iota(jnp.int32, leaf.shape, leaf.ndim + axis)
        return jnp.where(column < rank, leaf, 0.0)

    return {
        module: {"a": select(parts["a"], ranks[module], -1), "b": select(parts["b"], ranks[module], -2)}
        for module, parts in tree.items()
    }


@partial(jax.jit, donate_argnames=("bank",))
def write(bank: Bank, slot: Array, weights: Tree, mu: Tree, nu: Tree, steps: Array) -> Bank:
    """One slot's weights and Adam state, at the largest rank; nothing accumulated. The bank is donated."""
    nothing = jax.tree.map(jnp.zeros_like, weights)
    return _put_all(bank, slot, weights, mu, nu, nothing, steps=steps)


@partial(jax.jit, static_argnames=("dtype",))
def read(tree: Tree, slot: Array, *, dtype: str) -> Tree:
    """One adapter out of a stacked tree, at the largest rank, in that dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), _take(tree, slot))


@partial(jax.jit, donate_argnames=("tree",))
def clear(tree: Tree, slot: Array) -> Tree:
    """The stacked tree with one slot 0. The tree is donated."""
    return _put(tree, slot, jax.tree.map(jnp.zeros_like, _take(tree, slot)))
