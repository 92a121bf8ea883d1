"""Runs that are killed, and what must hold of them once they have been resumed: for the crash tests."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import signal
import sys
from collections.abc import Sequence

import numpy as np
import real_runs
from real_runs import ROOT, lines, weights
from tiny import write_tiny_model

from locojax.cli_doctor import examine
from locojax.hosts.journal import read, recalled, rollout_files
from locojax.hosts.journal_files import open_folder
from locojax.hosts.shared_checkpoints import CHECKPOINTS

NUM_STEPS, NUM_PROMPTS, GROUP = 5, 3, 4

REWARD = """
import os
def score(prompt, completion, answer, meta):
    with open(os.environ["GRADES_LOG"], "a") as file:
        file.write(prompt + "\\n")
    return sum(byte % 2 for byte in completion.encode()) / 8
"""

# Steps count from 0. A checkpoint is written after 2 and 4, an evaluation made before step 0 and after 1, 3 and 4.
# A run is killed at one point of a chain after the other: each start comes a little further than the last.
BEFORE_A_CHECKPOINT = {
    "starting": "before:Started@-1",
    "drawn": "after:Drawn@1",
    "sampled, not graded": "after:Sampled@1",
    "trained, not written": "before:Trained@1",
    "evaluated": "after:Evaluated@1",
    "decoding": "phase:decode@2",
    "graded": "after:Graded@2",
    "saving begins": "phase:checkpoint@2",
    "saving": "before:Saved@2",
    "saved, perhaps": "after:Saved@2",
}
AFTER_IT = {
    "evaluating": "phase:evaluate@3",
    "trained": "after:Trained@3",
    "between steps": "phase:collect@3",
    "drawing": "before:Drawn@4",
    "prefilling": "phase:prefill@4",
    "writing a group": "torn:Sampled@4",
    "graded, not written": "before:Graded@4",
    "writing a grade": "torn:Graded@4",
    "waiting for grades": "phase:reward@4",
    "packing": "phase:pack@4",
    "agreeing": "phase:wait@4",
    "training": "phase:train@4",
    "writing that it trained": "torn:Trained@4",
    "publishing": "phase:publish@4",
    "saving the last": "before:Saved@4",
}


@dataclasses.dataclass
class Crashes:
    """A folder of runs, of one kind. `make` fills it."""

    folder: pathlib.Path
    arguments: tuple[str, ...]
    cache: str

    @classmethod
    def make(cls, folder: pathlib.Path, cache: str) -> Crashes:
        """Args: cache: jax's folder for compiled programs."""
        write_tiny_model(folder / "tiny")
        (folder / "rewards.py").write_text(REWARD)
        rows = [{"question": f"{i} bottles" + " of beer" * (i % 3), "answer": str(i)} for i in range(10)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cls(
            folder,
            (
                f"model.name={folder / 'tiny'}", f"data.source={folder / 'data.jsonl'}", "data.template={question}:",
                f"data.reward={folder / 'rewards.py'}:score", "data.chat=false", "rollout.max_tokens=6",
                f"rollout.group_size={GROUP}", f"run.prompts_per_step={NUM_PROMPTS}", f"run.num_steps={NUM_STEPS}",
                "run.eval_every=2", "run.eval_prompts=2", "data.held_out_share=0.3", f"run.dir={folder}",
                "training.compute_dtype=float32", "optimizer.learning_rate=1e-2", "optimizer.eps=1e-3",
                "run.checkpoint_every=3", "hosts.silence_seconds=6", "report.redraw_seconds=1000",
            ),
            cache,
        )  # fmt: skip

    def start(
        self, name: str, point: str, num_hosts: int = 1, *, crash_host: int = 0, settings: Sequence[str] = ()
    ) -> int:
        """One start of the run `name`, killed at `point`; its exit code, negative for a signal. See `crash_victim`."""
        command = [sys.executable, str(ROOT / "tests" / "crash_victim.py"), point, str(self.folder / f"{name}.asked"),
                   *self.arguments, *settings, f"run.name={name}", "--restartable"]  # fmt: skip
        return real_runs.start(
            command,
            num_hosts,
            errors=self.folder / f"{name}.err",
            jax_cache=self.cache,
            devices=1,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            GRADES_LOG=str(self.folder / f"{name}.graded"),
            CRASH_HOST=str(crash_host),
            **({"SLOW_HOST": str(1 - crash_host)} if "hosts.steal_groups=true" in settings else {}),
        )

    def known(self, name: str) -> tuple[set[tuple[int, int]], int, int]:
        """((step, place) of groups that are journaled, their grades' number, and the first step without a checkpoint).

        Of steps after the newest whole checkpoint.
        """
        folder, run = open_folder(str(self.folder / name / "journal")), self.folder / name
        first = max((int(p.name) for p in (run / CHECKPOINTS).glob("*") if p.name.isdecimal()), default=0)
        sampled, num_graded = set(), 0
        for step, names in rollout_files(folder).items():
            if step >= first:
                for place, groups in recalled(r for each in names for r in read(folder, each)[0]).items():
                    sampled.add((step, place))
                    num_graded += max(group.num_graded for group in groups)
        return sampled, num_graded, first

    def asked(self, name: str) -> collections.Counter[str]:
        """What the engines were asked for so far: request ids, warm-up and evaluation left out."""
        asked = [line for path in self.folder.glob(f"{name}.asked.*") for line in path.read_text().splitlines()]
        return collections.Counter(line for line in asked if line.startswith("step "))

    def num_begun(self, name: str) -> int:
        """Tokens of completions that engines went on with."""
        found = [line for path in self.folder.glob(f"{name}.asked.*") for line in path.read_text().splitlines()]
        return sum(int(line.split()[-1]) for line in found if line.startswith("begun step "))

    def num_grades(self, name: str) -> int:
        """Grades computed so far, of training prompts."""
        path = self.folder / f"{name}.graded"
        held_out = {row["prompt"] for file in (self.folder / "whole" / "samples").glob("held_out*")
                    for row in lines(file)}  # fmt: skip
        return sum(line not in held_out for line in path.read_text().splitlines()) if path.exists() else 0

    def check(self, name: str) -> None:
        """What holds of a run that has come to its end, however often it was killed."""
        found = examine(self.folder / name)
        assert not found.wrong, (found.wrong, self.errors(name))
        steps = lines(self.folder / name / "metrics.jsonl")
        assert [line["step"] for line in steps] == list(range(NUM_STEPS))
        for whole, line in zip(lines(self.folder / "whole" / "metrics.jsonl"), steps, strict=True):
            for key in ("reward_mean", "policy_version", "held_out", "num_completions"):
                assert line[key] == whole[key] or abs(line[key] - whole[key]) < 1e-6, key
        for ours, theirs in zip(weights(self.folder / "whole"), weights(self.folder / name), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)

    def errors(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def survives(
        self,
        name: str,
        *points: str,
        num_hosts: int = 1,
        resumed_on: int | None = None,
        crash_host: int = 0,
        settings: Sequence[str] = (),
    ) -> None:
        """Killed at each point, one after the other, and resumed: nothing is lost, nothing is done twice."""
        for number, point in enumerate([*points, "none"]):
            is_last = number == len(points)
            before = None if number == 0 else (*self.known(name), self.asked(name), self.num_grades(name))
            hosts = resumed_on or num_hosts if is_last else num_hosts
            code = self.start(name, point, hosts, crash_host=crash_host, settings=settings)
            assert code == (0 if is_last else -signal.SIGKILL if hosts == 1 else 1), (code, self.errors(name))
            killed = f"Host {crash_host} of {hosts} was ended by SIGKILL"
            assert is_last or hosts == 1 or self.errors(name).count(killed) == number + 1, self.errors(name)
            if before is not None:
                sampled, num_graded, first, asked, num_grades = before
                again, grades = self.asked(name) - asked, self.num_grades(name) - num_grades
                most = (NUM_STEPS - first) * NUM_PROMPTS - len(sampled)
                assert len(again) == sum(again.values()) <= most, (again, sampled)
                assert grades <= (NUM_STEPS - first) * NUM_PROMPTS * GROUP - num_graded, (grades, num_graded)
                if is_last:
                    assert len(again) == most and grades == most * GROUP + len(sampled) * GROUP - num_graded
        self.check(name)
