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
    command = [sys.executable, "-W", "error::FutureWarning", str(ROOT / "examples" / "rl_loop.py")]
    options = ["--base-url", server.url, "--tokenizer", MODEL]
    options += ["--steps", "2", "--groups", "4", "--group-size", "4", "--rank", "4"]
    done = subprocess.run([*command, *options], cwd=folder, env=sdks.environment(), capture_output=True, text=True)
    status = sdks.exit_status(done.returncode, done.stderr)
    assert status == 0, f"{done.stdout}{done.stderr}\nserver:\n{tail(folder / 'server.log')}"
    assert len(re.findall(r"^step +\d  reward \d\.\d{3}", done.stdout, re.MULTILINE)) == 2, done.stdout
    assert "held-out sums right after training" in done.stdout
    assert re.search(r"saved as tinker://.+:train:0/sampler_weights/addition$", done.stdout.strip()), done.stdout


def test_an_abort_counts_unless_the_client_had_come_to_its_end() -> None:
    start = "import faulthandler, os, threading; faulthandler.enable(); "
    ends = {
        "os.abort()": -6,
        "threading.Thread(target=os.abort).start()": -6,
        "raise ValueError('Fatal Python error: Aborted')": 1,
    }
    for end, expected in ends.items():
        done = subprocess.run([sys.executable, "-c", start + end], capture_output=True, text=True)
        assert (done.returncode, sdks.exit_status(done.returncode, done.stderr)) == (expected, expected)
    at_its_very_end = "a warning\nFatal Python error: Aborted\n\n\nExtension modules: regex._regex (total: 1)\n"
    assert sdks.exit_status(-6, at_its_very_end) == 0
    assert sdks.exit_status(-6, "") == -6


def test_it_stays_short() -> None:
    lines = (ROOT / "examples" / "rl_loop.py").read_text().splitlines()
    assert len(lines) < 250
