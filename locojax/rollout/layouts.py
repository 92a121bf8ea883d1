"""The KV memory on the device, in the two layouts that `pages.py` keeps books for, behind the same functions.

A cache is a pytree: `layers`, one item a layer, and `last` [E, D], the hidden state of each stored prompt's last token,
from which its samples' first tokens are drawn. Shape letters: L layers, B rows, E entries, P prompt capacity, C own
tokens of a row at most, K kv heads, h head dim, D hidden, N new prompts, M samples of an entry, W pages of a table.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from locojax.models import attention
from locojax.models.decoder import Rope, rotated
from locojax.models.spec import ModelSpec
from locojax.rollout.pages import Moves, PromptBlock, Shape, SlotBlock, power_of_two
from locojax.rollout.prefill import Packed

Cache = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Where the running samples' keys and values lie. Filled on the host for each run; unused fields have no entries.

    Attributes:
      entry i32[B], prompt_len i32[B]: each row's prompt.
      entry_len i32[E], members i32[E, M], rank i32[B]: contiguous; see `attention.decode_shared`.
      pages i32[B, W]: paged; the number of pages where a row has none.
    """

    entry: Any
    prompt_len: Any
    entry_len: Any
    members: Any
    rank: Any
    pages: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Destination:
    """Where new prompts go. entry i32[N] (out of range: nowhere); pages i32[N, P / page], paged only.

    In rows: pages i32[2, S], the page and the place in it of each token; table i32[1, W], a long prompt's pages.
    """

    entry: Any
    pages: Any
    table: Any = None


@runtime_checkable
class Layout(Protocol):
    """How a layer's keys and values are stored and read. Implementations are hashable, as a program's constants are."""

    pins_shapes: bool  # prefill programs are of a few sizes fixed beforehand

    @property
    def prefill_kernel(self) -> attention.PackedKernel:
        """The form of attention within packed prompts."""

    def decode_part(self, cache: Cache) -> Cache:
        """What a decode program is given of the cache."""

    def prefill_part(self, cache: Cache) -> Cache:
        """What a prefill program is given of the cache."""

    def after_decode(self, cache: Cache, part: Cache) -> Cache:
        """The cache with the part that a decode program returned."""

    def after_prefill(self, cache: Cache, part: Cache) -> Cache:
        """The cache with the part that a prefill program returned."""

    def new_cache(self, spec: ModelSpec, shape: Shape, dtype: Any) -> Cache:
        """An empty cache."""

    def move(self, cache: Cache, moves: Moves) -> Cache:
        """Applies what `KvMemory.settle` asked for."""

    def warm_moves(self, spec: ModelSpec, shapes: Collection[Shape], dtype: Any) -> None:
        """Compiles what `move` needs to go between any two of these shapes."""

    def tables(self, slots: Sequence[SlotBlock], num_rows: int, shape: Shape, width: int) -> Tables:
        """Host arrays for the slots, each at its row; `width` of a table is at least that given."""

    def width(self, tables: Tables) -> int:
        """The width of the tables, to be kept up while samples finish: a narrower one would be another program."""

    def place(
        self, blocks: Sequence[PromptBlock], packed: Packed, capacity: int
    ) -> tuple[np.ndarray, np.ndarray, Destination]:
        """How packed prompts are stored: source and last, as `programs.prefill` takes them, and where to."""

    def place_chunk(self, block: PromptBlock, start: int, count: int, num_tokens: int, capacity: int) -> Destination:
        """Where tokens start.. of a prompt go: `count` of a chunk of `num_tokens`."""

    def prompt_capacity(self, num_tokens: int, shape: Shape) -> int:
        """P of a program that stores prompts of up to `num_tokens` tokens."""

    def decode(
        self, layer: Any, tables: Tables, own: Array, q: Array, k: Array, v: Array, rope: Rope
    ) -> tuple[Array, Any]:
        """Rotates q [B,H,h] and k [B,K,h] by rope, f32[B,1,h] twice, stores k and v [B,K,h] as each row's own token
        number `own` and attends -> [B,H,h], layer."""

    def store(self, layer: Any, to: Destination, k: Array, v: Array, start: Array | int = 0) -> Any:
        """Stores k, v [N,T,K,h] as tokens start.. of N prompts. What falls beyond the capacity is dropped."""

    def stored(self, layer: Any, to: Destination) -> tuple[Array, Array]:
        """k, v [N,K,P,h] of stored prompts."""


class _OneCache(abc.ABC):
    """What layouts share in which a program is given the whole cache, and stores whole prompts."""

    pins_shapes = False
    prefill_kernel: attention.PackedKernel = "plain"

    def decode_part(self, cache: Cache) -> Cache:
        return cache

    def prefill_part(self, cache: Cache) -> Cache:
        return cache

    def after_decode(self, cache: Cache, part: Cache) -> Cache:
        return part

    def after_prefill(self, cache: Cache, part: Cache) -> Cache:
        return part

    def place(
        self, blocks: Sequence[PromptBlock], packed: Packed, capacity: int
    ) -> tuple[np.ndarray, np.ndarray, Destination]:
        N = packed.shape.prompts
        source, last = np.zeros((N, capacity), np.int32), np.zeros(N, np.int32)
        for n, where in enumerate(packed.source):
            source[n, : len(where)], last[n] = where, where[-1]
        return source, last, self.destination(blocks, N, capacity)

    def place_chunk(self, block: PromptBlock, start: int, count: int, num_tokens: int, capacity: int) -> Destination:
        return self.destination([block], 1, capacity)

    @abc.abstractmethod
    def destination(self, prompts: Sequence[PromptBlock], count: int, capacity: int) -> Destination:
        """Host arrays for `count` >= len(prompts) prompts of up to `capacity` tokens each."""


