"""The alarms' texts, and the healthy run that sounds none."""

from __future__ import annotations

import pytest
from make_metrics import step_metrics

from locojax.hosts.alarms import alarms


def test_a_healthy_run_is_quiet():
    assert alarms([]) == {}
    history = [step_metrics(i, reward_mean=i / 40 + 0.01 * (i % 2)) for i in range(40)]
    for length in range(1, 41):
        assert alarms(history[:length]) == {}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        (
            {"truncated_share": 0.42},
            "truncated",
            "42% of the completions were cut off before they ended. Raise rollout.max_tokens, or set "
            "training.mask_truncated=true.",
        ),
        (
            {"zero_variance_share": 0.9, "reward_mean": 0.02},
            "zero_variance",
            "In 90% of the groups every completion got the same reward, so they teach nothing. The prompts are too "
            "hard (or too easy) for this model, or rollout.group_size is too small.",
        ),
        (
            {"unscorable_share": 0.031},
            "unscorable",
            "3.1% of the completions could not be graded. They are left out; the samples file has the errors.",
        ),
        (
            {"update_skipped": "the gradient is not finite"},
            "skipped",
            "Step 0's update was skipped: the gradient is not finite. The weights are unchanged.",
        ),
    ],
)
def test_one_step_is_enough_for(changes, kind, text):
    assert alarms([step_metrics(**changes)]) == {kind: text}


def test_groups_of_one_reward_are_fine_once_the_task_is_solved():
    assert alarms([step_metrics(zero_variance_share=1.0, reward_mean=1.0)]) == {}


def test_a_gap_ten_times_its_running_median():
    usual = [step_metrics(i, gap_mean=gap) for i, gap in enumerate([0.011, 0.010, 0.012])]
    assert alarms([*usual, step_metrics(3, gap_mean=0.1)]) == {}
    assert alarms([*usual, step_metrics(3, gap_mean=0.2)]) == {
        "gap": "Sampler and trainer disagree: their log-probs differ by 0.2 nats on average, and usually by 0.011. "
        "Suspect the weight publish or a numeric change; the gradient is off-policy."
    }
    exact = [step_metrics(i, gap_mean=0.0) for i in range(5)]
    assert alarms([*exact, step_metrics(5, gap_mean=5e-6)]) == {}
    assert "gap" in alarms([*exact, step_metrics(5, gap_mean=5e-5)])
    assert alarms([*exact[:2], step_metrics(2, gap_mean=1.0)]) == {}  # two steps make no median


def test_a_reward_that_does_not_move():
    flat = [step_metrics(i, reward_mean=0.3 + 0.02 * (-1) ** i) for i in range(20)]
    assert alarms(flat[:19]) == {}
    assert alarms(flat) == {
        "flat": "The reward has not moved in the last 20 steps (0.3 -> 0.3). Try a higher optimizer.learning_rate, "
        "a larger rollout.group_size or easier prompts."
    }
    assert alarms([step_metrics(i, reward_mean=0.97) for i in range(20)]) == {}
