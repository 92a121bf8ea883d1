"""`make` on a machine that lacks something: it says so at once, and installs nothing."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def make(tmp_path: pathlib.Path, python: object) -> str:
    command = ["make", "--no-print-directory", "-C", ROOT, "demo", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert not (tmp_path / "venv").exists()
    return done.stdout


def fake_python(tmp_path: pathlib.Path, fails_on: str) -> pathlib.Path:
    """Answers --version, and fails on a check that mentions `fails_on`."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in --version) echo Python 3.8.18;; *{fails_on}*) exit 1;; esac\n')
    path.chmod(0o755)
    return path


def test_no_python(tmp_path):
    assert make(tmp_path, "nopython") == (
        "Got: no 'nopython' on this machine. Expected: Python 3.11 or newer. Say which: make PYTHON=/path/to/python3\n"
    )


def test_an_old_python(tmp_path):
    python = fake_python(tmp_path, "version_info")
    assert make(tmp_path, python) == (
        f"Got: Python 3.8.18 from '{python}'. Expected: Python 3.11 or newer. "
        "Say which: make PYTHON=/path/to/python3.12\n"
    )


def test_a_python_without_venv(tmp_path):
    text = make(tmp_path, fake_python(tmp_path, "ensurepip"))
    assert (
        "without the venv and ensurepip modules. Expected: both. On Debian and Ubuntu: apt-get install python3-venv"
        in text
    )


@pytest.mark.parametrize("target", ["demo", "test", "test-core", "lint"])
def test_what_is_installed_is_not_installed_again(tmp_path, target):
    """With the stamps newer than pyproject.toml, only the command itself is left to run."""
    bin_ = tmp_path / "venv" / "bin"
    bin_.mkdir(parents=True)
    for path in (bin_ / "pip", tmp_path / "venv" / ".ready-to-run", tmp_path / "venv" / ".ready-to-test"):
        path.touch()
    command = ["make", "--no-print-directory", "-n", "-C", ROOT, target, f"VENV={tmp_path / 'venv'}"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert planned and "pip install" not in planned
