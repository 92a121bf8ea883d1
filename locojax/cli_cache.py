"""`locojax cache ls|clear`: what is kept from run to run, where, under which key, and within which bound."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence

from locojax.config import Config, cache_folder, load
from locojax.errors import ConfigError
from locojax.models.cache import FORMAT_VERSION, folder_of_models

_GIB = 2**30
_IN_USE_SECONDS = 3600.0  # what was read so lately may be in use by a run: not removed to keep a bound


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing kept. Example: Entry(pathlib.Path("models/smollm2-float32-0a1b"), 538_000_000, 1767225600.0)"""

    path: pathlib.Path
    num_bytes: int
    used: float  # seconds since the epoch


@dataclasses.dataclass(frozen=True)
class Place:
    """One cache. `key`: what must be equal for an entry to be used. `max_bytes` None: its owner keeps it in bounds."""

    name: str
    path: pathlib.Path
    what: str
    key: str
    max_bytes: int | None
    find: Callable[[pathlib.Path], list[pathlib.Path]]

    def entries(self) -> list[Entry]:
        """Everything in it, the least recently used first."""
        if not self.path.is_dir():
            return []
        return sorted(filter(None, map(_entry, self.find(self.path))), key=lambda entry: entry.used)


def places(config: Config, runs: pathlib.Path) -> list[Place]:
    """Every cache that a run with this configuration uses."""
    from huggingface_hub.constants import HF_HUB_CACHE

    root, bound = cache_folder(config), int(config.run.cache_max_gib * _GIB)
    programs = None if config.run.cache_dir is not None else os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return [
        Place("models", folder_of_models(root), "checkpoints converted to our layout",
              f"source file's size, time and first MiB; number format; layout version {FORMAT_VERSION}", bound, _below),
        Place("programs", pathlib.Path(programs or root / "xla"), "compiled programs of trainer and sampler",
              "the program and its shapes, jax's version, compiler flags, devices", bound, _programs),
        Place("rollouts", runs, "sampled and graded rollouts, for --resume",
              "run, step, prompt, policy version; kept until no checkpoint before them is left", None, _rollouts),
        Place("hub", pathlib.Path(HF_HUB_CACHE), "downloads from the Hugging Face hub, shared with its other users",
              "repository and revision", None, _below),
    ]  # fmt: skip


def trim(config: Config) -> list[Entry]:
    """Removes what is over each bound, the least recently used first; returns what went."""
    removed, now = [], time.time()
    for place in places(config, pathlib.Path(config.run.dir)):
        entries = place.entries() if place.max_bytes is not None else []
        over = sum(entry.num_bytes for entry in entries) - (place.max_bytes or 0)
        for entry in entries:
            if over <= 0 or now - entry.used < _IN_USE_SECONDS:
                break
            _remove(entry.path)
            over -= entry.num_bytes
            removed.append(entry)
    return removed


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `cache`."""
    parser.add_argument("action", choices=("ls", "clear"), help="show every cache, or empty those that are named")
    parser.add_argument("words", metavar="NAME or key=value", nargs="*",
                        help="models, programs, rollouts, hub, or all (without hub); settings")  # fmt: skip
    parser.add_argument("--runs", default=None, metavar="DIR", help="where run folders are (else run.dir)")
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Lists, or clears; returns 0."""
    config = load(None, [word for word in options.words if "=" in word])
    found = places(config, pathlib.Path(options.runs or config.run.dir))
    wanted = [word for word in options.words if "=" not in word]
    if options.action == "clear":
        for place in _named(found, wanted):
            entries = place.entries()
            for entry in entries:
                _remove(entry.path)
            print(f"{place.name}: {_size(entries)} in {len(entries)} entries removed from {place.path}")
        return 0
    for place in _named(found, wanted) if wanted else found:
        entries = place.entries()
        bound = "" if place.max_bytes is None else f" of at most {place.max_bytes / _GIB:g} GiB"
        print(f"{place.name}: {_size(entries)}{bound}, {len(entries)} entries in {place.path}")
        print(f"    {place.what}\n    key: {place.key}")
    return 0


def _named(found: Sequence[Place], wanted: Sequence[str]) -> list[Place]:
    names = [place.name for place in found]
    if wanted == ["all"]:
        return [place for place in found if place.name != "hub"]
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(f"There is no cache named {unknown[0]!r}", expected=", ".join([*names, "all"]))
    if not wanted:
        raise ConfigError("Say what to clear", expected=", ".join([*names, "or all (without hub)"]))
    return [place for place in found if place.name in wanted]


def _below(path: pathlib.Path) -> list[pathlib.Path]:
    return [each for each in path.iterdir() if not each.name.startswith(".")]


def _programs(path: pathlib.Path) -> list[pathlib.Path]:
    """jax's own entries, and the programs kept beside them."""
    return [each for each in path.rglob("*") if each.is_file()]


def _rollouts(path: pathlib.Path) -> list[pathlib.Path]:
    return [each for each in path.glob("*/journal/rollouts") if each.is_dir()]


def _entry(path: pathlib.Path) -> Entry | None:
    """None: it went while we looked."""
    try:
        files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        stats = [each.stat() for each in files] or [path.stat()]
    except FileNotFoundError:
        return None
    num_bytes = sum(each.st_size // each.st_nlink for each in stats)  # a file with two names counts once
    return Entry(path, num_bytes, max(max(each.st_atime, each.st_mtime) for each in stats))


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _size(entries: Sequence[Entry]) -> str:
    size = float(sum(entry.num_bytes for entry in entries))
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
