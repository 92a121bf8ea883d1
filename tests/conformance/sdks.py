"""Which SDKs are at hand: this interpreter's own, and any that LOCOJAX_SDKS names."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

TESTS = pathlib.Path(__file__).parents[1]
DESCRIBE = (
    "import importlib.util as u, json, tinker; "
    "print(json.dumps([tinker.__version__, u.find_spec('torch') is not None]))"
)


@dataclasses.dataclass(frozen=True)
class Sdk:
    """An interpreter with the `tinker` package. Example: Sdk("python3", "0.38.0", torch=False)"""

    python: str
    version: str
    torch: bool

    @property
    def name(self) -> str:
        return f"tinker-{self.version}" + ("+torch" if self.torch else "")


def at_hand() -> list[Sdk]:
    """This interpreter's, then those of LOCOJAX_SDKS: interpreters, separated by colons (see `make conformance`)."""
    pythons = [sys.executable, *filter(None, os.environ.get("LOCOJAX_SDKS", "").split(":"))]
    return [describe(python) for python in pythons]


def describe(python: str) -> Sdk:
    done = subprocess.run([python, "-W", "ignore", "-c", DESCRIBE], capture_output=True, text=True, check=True)
    version, torch = json.loads(done.stdout)
    return Sdk(python, version, torch)


def environment() -> dict[str, str]:
    """For a client process: our tests on its path, nothing from the network, no telemetry, a trace when it crashes."""
    client = {"PYTHONPATH": str(TESTS), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **client}


def exit_status(status: int, stderr: str) -> int:
    """A client's exit status, but 0 for one that came to its end and was aborted while Python went down.

    Before Python 3.14 a thread that wants the interpreter by then is ended in a way that Rust's frames do not survive,
    and the SDK's HTTP client has such threads (github.com/curioswitch/pyqwest/issues/164). No thread has a Python frame
    any more: that tells it from an abort in the middle of something.
    """
    _, crash, trace = stderr.rpartition("Fatal Python error: Aborted")
    return 0 if status == -signal.SIGABRT and crash and 'File "' not in trace else status
