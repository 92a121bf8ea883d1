"""Linear layers with a hand-written backward pass, for what XLA makes of the automatic one on CPU.

Legend: N positions, D in, F out, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from locojax.models.native import ops
from locojax.models.native.ops import Packed


def as_two(x: Array, axis: int, product: Callable[[Array], Array]) -> Array:
    """product(x), whose `axis` are rows of a matrix product's left side, given two where there is one that is narrow.

    XLA's CPU backend takes a single row of bf16 to a routine that has the right side in fp32 first, at a tenth of the
    speed of two.
    """
    if x.dtype == jnp.float32 or x.shape[axis] != 1:
        return product(x)
    two = jnp.concatenate([x, jnp.zeros_like(x)], axis=axis)
    return jax.lax.slice_in_dim(product(two), 0, 1, axis=axis)


def matmul(x: Array, w: Array) -> Array:
    """x [..., D] @ w [D, F], in x's dtype."""
    if x.size != x.shape[-1]:
        return x @ w
    return as_two(x, 0, lambda x: x @ w)


def head_product(x: Array, w: Array | Packed) -> Array:
    """f32 x [..., D] @ w.T, w [V, D]: the logits of an unembedding that lies vocabulary first, or packed, [D, V].

    On CPU the product with x.T is up to three times as fast as its twin with a few dozen rows of fp32 (without AVX-512;
    with it they are level), and a quarter of its speed in bf16, where it goes through a copy of w in fp32.
    """
    if isinstance(w, Packed):
        return ops.matmul(x, w, jnp.float32)
    flat, w = x.reshape(-1, x.shape[-1]), w.astype(x.dtype)
    if x.dtype == jnp.float32:
        out = jnp.matmul(w, flat.T).T
    else:
        out = as_two(flat, 0, lambda x: jnp.einsum("md,vd->mv", x, w, preferred_element_type=jnp.float32))
    return out.reshape(*x.shape[:-1], w.shape[0])


INNER = "inner"
"""Name, for remat policies, of an adapter's inner activation, scale * x @ a: few columns, dear to make again."""


def dense(x: Array, w: Array | Packed, w_t: Array | Packed | None = None, *, train: bool = True) -> Array:
    """x [..., D] @ w [D, F], in x's dtype.

    With `w_t` [F, D], the transpose as an array of its own, the backward pass multiplies by that: on CPU `g @ w.T` runs
    at half the speed of `g @ w_t`. It takes no gradient. `train` False: w gets none either, and x is not kept for it.
    Packed, w never gets one, and there is a backward pass only with `w_t`, packed too.
    """
    if isinstance(w, Packed):
        return _packed_dense(x, w, w_t) if isinstance(w_t, Packed) else ops.matmul(x, w)
    assert not isinstance(w_t, Packed)
    w = w.astype(x.dtype)
    if w_t is None:
        return matmul(x, w)
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
def _packed_dense(x: Array, w: Packed, w_t: Packed) -> Array:
    return ops.matmul(x, w)


def _packed_fwd(x: Array, w: Packed, w_t: Packed):
    return ops.matmul(x, w), w_t


def _packed_bwd(w_t: Packed, g: Array):
    return ops.matmul(g, w_t), None, None


_packed_dense.defvjp(_packed_fwd, _packed_bwd)


@jax.custom_vjp
def low_rank_deltas(x: Array, a: tuple[Array, ...], b: tuple[Array, ...], scale: Array) -> tuple[Array, ...]:
    """scale * (x [..., D] @ a_i [D, r_i]) @ b_i [r_i, F_i] for each i, all of one dtype; scale takes no gradient.

    Adapters that read the same x share one product forward and two backward: alone, each has too few columns to run
    at full speed. The automatic backward pass would also transpose the gradients [N, F_i] to get those of b; this one
    transposes only [N, r].
    """
    return _deltas_fwd(x, a, b, scale)[0]


def _deltas_fwd(x: Array, a: tuple[Array, ...], b: tuple[Array, ...], scale: Array):
    joined = jnp.concatenate(a, axis=-1)
    inner = checkpoint_name(matmul(x, joined) * scale, INNER)
    return tuple(matmul(part, w) for part, w in zip(_parts(inner, b), b, strict=True)), (x, inner, joined, b, scale)


def _parts(inner: Array, b: tuple[Array, ...]) -> list[Array]:
    """The columns of each adapter in [..., sum of r]."""
    return jnp.split(inner, np.cumsum([w.shape[0] for w in b])[:-1], axis=-1)


