"""Runs probes against a server with this interpreter's SDK: `python -m conformance.run URL MODEL [name ...]`.

Prints one JSON line a probe: its name, whether it passed, seconds, and the traceback if it did not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping

import tinker
from conformance.client import Client, applies, version_of

MODULES = ("losses", "tenants", "sampling", "checkpoints", "protocol", "endpoints")
MAX_SECONDS = 150


class TookTooLong(Exception):
    """A probe ran past its deadline: most likely a future that is never answered."""


def find_probes() -> Mapping[str, Callable[[Client], None]]:
    """Every probe of every module, as `module.name`."""
    found: dict[str, Callable[[Client], None]] = {}
    for module_name in MODULES:
        module = importlib.import_module(f"conformance.probes_{module_name}")
        for name, probe in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("probe_"):
                found[f"{module_name}.{name.removeprefix('probe_')}"] = probe
    return found


def run(probe: Callable[[Client], None], url: str, model: str) -> str | None:
    """The traceback of a probe that failed, else None."""

    def expire(number: int, frame: types.FrameType | None) -> None:
        raise TookTooLong(f"no end after {MAX_SECONDS} s")

    signal.signal(signal.SIGALRM, expire)
    client = Client(url, model)
    try:
        signal.alarm(MAX_SECONDS)
        try:
            probe(client)
        finally:
            signal.alarm(30)
            client.close()
            signal.alarm(0)
    except Exception:  # whatever a probe raises is its result
        return traceback.format_exc(limit=-12)
    return None


def main(url: str, model: str, names: list[str]) -> int:
    version, torch = version_of(tinker.__version__), importlib.util.find_spec("torch") is not None
    failures = 0
    for name, probe in find_probes().items():
        if names and name not in names or not applies(probe, version, torch):
            continue
        start = time.perf_counter()
        error = run(probe, url, model)
        failures += error is not None
        seconds = round(time.perf_counter() - start, 2)
        print(json.dumps({"probe": name, "passed": error is None, "seconds": seconds, "error": error}), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.flush()
    # The SDK's background threads may hold the interpreter for a telemetry flush; results are out.
    import os

    os._exit(status)
