"""The device side of lockstep: what every host does when the head says so.

A program is one for all hosts (`jax.shard_map` over the mesh axis `hosts`): each host computes its own rows with its
own copy of the weights, by the very functions of `programs.py`. What was drawn goes to all hosts at the end of the
program, in one all-gather, so that the head can read it.

A program's host arrays travel as one row of 32-bit words for each host: a transfer a program, not one an array.
Shape letters: N hosts, W words, K iterations, B rows of one host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from locojax.models import decoder
from locojax.models.lora import Adapters
from locojax.rollout import programs
from locojax.rollout.batch import decode_rows
from locojax.rollout.layouts import Cache, Contiguous
from locojax.rollout.lockstep_memory import Sources
from locojax.rollout.pages import Moves, Shape
from locojax.rollout.prefill import Packed, PrefillShape
from locojax.rollout.prefilling import Loaded

AXIS = "hosts"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DecodeKey:
    """What a decode program is compiled for. `width`: of the tables (`Layout.width`); `num_stops`: of the stop ids."""

    shape: Shape
    num_stops: int
    width: int
    truncates: bool

    @property
    def name(self) -> str:
        return "decode"

    def blank(self, layout: Contiguous) -> Any:
        """Arguments of these shapes: DecodeRows, num_iterations, return_at."""
        tables = layout.tables([], self.shape.rows, self.shape, self.width)
        count = np.zeros((), np.int32)
        return decode_rows([], self.shape.rows, self.num_stops, tables), count, count


@dataclasses.dataclass(frozen=True)
class PrefillKey:
    """What a packed prefill program is compiled for."""

    shape: Shape
    packed: PrefillShape

    @property
    def name(self) -> str:
        return "prefill"

    def blank(self, layout: Contiguous) -> Any:
        """Arguments of these shapes: (tokens, positions, until), source, last, destination, adapter."""
        rows = np.zeros((self.packed.rows, self.packed.tokens), np.int32)
        return self.arguments(layout, [], Packed(self.packed, rows, rows, rows, ()), 0)

    def arguments(self, layout: Contiguous, blocks: Sequence[Any], packed: Packed, adapter: int) -> Any:
        """Arguments for one host's prompts."""
        source, last, to = layout.place(blocks, packed, self.shape.prompt_capacity)
        of_rows = np.full(self.packed.rows, adapter, np.int32)
        return (packed.tokens, packed.positions, packed.until), source, last, to, of_rows


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """What the program for a chunk of a long prompt is compiled for."""

    shape: Shape
    num_tokens: int

    @property
    def name(self) -> str:
        return "prefill_chunk"

    def blank(self, layout: Contiguous) -> Any:
        """Arguments of these shapes: tokens, start, num_valid, destination, adapter."""
        return self.arguments(layout, None, (), 0, 0)

    def arguments(self, layout: Contiguous, block: Any, tokens: Sequence[int], start: int, adapter: int) -> Any:
        """Arguments for one host's chunk; without a block, for a host that has none."""
        row, count = np.zeros((1, self.num_tokens), np.int32), max(len(tokens), 1)
        row[0, : len(tokens)] = tokens
        to = layout.destination([] if block is None else [block], 1, self.shape.prompt_capacity)
        return row, np.asarray(start, np.int32), np.asarray(count, np.int32), to, np.full(1, adapter, np.int32)


Key = DecodeKey | PrefillKey | ChunkKey


def pack_words(tree: Any) -> np.ndarray:
    """u32[W]: all arrays of a tree, of 32-bit numbers or bools, one after the other."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    words = [leaf.astype(np.uint32) if leaf.dtype == np.bool_ else leaf.view(np.uint32) for leaf in leaves if leaf.size]
    return np.concatenate([part.ravel() for part in words])


def unpack_words(words: Any, template: T) -> T:
    """The tree that `pack_words` packed; u32[W], numpy's or jax's. `template` has its structure, shapes and dtypes."""
    leaves, tree = jax.tree.flatten(template)
    found, at = [], 0
    for leaf in leaves:
        part = words[at : at + leaf.size]
        at += leaf.size
        if leaf.dtype == np.bool_:
            part = part != 0
        elif isinstance(words, np.ndarray):
            part = part.view(leaf.dtype)
        else:
            part = jax.lax.bitcast_convert_type(part, leaf.dtype)
        found.append(part.reshape(leaf.shape))
    return jax.tree.unflatten(tree, found)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What one host drew: tokens i32[K+1, B] and log-probs f32[K+1, B], of which item 0 is the fresh rows'; how many
    tokens each row gained, i32[B]; how many iterations ran, i32[]."""

    token: Any
    logprob: Any
    gained: Any
    num_iterations: Any

    @classmethod
    def blank(cls, key: DecodeKey, max_iterations: int) -> Decoded:
        """Nothing, in the right shapes."""
        drawn, of_rows = (max_iterations + 1, key.shape.rows), key.shape.rows
        return cls(
            np.zeros(drawn, np.int32), np.zeros(drawn, np.float32), np.zeros(of_rows, np.int32), np.zeros((), np.int32)
        )


jax.tree_util.register_dataclass(Decoded)


