"""The books of the KV memory: nothing leaks, nothing is owned twice, whatever the order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from locojax.errors import CapacityError
from locojax.rollout.pages import (
    ContiguousMemory,
    Expected,
    PagedMemory,
    PagePool,
    PromptBlock,
    Rows,
    Shape,
    SlotBlock,
    power_of_two,
)


def test_what_is_expected_is_made_room_for_unless_there_is_none():
    memory = ContiguousMemory(max_tokens=1000, row_sizes=(1, 8), max_entries=8)
    memory.expect(Expected(prompt_tokens=32, num_prompts=5, own_tokens=60))
    memory.extend(memory.open_slot(memory.open_prompt(20)), 1)
    memory.settle(shrink=False, final_capacity=1)
    assert memory.shape == Shape(entries=8, prompt_capacity=32, rows=1, capacity=64)

    memory = ContiguousMemory(max_tokens=1000, row_sizes=(1, 8), max_entries=8)
    memory.expect(Expected(prompt_tokens=32, num_prompts=5, own_tokens=60))
    memory.extend(memory.open_slot(memory.open_prompt(256)), 1)  # a longer one than was said: 8 of them don't fit
    memory.settle(shrink=False, final_capacity=1)
    assert memory.shape == Shape(entries=1, prompt_capacity=256, rows=1, capacity=32)


def test_powers_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 128, 129)] == [1, 1, 2, 4, 4, 8, 128, 256]


def test_a_pool_counts_users_and_says_what_is_wrong():
    pool = PagePool(3)
    a, b = pool.allocate(2)
    pool.share([a])
    assert pool.writable(b) == b
    copy = pool.writable(a)
    assert copy not in (a, b) and pool.users(a) == 1 and pool.num_free == 0
    pool.share([a])
    with pytest.raises(CapacityError, match="^The KV memory is full. Got: 0 free pages. Expected: 1 pages.$"):
        pool.writable(a)
    assert pool.users(a) == 2, "a refused copy takes nothing"
    pool.release([a, a, b, copy])
    assert pool.num_free == 3
    with pytest.raises(ValueError, match="released more often"):
        pool.release([a])
    with pytest.raises(ValueError, match="is free"):
        pool.share([a])


def test_allocation_is_all_or_nothing():
    pool = PagePool(3)
    with pytest.raises(CapacityError):
        pool.allocate(4)
    assert pool.num_free == 3 and len(set(pool.allocate(3))) == 3


def test_rows_move_down_when_fewer_are_wanted():
    rows = Rows((1, 2, 8))
    blocks = [SlotBlock(PromptBlock(1, 0, []), -1, []) for _ in range(5)]
    for block in blocks:
        rows.place(block)
    assert rows.settle(shrink=False) is not None and rows.num_rows == 8
    for block in blocks[:3]:
        rows.remove(block)
    assert rows.settle(shrink=False) is None
    source = rows.settle(shrink=True)
    assert sorted(source) == [3, 4] and rows.num_rows == 2
    assert [source[block.row] for block in blocks[3:]] == [3, 4], "each block finds its content"


def test_contiguous_shapes_grow_in_powers_of_two_and_stay_within_the_budget():
    memory = ContiguousMemory(max_tokens=1024, row_sizes=(1, 4), max_entries=8)
    prompt = memory.open_prompt(40)
    slots = [memory.open_slot(prompt) for _ in range(3)]
    memory.extend(slots[0], 33)
    moves = memory.settle(shrink=False, final_capacity=64)
    assert moves.shape == Shape(entries=1, prompt_capacity=64, rows=4, capacity=64)
    assert memory.settle(shrink=False, final_capacity=64) is None
    with pytest.raises(CapacityError, match="is full. Got: 1088 tokens wanted. Expected: at most 1024.$"):
        memory.extend(slots[0], 200)
    memory.close_slot(slots[1])
    memory.close_slot(slots[0])
    moves = memory.settle(shrink=True, final_capacity=100)
    assert moves.shape == Shape(entries=1, prompt_capacity=64, rows=1, capacity=128)
    assert moves.source_rows == (2,) and slots[2].row == 0
    with pytest.raises(ValueError, match="still has 1 users"):
        memory.close_prompt(prompt)


def test_a_partly_filled_prompt_page_is_copied_for_each_sample():
    memory = PagedMemory(num_pages=16, page_size=4, row_sizes=(4,), max_entries=4)
    prompt = memory.open_prompt(6)
    slots = [memory.open_slot(prompt) for _ in range(2)]
    for slot in slots:
        memory.extend(slot, 3)
    moves = memory.settle(shrink=False, final_capacity=3)
    full, partial = prompt.pages
    assert [slot.pages[0] for slot in slots] == [full, full]
    assert {copy[0] for copy in moves.page_copies} == {partial}
    assert [copy[1] for copy in moves.page_copies] == [slot.pages[1] for slot in slots]
    assert len({partial, *(slot.pages[1] for slot in slots)}) == 3
    assert all(len(slot.pages) == 3 for slot in slots)
    memory.close_slot(slots[0])
    assert memory.settle(shrink=False, final_capacity=3) is None


def test_whole_prompt_pages_are_never_copied():
    memory = PagedMemory(num_pages=16, page_size=4, row_sizes=(4,), max_entries=4)
    prompt = memory.open_prompt(8)
    slot = memory.open_slot(prompt)
    memory.extend(slot, 1)
    assert slot.pages[:2] == prompt.pages and memory.settle(shrink=False, final_capacity=1) is None


EVENTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1 << 16)), max_size=80)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, paged=st.booleans())
def test_memory_never_leaks_and_is_never_owned_twice(events, paged):
    sizes = (1, 2, 8)
    memory = PagedMemory(24, 4, sizes, 6) if paged else ContiguousMemory(1024, sizes, 6)
    prompts, slots = [], []
    for kind, number in events:
        try:
            if kind == 0:
                prompts.append(memory.open_prompt(1 + number % 20))
            elif kind == 1 and prompts:
                slots.append(memory.open_slot(prompts[number % len(prompts)]))
            elif kind == 2 and slots:
                memory.extend(slots[number % len(slots)], number % 70)
            elif kind == 3 and slots:
                memory.close_slot(slots.pop(number % len(slots)))
            elif kind == 4:
                unused = [p for p in prompts if not p.users]
                if unused:
                    prompts.remove(unused[0])
                    memory.close_prompt(unused[0])
        except CapacityError:
            pass  # refused, and then nothing may have been taken: what follows checks it
        memory.settle(shrink=bool(number % 2), final_capacity=8)
        check(memory, prompts, slots, paged)
    for slot in slots:
        memory.close_slot(slot)
    for prompt in prompts:
        memory.close_prompt(prompt)
    check(memory, [], [], paged)
    if paged:
        assert memory.pool.num_free == 24


def check(memory, prompts, slots, paged):
    rows = [slot.row for slot in slots]
    assert len(set(rows)) == len(rows) and all(0 <= row < memory.rows.num_rows for row in rows)
    assert len({p.index for p in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.users == sum(slot.prompt is prompt for slot in slots)
    if not paged:
        shape = memory.shape
        assert shape.num_tokens <= memory.max_tokens
        assert all(p.index < shape.entries and p.num_tokens <= shape.prompt_capacity for p in prompts)
        assert all(slot.capacity <= shape.capacity for slot in slots)
        return
    users = [0] * 24
    for owner in (*prompts, *slots):
        for page in owner.pages:
            users[page] += 1
    assert users == [memory.pool.users(page) for page in range(24)]
    assert memory.pool.num_free == users.count(0)
    for slot in slots:  # what a sample writes to, it has alone
        first = slot.prompt.num_tokens // 4
        assert all(memory.pool.users(page) == 1 for page in slot.pages[first:])
        assert len(slot.pages) * 4 >= slot.prompt.num_tokens + slot.capacity
