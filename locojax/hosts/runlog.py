"""The run folder: config.toml, metrics.jsonl, samples/step_00012.jsonl, report.html and report.png; see `hostlog` for
what other hosts add to it.

Everything in it can be read while the run goes on, and survives its crash: a line is whole once it is there, except
perhaps the last one, which reading back drops.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from locojax import settings
from locojax.config import Config, run_folder
from locojax.errors import CheckpointError, ConfigError
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.report import draw
from locojax.hosts.writers import make_writers
from locojax.types import Group

# The report may take this share of the run's time; on a short step it is drawn more rarely.
_MAX_DRAWING_SHARE = 0.02


class RunLog:
    """Writes one run's folder.

    Args:
      config: resolved; written to config.toml.
      resume_at: first step that this process does anew. None: a new run, whose folder must hold no metrics yet. A
        resumed run drops the lines and samples of steps from there on.

    Attributes:
      kept: steps that have their line already.

    Raises:
      ConfigError: the folder already holds a run and `resume_at` is None; a metric writer's package is missing.
      CheckpointError: the folder can't be written.

    Example:
      with RunLog(config, resume_at=None) as log:
          log.samples(0, groups, advantages, range(len(groups)))
          log.step(metrics)
    """

    def __init__(
        self,
        config: Config,
        *,
        resume_at: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.folder = run_folder(config)
        self._config, self._clock = config, clock
        self._metrics_path = self.folder / "metrics.jsonl"
        self.history: list[StepMetrics] = []
        if resume_at is not None:
            self.history = [metrics for metrics in read_metrics(self._metrics_path) if metrics.step < resume_at]
        elif self._metrics_path.exists():
            remedy = "Continue it with --resume, choose another run.name, or remove the folder"
            raise ConfigError(f"The run folder {str(self.folder)!r} already holds a run", remedy=remedy)
        self.kept = frozenset(metrics.step for metrics in self.history)
        self._writers = make_writers(config, self.folder)  # before the folder is touched: it may refuse
        with writing(self.folder):
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            if resume_at is not None:
                _remove_samples(self.folder / "samples", resume_at)
            replace_file(self.folder / "config.toml", settings.to_toml(config))
            replace_file(self._metrics_path, "".join(metrics.to_json() + "\n" for metrics in self.history))
            self._file = self._metrics_path.open("a", encoding="utf-8")
        self._drawn_at, self._drawing_seconds = clock(), 0.0

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def samples(
        self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]], places: Sequence[int]
    ) -> None:
        """Writes every completion of a step. `advantages[i][j]` belongs to `groups[i].rollouts[j]`.

        Args:
          places: of each group's prompt, in the batch of all hosts.
        """
        self._write_samples(f"step_{step:05d}.jsonl", sample_rows(groups, advantages, places))

    def held_out(self, policy_version: int, groups: Sequence[Group]) -> None:
        """Writes an evaluation's completions, under the policy version that they came from."""
        self._write_samples(f"held_out_{policy_version:05d}.jsonl", [sample_row(group, 0, None) for group in groups])

    def _write_samples(self, name: str, rows: Sequence[dict[str, object]]) -> None:
        with writing(self.folder):
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            replace_file(self.folder / "samples" / name, text)

    def step(self, metrics: StepMetrics) -> None:
        """Writes a step's numbers, and redraws the report if that is due."""
        self.history.append(metrics)
        with writing(self.folder):
            self._file.write(metrics.to_json() + "\n")
            self._file.flush()
        for writer in self._writers:
            writer.write(metrics.step, metrics.scalars())
        pause = max(self._config.report.redraw_seconds, self._drawing_seconds / _MAX_DRAWING_SHARE)
        if self._clock() - self._drawn_at >= pause:
            self.draw()

    def other_hosts(self, lines: Sequence[str]) -> None:
        """Writes what the other hosts say of the step, by rank from 1: `hosts.metrics_in_barrier`."""
        for rank, line in enumerate(lines, start=1):
            with writing(self.folder), (self.folder / f"metrics.host{rank}.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def draw(self) -> None:
        """Draws report.html and report.png now."""
        start = self._clock()
        with writing(self.folder):
            draw(self.folder, self.history, self._config)
        self._drawn_at = self._clock()
        self._drawing_seconds = self._drawn_at - start

    def close(self) -> None:
        """Draws the final report and closes what is open."""
        self._file.close()
        for writer in self._writers:
            writer.close()
        if self.history:
            self.draw()


def sample_rows(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], places: Sequence[int]
) -> list[dict[str, object]]:
    """The lines of a step's samples: what `locojax compare` tells equal work by, too."""
    return [
        {**sample_row(group, index, advantage), "position": place}
        for group, values, place in zip(groups, advantages, places, strict=True)
        for index, advantage in enumerate(values)
    ]


def sample_row(group: Group, index: int, advantage: float | None) -> dict[str, object]:
    """One line of a samples file; evaluation has no advantage."""
    rollout = group.rollouts[index]
    completion = rollout.completion
    prompt: object = group.prompt.text
    if group.prompt.messages is not None:
        prompt = [dict(message) for message in group.prompt.messages]
    return {
        "prompt_id": group.prompt.prompt_id,
        "sample": completion.sample_index,
        "prompt": prompt,
        "completion": completion.text,
        "answer": group.prompt.answer,
        "reward": rollout.reward.value,
        "error": rollout.reward.error,
        "advantage": None if advantage is None else float(advantage),
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(group.prompt.tokens),
        "num_tokens": len(completion.tokens),
        "policy_version": completion.policy_version,
    }


def read_metrics(path: pathlib.Path) -> list[StepMetrics]:
    """The steps of a metrics.jsonl, [] if there is none; a torn last line (a crash while writing) is dropped.

    Raises:
      CheckpointError: another line can't be read.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(StepMetrics.from_json(line))
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise CheckpointError(f"{path}, line {number} is not a step's metrics: {error}") from error
    return found


def _remove_samples(folder: pathlib.Path, from_step: int) -> None:
    """Of steps that are done anew, all hosts': another number of them will share the prompts out otherwise."""
    for path in folder.glob("step_*.jsonl"):
        number = path.name.removeprefix("step_").partition(".")[0]
        if number.isdecimal() and int(number) >= from_step:
            path.unlink(missing_ok=True)


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes a whole file, so that a reader sees the old one or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


@contextlib.contextmanager
def writing(folder: pathlib.Path) -> Iterator[None]:
    """Turns a storage failure inside into a CheckpointError that names the run folder."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space and continue with --resume" if full else "Check run.dir and its permissions"
        reason = error.strerror or error
        raise CheckpointError(f"The run folder {str(folder)!r} can't be written: {reason}", remedy=remedy) from error
