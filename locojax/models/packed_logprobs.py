"""`logprobs.target_logprobs` by the C++ kernels: one target a position, a frozen head, adapted or not, in bf16.

Legend: N positions, D hidden, V vocab, r rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from locojax.models.logprobs import positions_in_order, taken
from locojax.models.native import ops
from locojax.models.native.ops import Unembedding


def suits(head: Unembedding | None, low_rank: tuple[Array, Array] | None, num_targets: int) -> bool:
    """Whether there is a kernel for that."""
    return head is not None and num_targets == 1 and (low_rank is None or low_rank[1].shape[0] % 2 == 0)


def packed_target_logprobs(
    hidden: Float[Array, "N D"],
    head: Unembedding,
    low_rank: tuple[Float[Array, "N r"], Float[Array, "r V"]] | None,
    targets: Int[Array, "N 1"],
    active: Bool[Array, " N"],
    learning: Bool[Array, " N"],
) -> Float[Array, "N 1"]:
    """As `target_logprobs` with `train_head` off. hidden bf16; low_rank gets a gradient, the head none."""
    learning = learning & active
    if low_rank is None:
        return _plain_logprobs(hidden, head, targets[:, 0], active, learning)[:, None]
    inner, b = low_rank
    return _logprobs(hidden, inner.astype(hidden.dtype), b, head, targets[:, 0], active, learning)[:, None]


@jax.custom_vjp
def _plain_logprobs(hidden, head, targets, active, learning):
    return _with_slope(hidden, head, targets, active, jnp.zeros_like(learning))[0]


def _with_slope(hidden, head, targets, active, learning):
    """A log-prob is linear in its cotangent: the slope is all that the backward pass needs, found in one pass."""
    index, num_learning, count = positions_in_order(learning, active, 0)
    x, wanted = taken(hidden, index), taken(targets, index)
    picked, log_norm, slope = ops.loss_slope(x, head, wanted, num_learning, count)
    logprobs = jnp.zeros(targets.shape, jnp.float32).at[index].set(picked - log_norm, mode="drop")
    return logprobs, (jnp.zeros(hidden.shape, jnp.float32).at[index].set(slope, mode="drop"), learning)


def _along_slope(kept, g):
    slope, learning = kept
    # A cotangent of 0 selects: a quarantined position's slope may be NaN.
    needed = (learning & (g != 0))[:, None]
    return jnp.where(needed, slope * g[:, None], 0.0).astype(jnp.bfloat16), None, None, None, None


_plain_logprobs.defvjp(_with_slope, _along_slope)


@jax.custom_vjp
def _logprobs(hidden, inner, b, head, targets, active, learning):
    return _forward(hidden, inner, b, head, targets, active, learning)[0]


def _forward(hidden, inner, b, head, targets, active, learning):
    index, count, _ = positions_in_order(active, active, 0)
    x, x_inner, wanted = (taken(each, index) for each in (hidden, inner, targets))
    picked, log_norm = ops.loss_forward(x, x_inner, head, b.astype(hidden.dtype), wanted, count)
    zeros = jnp.zeros(targets.shape, jnp.float32)
    logprobs = zeros.at[index].set(picked - log_norm, mode="drop")
    norms = zeros.at[index].set(log_norm, mode="drop")
    return logprobs, (hidden, inner, b, head, targets, learning, norms)


def _backward(kept, g):
    hidden, inner, b, head, targets, learning, norms = kept
    needed = learning & (g != 0)
    index, count, _ = positions_in_order(needed, needed, 0)
    x, x_inner, wanted, norm, own = (taken(each, index) for each in (hidden, inner, targets, norms, g))
    d_x, d_inner, d_b = ops.loss_backward(x, x_inner, head, b.astype(hidden.dtype), wanted, norm, own, count)

    def put(like, values):
        return jnp.zeros_like(like).at[index].set(values.astype(like.dtype), mode="drop")

    return put(hidden, d_x), put(inner, d_inner), d_b.astype(b.dtype), None, None, None, None


_logprobs.defvjp(_forward, _backward)
