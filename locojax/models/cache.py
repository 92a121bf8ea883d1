"""Converted checkpoints on disk, so that a quantised file is unpacked once and loads in a moment after that.

An entry is one folder: the tree in one safetensors file under our own names, config.json, the tokenizer, and a
manifest of file sizes. It appears whole (renamed into place) or not at all. Its name holds a key of everything that its
content follows from: the dtype, and a hash of the source file's size, time and head and of the version of this format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from locojax.errors import ModelError
from locojax.models.tokenizer import Tokenizer
from locojax.models.weights import DTYPES, Dtype, atomic_directory, flatten, read_json, unflatten

FORMAT_VERSION = 1  # raise it whenever the conversion or this layout changes: old entries are then not found

_HASHED_BYTES = 1 << 20
_PARAMS, _CONFIG, _MANIFEST = "params.safetensors", "config.json", "manifest.json"

log = logging.getLogger("locojax")


def entry_path(root: Path, source: Path, dtype: Dtype) -> Path:
    """Where the conversion of file `source` to `dtype` is kept, whether it is there or not."""
    stat = source.stat()
    with source.open("rb") as file:
        head = file.read(_HASHED_BYTES)
    facts = f"{FORMAT_VERSION} {stat.st_size} {stat.st_mtime_ns} ".encode()
    key = hashlib.sha256(facts + head).hexdigest()[:16]
    return folder_of_models(root) / f"{source.stem}-{dtype}-{key}"


def folder_of_models(root: Path) -> Path:
    """Where all entries are, in the cache folder `root`."""
    return root / "models"


def load(entry: Path) -> tuple[dict[str, Any], dict[str, Any], Tokenizer] | None:
    """(config, tree, tokenizer) of an entry, or None when there is none. A damaged one is removed, with a warning."""
    if not entry.is_dir():
        return None
    try:
        sizes = read_json(entry / _MANIFEST)
        wrong = [name for name, size in sizes.items() if (entry / name).stat().st_size != size]
        if wrong:
            raise ModelError(f"{', '.join(wrong)} is not of the size that was written")
        tree = unflatten({tuple(name.split(".")): array for name, array in _mapped(entry / _PARAMS).items()})
        return read_json(entry / _CONFIG), tree, Tokenizer.from_directory(entry)
    except (OSError, ValueError, KeyError, ModelError) as error:  # what reading a half-written or foreign file raises
        log.warning("The converted model in %s is damaged (%s); converting it again.", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def store(entry: Path, config: Mapping[str, Any], tree: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Write an entry. A disk that is full or read-only costs the next start its time, not this one its life."""
    try:
        with atomic_directory(entry) as folder:
            flat = {".".join(path): np.ascontiguousarray(array) for path, array in flatten(tree).items()}
            save_file(flat, folder / _PARAMS)
            (folder / _CONFIG).write_text(json.dumps(dict(config), indent=2))
            tokenizer.save(folder)
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            (folder / _MANIFEST).write_text(json.dumps(sizes))
    except (OSError, SafetensorError) as error:
        if not entry.is_dir():  # else another process wrote the same entry first
            log.warning("Could not keep the converted model in %s (%s); the next start converts again.", entry, error)


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one safetensors file as views of the mapped file: nothing is read before it is used.

    safetensors' own reader copies each tensor, which for 0.5 GB takes longer than all else here. The format is 8 bytes
    of header length, a JSON header with each tensor's type, shape and byte range, then the bytes. Writes to a view stay
    private to this process.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > path.stat().st_size:
            raise ValueError(f"{path.name} does not start with the length of a header")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, mode="c", offset=8 + length)
    types = {"F32": DTYPES["float32"], "F16": DTYPES["float16"], "BF16": DTYPES["bfloat16"]}
    return {
        name: data[slice(*facts["data_offsets"])].view(types[facts["dtype"]]).reshape(facts["shape"]).view(np.ndarray)
        for name, facts in header.items()
        if name != "__metadata__"
    }
