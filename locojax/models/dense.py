"""Linear layers with a hand-written backward pass, for what XLA makes of the automatic one on CPU.

Legend: N positions, D in, F out, r rank.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def dense(x: Array, w: Array, w_t: Array | None = None, *, train: bool = True) -> Array:
    """x [..., D] @ w [D, F], in x's dtype.

    With `w_t` [F, D], the transpose as an array of its own, the backward pass multiplies by that: on CPU `g @ w.T` runs
    at half the speed of `g @ w_t`. It takes no gradient. `train` False: w gets none either, and x is not kept for it.
    """
    w = w.astype(x.dtype)
    if w_t is None:
        return x @ w
    return _dense(train, x, w, w_t.astype(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(train: bool, x: Array, w: Array, w_t: Array) -> Array:
    return x @ w


def _dense_fwd(train: bool, x: Array, w: Array, w_t: Array):
    return x @ w, (x if train else None, w_t)


def _dense_bwd(train: bool, kept, g: Array):
    x, w_t = kept
    d_w = None
    if train:
        # x.T @ g, not (g.T @ x).T: layers that read the same x share its transposed copy.
        d_w = x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])
    return g @ w_t, d_w, None


_dense.defvjp(_dense_fwd, _dense_bwd)


@jax.custom_vjp
def low_rank_delta(x: Array, a: Array, b: Array, scale: Array) -> Array:
    """scale * (x [..., D] @ a [D, r]) @ b [r, F], all of one dtype; scale takes no gradient.

    The automatic backward pass would transpose the gradient [N, F] to get b's; this one transposes only [N, r].
    """
    return ((x @ a) * scale) @ b


def _delta_fwd(x: Array, a: Array, b: Array, scale: Array):
    inner = (x @ a) * scale
    return inner @ b, (x, inner, a, b, scale)


def _delta_bwd(kept, g: Array):
    x, inner, a, b, scale = kept
    d_inner = (g @ b.T) * scale
    flat = d_inner.reshape(-1, d_inner.shape[-1])
    d_a = (flat.T @ x.reshape(-1, x.shape[-1])).T
    d_b = inner.reshape(-1, inner.shape[-1]).T @ g.reshape(-1, g.shape[-1])
    return d_inner @ a.T, d_a, d_b, jnp.zeros_like(scale)


low_rank_delta.defvjp(_delta_fwd, _delta_bwd)
