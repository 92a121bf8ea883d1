"""Attention: the plain forms, and the choice of kernel per platform.

The packed form and the decoding form gave the same bits in fp32 on the CPU they were measured on; a test holds them to
rounding. There a GEMM adds its products one after the other, whatever its other dimensions, and a key that isn't
visible adds an exact 0; so both forms let GEMMs do every sum over keys, in the order of positions, and leave nothing to
a reduction, whose order depends on the layout.

Shape letters: R rows, T tokens of a row, B decoding slots, H heads, K kv heads, G = H // K, h head dim,
S keys, where they aren't T, E prompt entries, P tokens of a prompt entry, C tokens of a slot.

Packed rows carry one integer a token, `until`: the index in the row at which its subtree ends. Token j is visible to
token i when `j <= i < until[j]`. Plain packing sets `until` to the end of the segment; a prefix that several sequences
share sets it to the end of the last of them, so the shared tokens are computed once and every continuation sees them,
but not its siblings. Padding has `until` = its own index + 1: it sees itself and nothing sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from locojax.models import kernels
from locojax.models.dense import as_two
from locojax.models.native import ops

Kernel = Literal["plain", "tpu"]
"""Which form attention takes: jax.numpy, or Pallas kernels for TPU (splash for packed rows, ragged paged to decode)."""

PackedKernel = Literal["plain", "tpu", "native"]
"""The form within packed rows: as `Kernel`, or `models.native.ops`, in bf16 on CPU."""

QUERY_BLOCK = 512
"""Rows longer than this are attended block of queries by block, so that scores are [R, H, QUERY_BLOCK, T] at most."""

CAUSAL_BLOCK = 128
"""Within that, queries are attended in blocks of so many."""

ATTENDED = "attended"
"""Name, for remat policies, of what the backward pass of attention reads besides q, k and v."""

MAX_SCORES = 1 << 28
"""A prompt's chunk with more scores than this attends to what is cached block of queries by block."""

MASKED = -1e30
"""Added to nothing: the score of an invisible key. Finite, so that a row with no visible key stays finite."""


def kernel_of(platform: str) -> Kernel:
    """The form for a platform, by jax's name of it."""
    return "tpu" if platform == "tpu" else "plain"


def visible(until: Array, query_start: int | Array, num_queries: int, window: int | None = None) -> Array:
    """bool[R, num_queries, T]: which keys each query of [query_start, query_start + num_queries) may see.

    window: only the last so many of them.
    """
    i = query_start + jnp.arange(num_queries, dtype=jnp.int32)[:, None]
    j = jnp.arange(until.shape[1], dtype=jnp.int32)[None, :]
    near = j <= i if window is None else (j <= i) & (i - j < window)
    return near[None] & (i[None] < until[:, None, :])


