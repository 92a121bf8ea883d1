"""Runs in processes of their own, and what a run leaves behind, for the tests of several hosts and of crashes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from collections.abc import Sequence

import numpy as np

from locojax.config import load
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.launch import launch
from locojax.hosts.shared_checkpoints import CHECKPOINTS

ROOT = pathlib.Path(__file__).parent.parent


def start(
    command: Sequence[str],
    num_hosts: int,
    *,
    errors: pathlib.Path,
    jax_cache: str,
    devices: int | None = None,
    **environment: str,
) -> int:
    """So many hosts, each a process, or one; the exit code, for one host alone negative if a signal ended it.

    Args:
      errors: the file to which the launcher and all hosts but the first write, or one host alone; beside the cache of
        converted models.
      jax_cache: jax's folder for compiled programs.
      devices: of each of several hosts.
    """
    whole = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "",
        "LOCOJAX_CACHE": str(errors.parent / "cache"),
        "JAX_COMPILATION_CACHE_DIR": jax_cache,
        **environment,
    }
    with errors.open("a") as out:
        if num_hosts > 1:
            return launch(command, num_hosts, devices_per_host=devices, environment=whole, errors=out)
        return subprocess.run(
            list(command), env=whole, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=300
        ).returncode


def lines(path: pathlib.Path) -> list[dict]:
    """Of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run_folder: pathlib.Path) -> list[np.ndarray]:
    """Everything in the newest checkpoint, in one order."""
    checkpoints = Checkpoints(run_folder / CHECKPOINTS, load(run_folder / "config.toml"), read_only=True)
    state = checkpoints.restore_as_saved()
    checkpoints.close()
    return leaves(state)


def leaves(tree) -> list[np.ndarray]:
    """Of nested dicts, in the order of their keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [np.asarray(tree)]
