"""The compiled programs: prefill (packed, or a chunk at a time), multi-iteration decode, prompt log-probs.

Each is compiled ahead of time for the shapes it is called with, once; the cache is donated. Shape letters: B rows,
R x T packed rows, N new prompts, D hidden, V vocab, K iterations.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from locojax.models import attention, decoder
from locojax.models.executables import Executables, Program, beside_jax_cache
from locojax.models.lora import Adapters, present_in, stack_axis
from locojax.models.native.ops import Packed, pack
from locojax.models.spec import ModelSpec
from locojax.rollout import head
from locojax.rollout.layouts import Cache, Destination, Layout, Tables
from locojax.rollout.sampling import SamplerRows, WholeLogits, likeliest, log_softmax_parts, sample_from
from locojax.types import LogprobsOf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """The running samples, each at its row; rows without one have `alive` False.

    Attributes:
      token i32[B]: the last one sampled, not yet stored. own i32[B]: tokens stored in the row.
      fresh bool[B]: has no token since its prompt was stored; its first comes from the prompt's last hidden state.
      remaining i32[B]: tokens it may still have. stop_ids i32[B, S]: padded with -1.
      adapter i32[B]. sampler, tables: see there.
    """

    token: Any
    own: Any
    alive: Any
    fresh: Any
    remaining: Any
    stop_ids: Any
    adapter: Any
    sampler: SamplerRows
    tables: Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """A token i32[B] for each row, its log-prob f32[B], and the likeliest tokens: i32[B, k], log-probs f32[B, k]."""

    token: Any
    logprob: Any
    top_ids: Any
    top_logprobs: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreRows:
    """What is asked about T positions of one prompt; T is a tile, so that the logits stay [tile, V].

    Attributes:
      targets i32[T, J]: tokens whose log-probs are wanted. position i32[T]: in the prompt, of the token predicted.
      temperature f32[]: of the request. keys u32[A, 2]: one for each token to draw at a position.
      adapter i32[1].
    """

    targets: Any
    position: Any
    temperature: Any
    keys: Any
    adapter: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probs of the targets f32[T, J]; likeliest tokens [T, k]; tokens drawn [T, A]; ids i32, log-probs f32."""

    targets: Any
    top_ids: Any
    top_logprobs: Any
    drawn_ids: Any
    drawn_logprobs: Any


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """What all programs of an engine have in common.

    `axis`: the mesh axis over which hosts decode in lockstep, each its share of the rows; then all hosts' rows decide
    when decoding stops. With one iteration a call there is nothing to decide: each host looks at its own.
    """

    model: ModelSpec
    layout: Layout
    dtype: Any
    logprobs_of: LogprobsOf
    max_iterations: int
    axis: str | None = None


def pick_adapters(adapters: Adapters | None, index: Array, *, packed: bool = False) -> Adapters | None:
    """Adapters for rows with these indices; 0 is none: row 0 of a stack has scale 0, a single one a scale per row.

    A single row's is cut out of the stack, once for a whole program: what is left is a model with one adapter, without
    a loop over those present in each layer. With `packed` weights there is no such loop, and it would be a copy.
    """
    if adapters is None:
        return None
    if not adapters.scale.ndim:
        return dataclasses.replace(adapters, scale=jnp.where(index > 0, adapters.scale, 0.0))
    if index.shape[0] > 1 or packed:
        return dataclasses.replace(adapters, index=index, present=present_in(index, adapters.scale.shape[0]))

    def own(leaf: Array, axis: int) -> Array:
        return jnp.where(index[0] > 0, jax.lax.dynamic_index_in_dim(leaf, index[0], axis, keepdims=False), 0.0)

    tree = {
        module: {name: own(leaf, stack_axis(module)) for name, leaf in parts.items()}
        for module, parts in adapters.tree.items()
    }
    return Adapters(tree, own(adapters.scale, 0))


def decode(
    spec: ProgramSpec,
    weights: decoder.Params,
    adapters: Adapters | None,
    cache: Cache,
    rows: DecodeRows,
    num_iterations: Array,
    return_at: Array,
    truncates: bool,
    num_top: int,
) -> tuple[Cache, Drawn, Array, Array]:
    """First tokens of fresh rows, then iterations of: forward, sample, append, check stops.

    Stops after `num_iterations` i32[], or once at most `return_at` i32[] rows are alive. `truncates`: see `sample`.
    `num_top`: likeliest tokens to report at each position.

    Returns: cache; what was drawn [K+1, B], of which item 0 is the fresh rows'; how many tokens each row gained,
      i32[B]; how many iterations ran, i32[].
    """
    mine = pick_adapters(adapters, rows.adapter, packed=decoder.is_packed(weights))
    B = rows.token.shape[0]

    def draw(hidden: Array, count: Array) -> Drawn:
        logits = head.logits(weights, hidden, mine)
        sampler = dataclasses.replace(rows.sampler, position=rows.sampler.position + count)
        token, logprob = sample_from(logits, sampler, spec.logprobs_of, truncates)
        return Drawn(token, logprob, *likeliest(logits, sampler.temperature, num_top, spec.logprobs_of))

    def still_alive(alive: Array, token: Array, count: Array) -> Array:
        stopped = jnp.any(token[:, None] == rows.stop_ids, axis=-1)
        return alive & ~stopped & (count < rows.remaining)

    def first() -> Drawn:
        return draw(cache["last"][rows.tables.entry], jnp.zeros(B, jnp.int32))

    fresh = rows.fresh & rows.alive
    nothing = Drawn(rows.token, jnp.zeros(B, jnp.float32), jnp.zeros((B, num_top), jnp.int32),
                    jnp.zeros((B, num_top), jnp.float32))  # fmt: skip
    new = jax.lax.cond(jnp.any(fresh), first, lambda: nothing)
    token = jnp.where(fresh, new.token, rows.token)
    count = fresh.astype(jnp.int32)
    alive = jnp.where(fresh, still_alive(rows.alive, token, count), rows.alive)
    new = dataclasses.replace(new, token=token)
    drawn = jax.tree.map(lambda x: jnp.zeros((spec.max_iterations + 1, *x.shape), x.dtype).at[0].set(x), new)

    def proceed(carry: tuple[Any, ...]) -> Array:
        i, num_alive = carry[0], jnp.sum(carry[4].astype(jnp.int32))
        if spec.axis is not None and spec.max_iterations > 1:
            num_alive = jax.lax.psum(num_alive, spec.axis)
        return (i < num_iterations) & (num_alive > return_at)

    def iterate(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, layers, token, own, alive, count, drawn = carry

        def attend(layer: Any, q: Array, k: Array, v: Array, rope: decoder.Rope) -> tuple[Array, Any]:
            cos, sin = rope
            out, kept = spec.layout.decode(layer, rows.tables, own, q[:, 0], k[:, 0], v[:, 0], (cos[:, 0], sin[:, 0]))
            return out[:, None], kept

        positions = (rows.tables.prompt_len + own)[:, None]
        hidden, layers = decoder.run_layers_unrolled(
            weights, spec.model, token[:, None], positions, attend, layers,
            adapters=mine, dtype=spec.dtype,
        )  # fmt: skip
        new = draw(hidden[:, 0], count)
        token = jnp.where(alive, new.token, token)
        new = dataclasses.replace(new, token=token)
        step = alive.astype(jnp.int32)
        count, own = count + step, own + step
        alive = still_alive(alive, token, count)
        drawn = jax.tree.map(lambda all, one: all.at[i + 1].set(one), drawn, new)
        return i + 1, layers, token, own, alive, count, drawn

    start = (jnp.int32(0), cache["layers"], token, rows.own, alive, count, drawn)
    ran, layers, _, _, _, count, drawn = jax.lax.while_loop(proceed, iterate, start)
    return {**cache, "layers": layers}, drawn, count, ran


def prefill(
    spec: ProgramSpec,
    weights: decoder.Params,
    adapters: Adapters | None,
    cache: Cache,
    packed: tuple[Array, Array, Array],
    source: Array,
    last: Array,
    to: Destination,
    adapter: Array,
) -> tuple[Cache, Array]:
    """Computes packed prompts and stores each. packed: tokens, positions, until, i32[R, T] each.

    source i32[N, P] and last i32[N] point into the flattened rows; adapter i32[R].
    Returns the cache and the hidden states [R*T, D].
    """
    tokens, positions, until = packed

    def attend(layer: Any, q: Array, k: Array, v: Array, rope: decoder.Rope) -> tuple[Array, Any]:
        q, k = decoder.rotated(q, k, rope)
        flat_k, flat_v = (x.reshape(-1, *x.shape[2:])[source] for x in (k, v))
        out = attention.packed(q, k, v, until, kernel=spec.layout.prefill_kernel)
        return out, spec.layout.store(layer, to, flat_k, flat_v)

    hidden, layers = decoder.run_layers_unrolled(
        weights, spec.model, tokens, positions, attend, cache["layers"],
        adapters=pick_adapters(adapters, adapter, packed=decoder.is_packed(weights)), dtype=spec.dtype,
    )  # fmt: skip
    hidden = hidden.reshape(-1, hidden.shape[-1])
    kept = cache["last"].at[to.entry].set(hidden[last].astype(cache["last"].dtype), mode="drop")
    return {"layers": layers, "last": kept}, hidden


def prefill_chunk(
    spec: ProgramSpec,
    weights: decoder.Params,
    adapters: Adapters | None,
    cache: Cache,
    tokens: Array,
    start: Array,
    num_valid: Array,
    to: Destination,
    adapter: Array,
) -> tuple[Cache, Array]:
    """The next chunk of one long prompt: tokens i32[1, T] at positions start.., of which `num_valid` i32[] count.

    Attends to the `start` i32[] tokens stored before. Returns the cache and the chunk's hidden states [T, D].
    """
    T = tokens.shape[1]

    def attend(layer: Any, q: Array, k: Array, v: Array, rope: decoder.Rope) -> tuple[Array, Any]:
        q, k = decoder.rotated(q, k, rope)
        context_k, context_v = spec.layout.stored(layer, to)
        out = attention.chunk_with_context(q, k, v, context_k, context_v, start[None])
        # Read before it is written to, or XLA would work on a copy of all that is stored.
        layer, out = jax.lax.optimization_barrier((layer, out))
        return out, spec.layout.store(layer, to, k, v, start)

    positions = start + jnp.arange(T, dtype=jnp.int32)[None]
    hidden, layers = decoder.run_layers_unrolled(
        weights, spec.model, tokens, positions, attend, cache["layers"],
        adapters=pick_adapters(adapters, adapter, packed=decoder.is_packed(weights)), dtype=spec.dtype,
    )  # fmt: skip
    last = jax.lax.dynamic_index_in_dim(hidden[0], num_valid - 1, keepdims=True)
    kept = cache["last"].at[to.entry].set(last.astype(cache["last"].dtype), mode="drop")
    return {"layers": layers, "last": kept}, hidden[0]


def score(
    spec: ProgramSpec, weights: decoder.Params, adapters: Adapters | None, hidden: Array, rows: ScoreRows, num_top: int
) -> Scores:
    """What hidden states [T, D] predict, under the engine's `logprobs_of`; see ScoreRows."""
    if decoder.is_packed(weights):
        logits = head.logits(weights, hidden, pick_adapters(adapters, rows.adapter, packed=True)).values()
    else:
        logits = decoder.logits(weights, hidden[None], pick_adapters(adapters, rows.adapter))[0]
    whole = WholeLogits(logits)
    T = logits.shape[0]
    temperature = jnp.broadcast_to(rows.temperature, (T,))
    scaled, normalizer = log_softmax_parts(logits, temperature, spec.logprobs_of)
    of_targets = jnp.take_along_axis(scaled, rows.targets, axis=-1) - normalizer

    def draw(key: Array) -> tuple[Array, Array]:
        off = jnp.zeros(T, jnp.float32)
        sampler = SamplerRows(jnp.broadcast_to(key, (T, 2)), rows.position, temperature, off.astype(jnp.int32),
                              off + 1.0, off)  # fmt: skip
        return sample_from(whole, sampler, spec.logprobs_of, truncates=False)

    ids, logprobs = jax.lax.map(draw, rows.keys)
    top = likeliest(whole, temperature, num_top, spec.logprobs_of)
    return Scores(of_targets, *top, ids.T, logprobs.T)


def set_adapter(
    spec: ProgramSpec, adapters: Adapters, tree: Mapping[str, Mapping[str, Array]], scale: Array, row: Array
) -> Adapters:
    """The stack with adapter `row` i32[] replaced by `tree`, of the stack's modules and rank, and its scale f32[]."""

    def put(module: str, name: str) -> Array | Packed:
        stack, axis = adapters.tree[module][name], stack_axis(module)
        given = tree[module][name].astype(stack.dtype)
        own = pack(given, stack.width) if isinstance(stack, Packed) else given
        return jax.tree.map(lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, row, axis), stack, own)

    replaced = {module: {name: put(module, name) for name in parts} for module, parts in adapters.tree.items()}
    return dataclasses.replace(adapters, tree=replaced, scale=adapters.scale.at[row].set(scale))


