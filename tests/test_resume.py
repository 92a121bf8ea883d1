"""Runs that are cut short inside a step, stopped, or damaged, and what a resume makes of them; in one process."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import signal
import threading

import numpy as np
import pytest
from real_runs import leaves
from tiny import write_tiny_model

from locojax.cli_doctor import examine
from locojax.config import Config, load
from locojax.errors import CheckpointError
from locojax.hosts import colocated, journal_files
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.interrupt import RESTART, Stopped
from locojax.hosts.progress import Progress
from locojax.hosts.startup import Startup
from locojax.hosts.worker import HostWorker
from locojax.measure.timeline import Timeline

REWARD = """
import os
def score(prompt, completion, answer, meta):
    with open(os.environ["GRADES_LOG"], "a") as file:
        file.write(prompt + "\\n")
    return sum(byte % 2 for byte in completion.encode()) / 8
"""
NUM_STEPS = 4
PER_STEP = 12  # completions


class Killed(BaseException):
    """Nobody catches it."""


class Runs:
    """A folder of runs, what was said and asked for in each."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        write_tiny_model(folder / "tiny")
        (folder / "rewards.py").write_text(REWARD)
        rows = [{"question": f"{i} bottles", "answer": str(i)} for i in range(12)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.said: list[str] = []
        self.asked: collections.Counter[str] = collections.Counter()

    def config(self, name: str, *arguments: str) -> Config:
        folder = self.folder
        return load(
            None,
            [
                f"model.name={folder / 'tiny'}", f"data.source={folder / 'data.jsonl'}", "data.template={question}:",
                f"data.reward={folder / 'rewards.py'}:score", "data.chat=false", "rollout.max_tokens=6",
                "rollout.group_size=4", "run.prompts_per_step=3", f"run.num_steps={NUM_STEPS}", "run.eval_every=0",
                f"run.dir={folder}", f"run.cache_dir={folder / 'cache'}", "training.compute_dtype=float32",
                "optimizer.learning_rate=1e-2", "optimizer.eps=1e-3", "run.checkpoint_every=2",
                "report.redraw_seconds=1000", f"run.name={name}", *arguments,
            ],
        )  # fmt: skip

    def run(self, name: str, *arguments: str, resume: bool | None = False, timer: Timeline | None = None):
        self.said.clear()
        self.asked.clear()
        os.environ["GRADES_LOG"] = str(self.folder / f"{name}.graded")
        return colocated.run(self.config(name, *arguments), resume=resume, timer=timer or Timeline())

    def num_grades(self, name: str) -> int:
        return len((self.folder / f"{name}.graded").read_text().splitlines())

    def weights(self, name: str) -> list[np.ndarray]:
        checkpoints = Checkpoints(self.folder / name / colocated.CHECKPOINTS, self.config(name), read_only=True)
        state = checkpoints.restore_as_saved()
        checkpoints.close()
        return leaves(state)

    def check(self, name: str) -> None:
        """It ended as the run that nothing happened to."""
        found = examine(self.folder / name)
        assert not found.wrong, found.wrong
        for ours, theirs in zip(self.weights("whole"), self.weights(name), strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-7)



@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("resume"))
    found.run("whole")
    return found


@pytest.fixture
def runs(made, monkeypatch) -> Runs:
    sample = HostWorker.sample

    def counted(self, requests, **others):
        made.asked.update(request.request_id.partition("/")[0] for request in requests)
        return sample(self, requests, **others)

    monkeypatch.setattr(HostWorker, "sample", counted)
    monkeypatch.setattr(Progress, "note", lambda self, text: made.said.append(text))
    return made


def die_at(monkeypatch, kind: str, step: int, number: int) -> None:
    """The journal's so-manieth record of a kind in a step is written, and nothing after it."""
    append, seen = journal_files.LocalAppender.append, []

    def counted(self, payload: bytes) -> None:
        if len(seen) == number:
            if threading.current_thread() is threading.main_thread():
                raise Killed
            return  # a grade that comes in: its thread is dead as well, and writes nothing
        append(self, payload)
        fields = json.loads(payload.partition(b"\n")[0])
        if fields["kind"] == kind and fields["step"] == step:
            seen.append(payload)

    monkeypatch.setattr(journal_files.LocalAppender, "append", counted)


class Signalled(Timeline):
    """Sends this process a signal as a phase of a step is entered."""

    def __init__(self, number: int, phase: str, step: int):
        super().__init__()
        self._wanted = (number, phase, step)

    def phase(self, name):
        number, phase, step = self._wanted
        if name == phase and self._in_step and len(self.accounts) == step:
            os.kill(os.getpid(), number)
        return super().phase(name)


def test_a_step_cut_short_is_finished_from_what_was_graded(runs, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, "Sampled", 3, 2)
        with pytest.raises(Killed):
            runs.run("cut")
    before = runs.num_grades("cut")
    runs.run("cut", resume=True)
    runs.check("cut")
    assert runs.asked == {"step 3": 1}, "two of the last step's three groups were there, and all of step 2's"
    # A grade that was made but not yet written down when it died is made again: at most those of the cut step.
    again = runs.num_grades("cut") - NUM_STEPS * PER_STEP
    assert 0 <= again <= before - 3 * PER_STEP
    assert any(text.startswith("resumed at step 4 of 4 in ") and "training 1 step again" in text for text in runs.said)