def host_mesh() -> Mesh:
    """One device of every host, the one that its own engine would run on: its first."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.array([first[process] for process in sorted(first)]), (AXIS,))


class LockstepDevices:
    """This process's part of the hosts' devices: their caches and weights, and the programs that all enter together.

    Every process makes one and is told the same things in the same order; in a mesh of one process's devices (tests)
    there is nobody else to tell.
    """

    def __init__(self, spec: programs.ProgramSpec, mesh: Mesh):
        """`spec`: of an engine alone; `mesh`: of `host_mesh`."""
        self.spec, self.mesh = dataclasses.replace(spec, axis=AXIS), mesh
        self.layout = Contiguous()
        self.num_hosts = mesh.devices.size
        mine = jax.process_index()
        self._local = [(host, device) for host, device in enumerate(mesh.devices.flat) if device.process_index == mine]
        self._everywhere, self._each = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
        self._loaded = Loaded({}, None, 0)
        self._cache: Cache | None = None
        self._programs: dict[tuple[int, Key], Any] = {}
        self._actions: Mapping[str, Callable[..., Any]] = {
            "prepare": self.prepare, "reshape": self.reshape, "warm_moves": self.warm_moves, "run": self.run,
        }  # fmt: skip

    def perform(self, action: str, *args: Any) -> None:
        """One of the methods below, by the name that the head said."""
        self._actions[action](*args)

    def load(self, loaded: Loaded) -> None:
        """This host's copy of the weights, which every host loads by itself. Bytes that lie right stay."""

        def put(leaf: Any) -> Array:
            copies = [jax.device_put(leaf, device) for _, device in self._local]
            return jax.make_array_from_single_device_arrays(np.shape(leaf), self._everywhere, copies)

        self._loaded = dataclasses.replace(
            loaded, weights=jax.tree.map(put, loaded.weights), adapters=jax.tree.map(put, loaded.adapters)
        )

    def keys(self) -> list[Key]:
        """What has been compiled for these weights."""
        return [key for signature, key in self._programs if signature == self._loaded.signature]

    def prepare(self, key: Key) -> None:
        """Compiles a program, once."""
        of_these = (self._loaded.signature, key)
        if of_these in self._programs:
            return
        words = jax.ShapeDtypeStruct((self.num_hosts, pack_words(key.blank(self.layout)).size), np.uint32)
        cache = jax.eval_shape(partial(self.layout.new_cache, self.spec.model, key.shape, self.spec.dtype))
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(self._of_all(x.shape), x.dtype), cache)
        each, same = PartitionSpec(AXIS), PartitionSpec()
        program = jax.shard_map(
            partial(self._program, key), mesh=self.mesh, in_specs=(same, same, each, each), out_specs=(each, same),
            check_vma=False,
        )  # fmt: skip
        sharded = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._each), (whole, words))
        compiled = jax.jit(program, donate_argnums=2).lower(self._loaded.weights, self._loaded.adapters, *sharded)
        self._programs[of_these] = compiled.compile()

    def _program(
        self, key: Key, weights: decoder.Params, adapters: Adapters | None, cache: Cache, words: Array
    ) -> tuple[Cache, Array]:
        """One host's part: words u32[1, W] -> cache, and what all hosts drew, u32[N, W]; none where prompts are stored.
        """
        arguments = unpack_words(words[0], key.blank(self.layout))
        if not isinstance(key, DecodeKey):
            part, _ = programs.PROGRAMS[key.name](self.spec, weights, adapters, cache, *arguments)
            return part, jnp.zeros((self.num_hosts, 0), jnp.uint32)
        rows, num_iterations, return_at = arguments
        part, drawn, gained, ran = programs.decode(
            self.spec, weights, adapters, cache, rows, num_iterations, return_at, truncates=key.truncates, num_top=0
        )
        leaves = jax.tree.leaves(Decoded(drawn.token, drawn.logprob, gained, ran))
        mine = jnp.concatenate([jax.lax.bitcast_convert_type(leaf, jnp.uint32).ravel() for leaf in leaves])
        return part, jax.lax.all_gather(mine, AXIS)

    def run(self, key: Key, words: np.ndarray) -> Array:
        """Enters a program with words u32[N, W]; returns what all hosts drew, u32[N, ...], before it is there."""
        self.prepare(key)
        rows = [jax.device_put(words[host : host + 1], device) for host, device in self._local]
        sharded = jax.make_array_from_single_device_arrays(words.shape, self._each, rows)
        program = self._programs[self._loaded.signature, key]
        self._cache, drawn = program(self._loaded.weights, self._loaded.adapters, self._cache, sharded)
        return drawn.addressable_data(0)

    def block(self) -> None:
        """Returns when the programs entered so far have run."""
        jax.block_until_ready(self._cache)

    def reshape(self, shape: Shape, sources: Sources | None) -> None:
        """Brings the cache of every host into a shape; without sources, an empty one takes its place."""
        parts = []
        for (host, device), old in zip(self._local, self._parts(), strict=True):
            if sources is None or old is None:
                new = self.layout.new_cache(self.spec.model, shape, self.spec.dtype)
            else:
                new = self.layout.move(old, Moves(shape, sources[host]))
            parts.append(jax.device_put(new, device))

        def join(*leaves: Array) -> Array:
            shape = self._of_all(leaves[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._each, list(leaves))

        self._cache = jax.tree.map(join, *parts)

    def _of_all(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all hosts' arrays together, from one host's."""
        return self.num_hosts * shape[0], *shape[1:]

    def _parts(self) -> list[Cache | None]:
        """Each local host's cache."""
        if self._cache is None:
            return [None] * len(self._local)

        def part(device: Any, leaf: Array) -> Array:
            return next(shard.data for shard in leaf.addressable_shards if shard.device == device)

        return [jax.tree.map(partial(part, device), self._cache) for _, device in self._local]

    def warm_moves(self, shapes: Sequence[Shape]) -> None:
        """Compiles what `reshape` takes between any two of these shapes."""
        self.layout.warm_moves(self.spec.model, shapes, self.spec.dtype)