@dataclasses.dataclass(frozen=True)
class Contiguous(_OneCache):
    """A layer is (prompt_k, prompt_v [E,K,P,h], own_k [B,K,C,h], own_v [B,K,G+C,h]); see `attention.decode_shared`."""

    def new_cache(self, spec: ModelSpec, shape: Shape, dtype: Any) -> Cache:
        K, h = spec.num_kv_heads, spec.head_dim
        prompt = (shape.entries, K, shape.prompt_capacity, h)
        own_k = (shape.rows, K, shape.capacity, h)
        own_v = (shape.rows, K, spec.num_heads // K + shape.capacity, h)
        shapes = (prompt, prompt, own_k, own_v)
        return {
            "layers": [tuple(zeros(s, dtype) for s in shapes) for _ in range(spec.num_layers)],
            "last": zeros((shape.entries, spec.hidden_size), dtype),
        }

    def move(self, cache: Cache, moves: Moves) -> Cache:
        """Grows or shrinks the arrays. One small program a shape, run on each layer, so that it compiles fast."""
        if moves.shape is None:
            return cache
        shape, take = moves.shape, moves.source_rows
        source = None if take is None else np.asarray(take, np.int32)
        layers = []
        for prompt_k, prompt_v, own_k, own_v in cache["layers"]:
            prompts = [_resize(x, None, shape.entries, shape.prompt_capacity) for x in (prompt_k, prompt_v)]
            room = own_v.shape[2] - own_k.shape[2]
            owns = [
                _resize(own_k, source, shape.rows, shape.capacity),
                _resize(own_v, source, shape.rows, room + shape.capacity),
            ]
            layers.append((*prompts, *owns))
        last = cache["last"]
        if last.shape[0] != shape.entries:
            last = _resize_last(placed(last), num=shape.entries)
        return {"layers": layers, "last": last}

    def warm_moves(self, spec: ModelSpec, shapes: Collection[Shape], dtype: Any) -> None:
        """Compiles the small programs that `move` takes between any two of these shapes."""
        one_layer = dataclasses.replace(spec, num_layers=1)
        for before, after in itertools.permutations(sorted(shapes, key=dataclasses.astuple), 2):
            cache = self.new_cache(one_layer, before, dtype)
            for source in (None, (0,) * after.rows):
                self.move(cache, Moves(after, source))

    def tables(self, slots: Sequence[SlotBlock], num_rows: int, shape: Shape, width: int) -> Tables:
        entry, rank, prompt_len = (np.zeros(num_rows, np.int32) for _ in range(3))
        entry_len = np.ones(shape.entries, np.int32)
        groups: dict[int, list[int]] = {}
        for slot in slots:
            group = groups.setdefault(slot.prompt.index, [])
            entry[slot.row], rank[slot.row], prompt_len[slot.row] = (
                slot.prompt.index, len(group), slot.prompt.num_tokens,
            )  # fmt: skip
            entry_len[slot.prompt.index] = slot.prompt.num_tokens
            group.append(slot.row)
        width = power_of_two(max([width, *map(len, groups.values())]))
        members = np.full((shape.entries, width), num_rows, np.int32)
        for index, group in groups.items():
            members[index, : len(group)] = group
        return Tables(entry, prompt_len, entry_len, members, rank, np.zeros((num_rows, 0), np.int32))

    def width(self, tables: Tables) -> int:
        return tables.members.shape[1]

    def destination(self, prompts: Sequence[PromptBlock], count: int, capacity: int) -> Destination:
        entry = np.full(count, np.iinfo(np.int32).max, np.int32)
        entry[: len(prompts)] = [block.index for block in prompts]
        return Destination(entry, np.zeros((count, 0), np.int32))

    def prompt_capacity(self, num_tokens: int, shape: Shape) -> int:
        return shape.prompt_capacity

    def decode(
        self, layer: Any, tables: Tables, own: Array, q: Array, k: Array, v: Array, rope: Rope
    ) -> tuple[Array, Any]:
        q, k = rotated(q, k, rope)
        prompt_k, prompt_v, own_k, own_v = layer
        rows = jnp.arange(q.shape[0], dtype=jnp.int32)
        own_k = own_k.at[rows, :, own].set(storable(k, own_k.dtype), mode="drop")
        room = own_v.shape[2] - own_k.shape[2]
        own_v = own_v.at[rows, :, room + own].set(storable(v, own_v.dtype), mode="drop")
        out, own_v = attention.decode_shared(
            q, prompt_k, prompt_v, tables.entry_len, tables.members, tables.entry, tables.rank, own_k, own_v, own + 1
        )
        return out, (prompt_k, prompt_v, own_k, own_v)

    def store(self, layer: Any, to: Destination, k: Array, v: Array, start: Array | int = 0) -> Any:
        prompt_k, prompt_v, *own = layer
        at = start + jnp.arange(k.shape[1], dtype=jnp.int32)
        prompt_k = prompt_k.at[to.entry[:, None], :, at[None, :]].set(storable(k, prompt_k.dtype), mode="drop")
        prompt_v = prompt_v.at[to.entry[:, None], :, at[None, :]].set(storable(v, prompt_v.dtype), mode="drop")
        return (prompt_k, prompt_v, *own)

    def stored(self, layer: Any, to: Destination) -> tuple[Array, Array]:
        return layer[0].at[to.entry].get(mode="clip"), layer[1].at[to.entry].get(mode="clip")


@dataclasses.dataclass(frozen=True)
class Paged(_OneCache):
    """A layer is one array of pages [num_pages, page, 2K, h], as `attention.decode_paged` describes it."""

    num_pages: int
    page_size: int
    kernel: attention.Kernel = "plain"

    def new_cache(self, spec: ModelSpec, shape: Shape, dtype: Any) -> Cache:
        pages = (self.num_pages, self.page_size, 2 * spec.num_kv_heads, spec.head_dim)
        return {
            "layers": [zeros(pages, dtype) for _ in range(spec.num_layers)],
            "last": zeros((shape.entries, spec.hidden_size), dtype),
        }

    def move(self, cache: Cache, moves: Moves) -> Cache:
        if not moves.page_copies:
            return cache
        count = power_of_two(len(moves.page_copies))
        source, target = np.zeros(count, np.int32), np.full(count, self.num_pages, np.int32)
        for i, (a, b) in enumerate(moves.page_copies):
            source[i], target[i] = a, b
        return {**cache, "layers": [_copy_pages(layer, source, target) for layer in cache["layers"]]}

    def warm_moves(self, spec: ModelSpec, shapes: Collection[Shape], dtype: Any) -> None:
        """Pages never change their shape; a copy of pages compiles when the first is asked for."""

    def tables(self, slots: Sequence[SlotBlock], num_rows: int, shape: Shape, width: int) -> Tables:
        width = power_of_two(max([width, *(len(slot.pages) for slot in slots)]))
        entry, prompt_len = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        pages = np.full((num_rows, width), self.num_pages, np.int32)
        for slot in slots:
            entry[slot.row], prompt_len[slot.row] = slot.prompt.index, slot.prompt.num_tokens
            pages[slot.row, : len(slot.pages)] = slot.pages
        nothing = np.zeros(0, np.int32)
        return Tables(entry, prompt_len, nothing, np.zeros((0, 0), np.int32), nothing, pages)

    def width(self, tables: Tables) -> int:
        return tables.pages.shape[1]

    def destination(self, prompts: Sequence[PromptBlock], count: int, capacity: int) -> Destination:
        entry = np.full(count, np.iinfo(np.int32).max, np.int32)
        pages = np.full((count, capacity // self.page_size), self.num_pages, np.int32)
        for i, block in enumerate(prompts):
            entry[i] = block.index
            pages[i, : len(block.pages)] = block.pages
        return Destination(entry, pages)

    def prompt_capacity(self, num_tokens: int, shape: Shape) -> int:
        return self.page_size * power_of_two(-(-num_tokens // self.page_size))

    def decode(
        self, layer: Any, tables: Tables, own: Array, q: Array, k: Array, v: Array, rope: Rope
    ) -> tuple[Array, Any]:
        q, k = rotated(q, k, rope)
        position = tables.prompt_len + own
        page = jnp.take_along_axis(tables.pages, position[:, None] // self.page_size, axis=1, mode="clip")[:, 0]
        layer = layer.at[page, position % self.page_size].set(storable(_side_by_side(k, v), layer.dtype), mode="drop")
        return attention.decode_paged(q, layer, tables.pages, position + 1, kernel=self.kernel), layer

    def store(self, layer: Any, to: Destination, k: Array, v: Array, start: Array | int = 0) -> Any:
        at = start + jnp.arange(k.shape[1], dtype=jnp.int32)
        page = to.pages.at[:, at // self.page_size].get(mode="fill", fill_value=self.num_pages)
        kv = storable(_side_by_side(k, v), layer.dtype)
        return layer.at[page, (at % self.page_size)[None]].set(kv, mode="drop")

    def stored(self, layer: Any, to: Destination) -> tuple[Array, Array]:
        gathered = jnp.take(layer, to.pages, axis=0, mode="clip")  # [N, W, page, 2K, h]
        N, _, _, KK, h = gathered.shape
        kv = gathered.reshape(N, -1, KK // 2, 2, h).transpose(3, 0, 2, 1, 4)
        return kv[0], kv[1]


def storable(x: Array, dtype: Any) -> Array:
    """Zero for what isn't finite: masked-out memory is multiplied by zero, not skipped, and the next owner of a row or
    page must not inherit NaN from a broken adapter."""
    return jnp.where(jnp.isfinite(x), x, 0).astype(dtype)


def _side_by_side(k: Array, v: Array) -> Array:
    """[..., K, h] twice -> [..., 2K, h]: k of head 0, v of head 0, k of head 1, ..."""
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.zeros(shape, dtype, device=jax.local_devices()[0])


def placed(x: Array) -> Array:
    """x with its device named, without a copy: what programs return has it or not, and jit tells the two apart."""
    return jax.device_put(x, jax.local_devices()[0])


@partial(jax.jit, static_argnames="num")
def _resize_last(last: Array, num: int) -> Array:
    """[entries, D] cut or padded to `num` entries."""
    return jnp.pad(last[:num], ((0, num - min(num, last.shape[0])), (0, 0)))


def _resize(x: Array, source: Any, rows: int, capacity: int) -> Array:
    """x [rows, K, capacity, h] cut or padded with zeros to the new sizes, its rows first taken from `source`."""
    if x.shape[0] == 0 or x.size == 0:
        return zeros((rows, x.shape[1], capacity, x.shape[3]), x.dtype)
    if source is None and x.shape[0] == rows and x.shape[2] == capacity:
        return x
    return _resize_program(placed(x), source, rows, capacity)


def _resize_impl(x: Array, source: Any, rows: int, capacity: int) -> Array:
    x = x[:, :, :capacity]
    x = x[:rows] if source is None else x[source]
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0), (0, capacity - x.shape[2]), (0, 0)))


_resize_program = jax.jit(_resize_impl, static_argnames=("rows", "capacity"))


@jax.jit
def _copy_pages(layer: Array, source: Array, target: Array) -> Array:
    return layer.at[target].set(layer[source], mode="drop")
