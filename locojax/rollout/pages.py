"""Who owns which piece of the KV memory: one interface, a layout for each kind of machine.

A prompt is stored once, in a `PromptBlock`, and shared by all samples drawn from it; a `SlotBlock` is a running
sample's own memory. Nobody ever writes to a shared piece. No jax here: this is bookkeeping, and `layouts.py` moves the
bytes.

* `ContiguousMemory`, where gathers are slow (CPU): prompts are rows of one array, [entries, prompt capacity], slots
  rows of another, [rows, capacity]. Copy on write is then "writes go to the slot's own row".
* `PagedMemory`, for kernels that read page tables (TPU): fixed pages, reference-counted; a prompt's last page, when
  only partly filled, is copied for each sample before it writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from locojax.errors import CapacityError


def power_of_two(n: int) -> int:
    """The least power of two >= n (1 for n < 1): shapes come in few sizes, so programs do."""
    return 1 << max(n - 1, 0).bit_length()


@dataclasses.dataclass(eq=False)
class PromptBlock:
    """A stored prompt. `users` counts the samples that read it, plus one while the prefix cache keeps it."""

    num_tokens: int
    index: int  # its row among the entries
    pages: list[int]
    users: int = 0
    num_stem: int = 0  # of its tokens, the first ones: found in another prompt, whose whole pages it shares


@dataclasses.dataclass(eq=False)
class SlotBlock:
    """A running sample's memory: its row in the batch, and the pages (paged only) of prompt and own tokens together."""

    prompt: PromptBlock
    row: int
    pages: list[int]
    capacity: int = 0  # own tokens it may hold


class PagePool:
    """Fixed-size pages with reference counts."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def users(self, page: int) -> int:
        return self._users[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages of one's own. Raises CapacityError, having taken none, if there are not as many."""
        if count > len(self._free):
            raise CapacityError("The KV memory is full", got=f"{len(self._free)} free pages", expected=f"{count} pages")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each. Raises ValueError for a page nobody holds."""
        for page in pages:
            if not self._users[page]:
                raise ValueError(f"page {page} is free and can't be shared")
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less of each; the last one frees it. Raises ValueError for a page nobody holds."""
        for page in pages:
            if not self._users[page]:
                raise ValueError(f"page {page} was released more often than it was taken")
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def writable(self, page: int) -> int:
        """Copy on write: `page` itself if its holder is alone, else a fresh page to copy it to, its share given up.

        Raises CapacityError, having changed nothing, if a copy is needed and no page is free.
        """
        if self._users[page] == 1:
            return page
        (copy,) = self.allocate(1)
        self.release([page])
        return copy


class Rows:
    """The batch rows of running samples: as many as one of a few sizes, so that few programs are compiled."""

    def __init__(self, sizes: Sequence[int]):
        """`sizes`: ascending; the last is the most samples that run at once."""
        self.sizes = tuple(sizes)
        self.num_rows = 0
        self.blocks: dict[int, SlotBlock] = {}

    def size_for(self, count: int) -> int:
        return next((size for size in self.sizes if size >= count), self.sizes[-1])

    def place(self, block: SlotBlock) -> None:
        """Gives the block the lowest free row, adding rows if none is free. Raises CapacityError at the last size."""
        if len(self.blocks) >= self.sizes[-1]:
            raise CapacityError("All slots are taken", got=f"{len(self.blocks)} running samples")
        block.row = next(row for row in range(len(self.blocks) + 1) if row not in self.blocks)
        self.blocks[block.row] = block

    def remove(self, block: SlotBlock) -> None:
        del self.blocks[block.row]

    def settle(self, shrink: bool) -> list[int] | None:
        """Fixes the number of rows; with `shrink`, moves blocks down to fit a smaller size.

        Returns for each new row the old row whose content it takes, or None if nothing changes.
        """
        needed = self.size_for(max(self.blocks, default=-1) + 1)
        return self.resize(self.size_for(len(self.blocks)) if shrink else max(needed, self.num_rows))

    def resize(self, target: int) -> list[int] | None:
        """Fixes the number of rows to one that holds the blocks; see `settle` for what it returns."""
        if target == self.num_rows:
            return None
        source = [row if row < self.num_rows else 0 for row in range(target)]
        homeless = sorted(row for row in self.blocks if row >= target)
        for old, new in zip(homeless, (r for r in range(target) if r not in self.blocks), strict=False):
            block = self.blocks.pop(old)
            block.row, source[new] = new, old if old < self.num_rows else 0
            self.blocks[new] = block
        self.num_rows = target
        return source


