"""The likeliest next tokens at every position, in tiles, so that [positions, vocabulary] never exists.

Shape letters: N positions, D hidden, V vocab, r rank, M = tile, k likeliest tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def likeliest(
    hidden: Float[Array, "N D"],
    head: Float[Array, "A B"],
    *,
    num_top: int,
    tile: int,
    low_rank: tuple[Float[Array, "N r"], Float[Array, "r V"]] | None = None,
    vocab_first: bool = False,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Ids and log-probs of the `num_top` likeliest tokens of softmax(hidden @ head), the likeliest first.

    Logits are fp32 from operands of `hidden`'s dtype, as in `logprobs.target_logprobs`, whose arguments these are. Of
    equal logits the lower id comes first. tile: positions worked on at a time; logits take tile x V x 4 bytes.
    """
    N = hidden.shape[0]
    pad = -N % tile

    def tiles(x: Array) -> Array:
        return jnp.pad(x, ((0, pad), (0, 0))).reshape(-1, tile, x.shape[1])

    weight = head.astype(hidden.dtype)
    pattern = "md,vd->mv" if vocab_first else "md,dv->mv"

    def one(rows: tuple[Array, ...]) -> tuple[Array, Array]:
        logits = jnp.einsum(pattern, rows[0], weight, preferred_element_type=jnp.float32)
        if low_rank is not None:
            b = low_rank[1].astype(hidden.dtype)
            logits = logits + jnp.matmul(rows[1].astype(hidden.dtype), b, preferred_element_type=jnp.float32)
        top, ids = jax.lax.top_k(logits, num_top)
        return ids.astype(jnp.int32), top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    parts = (tiles(hidden),) if low_rank is None else (tiles(hidden), tiles(low_rank[0]))
    ids, logprobs = jax.lax.map(one, parts)
    return ids.reshape(-1, num_top)[:N], logprobs.reshape(-1, num_top)[:N]
