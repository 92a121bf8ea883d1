"""Fused linear cross-entropy: log-probs of given tokens, and entropy, without ever holding [tokens, vocab].

RL batches carry no loss on their prompts, so the head, a fifth of a small model, runs only where a log-prob is asked
for: positions are ordered by need, and a loop whose trip count follows their number works through tiles of them. Where
the model is narrow, a tile goes through the vocabulary in chunks that stay in the processor's cache, with a running
maximum and normalizer (Milakov & Gimelshein 2018). The logits of a tile and a chunk are the largest temporary, forward
and backward.

Shape letters: N positions (rows x tokens of a micro-batch, flat), D hidden, V vocab, K targets a position, r rank,
M = tile, C = chunk.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from locojax.models.unembedding import LOWEST, Chunk, Head, chunk_size


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when the program is compiled.

    Attributes:
      tile: positions a trip of the loop. chunk: vocabulary entries a trip of the loop inside it.
      entropy: return it, and let gradients through it.
      train_head: the head needs a gradient.
      vocab_first: the head is [V, D], as a tied embedding is; transposing it would copy it.
    """

    tile: int
    chunk: int
    entropy: bool
    train_head: bool
    vocab_first: bool

    def linear_in_cotangent(self, low_rank: tuple[Array, Array] | None, num_targets: int) -> bool:
        """Whether d(hidden) is (cotangent of the log-prob) x (a vector known in the forward pass).

        It is for one target, no entropy gradient and a frozen head: (onehot - softmax) @ head.T. Made there, the
        backward pass need not compute the logits again: 4 instead of 6 times 2NDV flops in all.
        """
        return not self.train_head and not self.entropy and low_rank is None and num_targets == 1


def target_logprobs(
    hidden: Float[Array, "N D"],
    head: Float[Array, "A B"],
    targets: Int[Array, "N K"],
    active: Bool[Array, " N"],
    *,
    tile: int,
    low_rank: tuple[Float[Array, "N r"], Float[Array, "r V"]] | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    train_head: bool = True,
    vocab_first: bool = False,
    learning: Bool[Array, " N"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "N K"], Float[Array, " N"]]:
    """log softmax(hidden @ head)[targets], and the softmax's entropy, at the active positions; 0 at the others.

    Logits are accumulated in fp32 from operands of `hidden`'s dtype. For a temperature T, pass hidden / T (and the
    low-rank inner part / T): log-probs are then of the tempered distribution. Hidden states of inactive positions are
    never read: whatever they hold, NaN included, doesn't matter, and they get a gradient of exactly 0.

    Args:
      hidden: final hidden states, after the last norm.
      head: the unembedding, [D, V], or [V, D] with `vocab_first`; cast to `hidden`'s dtype.
      targets: token ids in [0, V).
      active: where log-probs are wanted.
      tile: positions worked on at a time; logits take at most tile x V x 4 bytes.
      low_rank: (inner, b): `inner @ b` is added to the logits: a LoRA adapter of the head. Both get gradients.
      with_entropy: also the entropy in nats, f32[N]; else zeros.
      entropy_gradient: let gradients through the entropy. Off, it is a measurement behind a stop_gradient, and costs
        no GEMM.
      train_head: False: the head's gradient is not computed and is zero (frozen base).
      learning: the active positions that may get a gradient, when fewer than all; the others' cotangents are dropped.
      chunk: vocabulary entries worked on at a time; chosen by the shapes if None.
    """
    weight = head.astype(hidden.dtype)
    V, D = head.shape if vocab_first else head.shape[::-1]
    chunk = min(V, chunk or chunk_size(V, D, tile))
    plan = _Plan(tile, chunk, with_entropy and entropy_gradient, train_head, vocab_first)
    if not train_head:
        weight = jax.lax.stop_gradient(weight)
    learning = active if learning is None else learning & active
    logprobs, entropy = _fused(plan, with_entropy, hidden, weight, low_rank, targets, active, learning)
    return logprobs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)


