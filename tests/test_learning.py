"""Graded groups to training data: denominators, sub-steps, schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from locojax.config import Config, load
from locojax.hosts import learning
from locojax.types import Completion, Group, Prompt, Reward, Rollout


def group(name: str, rewards: list[float | None], lengths: list[int], stop: str = "stop") -> Group:
    rollouts = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        logprobs = np.full(length, -0.5, np.float32)
        completion = Completion(i, tuple(range(1, length + 1)), logprobs, "", stop, None, 0)  # type: ignore[arg-type]
        rollouts.append(Rollout(completion, Reward(reward)))
    return Group(Prompt(name, "", tokens=(7, 8)), tuple(rollouts))


def config(*arguments: str) -> Config:
    return load(None, ["rollout.max_tokens=10", *arguments])


def test_advantages_carry_the_batch_denominator():
    groups = [group("a", [1, 0, 0, 0], [1, 2, 3, 4]), group("b", [1, 1, 1, 1], [5, 5, 5, 5])]
    by_completions = learning.lesson(groups, config())
    assert by_completions.denominator == 8 * 10  # every scorable completion x max_tokens
    assert len(by_completions.data) == 4  # the group without a signal is not trained on
    np.testing.assert_allclose(by_completions.data[0].inputs["advantages"][1:], 0.75 / 80)
    by_tokens = learning.lesson(groups, config("loss.normalise=tokens"))
    assert by_tokens.denominator == 1 + 2 + 3 + 4
    np.testing.assert_allclose(by_tokens.data[3].inputs["advantages"][1:], -0.25 / 10, rtol=1e-6)


def test_nothing_to_learn_leaves_no_data():
    """C01, C05: equal rewards, and none at all."""
    lesson = learning.lesson([group("a", [1, 1], [3, 3]), group("b", [None, None], [3, 3])], config())
    assert lesson.data == ()
    assert lesson.stats.num_zero_variance_groups == 1 and lesson.stats.num_unscorable == 2


def test_masked_truncation_is_out_of_sum_and_denominator():
    """C18."""
    cut = group("a", [1, 0], [4, 4])
    second = dataclasses.replace(cut.rollouts[1].completion, stop_reason="length")
    cut = Group(cut.prompt, (cut.rollouts[0], Rollout(second, Reward(0.0))))
    masked = learning.lesson([cut], config("training.mask_truncated=true", "loss.normalise=tokens"))
    assert masked.denominator == 4 and masked.stats.num_completion_tokens == 8


def test_substeps_cut_the_batch_without_loss():
    data = [object()] * 7
    assert [len(part) for part in learning.substeps(data, 3)] == [2, 3, 2]  # type: ignore[arg-type]
    assert [len(part) for part in learning.substeps(data[:1], 3)] == [1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1, 1, 0.85, 0.55, 0.4]),
    ],
)
def test_schedules(schedule, expected):
    settings = [f"optimizer.schedule={schedule}", "optimizer.warmup_steps=2", "optimizer.final_share=0.4"]
    chosen = config(*settings, "run.num_steps=6")
    shares = [learning.schedule(chosen, i, 6) for i in range(6)]
    np.testing.assert_allclose(shares, expected, atol=1e-9)
    assert learning.adam_params(chosen, 0).learning_rate == pytest.approx(0.5 * chosen.optimizer.learning_rate)


def test_the_loss_gets_only_the_settings_it_has():
    assert learning.loss_config(config(), 1.0) == {}
    assert learning.loss_config(config("loss.name=ppo", "loss.clip_high=1.5"), 1.0) == {"clip_high_threshold": 1.5}
    dro = learning.loss_config(config("loss.name=dro", "loss.dro_beta=0.1"), 50.0)
    assert dro == {"beta": pytest.approx(0.002)}  # as divided as its advantages


def test_gap_reads_trained_positions_only():
    [datum, _] = learning.lesson([group("a", [1, 0], [2, 2])], config()).data
    trainer = np.array([99.0, -0.5, -0.75], np.float32)  # the first position predicts the prompt
    found = learning.gap([datum], [{"logprobs": trainer}])
    assert found.num_tokens == 2 and found.max == pytest.approx(0.25)
