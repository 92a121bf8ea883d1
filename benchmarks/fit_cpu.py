"""What `locojax fit` says of a step on CPU, against the memory that a real one takes.

    python benchmarks/fit_cpu.py [--tokens 8192]

The step runs in this process; its memory is the process's peak during a step, less what is left when the trainer is
gone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from locojax.hosts.memory import resident_bytes
from locojax.measure import fit_chips
from locojax.measure.fit import fit
from locojax.measure.fit_programs import Plan, RolloutPlan
from locojax.models.random_model import random_weights
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.models.spec import ModelSpec
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import Datum

GIB = 1 << 30
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True,
}  # fmt: skip


def trimmed() -> int:
    """Resident bytes, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def step_bytes(plan: Plan) -> int:
    """Peak of a step, the compiled programs and everything else of the process left out."""
    settings = TrainerSettings(
        row_tokens=plan.row_tokens, rows=plan.rows, compute_dtype="float32", remat=plan.remat,
        tile_tokens=plan.tile_tokens, gather=plan.gather,
    )  # fmt: skip
    mesh = make_mesh(MeshSpec(1, 1), jax.devices()[:1])
    trainer = Trainer(plan.model, random_weights(plan.model), settings, mesh=mesh, agree=None)
    tokens = np.random.default_rng(0).integers(0, plan.model.vocab_size, plan.row_tokens).astype(np.int32)
    ones = np.ones(plan.row_tokens, np.float32)
    data = [Datum(tokens, {"target_tokens": tokens, "logprobs": -ones, "advantages": ones})]
    trainer.forward_backward(data, plan.loss, score="active")  # compiles, and makes what a trainer holds
    trimmed()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    trainer.forward_backward(data, plan.loss, score="active")
    peak = resident_bytes("VmHWM")
    del trainer
    return peak - trimmed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--remat", default="linear")
    options = parser.parse_args()
    plan = Plan(
        ModelSpec.from_hf_config(CONFIG), None, options.tokens, remat=options.remat, tile_tokens=128,
        compute_dtype="float32", gather="step", kernel="plain", rollout=RolloutPlan("none"),
    )  # fmt: skip
    said = fit(plan, fit_chips.parse("cpu", 24.0), only=("forward_backward",)).programs[0]
    print(f"fit: arguments {said.arguments / GIB:.3f}, temporaries {said.temporaries / GIB:.3f}, beside it "
          f"{sum(said.beside.values()) / GIB:.3f} GiB")  # fmt: skip
    took = step_bytes(plan)
    print(json.dumps({
        "name": "fit_cpu", "ours": said.total / GIB, "against": "resident memory of the step", "theirs": took / GIB,
        "ratio": said.total / took, "unit": "GiB",
        "conditions": {"tokens": options.tokens, "remat": options.remat, "jax": jax.__version__},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
