"""`locojax cache`: what it shows, removes, and keeps within bounds."""

from __future__ import annotations

import os
import pathlib
import time

import pytest

from locojax import cli, cli_cache
from locojax.config import load


@pytest.fixture
def root(tmp_path, monkeypatch) -> pathlib.Path:
    """Two converted models of 2 and 1 MiB, the larger one used last; a program; a run's rollouts; a hub."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, size, age in (("models/old", 1, 30), ("models/new", 2, 20), ("xla/programs/a-1", 1, 10)):
        path = tmp_path / "cache" / name
        file = path / "params" if name.startswith("models") else path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size << 20))
        used = time.time() - age * 86400
        os.utime(file, (used, used))
    for name in ("runs/a/journal/rollouts/step_000000.host0.log", "runs/a/journal/ledger.host0.log", "hub/models--x/y"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
    return tmp_path


def arguments(root: pathlib.Path, *more: str) -> list[str]:
    return [f"run.cache_dir={root / 'cache'}", f"run.dir={root / 'runs'}", *more]


def test_ls_shows_places_keys_and_bounds(root, capsys):
    assert cli.main(["cache", "ls", *arguments(root)]) == 0
    printed = capsys.readouterr().out
    assert f"models: 3 MiB of at most 30 GiB, 2 entries in {root / 'cache' / 'models'}\n" in printed
    assert f"programs: 1 MiB of at most 30 GiB, 1 entries in {root / 'cache' / 'xla'}\n" in printed
    assert f"rollouts: 100 B, 1 entries in {root / 'runs'}\n" in printed and "hub: 100 B" in printed
    assert "key: the program and its shapes, jax's version, compiler flags, devices" in printed


def test_clear_removes_what_is_named_and_nothing_else(root, capsys):
    assert cli.main(["cache", "clear", "models", *arguments(root)]) == 0
    assert capsys.readouterr().out == f"models: 3 MiB in 2 entries removed from {root / 'cache' / 'models'}\n"
    assert not list((root / "cache" / "models").iterdir()) and (root / "cache" / "xla" / "programs" / "a-1").exists()
    assert cli.main(["cache", "clear", "all", *arguments(root)]) == 0
    assert not (root / "runs" / "a" / "journal" / "rollouts").exists(), "a resume samples again"
    assert (root / "runs" / "a" / "journal" / "ledger.host0.log").exists() and (root / "hub" / "models--x").exists()
    assert cli.main(["cache", "clear", "hub", *arguments(root)]) == 0
    assert not (root / "hub" / "models--x").exists()


def test_what_to_clear_must_be_said(root, capsys):
    assert cli.main(["cache", "clear", *arguments(root)]) == 2
    assert "Say what to clear. Expected: models, programs, rollouts, hub, or all" in capsys.readouterr().err
    assert cli.main(["cache", "clear", "modles", *arguments(root)]) == 2
    assert "There is no cache named 'modles'" in capsys.readouterr().err


def test_over_its_bound_the_least_recently_used_goes(root):
    config = load(None, arguments(root, f"run.cache_max_gib={2.5 / 1024}"))
    assert [entry.path.name for entry in cli_cache.trim(config)] == ["old"]
    assert (root / "cache" / "models" / "new").exists()
    assert cli_cache.trim(config) == []
    os.utime(root / "cache" / "models" / "new" / "params")  # in use, perhaps
    assert cli_cache.trim(load(None, arguments(root, "run.cache_max_gib=0.001"))) == []
