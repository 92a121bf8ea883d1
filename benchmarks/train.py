"""How fast the trainer trains, against the bound set by this machine's own matrix products in the same run.

SmolLM2-135M's shapes with random weights (the arithmetic is the same), one forward_backward call of packed rows:
  full    every weight; the bound is 6 x 134 M operations a token (forward, and two products a weight backward)
  lora    rank-32 adapters on all layers' matrices; 4 x 134 M (no product for a frozen weight's gradient). The adapters'
          own operations, a seventh more, are not in the bound
Sequences of 32 to 128 tokens, all of whose tokens carry a loss, so that the head runs on every position; nothing is
shared between them. With --rl a second workload has what a group-based step has: a header and prompts that are shared,
in longer rows, and a loss on completions only; it is reported in tokens of the data a second, beside the first.

The bound is the rate of `x @ w` at a micro-batch's rows on the model's own MLP weight, measured before and after every
sample, since other work on the machine slows both. `cpu` shares compare CPU seconds, not wall time: they hold on shared
cores. Run it with: python benchmarks/train.py [--dtype float32 bfloat16] [--mode full lora] [--rl]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from locojax.models import decoder
from locojax.models.lora import LoraSpec
from locojax.models.spec import ModelSpec, RopeSpec, num_parameters
from locojax.training.packing import pack
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

SMOLLM2 = ModelSpec(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, norm_eps=1e-5, rope=RopeSpec(100000.0), max_context=8192, tied_embeddings=True,
)  # fmt: skip
OPERATIONS = {"full": 6, "lora": 4}  # per weight and token
TARGETS = {"full": 0.45, "lora": 0.60}


@dataclasses.dataclass(frozen=True)
class Rate:
    """Operations per second of wall time, and of CPU time."""

    wall: float
    cpu: float


class Clock:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Clock:
        self._start = (time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._start[0]
        self.cpu = time.process_time() - self._start[1]


def gemm_rate(num_rows: int, dtype: str, repeats: int = 20) -> Rate:
    """The best of `repeats` products of [num_rows, 576] and [576, 1536]."""
    x, w = jnp.ones((num_rows, 576), dtype), jnp.ones((576, 1536), dtype)
    product = jax.jit(jnp.matmul)
    product(x, w).block_until_ready()
    clocks = []
    for _ in range(repeats):
        with Clock() as clock:
            product(x, w).block_until_ready()
        clocks.append(clock)
    operations = 2 * num_rows * 576 * 1536
    return Rate(operations / min(c.wall for c in clocks), operations / min(c.cpu for c in clocks))


def datum(tokens: np.ndarray, num_prompt: int, rng: np.random.Generator) -> Datum:
    """A sampled sequence with a loss from its `num_prompt`-th token on."""
    sampled = np.arange(1, len(tokens)) >= num_prompt
    return Datum(
        tokens[:-1],
        {
            "target_tokens": tokens[1:],
            "logprobs": np.where(sampled, -10.8, 0.0).astype(np.float32),
            "advantages": np.where(sampled, rng.normal(), 0.0).astype(np.float32),
        },
    )


def packed(rows: int, row_tokens: int) -> list[Datum]:
    """Sequences of 32 to 128 tokens that fill one micro-batch: drawn until 20 more did not fit."""
    rng, data, misses = np.random.default_rng(0), list[Datum](), 0
    while misses < 20:
        length = int(rng.integers(32, 129))
        more = [*data, datum(rng.integers(0, SMOLLM2.vocab_size, length + 1), 0, rng)]
        fits = pack([d.tokens for d in more], [0] * len(more), row_tokens=row_tokens, rows=rows).num_micro_batches == 1
        data, misses = (more, 0) if fits else (data, misses + 1)
    return data


def rl(num_prompts: int = 4, num_samples: int = 8) -> list[Datum]:
    """Groups: a header of 64 tokens common to all, prompts of 24, completions of 8 to 40."""
    rng, data = np.random.default_rng(0), []
    header = rng.integers(0, SMOLLM2.vocab_size, 64)
    for _ in range(num_prompts):
        prompt = np.concatenate([header, rng.integers(0, SMOLLM2.vocab_size, 24)])
        for _ in range(num_samples):
            completion = rng.integers(0, SMOLLM2.vocab_size, rng.integers(8, 41))
            data.append(datum(np.concatenate([prompt, completion]), len(prompt), rng))
    return data


def measure(mode: str, dtype: str, arguments: argparse.Namespace) -> dict[str, object]:
    """One mode in one dtype: prints each sample, returns the JSON line."""
    rows, row_tokens = arguments.rows, arguments.row_tokens
    settings = TrainerSettings(row_tokens, rows, dtype, remat=arguments.remat, tile_tokens=arguments.tile_tokens)
    params = decoder.init_params(SMOLLM2, jax.random.key(0))
    trainer = Trainer(SMOLLM2, params, settings, lora=LoraSpec(32) if mode == "lora" else None)
    del params
    per_token = OPERATIONS[mode] * num_parameters(SMOLLM2)
    data = packed(rows, row_tokens)
    with Clock() as compiling:
        trainer.forward_backward(data, "importance_sampling", score="active")
    tokens_per_second, shares, cpu_shares = [], [], []
    before = gemm_rate(rows * row_tokens, dtype)
    for _ in range(arguments.samples):
        with Clock() as clock:
            metrics = trainer.forward_backward(data, "importance_sampling", score="active").metrics
        after = gemm_rate(rows * row_tokens, dtype)
        num_tokens = metrics["num_computed_tokens:sum"]
        operations = num_tokens * per_token
        tokens_per_second.append(num_tokens / clock.wall)
        shares.append(operations / clock.wall / ((before.wall + after.wall) / 2))
        cpu_shares.append(operations / clock.cpu / ((before.cpu + after.cpu) / 2))
        print(
            f"{mode} {dtype}: {tokens_per_second[-1]:.0f} tokens/s, {after.wall / 1e9:.0f} GFLOP/s of GEMM beside it, "
            f"share {shares[-1]:.3f}, cpu share {cpu_shares[-1]:.3f}",
            flush=True,
        )
        before = after
    padding = 1 - num_tokens / metrics["num_row_tokens:sum"]
    update = _update(trainer, data)
    trainer_tile = trainer.program.tile_tokens
    del trainer
    grouped = _rl(mode, settings) if arguments.rl else {}
    ours, share = statistics.median(tokens_per_second), statistics.median(shares)
    return {
        "name": f"train/{mode}/{dtype}",
        "ours": round(ours, 1),
        "against": f"{per_token / 1e6:.0f} M operations a token at this run's GEMM rate",
        "theirs": round(ours / share, 1),
        "ratio": round(share, 3),
        "unit": "tokens/s",
        "conditions": {
            "target": TARGETS[mode],
            "cpu_time_ratio": round(statistics.median(cpu_shares), 3),
            "rows": rows,
            "row_tokens": row_tokens,
            "padding_share": round(padding, 4),
            "first_call_seconds": round(compiling.wall, 1),
            "optim_step_seconds": round(update, 3),
            **grouped,
            "remat": arguments.remat,
            "tile_tokens": trainer_tile,
            "samples": arguments.samples,
        },
    }


def _rl(mode: str, settings: TrainerSettings) -> dict[str, float]:
    """The group workload, in rows of 512: tokens of its data a second, and what share of them was computed."""
    settings = dataclasses.replace(settings, rows=2, row_tokens=512)
    params = decoder.init_params(SMOLLM2, jax.random.key(0))
    trainer = Trainer(SMOLLM2, params, settings, lora=LoraSpec(32) if mode == "lora" else None)
    data = rl()
    trainer.forward_backward(data, "importance_sampling", score="active")
    with Clock() as clock:
        metrics = trainer.forward_backward(data, "importance_sampling", score="active").metrics
    num_tokens = metrics["num_datum_tokens:sum"]
    return {
        "rl_datum_tokens_per_second": round(num_tokens / clock.wall, 1),
        "rl_computed_share": round(metrics["num_computed_tokens:sum"] / num_tokens, 3),
        "rl_head_share": round(metrics["num_tokens:sum"] / num_tokens, 3),
        "rl_padding_share": round(1 - metrics["num_computed_tokens:sum"] / metrics["num_row_tokens:sum"], 3),
    }


def _update(trainer: Trainer, data: Sequence[Datum]) -> float:
    """Seconds of an optimizer step, its compilation left out."""
    trainer.optim_step(AdamParams())
    trainer.forward_backward(data[:1], "importance_sampling", score="active")
    with Clock() as clock:
        trainer.optim_step(AdamParams())
    return clock.wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=sorted(OPERATIONS), default=["full", "lora"])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--tile-tokens", type=int, help="default: the trainer's own")
    parser.add_argument("--remat", default="linear")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--rl", action="store_true", help="also measure the group workload")
    arguments = parser.parse_args()
    lines = [measure(mode, dtype, arguments) for dtype in arguments.dtype for mode in arguments.mode]
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
