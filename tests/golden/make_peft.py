"""Make the golden vectors of LoRA adapters: what Hugging Face's peft computes with them, on the golden models.

Run once, in an environment that has torch and peft, after make.py; the tests read only what it wrote:

    python tests/golden/make_peft.py

peft/ours_* are directories that our `save_adapter` wrote and peft has loaded; peft/theirs_* are written by peft itself.
peft/vectors.npz holds the logits f32[R, 16, V] of each on the model's first 16 `tokens`; peft/cases.json says which
model, and for ours which settings.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent.parent))

from locojax.models.lora import LoraSpec, adapter_parameters  # noqa: E402  (found by the line before)
from locojax.models.peft import save_adapter  # noqa: E402
from locojax.models.spec import ModelSpec, Parameter  # noqa: E402

TOKENS = 16
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OURS: dict[str, tuple[str, LoraSpec]] = {
    "all_but_the_head": ("llama_gqa", LoraSpec(4, alpha=16.0)),
    "head": ("llama_gqa", LoraSpec(4, alpha=8.0, attention=False, unembed=True, rslora=True)),
    "tied_head": ("llama_tied_biases_wide_heads", LoraSpec(4, alpha=16.0, unembed=True)),
    "qwen3": ("qwen3", LoraSpec(2, alpha=4.0, mlp=False)),
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("llama_gqa", {}),
    "all_linear": ("qwen2", {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": True}),
    "tied_head": ("llama_tied_biases_wide_heads", {"r": 4, "target_modules": [*EVERYTHING, "lm_head"]}),
}


def base_model(case: str) -> tuple[Any, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(ROOT / case, dtype=torch.float32, attn_implementation="eager").eval()
    return model, torch.from_numpy(np.load(ROOT / case / "vectors.npz")["tokens"][:, :TOKENS]).long()


def logits(model: Any, tokens: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(tokens).logits.numpy()


def make_ours(folder: Path, case: str, lora: LoraSpec, seed: int) -> np.ndarray:
    """peft's logits with a random adapter that we have written."""
    spec = ModelSpec.from_hf_config(json.loads((ROOT / case / "config.json").read_text()))
    draw = np.random.default_rng(seed)
    adapter = jax.tree.map(
        lambda p: draw.normal(0, 0.2, p.shape).astype(np.float32),
        adapter_parameters(spec, lora),
        is_leaf=lambda p: isinstance(p, Parameter),
    )
    save_adapter(folder, adapter, lora, spec, base_model=case)
    model, tokens = base_model(case)
    return logits(peft.PeftModel.from_pretrained(model, folder).eval(), tokens)


def make_theirs(folder: Path, case: str, options: dict[str, Any], seed: int) -> np.ndarray:
    """The logits of a random adapter that peft then writes."""
    model, tokens = base_model(case)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": case}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    return logits(adapted, tokens)


def main() -> None:
    shutil.rmtree(ROOT / "peft", ignore_errors=True)
    vectors: dict[str, np.ndarray] = {}
    cases: dict[str, Any] = {}
    for seed, (name, (case, lora)) in enumerate(OURS.items()):
        cases[f"ours_{name}"] = {"model": case, "lora": dataclasses.asdict(lora)}
        vectors[f"ours_{name}"] = make_ours(ROOT / "peft" / f"ours_{name}", case, lora, seed)
    for seed, (name, (case, options)) in enumerate(THEIRS.items()):
        cases[f"theirs_{name}"] = {"model": case}
        vectors[f"theirs_{name}"] = make_theirs(ROOT / "peft" / f"theirs_{name}", case, options, seed)
    for name, found in vectors.items():
        plain = logits(*base_model(cases[name]["model"]))
        print(f"{name}: the adapter moves logits by {np.abs(found - plain).max():.2f}")
    np.savez_compressed(ROOT / "peft" / "vectors.npz", **vectors)
    (ROOT / "peft" / "cases.json").write_text(json.dumps({"peft": peft.__version__, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
