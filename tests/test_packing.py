"""Packing: every token placed, nothing sees a stranger, prefixes shared where that can't change anything."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from locojax.errors import CapacityError, RequestError
from locojax.training.packing import PADDING, pack


def check(tokens, packed):
    """Each datum's tokens, read through its index, are itself; and it sees exactly its own prefix."""
    flat_tokens, flat_positions = packed.tokens.reshape(-1), packed.positions.reshape(-1)
    M, R, T = packed.tokens.shape
    until = packed.until.reshape(-1, T)
    for datum, where in zip(tokens, packed.index, strict=True):
        if not where.size:
            continue
        assert np.array_equal(flat_tokens[where], datum)
        assert np.array_equal(flat_positions[where], np.arange(len(datum)))
        row = where[0] // T
        assert np.all(where // T == row)
        columns = where % T
        for i, column in enumerate(columns):
            seen = [j for j in range(T) if j <= column < until[row, j]]
            assert seen == list(columns[: i + 1])
    used = np.unique(np.concatenate([*packed.index, np.zeros(0, np.int64)]))
    assert len(used) == packed.num_computed_tokens
    padding = np.setdiff1d(np.arange(flat_tokens.size), used)
    assert np.all(packed.segment.reshape(-1)[padding] == PADDING)
    assert np.all(packed.until.reshape(-1)[padding] == padding % T + 1)


DATA = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(DATA, st.integers(9, 24), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_any_data_are_placed_whole_and_see_only_themselves(data, row_tokens, rows, share, random):
    tokens = [np.array(datum) for datum in data]
    num_free = [random.randint(0, len(datum)) for datum in data]
    targets = [np.array([random.randint(0, 1) for _ in datum]) for datum in data]
    targets = targets if random.random() < 0.5 else None
    packed = pack(tokens, num_free, row_tokens=row_tokens, rows=rows, targets=targets, share_prefixes=share)
    check(tokens, packed)
    assert packed.tokens.shape[1:] == (rows, row_tokens)
    segment = packed.segment.reshape(-1)
    for i, (where, free) in enumerate(zip(packed.index, num_free, strict=True)):
        assert np.all(segment[where[free:]] == i)  # no position with a loss is shared
        if targets is not None:
            flat = packed.scatter(targets, np.int32).reshape(-1)
            assert np.array_equal(flat[where], targets[i])  # and one target serves all who share


def group_batch(num_prompts=3, num_samples=4, header=10, prompt=6, completion=5):
    tokens, num_free = [], []
    for p in range(num_prompts):
        for s in range(num_samples):
            tokens.append(np.array([1] * header + [2 + p] * prompt + [20 + s] * completion))
            num_free.append(header + prompt)
    return tokens, num_free


def test_a_few_shot_header_and_each_prompt_are_computed_once():
    tokens, num_free = group_batch()
    packed = pack(tokens, num_free, row_tokens=128, rows=1)
    check(tokens, packed)
    assert packed.num_micro_batches == 1
    assert packed.num_computed_tokens == 10 + 3 * (6 + 4 * 5)
    assert packed.num_datum_tokens == 12 * 21


def test_a_tree_that_does_not_fit_is_cut_and_its_prefix_repeated():
    tokens, num_free = group_batch()
    packed = pack(tokens, num_free, row_tokens=40, rows=2)
    check(tokens, packed)
    # 10 + 6 + 4 x 5 = 36 of a row's 40: one prompt a row, the header three times.
    assert packed.num_computed_tokens == 3 * 36
    assert packed.tokens.shape == (2, 2, 40)
    assert packed.padding_share == pytest.approx(1 - 3 * 36 / 160)


def test_without_sharing_first_fit_decreasing_fills_rows():
    tokens = [np.full(n, 1) for n in (3, 7, 5, 5, 8, 2)]
    packed = pack(tokens, [0] * 6, row_tokens=10, rows=1, share_prefixes=False)
    check(tokens, packed)
    assert packed.num_micro_batches == 3 and packed.padding_share == 0.0


def test_rows_never_mix_adapters():
    tokens, num_free = group_batch(2, 2)
    packed = pack(tokens, num_free, row_tokens=64, rows=1, adapters=[0, 1, 0, 1])
    check(tokens, packed)
    T = packed.tokens.shape[-1]
    for where, adapter in zip(packed.index, [0, 1, 0, 1], strict=True):
        assert packed.adapter.reshape(-1)[where[0] // T] == adapter


def test_skipped_data_take_no_room_and_gather_as_zeros():
    tokens, num_free = group_batch(1, 3)
    packed = pack(tokens, num_free, row_tokens=64, rows=1, skip=[False, True, False])
    check(tokens, packed)
    assert packed.index[1].size == 0
    outputs = packed.gather(packed.tokens.astype(np.float32), [21, 21, 21])
    assert np.array_equal(outputs[0], tokens[0]) and not outputs[1].any() and outputs[1].shape == (21,)


def test_scatter_pads_targets_to_the_widest():
    tokens = [np.array([1, 2]), np.array([3])]
    packed = pack(tokens, [0, 0], row_tokens=4, rows=1)
    flat = packed.scatter([np.array([[1, 2], [3, 4]]), np.array([[5]])], np.int32).reshape(-1, 2)
    assert flat[packed.index[0]].tolist() == [[1, 2], [3, 4]] and flat[packed.index[1]].tolist() == [[5, 0]]


def test_nothing_to_pack_gives_no_micro_batch():
    packed = pack([np.array([1])], [0], row_tokens=4, rows=1, skip=[True])
    assert packed.num_micro_batches == 0 and packed.padding_share == 0.0


def test_a_datum_longer_than_a_row_is_refused_by_index():
    with pytest.raises(CapacityError, match=r"Datum 1 does not fit.*Got: 9 tokens.*at most 8.*row_tokens"):
        pack([np.arange(3), np.arange(9)], [0, 0], row_tokens=8, rows=1)


def test_an_empty_datum_is_refused_by_index():
    with pytest.raises(RequestError, match="Datum 0 is empty"):
        pack([np.arange(0)], [0], row_tokens=8, rows=1)


def test_packing_a_thousand_sequences_is_quick():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 9, rng.integers(20, 200)) for _ in range(1000)]
    packed = pack(tokens, [10] * 1000, row_tokens=1024, rows=2)
    assert packed.padding_share < 0.05
