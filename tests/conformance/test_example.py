"""examples/rl_loop.py against a real server: it runs through, and prints what a person wants to know."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from conformance import sdks
from conformance.server import MODEL, ROOT, Server, tail

pytestmark = pytest.mark.extended


def test_two_steps(server: Server, folder: pathlib.Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "rl_loop.py"), "--base-url", server.url]
    options = ["--steps", "2", "--groups", "4", "--group-size", "4", "--rank", "4", "--tokenizer", MODEL]
    done = subprocess.run([*command, *options], cwd=folder, env=sdks.environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nserver:\n{tail(folder / 'server.log')}"
    assert len(re.findall(r"^step +\d  reward \d\.\d{3}", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert "held-out sums right after training" in done.stdout
    assert re.search(r"saved as tinker://.+:train:0/sampler_weights/addition$", done.stdout.strip()), done.stdout


def test_it_stays_short() -> None:
    lines = (ROOT / "examples" / "rl_loop.py").read_text().splitlines()
    assert len(lines) < 250
