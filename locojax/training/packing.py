"""Training sequences -> rows of one fixed shape, under a token budget. No jax.

Sequences that begin alike, and have no loss there, can share that beginning: a few-shot header common to all prompts,
below it each prompt common to its group's samples, below that the completions. Such a tree is laid out in a row depth
first, and `until` (see `models.attention`) lets a token be seen by its own subtree only, so each sequence computes what
it would have computed alone, and its gradient is the same.

Legend: M micro-batches, R rows of one, T tokens of a row, N tokens of a datum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from locojax.errors import CapacityError, RequestError

PADDING = -1


@dataclasses.dataclass(frozen=True)
class Packed:
    """Where every token of every datum is computed.

    Attributes:
      tokens, positions, until: i32[M, R, T]; positions restart with each sequence; padding is token 0 at position 0.
      segment: i32[M, R, T]: the datum a token belongs to; PADDING for padding and for tokens that several data share.
      adapter: i32[M, R]: the adapter of a row's data.
      index: per datum, i64[N]: where each of its tokens is, as a flat index into [M, R, T]; empty if not computed.
      num_datum_tokens: of all data, those that needn't be computed included.
      num_computed_tokens: after sharing and skipping; what the rows hold besides padding.
    """

    tokens: np.ndarray
    positions: np.ndarray
    until: np.ndarray
    segment: np.ndarray
    adapter: np.ndarray
    index: tuple[np.ndarray, ...]
    num_datum_tokens: int
    num_computed_tokens: int

    @property
    def num_micro_batches(self) -> int:
        return self.tokens.shape[0]

    @property
    def padding_share(self) -> float:
        """Share of the rows' tokens that are padding, padding rows included."""
        return 1.0 - self.num_computed_tokens / self.tokens.size if self.tokens.size else 0.0

    def padded(self, num_micro_batches: int) -> Packed:
        """With micro-batches of padding after its own, up to `num_micro_batches`: what a host with less data runs."""
        missing = num_micro_batches - self.num_micro_batches
        if missing <= 0:
            return self
        nothing = _empty(missing, *self.tokens.shape[1:])

        return dataclasses.replace(
            self,
            tokens=np.concatenate([self.tokens, nothing.tokens]),
            positions=np.concatenate([self.positions, nothing.positions]),
            until=np.concatenate([self.until, nothing.until]),
            segment=np.concatenate([self.segment, nothing.segment]),
            adapter=np.concatenate([self.adapter, nothing.adapter]),
        )

    def scatter(
        self, values: Sequence[np.ndarray], dtype: np.typing.DTypeLike, trailing: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Per-datum arrays [N] or [N, K] -> [M, R, T] or [M, R, T, K]; 0 at padding, and up to the widest K.

        trailing: the axes after T, where the widest datum needn't be here.
        """
        trailing = max((value.shape[1:] for value in values), default=()) if trailing is None else trailing
        flat = np.zeros((self.tokens.size, *trailing), dtype)
        for where, value in zip(self.index, values, strict=True):
            if where.size:
                narrow = flat[where]
                narrow[(slice(None), *(slice(size) for size in value.shape[1:]))] = value
                flat[where] = narrow
        return flat.reshape(*self.tokens.shape, *trailing)

    def gather(self, flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        """[M, R, T, ...] -> each datum's [N, ...]; zeros for a datum that wasn't computed."""
        flat = flat.reshape(self.tokens.size, *flat.shape[3:])
        return [
            flat[where] if where.size else np.zeros((length, *flat.shape[1:]), flat.dtype)
            for where, length in zip(self.index, lengths, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One datum in the tree: `path` names its shared ancestors, outermost first, as (node, first token, end)."""

    datum: int
    length: int
    path: tuple[tuple[int, int, int], ...]

    @property
    def shared(self) -> int:
        return self.path[-1][2] if self.path else 0


class _Row:
    """Leaves that go in one row, the nodes already there, and the tokens both take."""

    def __init__(self, adapter: int):
        self.adapter, self.used = adapter, 0
        self.nodes: set[int] = set()
        self.leaves: list[_Leaf] = []

    def cost(self, leaf: _Leaf) -> int:
        shared = sum(end - start for node, start, end in leaf.path if node not in self.nodes)
        return shared + leaf.length - leaf.shared

    def add(self, leaf: _Leaf) -> None:
        self.used += self.cost(leaf)
        self.nodes.update(node for node, _, _ in leaf.path)
        self.leaves.append(leaf)


def pack(
    tokens: Sequence[np.ndarray],
    num_free: Sequence[int],
    *,
    row_tokens: int,
    rows: int,
    targets: Sequence[np.ndarray] | None = None,
    adapters: Sequence[int] | None = None,
    share_prefixes: bool = True,
    skip: Sequence[bool] | None = None,
) -> Packed:
    """Lay sequences out in micro-batches of [rows, row_tokens].

    First fit, longest first; with shared prefixes, a group's members one after another, each where it adds least. A
    tree too large for what a row has left is cut, its prefix repeated in the next row.

    Args:
      tokens: of each datum, i[N], N >= 1.
      num_free: of each datum, how many leading positions have no loss of their own and may be shared.
      targets: of each datum, [N] or [N, K]: given, positions are shared only if their targets agree too, so that one
        log-prob serves all (needed where outputs of positions without loss are wanted).
      adapters: of each datum; rows never mix adapters.
      skip: data that needn't be computed.

    Raises:
      RequestError: an empty datum.
      CapacityError: a datum longer than `row_tokens`, by index.
    """
    for i, datum in enumerate(tokens):
        if len(datum) == 0:
            raise RequestError(f"Datum {i} is empty", got="0 tokens", expected="at least 1")
        if len(datum) > row_tokens:
            raise CapacityError(
                f"Datum {i} does not fit in a training row",
                got=f"{len(datum)} tokens",
                expected=f"at most {row_tokens}",
                remedy="Raise the row length (training.row_tokens) or shorten the sequence",
            )
    adapters = [0] * len(tokens) if adapters is None else adapters
    wanted = [i for i in range(len(tokens)) if skip is None or not skip[i]]
    filled: list[_Row] = []
    for adapter in sorted({adapters[i] for i in wanted}):
        members = [i for i in wanted if adapters[i] == adapter]
        leaves = _tree(tokens, targets, num_free, members) if share_prefixes else _no_tree(tokens, members)
        filled.extend(_fill(leaves, adapter, row_tokens))
    return _lay_out(filled, tokens, row_tokens, rows)


def _no_tree(tokens: Sequence[np.ndarray], members: list[int]) -> list[_Leaf]:
    leaves = [_Leaf(i, len(tokens[i]), ()) for i in members]
    return sorted(leaves, key=lambda leaf: -leaf.length)


def _tree(
    tokens: Sequence[np.ndarray],
    targets: Sequence[np.ndarray] | None,
    num_free: Sequence[int],
    members: list[int],
) -> list[_Leaf]:
    """Leaves in the order of their tree's depth-first walk, larger subtrees first.

    The tree is a trie over what identifies a position: its token and, where given, its targets.
    """
    keys: dict[int, np.ndarray] = {}
    for i in members:
        columns = [np.asarray(tokens[i], np.int64)[:, None]]
        if targets is not None:
            columns.append(np.asarray(targets[i], np.int64).reshape(len(tokens[i]), -1))
        # One position may stay free of sharing in every datum: an own last token costs nothing and gives each a leaf.
        keys[i] = np.concatenate(columns, axis=1)[: min(num_free[i], len(tokens[i]) - 1)]
    num_nodes = 0
    leaves: list[_Leaf] = []
    # An explicit stack: the depth of the tree is not bounded by anything that Python's is.
    stack: list[tuple[list[int], int, tuple[tuple[int, int, int], ...]]] = [(members, 0, ())]
    while stack:
        group, depth, path = stack.pop()
        if len(group) == 1:
            leaves.append(_Leaf(group[0], len(tokens[group[0]]), path))
            continue
        end = _common(keys, group, depth)
        if end > depth:
            path = (*path, (num_nodes, depth, end))
            num_nodes += 1
        branches: dict[bytes, list[int]] = {}
        children: list[list[int]] = []
        for i in group:
            if len(keys[i]) == end:
                children.append([i])
            else:
                branches.setdefault(keys[i][end].tobytes(), []).append(i)
        children.extend(branches.values())
        children.sort(key=lambda child: sum(len(tokens[i]) - end for i in child))  # the largest is popped first
        stack.extend((child, end, path) for child in children)
    return leaves


def _common(keys: dict[int, np.ndarray], group: list[int], depth: int) -> int:
    """The end of the longest prefix, from `depth` on, that all of the group share."""
    first = keys[group[0]]
    end = min(len(keys[i]) for i in group)
    for i in group[1:]:
        if keys[i].shape[1] != first.shape[1]:  # different numbers of targets: nothing below here is alike
            return depth
        differ = np.flatnonzero((keys[i][depth:end] != first[depth:end]).any(axis=1))
        end = depth + int(differ[0]) if differ.size else end
    return max(end, depth)


def _fill(leaves: Sequence[_Leaf], adapter: int, row_tokens: int) -> list[_Row]:
    """First fit, preferring the row in which a leaf adds least: where its prefix is already."""
    done: list[_Row] = []
    open_rows: list[_Row] = []
    # What a leaf adds is at least its own part; a row with less room than the smallest of these is closed.
    smallest = min((leaf.length - leaf.shared for leaf in leaves), default=0)
    for leaf in leaves:
        fitting = [(row.cost(leaf), i) for i, row in enumerate(open_rows)]
        fitting = [(cost, i) for cost, i in fitting if open_rows[i].used + cost <= row_tokens]
        if fitting:
            row = open_rows[min(fitting)[1]]
        else:
            row = _Row(adapter)
            open_rows.append(row)
        row.add(leaf)
        if row_tokens - row.used < smallest:
            open_rows.remove(row)
            done.append(row)
    return done + open_rows


def _empty(num_micro_batches: int, rows: int, row_tokens: int) -> Packed:
    """Padding alone."""
    shape = (num_micro_batches, rows, row_tokens)
    return Packed(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        until=np.broadcast_to(np.arange(1, row_tokens + 1, dtype=np.int32), shape).copy(),
        segment=np.full(shape, PADDING, np.int32),
        adapter=np.zeros(shape[:2], np.int32),
        index=(),
        num_datum_tokens=0,
        num_computed_tokens=0,
    )


def _lay_out(filled: Sequence[_Row], tokens: Sequence[np.ndarray], row_tokens: int, rows: int) -> Packed:
    packed = _empty(-(-len(filled) // rows), rows, row_tokens)
    out_tokens, positions, until, segment = (
        array.reshape(-1, row_tokens) for array in (packed.tokens, packed.positions, packed.until, packed.segment)
    )
    adapter, index = packed.adapter.reshape(-1), [np.zeros(0, np.int64)] * len(tokens)
    for r, row in enumerate(filled):
        adapter[r] = row.adapter
        for datum, places in _places(row, until[r]).items():
            index[datum] = r * row_tokens + places
            out_tokens[r, places] = tokens[datum]
            positions[r, places] = np.arange(len(places))
        for leaf in row.leaves:
            segment.reshape(-1)[index[leaf.datum][leaf.shared :]] = leaf.datum
    return dataclasses.replace(
        packed,
        index=tuple(index),
        num_datum_tokens=sum(len(datum) for datum in tokens),
        num_computed_tokens=sum(row.used for row in filled),
    )


def _places(row: _Row, until: np.ndarray) -> dict[int, np.ndarray]:
    """Where in the row each token of each datum goes, depth first; fills the row's `until` i32[T]."""
    places: dict[int, np.ndarray] = {}
    spans: dict[int, np.ndarray] = {}  # node -> where it is
    at = 0
    # Nodes are numbered in the order of a depth-first walk, so this order keeps every node's leaves together.
    for leaf in sorted(row.leaves, key=lambda leaf: tuple(node for node, _, _ in leaf.path)):
        for node, start, end in leaf.path:
            if node not in spans:
                spans[node] = np.arange(at, at + end - start)
                at += end - start
        own = np.arange(at, at + leaf.length - leaf.shared)
        at += len(own)
        ancestors = [spans[node] for node, _, _ in leaf.path]
        for span in (*ancestors, own):
            until[span] = at
        places[leaf.datum] = np.concatenate([*ancestors, own])
    return places
