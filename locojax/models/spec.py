"""What a model is: dimensions and options, read from a Hugging Face config.json, and every parameter, declared once.

Shape letters: L layers, D hidden, H heads, K kv heads, h head dim, F ffn, V vocab.
Weights are `[in, out]`, so that applying one is `x @ w`. Layers are stacked on a leading L axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from locojax.errors import ModelError

Family = Literal["llama", "qwen2", "qwen3"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MODEL_TYPES: tuple[str, ...] = tuple(ARCHITECTURES.values())


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) and its long-context scaling.

    kind `linear`: positions / factor. `llama3`: Llama 3.1's frequency bands. `yarn`: Peng et al. 2023, with the
    attention factor folded into cos and sin, as Hugging Face does.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Built by `ModelSpec.from_hf_config`; read by everything that touches the model."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_context: int  # tokens, prompt and completion together
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Reads a Hugging Face config.

        Raises:
          ModelError: the architecture, rope type or an option isn't implemented (named), or a needed key is missing.
        """
        family = _family(config)
        _refuse_unimplemented(config, family)
        hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
        bias = bool(config.get("attention_bias", False))
        max_context = int(config.get("max_position_embeddings", 2048))
        head_dim = int(config.get("head_dim") or hidden // heads)
        return cls(
            family=family,
            vocab_size=_need(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size"),
            num_layers=_need(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, max_context),
            max_context=max_context,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bias,
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
        )


def _need(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ModelError(f"The model's config.json has no {key!r}", remedy="Check that the file is complete")
    return int(config[key])


def _family(config: Mapping[str, Any]) -> Family:
    names = list(config.get("architectures") or [])
    if names:
        known = next((n for n in names if n in ARCHITECTURES), None)
        if known is None:
            raise ModelError(
                f"The architecture {names[0]!r} is not implemented",
                expected="one of " + ", ".join(ARCHITECTURES),
            )
        return ARCHITECTURES[known]
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"The model type {model_type!r} is not implemented", expected="one of " + ", ".join(MODEL_TYPES)
        )
    return model_type


def _refuse_unimplemented(config: Mapping[str, Any], family: Family) -> None:
    """Options that change the result and that the decoder doesn't have are refused here, before any weight is read."""
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"The activation hidden_act={act!r} is not implemented", expected="'silu'")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"The weights are quantized (quantization_config.quant_method={method!r}), which is not implemented for"
            " safetensors",
            remedy="Use the unquantized checkpoint or a GGUF file",
        )
    sliding = config.get("use_sliding_window", False) if family != "llama" else config.get("sliding_window")
    if sliding or "sliding_attention" in (config.get("layer_types") or []):
        raise ModelError("Sliding-window attention (use_sliding_window / layer_types) is not implemented")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise ModelError(f"Mixture of experts ({key}={config[key]}) is not implemented")
    partial = config.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise ModelError(f"Partial rotary embedding (partial_rotary_factor={partial}) is not implemented")
    heads, kv = _need(config, "num_attention_heads"), int(config.get("num_key_value_heads") or 0)
    if kv and heads % kv:
        raise ModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv}")


def _rope(config: Mapping[str, Any], max_context: int) -> RopeSpec:
    """Reads rope settings in both spellings: `rope_scaling` + `rope_theta`, and transformers 5's `rope_parameters`."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind: Any = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"The rope type {kind!r} is not implemented", expected="default, linear, llama3 or yarn"
        )
    if kind == "default":
        return RopeSpec(theta)
    known = {
        "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
        "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned", "partial_rotary_factor",
    }  # fmt: skip
    unknown = sorted(set(given) - known)
    if unknown:
        raise ModelError(f"The rope option {unknown[0]!r} is not implemented", got=f"rope settings {given}")
    factor = float(given.get("factor") or 1.0)
    original = int(given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or 0)
    original = original or max_context
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(kind, factor, given),
        truncate=bool(given.get("truncate", True)),
    )


def _attention_factor(kind: str, factor: float, given: Mapping[str, Any]) -> float:
    """YaRN's attention temperature (Peng et al. 2023, eq. 22; mscale variant: DeepSeek-V2), as in transformers."""
    if kind != "yarn":
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    def mscale(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(factor, given["mscale"]) / mscale(factor, given["mscale_all_dim"])
    return mscale(factor)


INIT_STD = 0.02
"""Standard deviation of a fresh `normal` parameter: the usual `initializer_range` of a config.json."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter: its shape, the logical name of each axis (for sharding), and how a fresh one is drawn."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"


def parameters(spec: ModelSpec) -> dict[str, Any]:
    """Every parameter of the model as a nested dict of `Parameter`: the one place that says what there is."""
    L, D, F, V = spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size
    Q, KV, h = spec.q_size, spec.kv_size, spec.head_dim
    layers: dict[str, Parameter] = {
        "attn_norm": Parameter((L, D), ("layers", "embed"), "ones"),
        "q": Parameter((L, D, Q), ("layers", "embed", "heads")),
        "k": Parameter((L, D, KV), ("layers", "embed", "kv_heads")),
        "v": Parameter((L, D, KV), ("layers", "embed", "kv_heads")),
        "o": Parameter((L, Q, D), ("layers", "heads", "embed")),
        "mlp_norm": Parameter((L, D), ("layers", "embed"), "ones"),
        "gate": Parameter((L, D, F), ("layers", "embed", "ffn")),
        "up": Parameter((L, D, F), ("layers", "embed", "ffn")),
        "down": Parameter((L, F, D), ("layers", "ffn", "embed")),
    }
    if spec.qkv_bias:
        layers["q_bias"] = Parameter((L, Q), ("layers", "heads"), "zeros")
        layers["k_bias"] = Parameter((L, KV), ("layers", "kv_heads"), "zeros")
        layers["v_bias"] = Parameter((L, KV), ("layers", "kv_heads"), "zeros")
    if spec.o_bias:
        layers["o_bias"] = Parameter((L, D), ("layers", "embed"), "zeros")
    if spec.mlp_bias:
        layers["gate_bias"] = Parameter((L, F), ("layers", "ffn"), "zeros")
        layers["up_bias"] = Parameter((L, F), ("layers", "ffn"), "zeros")
        layers["down_bias"] = Parameter((L, D), ("layers", "embed"), "zeros")
    if spec.qk_norm:
        layers["q_norm"] = Parameter((L, h), ("layers", "head_dim"), "ones")
        layers["k_norm"] = Parameter((L, h), ("layers", "head_dim"), "ones")
    tree: dict[str, Any] = {
        "embed": Parameter((V, D), ("vocab", "embed")),
        "layers": layers,
        "final_norm": Parameter((D,), ("embed",), "ones"),
    }
    if not spec.tied_embeddings:
        tree["head"] = Parameter((D, V), ("embed", "vocab"))
    return tree


def count(tree: Mapping[str, Any]) -> int:
    """Number of weights in a nested dict of `Parameter`."""
    return sum(math.prod(p.shape) if isinstance(p, Parameter) else count(p) for p in tree.values())


def num_parameters(spec: ModelSpec) -> int:
    """Number of the model's weights, a tied head counted once."""
    return count(parameters(spec))
