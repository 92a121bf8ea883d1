"""`locojax launch --hosts N -- train ...`: one process per host on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from locojax.errors import ConfigError
from locojax.hosts.launch import launch

LAUNCHED = ("train", "demo", "profile")
_EXAMPLE = "locojax launch --hosts 2 -- train CONFIG.toml"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `launch`; what stands after `--` is the command of each host."""
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="how many processes to start")
    parser.add_argument(
        "--devices-per-host", type=int, metavar="D", help="CPU devices that each of them sees (else as XLA_FLAGS says)"
    )


def check(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Raises ConfigError unless there is a command that can be launched, on at least one host."""
    for name, value in (("--hosts", options.hosts), ("--devices-per-host", options.devices_per_host)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1", got=value)
    if not command or command[0] not in LAUNCHED:
        raise ConfigError(
            "There is no command to launch",
            got=" ".join(command) or "nothing after --",
            expected=f"{', '.join(LAUNCHED[:-1])} or {LAUNCHED[-1]} after --, as in `{_EXAMPLE}`",
        )


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Starts the hosts, and returns the launch's exit code."""
    whole = [sys.executable, "-m", "locojax", *command]
    return launch(whole, options.hosts, devices_per_host=options.devices_per_host)
