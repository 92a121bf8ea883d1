"""Attention: the plain forms, and the choice of kernel per platform.

Shape letters: R rows, T tokens of a row, B decoding slots, H heads, K kv heads, G = H // K, h head dim,
E prompt entries, P tokens of a prompt entry, C tokens of a slot.

Packed rows carry one integer a token, `until`: the index in the row at which its subtree ends. Token j is visible to
token i when `j <= i < until[j]`. Plain packing sets `until` to the end of the segment; a prefix that several sequences
share sets it to the end of the last of them, so the shared tokens are computed once and every continuation sees them,
but not its siblings. Padding has `until` = its own index + 1: it sees itself and nothing sees it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

QUERY_BLOCK = 512
"""Rows longer than this are attended block of queries by block, so that scores are [R, H, QUERY_BLOCK, T] at most."""

MASKED = -1e30
"""Added to nothing: the score of an invisible key. Finite, so that a row with no visible key stays finite."""


def visible(until: Array, query_start: int | Array, num_queries: int) -> Array:
    """bool[R, num_queries, T]: which keys each query of [query_start, query_start + num_queries) may see."""
    i = query_start + jnp.arange(num_queries, dtype=jnp.int32)[:, None]
    j = jnp.arange(until.shape[1], dtype=jnp.int32)[None, :]
    return (j <= i)[None] & (i[None] < until[:, None, :])


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """q [R,T,H,h], k, v [R,S,K,h], mask bool[R,T,S] -> [R,T,H,h]. Scores and softmax in fp32."""
    R, T, H, h = q.shape
    K = k.shape[2]
    q = q.reshape(R, T, K, H // K, h)
    scores = jnp.einsum("rtkgh,rskh->rkgts", q, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("rkgts,rskh->rtkgh", probs, v).reshape(R, T, H, h)


def packed(q: Array, k: Array, v: Array, until: Array) -> Array:
    """Causal attention within packed rows. q [R,T,H,h], k, v [R,T,K,h], until i32[R,T] -> [R,T,H,h]."""
    T = q.shape[1]
    if T <= QUERY_BLOCK:
        return _attend(q, k, v, visible(until, 0, T))
    # One block of queries at a time, recomputed in the backward pass: [T, T] scores never exist at once.
    blocks = -(-T // QUERY_BLOCK)
    pad = blocks * QUERY_BLOCK - T
    qb = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    qb = qb.reshape(q.shape[0], blocks, QUERY_BLOCK, *q.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def block(args: tuple[Array, Array]) -> Array:
        index, q_block = args
        return _attend(q_block, k, v, visible(until, index * QUERY_BLOCK, QUERY_BLOCK))

    out = jax.lax.map(block, (jnp.arange(blocks, dtype=jnp.int32), qb))
    return out.swapaxes(0, 1).reshape(q.shape[0], blocks * QUERY_BLOCK, *q.shape[2:])[:, :T]


def chunk_with_context(q: Array, k: Array, v: Array, context_k: Array, context_v: Array, context_len: Array) -> Array:
    """A chunk of a prompt attends to what is cached of it, and causally to itself: chunked prefill.

    q [R,T,H,h], k, v [R,T,K,h]; context_k, context_v [R,K,P,h] of which the first context_len i32[R] are valid.
    """
    T, P = q.shape[1], context_k.shape[2]
    keys = jnp.concatenate([context_k.swapaxes(1, 2).astype(k.dtype), k], axis=1)
    values = jnp.concatenate([context_v.swapaxes(1, 2).astype(v.dtype), v], axis=1)
    seen = jnp.arange(P, dtype=jnp.int32)[None] < context_len[:, None]
    causal = jnp.tril(jnp.ones((T, T), bool))
    mask = jnp.concatenate(
        [jnp.broadcast_to(seen[:, None], (q.shape[0], T, P)), jnp.broadcast_to(causal[None], (q.shape[0], T, T))], -1
    )
    return _attend(q, keys, values, mask)
