"""`locojax profile CONFIG`: what one step's time goes to, on every host; and how that changes with the model's size."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rich.console import Console

from locojax.config import Config, load
from locojax.errors import ConfigError, HostError
from locojax.models.random_model import PREFIX

Start = Callable[[Config], ModuleType]
"""Readies jax for a config, and gives the module whose `run` is the training loop."""

NUM_WARM_UP = 2

EPILOG = """\
Trains a few steps as `locojax train` would, and records the last one with jax's profiler. Every instant of it is
compute (a program runs on the device), network (a collective, or the waiting in it), host orchestration (the device is
idle while the host admits, schedules, grades, packs or dispatches), or unaccounted; they add up to 100 %.

  locojax profile mine.toml
  locojax launch --hosts 2 -- profile mine.toml
  locojax profile mine.toml --scale 1b/config.json 8b/config.json 32b/config.json --plot scale.png

A model's config.json is enough: model.name=random:PATH draws random weights, and --scale does so for every .json.
Random weights solve nothing, so a coin takes the place of the task's own reward.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `locojax profile`."""
    parser.epilog = EPILOG
    parser.add_argument("words", metavar="CONFIG.toml key=value", nargs="*", help="as for `locojax train`")
    parser.add_argument("--warm-up", type=int, default=NUM_WARM_UP, metavar="N",
                        help=f"steps before the recorded one (default {NUM_WARM_UP})")  # fmt: skip
    parser.add_argument("--scale", nargs="+", type=pathlib.Path, metavar="FILE",
                        help="profile each of these: config.json files, configurations (.toml), or what --json wrote")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw it there (.png, .svg, .pdf)")
    parser.add_argument("--trace", type=pathlib.Path, metavar="FOLDER", help="keep the profiler's files, for XProf")
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")


def config_of(options: argparse.Namespace) -> Config:
    """The configuration that is to be profiled. Raises ConfigError for whatever is wrong with the arguments."""
    files = [text for text in options.words if "=" not in text]
    if len(files) > 1:
        problem = f"{files[1]!r} is neither a setting nor the configuration file, which is {files[0]!r}"
        raise ConfigError(problem, expected="locojax profile CONFIG.toml key=value ...")
    if options.warm_up < 1:
        problem = "A step is profiled after others have warmed up"
        raise ConfigError(problem, got=f"--warm-up {options.warm_up}", expected="at least 1")
    if options.scale and options.trace:
        raise ConfigError("--trace keeps one profile's files, and --scale makes several profiles")
    return load(pathlib.Path(files[0]) if files else None, [text for text in options.words if "=" in text])


def run(options: argparse.Namespace, start: Start) -> int:
    """Profiles and shows what was found, on the first host."""
    config = config_of(options)
    if options.scale:
        return _scale(options)
    loop = start(config)
    from locojax.measure import profile_report
    from locojax.measure.profile import Recorder, profiled_config

    recorder = Recorder(options.warm_up, options.trace)
    with tempfile.TemporaryDirectory(prefix="locojax-profile-") as folder:
        loop.run(profiled_config(config, options.warm_up, folder), resume=False, timer=recorder)
    if recorder.is_first_host:
        found = recorder.profile(config.model.name)
        Console().print(profile_report.table(found))
        _write(options.json, lambda path: path.write_text(json.dumps(profile_report.to_json(found), indent=1)))
        _write(options.plot, lambda path: profile_report.draw_hosts(found, path))
    return 0


def _scale(options: argparse.Namespace) -> int:
    """One profile of each model, in a process of its own: memory and compiled programs of one don't burden the next."""
    from locojax.measure import profile_report

    with tempfile.TemporaryDirectory(prefix="locojax-profile-") as folder:
        profiles: list[dict[str, Any]] = []
        for index, path in enumerate(options.scale):
            found = None if path.suffix == ".toml" else profile_report.read_profile(path)
            if found is None:
                found = _profile_apart(options, path, pathlib.Path(folder) / f"{index}.json")
            if found is not None:  # the first host alone writes one
                profiles.append(found)
    if profiles:
        Console().print(profile_report.scale_table(profiles))
        _write(options.json, lambda path: path.write_text(json.dumps(profiles, indent=1)))
        _write(options.plot, lambda path: profile_report.draw_scale(profiles, path))
    return 0


def _profile_apart(options: argparse.Namespace, path: pathlib.Path, out: pathlib.Path) -> dict[str, Any] | None:
    if path.suffix == ".toml":
        words = [str(path), *(text for text in options.words if "=" in text)]
    else:
        words = [*options.words, f"model.name={PREFIX}{path}"]
    command = ["profile", *words, "--warm-up", str(options.warm_up), "--json", str(out)]
    ended = subprocess.run([sys.executable, "-m", "locojax", *command], check=False)
    if ended.returncode:
        raise HostError(f"The profile of {path} failed", got=f"exit code {ended.returncode}, its error is above")
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else None


def _write(path: pathlib.Path | None, write: Callable[[pathlib.Path], Any]) -> None:
    if path is None:
        return
    try:
        write(path)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for a format that it doesn't know
        raise ConfigError(f"The file {str(path)!r} can't be written: {error}") from error
