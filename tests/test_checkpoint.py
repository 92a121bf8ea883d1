"""Checkpoints: what is kept, what is refused, and that a failed one is told and leaves the last whole."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from locojax.config import load
from locojax.errors import CheckpointError
from locojax.hosts.checkpoint import Checkpoints, Position


def state(value: float):
    return {"trainable": {"w": jnp.full((3, 2), value)}, "policy_version": np.asarray(int(value), np.int64)}


def test_the_last_few_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", load(None, ["run.keep_last=2"]))
    for step, accuracy in enumerate([0.1, 0.9, 0.2, 0.3, 0.4], start=1):
        checkpoints.save(state(step), Position(step, 0.05, accuracy))
    checkpoints.close()
    kept = sorted(int(path.name) for path in (tmp_path / "c").iterdir() if path.is_dir())
    assert kept == [2, 4, 5]


def test_what_was_saved_comes_back(tmp_path):
    config = load(None, [])
    checkpoints = Checkpoints(tmp_path, config)
    checkpoints.save(state(3), Position(3, 0.05, None))
    checkpoints.close()
    again = Checkpoints(tmp_path, config)
    assert again.position() == Position(3, 0.05, None)
    restored = again.restore(state(0))
    assert np.array_equal(restored["trainable"]["w"], np.full((3, 2), 3.0)) and int(restored["policy_version"]) == 3
    again.close()


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint to resume from"):
        Checkpoints(tmp_path / "none", load(None, [])).position()


def test_another_runs_settings_are_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, load(None, ["run.seed=1"]))
    checkpoints.save(state(1), Position(1, None, None))
    checkpoints.close()
    with pytest.raises(CheckpointError, match=r"made with another run\.seed\. Got: 2\. Expected: 1\."):
        Checkpoints(tmp_path, load(None, ["run.seed=2"])).position()


def test_a_full_disk_is_named_and_the_last_checkpoint_survives(tmp_path):
    """A process that may write no file above 64 KiB stands in for a full disk: the same path through the storage."""
    script = f"""
import resource, signal, sys, json, pathlib
import jax, jax.numpy as jnp
from locojax.config import load
from locojax.errors import CheckpointError
from locojax.hosts.checkpoint import Checkpoints, Position
checkpoints = Checkpoints(pathlib.Path({str(tmp_path)!r}), load(None, []))
checkpoints.save({{"w": jnp.ones(4)}}, Position(1, None, None)); checkpoints.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    checkpoints.save({{"w": jax.random.normal(jax.random.key(0), (1024, 1024))}}, Position(2, None, None))
    checkpoints.wait()
except CheckpointError as error:
    print(json.dumps({{"error": str(error), "latest": Checkpoints(checkpoints.folder, load(None, [])).latest()}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert "can't be written" in found["error"] and found["latest"] == 1


def test_position_moves_on():
    position = Position(0, 0.1, 0.1).after(0, None)
    assert position == Position(1, 0.1, 0.1)
    assert dataclasses.astuple(position.after(1, 0.5)) == (2, 0.1, 0.5)
