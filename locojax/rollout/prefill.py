"""Which prompts are computed together, and how they lie in packed rows. No jax.

Prompts are packed into rows with `until` (see `models.attention`); a header that all prompts of a batch begin with is
laid out and computed once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence

import numpy as np

from locojax.rollout.pages import power_of_two

MIN_ROW = 16
MIN_PINNED_ROW = 32
MIN_PROMPTS = 8
MAX_WASTE = 8.0
"""A compiled program is used for prompts that one up to this much cheaper would do for: compiling takes seconds."""

ATTENTION_COST = 2048
"""A token's attention costs as much as its GEMMs when it sees about this many tokens."""


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Of a packed prefill program: rows x tokens of each, and how many prompts it stores."""

    rows: int
    tokens: int
    prompts: int

    @property
    def cost(self) -> float:
        return self.rows * self.tokens * (1 + self.tokens / ATTENTION_COST)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed prompts. tokens, positions, until: i32[R, T].

    `source[n][i]` is where in the flattened rows token i of prompt n was computed.
    """

    shape: PrefillShape
    tokens: np.ndarray
    positions: np.ndarray
    until: np.ndarray
    source: tuple[np.ndarray, ...]


def row_size(num_tokens: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... that holds so many tokens: few shapes, at most a third of padding."""
    size = MIN_ROW
    while size < num_tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def common_header(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, leaving at least one of each for itself."""
    if len(prompts) < 2:
        return 0
    shared = len(os.path.commonprefix([tuple(prompt) for prompt in prompts]))
    return min(shared, min(map(len, prompts)) - 1)


def pack(prompts: Sequence[Sequence[int]], known_shapes: Collection[PrefillShape] = ()) -> Packed:
    """Lays prompts out in the cheapest of: separate segments over several rows, or one row with the header once.

    A shape among `known_shapes` (already compiled) is preferred if it is not too wasteful.
    """
    count = max(MIN_PROMPTS, power_of_two(len(prompts)))
    header = common_header(prompts)
    longest = row_size(max(map(len, prompts)))
    plain_bins = _fit(prompts, 0, longest)
    options = [(0, PrefillShape(power_of_two(len(plain_bins)), longest, count))]
    if header:
        together = header + sum(len(p) - header for p in prompts)
        options.append((header, PrefillShape(1, row_size(together), count)))
    header, shape = min(options, key=lambda option: option[1].cost)
    for known in sorted(known_shapes, key=lambda s: s.cost):
        if known.cost <= MAX_WASTE * shape.cost and known.prompts >= len(prompts) and known.tokens >= shape.tokens:
            if len(_fit(prompts, header, known.tokens)) <= known.rows:
                shape = known
                break
    return _lay_out(prompts, header, shape)


def pack_pinned(prompts: Sequence[Sequence[int]], budget: int, num_prompts: int) -> Packed:
    """Lays prompts out in one row, whose length is one of a few: powers of two from MIN_PINNED_ROW up to `budget`.

    A program of T tokens stores up to 2 T: more than it computes when prompts share a header.
    """
    header, stored = common_header(prompts), sum(map(len, prompts))
    computed = header + sum(len(prompt) - header for prompt in prompts)
    size = max(power_of_two(max(computed, -(-stored // 2))), MIN_PINNED_ROW)
    return _lay_out(prompts, header, PrefillShape(1, min(size, budget), num_prompts))


def pack_alike(parts: Sequence[Sequence[Sequence[int]]], known_shapes: Collection[PrefillShape] = ()) -> list[Packed]:
    """Packs several hosts' prompts, of which some may have none, into rows of one shape."""
    shapes = [pack(prompts, known_shapes).shape for prompts in parts if prompts]
    shape = PrefillShape(
        max(s.rows for s in shapes), max(s.tokens for s in shapes), max(s.prompts for s in shapes)
    )
    while True:
        packed = [_pack_as(prompts, shape) for prompts in parts]
        if all(found is not None for found in packed):
            return [found for found in packed if found is not None]
        shape = dataclasses.replace(shape, rows=2 * shape.rows)  # first fit may need more rows when they are longer


def _pack_as(prompts: Sequence[Sequence[int]], shape: PrefillShape) -> Packed | None:
    """Prompts in that shape, a header they share computed once in each row; None if they don't fit."""
    for header in (common_header(prompts), 0):
        if len(_fit(prompts, header, shape.tokens)) <= shape.rows:
            return _lay_out(prompts, header, shape)
    return None


def pinned_rows(budget: int) -> list[int]:
    """The lengths that `pack_pinned` may choose."""
    sizes = []
    size = MIN_PINNED_ROW
    while size < budget:
        sizes.append(size)
        size *= 2
    return [*sizes, budget]


def _fit(prompts: Sequence[Sequence[int]], header: int, tokens: int) -> list[list[int]]:
    """First fit, longest first: indices of prompts for each row. A header takes its room once in each row."""
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    bins: list[list[int]] = []
    room: list[int] = []
    for n in order:
        need = len(prompts[n]) - header
        row = next((r for r, left in enumerate(room) if left >= need), None)
        if row is None:
            bins.append([])
            room.append(tokens - header)
            row = len(bins) - 1
        bins[row].append(n)
        room[row] -= need
    return bins


def _lay_out(prompts: Sequence[Sequence[int]], header: int, shape: PrefillShape) -> Packed:
    R, T = shape.rows, shape.tokens
    tokens, positions = np.zeros((R, T), np.int32), np.zeros((R, T), np.int32)
    until = np.broadcast_to(np.arange(1, T + 1, dtype=np.int32), (R, T)).copy()
    source: list[np.ndarray] = [np.zeros(0, np.int32)] * len(prompts)
    for row, members in enumerate(_fit(prompts, header, T)):
        at = header
        for n in members:
            end = at + len(prompts[n]) - header
            tokens[row, at:end] = prompts[n][header:]
            positions[row, at:end] = np.arange(header, len(prompts[n]))
            until[row, at:end] = end
            shared = np.arange(row * T, row * T + header, dtype=np.int32)
            source[n] = np.concatenate([shared, np.arange(row * T + at, row * T + end, dtype=np.int32)])
            at = end
        tokens[row, :header] = prompts[members[0]][:header]
        positions[row, :header] = np.arange(header)
        until[row, :header] = at
    return Packed(shape, tokens, positions, until, tuple(source))


def batches(
    lengths: Sequence[int], budget: int, header: int = 0, max_prompts: int | None = None
) -> list[list[int]]:
    """Cuts prompts, in order, into batches that take at most `budget` tokens; a longer one is alone and goes in chunks.

    The first `header` tokens, which all begin with, count once in a batch. With `max_prompts` a batch has no more than
    that, and no more than twice the budget in all, headers included.
    """
    out: list[list[int]] = []
    used = total = 0
    for n, length in enumerate(lengths):
        full = max_prompts is not None and out and (len(out[-1]) >= max_prompts or total + length > 2 * budget)
        if not out or full or used + length - header > budget:
            out.append([])
            used, total = header, 0
        out[-1].append(n)
        used += length - header
        total += length
    return out
