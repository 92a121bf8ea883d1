"""Models that `locojax fit` knows by name: shapes alone, without a download."""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Mapping
from typing import Any

from locojax.errors import ModelError
from locojax.models import hub, random_model
from locojax.models.spec import ModelSpec


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 151_936, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
    }


def _llama(hidden: int, ffn: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        **_qwen3(hidden, ffn, layers, heads, vocab),
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 131_072,
    }


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64),
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32, 128_256),
    # Qwen3-32B with a vocabulary as large as any.
    "dense-32b-248k": _qwen3(5120, 25_600, 64, 64, vocab=248_320),
    # The sizes of a dense model of 123 billion weights.
    "dense-123b": _llama(12_288, 28_672, 88, 96, 32_768),
}


def find(name: str) -> ModelSpec:
    """The model of that name: one of KNOWN, a config.json, or whatever `hub.load_spec` finds.

    Raises:
      ModelError: there is none, or it isn't implemented.
    """
    if name.lower() in KNOWN:
        return ModelSpec.from_hf_config(KNOWN[name.lower()])
    if pathlib.Path(name).suffix == ".json":
        return hub.load_spec(random_model.PREFIX + name)
    try:
        return hub.load_spec(name)
    except ModelError as error:
        near = difflib.get_close_matches(name.lower(), KNOWN, n=1)
        raise ModelError(
            error.problem,
            got=error.got,
            expected=f"{', '.join(KNOWN)}; a config.json; or what `locojax train` takes as model.name",
            remedy=f"Did you mean {near[0]!r}?" if near else error.remedy,
        ) from error
