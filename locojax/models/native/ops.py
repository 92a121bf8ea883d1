"""The C++ kernels as functions of jax arrays. `build.give_to_jax` must have been called, as `build.why_not` does.

Shape letters: M rows, K in, N out, P panels; B rows of decoding, H heads, h head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PANEL = 64
"""Columns that lie together in a packed matrix: `kPanel` of tile.h."""

LANES = 16
"""Numbers that are worked on at once: `kLanes` of lanes.h."""

HEAD_SIZES = (32, 64, 96, 128, 256)
"""Head dims that attention.cc has a form for."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A bf16 matrix [..., K, N] as the kernels read it; the columns beyond N are zero.

    Attributes:
      panels: bf16[..., P, K / 2, W, 2], W columns a panel: PANEL, or fewer where N is less (see `narrow`).
      num_columns: N.
    """

    panels: Any
    num_columns: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix: (..., K, N)."""
        *stacked, _, pairs, _, _ = self.panels.shape
        return (*stacked, 2 * pairs, self.num_columns)

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return int(self.panels.shape[-2])

    @property
    def dtype(self) -> Any:
        return self.panels.dtype


def packs(shape: Sequence[int]) -> bool:
    """Whether an array of that shape is a matrix [..., K, N] that can be packed: its rows go in pairs."""
    return len(shape) > 1 and shape[-2] % 2 == 0


def narrow(N: int) -> int:
    """Columns of a panel for a matrix of few columns: no more lanes than those take."""
    return min(PANEL, N + -N % LANES)


