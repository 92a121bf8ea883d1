"""Graded groups to training data: denominators, sub-steps, schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from locojax.config import Config, load
from locojax.hosts import learning
from locojax.hosts.updates import plan_updates
from locojax.training.aggregation import Totals
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


def normalised_advantages(groups: list[Group], *arguments: str) -> list[np.ndarray]:
    chosen = config(*arguments)
    return [datum.inputs["advantages"] for datum in learning.normalised(learning.lesson(groups, chosen), chosen)]


def test_advantages_carry_the_batch_denominator():
    groups = [group("a", [1, 0, 0, 0], [1, 2, 3, 4]), group("b", [1, 1, 1, 1], [5, 5, 5, 5])]
    constant = normalised_advantages(groups)
    assert len(constant) == 4  # the group without a signal is not trained on
    np.testing.assert_allclose(constant[0][1:], 0.75 / (8 * 10))  # every scorable completion x max_tokens
    by_tokens = normalised_advantages(groups, "loss.normalise=tokens")
    np.testing.assert_allclose(by_tokens[3][1:], -0.25 / (1 + 2 + 3 + 4), rtol=1e-6)
    by_completions = normalised_advantages(groups, "loss.normalise=completions")
    np.testing.assert_allclose(by_completions[3][1:], -0.25 / (4 * 8), rtol=1e-6)  # its own length x completions


@pytest.mark.parametrize("normalise", ["tokens", "completions", "constant"])
def test_a_kl_term_is_divided_as_the_advantages_are(normalise):
    """In the reward it comes off before they are divided; in the loss each token's weight carries the division."""
    groups = [group("a", [1, 0], [2, 4])]
    reference = [np.full(3, -0.7, np.float32), np.full(5, -0.7, np.float32)]
    plain = normalised_advantages(groups, f"loss.normalise={normalise}")
    shares = [np.where(adv != 0, adv / raw, 0) for adv, raw in zip(plain, (0.5, -0.5), strict=True)]
    for place in ("reward", "loss"):
        chosen = config(f"loss.normalise={normalise}", "loss.kl=k1", "loss.kl_coefficient=0.1", f"loss.kl_in={place}")
        lesson = learning.with_reference(learning.lesson(groups, chosen), reference, chosen)
        for datum, adv, share in zip(learning.normalised(lesson, chosen), plain, shares, strict=True):
            if place == "loss":
                np.testing.assert_allclose(datum.inputs["weights"], share, rtol=1e-6)
            else:  # sampled at -0.5, so k1 is 0.2
                np.testing.assert_allclose(datum.inputs["advantages"], adv - 0.1 * 0.2 * share, rtol=1e-5)


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
    assert masked.totals.denominator("tokens") == 4 and masked.stats.num_completion_tokens == 8


class NoTrainer:
    """One host plans nothing: there is nobody to tell."""


def parts(places: list[int], groups: list[Group], *arguments: str) -> list[list[int]]:
    """Places in the batch of each part's data."""
    chosen = config("training.substeps=3", *arguments)
    lesson = learning.lesson(groups, chosen)
    found = plan_updates(NoTrainer(), lesson, chosen, places, num_hosts=1)  # type: ignore[arg-type]
    assert sorted(i for part in found.parts for i in part) == list(range(len(lesson.data)))
    return [[places[lesson.group_of[i]] for i in part] for part in found.parts]


def test_substeps_cut_the_batch_by_prompts_so_that_hosts_cut_it_alike():
    groups = [group(str(i), [1, 0] if i != 2 else [1, 1], [2, 2]) for i in range(7)]
    whole = parts(list(range(7)), groups, "run.prompts_per_step=7")
    assert whole == [[0, 0, 1, 1], [3, 3, 4, 4], [5, 5, 6, 6]]  # prompt 2 taught nothing
    shared = [parts(mine, [groups[i] for i in mine], "run.prompts_per_step=7") for mine in ([0, 3, 6], [1, 2, 4, 5])]
    assert [sorted(one + other) for one, other in zip(*shared, strict=True)] == whole


def test_placeholders_have_every_input_and_every_token_that_may_come_to_matter():
    groups = [group("a", [1, 1], [2, 4])]
    for arguments, name in (
        (["loss.kl=k1", "loss.kl_coefficient=0.1"], "ref_logprobs"),
        (["loss.kl=k1", "loss.kl_coefficient=0.1", "loss.kl_in=reward", "loss.tis_cap=2"], "old_logprobs"),
    ):
        chosen = config(*arguments)
        lesson = learning.lesson(groups, chosen)
        for placeholder, datum in zip(learning.with_placeholders(lesson, chosen), lesson.data, strict=True):
            assert name in placeholder.inputs and name not in datum.inputs
            if "loss.kl_in=reward" in arguments:  # equal rewards, but the term will make advantages of them
                np.testing.assert_array_equal(placeholder.inputs["advantages"] != 0, datum.inputs["weights"] != 0)


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
    totals = Totals(num_tokens=50, num_completions=7, max_tokens=10)
    assert learning.loss_config(config(), totals) == {}
    assert learning.loss_config(config("loss.name=ppo", "loss.clip_high=1.5"), totals) == {"clip_high_threshold": 1.5}
    assert learning.loss_config(config("loss.tis_cap=2", "loss.icepop_low=0.5", "loss.icepop_high=5"), totals) == {
        "tis_cap": 2.0, "icepop_low": 0.5, "icepop_high": 5.0
    }  # fmt: skip
    dro = learning.loss_config(config("loss.name=dro", "loss.dro_beta=0.1", "loss.normalise=tokens"), totals)
    assert dro == {"beta": pytest.approx(0.002)}  # as divided as its advantages


def test_gap_reads_trained_positions_only():
    [datum, _] = learning.lesson([group("a", [1, 0], [2, 2])], config()).data
    trainer = np.array([99.0, -0.5, -0.75], np.float32)  # the first position predicts the prompt
    found = learning.gap([datum], [{"logprobs": trainer}])
    assert found.num_tokens == 2 and found.max == pytest.approx(0.25)


def test_gap_leaves_out_tokens_that_the_loss_did_not_read():
    """A reward at its group's mean has no advantage: the trainer did not score that completion."""
    data = learning.lesson([group("a", [1, 0, 0.5], [2, 2, 2])], config()).data
    outputs = [{"logprobs": np.full(3, -0.5, np.float32)}] * 2 + [{"logprobs": np.zeros(3, np.float32)}]
    found = learning.gap(data, outputs)
    assert found.num_tokens == 4 and found.max == 0
