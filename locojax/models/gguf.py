"""GGUF files (llama.cpp's format) -> a Hugging Face config, tensors under Hugging Face names, and a tokenizer.

A GGUF names its settings and tensors in llama.cpp's way, packs most matrices in quantised blocks, and for the llama
architecture stores the rows of q and k in another order. All of that is undone here, so that everything after reads
one kind of model. Needs the `gguf` package, which knows the file format, the tensor names and the block types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from locojax.errors import ModelError
from locojax.models.spec import RopeSpec
from locojax.models.weights import HF_MODULES, LAYER_NORMS, TOP_TENSORS

QUANT_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SETTINGS = {  # GGUF key, after the architecture's prefix -> config.json key
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ROPE_SETTINGS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_CHECKED = {  # read below, or without effect on the model
    "vocab_size",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.finetuned",
    "attention.value_length",
}


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """An opened GGUF file; no weight is read until `tensors` is run through.

    Example: `model = read(path); spec = ModelSpec.from_hf_config(model.config)`
    """

    path: Path
    config: Mapping[str, Any]  # as config.json would hold it
    metadata: Mapping[str, Any]  # the file's own settings, under GGUF's keys
    _entries: tuple[tuple[str, Any], ...]  # (Hugging Face name, gguf.ReaderTensor)

    def tensors(self, *, stored: bool = False) -> Iterator[tuple[str, np.ndarray]]:
        """Each tensor in turn under its Hugging Face name, matrices [out, in], quantised ones as f32.

        `stored` leaves F16 and BF16 in their type; otherwise they come as f32 too.
        """
        heads = {
            "q_proj": self.config["num_attention_heads"],
            "k_proj": self.config["num_key_value_heads"],
        }
        for name, entry in self._entries:
            tensor = _dequantize(entry, stored)
            module = name.split(".")[-2]
            if self.config["model_type"] == "llama" and module in heads:
                tensor = unpermute(tensor, heads[module])
            yield name, tensor


def read(path: Path) -> GgufModel:
    """Open a GGUF file and translate its settings and tensor names.

    Raises ModelError, before any weight is read, for an architecture, setting, block type or tensor that is not
    implemented, by its name.
    """
    package = _gguf_package()
    try:
        reader = package.GGUFReader(str(path))
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({error})", remedy="Download it again") from error
    metadata = {key: _shortest(field.contents()) for key, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{path.name} holds an architecture that is not implemented",
            got=f"general.architecture {architecture!r}",
            expected=", ".join(_ARCHITECTURES),
        )
    by_name: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in QUANT_TYPES:
            raise ModelError(
                f"Tensor {tensor.name!r} of {path.name} is stored in a block type that is not implemented",
                got=tensor.tensor_type.name,
                expected=", ".join(QUANT_TYPES),
            )
    config = _config(path, architecture, metadata, by_name)
    names = _hf_names(architecture, config["num_hidden_layers"])
    by_name.pop("rope_freqs.weight", None)  # its content is in the config now
    # A tensor that the map does not know keeps its own name and is reported as unread by whoever builds the tree.
    entries = tuple((names.get(name, name), tensor) for name, tensor in by_name.items())
    return GgufModel(path, config, metadata, entries)


def unpermute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of q and k rows: its rope pairs neighbours (2i, 2i+1), ours pairs (i, i + h/2).

    `tensor` is [heads * h, in] or, for a bias, [heads * h]. Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def _shortest(value: Any) -> Any:
    """A float is stored as f32: 1e-5 comes back as 9.999999747378752e-06. Give the number that was written."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "Reading a GGUF file needs the gguf package", remedy="Install it: pip install 'locojax[demo]'"
        ) from error
    return gguf


def _dequantize(entry: Any, stored: bool) -> np.ndarray:
    kind = entry.tensor_type.name
    if stored and kind == "F16":
        return entry.data
    if stored and kind == "BF16":
        return entry.data.view(ml_dtypes.bfloat16)
    return _gguf_package().quants.dequantize(entry.data, entry.tensor_type)


def _hf_names(architecture: str, num_layers: int) -> dict[str, str]:
    """GGUF tensor name -> Hugging Face name, from the package's own table, for what our decoder has."""
    package = _gguf_package()
    kind = next(kind for kind, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    table = package.get_tensor_name_map(kind, num_layers)
    within_layer = [f"{module}.{part}" for module in HF_MODULES.values() for part in ("weight", "bias")]
    within_layer += LAYER_NORMS.values()
    names = list(TOP_TENSORS.values())
    names += [f"model.layers.{layer}.{suffix}" for layer in range(num_layers) for suffix in within_layer]
    translated = {}
    for name in names:
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is not None:  # an architecture has no name for what it lacks, such as llama for q_norm
            translated[theirs] = name
    return translated


def _config(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that this file was converted from, as far as the model depends on it."""
    prefix = f"{architecture}."
    settings = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    unknown = set(settings) - _SETTINGS.keys() - _ROPE_SETTINGS.keys() - _CHECKED
    if unknown:
        raise ModelError(
            f"{path.name} sets options that are not implemented",
            got=", ".join(f"{prefix}{key} = {settings[key]}" for key in sorted(unknown)),
        )
    optional = {"attention.key_length", "attention.head_count_kv"}
    absent = [prefix + key for key in _SETTINGS if key not in settings and key not in optional]
    absent += [name for name in ("token_embd.weight",) if name not in tensors]
    if absent:
        raise ModelError(
            f"{path.name} lacks settings that every {architecture} model has", got=f"no {', '.join(absent)}"
        )
    config = {ours: settings[key] for key, ours in _SETTINGS.items() if key in settings}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key in ("rope.dimension_count", "attention.value_length"):
        if settings.get(key, config["head_dim"]) != config["head_dim"]:
            raise ModelError(
                f"{path.name} sets an option that is not implemented",
                got=f"{prefix}{key} = {settings[key]}",
                expected=f"the head dimension, {config['head_dim']}",
            )
    config |= {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),  # GGUF lists a shape's last axis first
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": settings.get("rope.freq_base", 10000.0),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if architecture != "qwen2":  # whose q, k and v always have a bias
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    rope = _rope_scaling(path, settings, tensors, config)
    return config if rope is None else {**config, "rope_scaling": rope}


def _rope_scaling(
    path: Path, settings: Mapping[str, Any], tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    kind = settings.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        return _llama3_scaling(path, tensors["rope_freqs.weight"], config)
    if kind == "none":
        return None
    return {"rope_type": kind} | {ours: settings[key] for key, ours in _ROPE_SETTINGS.items() if key in settings}


def _llama3_scaling(path: Path, entry: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama 3's rope scaling, recovered from the per-frequency divisors that the converter stored.

    The divisors of the slowest frequencies are the factor itself. The other three settings are the ones that every
    Llama 3.1-3.3 uses; should they not reproduce the stored divisors, the file is refused.
    """
    from locojax.models.decoder import rope_frequencies  # jax with it, which most files don't need

    divisors = _dequantize(entry, stored=False)
    theta, head_dim = config["rope_theta"], config["head_dim"]
    rope = RopeSpec(
        theta,
        kind="llama3",
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    expected = rope_frequencies(RopeSpec(theta), head_dim) / rope_frequencies(rope, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(
            f"{path.name} scales its rope frequencies (rope_freqs.weight) in a way that is not implemented",
            got=f"divisors from {divisors.min():g} to {divisors.max():g}",
            expected="Llama 3's, with low and high frequency factors 1 and 4 and an original context of 8192",
        )
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