def test_sigterm_ends_with_a_checkpoint_and_the_code_that_launchers_restart_on(runs):
    with pytest.raises(Stopped) as stopped:
        runs.run("term", timer=Signalled(signal.SIGTERM, "decode", 3))
    assert stopped.value.exit_code == RESTART == 75
    assert "saving a checkpoint, after 3 steps" in runs.said
    assert sum(runs.asked.values()) == 12
    runs.run("term", resume=None)
    runs.check("term")
    assert set(runs.asked) <= {"step 3"}


def test_sigterm_without_time_for_a_checkpoint_leaves_the_journal(runs):
    arguments = ("run.grace_seconds=0.001", "run.checkpoint_every=0")
    with pytest.raises(Stopped):
        runs.run("late", *arguments, timer=Signalled(signal.SIGTERM, "train", 1))
    assert "no time for a checkpoint: the journal holds what was done since the last one" in runs.said
    assert not list((runs.folder / "late" / "checkpoints").iterdir())
    runs.run("late", *arguments, resume=True)
    runs.check("late")
    assert not {"step 0", "step 1"} & set(runs.asked)


def test_a_stop_while_it_evaluates_lets_the_step_be_finished(runs):
    """The update has been made: to train the step again would train its prompts twice."""
    with pytest.raises(Stopped):
        runs.run("eval", "run.eval_every=2", timer=Signalled(signal.SIGINT, "evaluate", 1))
    assert sorted(int(path.name) for path in (runs.folder / "eval" / "checkpoints").glob("[0-9]")) == [2]
    runs.run("eval", "run.eval_every=2", resume=True)
    runs.check("eval")


def flip_a_byte(folder: pathlib.Path) -> None:
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_stands_in(runs):
    runs.run("flipped")
    folder = runs.folder / "flipped"
    flip_a_byte(folder / "checkpoints" / "4")
    assert any("The checkpoint of step 4 is damaged" in text for text in examine(folder).wrong)
    runs.run("flipped", resume=True)
    runs.check("flipped")
    assert not runs.asked, "steps 3 and 4 are trained again from the journal"
    assert any("step 4 is damaged" in text and "it was moved to" in text for text in runs.said)


def test_when_every_checkpoint_is_damaged_it_says_so_and_how_to_begin_again(runs):
    runs.run("all", "run.num_steps=2")
    for step in (2,):
        flip_a_byte(runs.folder / "all" / "checkpoints" / str(step))
    with pytest.raises(CheckpointError, match=r"no sound checkpoint.*step 2 is damaged.*once more with --resume"):
        runs.run("all", resume=True)
    runs.run("all", resume=True)
    runs.check("all")
    assert not {"step 0", "step 1"} & set(runs.asked)


def test_other_settings_are_named_and_what_was_sampled_after_the_checkpoint_is_void(runs, monkeypatch):
    with monkeypatch.context() as patch:
        die_at(patch, "Trained", 2, 1)
        with pytest.raises(Killed):
            runs.run("other")
    runs.run("other", "optimizer.learning_rate=2e-2", resume=True)
    assert any("other settings than before (optimizer.learning_rate): steps from 3 on are sampled anew" in text
               for text in runs.said)  # fmt: skip
    assert runs.asked == {"step 2": 3, "step 3": 3}
    assert not examine(runs.folder / "other").wrong


def test_a_journal_elsewhere_and_none_at_all(runs):
    elsewhere = f"run.journal=memory://elsewhere-{runs.folder.name}"
    runs.run("far", elsewhere, "run.num_steps=3", "run.checkpoint_at_end=false")
    runs.run("far", elsewhere, resume=True)
    runs.check("far")
    assert runs.asked == {"step 3": 3} and not (runs.folder / "far" / "journal").exists()
    runs.run("off", "run.journal=off", "run.num_steps=3", "run.checkpoint_at_end=false")
    runs.run("off", "run.journal=off", resume=True)
    assert runs.asked == {"step 2": 3, "step 3": 3}
    with pytest.raises(CheckpointError, match="The journal in '/proc/none/bad' can't be written: .*run.journal"):
        runs.run("bad", "run.journal=/proc/none")


def test_a_restartable_run_begins_goes_on_and_is_done(runs):
    often = ("run.checkpoint_every=1", "run.keep_last=1")
    assert runs.run("again", *often, resume=None).num_steps == NUM_STEPS
    kept = sorted(path.name for path in (runs.folder / "again" / "journal" / "rollouts").iterdir())
    assert kept == ["step_000003.host0.log"], "as long as a checkpoint before them"
    assert runs.run("again", *often, resume=None).num_steps == NUM_STEPS and not runs.asked
    with pytest.raises(CheckpointError, match="already holds a run. Continue it with --resume"):
        runs.run("again")


def test_where_the_time_of_a_start_goes():
    now = [0.0]
    startup = Startup(lambda: now[0])
    with startup.part("weights"):
        now[0] += 4.0
    with startup.part("programs"):
        now[0] += 12.0
    with startup.part("weights"):
        now[0] += 0.25
    now[0] += 5
    assert startup.line("resumed at step 37 of 200") == (
        "resumed at step 37 of 200 in 21 s: 4.2 s weights, 12 s programs, 5.0 s other"
    )
