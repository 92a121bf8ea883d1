"""The books of KV memory for an engine whose shapes are chosen beforehand: a server's, to which anything may come.

A running sample's whole sequence lies in its own row of [rows, capacity], its prompt copied in; computed prompts are
kept in pages of their own. So what decoding compiles for is one of a few pairs of rows and capacity, fixed at the
start, whatever lengths, groups and adapters arrive. A larger number of rows means a smaller capacity: the pairs hold
about as many tokens each. Pairs between those, `spare`, waste less where samples end at different times; they are used
once their programs are there. No jax here; `layout_rows.py` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from locojax.errors import CapacityError
from locojax.rollout.pages import Moves, PagedPrompts, PromptBlock, Rows, Shape, SlotBlock, power_of_two


class RowsMemory(PagedPrompts):
    """See the module's head, and `pages.KvMemory` for the methods."""

    decode_reads_prompts = False

    def __init__(
        self,
        max_tokens: int,
        page_size: int,
        row_sizes: Sequence[int],
        max_entries: int,
        max_context: int,
        spare_sizes: Sequence[int] = (),
    ):
        """Half of `max_tokens` is for the rows, half for computed prompts. `page_size`: a power of two. `spare_sizes`:
        numbers of rows that are not used before `use_spare`."""
        half = max_tokens // 2
        most = max(power_of_two(max_context), page_size)
        super().__init__(half // page_size, page_size, max_entries)
        self.capacities = {
            rows: min(most, 1 << ((half // rows).bit_length() - 1))
            for rows in sorted({*row_sizes, *spare_sizes})
            if half // rows >= page_size
        }
        self.rows = Rows(tuple(rows for rows in self.capacities if rows in row_sizes))
        self.shape = Shape()
        self._uncopied: list[SlotBlock] = []
        self._stem_copies: list[tuple[int, int]] = []  # pages begun by another prompt: (its page, ours)

    def shapes(self) -> list[Shape]:
        """Every shape that the arrays may have now."""
        return [self._shape(rows) for rows in self.rows.sizes]

    def spare_shapes(self) -> list[Shape]:
        """Those that they may have after `use_spare`."""
        return [self._shape(rows) for rows in self.capacities if rows not in self.rows.sizes]

    def use_spare(self) -> None:
        self.rows.sizes = tuple(self.capacities)

    def _shape(self, rows: int) -> Shape:
        return Shape(self.max_entries, 0, rows, self.capacities[rows])

    def continue_prompt(self, stem: PromptBlock, num_stem: int, num_tokens: int) -> PromptBlock:
        """See `ContinuesPrompts`. Whole pages are shared, and nobody writes to them; of a page that the two have in
        part in common the new prompt gets a copy, until which it holds the original too."""
        block = self.open_prompt(num_tokens - num_stem // self.page_size * self.page_size)
        shared, begun = stem.pages[: num_stem // self.page_size], num_stem % self.page_size
        self.pool.share(shared)
        if begun:
            source = stem.pages[len(shared)]
            self.pool.share([source])
            self._stem_copies.append((source, block.pages[0]))
        block.num_tokens, block.num_stem, block.pages = num_tokens, num_stem, [*shared, *block.pages]
        return block

    def close_prompt(self, block: PromptBlock) -> None:
        for source, to in [copy for copy in self._stem_copies if copy[1] in block.pages]:
            self._stem_copies.remove((source, to))
            self.pool.release([source])
        super().close_prompt(block)

    def open_slot(self, prompt: PromptBlock) -> SlotBlock:
        slot = SlotBlock(prompt, -1, [])
        self._check(len(self.rows.blocks) + 1, prompt.num_tokens + 1)
        self.rows.place(slot)
        prompt.users += 1  # until it has been copied
        self._uncopied.append(slot)
        return slot

    def extend(self, slot: SlotBlock, num_own: int) -> None:
        self._check(len(self.rows.blocks), slot.prompt.num_tokens + num_own)
        slot.capacity = max(slot.capacity, num_own)

    def close_slot(self, slot: SlotBlock) -> None:
        self.rows.remove(slot)
        if slot in self._uncopied:
            self._uncopied.remove(slot)
            slot.prompt.users -= 1

    def headroom(self, num_stored: int) -> int:
        return max(self.capacities.values())  # `extend` knows: it depends on each slot's prompt

    def prefers_eviction(self) -> bool:
        return False

    def fits_alone(self, num_prompt: int, num_own: int) -> bool:
        # A preemption makes a prompt of what was sampled.
        total = num_prompt + num_own
        return total <= max(self.capacities.values()) and self.num_pages(total) <= self.pool.num_pages

    def settle(self, *, shrink: bool, final_capacity: int) -> Moves | None:
        """Keeps the number of rows while it will do, so that arrays seldom move; with `shrink` takes the least."""
        new, self._uncopied = self._uncopied, []
        for slot in new:
            slot.prompt.users -= 1
        stems, self._stem_copies = tuple(self._stem_copies), []
        self.pool.release(source for source, _ in stems)  # given to nobody before the copies are made
        count = len(self.rows.blocks)
        if not count:
            return None
        before, fits = self.rows.num_rows, self._fits(count, self._longest())
        untouched = len(new) == count  # nothing of value lies in the rows
        if before in fits and not ((shrink or untouched) and fits[0] < before):
            target = before
        else:
            target = fits[0] if shrink or untouched or before < count else fits[-1]
        source = self.rows.resize(target)
        copies = tuple((page, slot.row, j) for slot in new for j, page in enumerate(slot.prompt.pages))
        shape = self._shape(target)
        if shape == self.shape:
            return Moves(stem_copies=stems, row_copies=copies) if copies or stems else None
        self.shape = shape
        return Moves(shape, None if source is None else tuple(source), stem_copies=stems, row_copies=copies)

    def _longest(self) -> int:
        return max((slot.prompt.num_tokens + slot.capacity for slot in self.rows.blocks.values()), default=0)

    def _fits(self, count: int, longest: int) -> list[int]:
        return [rows for rows in self.rows.sizes if rows >= count and self.capacities[rows] >= longest]

    def _check(self, count: int, num_tokens: int) -> None:
        longest = max(num_tokens, self._longest())
        if not self._fits(count, longest):
            usable = {rows: self.capacities[rows] for rows in self.rows.sizes}
            raise CapacityError("The KV memory is full", got=f"{count} samples of up to {longest} tokens",
                                expected=f"rows: tokens of each at most {usable}")  # fmt: skip
