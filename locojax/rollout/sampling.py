"""Logits -> a token and its log-prob, on the device.

A token is drawn by inverting the cumulative distribution in two levels: first a block of the vocabulary by the blocks'
masses, then a token within it. Two uniforms a row are all the randomness there is; a Gumbel draw over 49k-256k logits
would spend more time on random bits than the model spends on its head. The blocks' masses also give the log-normalizer.

A row's draw depends on its own logits, settings and key alone, never on which other rows share the batch.
Shape letters: B rows, V vocab, N blocks, S tokens of a block, M candidates.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from locojax.types import LogprobsOf, SamplingParams

MAX_CANDIDATES = 256
"""Truncation looks at this many of the likeliest tokens first, and sorts the whole row only where they don't decide."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerRows:
    """How each row draws. Filled by the engine from SamplingParams.

    Attributes:
      key: u32[B, 2], from `key_of`. position: i32[B], how many tokens the sample has so far.
      temperature: f32[B], 0 is argmax. top_k: i32[B], 0 is off. top_p: f32[B], 1 is off. min_p: f32[B], 0 is off.
    """

    key: Any  # arrays: numpy's on the host, jax's in a program
    position: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


def key_of(seed: int | str, sample_index: int) -> np.ndarray:
    """u32[2]: the key of a sample, the same on every host and slot."""
    digest = hashlib.blake2b(f"{seed}/{sample_index}".encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u4").copy()


def settings_of(params: SamplingParams) -> tuple[float, int, float, float]:
    """(temperature, top_k, top_p, min_p) as SamplerRows wants them: off is 0, 0, 1, 0."""
    return params.temperature, max(params.top_k, 0), params.top_p, params.min_p


def truncates(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p is on."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def block_size(vocab_size: int) -> int:
    """The divisor of the vocabulary nearest to 256, so that no padded copy of the logits is needed; else 256."""
    divisors = [d for d in range(32, 2049) if vocab_size % d == 0]
    return min(divisors, key=lambda d: abs(d - 256)) if divisors else min(256, vocab_size)


def _blocks(logits: Array, S: int) -> Array:
    """f32[B, V] -> f32[B, N, S], padded with -inf where V is no multiple of S."""
    B, V = logits.shape
    pad = -V % S
    if pad:
        logits = jnp.pad(logits, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    return logits.reshape(B, (V + pad) // S, S)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMasses:
    """Of each block of the vocabulary the largest logit f32[B, N], and the sum of exp(logit - largest) f32[B, N]."""

    largest: Array
    mass: Array


@runtime_checkable
class Logits(Protocol):
    """What drawing a token asks about a row's logits."""

    def masses(self, scale: Array, plain: Array) -> tuple[BlockMasses, Array]:
        """The blocks' masses, and those of `scale` f32[B] times the logits: sum of exp(scale (logit - largest)),
        f32[B, N]. plain bool[B]: rows whose scale is 1."""

    def block(self, index: Array) -> Array:
        """Logits of one block of each row: index i32[B] -> f32[B, S]."""


    def values(self) -> Array:
        """All of them, f32[B, V]."""


class WholeLogits:
    """Logits that are there: f32[B, V]."""

    def __init__(self, values: Array):
        self._values = values

    def values(self) -> Array:
        """See `Logits`."""
        return self._values

    def masses(self, scale: Array, plain: Array) -> tuple[BlockMasses, Array]:
        """See `Logits`."""
        return masses_of(self._values, block_size(self._values.shape[1]), scale, plain)

    def block(self, index: Array) -> Array:
        """See `Logits`."""
        return _pick_row(_blocks(self._values, block_size(self._values.shape[1])), index)


def masses_of(logits: Array, S: int, scale: Array, plain: Array) -> tuple[BlockMasses, Array]:
    """`Logits.masses` of logits f32[B, V], all of a vocabulary or some of its blocks of S."""
    blocks = _blocks(logits, S)
    largest = jnp.maximum(jnp.max(blocks, axis=-1), jnp.finfo(jnp.float32).min)  # of nothing but -inf: a mass of 0
    mass = jnp.sum(jnp.exp(blocks - largest[..., None]), axis=-1)

    def scaled() -> Array:
        above = (blocks - largest[..., None]) * scale[:, None, None]
        return jnp.where(plain[:, None], mass, jnp.sum(jnp.exp(above), axis=-1))

    return BlockMasses(largest, mass), jax.lax.cond(jnp.all(plain), lambda: mass, scaled)


def _pick_row(values: Array, index: Array) -> Array:
    """values[b, index[b]]: [B, N, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: row[i])(values, index)


def uniforms(rows: SamplerRows) -> Array:
    """f32[B, 2] in [0, 1): one for each level, a function of (seed, sample index, position) only."""

    def draw(key: Array, position: Array) -> Array:
        base = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(base, position), (2,))

    return jax.vmap(draw)(rows.key, rows.position)


def invert(masses: Array, u: Array) -> Array:
    """i32[B]: the first index whose cumulative mass passes `u` of the total; never one without mass.

    masses f32[B, N] >= 0, u f32[B] in [0, 1). A parallel sum need not be monotone to the last bit, so an index without
    mass is refused outright; and should rounding leave none, the heaviest is taken.
    """
    cumulative = jnp.cumsum(masses, axis=-1)
    target = u * cumulative[:, -1]
    hit = (cumulative > target[:, None]) & (masses > 0)
    return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), jnp.argmax(masses, axis=-1)).astype(jnp.int32)


def _draw_sorted(
    scaled: Array, ids: Array, total: Array, rows: SamplerRows, u: Array, vocab: int
) -> tuple[Array, Array]:
    """Draws from the likeliest tokens, sorted, truncated by each row's settings. -> (token i32[B], decided bool[B]).

    scaled f32[B, M] descending, the row's maximum at 0; ids i32[B, M]; total f32[B] the mass of the whole row.
    Order of the filters: top-k; top-p over what top-k left (the smallest set with at least that mass; the likeliest
    token always stays, Holtzman et al. 2020); min-p relative to the likeliest (Nguyen et al. 2024). Each keeps a prefix
    of the sorted row, so the three together do. Decided: the prefix ends within the M candidates.
    """
    M = scaled.shape[1]
    order = jnp.arange(M, dtype=jnp.int32)[None]
    mass = jnp.exp(scaled)
    top_k = jnp.where(rows.top_k > 0, rows.top_k, vocab)[:, None]
    in_k = order < top_k
    cumulative = jnp.cumsum(jnp.where(in_k, mass, 0.0), axis=-1)
    total = jnp.where(rows.top_k > 0, cumulative[:, -1], total)
    before = jnp.concatenate([jnp.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], axis=-1)
    in_p = (rows.top_p >= 1.0)[:, None] | (before < (rows.top_p * total)[:, None])
    in_min = mass >= (rows.min_p * mass[:, 0])[:, None]
    keep = (in_k & in_p & in_min) | (order == 0)
    ended = ~keep[:, -1] | (M >= vocab)
    # A top-k beyond the candidates changes the total that top-p is a share of, so then only min-p can have decided.
    total_known = (top_k[:, 0] <= M) | (rows.top_k == 0) | (rows.top_p >= 1.0) | (M >= vocab)
    exact_k = (top_k[:, 0] == M) & keep[:, -1]
    index = invert(jnp.where(keep, mass, 0.0), u[:, 0])
    return _pick_row(ids, index), (ended & total_known) | exact_k


def _draw_truncated(scaled: Array, total: Array, truncated: Array, rows: SamplerRows, u: Array) -> Array:
    """Draws of the truncated rows, exactly: from the candidates, or from a full sort where they don't decide."""
    V = scaled.shape[1]
    values, ids = jax.lax.top_k(scaled, min(MAX_CANDIDATES, V))
    token, decided = _draw_sorted(values, ids, total, rows, u, V)

    def sort_all(token: Array) -> Array:
        values, ids = jax.lax.top_k(scaled, V)
        return jnp.where(decided, token, _draw_sorted(values, ids, total, rows, u, V)[0])

    return jax.lax.cond(jnp.any(truncated & ~decided), sort_all, lambda token: token, token)


def log_softmax_parts(logits: Array, temperature: Array, logprobs_of: LogprobsOf) -> tuple[Array, Array]:
    """(scaled f32[B, V], normalizer f32[B, 1]): scaled - normalizer are the log-probs that `logprobs_of` names.

    temperature f32[B]. A temperature of 0 has no distribution to tell of but the raw one.
    """
    if logprobs_of == "tempered":
        logits = logits / jnp.where(temperature == 0.0, 1.0, temperature)[:, None]
    return logits, jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def likeliest(logits: Logits, temperature: Array, num: int, logprobs_of: LogprobsOf) -> tuple[Array, Array]:
    """The `num` likeliest tokens of each row, likeliest first: ids i32[B, num], log-probs f32[B, num]."""
    if not num:
        nothing = (temperature.shape[0], 0)
        return jnp.zeros(nothing, jnp.int32), jnp.zeros(nothing, jnp.float32)
    scaled, normalizer = log_softmax_parts(logits.values(), temperature, logprobs_of)
    top, ids = jax.lax.top_k(scaled, num)
    return ids, top - normalizer


@partial(jax.jit, static_argnames=("logprobs_of", "truncates"))
def sample(
    logits: Array, rows: SamplerRows, logprobs_of: LogprobsOf = "raw", truncates: bool = True
) -> tuple[Array, Array]:
    """`sample_from` logits f32[B, V] that are there."""
    return sample_from(WholeLogits(logits), rows, logprobs_of, truncates)


def sample_from(logits: Logits, rows: SamplerRows, logprobs_of: LogprobsOf, truncates: bool) -> tuple[Array, Array]:
    """One token a row, and its log-prob: i32[B], f32[B].

    `truncates` False promises that no row has top-k, top-p or min-p, and saves two thirds of the time (on CPU even a
    branch that isn't taken costs a copy of the logits).

    `raw` log-probs are of softmax(logits); `tempered` of softmax(logits / temperature), which for argmax (temperature
    0) puts everything on one token: 0. Truncation never changes the log-prob reported.
    """
    greedy = rows.temperature == 0.0
    plain = (rows.temperature == 1.0) | greedy
    scale = jnp.where(plain, 1.0, 1.0 / jnp.where(greedy, 1.0, rows.temperature))
    found, own = logits.masses(scale, plain)
    largest = jnp.max(found.largest, axis=-1)
    above = found.largest - largest[:, None]
    raw_total = jnp.sum(found.mass * jnp.exp(above), axis=-1)
    masses = own * jnp.exp(above * scale[:, None])
    total = jnp.sum(masses, axis=-1)
    u = uniforms(rows)

    block = invert(masses, u[:, 0])
    best_block = jnp.argmax(found.largest, axis=-1).astype(jnp.int32)  # the first of equals, at both levels
    block = jnp.where(greedy, best_block, block)
    chosen = logits.block(block)
    S = chosen.shape[1]
    place = invert(jnp.exp((chosen - largest[:, None]) * scale[:, None]), u[:, 1])
    place = jnp.where(greedy, jnp.argmax(chosen, axis=-1).astype(jnp.int32), place)
    token = block * S + place
    above = _pick_row(chosen, place) - largest

    if truncates:
        truncated = ~greedy & ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0))

        def truncate() -> tuple[Array, Array]:
            values = logits.values()
            scaled = (values - largest[:, None]) * scale[:, None]
            drawn = _draw_truncated(scaled, total, truncated, rows, u)
            of_drawn = jnp.take_along_axis(values, drawn[:, None], axis=-1)[:, 0] - largest
            return jnp.where(truncated, drawn, token), jnp.where(truncated, of_drawn, above)

        token, above = jax.lax.cond(jnp.any(truncated), truncate, lambda: (token, above))

    if logprobs_of == "raw":
        return token, above - jnp.log(raw_total)
    return token, jnp.where(greedy, 0.0, above * scale - jnp.log(total))
