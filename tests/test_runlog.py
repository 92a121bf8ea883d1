"""The run folder: what is in it, and that it survives crashes and resumes."""

from __future__ import annotations

import errno
import json
import math
import pathlib
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
from make_metrics import step_metrics

from locojax.config import load
from locojax.errors import CheckpointError, ConfigError
from locojax.hosts import runlog
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.phases import PHASES, StepAccount
from locojax.hosts.report import account_rows, bars, held_out_curve
from locojax.hosts.runlog import RunLog, read_metrics
from locojax.resolving import resolve
from locojax.types import Completion, Group, Prompt, Reward, Rollout


def run_config(folder: pathlib.Path, *arguments: str):
    config = load(None, [f"run.dir={folder}", "run.name=one", *arguments])
    return resolve(config, platform="cpu", model_context=256, longest_prompt=10)


def test_the_folder_of_a_run(tmp_path):
    config = run_config(tmp_path)
    log = RunLog(config)
    completion = Completion(0, (24, 2), np.zeros(2, np.float32), "7 ☃", "stop", 2, policy_version=0)
    broken = Rollout(Completion(1, (24,), np.zeros(1, np.float32), "8", "length", None, 0), Reward(None, "timed out"))
    prompt = Prompt("addition/17", "3+4=", (5, 6, 7, 8), answer="7", messages=({"role": "user", "content": "3+4="},))
    log.samples(0, [Group(prompt, (Rollout(completion, Reward(1.0)), broken))], [np.array([0.5, 0.0])], [3])
    log.step(step_metrics(0, held_out_before=0.05, held_out=0.1))
    log.step(step_metrics(1, reward_mean=math.nan))
    log.close()
    folder = tmp_path / "one"
    assert load(folder / "config.toml") == config
    rows = [json.loads(line) for line in (folder / "samples" / "step_00000.jsonl").read_text("utf-8").splitlines()]
    assert rows[0] == {
        "prompt_id": "addition/17",
        "sample": 0,
        "prompt": [{"role": "user", "content": "3+4="}],
        "completion": "7 ☃",
        "answer": "7",
        "reward": 1.0,
        "error": None,
        "advantage": 0.5,
        "stop_reason": "stop",
        "num_prompt_tokens": 4,
        "num_tokens": 2,
        "policy_version": 0,
        "position": 3,
    }
    assert (rows[1]["reward"], rows[1]["error"], rows[1]["stop_reason"]) == (None, "timed out", "length")
    back = read_metrics(folder / "metrics.jsonl")
    assert back[0] == step_metrics(0, held_out_before=0.05, held_out=0.1)
    assert math.isnan(back[1].reward_mean)
    assert (folder / "report.png").read_bytes()[:4] == b"\x89PNG"
    page = (folder / "report.html").read_text("utf-8")
    assert "src=" not in page and "<link" not in page  # one file, no network
    assert "held-out accuracy" in page and "0.05 &rarr; 0.10" in page
    svg = xml.etree.ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Is it learning?", "updates so far", "seconds", "unaccounted", "mean"} <= texts
    assert not list(folder.glob("*.tmp"))


def test_a_step_can_be_read_while_the_run_goes_on_and_a_crash_leaves_a_report(tmp_path):
    with pytest.raises(KeyError), RunLog(run_config(tmp_path)) as log:
        log.step(step_metrics(0))
        assert read_metrics(tmp_path / "one" / "metrics.jsonl") == [step_metrics(0)]
        raise KeyError
    assert (tmp_path / "one" / "report.html").exists()


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
    RunLog(run_config(tmp_path)).close()
    with pytest.raises(ConfigError) as caught:
        RunLog(run_config(tmp_path))
    assert str(caught.value) == (
        f"The run folder '{tmp_path / 'one'}' already holds a run. "
        "Continue it with --resume, choose another run.name, or remove the folder."
    )