def pack(w: Array, panel: int = PANEL) -> Packed:
    """w [..., K, N] -> packed bf16, `panel` columns together."""
    *stacked, K, N = w.shape
    pad = [(0, 0)] * (len(stacked) + 1) + [(0, -N % panel)]
    panels = jnp.pad(w.astype(jnp.bfloat16), pad).reshape(*stacked, K // 2, 2, -(-N // panel), panel)
    k, pair, p, n = (len(stacked) + i for i in range(4))
    return Packed(panels.transpose(*range(len(stacked)), p, k, n, pair), N)


def unpack(w: Packed) -> Array:
    """bf16[..., K, N]: what was packed."""
    *stacked, P, pairs, panel, _ = w.panels.shape
    p, k, n, pair = (len(stacked) + i for i in range(4))
    return w.panels.transpose(*range(len(stacked)), k, pair, p, n).reshape(*stacked, 2 * pairs, P * panel)[
        ..., : w.num_columns
    ]


def matmul(x: Array, w: Packed, dtype: Any = jnp.bfloat16) -> Array:
    """x bf16[..., K] @ w [K, N] in `dtype`, bf16 or fp32, summed in fp32: `x @ w` of the unpacked matrix."""
    if x.dtype != jnp.bfloat16:
        raise TypeError(f"A packed product is of bfloat16. Got: {x.dtype}")
    dtype = jnp.dtype(dtype)
    out = jax.ShapeDtypeStruct((x.size // x.shape[-1], w.num_columns), dtype)
    call = jax.ffi.ffi_call("locojax_matmul_f32" if dtype == jnp.float32 else "locojax_matmul_bf16", out)
    return call(x.reshape(-1, x.shape[-1]), w.panels).reshape(*x.shape[:-1], w.num_columns)


def adapted(
    x: Array, w: Packed, which: Array, scale: Array, layer: Array, factors: Sequence[tuple[Array, Array]]
) -> Array:
    """x bf16[M, K] @ w [K, N] + scale * (x @ a) @ b, each row by its own adapter, summed in fp32 and rounded once.

    which i32[M]: each row's adapter, -1 for none; scale f32[n]. factors: of each module whose columns w has, in order,
    the panels of a [L, n, K, r], `narrow` ones, and of b [L, n, r, F], r the same; layer i32[], which of L.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], w.num_columns), jnp.bfloat16)
    flat = [factor for pair in factors for factor in pair]
    return jax.ffi.ffi_call("locojax_adapted", out)(x, w.panels, which, scale, layer.reshape(1), *flat)


def adapted_rows(
    x: Array, w: Packed, scale: Array, lengths: Array, factors: Sequence[tuple[Array, Array]]
) -> tuple[Array, Array]:
    """x bf16[R, T, K] @ w [K, N] + scale * (x @ a) @ b, each of R rows by adapters of its own, summed in fp32 and
    rounded once; and scale * x @ a of all modules, side by side. Both 0 beyond each row's first `lengths` tokens.

    scale f32[R]; lengths i32[R]. factors: of each module whose columns w has, in order: a bf16[R, K, r], b bf16[R, r,
    F], F whole panels, r even and the same.
    """
    R, T, _ = x.shape
    wide = sum(a.shape[-1] for a, _ in factors)
    outs = [jax.ShapeDtypeStruct((R, T, n), jnp.bfloat16) for n in (w.num_columns, wide)]
    flat = [factor for pair in factors for factor in pair]
    out, inner = jax.ffi.ffi_call("locojax_adapted_rows", outs)(x, w.panels, scale, lengths, *flat)
    return out, inner


def adapted_rows_backward(
    g: Array,
    x: Array,
    inner: Array,
    w_t: Packed,
    scale: Array,
    lengths: Array,
    factors: Sequence[tuple[Array, Array]],
) -> tuple[Array, list[tuple[Array, Array]]]:
    """What a cotangent g bf16[R, T, N] of `adapted_rows`' product brings to x, in bf16, and to the factors, in fp32."""
    flat = [factor for pair in factors for factor in pair]
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype), *(jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in flat)]
    d_x, *ds = jax.ffi.ffi_call("locojax_adapted_rows_backward", outs)(g, x, inner, w_t.panels, scale, lengths, *flat)
    return d_x, list(zip(ds[::2], ds[1::2], strict=True))


def norms(width: int) -> bool:
    """Whether `rms_norm` takes rows of that width."""
    return width % LANES == 0


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of bf16[..., D] with a weight bf16[D], statistics in fp32, rounded once."""
    flat = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call("locojax_rms_norm", jax.ShapeDtypeStruct(flat.shape, x.dtype))
    return call(flat, weight, eps=np.float32(eps)).reshape(x.shape)


def gates(width: int) -> bool:
    """Whether `gated` takes activations of that width."""
    return width % LANES == 0


def gated(both: Array) -> Array:
    """silu(gate) * up: bf16[M, 2 F], gate and up side by side, -> bf16[M, F]."""
    M, width = both.shape
    return jax.ffi.ffi_call("locojax_gated", jax.ShapeDtypeStruct((M, width // 2), both.dtype))(both)


def gated_backward(both: Array, g: Array) -> Array:
    """What a cotangent g [M, F] of `gated` brings to its input."""
    return jax.ffi.ffi_call("locojax_gated_backward", jax.ShapeDtypeStruct(both.shape, both.dtype))(both, g)


def attends(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether `attend_rows` has a form for such heads."""
    return head_dim in HEAD_SIZES and num_heads % num_kv_heads == 0


Rows = tuple[Array, ...]
"""One layer's keys, or its values, of B rows: bf16[B, K, c, h], the tokens of one after those of another."""


def attend_rows(
    q: Array, k: Array, v: Array, rope: tuple[Array, Array], position: Array, keys: Rows, values: Rows
) -> tuple[Array, tuple[Rows, Rows]]:
    """Decoding's attention in bf16, q [B, H, h] -> [B, H, h]; and keys and values with the new token's.

    q and k [B, K, h] are rotated by cos and sin, f32[B, 1, h], as `models.decoder.apply_rope` does; k and v are stored
    as each row's token number `position` i32[B], with 0 for what isn't finite; and each q attends to its row's tokens
    up to there. A position beyond the row is stored nowhere, and its q attends to all. In a program that doesn't read
    keys and values afterwards they aren't copied.
    """
    stored, B = (*keys, *values), q.shape[0]
    joined = jnp.concatenate([each.reshape(B, -1) for each in (q, k, v)], axis=1)  # as they come out of one product
    outs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (q, *stored)]
    before = 4
    call = jax.ffi.ffi_call(
        "locojax_attend_rows", outs, input_output_aliases={before + i: 1 + i for i in range(len(stored))}
    )
    cos, sin = (each.reshape(B, -1) for each in rope)
    out, *new = call(joined, cos, sin, position, *stored)
    return out, (tuple(new[: len(keys)]), tuple(new[len(keys) :]))


