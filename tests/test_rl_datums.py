"""The alignment, written out by hand, and what is left out of training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from locojax.errors import DataError
from locojax.rl.advantages import advantages
from locojax.rl.datums import DatumStats, group_datums, sequence_datum, sum_stats
from locojax.types import Completion, Group, Prompt, Reward, Rollout, StopReason


def _rollout(tokens: tuple[int, ...], reward: float | None, stop_reason: StopReason = "stop") -> Rollout:
    logprobs = np.array([-0.5 * (i + 1) for i in range(len(tokens))], np.float32)
    completion = Completion(0, tokens, logprobs, "", stop_reason, None, policy_version=0)
    return Rollout(completion, Reward(reward))


def _made(*rollouts: Rollout, prompt: tuple[int, ...] = (11, 12, 13), **options):
    group = Group(Prompt("p", "", tokens=prompt), rollouts)
    return group_datums(group, advantages([rollout.reward.value for rollout in rollouts]), **options)


def test_the_alignment_by_hand() -> None:
    made = _made(_rollout((21, 22), 1.0), _rollout((23,), 0.0))
    first, second = made.datums
    np.testing.assert_array_equal(first.tokens, [11, 12, 13, 21])
    np.testing.assert_array_equal(first.inputs["target_tokens"], [12, 13, 21, 22])
    np.testing.assert_array_equal(first.inputs["weights"], [0, 0, 1, 1])
    np.testing.assert_array_equal(first.inputs["logprobs"], [0, 0, -0.5, -1.0])
    np.testing.assert_array_equal(first.inputs["advantages"], [0, 0, 0.5, 0.5])
    np.testing.assert_array_equal(second.tokens, [11, 12, 13])
    np.testing.assert_array_equal(second.inputs["target_tokens"], [12, 13, 23])
    np.testing.assert_array_equal(second.inputs["advantages"], [0, 0, -0.5])
    assert {name: array.dtype for name, array in first.inputs.items()} == {
        "target_tokens": np.int32, "weights": np.float32, "logprobs": np.float32, "advantages": np.float32
    }  # fmt: skip
    assert first.tokens.dtype == np.int32 and made.sample_indices == (0, 1)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(-2, 2, width=32))
def test_a_sampled_token_is_predicted_at_the_position_before_it(num_prompt: int, num_sampled: int, a: float) -> None:
    full = list(range(100, 100 + num_prompt + num_sampled))
    logprobs = [-float(token) for token in full[num_prompt:]]
    datum = sequence_datum(full, [False] * num_prompt + [True] * num_sampled, logprobs, a)
    targets = datum.inputs["target_tokens"]
    np.testing.assert_array_equal(targets, datum.tokens + 1)  # the tokens count up, so each target is one more
    is_completion = targets >= 100 + num_prompt
    np.testing.assert_array_equal(datum.inputs["weights"], is_completion)
    np.testing.assert_array_equal(datum.inputs["logprobs"], np.where(is_completion, -targets, 0))
    np.testing.assert_array_equal(datum.inputs["advantages"], np.where(is_completion, np.float32(a), 0))


def test_c04_an_unscorable_sample_is_not_trained_on() -> None:
    made = _made(_rollout((1,), 1.0), _rollout((2,), None), _rollout((3,), 0.0))
    assert made.sample_indices == (0, 2) and made.stats.num_unscorable == 1 and made.stats.num_trained == 2
    assert [float(datum.inputs["advantages"][-1]) for datum in made.datums] == [0.5, -0.5]


def test_c05_and_c01_groups_without_signal_are_left_out_and_counted() -> None:
    unscorable = _made(_rollout((1,), None), _rollout((2,), None), keep_zero_variance=True)
    assert unscorable.datums == () and unscorable.stats.num_unscorable_groups == 1
    equal = (_rollout((1,), 1.0), _rollout((2,), 1.0))
    assert _made(*equal).datums == () and _made(*equal).stats.num_zero_variance_groups == 1
    assert len(_made(*equal, keep_zero_variance=True).datums) == 2


def test_c18_masked_truncated_samples_leave_sum_and_denominator_but_not_the_lengths() -> None:
    rollouts = (_rollout((1, 2, 3, 4), 1.0), _rollout((5, 6, 7, 8), 0.0, "length"))
    made = _made(*rollouts, mask_truncated=True)
    weights = [datum.inputs["weights"].sum() for datum in made.datums]
    assert sum(weights) * 1.0 / made.stats.num_trained_tokens == 1.0  # loss 1 a token: 4/4, not 4/8
    assert made.stats.num_trained_tokens == 4 and made.stats.num_completion_tokens == 8
    assert made.stats.num_truncated == made.stats.num_masked_truncated == 1
    assert float(made.datums[0].inputs["advantages"][-1]) == 0.5  # the masked one is still in the baseline
    unmasked = _made(*rollouts)
    assert unmasked.stats.num_trained_tokens == 8 and unmasked.stats.num_masked_truncated == 0


def test_empty_and_aborted_samples_are_not_trained_on() -> None:
    made = _made(_rollout((), 1.0), _rollout((2,), 0.5, "abort"), _rollout((3,), 0.0))
    assert made.sample_indices == (2,)


def test_counts_add_up_over_groups() -> None:
    made = [_made(_rollout((1, 2), 1.0), _rollout((3,), 0.0)), _made(_rollout((1,), 1.0), _rollout((3,), 1.0))]
    total = sum_stats(each.stats for each in made)
    assert (total.num_groups, total.num_zero_variance_groups, total.num_samples, total.num_trained) == (2, 1, 4, 2)
    assert (total.num_completion_tokens, total.num_trained_tokens) == (5, 3)
    assert sum_stats([]) == DatumStats()


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="Got: 3 tokens, 3 flags, 2 sampled tokens, 1 log-probs"):
        sequence_datum([1, 2, 3], [False, True, True], [-1.0], 0.0)
    with pytest.raises(DataError, match="at least 2 tokens"):
        sequence_datum([1], [False], [], 0.0)
    with pytest.raises(DataError, match="Nothing predicts a sequence's first token"):
        sequence_datum([1, 2], [True, True], [-1.0, -1.0], 0.0)
    with pytest.raises(DataError, match="The prompt p has no tokens"):
        _made(_rollout((1,), 1.0), _rollout((2,), 0.0), prompt=())
    group = Group(Prompt("p", "", tokens=(1,)), (_rollout((1,), 1.0),))
    with pytest.raises(DataError, match="not of the group of p. Got: 2 advantages for 1 samples"):
        group_datums(group, advantages([0, 1]))