def test_resume_drops_the_steps_trained_again_and_a_torn_line(tmp_path):
    log = RunLog(run_config(tmp_path))
    for step in range(5):
        log.step(step_metrics(step))
    log.close()
    path = tmp_path / "one" / "metrics.jsonl"
    path.write_text(path.read_text() + step_metrics(5).to_json()[:40])
    log = RunLog(run_config(tmp_path), resume_at=3)
    log.step(step_metrics(3, reward_mean=0.9))
    log.close()
    assert [(m.step, m.reward_mean) for m in read_metrics(path)] == [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.9)]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n" + step_metrics(0).to_json() + "\n")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl, line 1 is not a step's metrics: 'account'"):
        read_metrics(path)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    log = RunLog(run_config(tmp_path))

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runlog, "replace_file", full)
    with pytest.raises(CheckpointError) as caught:
        log.samples(0, [], [], [])
    assert str(caught.value) == (
        f"The run folder '{tmp_path / 'one'}' can't be written: No space left on device. "
        "Free some space and continue with --resume."
    )
    log.close()


def test_the_report_is_drawn_at_intervals_that_its_own_cost_sets(tmp_path, monkeypatch):
    now, drawings = [0.0], []

    def slow_draw(*_, **__):
        now[0] += 2.0
        drawings.append(now[0])

    monkeypatch.setattr(runlog, "draw", slow_draw)
    log = RunLog(run_config(tmp_path, "report.redraw_seconds=30"), clock=lambda: now[0])
    for step in range(100):
        now[0] += 10.0
        log.step(step_metrics(step))
    log.close()
    assert drawings[0] == 32.0
    assert drawings[1] - drawings[0] >= 100.0  # 2 s of drawing are 2 % of 100 s


@pytest.mark.parametrize(("setting", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_writer_is_named(tmp_path, monkeypatch, setting, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(runlog, "draw", lambda *_, **__: None)
    with pytest.raises(ConfigError) as caught:
        RunLog(run_config(tmp_path, f"report.{setting}=true"))
    assert str(caught.value) == (
        f"report.{setting} needs the package '{package}', which is not installed. "
        f"Run `pip install 'locojax[{setting}]'`, or set report.{setting}=false."
    )


@pytest.mark.extended
def test_tensorboard_events_hold_the_step(tmp_path):
    log = RunLog(run_config(tmp_path, "report.tensorboard=true"))
    log.step(step_metrics(0))
    log.close()
    (events,) = (tmp_path / "one" / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"reward_mean" in content and b"seconds/decode" in content


def test_wandb_gets_the_config_and_the_steps(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, scalars, step):
            calls.append(("log", step, scalars["reward_mean"]))

        def finish(self):
            calls.append(("finish",))

    class Package:
        @staticmethod
        def init(*, project, name, id, resume, config):
            calls.append(("init", project, name, id, resume, config["rollout.group_size"]))
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Package)
    log = RunLog(run_config(tmp_path, "report.wandb=true", "report.wandb_project=mine"))
    log.step(step_metrics(0))
    log.close()
    assert calls == [("init", "mine", "one", "one", "allow", 8), ("log", 0, 0.25), ("finish",)]


def test_accounting_adds_up_in_bars_and_table():
    accounts = [StepAccount(step, {name: 0.25 for name in PHASES}, 3.0 + step) for step in range(10)]
    history = [step_metrics(step, account=account) for step, account in enumerate(accounts)]
    drawn = bars(history, most=4)
    assert [centre for centre, _, _ in drawn] == [2.0, 5.0, 8.0, 10.0]
    assert [sum(seconds.values()) for _, _, seconds in drawn] == [4.0, 7.0, 10.0, 12.0]
    rows = account_rows(history)
    shares = [float(cell.split(" %")[0]) for cell in rows.replace("</td>", "").split("<td>") if " %" in cell]
    assert shares[-1] == 100.0 and sum(shares[:-1]) == pytest.approx(100, abs=0.5)
    left = 75.0 - 2.5 * len(PHASES)
    assert f"<td>unaccounted</td><td>{left:.2f}</td><td>{left / 0.75:.1f} %</td>" in rows


def test_held_out_points_lie_at_the_updates_they_measured():
    history = [step_metrics(0, held_out_before=0.1), step_metrics(1, held_out=0.5)]
    assert held_out_curve(history) == [(0, 0.1), (2, 0.5)]
    assert held_out_curve(history[1:]) == [(2, 0.5)]


def test_scalars_hold_every_number():
    scalars = step_metrics(2, held_out=None, extra={"task/digits": 2.0}).scalars()
    assert scalars["seconds/unaccounted"] == 0.5 and scalars["task/digits"] == 2.0
    assert all(isinstance(value, int | float) for value in scalars.values())
    assert "held_out" not in scalars and StepMetrics.from_json(step_metrics(2).to_json()) == step_metrics(2)