@dataclasses.dataclass(frozen=True)
class PackedHead:
    """A packed unembedding [D, V] with low-rank adapters, as inputs of the head's kernels.

    Attributes:
      weight: [D, V], V whole panels. a: [n, D, r], in `narrow` panels. b: [n, r, V]. scale: f32[n].
      which: i32[B]: each row's adapter, -1 for none.
    """

    weight: Packed
    a: Packed
    b: Packed
    scale: Array
    which: Array

    def masses(self, hidden: Array, temper: Array, num_blocks: int) -> tuple[Array, Array, Array]:
        """Of the logits of hidden bf16[B, D], each block's largest, its sum of exp(logit - largest), and that of
        exp(temper (logit - largest)): f32[B, N] each. temper f32[B]."""
        out = jax.ShapeDtypeStruct((hidden.shape[0], num_blocks), jnp.float32)
        largest, mass, own = jax.ffi.ffi_call("locojax_head_masses", [out] * 3)(*self._inputs(hidden), temper)
        return largest, mass, own

    def block(self, hidden: Array, index: Array, size: int) -> Array:
        """f32[B, size]: logits of one block of each row, index i32[B]; the same bits as `masses` has seen."""
        out = jax.ShapeDtypeStruct((hidden.shape[0], size), jnp.float32)
        return jax.ffi.ffi_call("locojax_head_block", out)(*self._inputs(hidden), index)

    def values(self, hidden: Array) -> Array:
        """All logits, f32[B, V], the same bits again."""
        out = jax.ShapeDtypeStruct((hidden.shape[0], self.weight.num_columns), jnp.float32)
        return jax.ffi.ffi_call("locojax_head_values", out)(*self._inputs(hidden))

    def _inputs(self, hidden: Array) -> tuple[Array, ...]:
        return hidden, self.weight.panels, self.which, self.scale, self.a.panels, self.b.panels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unembedding:
    """A head for training: packed [D, V], and its transpose [V, D]."""

    weight: Packed
    transposed: Packed

    @classmethod
    def of(cls, head: Array) -> Unembedding:
        """head [D, V]."""
        return cls(pack(head), pack(head.T, narrow(head.shape[0])))


def suits_loss(D: int, V: int) -> bool:
    """Whether `loss_forward` takes a head [D, V]."""
    return D % 2 == 0 and V % PANEL == 0


def loss_forward(
    x: Array, inner: Array, head: Unembedding, b: Array, targets: Array, count: Array
) -> tuple[Array, Array]:
    """(targets' logits, log-sums of the logits' exponentials), f32[M] each, of the first `count` i32[] rows; else 0.

    Logits: x bf16[M, D] @ head + inner bf16[M, r] @ b bf16[r, V], r even. targets i32[M].
    """
    out = jax.ShapeDtypeStruct(targets.shape, jnp.float32)
    call = jax.ffi.ffi_call("locojax_loss_forward", [out, out])
    picked, log_norm = call(x, inner, head.weight.panels, b, targets, count.reshape(1))
    return picked, log_norm


def loss_backward(
    x: Array, inner: Array, head: Unembedding, b: Array, targets: Array, log_norm: Array, g: Array, count: Array
) -> tuple[Array, Array, Array]:
    """What a cotangent g f32[M] of the log-probs brings: d(x) f32[M, D], d(inner) f32[M, r], d(b) f32[r, V]."""
    outs = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (x, inner, b)]
    call = jax.ffi.ffi_call("locojax_loss_backward", outs)
    inputs = (x, inner, head.weight.panels, b, head.transposed.panels, targets, log_norm, g, count.reshape(1))
    d_x, d_inner, d_b = call(*inputs)
    return d_x, d_inner, d_b


def loss_slope(
    x: Array, head: Unembedding, targets: Array, num_sloping: Array, count: Array
) -> tuple[Array, Array, Array]:
    """As `loss_forward` without an adapter; and f32[M, D], what a change of x adds to the log-probs of the first
    `num_sloping` i32[] rows, else 0."""
    row = jax.ShapeDtypeStruct(targets.shape, jnp.float32)
    outs = [row, row, jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    inputs = (x, head.weight.panels, head.transposed.panels, targets, jnp.stack([num_sloping, count]))
    picked, log_norm, slope = jax.ffi.ffi_call("locojax_loss_slope", outs)(*inputs)
    return picked, log_norm, slope


def attends_packed(head_dim: int) -> bool:
    """Whether `attention_forward` takes heads of that size."""
    return head_dim % 2 == 0 and head_dim <= 256


def attention_forward(q: Array, k: Array, v: Array, until: Array) -> tuple[Array, Array]:
    """`models.attention.packed` in bf16, q [R, T, H, h] and k, v [R, T, K, h] -> [R, T, H, h]; and the softmaxes'
    log-normalizers f32[R, H, T]."""
    R, T, H, _ = q.shape
    outs = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((R, H, T), jnp.float32)]
    out, log_norm = jax.ffi.ffi_call("locojax_attention_forward", outs)(q, k, v, until)
    return out, log_norm


def attention_backward(
    q: Array, k: Array, v: Array, until: Array, out: Array, log_norm: Array, g: Array
) -> tuple[Array, Array, Array]:
    """What a cotangent g [R, T, H, h] of `out` brings to q, k and v: fp32, of their shapes."""
    call = jax.ffi.ffi_call("locojax_attention_backward", [jax.ShapeDtypeStruct(q.shape, jnp.float32)] * 3)
    d_q, *by_head = call(q, k, v, until, out, log_norm, g)
    R, T, H, h = q.shape
    d_k, d_v = (jnp.sum(each.reshape(R, T, k.shape[2], -1, h), axis=3) for each in by_head)
    return d_q, d_k, d_v
