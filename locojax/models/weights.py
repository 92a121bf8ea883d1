"""Weights on disk -> our tree, and back: Hugging Face directories of safetensors.

Our tree stacks the layers on a leading axis and keeps matrices as [in, out]; Hugging Face keeps one tensor per layer,
matrices as [out, in]. `slots` is the one table between the two; the GGUF reader goes through it as well.

Legend: L layers, V vocab, D model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from locojax.errors import CheckpointError, ModelError
from locojax.models.spec import ModelSpec, parameters

Dtype = Literal["float32", "bfloat16", "float16", "stored"]
"""Type of the loaded leaves. `stored`: the file's own; float32 where one leaf's layers are stored in several types."""

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

TOP_TENSORS: Mapping[tuple[str, ...], str] = {
    ("embed",): "model.embed_tokens.weight",
    ("final_norm",): "model.norm.weight",
    ("head",): "lm_head.weight",
}
LAYER_NORMS: Mapping[str, str] = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
HF_MODULES: Mapping[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Our name of a linear layer -> Hugging Face's, within `model.layers.<i>.`."""

_HARMLESS = {
    re.compile(r".*\.rotary_emb\.inv_freq"): "old exports store the rope frequencies, which follow from the config",
    re.compile(r".*\.attn\.masked_bias|.*\.attn\.bias"): "old exports store the causal mask",
}
"""Tensors that may be left unread, and why."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one stored tensor goes. Example: Slot(("layers", "q"), layer=3, transpose=True)"""

    leaf: tuple[str, ...]
    layer: int | None  # index on the leaf's leading axis; None: the tensor is the whole leaf
    transpose: bool  # stored [out, in], ours [in, out]


def flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Nested dict -> {path: leaf}."""
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, (*prefix, key)))
        else:
            flat[*prefix, key] = value
    return flat


def unflatten(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def slots(spec: ModelSpec) -> dict[str, Slot]:
    """Every tensor a checkpoint of `spec` must hold, under its Hugging Face name -> its place in our tree."""
    table: dict[str, Slot] = {}
    for path, parameter in flatten(parameters(spec)).items():
        if path[0] != "layers":
            table[TOP_TENSORS[path]] = Slot(path, None, transpose=path == ("head",))
            continue
        name = path[1]
        if name in HF_MODULES:
            suffix = f"{HF_MODULES[name]}.weight"
        elif name.endswith("_bias"):
            suffix = f"{HF_MODULES[name.removesuffix('_bias')]}.bias"
        else:
            suffix = LAYER_NORMS[name]
        for layer in range(parameter.shape[0]):
            table[f"model.layers.{layer}.{suffix}"] = Slot(path, layer, transpose=name in HF_MODULES)
    return table


class TreeBuilder:
    """Fills a preallocated tree tensor by tensor, and accounts for every one of them.

    Memory: the tree itself, plus whatever single tensor the caller holds (and a tied checkpoint's duplicate head).
    """

    def __init__(self, spec: ModelSpec, dtype: Dtype, source: str):
        self._shapes = {path: tuple(parameter.shape) for path, parameter in flatten(parameters(spec)).items()}
        self._slots = slots(spec)
        self._missing = dict.fromkeys(self._slots)
        self._unread: list[str] = []
        self._duplicate_head: np.ndarray | None = None
        self._leaves: dict[tuple[str, ...], np.ndarray] = {}
        self._dtype, self._source = dtype, source

    def put(self, name: str, tensor: np.ndarray) -> None:
        """Take one stored tensor (matrices [out, in]) under its Hugging Face name.

        Raises ModelError when its shape is not what the config says.
        """
        slot = self._slots.get(name)
        if slot is None:
            self._put_aside(name, tensor)
            return
        shape = self._shapes[slot.leaf] if slot.layer is None else self._shapes[slot.leaf][1:]
        stored_shape = shape[::-1] if slot.transpose else shape
        if tensor.shape != stored_shape:
            raise ModelError(
                f"Tensor {name!r} in {self._source} has the wrong shape",
                got=list(tensor.shape),
                expected=f"{list(stored_shape)}, as its config says",
            )
        leaf = self._leaf(slot.leaf, tensor.dtype)
        leaf[... if slot.layer is None else slot.layer] = tensor.T if slot.transpose else tensor
        self._missing.pop(name, None)

    def finish(self) -> dict[str, Any]:
        """The tree. Raises ModelError naming up to five tensors that are missing or were not understood."""
        if self._missing:
            raise ModelError(
                f"{self._source} lacks {len(self._missing)} of the tensors that its config promises",
                got=f"no {first_five(self._missing)}",
                remedy="Download the checkpoint again, or check that its config belongs to these weights",
            )
        if self._unread:
            raise ModelError(
                f"{self._source} holds {len(self._unread)} tensors that this model has no place for",
                got=first_five(self._unread),
                remedy="Its config describes another model than the weights; loading would drop them in silence",
            )
        if self._duplicate_head is not None:
            embed = self._leaves["embed",]
            if not np.array_equal(embed, self._duplicate_head.astype(embed.dtype)):
                raise ModelError(
                    f"{self._source} says tie_word_embeddings, but its lm_head.weight differs from the embedding",
                    remedy='Set "tie_word_embeddings": false in its config.json if the head is meant to be its own',
                )
        return unflatten({path: self._leaves[path] for path in self._shapes})

    def _leaf(self, path: tuple[str, ...], stored: np.dtype) -> np.ndarray:
        wanted = stored if self._dtype == "stored" else DTYPES[self._dtype]
        leaf = self._leaves.get(path)
        if leaf is None:
            leaf = self._leaves[path] = np.empty(self._shapes[path], wanted)
        elif leaf.dtype not in (wanted, np.float32):  # "stored", and this leaf's layers differ
            leaf = self._leaves[path] = leaf.astype(np.float32)
        return leaf

    def _put_aside(self, name: str, tensor: np.ndarray) -> None:
        """A tensor with no place: harmless for a stated reason, or to be reported by `finish`."""
        if name == "lm_head.weight" and ("head",) not in self._shapes:
            # Many exports of tied models repeat the embedding. `finish` compares: were they different, using the
            # embedding as the head would give a quietly different model.
            self._duplicate_head = tensor
        elif not any(pattern.fullmatch(name) for pattern in _HARMLESS):
            self._unread.append(name)


def load_directory(directory: Path, spec: ModelSpec, dtype: Dtype = "float32") -> dict[str, Any]:
    """Read a Hugging Face directory's safetensors, one shard and one tensor at a time, into our tree (numpy leaves).

    Raises ModelError when files or tensors are missing, unreadable, misshapen or not understood.
    """
    builder = TreeBuilder(spec, dtype, str(directory))
    for shard in shard_paths(directory):
        for name, tensor in read_tensors(shard):
            builder.put(name, tensor)
    return builder.finish()


def shard_paths(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory, each once. Raises ModelError when one is missing."""
    index = directory / INDEX_FILE
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = [SINGLE_FILE]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing or not names:
        others = sorted(path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
        raise ModelError(
            f"{directory} has no weights that can be read" if not index.is_file() else f"{directory} is incomplete",
            got=f"no {first_five(missing or ['weight_map'])}" + (f", but {first_five(others)}" if others else ""),
            expected=f"{SINGLE_FILE}, or {INDEX_FILE} and its shards",
            remedy="Convert the checkpoint to safetensors" if others else "Download the checkpoint again",
        )
    return [directory / name for name in names]


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor of one safetensors file in turn. Raises ModelError when the file is damaged or its type unknown."""
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict: it has no __iter__)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"{path} is not a readable safetensors file ({error})", remedy="Download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file and line when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error})", remedy="Download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object", got=type(value).__name__)
    return value


def save_directory(
    directory: Path,
    params: Mapping[str, Any],
    spec: ModelSpec,
    config: Mapping[str, Any],
    *,
    dtype: Dtype = "stored",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write our tree (numpy or jax leaves) as a Hugging Face directory: config.json and safetensors.

    The directory appears whole or not at all. `config` is the mapping the spec was read from; only its dtype is
    changed. Memory: one shard beside the tree. Raises CheckpointError when it exists already or can't be written.
    """
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} exists and is not empty", remedy="Choose another directory")
    leaves, table = flatten(params), slots(spec)
    types = {path: np.dtype(leaf.dtype) if dtype == "stored" else DTYPES[dtype] for path, leaf in leaves.items()}
    sizes = {
        name: math.prod(leaves[slot.leaf].shape[0 if slot.layer is None else 1 :]) * types[slot.leaf].itemsize
        for name, slot in table.items()
    }
    file_of = _assign_shards(sizes, max_shard_bytes)
    try:
        with atomic_directory(directory) as temporary:
            for file, names in itertools.groupby(table, key=file_of.__getitem__):
                shard = {
                    name: _stored(leaves[table[name].leaf], table[name], types[table[name].leaf]) for name in names
                }
                save_file(shard, temporary / file, {"format": "pt"})
            if len(set(file_of.values())) > 1:
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
                (temporary / INDEX_FILE).write_text(json.dumps(index, indent=2))
            saved = {key: value for key, value in config.items() if key != "torch_dtype"}
            saved["dtype"] = types["embed",].name
            (temporary / "config.json").write_text(json.dumps(saved, indent=2))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Could not write the model to {directory} ({error})") from error


def _stored(leaf: Any, slot: Slot, dtype: np.dtype) -> np.ndarray:
    """One tensor as Hugging Face stores it, cut from its leaf (numpy or jax) before it is copied to the host."""
    tensor = np.asarray(leaf if slot.layer is None else leaf[slot.layer])
    return np.ascontiguousarray(tensor.T if slot.transpose else tensor, dtype)


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory beside `directory` that becomes it when the block ends well, and vanishes when not."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield temporary
        for path in temporary.iterdir():
            path.chmod(0o644)  # safetensors makes its files private, and mkdtemp the folder
        temporary.chmod(0o755)
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _assign_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, str]:
    """Tensor name -> file name, filling each file up to the limit in the given order."""
    number, used, numbers = 0, 0, {}
    for name, size in sizes.items():
        if used and used + size > max_shard_bytes:
            number, used = number + 1, 0
        numbers[name] = number
        used += size
    if number == 0:
        return dict.fromkeys(sizes, SINGLE_FILE)
    return {name: f"model-{index + 1:05d}-of-{number + 1:05d}.safetensors" for name, index in numbers.items()}


def first_five(names: Iterable[str]) -> str:
    """Names for an error's text: enough to see what is wrong, not a page."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
