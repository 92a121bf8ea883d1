"""Tenants' checkpoints: whole or not at all, refused in plain words when they are not what they should be."""

from __future__ import annotations

import errno
import json
import os
import time

import jax
import numpy as np
import pytest
from tiny import CONFIG, write_tiny_model

from locojax.errors import CheckpointError, ModelError
from locojax.hosts import tenant_checkpoints
from locojax.hosts.tenant_checkpoints import (
    check_same,
    identify,
    read_adapter,
    read_checkpoint,
    write_adapter,
    write_state,
)
from locojax.models import decoder
from locojax.models.hub import load_model
from locojax.models.lora import LoraSpec, init_adapter
from locojax.models.spec import ModelSpec

SPEC = ModelSpec.from_hf_config(CONFIG)
LORA = LoraSpec(rank=3, alpha=16.0, mlp=False, unembed=True)


def params(seed=0):
    return jax.tree.map(np.asarray, decoder.init_params(SPEC, jax.random.key(seed)))


BASE = identify("tiny", SPEC, params())


def state(seed=0):
    adapter = jax.tree.map(np.asarray, init_adapter(SPEC, LORA, seed))
    rng = np.random.default_rng(seed)
    moment = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), adapter)
    optimizer = {"count": np.int32(7), "mu": moment, "nu": moment}
    return {"trainable": adapter, "optimizer": optimizer, "policy_version": np.int64(5)}


@pytest.fixture
def saved(tmp_path):
    directory = tmp_path / "weights" / "000007"
    write_state(directory, state(), LORA, 42, BASE)
    return directory


def test_a_state_comes_back_bit_for_bit(saved):
    found = read_checkpoint(saved, BASE, optimizer=True)
    assert (found.lora, found.seed) == (LORA, 42)
    expected, got = jax.tree.leaves_with_path(state()), jax.tree.leaves_with_path(found.state)
    assert [path for path, _ in got] == [path for path, _ in expected]
    for (path, ours), (_, theirs) in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, path
        np.testing.assert_array_equal(ours, theirs)
    assert found.adapter is found.state["trainable"]


def test_the_size_is_that_of_the_files(tmp_path):
    size = write_state(tmp_path / "a", state(), LORA, None, BASE)
    assert size == sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"], "nothing temporary is left"


def test_an_adapter_comes_back_from_peft(tmp_path):
    directory = tmp_path / "sampler_weights" / "a"
    adapter = state()["trainable"]
    size = write_adapter(directory, adapter, LORA, BASE)
    assert size == sum(path.stat().st_size for path in directory.iterdir())
    lora, tree = read_adapter(directory, BASE)
    assert lora == LORA
    jax.tree.map(np.testing.assert_array_equal, tree, adapter)
    found = read_checkpoint(directory, BASE, optimizer=False)
    assert found.state is None and found.seed is None and found.lora == LORA


def test_a_sampler_checkpoint_has_no_optimizer_state(tmp_path):
    write_adapter(tmp_path / "sampler_weights" / "a", state()["trainable"], LORA, BASE)
    with pytest.raises(CheckpointError) as refusal:
        read_checkpoint(tmp_path / "sampler_weights" / "a", BASE, optimizer=True)
    assert str(refusal.value) == (
        "'sampler_weights/a' is a sampler checkpoint: it holds weights, but no optimizer state."
        " Load it without the optimizer, or load a training checkpoint (a weights/ path)."
    )


def test_a_training_checkpoint_is_no_sampler(saved):
    with pytest.raises(CheckpointError, match="'weights/000007' is a training checkpoint: it can't be sampled from"):
        read_adapter(saved, BASE)


def test_what_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint 'weights/gone'. It may have been deleted"):
        read_checkpoint(tmp_path / "weights" / "gone", BASE, optimizer=True)
    (tmp_path / "weights" / "empty").mkdir(parents=True)
    with pytest.raises(ModelError, match="is not a PEFT adapter"):
        read_checkpoint(tmp_path / "weights" / "empty", BASE, optimizer=False)


