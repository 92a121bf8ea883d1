"""Run folders as a training run leaves them, with the figures that a test wants."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from make_metrics import step_metrics

from locojax import settings
from locojax.config import Config
from locojax.hosts.phases import StepAccount


def write_run(
    folder: pathlib.Path,
    seconds: Sequence[float],
    *,
    batches: Sequence[Sequence[str]] = (("p0", "p1"), ("p2", "p3")),
    output_tokens: Sequence[Sequence[int]] | None = None,
    changes: dict[str, Any] | None = None,
    num_hosts: int = 1,
    group_size: int = 2,
) -> pathlib.Path:
    """Writes a run of len(seconds) steps that goes through `batches` as often as it takes.

    Args:
      seconds: of each step, beside half a second of evaluation.
      output_tokens: of each step's completions, prompt by prompt; 10 each unless told. 20 or more are cut off.
      changes: settings of config.toml by dotted key.
      num_hosts: the prompts are dealt out to so many files, in turn.
    """
    (folder / "samples").mkdir(parents=True)
    (folder / "config.toml").write_text(settings.to_toml(settings.replace(Config(), changes or {})))
    lines = []
    for step, wall in enumerate(seconds):
        prompts = batches[step % len(batches)]
        lengths = output_tokens[step] if output_tokens else [10] * len(prompts) * group_size
        account = StepAccount(step, {"decode": wall / 2, "evaluate": 0.5}, wall + 0.5)
        lines.append(step_metrics(step, account=account, num_completions=len(lengths)).to_json())
        rows = [
            {
                "prompt_id": prompt,
                "position": index // group_size,
                "sample": index % group_size,
                "num_prompt_tokens": 5 + index // group_size,
                "num_tokens": lengths[index],
                "stop_reason": "length" if lengths[index] >= 20 else "stop",
            }
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(group_size))
        ]
        for host in range(num_hosts):
            name = f"step_{step:05d}.jsonl" if host == 0 else f"step_{step:05d}.host{host}.jsonl"
            mine = [row for row in rows if row["position"] % num_hosts == host]
            (folder / "samples" / name).write_text("".join(json.dumps(row) + "\n" for row in reversed(mine)))
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder
