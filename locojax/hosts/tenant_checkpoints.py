"""A tenant's checkpoints on disk: training checkpoints of our own format, and PEFT directories of adapters alone.

A training checkpoint holds an adapter, Adam's state, the step and the settings, in `state.safetensors` and
`checkpoint.json`; the latter carries a checksum of both. A directory appears whole or not at all, also after a power
cut: it is written under another name, synced, then renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from locojax.errors import CheckpointError, ModelError
from locojax.models import peft
from locojax.models.lora import LoraSpec
from locojax.models.spec import ModelSpec
from locojax.models.weights import flatten, unflatten

STATE_FILE, META_FILE = "state.safetensors", "checkpoint.json"
FORMAT = "locojax tenant checkpoint"
FORMAT_VERSION = 1
_UNFINISHED = ".unfinished"
_ABANDONED_SECONDS = 3600.0  # no checkpoint takes so long to write
_SAMPLED_VALUES = 512  # of each parameter, in the fingerprint


@dataclasses.dataclass(frozen=True)
class Base:
    """The frozen model that adapters belong to. Filled by `identify`.

    `fingerprint` is of its dimensions and of weights all over it: models of one shape differ in it, copies do not.
    """

    name: str
    spec: ModelSpec
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class TenantCheckpoint:
    """What a directory held. `state` is the trainer's, None for a PEFT directory; `seed` None: not known."""

    lora: LoraSpec
    seed: int | None
    adapter: Mapping[str, Any]
    state: Mapping[str, Any] | None


def identify(name: str, spec: ModelSpec, params: Mapping[str, Any]) -> Base:
    """The identity of a base model, from its tree as it was loaded (numpy leaves)."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(spec), sort_keys=True).encode())
    for path, leaf in sorted(flatten(params).items()):
        values = np.asarray(leaf).reshape(-1)
        sampled = values[:: max(values.size // _SAMPLED_VALUES, 1)].astype(np.float32)
        digest.update("/".join(path).encode() + sampled.tobytes())
    return Base(name, spec, digest.hexdigest())


def write_state(directory: pathlib.Path, state: Mapping[str, Any], lora: LoraSpec, seed: int | None, base: Base) -> int:
    """Writes a training checkpoint of `TenantTrainer.state`; returns its size in bytes.

    Raises:
      CheckpointError: the directory exists, or can't be written.
    """
    tensors = {"/".join(path): np.asarray(leaf, order="C") for path, leaf in flatten(state).items()}
    with _new_directory(directory) as temporary:
        save_file(tensors, temporary / STATE_FILE)
        meta = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "base_model": base.name,
            "base_fingerprint": base.fingerprint,
            "lora": dataclasses.asdict(lora),
            "seed": seed,
            "state_bytes": (temporary / STATE_FILE).stat().st_size,
            "state_sha256": _file_digest(temporary / STATE_FILE),
        }
        (temporary / META_FILE).write_text(json.dumps({**meta, "sha256": _digest(meta)}, indent=2), encoding="utf-8")
    return size_of(directory)


def write_adapter(directory: pathlib.Path, adapter: Mapping[str, Any], lora: LoraSpec, base: Base) -> int:
    """Writes a PEFT directory; returns its size in bytes.

    Raises:
      CheckpointError: the directory exists, or can't be written.
    """
    with _new_directory(directory) as temporary:
        temporary.rmdir()  # save_adapter makes it
        peft.save_adapter(temporary, adapter, lora, base.spec, base_model=base.name)
    return size_of(directory)


def read_checkpoint(directory: pathlib.Path, base: Base, *, optimizer: bool) -> TenantCheckpoint:
    """A training checkpoint, or without the optimizer an adapter in PEFT's format.

    Raises:
      CheckpointError: it is missing, damaged, of another base model, or holds no optimizer state and `optimizer` asks
        for it. ModelError: the PEFT adapter can't be used; see `peft.load_adapter`.
    """
    if (directory / META_FILE).is_file():
        return _read_state(directory, base)
    if optimizer and (directory / peft.CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{_shown(directory)} is a sampler checkpoint: it holds weights, but no optimizer state",
            remedy="Load it without the optimizer, or load a training checkpoint (a weights/ path)",
        )
    lora, adapter = read_adapter(directory, base)
    return TenantCheckpoint(lora, None, adapter, None)


def read_adapter(directory: pathlib.Path, base: Base) -> tuple[LoraSpec, dict[str, Any]]:
    """An adapter in PEFT's format, to be sampled from or trained on.

    Raises:
      CheckpointError: it is missing, a training checkpoint, or has values that aren't finite. ModelError: as above.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {_shown(directory)}", remedy="It may have been deleted or have expired"
        )
    if (directory / META_FILE).is_file():
        raise CheckpointError(
            f"{_shown(directory)} is a training checkpoint: it can't be sampled from",
            remedy="Save the weights for sampling, and use that path (sampler_weights/)",
        )
    lora, adapter = peft.load_adapter(directory, base.spec)
    for path, leaf in flatten(adapter).items():
        if not np.isfinite(leaf).all():
            raise CheckpointError(f"{_shown(directory)} holds values that are not finite", got="/".join(path))
    return lora, adapter


