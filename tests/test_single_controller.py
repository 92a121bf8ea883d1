"""The single controller against the colocated mode: over two processes, and alone."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np
import pytest
import real_runs
from hosts_single import RUNS
from memory_board import MemoryBoard, host
from real_runs import weights
from tiny import write_tiny_model

from locojax.config import load
from locojax.hosts import colocated
from locojax.hosts.single_orders import Orders
from locojax.measure.timeline import Timeline
from locojax.resolving import resolve

HERE = pathlib.Path(__file__).parent

REWARD = """
def score(prompt, completion, answer, meta):
    return sum(byte % 2 for byte in completion.encode()) / 8
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("single")
    write_tiny_model(folder / "tiny")
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"question": f"{i} bottles" + " of beer" * (i % 3), "answer": str(i)} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.name={folder / 'tiny'}", f"data.source={folder / 'data.jsonl'}", "data.template={question}:",
        f"data.reward={folder / 'rewards.py'}:score", "data.chat=false", "rollout.max_tokens=6",
        "rollout.group_size=3", "run.prompts_per_step=4", "run.num_steps=2", "run.eval_every=0",
        "run.eval_prompts=2", "data.held_out_share=0.25", f"run.dir={folder}", f"run.cache_dir={folder / 'cache'}",
        "optimizer.learning_rate=1e-2", "training.compute_dtype=float32", "hosts.silence_seconds=20",
    ]  # fmt: skip


def samples(folder: pathlib.Path) -> list[dict[tuple[str, int], tuple]]:
    """For each step: (prompt, sample) -> what was sampled and how it was graded, over all hosts' files."""
    found: list[dict[tuple[str, int], tuple]] = []
    for step in range(2):
        rows = [
            json.loads(line)
            for path in folder.glob(f"samples/step_{step:05d}*.jsonl")
            for line in path.read_text().splitlines()
        ]
        assert len(rows) == 12, "every sample once, on one host"
        found.append({(r["prompt_id"], r["sample"]): (r["completion"], r["num_tokens"], r["reward"]) for r in rows})
    return found


def assert_same_run(first: pathlib.Path, second: pathlib.Path) -> None:
    assert samples(first) == samples(second)
    for ours, theirs in zip(weights(first), weights(second), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.fixture(scope="module")
def two_hosts(arguments) -> pathlib.Path:
    """All of `hosts_single.RUNS`, on two hosts."""
    folder = pathlib.Path(load(None, arguments).run.dir) / "two"
    folder.mkdir()
    command = [sys.executable, str(HERE / "hosts_single.py"), *arguments, f"run.dir={folder}"]
    cache = str(jax.config.jax_compilation_cache_dir)
    code = real_runs.start(command, 2, errors=folder / "errors", jax_cache=cache, devices=1)
    assert code == 0, (folder / "errors").read_text()
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in RUNS if name != "local"])
def test_two_hosts_sample_and_learn_what_the_colocated_mode_does(two_hosts, name):
    assert_same_run(two_hosts / "local", two_hosts / name)


@pytest.mark.extended
def test_only_the_single_controller_meets_in_every_iteration(two_hosts):
    def meetings(name: str) -> float:
        lines = (two_hosts / name / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["extra"]["num_meetings"]

    assert meetings("local") == 3
    # One more for each of: shapes for the batch, prefill, five iterations (the first also draws the first token), end.
    assert meetings("single") >= 3 + 1 + 5 + 1 > meetings("single-many") >= 3 + 1 + 2 + 1


@pytest.mark.extended
def test_alone_it_is_the_same_run(arguments):
    accuracies = []
    for name in ("local", "single"):
        config = load(None, [*arguments, f"run.name=alone-{name}", "run.eval_every=2", *RUNS[name]])
        accuracies.append(colocated.run(config, resume=False, timer=Timeline()).held_out_last)
    assert accuracies[0] == pytest.approx(accuracies[1])
    folder = pathlib.Path(config.run.dir)
    assert_same_run(folder / "alone-local", folder / "alone-single")


def test_an_iteration_a_call_unless_told_otherwise():
    def iterations(*arguments: str) -> int:
        config = load(None, list(arguments))
        resolved = resolve(config, platform="cpu", model_context=512, longest_prompt=10)
        return int(resolved.rollout.decode_iterations)

    assert iterations() == 16
    assert iterations("hosts.controller=single") == 1
    assert iterations("hosts.controller=single", "rollout.decode_iterations=8") == 8


def orders_of(rank: int, board: MemoryBoard) -> Orders:
    return Orders(host(rank, 2, board))


def test_orders_are_heard_in_order_and_the_end_brings_each_host_its_part():
    board = MemoryBoard()
    head, other = orders_of(0, board), orders_of(1, board)
    for wave in range(4):
        with head.order("run", wave, np.arange(3)):
            pass
        assert head.end(["mine", f"yours {wave}"]) == "mine"
        with other.heard(1.0) as (action, (of_wave, numbers)):
            assert action == "run" and of_wave == wave and numbers.tolist() == [0, 1, 2]
        with other.heard(1.0) as (action, parts):
            assert action == "end"
        assert other.ended(parts) == f"yours {wave}"
    assert {key.split("/")[2] for key in board.values} == {"2", "3"}  # old waves are forgotten
    with pytest.raises(TimeoutError):
        with other.heard(1.0):
            pass