@dataclasses.dataclass(frozen=True)
class Shape:
    """The contiguous arrays: [entries, prompt capacity] and [rows, capacity], in tokens."""

    entries: int = 0
    prompt_capacity: int = 0
    rows: int = 0
    capacity: int = 0

    @property
    def num_tokens(self) -> int:
        return self.entries * self.prompt_capacity + self.rows * self.capacity


@dataclasses.dataclass(frozen=True)
class Moves:
    """What `settle` asks of the device: take these old rows, to this shape; copy these pages."""

    shape: Shape | None = None
    source_rows: tuple[int, ...] | None = None
    stem_copies: tuple[tuple[int, int], ...] = ()  # (from page, to page), before anything is computed
    page_copies: tuple[tuple[int, int], ...] = ()  # (from, to)
    row_copies: tuple[tuple[int, int, int], ...] = ()  # (page, to row, as the row's page number)

    def split(self) -> tuple[Moves, Moves]:
        """(what comes before prompts are computed, what copies them and so comes after)."""
        first = Moves(self.shape, self.source_rows, self.stem_copies)
        return first, Moves(page_copies=self.page_copies, row_copies=self.row_copies)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Work to come.

    Attributes:
      prompt_tokens: of the longest prompt.
      num_prompts, own_tokens: where samples wait for slots: prompts that may be open together, and the most tokens that
        a sample may come to. 0 where all have slots from the beginning.
    """

    prompt_tokens: int
    num_prompts: int = 0
    own_tokens: int = 0


@runtime_checkable
class KvMemory(Protocol):
    """What the scheduler knows of the KV memory. Every method that takes memory takes all of it or raises."""

    rows: Rows
    decode_reads_prompts: bool  # so a stored prompt costs decoding time, or takes room that running samples want

    def open_prompt(self, num_tokens: int) -> PromptBlock:
        """Room for a prompt, held by nobody yet. Raises CapacityError."""

    def expect(self, work: Expected) -> None:
        """Makes shapes that won't have to change for what will come, if there is room for them."""

    def close_prompt(self, block: PromptBlock) -> None:
        """Gives a prompt's memory back; its users must be gone."""

    def open_slot(self, prompt: PromptBlock) -> SlotBlock:
        """A slot that continues `prompt`. Raises CapacityError."""

    def extend(self, slot: SlotBlock, num_own: int) -> None:
        """Makes room for `num_own` tokens of the slot's own, in all. Raises CapacityError."""

    def close_slot(self, slot: SlotBlock) -> None:
        """Gives a slot's memory back."""

    def headroom(self, num_stored: int) -> int:
        """How many tokens a slot that holds `num_stored` may add before the arrays must grow; 0 if they must now."""

    def prefers_eviction(self) -> bool:
        """Whether an unused cached prompt should go before one more is opened."""

    def fits_alone(self, num_prompt: int, num_own: int) -> bool:
        """Whether one sample fits when nothing else is held. The prompt may grow by what a preemption folds into it."""

    def settle(self, *, shrink: bool, final_capacity: int) -> Moves | None:
        """Fixes shapes and rows before the device runs. `shrink`: fewer rows are wanted if they do."""


@runtime_checkable
class ContinuesPrompts(Protocol):
    """A KV memory in which a prompt may share the beginning of another one."""

    def continue_prompt(self, stem: PromptBlock, num_stem: int, num_tokens: int) -> PromptBlock:
        """Room for a prompt whose first `num_stem` tokens are those of `stem`, which has been computed.

        Raises CapacityError."""


