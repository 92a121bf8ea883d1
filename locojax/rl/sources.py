"""One way in for every source of prompts: a built-in task, a file, or a hub data set -> a Task."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from locojax.errors import ConfigError, DataError
from locojax.rl.datasets import HUB_PREFIX, Template, load_prompts
from locojax.rl.tasks import Task, load_task
from locojax.types import Prompt


def load_source(
    source: str,
    *,
    seed: int = 0,
    template: Template | None = None,
    reward: str | None = None,
    split: str = "train",
    held_out: str | None = None,
    held_out_share: float = 0.1,
    num_train: int | None = None,
    num_held_out: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Task:
    """Prompts to train on, held-out prompts and the reward, from whatever `source` names.

    Args:
      source: a task (see `load_task`), a `.jsonl` or `.parquet` file, or "hub:ORG/NAME".
      template: needed for files and hub data sets; for a task, replaces its own.
      reward: replaces a task's own; needed otherwise.
      held_out: a file or hub data set (its split "test") to evaluate on; None: the task's own, else a seeded share of
        the prompts.
      options: of a reasoning-gym task.

    Raises ConfigError for what is needed and not given, DataError for what can't be read.
    """
    if not is_data_set(source):
        task = load_task(
            source, seed=seed, num_train=num_train, num_held_out=num_held_out, template=template, options=options
        )
        evaluated = task.held_out if held_out is None else _held_out_prompts(held_out, template, num_held_out)
        return Task(task.name, task.train, evaluated, reward or task.reward)
    if template is None:
        raise _needs_template(source)
    if reward is None:
        raise ConfigError(
            f"The data set {source} needs a reward, to grade completions",
            expected="exact, last_number, gsm8k, math, path/to/file.py:function or module:function",
        )
    train = load_prompts(source, template, split=split)
    if held_out is None:
        train, shared = split_held_out(train, held_out_share, seed)
        evaluated = tuple(shared[:num_held_out])
    else:
        evaluated = _held_out_prompts(held_out, template, num_held_out)
    return Task(source, tuple(train[:num_train]), evaluated, reward)


def is_data_set(source: str) -> bool:
    """Whether `source` names a file or a hub data set, which need a template and a reward, rather than a task."""
    return source.startswith(HUB_PREFIX) or source.endswith((".jsonl", ".parquet"))


def _held_out_prompts(source: str, template: Template | None, max_prompts: int | None) -> tuple[Prompt, ...]:
    if template is None:
        raise _needs_template(source)
    prompts = load_prompts(source, template, split="test", max_prompts=max_prompts)
    return tuple(dataclasses.replace(prompt, prompt_id=f"held_out/{prompt.prompt_id}") for prompt in prompts)


def _needs_template(source: str) -> ConfigError:
    return ConfigError(
        f"The data set {source} needs a template, to make prompts of its rows",
        expected="for instance 'Question: {question}'",
    )


def split_held_out(prompts: Sequence[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out), each in the data set's order; at least one held out when `share` is above 0.

    Prompts with the same text stay together, so that nothing held out is trained on. Raises DataError if nothing is
    left to train on.
    """
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    num_held_out = min(max(1, round(share * len(texts))), len(texts)) if share > 0 else 0
    chosen = set(random.Random(f"held out/{seed}").sample(texts, num_held_out))
    train = [prompt for prompt in prompts if prompt.text not in chosen]
    if not train:
        raise DataError(
            "Nothing is left to train on after the held-out share is taken",
            got=f"{len(prompts)} prompts ({len(texts)} different), a share of {share:g}",
            remedy="Add prompts, give a held-out data set of its own, or set the share to 0",
        )
    return train, [prompt for prompt in prompts if prompt.text in chosen]
