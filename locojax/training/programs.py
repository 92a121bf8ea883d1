"""The trainer's compiled programs: add a micro-batch's gradient, score one, update the weights.

Legend: R rows, T tokens of a row, N = R x T, K targets a position, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int

from locojax.models import decoder, sharding
from locojax.models.attention import PackedKernel
from locojax.models.likeliest import likeliest as likeliest_of
from locojax.models.logprobs import target_logprobs
from locojax.models.lora import Adapters, LoraSpec, low_rank
from locojax.models.spec import ModelSpec
from locojax.training.losses import LOSSES, Options

Tree = Any
"""A pytree of arrays."""

HostOrDevice = Any
"""A numpy array, packed on the host; inside a program, jax's."""


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """What a compiled program depends on, besides its arguments' shapes."""

    model: ModelSpec
    lora: LoraSpec | None
    compute_dtype: str
    remat: str
    tile_tokens: int
    with_entropy: bool
    attention: PackedKernel = "plain"
    sequence: int = 1  # devices that a row's tokens are split over


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Packed rows and what the loss reads. Of rows of S tokens, a device may have T: see `ProgramSpec.sequence`.

    Attributes:
      tokens, positions: i32[R, T]; until: i32[R, S]; see `packing.Packed`.
      segments: i32[R, S]: a number below R S for each sequence of these rows; R S for padding and shared tokens.
      targets: i32[R, T, K].
      scored: bool[R, T]: where log-probs are wanted. reads: bool[R, S]: where the loss reads them, a subset.
      inputs: the loss's inputs by name, f32[R, S] (f32[R, S, K] for cross_entropy's weights).
    """

    tokens: Int[HostOrDevice, "R T"]
    positions: Int[HostOrDevice, "R T"]
    until: Int[HostOrDevice, "R S"]
    segments: Int[HostOrDevice, "R S"]
    targets: Int[HostOrDevice, "R T K"]
    scored: Bool[HostOrDevice, "R T"]
    reads: Bool[HostOrDevice, "R S"]
    inputs: Mapping[str, HostOrDevice]


WHOLE_ROWS = ("until", "segments", "reads", "inputs")
"""Fields of `MicroBatch` that every device has of whole rows: what attention and the loss read of them."""


class Outputs(NamedTuple):
    """Per position, flat [N, ...]; metrics are sums over the micro-batch."""

    logprobs: Float[Array, "N K"]
    elementwise: Float[Array, "N K"]
    entropy: Float[Array, " N"]
    metrics: dict[str, Array]


class Fixed(NamedTuple):
    """What a program reads and gives no gradient: LoRA's base (None in full fine-tuning), and transposed weights.

    `transposes` are those of `decoder.transposes`, or empty; see `dense.dense` for what they are good for.
    """

    base: Tree
    transposes: Mapping[str, Array]


class Whole(NamedTuple):
    """How a program that runs on a part of the weights makes them whole.

    Attributes:
      first: of (trainable, fixed), what is made whole before anything else.
      layer: of one layer's weights, what is made whole in its turn.
    """

    first: Callable[[Tree, Fixed], tuple[Tree, Fixed]]
    layer: Callable[[Tree], Tree]


def split(trainable: Tree, fixed: Fixed, lora: LoraSpec | None) -> tuple[Tree, Adapters | None]:
    """(the model's parameters, adapters): all of it is trained, or there is a frozen base, perhaps with adapters."""
    params = trainable if fixed.base is None else fixed.base
    params = {**params, "layers": {**params["layers"], **fixed.transposes}}
    return params, None if lora is None else Adapters(trainable, jnp.asarray(lora.scale, jnp.float32))


@partial(jax.jit, static_argnames=("dtype",))
def transposed(params: Tree, dtype: str) -> dict[str, Array]:
    """`decoder.transposes` in the compute dtype."""
    return {name: leaf.astype(dtype) for name, leaf in decoder.transposes(params).items()}


class BeforeHead(NamedTuple):
    """Final hidden states [N, D], the head [D, V] ([V, D] if tied), and what an adapter adds to it: see `logprobs`."""

    hidden: Array
    head: Array
    low_rank: tuple[Array, Array] | None


def _before_head(
    spec: ProgramSpec,
    trainable: Tree,
    fixed: Fixed,
    batch: MicroBatch,
    temperature: Array | float,
    whole: Whole | None,
) -> BeforeHead:
    if whole is not None:
        trainable, fixed = whole.first(trainable, fixed)
    params, adapters = split(trainable, fixed, spec.lora)
    dtype = jnp.dtype(spec.compute_dtype)
    hidden, _ = decoder.forward(
        params,
        spec.model,
        batch.tokens,
        batch.positions,
        batch.until,
        adapters=adapters,
        dtype=dtype,
        remat=spec.remat,
        whole=None if whole is None else whole.layer,
        kernel=spec.attention,
        parts=spec.sequence,
    )
    hidden = hidden / jnp.asarray(temperature, jnp.float32).astype(dtype)
    head = None if adapters is None else adapters.split()[1]
    flat = hidden.reshape(-1, hidden.shape[-1])
    low_rank_part = None
    if adapters is not None and head is not None:
        low_rank_part = (low_rank(flat, head["a"], adapters.scale, None), head["b"])
    return BeforeHead(flat, params["embed"] if spec.model.tied_embeddings else params["head"], low_rank_part)


def _logprobs(
    spec: ProgramSpec,
    trainable: Tree,
    fixed: Fixed,
    batch: MicroBatch,
    temperature: Array | float,
    whole: Whole | None,
) -> tuple[Array, Array]:
    """Log-probs [N, K] and entropies [N] at the scored positions."""
    found = _before_head(spec, trainable, fixed, batch, temperature, whole)
    return target_logprobs(
        found.hidden,
        found.head,
        batch.targets.reshape(found.hidden.shape[0], -1),
        batch.scored.reshape(-1),
        tile=spec.tile_tokens,
        low_rank=found.low_rank,
        with_entropy=spec.with_entropy,
        train_head=spec.lora is None,
        vocab_first=spec.model.tied_embeddings,
        learning=_own_tokens(spec, batch, batch.reads.reshape(-1)),
    )


def quarantine(logprobs: Array, reads: Array, segments: Array) -> tuple[Array, Array]:
    """(bool[N] positions the loss may read, number of sequences left out).

    A sequence with a log-prob that is not finite is left out whole: half of one is not a sample of anything.
    """
    N = segments.shape[0]
    bad = reads & ~jnp.all(jnp.isfinite(logprobs), axis=-1)
    bad_sequences = jax.ops.segment_max(bad.astype(jnp.int32), segments, num_segments=N) > 0
    on = reads & ~bad_sequences[jnp.minimum(segments, N - 1)]
    return on, jnp.sum(bad_sequences, dtype=jnp.int32)


def _whole_rows(spec: ProgramSpec, batch: MicroBatch, logprobs: Array, entropy: Array) -> tuple[Array, Array]:
    """Of the devices that share these rows, put together in one message: [N, K] and [N] -> [R S, K] and [R S]."""
    if spec.sequence == 1:
        return logprobs, entropy
    both = jnp.concatenate([logprobs, entropy[:, None]], axis=1)
    rows = sharding.whole_rows(both.reshape(*batch.tokens.shape, -1)).reshape(-1, both.shape[1])
    return rows[:, :-1], rows[:, -1]


def _own_tokens(spec: ProgramSpec, batch: MicroBatch, flat: Array) -> Array:
    """[R S, ...] -> this device's [N, ...]."""
    if spec.sequence == 1:
        return flat
    rows = flat.reshape(batch.tokens.shape[0], -1, *flat.shape[1:])
    return sharding.own_tokens(rows, spec.sequence).reshape(-1, *flat.shape[1:])


def loss_and_outputs(
    spec: ProgramSpec,
    loss_name: str,
    trainable: Tree,
    fixed: Fixed,
    batch: MicroBatch,
    options: Options,
    whole: Whole | None = None,
) -> tuple[Array, Outputs]:
    """The summed loss of the micro-batch's tokens here, f32[], and what is reported of each position.

    Metrics are of whole rows.
    A sequence's loss may depend on all of its tokens, so it is computed from whole rows, by every device that has a
    part of them; each takes the sum over its own tokens, whose gradient reaches the others' log-probs too.
    """
    loss = LOSSES[loss_name]
    own_logprobs, own_entropy = _logprobs(spec, trainable, fixed, batch, options.temperature, whole)
    logprobs, entropy = _whole_rows(spec, batch, own_logprobs, own_entropy)
    segments, reads = batch.segments.reshape(-1), batch.reads.reshape(-1)
    on, num_nonfinite = quarantine(logprobs, reads, segments)
    # Selected before anything is computed from them: whatever the others hold reaches neither loss nor gradient.
    lp = jnp.where(on[:, None], logprobs, 0.0)
    inputs = loss.inputs({name: array.reshape(-1, *array.shape[2:]) for name, array in batch.inputs.items()})
    result = loss.function(lp if loss.multi_target else lp[:, 0], on, inputs, segments, options)
    own = _own_tokens(spec, batch, result.elementwise)
    metrics = {
        **result.metrics,
        "loss": jnp.sum(result.elementwise),
        "num_tokens": jnp.sum(on, dtype=jnp.int32),
        "num_nonfinite": num_nonfinite,
    }
    if spec.with_entropy:
        metrics["entropy"] = jnp.sum(jnp.where(on, entropy, 0.0))
    return jnp.sum(own), Outputs(own_logprobs, own.reshape(own_logprobs.shape[0], -1), own_entropy, metrics)


@partial(jax.jit, static_argnames=("spec", "loss_name"), donate_argnames=("accumulators",))
def accumulate(
    trainable: Tree,
    accumulators: Tree,
    fixed: Fixed,
    batch: MicroBatch,
    options: Options,
    *,
    spec: ProgramSpec,
    loss_name: str,
) -> tuple[Tree, Outputs]:
    """Adds the micro-batch's gradient to the fp32 accumulators, which are donated."""
    gradient, outputs = jax.grad(loss_and_outputs, argnums=2, has_aux=True)(
        spec, loss_name, trainable, fixed, batch, options
    )
    return jax.tree.map(jnp.add, accumulators, gradient), outputs


@partial(jax.jit, static_argnames=("spec", "loss_name"))
def score(
    trainable: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str
) -> Outputs:
    """As `accumulate`, without a gradient."""
    return loss_and_outputs(spec, loss_name, trainable, fixed, batch, options)[1]


def likeliest_tokens(
    spec: ProgramSpec, num_top: int, trainable: Tree, fixed: Fixed, batch: MicroBatch, whole: Whole | None = None
) -> tuple[Array, Array]:
    """Ids i32[N, k] and log-probs f32[N, k] of the likeliest next tokens, at every position."""
    found = _before_head(spec, trainable, fixed, batch, 1.0, whole)
    return likeliest_of(
        found.hidden, found.head, num_top=num_top, tile=spec.tile_tokens, low_rank=found.low_rank,
        vocab_first=spec.model.tied_embeddings,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("spec", "num_top"))
def likeliest(
    trainable: Tree, fixed: Fixed, batch: MicroBatch, *, spec: ProgramSpec, num_top: int
) -> tuple[Array, Array]:
    """See `likeliest_tokens`."""
    return likeliest_tokens(spec, num_top, trainable, fixed, batch)


class Hyper(NamedTuple):
    """AdamW's settings of one step: f32[] arguments of the program, so that a change compiles nothing."""

    learning_rate: Array | np.float32
    beta1: Array | np.float32
    beta2: Array | np.float32
    eps: Array | np.float32
    weight_decay: Array | np.float32
    grad_clip_norm: Array | np.float32


class Updated(NamedTuple):
    """The next trainable tree, optimizer state and (zero) accumulators; whether applied; the gradient's norm."""

    trainable: Tree
    optimizer: optax.ScaleByAdamState
    accumulators: Tree
    applied: Array
    grad_norm: Array


def init_optimizer(trainable: Tree) -> optax.ScaleByAdamState:
    """Adam's state of a tree of weights, all zero."""
    return optax.scale_by_adam().init(trainable)


@partial(jax.jit, donate_argnames=("trainable", "optimizer", "accumulators"))
def update(trainable: Tree, optimizer: optax.ScaleByAdamState, accumulators: Tree, hyper: Hyper) -> Updated:
    """One AdamW step (Loshchilov & Hutter 2019) on the accumulated gradient; all trees are donated.

    Weight decay is decoupled and on every trainable leaf, as torch.optim.AdamW's is. The gradient is scaled down to
    the global norm `grad_clip_norm` if that is above 0. If its norm is not finite, weights and state stay as they are.
    """
    grad_norm = optax.tree.norm(accumulators)
    applied = jnp.isfinite(grad_norm)
    is_over = (hyper.grad_clip_norm > 0) & (grad_norm > hyper.grad_clip_norm)
    scale = jnp.where(is_over, hyper.grad_clip_norm / grad_norm, 1.0)
    gradient = jax.tree.map(lambda g: g * scale, accumulators)
    adam = optax.scale_by_adam(b1=hyper.beta1, b2=hyper.beta2, eps=hyper.eps)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to its integer count
        direction, next_optimizer = adam.update(gradient, optimizer)

    def step(weight: Array, towards: Array) -> Array:
        return weight - hyper.learning_rate * (towards + hyper.weight_decay * weight)

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(applied, new, old)

    return Updated(
        trainable=jax.tree.map(lambda w, d: keep(step(w, d), w), trainable, direction),
        optimizer=jax.tree.map(keep, next_optimizer, optimizer),
        accumulators=jax.tree.map(jnp.zeros_like, accumulators),
        applied=applied,
        grad_norm=grad_norm,
    )