class ContiguousMemory:
    """Rows of arrays (see the module's head). `max_tokens` bounds entries x prompt capacity + rows x capacity."""

    MIN_CAPACITY = 32
    decode_reads_prompts = True

    def __init__(self, max_tokens: int, row_sizes: Sequence[int], max_entries: int):
        self.max_tokens, self.max_entries = max_tokens, max_entries
        self.rows = Rows(row_sizes)
        self.shape = Shape()
        self._prompts: dict[int, PromptBlock] = {}
        self._entries = 0
        self._prompt_capacity = 0
        self._capacity = 0
        self._least = Shape()  # of work in waves: they would each find their own way to it, through other programs

    def _check(self, entries: int, prompt_capacity: int, num_slots: int, capacity: int) -> None:
        wanted = Shape(entries, prompt_capacity, self.rows.size_for(num_slots) if num_slots else 0, capacity).num_tokens
        if wanted > self.max_tokens:
            raise CapacityError(
                "The KV memory is full", got=f"{wanted} tokens wanted", expected=f"at most {self.max_tokens}"
            )

    def open_prompt(self, num_tokens: int) -> PromptBlock:
        index = next(i for i in range(len(self._prompts) + 1) if i not in self._prompts)
        if index >= self.max_entries:
            raise CapacityError("The KV memory is full", got=f"{index} stored prompts")
        if not self._prompts:
            self._choose_prompt_capacity(num_tokens)
        capacity = max(self._prompt_capacity, power_of_two(num_tokens), self.MIN_CAPACITY)
        entries = max(self._entries, self._least_with(capacity).entries, power_of_two(index + 1))
        self._check(entries, capacity, len(self.rows.blocks), self._capacity)
        self._entries, self._prompt_capacity = entries, capacity
        self._prompts[index] = PromptBlock(num_tokens, index, [])
        return self._prompts[index]

    def expect(self, work: Expected) -> None:
        self._prompt_capacity = max(self._prompt_capacity, power_of_two(work.prompt_tokens), self.MIN_CAPACITY)
        if work.num_prompts:
            entries, capacity = power_of_two(work.num_prompts), max(power_of_two(work.own_tokens), self.MIN_CAPACITY)
            self._least = Shape(
                min(max(entries, self._least.entries), self.max_entries), self._prompt_capacity, self.rows.sizes[-1],
                max(capacity, self._least.capacity),
            )  # fmt: skip

    def _least_with(self, prompt_capacity: int) -> Shape:
        """What is expected, if there is room for all of it; else nothing."""
        wanted = dataclasses.replace(self._least, prompt_capacity=prompt_capacity).num_tokens
        return self._least if wanted <= self.max_tokens else Shape()

    def close_prompt(self, block: PromptBlock) -> None:
        if block.users:
            raise ValueError(f"prompt {block.index} still has {block.users} users")
        del self._prompts[block.index]
        if not self._prompts:  # the next wave chooses its own number
            self._entries = 0

    def _choose_prompt_capacity(self, num_tokens: int) -> None:
        """Waves keep the capacity of the longest prompt so far, lest each has its own shape, unless memory is short."""
        if self._entries_that_fit(self._prompt_capacity) < min(self.max_entries, self.rows.sizes[-1]):
            self._prompt_capacity = max(power_of_two(num_tokens), self.MIN_CAPACITY)

    def _entries_that_fit(self, capacity: int) -> int:
        return self.max_tokens // max(2 * capacity, 1)

    def open_slot(self, prompt: PromptBlock) -> SlotBlock:
        self._check(self._entries, self._prompt_capacity, len(self.rows.blocks) + 1, self._capacity)
        slot = SlotBlock(prompt, -1, [])
        self.rows.place(slot)
        prompt.users += 1
        return slot

    def extend(self, slot: SlotBlock, num_own: int) -> None:
        least = self._least_with(self._prompt_capacity).capacity
        capacity = max(self._capacity, least, power_of_two(num_own), self.MIN_CAPACITY)
        self._check(self._entries, self._prompt_capacity, len(self.rows.blocks), capacity)
        self._capacity = capacity
        slot.capacity = max(slot.capacity, num_own)

    def close_slot(self, slot: SlotBlock) -> None:
        self.rows.remove(slot)
        slot.prompt.users -= 1
        if not self.rows.blocks:  # the next wave starts from nothing, or its shapes would depend on the last one's
            self._capacity = self.rows.num_rows = 0

    def headroom(self, num_stored: int) -> int:
        return max(self._capacity - num_stored, 0)

    def prefers_eviction(self) -> bool:
        return power_of_two(len(self._prompts) + 1) > max(self._entries, 1)

    def fits_alone(self, num_prompt: int, num_own: int) -> bool:
        prompt = max(power_of_two(num_prompt + num_own), self.MIN_CAPACITY)
        return Shape(1, prompt, self.rows.size_for(1), max(power_of_two(num_own), self.MIN_CAPACITY)).num_tokens <= (
            self.max_tokens
        )

    def settle(self, *, shrink: bool, final_capacity: int) -> Moves | None:
        """With fewer rows the capacity goes to its final size at once: growing it later would be one more program."""
        before = self.rows.num_rows
        over = Shape(self._entries, self._prompt_capacity, before, self._capacity).num_tokens > self.max_tokens
        source = self.rows.settle(shrink or over)
        capacity = self._capacity
        if source is not None and self.rows.num_rows < before:
            jump = max(power_of_two(final_capacity), capacity)
            shape = Shape(self._entries, self._prompt_capacity, self.rows.num_rows, jump)
            capacity = jump if shape.num_tokens <= self.max_tokens else capacity
        self._capacity = capacity
        shape = Shape(self._entries, self._prompt_capacity, self.rows.num_rows, capacity)
        if shape == self.shape and (source is None or before == 0):  # rows that were empty hold nothing to move
            return None
        self.shape = shape
        return Moves(shape, None if source is None else tuple(source))


