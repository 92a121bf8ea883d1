"""Every prompt once an epoch, no prompt twice in a batch, and the same order however one gets to a step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locojax.errors import ConfigError, DataError
from locojax.rl.batches import BatchOrder
from locojax.rl.seeds import sample_seed

SIZES = st.integers(1, 30).flatmap(lambda num: st.tuples(st.just(num), st.integers(1, num)))


@given(SIZES, st.integers(0, 2**40))
def test_each_epoch_holds_every_prompt_once_and_no_batch_one_twice(sizes: tuple[int, int], seed: int) -> None:
    num_prompts, batch_size = sizes
    order = BatchOrder(num_prompts, batch_size, seed)
    batches = [order.at(step) for step in range(4 * num_prompts // batch_size + 1)]
    assert all(len(set(batch)) == len(batch) == batch_size for batch in batches)
    drawn = list(itertools.chain(*batches))
    for epoch in range(4):
        assert sorted(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


@given(SIZES, st.integers(0, 9), st.integers(0, 60))
def test_a_resumed_order_goes_on_as_the_uninterrupted_one(sizes: tuple[int, int], seed: int, step: int) -> None:
    whole = BatchOrder(*sizes, seed)
    for earlier in range(step):
        whole.at(earlier)
    assert BatchOrder(*sizes, seed).at(step) == whole.at(step)
    assert whole.at(0) == BatchOrder(*sizes, seed).at(0)  # going back is fine as well


def test_the_order_is_pinned() -> None:
    # A checkpoint made yesterday resumes today: this order may never change, whatever numpy's version.
    order = BatchOrder(7, 3, seed=0)
    assert [order.at(step) for step in range(3)] == [(3, 2, 1), (6, 0, 4), (5, 4, 1)]
    assert order.epoch(7) == 3.0


def test_passes_go_through_the_same_batches() -> None:
    order, once = BatchOrder(7, 3, seed=0, period=4), BatchOrder(7, 3, seed=0)
    assert [order.at(step) for step in range(12)] == 3 * [once.at(step) for step in range(4)]


def test_seeds_and_epochs_change_the_order() -> None:
    assert BatchOrder(50, 50, 0).at(0) != BatchOrder(50, 50, 1).at(0)
    assert BatchOrder(50, 50, 0).at(0) != BatchOrder(50, 50, 0).at(1)


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(DataError, match="Got: 64 prompts a step from a data set of 45. Ask for 45 prompts a step"):
        BatchOrder(45, 64, 0)
    with pytest.raises(DataError, match="There are no prompts to train on"):
        BatchOrder(0, 1, 0)
    with pytest.raises(ConfigError, match="at least one prompt. Got: 0"):
        BatchOrder(3, 0, 0)


def test_sample_seeds_are_stable_distinct_and_63_bit() -> None:
    assert sample_seed(0, 3, "addition/17") == 8186723886204438244  # by hashlib, from the documented form
    fields = [(run, step, name) for run in range(5) for step in range(20) for name in ("a", "b", "a/1", "1")]
    seeds = {sample_seed(*each) for each in fields}
    assert len(seeds) == len(fields) and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 11, "") != sample_seed(11, 1, "")
