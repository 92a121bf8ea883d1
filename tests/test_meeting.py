"""What hosts tell one another before they train, and what a host other than the first writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from make_metrics import step_metrics

from locojax.config import load
from locojax.errors import CheckpointError
from locojax.hosts.group import Group
from locojax.hosts.hostlog import HostLog
from locojax.hosts.meeting import Agreed, Moments, Report, meet
from locojax.rl.datums import DatumStats
from locojax.training.agreement import NUM_COUNTS
from locojax.types import Completion, Prompt, Reward, Rollout
from locojax.types import Group as Graded


def report(stop: bool, rewards: list[float], seconds: float, *counts: int) -> Report:
    stats = DatumStats(num_groups=1, num_samples=8, num_unscorable=8 - len(rewards), num_completion_tokens=100,
                       num_trained=3, num_trained_tokens=70)  # fmt: skip
    rows = tuple((count,) * NUM_COUNTS for count in counts)
    return Report(stop, stats, Moments.of(rewards), seconds, rows)


def test_a_report_goes_over_as_integers_and_comes_back_whole():
    for each in (report(True, [0.1, 1 / 3], 1e-9, 5, 2**40), report(False, [], 12.5)):
        row = each.encode()
        assert row.dtype == np.int64 and Report.decode(row) == each


def test_moments_add_up_to_those_of_all():
    values = np.random.default_rng(0).normal(3.0, 2.0, 50).tolist()
    for cut in (0, 1, 20, 50):
        both = Moments.of(values[:cut]) + Moments.of(values[cut:])
        assert both.mean == pytest.approx(np.mean(values)) and both.std == pytest.approx(np.std(values))
    assert np.isnan(Moments().std) and Moments().count == 0


def test_what_follows_is_of_all_hosts():
    agreed = Agreed((report(False, [1.0] * 8, 2.0, 3, 0), report(True, [0.0] * 6, 4.0, 5, 1)))
    assert agreed.stop and agreed.generate_seconds == (2.0, 4.0)
    assert agreed.stats.num_groups == 2 and agreed.rewards.mean == pytest.approx(8 / 14)
    assert agreed.tokens_per_second == 200 / 4.0  # while the slowest was at it
    totals = agreed.totals(max_tokens=10)
    assert (totals.num_tokens, totals.num_completions, totals.max_tokens) == (140, 14, 10)
    assert [told[:, 0].tolist() for told in agreed.told] == [[3, 5], [0, 1]]
    one = meet(Group.single(), agreed.reports[0])
    assert one.reports == agreed.reports[:1]


def group(name: str) -> Graded:
    completion = Completion(0, (1, 2), np.zeros(2, np.float32), "ab", "stop", None, 0)
    return Graded(Prompt(name, "what?", tokens=(7,)), (Rollout(completion, Reward(1.0)),))


def test_another_host_writes_files_of_its_own(tmp_path):
    config = load(None, [f"run.dir={tmp_path}", "run.name=r"])
    with HostLog(config, 1) as log:
        for step in range(3):
            log.samples(step, [group("p")], [[0.5]], [4])
            log.step(step_metrics(step))
        log.held_out(2, [group("q")])
    folder = tmp_path / "r"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.host1.jsonl", "samples"]
    assert len((folder / "metrics.host1.jsonl").read_text().splitlines()) == 3
    sample = json.loads((folder / "samples" / "step_00001.host1.jsonl").read_text())
    assert (sample["prompt_id"], sample["position"], sample["advantage"]) == ("p", 4, 0.5)
    assert json.loads((folder / "samples" / "held_out_00002.host1.jsonl").read_text())["advantage"] is None
    with HostLog(config, 1, resume_at=1):
        pass
    assert len((folder / "metrics.host1.jsonl").read_text().splitlines()) == 1


def test_what_the_writing_thread_could_not_write_is_told(tmp_path, monkeypatch):
    config = load(None, [f"run.dir={tmp_path}", "run.name=r"])

    def full(path, text):
        raise OSError(28, "No space left on device")

    with HostLog(config, 1) as log:
        monkeypatch.setattr("locojax.hosts.hostlog.replace_file", full)
        log.samples(0, [group("p")], [[0.5]], [4])
        log._jobs.put(None)
        log._thread.join()
        with pytest.raises(CheckpointError, match="can't be written: No space left on device"):
            log.step(step_metrics(0))


def test_what_was_written_last_is_told_too(tmp_path, monkeypatch):
    config = load(None, [f"run.dir={tmp_path}", "run.name=r"])
    monkeypatch.setattr("locojax.hosts.hostlog.HostLog._write_step", lambda *_: (_ for _ in ()).throw(OSError(5, "io")))
    with pytest.raises(CheckpointError, match="can't be written: io"), HostLog(config, 1) as log:
        log.step(step_metrics(0))
