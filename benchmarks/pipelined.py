"""The pipelined step against the synchronous one on the same work: same weights, and how much less time.

Both train the same model on the same prompts with the same seeds and a reward that takes a while (--grade-ms), in
turns, several launches each. What is hidden is training behind grading: the synchronous step waits for the last grade
before it trains, the pipelined one trains on groups that are graded meanwhile. With a reward that takes no time there
is nothing to hide on devices that take turns, and the two should be equal.
Run it with: python benchmarks/pipelined.py [--grade-ms 20 0] [--launches 3] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from recovery import write_model

from locojax.config import load
from locojax.hosts import colocated
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.runlog import read_metrics
from locojax.measure.timeline import Timeline

PROMPTS, GROUP, MAX_TOKENS, STEPS = 8, 8, 64, 6
WARM_UP = 2  # steps in which programs are compiled


class Workload:
    """Runs in one folder."""

    def __init__(self, folder: pathlib.Path, settings: list[str]):
        self.folder = folder
        rows = [{"question": f"{i} bottles", "answer": str(i)} for i in range(64)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._arguments = [
            f"model.name={write_model(folder / 'model')}", f"data.source={folder / 'data.jsonl'}",
            "data.template={question}:", "data.chat=false", f"run.dir={folder}", f"run.cache_dir={folder / 'cache'}",
            f"run.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}", f"rollout.max_tokens={MAX_TOKENS}",
            "rollout.max_slots=16", f"run.num_steps={STEPS}", "run.eval_every=0", "run.checkpoint_every=0",
            "report.redraw_seconds=1000", "training.compute_dtype=float32", "optimizer.eps=1e-3", *settings,
        ]  # fmt: skip

    def run(self, name: str, grade_ms: float, *, pipelined: bool) -> tuple[float, float, list[np.ndarray]]:
        """(median seconds a step, share of training done before the last group was there, final weights)."""
        reward = self.folder / f"reward_{grade_ms:g}.py"
        reward.write_text(
            "import time\ndef score(prompt, completion, answer, meta):\n"
            f"    time.sleep({grade_ms / 1000})\n    return sum(b % 2 for b in completion.encode()) / 64\n"
        )
        settings = [f"run.name={name}", f"data.reward={reward}:score", f"run.pipelined={str(pipelined).lower()}"]
        config = load(None, [*self._arguments, *settings])
        colocated.run(config, resume=False, timer=Timeline())
        steps = read_metrics(self.folder / name / "metrics.jsonl")[WARM_UP:]
        train = sum(line.account.seconds.get(phase, 0.0) for line in steps for phase in ("pack", "train"))
        hidden = sum(line.extra.get("overlapped_seconds", 0.0) for line in steps) / train
        checkpoints = Checkpoints(self.folder / name / colocated.CHECKPOINTS, config, read_only=True)
        state = checkpoints.restore_as_saved()
        checkpoints.close()
        return statistics.median(line.account.wall for line in steps), hidden, jax.tree.leaves(state["trainable"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grade-ms", type=float, nargs="+", default=[20.0, 0.0])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="key=value, as for `locojax train`")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(pathlib.Path(folder), args.settings)
        for grade_ms in args.grade_ms:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            hidden, apart = [], 0.0
            for number in range(args.launches):
                weights = {}
                for pipelined in seconds:  # in turns, so that both see the same machine
                    name = f"{grade_ms:g}-{pipelined}-{number}"
                    took, share, weights[pipelined] = workload.run(name, grade_ms, pipelined=pipelined)
                    seconds[pipelined].append(took)
                    hidden += [share] if pipelined else []
                pairs = zip(weights[False], weights[True], strict=True)
                apart = max([apart, *(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)])
            found[f"{grade_ms:g}"] = {
                "pipelined_s": round(statistics.median(seconds[True]), 3),
                "synchronous_s": round(statistics.median(seconds[False]), 3),
                "training_hidden": round(statistics.median(hidden), 3),
                "largest_weight_difference": apart,
            }
            print(f"a grade takes {grade_ms:g} ms: {found[f'{grade_ms:g}']}", file=sys.stderr, flush=True)
    first = found[f"{args.grade_ms[0]:g}"]
    print(json.dumps({
        "name": "pipelined", "ours": first["pipelined_s"], "against": "the synchronous step on the same work",
        "theirs": first["synchronous_s"], "ratio": round(first["synchronous_s"] / first["pipelined_s"], 3),
        "unit": "s a step, median",
        "conditions": {
            "by_grade_ms": found, "launches": args.launches, "scored_steps": STEPS - WARM_UP,
            "workload": f"{PROMPTS} prompts x {GROUP} samples x {MAX_TOKENS} tokens at most, 1 grader process",
            "device": jax.devices()[0].device_kind, "num_cpus": os.cpu_count(), "jax": jax.__version__,
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
