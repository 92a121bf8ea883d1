"""The unembedding in chunks of the vocabulary: its products with hidden states, forward and backward.

A head whose model is narrow is gone through in chunks, so that logits stay in the processor's cache; any other in one.

Shape letters: D hidden, V vocab, K targets a position, r rank, M positions, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Carry = TypeVar("Carry")

LOGITS_IN_CACHE = 2**21
"""Logits of a tile and a chunk where chunks pay: 8 MiB in fp32."""


def chunk_size(V: int, D: int, tile: int) -> int:
    """Vocabulary entries worked on at a time: all of them, unless copying a slice of the head (D numbers an entry)
    costs clearly less than what it saves: `tile` logits an entry that go to memory and back."""
    if 2 * D > tile:
        return V
    most = min(V, LOGITS_IN_CACHE // tile)
    even = max(size for size in range(1, most + 1) if V % size == 0)
    return even if 2 * even > most else most


LOWEST = float(jnp.finfo(jnp.float32).min)
"""In a running maximum, less than any logit. Its exponential is 0; unlike an infinity's, its product with 0 too."""


class Chunk(NamedTuple):
    """Some vocabulary entries of the head, as products to be summed: the head's own and its adapter's.

    Attributes:
      weights: [C, D] or [D, C], each with whether the vocabulary comes first. One, [C, D + r], where the vocabulary is
        cut: a product over few numbers costs as much as one over many, so the two are put side by side.
      start: i32[], the first entry. size: C.
      new: bool[1, C]: the last chunk overlaps the one before it, whose entries don't count again. None: all count.
    """

    weights: tuple[tuple[Array, bool], ...]
    start: Array
    size: int
    new: Array | None

    def logits(self, inputs: tuple[Array, ...]) -> Array:
        """f32[M, C]; the lowest number where an entry doesn't count."""
        products = [
            _products("md,vd->mv" if first else "md,dv->mv", x, weight)
            for (weight, first), x in zip(self.weights, inputs, strict=True)
        ]
        out = products[0] if len(products) == 1 else products[0] + products[1]
        return out if self.new is None else jnp.where(self.new, out, LOWEST)

    def to_inputs(self, d: Array) -> tuple[Array, ...]:
        """d [M, C] -> what reaches each of the inputs, f32[M, D]."""
        return tuple(_over_vocabulary(d, weight) if first else _products("mv,dv->md", d, weight)
                     for weight, first in self.weights)  # fmt: skip

    def is_target(self, targets: Array) -> Array:
        """targets i32[M] -> bool[M, C]."""
        found = jnp.arange(self.size, dtype=jnp.int32)[None] == (targets - self.start)[:, None]
        return found if self.new is None else found & self.new

    def place(self, targets: Array) -> tuple[Array, Array]:
        """targets i32[M, K] -> their places in this chunk, beyond its end for those of others; whether they're here."""
        at = targets - self.start
        here = (at >= 0) & (at < self.size)
        if self.new is not None:
            here = here & self.new[0, jnp.clip(at, 0, self.size - 1)]
        return jnp.where(here, at, self.size), here


def _products(pattern: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(pattern, x, weight, preferred_element_type=jnp.float32)


def _over_vocabulary(d: Array, weight: Array) -> Array:
    """d [M, C] @ weight [C, D], in fp32.

    Few positions of a narrow type are summed part of the vocabulary by part: XLA's CPU backend shares a product out to
    cores by its results, which are few here, and then runs at half its speed.
    """
    (M, C), D = d.shape, weight.shape[1]
    if d.dtype != jnp.float32:
        for parts in (16, 8, 4):
            if C % parts == 0 and C // parts >= 4096 and parts * M * D <= LOGITS_IN_CACHE:
                split = d.reshape(M, parts, -1), weight.reshape(parts, -1, D)
                return jnp.sum(_products("mnk,nkd->nmd", *split), axis=0)
    return _products("mv,vd->md", d, weight)


class Head(NamedTuple):
    """The unembedding, in chunks.

    Attributes:
      weight: [V, D] with `vocab_first`, else [D, V]. low_rank_b: [r, V] of its adapter, or None.
      chunk_size: C; V where it isn't cut.
    """

    weight: Array
    low_rank_b: Array | None
    vocab_first: bool
    chunk_size: int

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0 if self.vocab_first else 1]

    def inputs(self, x: Array, inner: Array | None) -> tuple[Array, ...]:
        """What a chunk's products read: hidden states [M, D] and the adapter's inner part [M, r], or both joined."""
        if inner is None:
            return (x,)
        inner = inner.astype(x.dtype)
        return (x, inner) if self.chunk_size == self.vocab_size else (jnp.concatenate([x, inner], axis=1),)

    def apart(self, of_inputs: tuple[Array, ...]) -> tuple[Array, Array | None]:
        """`inputs` undone: what is for x, [M, D], and what is for inner, [M, r]."""
        if self.low_rank_b is None:
            return of_inputs[0], None
        if len(of_inputs) == 2:
            return of_inputs
        D = of_inputs[0].shape[1] - self.low_rank_b.shape[0]
        return of_inputs[0][:, :D], of_inputs[0][:, D:]

    def cut(self, array: Array, start: Array, axis: int) -> Array:
        """The chunk of an array laid out as the head is, or its adapter."""
        if self.chunk_size == self.vocab_size:
            return array
        return jax.lax.dynamic_slice_in_dim(array, start, self.chunk_size, axis)

    def add(self, total: Array, part: Array, start: Array, axis: int) -> Array:
        """`total` with a chunk's part added at its place."""
        if self.chunk_size == self.vocab_size:
            return total + part
        return jax.lax.dynamic_update_slice_in_dim(total, self.cut(total, start, axis) + part, start, axis)

    def chunk(self, c: Array) -> Chunk:
        V, C, first = self.vocab_size, self.chunk_size, self.vocab_first
        b = None if self.low_rank_b is None else self.low_rank_b.astype(self.weight.dtype)
        if C == V:
            return Chunk(((self.weight, first), *(() if b is None else ((b, False),))), jnp.int32(0), V, None)
        start = jnp.minimum(c * C, V - C)
        weight = self.cut(self.weight, start, 0 if first else 1)
        joined = [weight if first else weight.T, *([] if b is None else [self.cut(b, start, 1).T])]
        new = None if V % C == 0 else (start + jnp.arange(C, dtype=jnp.int32) >= c * C)[None]
        return Chunk(((jnp.concatenate(joined, axis=1), True),), start, C, new)

    def each_chunk(self, body: Callable[[Chunk, Carry], Carry], carry: Carry) -> Carry:
        """body(chunk, carry) over all of the vocabulary."""
        num_chunks = -(-self.vocab_size // self.chunk_size)
        if num_chunks == 1:
            return body(self.chunk(jnp.int32(0)), carry)
        return jax.lax.fori_loop(0, num_chunks, lambda c, carry: body(self.chunk(c), carry), carry)
