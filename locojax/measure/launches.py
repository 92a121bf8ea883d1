"""Run folders as launches to be compared: what each step worked on, and how long it took."""

from __future__ import annotations

import dataclasses
import glob
import json
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from locojax.errors import ComparisonError
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.phases import Phase
from locojax.hosts.runlog import read_metrics

METRICS = "metrics.jsonl"
NOT_WORK: tuple[Phase, ...] = ("evaluate", "checkpoint")
"""Phases whose seconds are no part of a step's: how often they happen is a setting, not a speed."""


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one step did, on all hosts together. Filled by `read_launch`. P prompts, C completions.

    Attributes:
      seconds: of the step on the first host, without NOT_WORK.
      prompt_ids: P of them, in the batch's order. prompt_tokens: i64[P], their lengths.
      output_tokens: i64[C], completions' lengths, in any order.
      num_truncated: completions that max_tokens or the context cut.
    """

    step: int
    seconds: float
    prompt_ids: tuple[str, ...]
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    num_truncated: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """One run's folder. `settings` are those of its config.toml by dotted key. Example: launch.settings["run.seed"]"""

    folder: pathlib.Path
    settings: Mapping[str, Any]
    steps: tuple[StepWork, ...]


def find_launches(texts: Sequence[str]) -> list[pathlib.Path]:
    """Run folders by their path, by a folder that holds several, or by a glob pattern; in the order of their names.

    Raises:
      ComparisonError: one of them names no run.
    """
    found: list[pathlib.Path] = []
    for text in texts:
        here = _runs_at(pathlib.Path(text)) or [
            run for path in sorted(glob.glob(text)) for run in _runs_at(pathlib.Path(path))
        ]
        if not here:
            raise ComparisonError(
                f"There is no run at {text!r}",
                expected=f"a run's folder (it holds {METRICS}), a folder of such folders, or a pattern of their names",
            )
        found += here
    return found


def _runs_at(path: pathlib.Path) -> list[pathlib.Path]:
    if (path / METRICS).is_file():
        return [path]
    return sorted(metrics.parent for metrics in path.glob(f"*/{METRICS}"))


def read_launch(folder: pathlib.Path) -> Launch:
    """Reads config.toml, metrics.jsonl and the samples of every step, of all hosts.

    Raises:
      ComparisonError: the steps are not 0, 1, 2, ... without a gap, or a step's samples are missing or unreadable.
      CheckpointError: metrics.jsonl is unreadable.
    """
    metrics = read_metrics(folder / METRICS)
    steps = [one.step for one in metrics]
    if not steps or steps != list(range(len(steps))):
        raise ComparisonError(
            f"The run {folder} can't be compared",
            got="no finished step" if not steps else f"steps {_ranges(steps)}",
            expected="every step from 0 on, once",
        )
    try:
        settings = _flat(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ComparisonError(f"The run {folder} has no readable config.toml: {error}") from error
    return Launch(folder, settings, tuple(_step_work(folder, one) for one in metrics))


def _step_work(folder: pathlib.Path, metrics: StepMetrics) -> StepWork:
    account = metrics.account
    rows = _sample_rows(folder, account.step)
    if len(rows) != metrics.num_completions:
        raise ComparisonError(
            f"The run {folder} has not all samples of step {account.step}",
            got=f"{len(rows)} completions",
            expected=f"{metrics.num_completions}, as its metrics say",
            remedy="Copy the samples of its other hosts beside those of the first",
        )
    prompts = sorted({row["prompt_id"]: row for row in rows}.values(), key=lambda row: row["position"])
    return StepWork(
        step=account.step,
        seconds=account.wall - sum(account.seconds.get(name, 0.0) for name in NOT_WORK),
        prompt_ids=tuple(row["prompt_id"] for row in prompts),
        prompt_tokens=np.array([row["num_prompt_tokens"] for row in prompts]),
        output_tokens=np.array([row["num_tokens"] for row in rows]),
        num_truncated=sum(row["stop_reason"] == "length" for row in rows),
    )


def _sample_rows(folder: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Every completion of a step; each host may have a file of its own."""
    paths = sorted((folder / "samples").glob(f"step_{step:05d}*.jsonl"))
    rows = []
    for path in paths:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
        for number, line in enumerate(text.split("\n"), start=1):  # splitlines knows other ends, which texts may hold
            try:
                row = json.loads(line)
                row = {name: row[name] for name in _SAMPLE_FIELDS}
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{path}, line {number} is not a completion that can be compared"
                raise ComparisonError(problem, expected=f"JSON with {', '.join(_SAMPLE_FIELDS)}") from error
            rows.append(row)
    if not rows:
        raise ComparisonError(f"The run {folder} has no samples of step {step}", remedy="Copy its folder whole")
    return rows


_SAMPLE_FIELDS = ("prompt_id", "position", "num_prompt_tokens", "num_tokens", "stop_reason")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _ranges(steps: Sequence[int]) -> str:
    """Example: [0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