class PagedPrompts:
    """The part of a KV memory that keeps computed prompts in pages of one size."""

    def __init__(self, num_pages: int, page_size: int, max_entries: int):
        self.pool, self.page_size, self.max_entries = PagePool(num_pages), page_size, max_entries
        self._prompts: dict[int, PromptBlock] = {}

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def open_prompt(self, num_tokens: int) -> PromptBlock:
        index = next(i for i in range(len(self._prompts) + 1) if i not in self._prompts)
        if index >= self.max_entries:
            raise CapacityError("The KV memory is full", got=f"{index} stored prompts")
        self._prompts[index] = PromptBlock(num_tokens, index, self.pool.allocate(self.num_pages(num_tokens)))
        return self._prompts[index]

    def expect(self, work: Expected) -> None:
        """Pages are of one size, and shapes depend on no prompt, whatever comes."""

    def close_prompt(self, block: PromptBlock) -> None:
        if block.users:
            raise ValueError(f"prompt {block.index} still has {block.users} users")
        self.pool.release(block.pages)
        del self._prompts[block.index]


class PagedMemory(PagedPrompts):
    """Page tables (see the module's head)."""

    decode_reads_prompts = True

    def __init__(self, num_pages: int, page_size: int, row_sizes: Sequence[int], max_entries: int):
        super().__init__(num_pages, page_size, max_entries)
        self.rows = Rows(row_sizes)
        self._copies: list[tuple[int, int]] = []

    def open_slot(self, prompt: PromptBlock) -> SlotBlock:
        slot = SlotBlock(prompt, -1, list(prompt.pages))
        self.pool.share(slot.pages)
        try:
            if prompt.num_tokens % self.page_size:  # the sample's first token goes into the prompt's last page
                last = self.pool.writable(slot.pages[-1])
                if last != slot.pages[-1]:
                    self._copies.append((slot.pages[-1], last))
                    slot.pages[-1] = last
            self.rows.place(slot)
        except CapacityError:
            self._forget(slot)
            raise
        prompt.users += 1
        return slot

    def extend(self, slot: SlotBlock, num_own: int) -> None:
        missing = self.num_pages(slot.prompt.num_tokens + num_own) - len(slot.pages)
        if missing > 0:
            slot.pages += self.pool.allocate(missing)
        slot.capacity = max(slot.capacity, num_own)

    def _forget(self, slot: SlotBlock) -> None:
        """Releases the pages, and with them a copy that was asked for and never made."""
        self._copies = [copy for copy in self._copies if copy[1] not in slot.pages]
        self.pool.release(slot.pages)

    def close_slot(self, slot: SlotBlock) -> None:
        self._forget(slot)
        self.rows.remove(slot)
        slot.prompt.users -= 1

    def headroom(self, num_stored: int) -> int:
        return self.page_size * self.pool.num_pages  # tables may always grow; the pool is asked page by page

    def prefers_eviction(self) -> bool:
        return False

    def fits_alone(self, num_prompt: int, num_own: int) -> bool:
        # One page more than the sample fills: while it runs, the prompt's last page exists twice.
        return self.num_pages(num_prompt + num_own) + 1 <= self.pool.num_pages

    def settle(self, *, shrink: bool, final_capacity: int) -> Moves | None:
        self.rows.settle(shrink)
        copies, self._copies = tuple(self._copies), []
        return Moves(page_copies=copies) if copies else None
