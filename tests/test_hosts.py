"""Runs over several real processes against the same run on one host: tokens, weights, records, meetings."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import pytest
import real_runs
from real_runs import ROOT, lines, weights
from tiny import write_tiny_model

from locojax.cli_doctor import examine
from locojax.config import load
from locojax.hosts import colocated
from locojax.measure.timeline import Timeline

REWARD = """
def score(prompt, completion, answer, meta):
    return sum(byte % 2 for byte in completion.encode()) / 8
def rarely(prompt, completion, answer, meta):
    return score(prompt, completion, answer, meta) if int(answer) % 3 == 0 else 1.0
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this module's runs are, and what all of them have in common. Programs compiled once are kept for all."""

    folder: pathlib.Path
    arguments: tuple[str, ...]

    def run(self, name: str, *arguments: str) -> pathlib.Path:
        """One host, in this process."""
        config = load(None, [*self.arguments, f"run.name={name}", *arguments])
        colocated.run(config, resume=False, timer=Timeline())
        return self.folder / name

    def launched(
        self,
        num_hosts: int,
        name: str,
        *arguments: str,
        devices: int = 2,
        resume: bool = False,
        program: tuple[str, ...] = ("-m", "locojax", "train"),
    ) -> int:
        """So many hosts, each a process; the launch's exit code."""
        command = [sys.executable, *program, *self.arguments, f"run.name={name}", *arguments]
        return real_runs.start(
            command + ["--resume"] * resume,
            num_hosts,
            errors=self.folder / f"{name}.err",
            jax_cache=str(jax.config.jax_compilation_cache_dir),
            devices=devices,
        )

    def errors(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("hosts")
    write_tiny_model(folder / "tiny")
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"question": f"{i} bottles" + " of beer" * (i % 3), "answer": str(i)} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Place(
        folder,
        (
            f"model.name={folder / 'tiny'}", f"data.source={folder / 'data.jsonl'}", "data.template={question}:",
            f"data.reward={folder / 'rewards.py'}:score", "data.chat=false", "rollout.max_tokens=6",
            "rollout.group_size=4", "run.prompts_per_step=3", "run.num_steps=2", "run.eval_every=2",
            "run.eval_prompts=3", "data.held_out_share=0.4", f"run.dir={folder}", "training.compute_dtype=float32",
            # An eps above the gradients' rounding: Adam would make whole steps of it.
            "optimizer.learning_rate=1e-2", "optimizer.eps=1e-3", "hosts.silence_seconds=20",
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(place) -> pathlib.Path:
    return place.run("one")


@pytest.fixture(scope="module")
def two(place) -> pathlib.Path:
    assert place.launched(2, "two") == 0, place.errors("two")
    return place.folder / "two"


def struck(host: int, number: int, phase: str) -> tuple[str, ...]:
    """A run in which a host sends itself a signal in a phase of its second step."""
    return (str(ROOT / "tests" / "hosts_victim.py"), str(host), str(int(number)), phase)


def samples(folder: pathlib.Path, step: int) -> dict[tuple[str, int], tuple]:
    """(prompt, sample) -> what was sampled and how it was graded, over all hosts' files."""
    rows = [row for path in folder.glob(f"samples/step_{step:05d}*.jsonl") for row in lines(path)]
    found = {(r["prompt_id"], r["sample"]): (r["completion"], r["num_tokens"], r["reward"]) for r in rows}
    assert len(found) == len(rows) == 12, "every sample once, on one host"
    return found


def assert_same_run(first: pathlib.Path, second: pathlib.Path) -> None:
    for step in range(2):
        assert samples(first, step) == samples(second, step)
    for ours, theirs in zip(weights(first), weights(second), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    same = ("reward_mean", "reward_std", "num_completions", "completion_tokens_mean", "trained_tokens", "loss",
            "grad_norm", "zero_variance_share", "held_out", "held_out_before", "policy_version")  # fmt: skip
    for one, other in zip(lines(first / "metrics.jsonl"), lines(second / "metrics.jsonl"), strict=True):
        for name in same:
            assert other[name] == (None if one[name] is None else pytest.approx(one[name], rel=1e-4, abs=1e-6)), name


def test_two_hosts_of_two_devices_do_what_one_does(one, two):
    """C27, C08: the same tokens, the same gradient, the same record."""
    assert_same_run(one, two)


def test_hosts_meet_three_times_a_step(two):
    assert [line["extra"]["num_meetings"] for line in lines(two / "metrics.jsonl")] == [3, 3]


def test_each_host_writes_its_own_part(two):
    first, second = lines(two / "metrics.jsonl"), lines(two / "metrics.host1.jsonl")
    assert [line["step"] for line in second] == [0, 1]
    for both, part in zip(first, second, strict=True):
        assert both["num_completions"] == 12 and part["num_completions"] == 4
        assert len(both["generate_seconds"]) == 2 and part["generate_seconds"] == []
        account = part["account"]
        assert sum(account["seconds"].values()) + account["unaccounted"] == pytest.approx(account["wall"])
        assert part["gap_max"] < 1e-5
    assert len(lines(next(two.glob("samples/held_out_00000.host1.jsonl")))) in (1, 2)


OTHERWISE = (
    "hosts.balance=false", "hosts.freeze_gc=false", "hosts.metrics_in_barrier=true", "hosts.publish_at_once=false",
)  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    "settings",
    [
        ["training.method=lora", "training.lora_rank=4", "loss.kl=k3", "loss.kl_coefficient=0.1"],
        ["training.substeps=3", "loss.name=ppo", "loss.tis_cap=2", "loss.normalise=tokens", "data.reward=RARELY"],
    ],
    ids=["lora", "substeps"],
)
def test_no_switch_changes_what_is_learnt(place, settings, request):
    """Every optimization off, the trainer's other ways, and hosts that have nothing to teach in a part of a step."""
    name = request.node.callspec.id
    settings = [text.replace("RARELY", f"{place.folder / 'rewards.py'}:rarely") for text in settings]
    alone = place.run(f"{name}-one", *settings)
    assert place.launched(2, f"{name}-two", *settings, *OTHERWISE, devices=1) == 0, place.errors(f"{name}-two")
    both = place.folder / f"{name}-two"
    assert_same_run(alone, both)
    assert max(line["policy_version"] for line in lines(both / "metrics.jsonl")) > 0
    # Host 0 wrote the other's metrics, for which they met once more, after the step.
    assert [line["num_completions"] for line in lines(both / "metrics.host1.jsonl")] == [4, 4]
    met = [line["extra"]["num_meetings"] for line in lines(both / "metrics.jsonl")]
    assert met == [3, 3] or (name == "substeps" and set(met) <= {2, 3})  # nothing to learn: nothing trained


def test_a_slow_host_s_groups_are_done_by_another_and_the_update_is_the_same(place, one):
    settings = ("rollout.max_slots=2", "hosts.steal_groups=true")
    slow = (str(ROOT / "tests" / "hosts_victim.py"), "0", "0.7s", "decode")
    assert place.launched(2, "straggler", *settings, program=slow) == 0, place.errors("straggler")
    both = place.folder / "straggler"
    assert_same_run(one, both)
    found, other = lines(both / "metrics.jsonl"), lines(both / "metrics.host1.jsonl")
    assert [line["extra"]["num_meetings"] for line in found] == [3, 3]
    # Of the slow host's two groups one is kept back. In the first step the other host may come too late for it.
    stolen = [line["extra"]["num_stolen_groups"] for line in found]
    assert stolen in ([0, 1], [1, 1]) and [line["num_completions"] for line in other] == [4 + 4 * n for n in stolen]
    findings = examine(both)
    assert not findings.wrong and "6 prompts of 2 steps trained once each" in findings.proven, findings


@pytest.mark.extended
@pytest.mark.parametrize(
    ("host", "phase", "controller"),
    [(0, "decode", "local"), (1, "train", "local"), (1, "decode", "single"), (0, "train", "single")],
)
def test_a_killed_host_ends_the_others_with_its_name(place, host, phase, controller, capfd):
    name = f"killed-{host}-{phase}-{controller}"
    start = time.monotonic()
    settings = ("hosts.silence_seconds=8", f"hosts.controller={controller}")
    code = place.launched(2, name, *settings, program=struck(host, signal.SIGKILL, phase))
    assert code == 1
    text = place.errors(name) + capfd.readouterr().err
    assert f"Host {host} of 2 was ended by SIGKILL" in text
    assert f"DeadlineError: Host {host} of 2 is missing: it has given no sign of life for " in text
    assert f"This host, {1 - host}, waited for it in phase '" in text
    assert "did not end within" not in text, "the launcher had to end it"
    assert time.monotonic() - start < 120


@pytest.mark.extended
def test_a_signal_to_one_host_stops_all_and_one_host_goes_on(place, one):
    """C27: stopped on two hosts, resumed on one."""
    stopped = struck(1, signal.SIGTERM, "decode")
    assert place.launched(2, "stopped", program=stopped) == 75, place.errors("stopped")
    folder = place.folder / "stopped"
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0]
    colocated.run(load(None, [*place.arguments, "run.name=stopped"]), resume=True, timer=Timeline())
    assert_same_run(one, folder)


@pytest.mark.extended
def test_four_hosts_one_without_prompts_go_on_where_one_stopped(place, one):
    """C27: begun on one host, ended on four."""
    place.run("half", "run.num_steps=1", "run.eval_every=2")
    assert place.launched(4, "half", resume=True, devices=1) == 0, place.errors("half")
    four = place.folder / "half"
    assert samples(one, 1) == samples(four, 1) and lines(four / "metrics.host3.jsonl")[0]["num_completions"] == 0
    for ours, theirs in zip(weights(one), weights(four), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
