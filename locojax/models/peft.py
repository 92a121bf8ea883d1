"""LoRA adapters in PEFT's format (adapter_config.json, adapter_model.safetensors) -> our tree, and back.

PEFT stores `lora_A` [r, in] and `lora_B` [out, r] for each layer's module; ours are stacked, a [L, in, r] and
b [L, r, out]. The scale is never folded into either: rank, alpha and rsLoRA travel as settings, and every reader
(trainer, sampler, PEFT, vLLM) derives the one scale from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from locojax.errors import CheckpointError, ModelError
from locojax.models.lora import ATTENTION_MODULES, HEAD, MLP_MODULES, LoraSpec, adapter_parameters
from locojax.models.spec import ModelSpec
from locojax.models.weights import HF_MODULES, atomic_directory, first_five, flatten, read_json, read_tensors
from locojax.types import PEFT_FILES

CONFIG_FILE, TENSOR_FILE = PEFT_FILES

UnembedName = Literal["lm_head", "model.unembed_tokens"]
"""What the unembedding is called in the file: PEFT's and vLLM's name, or the one Tinker's cookbook reads."""

_UNEMBED_NAMES: tuple[UnembedName, ...] = ("lm_head", "model.unembed_tokens")
_PREFIX = "base_model.model."
_PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {  # options that change the result, and their values that don't
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "layer_replication": ([], None),
    "alora_invocation_tokens": ([], None),
}


def save_adapter(
    directory: Path,
    adapter: Mapping[str, Any],
    lora: LoraSpec,
    spec: ModelSpec,
    *,
    base_model: str,
    unembed_name: UnembedName = "lm_head",
) -> None:
    """Write one adapter (unstacked, numpy or jax leaves) as a PEFT directory, which appears whole or not at all.

    Raises CheckpointError when the directory exists already or can't be written.
    """
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} exists and is not empty", remedy="Choose another directory")
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(adapter).items()}
    tensors = {
        name: np.ascontiguousarray((leaves[path] if layer is None else leaves[path][layer]).T)
        for name, path, layer in _tensor_names(spec, lora, unembed_name)
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [HF_MODULES[name].split(".")[-1] for name in lora.modules]
        + ([unembed_name.split(".")[-1]] if lora.unembed else []),
    }
    try:
        with atomic_directory(directory) as temporary:
            save_file(tensors, temporary / TENSOR_FILE, {"format": "pt"})
            (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Could not write the adapter to {directory} ({error})") from error


def load_adapter(directory: Path, spec: ModelSpec) -> tuple[LoraSpec, dict[str, Any]]:
    """Read a PEFT directory: its settings, and the adapter's tree for `spec`, f32.

    An adapter of only some attention or MLP modules (q and v, say) gets zeros for the others. A module with both of
    its matrices zero adds nothing and has no gradient, so it stays what it was in sampling and in training.
    Raises ModelError for an option that is not implemented, and for a tensor that is missing, misshapen or not read.
    """
    if not (directory / CONFIG_FILE).is_file() or not (directory / TENSOR_FILE).is_file():
        raise ModelError(f"{directory} is not a PEFT adapter", expected=f"{CONFIG_FILE} and {TENSOR_FILE} in it")
    config = read_json(directory / CONFIG_FILE)
    _refuse_unimplemented(config, directory)
    tensors = dict(read_tensors(directory / TENSOR_FILE))
    lora = _lora_spec(config, tensors, directory)
    tree: dict[str, Any] = {}
    missing = []
    unembed_name = _UNEMBED_NAMES[f"{_PREFIX}{_UNEMBED_NAMES[1]}.lora_A.weight" in tensors]
    present = {module for module in HF_MODULES if any(f".{HF_MODULES[module]}." in name for name in tensors)}
    for path, parameter in flatten(adapter_parameters(spec, lora)).items():
        tree.setdefault(path[0], {})[path[1]] = np.zeros(parameter.shape, np.float32)
    for name, (module, part), layer in _tensor_names(spec, lora, unembed_name):
        if module != HEAD and module not in present:
            continue
        tensor = tensors.pop(name, None)
        if tensor is None:
            missing.append(name)
            continue
        place = tree[module][part] if layer is None else tree[module][part][layer]
        if tensor.T.shape != place.shape:
            raise ModelError(
                f"Tensor {name!r} in {directory} has the wrong shape",
                got=list(tensor.shape),
                expected=f"{list(place.T.shape)}, for rank {lora.rank} on this base model",
            )
        place[...] = tensor.T
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} tensors", got=f"no {first_five(missing)}")
    if tensors:
        raise ModelError(
            f"{directory} holds {len(tensors)} tensors that this model has no place for", got=first_five(tensors)
        )
    return lora, tree


def _tensor_names(
    spec: ModelSpec, lora: LoraSpec, unembed_name: UnembedName
) -> Iterator[tuple[str, tuple[str, str], int | None]]:
    """(name in the file, (our module, "a" or "b"), layer or None) of every tensor of such an adapter."""
    for module in adapter_parameters(spec, lora):
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            if module == HEAD:
                yield f"{_PREFIX}{unembed_name}.{theirs}.weight", (module, ours), None
                continue
            for layer in range(spec.num_layers):
                name = f"{_PREFIX}model.layers.{layer}.{HF_MODULES[module]}.{theirs}.weight"
                yield name, (module, ours), layer


def _lora_spec(config: Mapping[str, Any], tensors: Mapping[str, Any], directory: Path) -> LoraSpec:
    """Settings from the config, switches from the tensors: `target_modules` may be a pattern."""

    def has(modules: tuple[str, ...]) -> bool:
        return any(f".{HF_MODULES[module]}." in name for module in modules for name in tensors)

    if config.get("r") is None or config.get("lora_alpha") is None:
        raise ModelError(f"{directory / CONFIG_FILE} has no r or no lora_alpha", remedy="The scale can't be guessed")
    attention, mlp = has(ATTENTION_MODULES), has(MLP_MODULES)
    unembed = any(f"{_PREFIX}{name}." in tensor for name in _UNEMBED_NAMES for tensor in tensors)
    if not (attention or mlp or unembed):
        raise ModelError(
            f"{directory} adapts nothing that this model has",
            got=first_five(tensors) or "no tensors",
            expected=f"names such as {_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight",
        )
    return LoraSpec(
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        attention=attention,
        mlp=mlp,
        unembed=unembed,
        rslora=bool(config.get("use_rslora", False)),
    )


def _refuse_unimplemented(config: Mapping[str, Any], directory: Path) -> None:
    for key, plain in _PLAIN_VALUES.items():
        if key in config and config[key] not in plain:
            raise ModelError(
                f"The adapter in {directory} uses an option that is not implemented",
                got=f"{key} = {config[key]!r}",
                expected=f"{plain[0]!r}",
            )