def test_a_truncated_file(saved):
    with open(saved / "state.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"'weights/000007' is not whole. Got: 1000 bytes. Expected: \d+ bytes"):
        read_checkpoint(saved, BASE, optimizer=False)
    (saved / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match="'weights/000007' lacks its state.safetensors"):
        read_checkpoint(saved, BASE, optimizer=False)


@pytest.mark.parametrize("file", ["state.safetensors", "checkpoint.json"])
def test_every_flipped_byte_is_found(saved, file):
    contents = (saved / file).read_bytes()
    for at in range(0, len(contents), max(len(contents) // 40, 1)):
        flipped = bytearray(contents)
        flipped[at] ^= 1
        (saved / file).write_bytes(flipped)
        if file == "checkpoint.json" and json.loads(contents) == _json_or_none(flipped):
            continue  # white space
        with pytest.raises(CheckpointError, match="'weights/000007'"):
            read_checkpoint(saved, BASE, optimizer=True)


def _json_or_none(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_another_base_model(saved):
    with pytest.raises(CheckpointError) as refusal:
        read_checkpoint(saved, identify("other", SPEC, params(1)), optimizer=True)
    assert str(refusal.value) == (
        "'weights/000007' belongs to another base model. Got: an adapter of 'tiny'."
        " Expected: one of 'other', which this server runs."
    )
    with pytest.raises(CheckpointError, match="the names agree, the weights do not"):
        read_checkpoint(saved, identify("tiny", SPEC, params(1)), optimizer=True)
    read_checkpoint(saved, identify("a copy", SPEC, params(0)), optimizer=True)


def test_the_fingerprint_is_the_same_in_another_process_and_through_a_file(tmp_path):
    model = load_model(str(write_tiny_model(tmp_path / "tiny")))
    assert identify("x", model.spec, model.params).fingerprint == BASE.fingerprint


def test_a_newer_format(saved):
    meta = json.loads((saved / "checkpoint.json").read_text())
    (saved / "checkpoint.json").write_text(json.dumps({**meta, "format_version": 99}))
    with pytest.raises(CheckpointError, match="written by a newer LoCoJAX. Got: format version 99. .* Update LoCoJAX"):
        read_checkpoint(saved, BASE, optimizer=True)


def test_an_existing_directory_is_left_alone(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    for write in (lambda: write_state(saved, state(1), LORA, 1, BASE),
                  lambda: write_adapter(saved, state(1)["trainable"], LORA, BASE)):  # fmt: skip
        with pytest.raises(CheckpointError, match="'weights/000007' exists already"):
            write()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("fails", ["save_file", "_sync"])
def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, fails):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tenant_checkpoints, fails, full)
    with pytest.raises(CheckpointError, match="'weights/a' could not be written .*No space left on device"):
        write_state(tmp_path / "weights" / "a", state(), LORA, None, BASE)
    assert list((tmp_path / "weights").iterdir()) == []


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    for name, age in ((".old.12345678.unfinished", 7200), (".new.12345678.unfinished", 0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, times=(time.time() - age,) * 2)
    write_adapter(tmp_path / "a", state()["trainable"], LORA, BASE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.12345678.unfinished", "a"]


def test_values_that_are_not_finite_are_refused(tmp_path):
    adapter = state()["trainable"]
    adapter["q"]["a"] = np.full_like(adapter["q"]["a"], np.nan)
    write_adapter(tmp_path / "a", adapter, LORA, BASE)
    with pytest.raises(CheckpointError, match="holds values that are not finite. Got: q/a"):
        read_adapter(tmp_path / "a", BASE)


def test_settings_must_agree_with_the_model_loaded_into(tmp_path):
    with pytest.raises(CheckpointError) as refusal:
        check_same(LORA, LoraSpec(rank=8, alpha=16.0, mlp=False, unembed=True), tmp_path / "weights" / "a")
    assert "'weights/a' is of an adapter with another rank. Got: 3. Expected: 8, the model's." in str(refusal.value)
    check_same(LORA, LORA, tmp_path)
