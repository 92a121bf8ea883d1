"""Checkpoints of a run: written in the background, whole or absent, the last few and the best kept.

A checkpoint holds the trainer's state (weights, optimizer, version) and the `Position` that a run goes on from. What is
drawn at random is a function of (run seed, step, prompt, sample), so the position is all there is to remember of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from locojax import settings
from locojax.config import Config
from locojax.errors import CheckpointError

_HELD_OUT = "held_out"
_SEAL = ".sums.json"  # beside a checkpoint's folder
_CHUNK = 1 << 24
_NUM_READERS = 8
_MUST_AGREE = (
    "model.name", "training.method", "training.lora_rank", "training.lora_alpha", "training.lora_attention",
    "training.lora_mlp", "training.lora_unembed", "training.lora_rslora", "data.source", "run.seed",
    "run.prompts_per_step", "rollout.group_size",
)  # fmt: skip
"""Settings that decide what the next step is: a resumed run with another value would be another run."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands between two steps. Filled by the loop.

    Example: Position(next_step=10, held_out_first=0.05, held_out=0.9)
    """

    next_step: int  # the data order and every seed follow from it
    held_out_first: float | None  # accuracy before the first step
    held_out: float | None  # the latest accuracy

    def after(self, step_index: int, held_out: float | None) -> Position:
        """The position once step `step_index` is done, and perhaps an evaluation."""
        return Position(step_index + 1, self.held_out_first, self.held_out if held_out is None else held_out)


class Checkpoints:
    """The checkpoints in one run's folder. Saving returns at once; `wait` or the next save reports what went wrong.

    A checkpoint appears whole (renamed into place) or not at all. Once it is there, the sums of its files are written
    beside it; one whose files no longer have them is set aside by `check`, and an earlier one stands in for it.

    Args:
      folder: where they are kept; made if absent.
      config: resolved; its `run.keep_last` and `run.keep_best` say what is kept.
      alone: this process of several keeps them, and gives and takes numpy; the others take no part.
      read_only: nothing in the folder is touched: another process may be writing it.

    Raises:
      CheckpointError: the folder can't be used, or a save or a restore fails.
    """

    def __init__(self, folder: pathlib.Path, config: Config, *, alone: bool = False, read_only: bool = False):
        self.folder = folder
        self._config = config
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells its every move
        policies: list[checkpoint_managers.PreservationPolicy] = [
            checkpoint_managers.LatestN(config.run.keep_last)
        ]
        if config.run.keep_best:
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics[_HELD_OUT], n=1, keep_checkpoints_without_metrics=False
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            create=not alone and not read_only,  # orbax makes no folder for some processes of several
            cleanup_tmp_directories=not alone and not read_only,  # what a process that was killed left behind
            read_only=read_only,
            enable_async_checkpointing=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=0, active_processes={0}, barrier_sync_key_prefix="locojax"
            )
            if alone
            else ocp.options.MultiprocessingOptions(),
        )
        with _reporting(folder, "opened"):
            folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self.last_seconds: float | None = None  # from the beginning of the last save until it was whole
        self._sealing: threading.Thread | None = None
        self._error: Exception | None = None

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Of all whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def check(self, *, set_aside: bool = True) -> list[str]:
        """What is wrong with which checkpoint, in words; reads them from the newest back to the first sound one.

        Args:
          set_aside: damaged ones are moved out of the way; else all are read, and left.
        """
        found = []
        for step in reversed(self.steps()):
            wrong = self._damage(step)
            if wrong is None:
                if set_aside:
                    break
                continue
            if set_aside:
                with _reporting(self.folder, "written"):
                    away = self.folder.with_name(self.folder.name + "-damaged")
                    away.mkdir(exist_ok=True)
                    os.replace(self.folder / str(step), away / f"{step}-{len(list(away.iterdir()))}")
                    self._seal(step).unlink(missing_ok=True)
                wrong += f"; it was moved to {str(away)!r}"
            found.append(f"The checkpoint of step {step} is damaged: {wrong}")
        if found and set_aside:
            self._manager.reload()
        return found

    def save(self, state: Mapping[str, Any], position: Position) -> None:
        """Begins to write a checkpoint of `state`, a tree of arrays; they are copied before this returns."""
        meta = {"position": dataclasses.asdict(position), "settings": self._settings()}
        metrics = {} if position.held_out is None else {_HELD_OUT: position.held_out}
        self.wait()
        start = time.monotonic()
        with _reporting(self.folder, "written"):
            self._manager.save(
                position.next_step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)),
                metrics=metrics or None,
                force=True,
            )
        self._sealing = threading.Thread(
            target=self._finish, args=(position.next_step, start), name="locojax-seal"
        )
        self._sealing.start()

    def wait(self) -> None:
        """Returns when what was saved is on disk, with its sums."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
        error, self._error = self._error, None
        with _reporting(self.folder, "written"):
            if error is not None:
                raise error
            self._manager.check_for_errors()

    def position(self, step: int | None = None) -> Position:
        """The position of a checkpoint, the newest one's if None, checked against the config.

        Raises:
          CheckpointError: there is none, or it was made with other settings (named).
        """
        step = self._newest() if step is None else step
        with _reporting(self.folder, "read"):
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        for key, now in self._settings().items():
            then = meta["settings"].get(key)
            if then != now:
                raise CheckpointError(
                    f"The checkpoint in {str(self.folder)!r} was made with another {key}",
                    got=now,
                    expected=then,
                    remedy="Resume with the run's own settings, or start a new run under another run.name",
                )
        return Position(**meta["position"])

    def restore(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """The newest checkpoint's state, in the shapes, dtypes and shardings of `like`."""
        step = self._newest()
        with _reporting(self.folder, "read"):
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            return self._manager.restore(step, args=args)["state"]

    def restore_as_saved(self, step: int | None = None) -> dict[str, Any]:
        """A checkpoint's state as it was written, the newest one's if None: for reading it without a trainer."""
        step = self._newest() if step is None else step
        with _reporting(self.folder, "read"):
            return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]

    def close(self) -> None:
        """Waits for what is being written, and lets go of the folder."""
        self.wait()
        self._manager.close()

    def _finish(self, step: int, start: float) -> None:
        """In a thread: waits for a checkpoint to be there, and writes its sums."""
        try:
            self._manager.wait_until_finished()
            self.last_seconds = time.monotonic() - start
            for old in self.folder.glob(f"*{_SEAL}"):
                if not (self.folder / old.name.removesuffix(_SEAL)).is_dir():
                    old.unlink(missing_ok=True)
            if (self.folder / str(step)).is_dir():  # else it failed: orbax tells by `check_for_errors`
                unfinished = self._seal(step).with_suffix(".tmp")
                unfinished.write_text(json.dumps(_sums(self.folder / str(step))))
                os.replace(unfinished, self._seal(step))
        except Exception as error:  # orbax's storage has no common error; `wait` raises it in its caller's thread
            self._error = error

    def _seal(self, step: int) -> pathlib.Path:
        return self.folder / f"{step}{_SEAL}"

    def _damage(self, step: int) -> str | None:
        """What differs from the sums that were written with a checkpoint; None without any, or if nothing does."""
        try:
            sealed = json.loads(self._seal(step).read_text())
            found = _sums(self.folder / str(step))
        except FileNotFoundError:  # killed before the sums were written
            return None
        except (OSError, ValueError) as error:
            return str(error)
        for name, (size, checksum) in sealed.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != [size, checksum]:
                return f"{name} is not what was written ({found[name][0]} bytes, {size} were written)"
        return None

    def _newest(self) -> int:
        step = self.latest()
        if step is None:
            raise CheckpointError(
                f"There is no checkpoint to resume from in {str(self.folder)!r}",
                remedy="Start without --resume, or check run.dir and run.name",
            )
        return step

    def _settings(self) -> dict[str, Any]:
        values = {leaf.key: settings.get(self._config, leaf.key) for leaf in settings.leaves(Config)}
        return {key: values[key] for key in _MUST_AGREE}


def _sums(folder: pathlib.Path) -> dict[str, list[int]]:
    """[size, CRC-32] of every file below, by name; several are read at a time."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with concurrent.futures.ThreadPoolExecutor(_NUM_READERS) as pool:
        found = list(pool.map(_sum, paths))
    return {path.relative_to(folder).as_posix(): each for path, each in zip(paths, found, strict=True)}


def _sum(path: pathlib.Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


@contextlib.contextmanager
def _reporting(folder: pathlib.Path, what: str) -> Iterator[None]:
    """Turns a storage failure into a CheckpointError; a full disk is told by tensorstore as ValueError, in its text."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        full = full or "No space left" in str(error) or "Disk quota exceeded" in str(error)
        remedy = "Free some space and continue with --resume" if full else "Check run.dir and its permissions"
        raise CheckpointError(
            f"A checkpoint in {str(folder)!r} can't be {what}: {'the disk is full' if full else reason}", remedy=remedy
        ) from error
