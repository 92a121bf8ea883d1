"""reasoning-gym's procedural tasks: entries as prompts, and each task's own verifier as the grader."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from locojax.errors import ConfigError, DataError
from locojax.types import Prompt

NAME_PREFIX = "reasoning_gym:"
INSTRUCTION = "Give the final answer between <answer> and </answer>."


def generate(
    name: str, num_train: int, num_held_out: int, seed: int, options: Mapping[str, Any]
) -> tuple[list[Prompt], list[Prompt]]:
    """Train and held-out prompts of one reasoning-gym task, no question in both. `options` go to the task's config.

    A task with few distinct questions gives fewer than asked for. Raises ConfigError for an unknown task (with the
    nearest names) or option, DataError when reasoning-gym is missing or too few questions are distinct.
    """
    dataset = _create(name, {**options, "seed": seed, "size": 2 * (num_train + num_held_out)})
    prompts: dict[str, Prompt] = {}
    for index in range(len(dataset)):
        if len(prompts) == num_train + num_held_out:
            break
        entry = dataset[index]
        prompts.setdefault(entry["question"], _prompt(name, index, entry, options))
    distinct = list(prompts.values())
    # Held-out ones are the first: how many training prompts are asked for must not change what is measured.
    held_out, train = distinct[:num_held_out], distinct[num_held_out:]
    if not train:
        raise DataError(
            f"The task reasoning_gym:{name} has too few distinct questions for a held-out split",
            got=f"{len(distinct)} distinct questions in {len(dataset)}",
            expected=f"{num_held_out} held out and at least 1 to train on",
            remedy="Hold fewer out, or set options of the task that make more questions",
        )
    return train, held_out


def _prompt(name: str, index: int, entry: Mapping[str, Any], options: Mapping[str, Any]) -> Prompt:
    text = f"{entry['question']}\n{INSTRUCTION}"
    return Prompt(
        f"reasoning_gym:{name}/{index}",
        text,
        answer=None if entry["answer"] is None else str(entry["answer"]),
        meta={"reasoning_gym": name, "options": dict(options), "entry": dict(entry)},
        messages=({"role": "user", "content": text},),
    )


class Verifiers:
    """Scores completions with the verifier of the task that each prompt's meta names, made once per task and options.

    Example: Verifiers().score("so <answer>7</answer>", prompt.meta) == 1.0
    """

    def __init__(self) -> None:
        self._gym = _import_gym()
        self._made: dict[str, Any] = {}

    def score(self, completion_text: str, meta: Mapping[str, Any]) -> float:
        """The verifier's score. Raises ValueError when the prompt is not one of `generate`'s."""
        if "reasoning_gym" not in meta:
            raise ValueError("the prompt was not made by a reasoning_gym task, so there is no verifier for it")
        key = json.dumps([meta["reasoning_gym"], meta["options"]], sort_keys=True, default=repr)
        if key not in self._made:
            self._made[key] = _create(meta["reasoning_gym"], {**meta["options"], "seed": 0, "size": 1})
        answer = _last_answer(completion_text)
        return float(self._made[key].score_answer(answer, meta["entry"]))


def _last_answer(completion_text: str) -> str | None:
    before, closed, _ = completion_text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer.strip() if closed and opened else None


def _create(name: str, settings: Mapping[str, Any]) -> Any:
    gym = _import_gym()
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise ConfigError(
            f"reasoning-gym has no task '{name}'",
            remedy=f"Did you mean {' or '.join(near)}?" if near else f"It has {', '.join(sorted(known))}",
        )
    try:
        return gym.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:  # how its configs refuse a name or a value
        raise ConfigError(f"reasoning-gym's task '{name}' refuses its options", got=f"{error}") from error


def _import_gym() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise DataError(
            "Tasks named reasoning_gym:... need the package reasoning-gym, which is not installed",
            remedy="pip install 'locojax[data]'",
        ) from error