def _deltas_bwd(kept, g: tuple[Array, ...]):
    x, inner, joined, b, scale = kept
    flat_g = [part.reshape(-1, part.shape[-1]) for part in g]
    flat_inner = inner.reshape(-1, inner.shape[-1])
    d_inner = jnp.concatenate([part @ w.T for part, w in zip(flat_g, b, strict=True)], axis=-1) * scale
    d_joined = (d_inner.T @ x.reshape(-1, x.shape[-1])).T
    d_a = tuple(jnp.split(d_joined, np.cumsum([w.shape[0] for w in b])[:-1], axis=-1))
    d_b = tuple(part.T @ rows for part, rows in zip(_parts(flat_inner, b), flat_g, strict=True))
    return (d_inner @ joined.T).reshape(x.shape), d_a, d_b, jnp.zeros_like(scale)


low_rank_deltas.defvjp(_deltas_fwd, _deltas_bwd)


def adapted_rows(
    x: Array, w: Packed, w_t: Packed | None, factors: Sequence[tuple[Array, Array]], scale: Array, lengths: Array
) -> Array:
    """bf16 x [R, T, D] @ w [D, F], and to each row what its adapters add: scale f32[R] * (x @ a_i) @ b_i, for each i of
    the modules whose columns w has, a_i [R, D, r] and b_i [R, r, F_i]. 0 beyond each row's first lengths i32[R] tokens.

    w and scale take no gradient; those of the factors come in fp32 where the factors are. A backward pass needs w_t.
    """
    if w_t is None:
        return ops.adapted_rows(x, w, scale, lengths, _narrow(factors))[0]
    a, b = zip(*factors, strict=True)
    return _adapted_rows(x, w, w_t, a, b, scale, lengths)


def _narrow(factors: Iterable[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    return [(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)) for a, b in factors]


@jax.custom_vjp
def _adapted_rows(x, w, w_t, a, b, scale, lengths):
    return _adapted_rows_fwd(x, w, w_t, a, b, scale, lengths)[0]


def _adapted_rows_fwd(x, w, w_t, a, b, scale, lengths):
    out, inner = ops.adapted_rows(x, w, scale, lengths, _narrow(zip(a, b, strict=True)))
    return out, (x, checkpoint_name(inner, INNER), w_t, a, b, scale, lengths)


def _adapted_rows_bwd(kept, g: Array):
    x, inner, w_t, a, b, scale, lengths = kept
    d_x, ds = ops.adapted_rows_backward(g, x, inner, w_t, scale, lengths, _narrow(zip(a, b, strict=True)))
    d_a = tuple(d.astype(like.dtype) for (d, _), like in zip(ds, a, strict=True))
    d_b = tuple(d.astype(like.dtype) for (_, d), like in zip(ds, b, strict=True))
    return d_x, None, None, d_a, d_b, jnp.zeros_like(scale), None


_adapted_rows.defvjp(_adapted_rows_fwd, _adapted_rows_bwd)


def along_last(vector: Array, like: Array) -> Array:
    """[n] shaped to multiply or be added to [..., n]; ranks are never promoted silently."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm (Zhang & Sennrich 2019) of [..., D], statistics in fp32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * along_last(weight.astype(jnp.float32), x32)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def native_rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`rms_norm` by the C++ kernel, of bf16; its gradient is the plain form's."""
    return ops.rms_norm(x, weight, eps)


def _norm_fwd(x: Array, weight: Array, eps: float):
    return ops.rms_norm(x, weight, eps), (x, weight)


def _norm_bwd(eps: float, kept: tuple[Array, Array], g: Array):
    return jax.vjp(partial(rms_norm, eps=eps), *kept)[1](g)


native_rms_norm.defvjp(_norm_fwd, _norm_bwd)


@jax.custom_vjp
def gated(both: Array) -> Array:
    """silu(gate) * up by the C++ kernel: bf16[..., 2 F], gate and up side by side, -> [..., F]. Rounded once."""
    return ops.gated(both.reshape(-1, both.shape[-1])).reshape(*both.shape[:-1], -1)


def _gated_fwd(both: Array):
    return gated(both), both


def _gated_bwd(both: Array, g: Array):
    flat = (each.reshape(-1, each.shape[-1]) for each in (both, g))
    return (ops.gated_backward(*flat).reshape(both.shape),)


gated.defvjp(_gated_fwd, _gated_bwd)
