"""reasoning-gym: its questions, its verifiers."""

from __future__ import annotations

import sys

import pytest

from locojax.errors import ConfigError, DataError, GradingError
from locojax.rl.grading import Grader
from locojax.rl.rewards import GradeInput
from locojax.rl.tasks import load_task

pytestmark = pytest.mark.extended


def test_entries_become_prompts_and_are_graded_by_the_tasks_own_verifier() -> None:
    task = load_task("reasoning_gym:countdown", num_train=4, num_held_out=2, options={"max_numbers": 4})
    assert (len(task.train), len(task.held_out), task.reward) == (4, 2, "reasoning_gym")
    prompt = task.train[0]
    expression = prompt.meta["entry"]["metadata"]["expression"]
    texts = [f"So <answer> ({expression})\n</answer>", "<answer>1</answer>", expression, f"<answer>{expression}"]
    assert texts[0] != prompt.answer  # as a text; its value is what counts
    with Grader(task.reward) as grader:
        right, wrong, unmarked, open_mark = grader.grade([GradeInput(prompt, text) for text in texts])
    assert right.value == 1.0
    for other in (wrong, unmarked, open_mark):
        assert other.value is not None and other.value < 0.5


def test_held_out_questions_are_none_of_the_trained_ones_and_do_not_depend_on_how_many_are_trained() -> None:
    task = load_task("reasoning_gym:chain_sum", num_train=50, num_held_out=20, seed=1)
    assert not {each.text for each in task.train} & {each.text for each in task.held_out}
    fewer = load_task("reasoning_gym:chain_sum", num_train=5, num_held_out=20, seed=1)
    assert fewer.held_out == task.held_out and fewer.train == task.train[:5]


def test_a_task_with_few_questions_keeps_what_is_distinct_or_says_so() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_task("reasoning_gym:chain_sum", num_train=400, num_held_out=20, options=options)
    texts = [each.text for each in (*task.train, *task.held_out)]
    assert len(set(texts)) == len(texts) < 420
    with pytest.raises(DataError, match="too few distinct questions for a held-out split"):
        load_task("reasoning_gym:chain_sum", num_train=1, num_held_out=1000, options=options)


def test_unknown_tasks_and_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="reasoning-gym has no task 'chainsum'. Did you mean chain_sum"):
        load_task("reasoning_gym:chainsum")
    with pytest.raises(ConfigError, match="'chain_sum' refuses its options. Got: .*max_term"):
        load_task("reasoning_gym:chain_sum", options={"max_term": 3})


def test_other_prompts_have_no_verifier() -> None:
    prompt = load_task("addition").train[0]
    with Grader("reasoning_gym", max_unscorable_rate=0.0) as grader, pytest.raises(GradingError) as caught:
        grader.grade([GradeInput(prompt, "7")])
    assert "not made by a reasoning_gym task" in str(caught.value)


def test_the_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"reasoning-gym, which is not installed. pip install 'locojax\[data\]'"):
        load_task("reasoning_gym:chain_sum")
