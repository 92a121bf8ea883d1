"""Runs over several real processes against the same run on one host: tokens, weights, records, meetings."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest
from tiny import write_tiny_model

from locojax.config import load
from locojax.hosts import colocated
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.launch import launch
from locojax.measure.timeline import Timeline

ROOT = pathlib.Path(__file__).parent.parent

REWARD = """
def score(prompt, completion, answer, meta):
    return sum(byte % 2 for byte in completion.encode()) / 8
def rarely(prompt, completion, answer, meta):
    return float(answer == "3" and len(completion) % 2)
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

    def launched(self, num_hosts: int, name: str, *arguments: str, devices: int = 1, resume: bool = False) -> int:
        command = [sys.executable, "-m", "locojax", "train", *self.arguments, f"run.name={name}", *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "",
            "LOCOJAX_CACHE": str(self.folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        }
        errors = (self.folder / f"{name}.err").open("w")
        with errors:
            return launch(
                command + ["--resume"] * resume,
                num_hosts,
                devices_per_host=devices,
                environment=environment,
                errors=errors,
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
    assert place.launched(2, "two", devices=2) == 0, place.errors("two")
    return place.folder / "two"


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples(folder: pathlib.Path, step: int) -> dict[tuple[str, int], tuple]:
    """(prompt, sample) -> what was sampled and how it was graded, over all hosts' files."""
    rows = [row for path in folder.glob(f"samples/step_{step:05d}*.jsonl") for row in lines(path)]
    found = {(r["prompt_id"], r["sample"]): (r["completion"], r["num_tokens"], r["reward"]) for r in rows}
    assert len(found) == len(rows) == 12, "every sample once, on one host"
    return found


def weights(folder: pathlib.Path) -> list[np.ndarray]:
    config = load(folder / "config.toml")
    checkpoints = Checkpoints(folder / colocated.CHECKPOINTS, config)
    state = checkpoints.restore_as_saved()
    checkpoints.close()
    return _leaves(state)


def _leaves(tree) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])]
    return [np.asarray(tree)]


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
