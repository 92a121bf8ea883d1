"""The KV memory on the device when shapes are chosen beforehand: see `rows.py` for the books.

A cache has three parts: `layers`, the rows of running samples, which decoding reads and writes; `prompts`, the pages of
computed prompts, which prefill writes; and `last`. Programs get the part that they use, so that what one compiles for
doesn't depend on the other's shapes. Shape letters as in `layouts.py`; N pages of `page` tokens, S stored tokens.

A row's capacity is cut into arrays of 1, 1, 6, 24, ... pages, the last one shorter: an iteration reads those that the
longest sample has reached, and no other. Finer cuts would read less and take longer to compile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from locojax.models import attention
from locojax.models.decoder import Rope, rotated
from locojax.models.native import ops
from locojax.models.spec import ModelSpec
from locojax.rollout.layouts import Cache, Destination, Tables, placed, storable, zeros
from locojax.rollout.pages import Moves, PromptBlock, Shape, SlotBlock, power_of_two
from locojax.rollout.prefill import Packed

COPIES = 256
"""Pages that one program run copies, into rows or for a prompt that continues another."""

CONTEXT = 1024
"""Tokens that a program for a prompt's next chunk finds stored, at most; beyond them four times as many, and so on."""


@dataclasses.dataclass(frozen=True)
class RowsLayout:
    """See the module's head. A layer is (keys, values), each a tuple of [B, K, c, h], one for each array of the row."""

    num_pages: int
    page_size: int
    max_prompts: int  # stored by one prefill program
    max_context: int
    native: bool = False  # attention by the C++ kernel

    pins_shapes = True

    @property
    def prefill_kernel(self) -> attention.PackedKernel:
        return "native" if self.native else "plain"

    def new_cache(self, spec: ModelSpec, shape: Shape, dtype: Any) -> Cache:
        K, h = spec.num_kv_heads, spec.head_dim
        page = (self.num_pages, K, self.page_size, h)
        sizes = self._sizes(shape.capacity)

        def row_arrays() -> tuple[Array, ...]:
            return tuple(zeros((shape.rows, K, size, h), dtype) for size in sizes)

        return {
            "layers": [(row_arrays(), row_arrays()) for _ in range(spec.num_layers)],
            "prompts": [(zeros(page, dtype), zeros(page, dtype)) for _ in range(spec.num_layers)],
            "last": zeros((shape.entries, spec.hidden_size), dtype),
        }

    def _sizes(self, capacity: int) -> list[int]:
        sizes, most = [self.page_size], self.page_size
        while sum(sizes) < capacity:
            sizes.append(min(most, capacity - sum(sizes)))
            most = 3 * sum(sizes)
        return sizes

    def decode_part(self, cache: Cache) -> Cache:
        return {"layers": cache["layers"], "last": cache["last"]}

    def prefill_part(self, cache: Cache) -> Cache:
        return {"layers": cache["prompts"], "last": cache["last"]}

    def after_decode(self, cache: Cache, part: Cache) -> Cache:
        return {**cache, **part}

    def after_prefill(self, cache: Cache, part: Cache) -> Cache:
        return {**cache, "prompts": part["layers"], "last": part["last"]}

    def move(self, cache: Cache, moves: Moves) -> Cache:
        layers, prompts = cache["layers"], cache["prompts"]
        for start in range(0, len(moves.stem_copies), COPIES):
            copies = np.zeros((COPIES, 2), np.int32)
            some = moves.stem_copies[start : start + COPIES]
            copies[: len(some)] = some
            count = np.asarray(len(some), np.int32)
            prompts = [_copy_pages(_placed_all(pages), copies, count) for pages in prompts]
        if moves.shape is not None:
            shape, sizes = moves.shape, tuple(self._sizes(moves.shape.capacity))
            old = layers[0][0][0].shape[0]
            take = moves.source_rows or tuple(min(row, old - 1) for row in range(shape.rows))
            source = np.asarray(take, np.int32)
            layers = [_resize_rows(_placed_all(layer), source, sizes) for layer in layers]
        for start in range(0, len(moves.row_copies), COPIES):
            lengths = [x.shape[2] for x in layers[0][0]]
            copies, bounds = self._in_order(moves.row_copies[start : start + COPIES], lengths)
            layers = [
                _copy_into_rows(_placed_all(layer), _placed_all(pages), copies, bounds)
                for layer, pages in zip(layers, prompts, strict=True)
            ]
        return {**cache, "layers": layers, "prompts": prompts}

    def _in_order(
        self, copies: Sequence[tuple[int, int, int]], sizes: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copies i32[COPIES, 3] (page, row, page of the array) by the array they go to, and where each array's begin,
        i32[arrays + 1]."""
        ends = np.cumsum(sizes) // self.page_size
        array_of = np.searchsorted(ends, [block for _, _, block in copies], side="right")
        order = np.argsort(array_of, kind="stable")
        table = np.zeros((COPIES, 3), np.int32)
        for place, n in enumerate(order):
            page, row, block = copies[n]
            table[place] = page, row, block - (ends[array_of[n] - 1] if array_of[n] else 0)
        bounds = np.searchsorted(array_of[order], np.arange(len(sizes) + 1)).astype(np.int32)
        return table, bounds

    def warm_moves(self, spec: ModelSpec, shapes: Collection[Shape], dtype: Any) -> None:
        """Compiles what `move` takes between any two of these shapes, and the copies into each."""
        one_layer = dataclasses.replace(spec, num_layers=1)
        ordered = sorted(shapes, key=dataclasses.astuple)
        for before in ordered:
            cache = self.new_cache(one_layer, before, dtype)
            cache = self.move(cache, Moves(stem_copies=((0, 0),), row_copies=((0, 0, 0),)))
            for after in ordered:
                if after != before:
                    self.move(cache, Moves(after, (0,) * after.rows))

    def tables(self, slots: Sequence[SlotBlock], num_rows: int, shape: Shape, width: int) -> Tables:
        entry, prompt_len = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        for slot in slots:
            entry[slot.row], prompt_len[slot.row] = slot.prompt.index, slot.prompt.num_tokens
        nothing, no_table = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
        return Tables(entry, prompt_len, nothing, no_table, nothing, no_table)

    def width(self, tables: Tables) -> int:
        return 1

    def place(
        self, blocks: Sequence[PromptBlock], packed: Packed, capacity: int
    ) -> tuple[np.ndarray, np.ndarray, Destination]:
        S = 2 * packed.tokens.size
        source, pages = np.zeros((1, S), np.int32), np.full((2, S), self.num_pages, np.int32)
        entry, last = self._entries(blocks, self.max_prompts), np.zeros(self.max_prompts, np.int32)
        at = 0
        for n, (block, where) in enumerate(zip(blocks, packed.source, strict=True)):
            end = at + len(where)
            source[0, at:end], pages[:, at:end], last[n] = where, self._positions(block, 0, len(where)), where[-1]
            shared = block.num_stem // self.page_size * self.page_size
            pages[:, at : at + shared] = self.num_pages  # another prompt's: nobody writes there
            at = end
        return source, last, Destination(entry, pages)

    def place_chunk(self, block: PromptBlock, start: int, count: int, num_tokens: int, capacity: int) -> Destination:
        pages = np.full((2, num_tokens), self.num_pages, np.int32)
        pages[:, :count] = self._positions(block, start, count)
        table = np.zeros((1, capacity // self.page_size), np.int32)
        table[0, : len(block.pages)] = block.pages
        return Destination(self._entries([block], 1), pages, table)

    def _entries(self, blocks: Sequence[PromptBlock], count: int) -> np.ndarray:
        entry = np.full(count, np.iinfo(np.int32).max, np.int32)
        entry[: len(blocks)] = [block.index for block in blocks]
        return entry

    def _positions(self, block: PromptBlock, start: int, count: int) -> np.ndarray:
        """i32[2, count]: page, and place in it, of tokens start.."""
        at = np.arange(start, start + count)
        return np.stack([np.asarray(block.pages, np.int32)[at // self.page_size], at % self.page_size]).astype(np.int32)

    def prompt_capacity(self, num_tokens: int, shape: Shape) -> int:
        """Few sizes: each is a program to compile, and twice the room costs a chunk a tenth of its time."""
        capacity = CONTEXT
        while capacity < num_tokens:
            capacity *= 4
        most = min(capacity, power_of_two(self.max_context))
        return self.page_size * -(-most // self.page_size)

    def decode(
        self, layer: Any, tables: Tables, own: Array, q: Array, k: Array, v: Array, rope: Rope
    ) -> tuple[Array, Any]:
        position = tables.prompt_len + own
        if self.native:
            return ops.attend_rows(q, k, v, rope, position, *layer)
        q, k = rotated(q, k, rope)
        keys, values = ([_put(x, begin, position, new) for begin, x in _begins(arrays)]
                        for arrays, new in zip(layer, (k, v), strict=True))  # fmt: skip
        return attention.decode_rows(q, keys, values, position + 1), (tuple(keys), tuple(values))

    def store(self, layer: Any, to: Destination, k: Array, v: Array, start: Array | int = 0) -> Any:
        page, place = to.pages
        return tuple(
            pages.at[page, :, place].set(storable(new[0], pages.dtype), mode="drop")
            for pages, new in zip(layer, (k, v), strict=True)
        )

    def stored(self, layer: Any, to: Destination) -> tuple[Array, Array]:
        def gather(pages: Array) -> Array:
            found = pages[to.table]  # [1, W, K, page, h]
            n, W, K, size, h = found.shape
            return found.swapaxes(1, 2).reshape(n, K, W * size, h)

        return gather(layer[0]), gather(layer[1])


def _begins(arrays: Sequence[Array]) -> list[tuple[int, Array]]:
    """Each array of a row with the position at which it begins."""
    ends = np.cumsum([x.shape[2] for x in arrays])
    return [(int(end) - x.shape[2], x) for end, x in zip(ends, arrays, strict=True)]


def _put(x: Array, begin: int, position: Array, new: Array) -> Array:
    """x [B, K, c, h] with `new` [B, K, h] at each row's position, where that lies in this array."""
    at = position - begin
    at = jnp.where(at < 0, x.shape[2], at)  # negative indices would count from the end
    return x.at[jnp.arange(x.shape[0], dtype=jnp.int32), :, at].set(storable(new, x.dtype), mode="drop")


def _placed_all(tree: Any) -> Any:
    return jax.tree.map(placed, tree)


@partial(jax.jit, static_argnames="sizes")
def _resize_rows(layer: Any, source: Array, sizes: tuple[int, ...]) -> Any:
    """The rows `source` of a layer, cut or padded with zeros to arrays of these sizes."""

    def one(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        K, h = arrays[0].shape[1], arrays[0].shape[3]
        kept = [
            jnp.pad(x[source, :, :size], ((0, 0), (0, 0), (0, max(size - x.shape[2], 0)), (0, 0)))
            for x, size in zip(arrays, sizes, strict=False)
        ]
        empty = [jnp.zeros((source.shape[0], K, size, h), arrays[0].dtype) for size in sizes[len(arrays) :]]
        return (*kept, *empty)

    return tuple(map(one, layer))


@partial(jax.jit, donate_argnums=0)
def _copy_pages(pages: Any, copies: Array, count: Array) -> Any:
    """Pages copied within a layer's prompts: copies i32[COPIES, 2] (from, to), of which the first `count` are made."""

    def one(x: Array) -> Array:
        def copy(i: Array, x: Array) -> Array:
            page = jax.lax.dynamic_index_in_dim(x, copies[i, 0])
            return jax.lax.dynamic_update_index_in_dim(x, page, copies[i, 1], 0)

        return jax.lax.fori_loop(jnp.int32(0), count, copy, x)

    return jax.tree.map(one, pages)


@partial(jax.jit, donate_argnums=0)
def _copy_into_rows(layer: Any, pages: Any, copies: Array, bounds: Array) -> Any:
    """Pages of prompts copied into rows; see RowsLayout._in_order."""

    def one(n: int, x: Array, source: Array) -> Array:
        size = source.shape[2]

        def copy(i: Array, x: Array) -> Array:
            page, row, block = copies[i]
            content = jax.lax.dynamic_index_in_dim(source, page)
            return jax.lax.dynamic_update_slice(x, content, (row, jnp.int32(0), block * size, jnp.int32(0)))

        return jax.lax.fori_loop(bounds[n], bounds[n + 1], copy, x)

    return tuple(
        tuple(one(n, x, source) for n, x in enumerate(arrays)) for arrays, source in zip(layer, pages, strict=True)
    )
