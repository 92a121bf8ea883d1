"""The pipelined step: the synchronous step's update, made while the batch is not finished yet."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from real_runs import leaves
from tiny import write_tiny_model

from locojax.config import Config, load
from locojax.errors import ConfigError
from locojax.hosts import colocated
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.pipelined import check_pipelined
from locojax.measure.timeline import Timeline

REWARD = """
import time
def score(prompt, completion, answer, meta):
    return sum(byte % 2 for byte in completion.encode()) / 8
def slow(prompt, completion, answer, meta):
    time.sleep(0.04)
    return score(prompt, completion, answer, meta)
def fails(prompt, completion, answer, meta):
    if int(answer) == 3 and sum(completion.encode()) % 3 == 0:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    return score(prompt, completion, answer, meta)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelined")
    write_tiny_model(folder / "tiny")
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"question": f"{i} bottles", "answer": str(i)} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name: str, *arguments: str, reward: str = "score") -> Config:
        return load(
            None,
            [
                f"model.name={folder / 'tiny'}", f"data.source={folder / 'data.jsonl'}", "data.template={question}:",
                f"data.reward={folder / 'rewards.py'}:{reward}", "data.chat=false", "data.held_out_share=0",
                "rollout.max_tokens=6", "rollout.group_size=4", "run.prompts_per_step=6", "run.num_steps=3",
                "run.eval_every=0", f"run.dir={folder}", f"run.cache_dir={folder / 'cache'}",
                "optimizer.learning_rate=1e-2", "optimizer.eps=1e-3", "training.compute_dtype=float32",
                # Few slots and short rows, so that groups are finished one after the other, and trained on at once.
                "rollout.max_slots=8", "training.row_tokens=64", "training.rows=1", "report.redraw_seconds=1000",
                "grading.max_unscorable_rate=1", f"run.name={name}", *arguments,
            ],
        )  # fmt: skip

    return make


def train(made: Config) -> list[dict]:
    colocated.run(made, resume=False, timer=Timeline())
    path = pathlib.Path(made.run.dir) / made.run.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(made: Config) -> list[np.ndarray]:
    checkpoints = Checkpoints(pathlib.Path(made.run.dir) / made.run.name / colocated.CHECKPOINTS, made, read_only=True)
    state = checkpoints.restore_as_saved()
    checkpoints.close()
    return leaves(state)



@pytest.mark.parametrize(
    "arguments",
    [(), ("loss.normalise=completions", "loss.kl=k3", "loss.kl_coefficient=0.1", "loss.tis_cap=2")],
    ids=["plain", "with passes before the loss"],
)
def test_the_same_update_is_made_before_the_batch_is_whole(config, arguments, request):
    name = "plain" if not arguments else "passes"
    one, other = config(f"{name}-sync", *arguments), config(f"{name}-pipelined", "run.pipelined=true", *arguments)
    plain, pipelined = train(one), train(other)
    for ours, theirs in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    for line, same in zip(plain, pipelined, strict=True):
        assert same["extra"]["overlapped_seconds"] > 0 and "overlapped_seconds" not in line["extra"]
        assert same["trained_tokens"] == line["trained_tokens"] and same["gap_max"] < 1e-4
        assert same["loss"] == pytest.approx(line["loss"], abs=1e-6)
        account = same["account"]
        assert sum(account["seconds"].values()) + account["unaccounted"] == pytest.approx(account["wall"])


def test_a_grade_that_fails_changes_the_denominators_and_nothing_else(config):
    one, other = config("fails-sync", reward="fails"), config("fails-pipelined", "run.pipelined=true", reward="fails")
    plain, _ = train(one), train(other)
    assert any(line["unscorable_share"] > 0 for line in plain)
    for ours, theirs in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)


def test_training_hides_behind_slow_grades(config):
    """Of the synchronous step, what comes after the last grade; of the pipelined one, most was done before."""
    made = config("slow", "run.pipelined=true", "run.num_steps=2", "run.checkpoint_at_end=false", reward="slow")
    line = train(made)[1]
    seconds = line["account"]["seconds"]
    assert line["extra"]["overlapped_seconds"] > 0.5 * (seconds["train"] + seconds["pack"])


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("loss.normalise=tokens", "loss.normalise is 'tokens': the batch's tokens are not known"),
        ("training.substeps=2", "training.substeps is 2"),
        ("hosts.controller=single", "hosts.controller is 'single'"),
    ],
)
def test_what_can_not_be_pipelined_is_refused(argument, text):
    with pytest.raises(ConfigError, match=text):
        load(None, ["run.pipelined=true", argument])
    with pytest.raises(ConfigError, match="there are several hosts, which train all at once. Got: 2 hosts"):
        check_pipelined(load(None, ["run.pipelined=true"]), 2)