class Compiler:
    """Makes each program once for each key, and counts. Engines with equal specs may share one.

    XLA compiles in the background: while it does, the next program can be traced, which is Python's share of the work.
    What an earlier process compiled is read from disk, where there is a place for it.
    """

    def __init__(self, spec: ProgramSpec):
        self.spec = spec
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._executables = Executables(beside_jax_cache())
        self.num_compilations = 0

    @property
    def leisure(self) -> threading.Event:
        """To be cleared while there is work to do, and set when programs may be read ahead; see `Executables`."""
        return self._executables.leisure

    @property
    def num_behind(self) -> int:
        """Programs that are yet to be made at leisure."""
        return self._executables.num_behind

    def keys(self, name: str) -> list[Any]:
        """The keys under which program `name` has been made."""
        return [key for program, key in self._programs if program == name]

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), for what is done to the cache between programs."""
        return function(*args)

    def prepare(self, name: str, key: Any, *args: Any, **static: Any) -> Program:
        """Begins to make program `name` for `key`, which determines the shapes of args; these may be abstract."""
        full_key = (name, key)
        if full_key not in self._programs:
            program = PROGRAMS[name]

            # A closure, so that the spec and the static arguments need not be hashed on every call.
            def bound(*args: Any) -> Any:
                return program(self.spec, *args, **static)

            bound.__name__ = name
            jitted = jax.jit(bound, donate_argnums=DONATED[name])
            self._programs[full_key] = self._executables.begin(
                name, partial(jitted.lower, *args), args, {"spec": self.spec, **static}
            )
            self.num_compilations += 1
        return self._programs[full_key]

    def later(self, make: Callable[[], Any]) -> Program:
        """Has `make` called on the compiling thread, after what has been prepared."""
        return self._executables.later(make)

    def wait(self, urgent: Collection[Program] | None = None, spare: Collection[Program] = ()) -> None:
        """Returns when everything prepared is there, or as much as `Executables.wait` says; raises what went wrong."""
        self._executables.wait(urgent, spare)

    def call(self, name: str, key: Any, *args: Any, **static: Any) -> Any:
        """Runs program `name` on (spec, *args, **static). What DONATED names is gone afterwards."""
        return self.prepare(name, key, *args, **static).result()(*args)


PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "decode": decode, "prefill": prefill, "prefill_chunk": prefill_chunk, "score": score, "set_adapter": set_adapter,
}  # fmt: skip

DONATED: Mapping[str, tuple[int, ...]] = {
    "decode": (2,), "prefill": (2,), "prefill_chunk": (2,), "score": (), "set_adapter": (0,),
}  # fmt: skip
"""Arguments, after the spec, whose memory a program takes for its results: the cache, the stack."""