def check_same(lora: LoraSpec, wanted: LoraSpec, directory: pathlib.Path) -> None:
    """Raises CheckpointError unless a checkpoint's adapter has the settings of the model it is loaded into."""
    for field in dataclasses.fields(LoraSpec):
        got, expected = getattr(lora, field.name), getattr(wanted, field.name)
        if got != expected:
            raise CheckpointError(
                f"{_shown(directory)} is of an adapter with another {field.name}",
                got=got,
                expected=f"{expected}, the model's",
                remedy="Create a model from the checkpoint instead of loading it into this one",
            )


def size_of(directory: pathlib.Path) -> int:
    """Bytes of the directory's files."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def _read_state(directory: pathlib.Path, base: Base) -> TenantCheckpoint:
    meta = _read_meta(directory)
    if meta["base_fingerprint"] != base.fingerprint:
        raise CheckpointError(
            f"{_shown(directory)} belongs to another base model",
            got=f"an adapter of {meta['base_model']!r}",
            expected=f"one of {base.name!r}, which this server runs"
            + (" (the names agree, the weights do not)" if meta["base_model"] == base.name else ""),
        )
    path = directory / STATE_FILE
    size = path.stat().st_size if path.is_file() else 0
    if size != meta["state_bytes"]:
        problem = "is not whole" if path.is_file() else f"lacks its {STATE_FILE}"
        raise CheckpointError(
            f"{_shown(directory)} {problem}", got=f"{size} bytes", expected=f"{meta['state_bytes']} bytes"
        )
    if _file_digest(path) != meta["state_sha256"]:
        raise _damaged(directory, STATE_FILE, "the checksum differs")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(directory, STATE_FILE, str(error)) from error
    state = unflatten({tuple(name.split("/")): tensor for name, tensor in tensors.items()})
    return TenantCheckpoint(LoraSpec(**meta["lora"]), meta["seed"], state["trainable"], state)


def _read_meta(directory: pathlib.Path) -> dict[str, Any]:
    """The checked contents of checkpoint.json."""
    try:
        meta = json.loads((directory / META_FILE).read_bytes())
        stored = meta.pop("sha256")
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise _damaged(directory, META_FILE, str(error)) from error
    version = meta.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{_shown(directory)} was written by a newer LoCoJAX",
            got=f"format version {version}",
            expected=f"at most {FORMAT_VERSION}",
            remedy="Update LoCoJAX",
        )
    if stored != _digest(meta):
        raise _damaged(directory, META_FILE, "the checksum differs")
    return meta


def _damaged(directory: pathlib.Path, file: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{_shown(directory)} is damaged: {file} is not what was written ({how})",
        remedy="Load another checkpoint of the model",
    )


def _shown(directory: pathlib.Path) -> str:
    """A checkpoint as its owner knows it, e.g. 'weights/000020', without the server's folders."""
    return repr(f"{directory.parent.name}/{directory.name}")


def _digest(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _new_directory(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `directory` that becomes it, synced to the disk, when the block ends well; vanishes if not."""
    if directory.exists():
        raise CheckpointError(f"{_shown(directory)} exists already", remedy="Choose another name, or delete it first")
    temporary = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}"
    try:
        temporary.mkdir(parents=True)
        _sweep(directory.parent)
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            path.chmod(0o755 if path.is_dir() else 0o644)
            _sync(path)
        os.replace(temporary, directory)
        _sync(directory.parent)
    except (OSError, SafetensorError, ModelError) as error:
        raise CheckpointError(f"{_shown(directory)} could not be written ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: pathlib.Path) -> None:
    """Removes what processes that were killed while writing have left."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
