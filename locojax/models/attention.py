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
    S, K = k.shape[1], k.shape[2]
    # Plain batched GEMMs over (row, kv head), a group's query heads stacked: the scores, by far the largest array at
    # hand, then come out of one GEMM and go into the next as they lie, without a transposed copy.
    q = q.reshape(R, T, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(R, K, H // K * T, h)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32) * h**-0.5
    scores = jnp.where(mask[:, None, None], scores.reshape(R, K, H // K, T, S), MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(R, K, H // K * T, S)
    out = jnp.matmul(probs, v).reshape(R, K, H // K, T, h)
    return out.transpose(0, 3, 1, 2, 4).reshape(R, T, H, h)


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


def decode_shared(
    q: Array,
    prompt_k: Array,
    prompt_v: Array,
    prompt_len: Array,
    members: Array,
    entry: Array,
    rank: Array,
    own_k: Array,
    own_v: Array,
    own_len: Array,
) -> Array:
    """One query a slot over its group's shared prompt and its own tokens, joined as one softmax.

    The queries of the slots that share an entry are gathered, so that a prompt is read once for its whole group, in one
    GEMM; the two parts are joined by their maxima and sums (as in flash attention, Dao et al. 2022).

    Args:
      q: [B, H, h].
      prompt_k, prompt_v: [E, K, P, h], of which the first prompt_len i32[E] are valid.
      members: i32[E, M], the slots of each entry; B where there are fewer than M.
      entry, rank: i32[B]; slot b is members[entry[b], rank[b]].
      own_k, own_v: [B, K, C, h], of which the first own_len i32[B] are valid.

    Returns: [B, H, h] in q's dtype.
    """
    B, H, h = q.shape
    E, K, P, _ = prompt_k.shape
    M, G = members.shape[1], H // K
    gathered = jnp.take(q, members, axis=0, mode="fill", fill_value=0).reshape(E, M, K, G, h)
    gathered = gathered.swapaxes(1, 2).reshape(E, K, M * G, h)
    valid = jnp.arange(P, dtype=jnp.int32)[None] < prompt_len[:, None]
    shared = _partial(gathered, prompt_k, prompt_v, valid)
    shared_top, shared_sum, shared_values = (part.reshape(E, K, M, G, -1)[entry, :, rank] for part in shared)

    seen = jnp.arange(own_k.shape[2], dtype=jnp.int32)[None] < own_len[:, None]
    own_top, own_sum, own_values = _partial(q.reshape(B, K, G, h), own_k, own_v, seen)

    top = jnp.maximum(shared_top, own_top)
    a, b = jnp.exp(shared_top - top), jnp.exp(own_top - top)
    out = (shared_values * a + own_values * b) / (shared_sum * a + own_sum * b)
    return out.reshape(B, H, h).astype(q.dtype)


def _partial(q: Array, k: Array, v: Array, valid: Array) -> tuple[Array, Array, Array]:
    """Softmax attention before division: q [N,K,X,h], k, v [N,K,S,h], valid bool[N,S] -> fp32 (maximum [N,K,X,1],
    sum [N,K,X,1], weighted values [N,K,X,h]). With no valid key the sum is S at a maximum that joining makes vanish."""
    scores = jnp.einsum("nkxh,nksh->nkxs", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(valid[:, None, None], scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    values = jnp.einsum("nkxs,nksh->nkxh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return top, jnp.sum(weights, axis=-1, keepdims=True), values


def decode_paged(q: Array, pages: Array, table: Array, num_tokens: Array) -> Array:
    """One query a slot over the pages its table names: the plain twin of the ragged paged attention kernel.

    q [B, H, h]; pages [N, page, 2K, h], keys and values of a head side by side, as the kernel lays them out;
    table i32[B, W], entries beyond the slot's pages may be anything; num_tokens i32[B] valid. Returns [B, H, h].
    """
    B, H, h = q.shape
    K = pages.shape[2] // 2
    gathered = jnp.take(pages, table, axis=0, mode="clip")  # [B, W, page, 2K, h]
    gathered = gathered.reshape(B, -1, K, 2, h).transpose(3, 0, 2, 1, 4)
    valid = jnp.arange(gathered.shape[3], dtype=jnp.int32)[None] < num_tokens[:, None]
    _, total, values = _partial(q.reshape(B, K, H // K, h), gathered[0], gathered[1], valid)
    return (values / total).reshape(B, H, h).astype(q.dtype)
