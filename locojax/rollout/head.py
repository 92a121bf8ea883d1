"""Hidden states -> what sampling asks about the logits.

With many rows of a narrow model, logits are most of what a token costs: they don't fit in the processor's cache, and
each pass over them goes to memory. Then they aren't stored unless a row truncates: the vocabulary is gone through in
chunks, of which only the blocks' masses are kept, and the one block that a row draws from is computed again.

Shape letters: B rows, D hidden, V vocab, r rank, C chunk, N blocks, S tokens of a block.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from locojax.models import decoder
from locojax.models.lora import Adapters
from locojax.models.native.ops import LANES, PANEL, Packed, PackedHead
from locojax.models.unembedding import LOGITS_IN_CACHE
from locojax.rollout.sampling import BlockMasses, Logits, WholeLogits, block_size, masses_of
from locojax.rollout.settings import PLAIN_ROWS


def logits(weights: decoder.Params, hidden: Array, adapters: Adapters | None) -> Logits:
    """What final hidden states [B, D] predict. weights: as `decoder.unstack` makes them."""
    head = decoder.unembedding(weights)
    if isinstance(head, Packed):
        inputs = _packed_head(head, hidden.shape[0], adapters)
        if inputs is None:
            return WholeLogits(decoder.logits(weights, hidden[:, None], adapters)[:, 0])
        return PackedLogits(inputs, hidden)
    (V, D), B = head.shape, hidden.shape[0]
    chunk = chunk_size(V, D, B)
    if chunk is None or not (adapters is None or adapters.present is not None):
        return WholeLogits(decoder.logits(weights, hidden[:, None], adapters)[:, 0])
    return ChunkedLogits(head.astype(hidden.dtype), hidden, adapters, chunk)


def chunk_size(V: int, D: int, B: int) -> int | None:
    """Whole blocks of the vocabulary worked on at a time; None: all at once, where copying a slice of the head (D
    numbers a token) would cost as much as it saves (B logits a token that go to memory and back, several times)."""
    S = block_size(V)
    if B < PLAIN_ROWS or D > B or V % S or V * B <= LOGITS_IN_CACHE:
        return None
    num_chunks = math.ceil(V * B / LOGITS_IN_CACHE)
    return math.ceil(V / num_chunks / S) * S


def _packed_head(head: Packed, B: int, adapters: Adapters | None) -> PackedHead | None:
    """The C++ kernels' inputs for B rows, of one adapter if it is one; None: they can't do that."""
    D, V = head.shape
    if V % block_size(V) or block_size(V) % PANEL:
        return None
    part = None if adapters is None else adapters.split()[1]
    if adapters is None or part is None:
        a = Packed(jnp.zeros((0, 0, D // 2, LANES, 2), jnp.bfloat16), 0)
        b = Packed(jnp.zeros((0, V // PANEL, 0, PANEL, 2), jnp.bfloat16), V)
        return PackedHead(head, a, b, jnp.zeros(0, jnp.float32), jnp.full(B, -1, jnp.int32))
    if adapters.present is None or not isinstance(part["b"], Packed):
        return None
    which = jnp.broadcast_to(jnp.where(adapters.index > 0, adapters.index, -1), (B,))
    return PackedHead(head, part["a"], part["b"], adapters.scale.astype(jnp.float32), which)


class PackedLogits:
    """Logits that the C++ kernels compute where they are asked for."""

    def __init__(self, head: PackedHead, hidden: Array):
        self._head, self._hidden = head, hidden
        self._num_blocks = head.weight.num_columns // block_size(head.weight.num_columns)

    def masses(self, scale: Array, plain: Array) -> tuple[BlockMasses, Array]:
        """See `Logits.masses`."""
        largest, mass, own = self._head.masses(self._hidden, scale, self._num_blocks)
        return BlockMasses(largest, mass), own

    def values(self) -> Array:
        """See `Logits.values`."""
        return self._head.values(self._hidden)

    def block(self, index: Array) -> Array:
        """See `Logits.block`."""
        return self._head.block(self._hidden, index, self._head.weight.num_columns // self._num_blocks)


class ChunkedLogits:
    """Logits that are computed where they are asked for: rows of the head [V, D] times hidden states [B, D]."""

    def __init__(self, head: Array, hidden: Array, adapters: Adapters | None, chunk: int):
        self._head, self._hidden, self._adapters, self._chunk = head, hidden, adapters, chunk
        self._part = None if adapters is None else adapters.split()[1]

    def masses(self, scale: Array, plain: Array) -> tuple[BlockMasses, Array]:
        """See `Logits.masses`. The last chunk overlaps the one before it, and finds the same there."""
        V, S, C = self._head.shape[0], block_size(self._head.shape[0]), self._chunk

        def step(c: Array, carry: tuple[BlockMasses, Array]) -> tuple[BlockMasses, Array]:
            start = jnp.minimum(c * C, V - C)
            found = masses_of(self._of_chunk(start), S, scale, plain)
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start // S, axis=1)
            return jax.tree.map(put, carry, found)

        blank = jnp.zeros((self._hidden.shape[0], V // S), jnp.float32)
        return jax.lax.fori_loop(0, math.ceil(V / C), step, (BlockMasses(blank, blank), blank))

    def values(self) -> Array:
        """See `Logits.values`."""
        (V, _), B = self._head.shape, self._hidden.shape[0]

        def step(c: Array, values: Array) -> Array:
            start = jnp.minimum(c * self._chunk, V - self._chunk)
            return jax.lax.dynamic_update_slice_in_dim(values, self._of_chunk(start), start, axis=1)

        return jax.lax.fori_loop(0, math.ceil(V / self._chunk), step, jnp.zeros((B, V), jnp.float32))

    def block(self, index: Array) -> Array:
        """See `Logits.block`."""
        S = block_size(self._head.shape[0])
        rows = jax.vmap(lambda i: jax.lax.dynamic_slice_in_dim(self._head, i * S, S))(index)
        out = jnp.einsum("bd,bsd->bs", self._hidden, rows, preferred_element_type=jnp.float32)
        if self._adapters is None or self._part is None:
            return out
        part, which, dtype = self._part, self._adapters.index, self._hidden.dtype
        r = part["b"].shape[1]
        inner = jnp.einsum("bd,bdr->br", self._hidden, part["a"][which].astype(dtype))
        inner = inner * self._adapters.scale[which].astype(dtype)[:, None]
        b = jax.vmap(lambda n, i: jax.lax.dynamic_slice(part["b"], (n, 0, i * S), (1, r, S))[0])(which, index)
        adapted = out + jnp.einsum("br,brs->bs", inner, b.astype(dtype), preferred_element_type=jnp.float32)
        return jnp.where((which > 0)[:, None], adapted, out)

    def _of_chunk(self, start: Array) -> Array:
        """f32[B, C]: each row's by its own adapter, of which the product with the head is a part.

        No adapter is an adapter of zeros: a row's product is of one shape whoever shares the batch, and nobody else's
        numbers are in it.
        """
        weight = jax.lax.dynamic_slice_in_dim(self._head, start, self._chunk)
        adapters, part, hidden = self._adapters, self._part, self._hidden
        if adapters is None or part is None:
            return jnp.einsum("bd,cd->bc", hidden, weight, preferred_element_type=jnp.float32)
        used = jnp.zeros(adapters.scale.shape[0], bool).at[adapters.index].set(True)
        (ids,) = jnp.nonzero(used, size=used.shape[0], fill_value=0)

        def of(n: Array) -> Array:
            inner = (hidden @ part["a"][n].astype(hidden.dtype)) * adapters.scale[n].astype(hidden.dtype)
            inner = jnp.where(n > 0, inner, 0)
            cut = (1, part["b"].shape[1], self._chunk)
            b = jax.lax.dynamic_slice(part["b"], (n, jnp.int32(0), start), cut)[0].astype(hidden.dtype)
            b = jnp.where(n > 0, b, 0)
            inputs, joined = jnp.concatenate([hidden, inner], axis=1), jnp.concatenate([weight, b.T], axis=1)
            return jnp.einsum("bk,ck->bc", inputs, joined, preferred_element_type=jnp.float32)

        def select(i: Array, out: Array) -> Array:
            return jnp.where((adapters.index == ids[i])[:, None], of(ids[i]), out)

        return jax.lax.fori_loop(1, jnp.sum(used), select, of(ids[0]))
