"""One host of runs that differ in who controls generation, for `test_single_controller`.

Arguments: settings of all runs. Runs `local`, then `single`, then `single-many` with several iterations a call.
"""

from __future__ import annotations

import sys

import jax
from rich.console import Console

from locojax.config import load
from locojax.hosts import colocated
from locojax.hosts.group import Group
from locojax.hosts.progress import Progress
from locojax.hosts.startup import Startup
from locojax.measure.timeline import Timeline

RUNS = {
    "local": (),
    "single": ("hosts.controller=single",),
    "single-many": ("hosts.controller=single", "rollout.decode_iterations=4"),
}


def main(arguments: list[str]) -> None:
    config = load(None, arguments)
    jax.config.update("jax_compilation_cache_dir", config.run.cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with Group.start(config.hosts) as group, Progress(Console(quiet=True), config.run.num_steps) as progress:
        for name, own in RUNS.items():
            meetings = group.num_meetings
            config = load(None, [*arguments, f"run.name={name}", *own])
            colocated._run(config, False, Timeline(), group, progress, Startup())
            print(f"{name}: {group.num_meetings - meetings} meetings", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
