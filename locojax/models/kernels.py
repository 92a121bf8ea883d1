"""Attention kernels for TPU: jax's Pallas splash attention for packed rows, ragged paged attention for decoding.

Each has a plain twin in `attention`, and tests compare them in Pallas' interpret mode, values and gradients, and
compile them for TPU ahead of time. Shape letters: R rows, T tokens of a row, B decoding slots, H heads, K kv heads,
h head dim, N pages, W pages of a table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

BLOCKS = (1024, 512, 256, 128)
"""Queries, and keys, of a splash block: the largest that divides the row. All are multiples of TPU's 128 lanes."""

LANES = 128

RAGGED_QUERIES = 32
"""Queries that the ragged kernel works on at a time: slots of a decoding step."""

RAGGED_BLOCK = 1024
"""Tokens of the cache that the ragged kernel fetches at a time."""

RAGGED_MEMORY = 32 << 20
"""Bytes that the ragged kernel may take of a core's own memory, which is 64 MiB or more: 64 heads take more than the
compiler's default of 16 MiB."""


def splash(
    q: Array,
    k: Array,
    v: Array,
    until: Array,
    *,
    name: str,
    first: Array | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Array:
    """Causal attention within the segments of packed rows. q [R,T,H,h], k, v [R,S,K,h], until i32[R,S] -> [R,T,H,h].

    `until` is read as segment ids: it is the same for all tokens of a segment, and no other token's. A prefix that
    sequences share is no segment: rows that have one need the plain form.

    Under a mesh that is manual over some axes, heads are split over the others: XLA can't cut a kernel up itself.

    Args:
      first: i32[]: the queries are those of the rows' tokens from there on, a multiple of T; T is then a multiple of
        LANES, and S of T. None: of all.
      name: for remat policies, of the output and of the softmax's log-normalizers, which the backward pass reads.
      window: a query sees itself and so many keys less one before it; None: all of its segment.
      interpret: run on any platform, slowly: for tests.
    """
    begin = jnp.int32(0) if first is None else first
    attend = partial(_splash_rows, name=name, window=window, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    if not automatic:
        return attend(q, k, v, until, begin)
    (axis,) = automatic  # fsdp and sequence are manual wherever rows are computed
    parts, group = mesh.shape[axis], q.shape[2] // k.shape[2]
    heads = PartitionSpec(None, None, axis)
    kv_heads = heads if k.shape[2] % parts == 0 else PartitionSpec()

    def part(q: Array, k: Array, v: Array, until: Array, begin: Array) -> Array:
        if kv_heads != heads:  # each device has all of them, and takes those of its own queries
            mine = (jax.lax.axis_index(axis) * q.shape[2] + jnp.arange(q.shape[2], dtype=jnp.int32)) // group
            k, v = k[:, :, mine], v[:, :, mine]
        return attend(q, k, v, until, begin)

    everywhere = PartitionSpec()
    in_specs = (heads, kv_heads, kv_heads, everywhere, everywhere)
    mapped = jax.shard_map(part, in_specs=in_specs, out_specs=heads, axis_names={axis}, check_vma=False)
    return mapped(q, k, v, until, begin)


def _splash_rows(
    q: Array, k: Array, v: Array, until: Array, first: Array, *, name: str, window: int | None, interpret: bool
) -> Array:
    T, parts = q.shape[1], k.shape[1] // q.shape[1]
    pad = -T % LANES
    if pad:  # zeros, in a segment of their own; of parts of rows, T is a multiple
        q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
        until = jnp.pad(until, ((0, 0), (0, pad)), constant_values=-1)
    kernel, segment_ids = _splash_kernel(T + pad, parts, q.shape[2], name, window, interpret)
    own = until
    if parts > 1:
        # The kernel's tables say, query block by query block, which blocks of keys to visit: those of these queries.
        part = first // T
        own = jax.lax.dynamic_slice_in_dim(until, first, T, axis=1)

        def cut(table: Array) -> Array:
            axis = 0 if table.ndim == 1 else 1
            size = table.shape[axis] // parts
            return jax.lax.dynamic_slice_in_dim(table, part * size, size, axis)

        kernel = jax.tree.map(cut, kernel)
    # The kernel doesn't scale; scaled in fp32, so that nothing but the product is rounded.
    q = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    attended = jax.vmap(lambda q, k, v, own, ids: kernel(q, k, v, segment_ids(own, ids)))(q, k, v, own, until)
    return checkpoint_name(attended.swapaxes(1, 2)[:, :T], name)


def _splash_kernel(
    num_queries: int, parts: int, num_heads: int, name: str, window: int | None, interpret: bool
) -> tuple[Any, Any]:
    """The kernel for rows of `parts` x `num_queries`, and its type of segment ids. Made while a program is traced."""
    from jax.experimental.pallas.ops.tpu import splash_attention as lib

    block = next(size for size in BLOCKS if num_queries % size == 0)
    sizes = lib.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=min(block, 512),
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=min(block, 512),
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    shape = (parts * num_queries,) * 2
    mask = lib.CausalMask(shape) if window is None else lib.LocalMask(shape, (window - 1, 0), 0)
    kernel = lib.make_splash_mha(
        lib.MultiHeadMask([mask] * num_heads), block_sizes=sizes, head_shards=1, q_seq_shards=parts,
        residual_checkpoint_name=name, interpret=interpret,
    )  # fmt: skip
    return kernel, lib.SegmentIds


def ragged_fits(num_kv_heads: int, head_dim: int, dtype: Any) -> bool:
    """Whether `ragged_paged` can be compiled for such a cache: TPU's memory comes in tiles of 8 x 128 words."""
    rows, left = divmod(2 * num_kv_heads, 4 // jnp.dtype(dtype).itemsize)
    return left == 0 and (rows in (1, 2, 4) or rows % 8 == 0) and head_dim % LANES == 0


def ragged_paged(q: Array, pages: Array, table: Array, num_tokens: Array) -> Array:
    """One query a slot over the pages that its table names; see `attention.decode_paged`, its plain twin.

    q [B, H, h]; pages [N, page, 2K, h]; table i32[B, W], entries beyond a slot's pages may be anything; num_tokens
    i32[B], of which a slot without a sample may have any number that its table holds. Returns [B, H, h].
    """
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as lib

    B, W, page = q.shape[0], table.shape[1], pages.shape[1]
    with jax.numpy_dtype_promotion("standard"):  # the kernel is jax's, and mixes integer types
        return lib.ragged_paged_attention(
            q,
            pages,
            num_tokens,
            jnp.minimum(table, pages.shape[0] - 1),
            jnp.arange(B + 1, dtype=jnp.int32),
            jnp.full(1, B, jnp.int32),
            sm_scale=q.shape[-1] ** -0.5,
            # Given, as the kernel would look this machine's device up in its table, not the one compiled for.
            num_kv_pages_per_block=min(max(1, RAGGED_BLOCK // page), W),
            num_queries_per_block=min(RAGGED_QUERIES, B),
            vmem_limit_bytes=RAGGED_MEMORY,
        )
