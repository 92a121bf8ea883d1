"""Whole runs of the loop on a tiny model: what is trained, what a resume gives, and what each bad input says."""

from __future__ import annotations

import json
import os
import pathlib

import jax
import numpy as np
import pytest
from real_runs import leaves
from tiny import write_tiny_model

from locojax.config import Config, load, run_folder
from locojax.errors import CheckpointError, ConfigError, DataError, GradingError, LocoError, ModelError, NumericsError
from locojax.hosts import colocated, folder_lock
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.metrics import RunResult
from locojax.hosts.setup import memory, prepare
from locojax.hosts.worker import lora_spec, training_mesh
from locojax.measure.timeline import Timeline
from locojax.training.trainer import Trainer, TrainerSettings

REWARD = """
def score(prompt, completion, answer, meta):
    return sum(byte % 2 for byte in completion.encode()) / 8
def flat(prompt, completion, answer, meta):
    return 1.0
def broken(prompt, completion, answer, meta):
    raise ValueError("no such column: answr")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def config(model, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"question": f"{i} bottles", "answer": str(i)} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(*arguments: str) -> Config:
        return load(
            None,
            [
                f"model.name={model}", f"data.source={tmp_path / 'data.jsonl'}", "data.template={question}:",
                f"data.reward={tmp_path / 'rewards.py'}:score", "data.chat=false", "rollout.max_tokens=6",
                "rollout.group_size=4", "run.prompts_per_step=3", "run.num_steps=4", "run.eval_every=2",
                "run.eval_prompts=2", f"run.dir={tmp_path}", f"run.cache_dir={tmp_path / 'cache'}",
                "training.compute_dtype=float32", "optimizer.learning_rate=1e-2", *arguments,
            ],
        )  # fmt: skip

    return make


def run(config: Config, resume: bool = False) -> RunResult:
    return colocated.run(config, resume=resume, timer=Timeline())


def metrics(config: Config) -> list[dict]:
    path = pathlib.Path(config.run.dir) / config.run.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(config: Config) -> dict[str, np.ndarray]:
    checkpoints = Checkpoints(pathlib.Path(config.run.dir) / config.run.name / colocated.CHECKPOINTS, config)
    state = checkpoints.restore_as_saved()
    checkpoints.close()
    return {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves(state["trainable"]))}



def test_a_run_leaves_what_it_promises(config):
    made = config()
    result = run(made)
    lines = metrics(made)
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and lines[-1]["policy_version"] == 4
    assert result.num_steps == 4 and result.held_out_first is not None and result.held_out_last is not None
    for line in lines:
        assert line["gap_max"] < 1e-5, "trainer and sampler disagree"
        account = line["account"]
        assert sum(account["seconds"].values()) + account["unaccounted"] == pytest.approx(account["wall"])
        assert account["unaccounted"] >= 0 and {"decode", "train", "publish"} <= set(account["seconds"])
    samples = (pathlib.Path(result.folder) / "samples" / "step_00000.jsonl").read_text().splitlines()
    first = json.loads(samples[0])
    assert len(samples) == 12 and first["prompt"].endswith(" bottles:") and first["stop_reason"] in ("stop", "length")
    assert (pathlib.Path(result.folder) / "report.html").stat().st_size > 10_000


def test_two_runs_dont_write_one_folder(config):
    made = config("run.name=taken")
    folder = run_folder(made)
    with folder_lock.hold(folder, "run", remedy="", say=print):
        for resume in (False, True):
            with pytest.raises(ConfigError, match=f"{folder} is in use by another run. Got: process {os.getpid()}"):
                run(made, resume)
    assert [path.name for path in folder.iterdir()] == [folder_lock.NAME]


def test_a_resumed_run_is_the_one_that_was_never_interrupted(config):
    whole, cut = config("run.name=whole"), config("run.name=cut", "run.checkpoint_every=2")
    run(whole)
    run(config("run.name=cut", "run.num_steps=2"))
    result = run(cut, resume=True)
    assert result.num_steps == 4
    for name, leaf in weights(whole).items():
        np.testing.assert_allclose(weights(cut)[name], leaf, rtol=1e-5, atol=1e-7)
    rewards = [[line["reward_mean"] for line in metrics(each)] for each in (whole, cut)]
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["training.method=lora", "training.lora_rank=4", "training.lora_unembed=true"],
        ["training.substeps=3", "loss.name=ppo"],
        ["loss.name=gspo", "training.advantage=std", "loss.normalise=completions"],
        ["loss.tis_cap=2", "loss.icepop_low=0.5", "loss.icepop_high=5", "training.substeps=3"],
        ["loss.kl=k2", "loss.kl_coefficient=0.1"],
        ["loss.kl=k1", "loss.kl_coefficient=0.1", "loss.kl_in=reward", "loss.name=dro"],
        ["training.method=lora", "loss.kl=k3", "loss.kl_coefficient=0.1", "loss.name=cispo"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_every_kind_of_training_goes_through_the_loop(config, arguments):
    made = config("run.num_steps=2", "run.eval_every=0", "run.checkpoint_at_end=false", *arguments)
    run(made)
    first, second = metrics(made)
    assert first["gap_max"] < 1e-5 and second["gap_max"] < 1e-5
    substeps = 3 if "training.substeps=3" in arguments else 1
    assert second["policy_version"] == 2 * substeps
    assert first["grad_norm"] > 0
    if "loss.kl_in=reward" not in arguments and any("kl=" in argument for argument in arguments):
        assert first["extra"]["kl"] == pytest.approx(0, abs=1e-5) and second["extra"]["kl"] != 0


def test_a_batch_without_signal_takes_no_step_and_many_end_the_run(config, tmp_path):
    """C05, C16: no weight decay, no version, and not for ever."""
    arguments = [f"data.reward={tmp_path / 'rewards.py'}:flat", "run.max_idle_steps=2", "optimizer.weight_decay=0.1"]
    made = config(*arguments)
    with pytest.raises(DataError, match="The last 2 steps taught nothing: in every group all rewards were equal"):
        run(made)
    assert metrics(made)[0]["policy_version"] == 0 and "nothing to learn from" in metrics(made)[0]["update_skipped"]


def test_ctrl_c_saves_what_a_resume_continues(config, monkeypatch):
    made = config()
    train = colocated.Loop._train

    def interrupted(self, step_index, *rest):
        if step_index == 2:
            raise KeyboardInterrupt
        return train(self, step_index, *rest)

    monkeypatch.setattr(colocated.Loop, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(made)
    monkeypatch.setattr(colocated.Loop, "_train", train)
    assert run(made, resume=True).num_steps == 4
    assert [line["step"] for line in metrics(made)] == [0, 1, 2, 3]


def test_the_gate_refuses_a_sampler_of_another_model(config):
    with pytest.raises(NumericsError, match="Sampler and trainer disagree too much to train"):
        run(config("run.max_gap=1e-30", "rollout.dtype=bfloat16", "run.eval_every=0"))


BAD: list[tuple[list[str], type[LocoError], str]] = [
    (["model.name=no/such/dir/at/all"], ModelError, "no/such/dir/at/all"),
    (["data.template={qestion}"], DataError, "There is no field 'qestion'"),
    (["data.max_prompt_tokens=5"], DataError, r"12 of 12 prompts don't fit|prompts don't fit"),
    (["run.prompts_per_step=50"], DataError, "more prompts than the data set holds"),
    (["model.max_context=1000"], ConfigError, "longer than the model's own context"),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_by_name(config, arguments, kind, text):
    with pytest.raises(kind, match=text) as caught:
        run(config(*arguments))
    assert caught.value.exit_code == 2


def test_bad_rows_are_named_by_file_and_line(config, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "1", "answer": "1"}\n{"question": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl.*2"):
        run(config(f"data.source={path}"))
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        run(config(f"data.source={path}"))


def test_a_reward_that_raises_stops_the_run_with_its_own_words(config, tmp_path):
    with pytest.raises(GradingError, match="no such column: answr"):
        run(config(f"data.reward={tmp_path / 'rewards.py'}:broken"))


def test_resume_without_a_checkpoint(config):
    with pytest.raises(CheckpointError, match="There is no checkpoint to resume from"):
        run(config(), resume=True)


def test_dry_run_shows_parameters_and_memory(config):
    resolved, rows = colocated.describe(config("training.method=lora", "training.lora_rank=4"))
    shown = dict(rows)
    assert resolved.rollout.max_slots == 16 and shown["held-out prompts"] == "1"
    assert shown["trained"].startswith("3,") and "memory: sum" in shown


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_memory_of_weights_is_that_of_the_trees_a_trainer_keeps(config, method):
    """On one device, and on each of four, weights made whole by the layer or once a step; against real arrays."""
    for devices, gather in ((1, "auto"), (4, "layer"), (4, "step"), (4, "auto")):
        made = config(f"training.method={method}", "training.lora_rank=4", f"training.mesh_fsdp={devices}")
        prepared = prepare(made, lambda *_: None)
        found = memory(prepared.model.spec, prepared.config, gather)["memory: weights and optimizer"]
        training = prepared.config.training
        settings = TrainerSettings(row_tokens=int(training.row_tokens), rows=1, gather=gather,
                                   compute_dtype=training.compute_dtype)  # fmt: skip
        trainer = Trainer(prepared.model.spec, prepared.model.params, settings, lora=lora_spec(prepared.config),
                          mesh=training_mesh(prepared.config))  # fmt: skip
        on, weights = trainer._placement, trainer.trainable
        working, sums = on.working(weights), on.zeros_like(weights)
        transposes = on.transposed(working if trainer.frozen is None else trainer.frozen, trainer.program)
        trees = (weights, trainer.frozen, trainer._optimizer, working, sums, transposes)
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(trees)}.values()  # the masters may be the working weights
        parts = [part for leaf in kept for part in leaf.addressable_shards if part.device == jax.devices()[0]]
        held = sum(part.data.nbytes for part in parts)
        assert found == pytest.approx(held, rel=0.01), (devices, gather)