def target_logprobs_plain(
    hidden: Float[Array, "N D"],
    head: Float[Array, "A B"],
    targets: Int[Array, "N K"],
    active: Bool[Array, " N"],
    *,
    low_rank: tuple[Float[Array, "N r"], Float[Array, "r V"]] | None = None,
    vocab_first: bool = False,
) -> tuple[Float[Array, "N K"], Float[Array, " N"]]:
    """The plain twin of `target_logprobs`: holds [N, V], and is differentiated by jax. For tests."""
    hidden = jnp.where(active[:, None], hidden, 0)
    weight = (head.T if vocab_first else head).astype(hidden.dtype)
    logits = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)
    if low_rank is not None:
        inner, b = (leaf.astype(hidden.dtype) for leaf in low_rank)
        logits = logits + jnp.matmul(inner, b, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits, axis=-1)
    logprobs = jnp.take_along_axis(logp, targets, axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.where(active[:, None], logprobs, 0.0), jnp.where(active, entropy, 0.0)


def positions_in_order(first: Array, second: Array, tile: int) -> tuple[Array, Array, Array]:
    """Positions in the order first, second, rest, padded by a tile of N (which scatters drop); and the two counts.

    `first` implies `second`. Returns (i32[N + tile], number in first, number in second).
    """
    N = first.shape[0]
    then = second & ~first
    num_first = jnp.sum(first, dtype=jnp.int32)
    # By counting: a sort would take a TPU's compiler seconds.
    places = jnp.where(first, jnp.cumsum(first, dtype=jnp.int32) - 1, N + tile)
    places = jnp.where(then, num_first + jnp.cumsum(then, dtype=jnp.int32) - 1, places)
    order = jnp.full(N + tile, N, jnp.int32).at[places].set(jnp.arange(N, dtype=jnp.int32), mode="drop")
    return order, num_first, jnp.sum(second, dtype=jnp.int32)


def taken(array: Array, index: Array) -> Array:
    """Rows of `array`; zeros for an index of N. The select keeps whatever row a clipped gather read out of it."""
    valid = (index < array.shape[0]).reshape((-1,) + (1,) * (array.ndim - 1))
    return jnp.where(valid, jnp.take(array, index, axis=0, mode="clip"), 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(plan, with_entropy, hidden, weight, low_rank, targets, active, learning):
    return _forward(plan, with_entropy, False, hidden, weight, low_rank, targets, active, learning)[:2]


def _head_and_inner(plan: _Plan, weight: Array, low_rank: tuple[Array, Array] | None) -> tuple[Head, Array | None]:
    inner, b = (None, None) if low_rank is None else low_rank
    return Head(weight, b, plan.vocab_first, plan.chunk), inner


class _Found(NamedTuple):
    """What one pass over the vocabulary finds of M positions.

    Attributes:
      picked: f32[M, K], the targets' logits. top, total: f32[M], the largest logit, and the sum of exp(logit - top).
      weighted: f32[M], the sum of exp(logit - top) x logit, or 0.
      rows: f32[M, D], the sum of exp(logit - top) x head row, or f32[M, 0]. The likeliest entry's factor is 1 in any
        type: where it is the target and nearly sure, target row - rows / total keeps what little is left.
    """

    picked: Array
    top: Array
    total: Array
    weighted: Array
    rows: Array

    @property
    def log_norm(self) -> Array:
        return self.top + jnp.log(self.total)


def _pass_over(head: Head, inputs: tuple[Array, ...], targets: Array, with_entropy: bool, with_rows: bool) -> _Found:
    M, D = inputs[0].shape

    def one(chunk: Chunk, found: _Found) -> _Found:
        logits = chunk.logits(inputs)
        at, here = chunk.place(targets)
        picked = jnp.take_along_axis(logits, at, axis=-1, mode="clip")
        top = jnp.maximum(found.top, jnp.max(logits, axis=-1))
        exped = jnp.exp(logits - top[:, None])
        before = jnp.exp(found.top - top)
        total = found.total * before + jnp.sum(exped, axis=-1)
        weighted, rows = found.weighted, found.rows
        if with_entropy:
            weighted = weighted * before + jnp.sum(exped * logits, axis=-1)
        if with_rows:
            rows = rows * before[:, None] + chunk.to_inputs(exped.astype(inputs[0].dtype))[0]
        return _Found(jnp.where(here, picked, found.picked), top, total, weighted, rows)

    zeros = jnp.zeros(M, jnp.float32)
    nothing = _Found(
        jnp.zeros(targets.shape, jnp.float32), zeros + LOWEST, zeros, zeros, jnp.zeros((M, D if with_rows else 0))
    )
    return head.each_chunk(one, nothing)


def _forward(plan, with_entropy, keep_slope, hidden, weight, low_rank, targets, active, learning):
    """Log-probs [N, K], entropy [N], log-normalizers [N] and, with `keep_slope`, (onehot - softmax) @ head.T [N, D]
    where learning."""
    N, D = hidden.shape
    M = plan.tile
    order, num_learning, num_active = positions_in_order(learning, active, M)
    head, inner = _head_and_inner(plan, weight, low_rank)

    def tile_step(i, carry, slope_too):
        logprobs, entropy, log_norms, slope = carry
        index = jax.lax.dynamic_slice_in_dim(order, i * M, M)
        wanted = taken(targets, index)
        inputs = head.inputs(taken(hidden, index), None if inner is None else taken(inner, index))
        found = _pass_over(head, inputs, wanted, with_entropy, slope_too)
        picked = found.picked - found.log_norm[:, None]
        logprobs = logprobs.at[index].set(picked, mode="drop")
        log_norms = log_norms.at[index].set(found.log_norm, mode="drop")
        if with_entropy:
            # H = log Z - E[logit]
            entropy = entropy.at[index].set(found.log_norm - found.weighted / found.total, mode="drop")
        if slope_too:
            target_rows = jnp.take(weight, wanted[:, 0], axis=0 if plan.vocab_first else 1)
            target_rows = (target_rows if plan.vocab_first else target_rows.T).astype(jnp.float32)
            rows = target_rows - found.rows / found.total[:, None]
            slope = slope.at[index].set(rows.astype(slope.dtype), mode="drop")
        return logprobs, entropy, log_norms, slope

    zeros = jnp.zeros((N,), jnp.float32)
    slope = jnp.zeros((N, D) if keep_slope else (0, D), hidden.dtype)
    carry = (jnp.zeros(targets.shape, jnp.float32), zeros, zeros, slope)
    start = jnp.zeros((), jnp.int32)
    if keep_slope:
        start = -(-num_learning // M)
        carry = jax.lax.fori_loop(0, start, partial(tile_step, slope_too=True), carry)
    return jax.lax.fori_loop(start, -(-num_active // M), partial(tile_step, slope_too=False), carry)


def _fused_fwd(plan, with_entropy, hidden, weight, low_rank, targets, active, learning):
    keep_slope = plan.linear_in_cotangent(low_rank, targets.shape[1])
    logprobs, entropy, log_norms, slope = _forward(
        plan, with_entropy, keep_slope, hidden, weight, low_rank, targets, active, learning
    )
    if keep_slope:
        return (logprobs, entropy), (slope, weight, learning)
    return (logprobs, entropy), (hidden, weight, low_rank, targets, learning, log_norms, entropy)


def _fused_bwd(plan, with_entropy, kept, cotangents):
    if len(kept) == 3:
        slope, weight, learning = kept
        # A cotangent of 0 selects: a quarantined position's slope may be NaN.
        g = jnp.where(learning[:, None], cotangents[0], 0)
        d_hidden = jnp.where(g == 0, 0, slope.astype(jnp.float32) * g).astype(slope.dtype)
        return d_hidden, jnp.zeros_like(weight), None, None, None, None
    return (*_backward(plan, *kept, *cotangents), None, None, None)


class _Cotangents(NamedTuple):
    """Of M positions: the log-probs' f32[M, K] and the entropy's f32[M]; and what the forward pass found, f32[M]."""

    logprobs: Array
    of_entropy: Array
    log_norm: Array
    entropy: Array


def _d_logits(plan: _Plan, chunk: Chunk, logits: Array, targets: Array, known: _Cotangents) -> Array:
    """f32[M, C]: sum over targets of g (onehot - softmax), and the entropy's part."""
    probs = jnp.exp(logits - known.log_norm[:, None])
    if chunk.new is not None:
        probs = jnp.where(chunk.new, probs, 0.0)
    g = jnp.sum(known.logprobs, axis=-1)
    if targets.shape[1] == 1:  # selected, so that it fuses: a scatter would go through all of it once more
        # 1 - p before rounding: in a narrow type a p near 1 is 1.
        d = jnp.where(chunk.is_target(targets[:, 0]), 1.0 - probs, -probs) * g[:, None]
    else:
        positions = jnp.arange(targets.shape[0], dtype=jnp.int32)[:, None]
        d = (-g[:, None] * probs).at[positions, chunk.place(targets)[0]].add(known.logprobs, mode="drop")
    if plan.entropy:  # log p - E[log p], and E[log p] is -H
        d = d - known.of_entropy[:, None] * probs * (logits - known.log_norm[:, None] + known.entropy[:, None])
    return d


def _backward(plan, hidden, weight, low_rank, targets, learning, log_norms, entropies, g, g_entropy):
    """Gradients of hidden, head and low_rank: logits again, tile by tile, where a cotangent isn't 0."""
    M = plan.tile
    needed = jnp.any(g != 0, axis=-1)
    if plan.entropy:
        needed = needed | (g_entropy != 0)
    needed = needed & learning
    order, num_needed, _ = positions_in_order(needed, needed, M)
    head, inner = _head_and_inner(plan, weight, low_rank)

    def tile_step(i, carry):
        d_hidden, d_weight, d_low_rank = carry
        index = jax.lax.dynamic_slice_in_dim(order, i * M, M)
        x, wanted = taken(hidden, index), taken(targets, index)
        x_inner = None if inner is None else taken(inner, index).astype(hidden.dtype)
        inputs = head.inputs(x, x_inner)
        known = _Cotangents(*(taken(each, index) for each in (g, g_entropy, log_norms, entropies)))

        def one(chunk, carry):
            d_inputs, d_weight, d_b = carry
            d = _d_logits(plan, chunk, chunk.logits(inputs), wanted, known).astype(hidden.dtype)
            d_inputs = tuple(map(jnp.add, d_inputs, chunk.to_inputs(d)))
            if plan.train_head:
                pattern, axis = ("mv,md->vd", 0) if plan.vocab_first else ("md,mv->dv", 1)
                operands = (d, x) if plan.vocab_first else (x, d)
                part = jnp.einsum(pattern, *operands, preferred_element_type=jnp.float32)
                d_weight = head.add(d_weight, part, chunk.start, axis)
            if x_inner is not None:
                part = jnp.einsum("mr,mv->rv", x_inner, d, preferred_element_type=jnp.float32)
                d_b = head.add(d_b, part, chunk.start, 1)
            return d_inputs, d_weight, d_b

        start = (tuple(jnp.zeros(each.shape, jnp.float32) for each in inputs), d_weight, d_low_rank[1])
        d_inputs, d_weight, d_b = head.each_chunk(one, start)
        d_x, d_inner = head.apart(d_inputs)
        d_hidden = d_hidden.at[index].set(d_x.astype(hidden.dtype), mode="drop")
        if d_inner is not None:
            d_inner = d_low_rank[0].at[index].set(d_inner.astype(d_low_rank[0].dtype), mode="drop")
        return d_hidden, d_weight, (d_inner, d_b)

    d_low_rank: Any = (None, None)
    if low_rank is not None:
        d_low_rank = (jnp.zeros_like(low_rank[0]), jnp.zeros(low_rank[1].shape, jnp.float32))
    # The head's gradient is summed over tiles in fp32, whatever the compute dtype.
    d_weight = jnp.zeros(weight.shape if plan.train_head else (), jnp.float32)
    carry = (jnp.zeros_like(hidden), d_weight, d_low_rank)
    d_hidden, d_weight, d_low_rank = jax.lax.fori_loop(0, -(-num_needed // M), tile_step, carry)
    d_weight = d_weight.astype(weight.dtype) if plan.train_head else jnp.zeros_like(weight)
    if low_rank is None:
        return d_hidden, d_weight, None
    return d_hidden, d_weight, (d_low_rank[0], d_low_rank[1].astype(low_rank[1].dtype))


_fused.defvjp(_fused_fwd, _fused_bwd)
