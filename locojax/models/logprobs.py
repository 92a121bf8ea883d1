"""Fused linear cross-entropy: log-probs of given tokens, and entropy, without ever holding [tokens, vocab].

RL batches carry no loss on their prompts, so the head, a fifth of a small model, runs only where a log-prob is asked
for: positions are ordered by need, and a loop whose trip count follows their number works through tiles of them. A
tile's logits, [tile, V], are the largest temporary, forward and backward.

Shape letters: N positions (rows x tokens of a micro-batch, flat), D hidden, V vocab, K targets a position, r rank,
M = tile.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when the program is compiled.

    Attributes:
      tile: positions a trip of the loop.
      entropy: return it, and let gradients through it.
      train_head: the head needs a gradient.
      vocab_first: the head is [V, D], as a tied embedding is; transposing it would copy it.
    """

    tile: int
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
      tile: positions worked on at a time; logits take tile x V x 4 bytes.
      low_rank: (inner, b): `inner @ b` is added to the logits: a LoRA adapter of the head. Both get gradients.
      with_entropy: also the entropy in nats, f32[N]; else zeros.
      entropy_gradient: let gradients through the entropy. Off, it is a measurement behind a stop_gradient, and costs
        no GEMM.
      train_head: False: the head's gradient is not computed and is zero (frozen base).
      learning: the active positions that may get a gradient, when fewer than all; the others' cotangents are dropped.
    """
    plan = _Plan(tile, with_entropy and entropy_gradient, train_head, vocab_first)
    weight = head.astype(hidden.dtype)
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
    logits = _logits(hidden, head.astype(hidden.dtype), low_rank, vocab_first)
    logp = jax.nn.log_softmax(logits, axis=-1)
    logprobs = jnp.take_along_axis(logp, targets, axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.where(active[:, None], logprobs, 0.0), jnp.where(active, entropy, 0.0)


def _logits(x: Array, weight: Array, low_rank: tuple[Array, Array] | None, vocab_first: bool) -> Array:
    """x [M, D] -> f32[M, V]."""
    out = jnp.einsum("md,vd->mv" if vocab_first else "md,dv->mv", x, weight, preferred_element_type=jnp.float32)
    if low_rank is not None:
        inner, b = low_rank
        out = out + jnp.matmul(inner.astype(x.dtype), b.astype(x.dtype), preferred_element_type=jnp.float32)
    return out


def _from_vocab(g: Array, weight: Array, vocab_first: bool) -> Array:
    """g [M, V] in compute dtype -> f32[M, D]: g @ head.T."""
    return jnp.einsum("mv,vd->md" if vocab_first else "mv,dv->md", g, weight, preferred_element_type=jnp.float32)


def _order(first: Array, second: Array, tile: int) -> tuple[Array, Array, Array]:
    """Positions in the order first, second, rest, padded by a tile of N (which scatters drop); and the two counts.

    `first` implies `second`. Returns (i32[N + tile], number in first, number in second).
    """
    N = first.shape[0]
    rank = 2 - first.astype(jnp.int32) - second.astype(jnp.int32)
    order = jnp.argsort(rank, stable=True).astype(jnp.int32)
    num_second = jnp.sum(second, dtype=jnp.int32)
    order = jnp.where(jnp.arange(N, dtype=jnp.int32) < num_second, order, N)
    return jnp.pad(order, (0, tile), constant_values=N), jnp.sum(first, dtype=jnp.int32), num_second


def _take(array: Array, index: Array) -> Array:
    """Rows of `array`; zeros for an index of N. The select keeps whatever row a clipped gather read out of it."""
    valid = (index < array.shape[0]).reshape((-1,) + (1,) * (array.ndim - 1))
    return jnp.where(valid, jnp.take(array, index, axis=0, mode="clip"), 0)


def _take_low_rank(low_rank: tuple[Array, Array] | None, index: Array) -> tuple[Array, Array] | None:
    return None if low_rank is None else (_take(low_rank[0], index), low_rank[1])


def _softmax(logits: Array) -> tuple[Array, Array]:
    """exp(logits - max) and the log-normalizer, f32[M, V] and f32[M]."""
    top = jnp.max(logits, axis=-1)
    exped = jnp.exp(logits - top[:, None])
    return exped, top + jnp.log(jnp.sum(exped, axis=-1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(plan, with_entropy, hidden, weight, low_rank, targets, active, learning):
    logprobs, entropy, _ = _forward(plan, with_entropy, False, hidden, weight, low_rank, targets, active, learning)
    return logprobs, entropy


def _forward(plan, with_entropy, keep_slope, hidden, weight, low_rank, targets, active, learning):
    """Log-probs [N, K], entropy [N] and, with `keep_slope`, (onehot - softmax) @ head.T [N, D] where learning."""
    N, D = hidden.shape
    M = plan.tile
    order, num_learning, num_active = _order(learning, active, M)

    def tile_step(i, carry, slope_too):
        logprobs, entropy, slope = carry
        index = jax.lax.dynamic_slice_in_dim(order, i * M, M)
        wanted = _take(targets, index)
        logits = _logits(_take(hidden, index), weight, _take_low_rank(low_rank, index), plan.vocab_first)
        exped, log_norm = _softmax(logits)
        picked = jnp.take_along_axis(logits, wanted, axis=-1) - log_norm[:, None]
        logprobs = logprobs.at[index].set(picked, mode="drop")
        if with_entropy:
            total = jnp.sum(exped, axis=-1)
            # H = log Z - E[logit]; exped / total are the probabilities.
            entropy = entropy.at[index].set(log_norm - jnp.sum(exped * logits, axis=-1) / total, mode="drop")
        if slope_too:
            probs = jnp.exp(logits - log_norm[:, None]).astype(hidden.dtype)
            target_rows = jnp.take(weight, wanted[:, 0], axis=0 if plan.vocab_first else 1)
            target_rows = (target_rows if plan.vocab_first else target_rows.T).astype(jnp.float32)
            rows = target_rows - _from_vocab(probs, weight, plan.vocab_first)
            slope = slope.at[index].set(rows.astype(slope.dtype), mode="drop")
        return logprobs, entropy, slope

    carry = (
        jnp.zeros(targets.shape, jnp.float32),
        jnp.zeros((N,), jnp.float32),
        jnp.zeros((N, D) if keep_slope else (0, D), hidden.dtype),
    )
    start = jnp.zeros((), jnp.int32)
    if keep_slope:
        start = -(-num_learning // M)
        carry = jax.lax.fori_loop(0, start, partial(tile_step, slope_too=True), carry)
    return jax.lax.fori_loop(start, -(-num_active // M), partial(tile_step, slope_too=False), carry)


def _fused_fwd(plan, with_entropy, hidden, weight, low_rank, targets, active, learning):
    keep_slope = plan.linear_in_cotangent(low_rank, targets.shape[1])
    logprobs, entropy, slope = _forward(
        plan, with_entropy, keep_slope, hidden, weight, low_rank, targets, active, learning
    )
    kept = (slope, weight, learning) if keep_slope else (hidden, weight, low_rank, targets, learning)
    return (logprobs, entropy), kept


def _fused_bwd(plan, with_entropy, kept, cotangents):
    if len(kept) == 3:
        slope, weight, learning = kept
        # A cotangent of 0 selects: a quarantined position's slope may be NaN.
        g = jnp.where(learning[:, None], cotangents[0], 0)
        d_hidden = jnp.where(g == 0, 0, slope.astype(jnp.float32) * g).astype(slope.dtype)
        return d_hidden, jnp.zeros_like(weight), None, None, None, None
    return (*_backward(plan, *kept, *cotangents), None, None, None)


def _backward(plan, hidden, weight, low_rank, targets, learning, g, g_entropy):
    """Gradients of hidden, head and low_rank: logits again, tile by tile, where a cotangent isn't 0."""
    M = plan.tile
    needed = jnp.any(g != 0, axis=-1)
    if plan.entropy:
        needed = needed | (g_entropy != 0)
    needed = needed & learning
    order, num_needed, _ = _order(needed, needed, M)

    def tile_step(i, carry):
        d_hidden, d_weight, d_low_rank = carry
        index = jax.lax.dynamic_slice_in_dim(order, i * M, M)
        x, part, tile_g = _take(hidden, index), _take_low_rank(low_rank, index), _take(g, index)
        logits = _logits(x, weight, part, plan.vocab_first)
        _, log_norm = _softmax(logits)
        logp = logits - log_norm[:, None]
        probs = jnp.exp(logp)
        d_logits = -jnp.sum(tile_g, axis=-1)[:, None] * probs
        if plan.entropy:
            mean_logp = jnp.sum(probs * logp, axis=-1)[:, None]
            d_logits = d_logits - _take(g_entropy, index)[:, None] * probs * (logp - mean_logp)
        rows = jnp.arange(M, dtype=jnp.int32)[:, None]
        d_logits = d_logits.at[rows, _take(targets, index)].add(tile_g).astype(hidden.dtype)
        d_hidden = d_hidden.at[index].set(
            _from_vocab(d_logits, weight, plan.vocab_first).astype(hidden.dtype), mode="drop"
        )
        if plan.train_head:
            pattern = "mv,md->vd" if plan.vocab_first else "md,mv->dv"
            operands = (d_logits, x) if plan.vocab_first else (x, d_logits)
            d_weight = d_weight + jnp.einsum(pattern, *operands, preferred_element_type=jnp.float32)
        if part is not None:
            inner, b = (leaf.astype(hidden.dtype) for leaf in part)
            d_inner = jnp.matmul(d_logits, b.T, preferred_element_type=jnp.float32)
            d_b = jnp.matmul(inner.T, d_logits, preferred_element_type=jnp.float32)
            d_low_rank = (
                d_low_rank[0].at[index].set(d_inner.astype(d_low_rank[0].dtype), mode="drop"),
                d_low_rank[1] + d_b,
            )
        return d_hidden, d_weight, d_low_rank

    d_low_rank = None
    if low_rank is not None:
        d_low_rank = (jnp.zeros_like(low_rank[0]), jnp.zeros(low_rank[1].shape, jnp.float32))
    # The head's gradient is summed over tiles in fp32, whatever the compute dtype.
    d_weight = jnp.zeros(weight.shape if plan.train_head else (), jnp.float32)
    carry = (jnp.zeros_like(hidden), d_weight, d_low_rank)
    d_hidden, d_weight, d_low_rank = jax.lax.fori_loop(0, -(-num_needed // M), tile_step, carry)
    d_weight = d_weight.astype(weight.dtype) if plan.train_head else jnp.zeros_like(weight)
    if low_rank is not None:
        d_low_rank = (d_low_rank[0], d_low_rank[1].astype(low_rank[1].dtype))
    return d_hidden, d_weight, d_low_rank


_fused.defvjp(_fused_fwd, _fused_bwd)