ONES = 16
"""Columns of ones that a sum over keys is multiplied by. With fewer, XLA's CPU backend sums in another order."""


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """q [R,T,H,h], k, v [R,S,K,h], mask bool[R,T,S] -> [R,T,H,h]. Scores and softmax in fp32."""
    R, T, H, h = q.shape
    K = k.shape[2]
    # Plain batched GEMMs over (row, kv head), a group's query heads stacked: the scores, by far the largest array at
    # hand, then come out of one GEMM and go into the next as they lie, without a transposed copy.
    q = q.reshape(R, T, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(R, K, H // K * T, h)
    out = _softmax_of(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask)
    return out.reshape(R, K, H // K, T, h).transpose(0, 3, 1, 2, 4).reshape(R, T, H, h)


@jax.custom_vjp
def _softmax_of(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """q [R,K,G*T,h], k, v [R,K,S,h], mask bool[R,T,S] -> [R,K,G*T,h]."""
    return _softmax_fwd(q, k, v, mask)[0]


def _masked_scores(q: Array, k: Array, mask: Array) -> Array:
    R, T, S = mask.shape
    K, X = q.shape[1:3]
    return jnp.where(mask[:, None, None], _scores(q, k).reshape(R, K, X // T, T, S), MASKED).reshape(R, K, X, S)


def _softmax_fwd(q: Array, k: Array, v: Array, mask: Array):
    scores = _masked_scores(q, k, mask)
    top = _top(scores)
    values, total = _weighted(_weights(scores, top), v)
    out = checkpoint_name((values / total).astype(v.dtype), ATTENDED)
    return out, (q, k, v, mask, out, checkpoint_name(top + jnp.log(total), ATTENDED))


def _softmax_bwd(kept, g: Array):
    """Dao et al. 2022, appendix B.2: from the log-normalizer on, weights are made again rather than kept."""
    q, k, v, mask, out, log_norm = kept
    g32 = g.astype(jnp.float32)
    weights = jnp.exp(_masked_scores(q, k, mask) - log_norm)
    d_v = jnp.einsum("nkxs,nkxh->nksh", weights.astype(g.dtype), g, preferred_element_type=jnp.float32)
    d_weights = jnp.einsum("nkxh,nksh->nkxs", g, v, preferred_element_type=jnp.float32)
    mean = jnp.sum(g32 * out.astype(jnp.float32), axis=-1, keepdims=True)
    d_scores = (weights * (d_weights - mean) * q.shape[-1] ** -0.5).astype(q.dtype)
    d_q = jnp.einsum("nkxs,nksh->nkxh", d_scores, k, preferred_element_type=jnp.float32)
    d_k = jnp.einsum("nkxs,nkxh->nksh", d_scores, q, preferred_element_type=jnp.float32)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_softmax_of.defvjp(_softmax_fwd, _softmax_bwd)


def _scores(q: Array, k: Array) -> Array:
    """q [N,K,X,h], k [N,K,S,h] -> fp32 [N,K,X,S]."""
    multiply = partial(jnp.einsum, "nkxh,nksh->nkxs", preferred_element_type=jnp.float32)
    return as_two(q, 2, lambda q: multiply(q, k)) * q.shape[-1] ** -0.5


def _top(scores: Array) -> Array:
    """The maximum over keys, [N,K,X,1]; no gradient passes, as none is needed."""
    return jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))


def _weights(scores: Array, top: Array) -> Array:
    """exp(scores - top). The barrier keeps XLA from fusing the maximum's reduction in, which gives exp other bits."""
    return jnp.exp(scores - jax.lax.optimization_barrier(top))


def _weighted(weights: Array, v: Array) -> tuple[Array, Array]:
    """weights fp32 [N,K,X,S], v [N,K,S,h] -> fp32: weighted values [N,K,X,h], and the sum of weights [N,K,X,1]."""
    # Behind a barrier, or XLA turns the product with a constant of ones into a reduction.
    ones = jax.lax.optimization_barrier(jnp.ones((weights.shape[-1], ONES), jnp.float32))
    multiply = partial(jnp.einsum, "nkxs,nksh->nkxh", preferred_element_type=jnp.float32)
    values = as_two(weights.astype(v.dtype), 2, lambda weights: multiply(weights, v))
    return values, jnp.einsum("nkxs,so->nkxo", weights, ones)[..., :1]


def packed(
    q: Array,
    k: Array,
    v: Array,
    until: Array,
    *,
    first: Array | None = None,
    window: int | None = None,
    kernel: PackedKernel = "plain",
) -> Array:
    """Causal attention within packed rows. q [R,T,H,h], k, v [R,S,K,h], until i32[R,S] -> [R,T,H,h].

    Args:
      first: i32[], a multiple of T: the queries are those of the rows' tokens from there on. None: of all, and S = T.
      window: a query sees the last so many tokens, itself included.
      kernel: see `kernels.splash` for what rows it takes; native takes whole ones, without a window.
    """
    if kernel == "tpu":
        return kernels.splash(q, k, v, until, first=first, name=ATTENDED, window=window)
    if kernel == "native":
        if first is not None or window is not None:
            raise ValueError("The C++ kernel for attention takes whole rows, without a window")
        return _native(q, k, v, until)
    T, S = q.shape[1], k.shape[1]
    if first is None and T <= QUERY_BLOCK:
        # Static blocks of queries, each over the keys up to its own end: what lies above the diagonal isn't computed.
        starts = range(0, T, CAUSAL_BLOCK)
        blocks = [
            _attend(
                q[:, start : (end := min(start + CAUSAL_BLOCK, T))], k[:, :end], v[:, :end],
                visible(until[:, :end], start, end - start, window),
            )
            for start in starts
        ]  # fmt: skip
        return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
    # One block of queries at a time, recomputed in the backward pass: [T, T] scores never exist at once.
    # Where a row's tokens are split over devices, so are its scores.
    size = min(T, max(CAUSAL_BLOCK, QUERY_BLOCK * T // S))
    start = jnp.int32(0) if first is None else first
    num_blocks = -(-T // size)
    pad = num_blocks * size - T
    qb = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    qb = qb.reshape(q.shape[0], num_blocks, size, *q.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def block(args: tuple[Array, Array]) -> Array:
        index, q_block = args
        return _attend(q_block, k, v, visible(until, start + index * size, size, window))

    out = jax.lax.map(block, (jnp.arange(num_blocks, dtype=jnp.int32), qb))
    return out.swapaxes(0, 1).reshape(q.shape[0], num_blocks * size, *q.shape[2:])[:, :T]


@jax.custom_vjp
def _native(q: Array, k: Array, v: Array, until: Array) -> Array:
    return ops.attention_forward(q, k, v, until)[0]


def _native_fwd(q: Array, k: Array, v: Array, until: Array):
    out, log_norm = (checkpoint_name(each, ATTENDED) for each in ops.attention_forward(q, k, v, until))
    return out, (q, k, v, until, out, log_norm)


def _native_bwd(kept, g: Array):
    q, k, v, until, out, log_norm = kept
    d_q, d_k, d_v = ops.attention_backward(q, k, v, until, out, log_norm, g)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_native.defvjp(_native_fwd, _native_bwd)


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
    R, _, H, h = q.shape
    if R * H * T * (P + T) <= MAX_SCORES or T % CAUSAL_BLOCK:
        return _attend(q, keys, values, mask)
    blocks = (R, T // CAUSAL_BLOCK, CAUSAL_BLOCK)
    queries, masks = q.reshape(*blocks, H, h).swapaxes(0, 1), mask.reshape(*blocks, P + T).swapaxes(0, 1)
    out = jax.lax.map(lambda block: _attend(block[0], keys, values, block[1]), (queries, masks))
    return out.swapaxes(0, 1).reshape(q.shape)


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
) -> tuple[Array, Array]:
    """One query a slot over its group's shared prompt and its own tokens, joined as one softmax.

    The queries of the slots that share an entry are gathered, so that a prompt is read once for its whole group, in one
    GEMM. In fp32 the sums over the prompt's keys are then continued over the slot's own in a second GEMM, as its first
    terms with weight 1: the sums are taken in the order in which one GEMM over all keys would take them.

    Args:
      q: [B, H, h].
      prompt_k, prompt_v: [E, K, P, h], of which the first prompt_len i32[E] are valid.
      members: i32[E, M], the slots of each entry; B where there are fewer than M.
      entry, rank: i32[B]; slot b is members[entry[b], rank[b]].
      own_k: [B, K, C, h], of which the first own_len i32[B] are valid.
      own_v: [B, K, G + C, h]: the first G rows are room for what the prompt's values sum up to.

    Returns: [B, H, h] in q's dtype, and own_v, whose room has been written to: to be kept, so that nothing is copied.
    """
    B, H, h = q.shape
    E, K, P, _ = prompt_k.shape
    C, M, G = own_k.shape[2], members.shape[1], H // K

    def to_entries(x: Array) -> Array:
        """[B, K, G, n] -> [E, K, M*G, n]."""
        gathered = jnp.take(x, members, axis=0, mode="fill", fill_value=0)
        return gathered.swapaxes(1, 2).reshape(E, K, M * G, x.shape[-1])

    def to_slots(x: Array) -> Array:
        """[E, K, M*G, n] -> [B, K, G, n]."""
        return x.reshape(E, K, M, G, x.shape[-1])[entry, :, rank]

    grouped = q.reshape(B, K, G, h)
    in_prompt = (jnp.arange(P, dtype=jnp.int32)[None] < prompt_len[:, None])[:, None, None]
    in_own = (jnp.arange(C, dtype=jnp.int32)[None] < own_len[:, None])[:, None, None]
    prompt_scores = jnp.where(in_prompt, _scores(to_entries(grouped), prompt_k), MASKED)
    own_scores = jnp.where(in_own, _scores(grouped, own_k), MASKED)
    top = jnp.maximum(to_slots(_top(prompt_scores)), _top(own_scores))
    of_prompt = _weighted(_weights(prompt_scores, to_entries(top)), prompt_v)
    prompt_values, prompt_total = (to_slots(part) for part in of_prompt)
    own_weights = _weights(own_scores, top)
    if own_v.dtype != jnp.float32:  # room in the cache's dtype would round the prompt's sums
        own_values, own_total = _weighted(own_weights, own_v[:, :, G:])
        values, total = prompt_values + own_values, prompt_total + own_total
    else:
        identity = jnp.broadcast_to(jnp.eye(G, dtype=jnp.float32), (B, K, G, G))
        continued = jnp.concatenate([identity, own_weights], axis=-1)
        own_v = own_v.at[:, :, :G].set(prompt_values)
        values = jnp.einsum("bkgs,bksh->bkgh", continued, own_v)
        ones = jnp.ones((B, K, C, ONES), jnp.float32)
        started = jnp.concatenate([jnp.broadcast_to(prompt_total, (B, K, G, ONES)), ones], axis=2)
        total = jnp.einsum("bkgs,bkso->bkgo", continued, started)[..., :1]
    return (values / total).reshape(B, H, h).astype(q.dtype), own_v


def decode_rows(q: Array, keys: Sequence[Array], values: Sequence[Array], num_tokens: Array) -> Array:
    """One query a slot over its own row, which is cut along its tokens into several arrays.

    q [B, H, h]; keys, values: [B, K, c, h] each, one after another; num_tokens i32[B], at least 1, valid. Returns
    [B, H, h]. Arrays that no row has reached are not read. The parts' softmaxes are joined as in Dao et al. 2022.
    """
    B, H, h = q.shape
    K = keys[0].shape[1]
    grouped, longest = q.reshape(B, K, H // K, h), jnp.max(num_tokens)
    nothing = jnp.zeros((B, K, H // K, 1), jnp.float32)

    def part(begin: int, k: Array, v: Array) -> tuple[Array, Array, Array]:
        valid = begin + jnp.arange(k.shape[2], dtype=jnp.int32)[None] < num_tokens[:, None]
        scores = jnp.where(valid[:, None, None], _scores(grouped, k), MASKED)
        top = _top(scores)
        return (top, *_weighted(_weights(scores, top), v))

    def skipped() -> tuple[Array, Array, Array]:
        return nothing + MASKED, jnp.zeros((B, K, H // K, h), jnp.float32), nothing

    parts, begin = [], 0
    for k, v in zip(keys, values, strict=True):
        compute = partial(part, begin, k, v)
        parts.append(compute() if begin == 0 else jax.lax.cond(longest > begin, compute, skipped))
        begin += k.shape[2]
    top = parts[0][0]
    for other, _, _ in parts[1:]:
        top = jnp.maximum(top, other)
    shares = [jnp.exp(mine - top) for mine, _, _ in parts]
    summed, total = jnp.zeros_like(parts[0][1]), nothing
    for share, (_, values_of, total_of) in zip(shares, parts, strict=True):
        summed, total = summed + share * values_of, total + share * total_of
    return (summed / total).reshape(B, H, h).astype(q.dtype)


def decode_paged(q: Array, pages: Array, table: Array, num_tokens: Array, *, kernel: Kernel = "plain") -> Array:
    """One query a slot over the pages its table names: the ragged paged attention kernel, or its plain twin.

    q [B, H, h]; pages [N, page, 2K, h], keys and values of a head side by side, as the kernel lays them out;
    table i32[B, W], entries beyond the slot's pages may be anything; num_tokens i32[B] valid. Returns [B, H, h].
    """
    if kernel == "tpu":
        return kernels.ragged_paged(q, pages, table, num_tokens)
    B, H, h = q.shape
    K = pages.shape[2] // 2
    gathered = jnp.take(pages, table, axis=0, mode="clip")  # [B, W, page, 2K, h]
    gathered = gathered.reshape(B, -1, K, 2, h).transpose(3, 0, 2, 1, 4)
    valid = jnp.arange(gathered.shape[3], dtype=jnp.int32)[None] < num_tokens[:, None]
    scores = jnp.where(valid[:, None, None], _scores(q.reshape(B, K, H // K, h), gathered[0]), MASKED)
    values, total = _weighted(_weights(scores, _top(scores)), gathered[1])
    return (values / total).reshape(B, H, h).astype(q.dtype)
