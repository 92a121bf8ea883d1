"""How fast the rollout engine samples, against the bound set by this machine's own matrix products in the same run.

Workloads, with the shapes of SmolLM2-135M (random weights: EOS is ignored, so what they say doesn't matter):
  group   16 prompts of 64 tokens x 8 samples x 128 new tokens
  ragged  16 prompts x 8 samples; two of 256 new tokens among fourteen of 8-31
  single  one stream of 128 tokens

The bound is the rate at which `x @ w` runs at 128 rows on the model's own weights, at 2 x 134 M operations a token: no
attention, no sampling, no norms, no prompt. Run it with: python benchmarks/rollout.py [--dtype float32 bfloat16]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from locojax.models import attention, decoder
from locojax.models.spec import ModelSpec, RopeSpec, num_parameters
from locojax.rollout.engine import Engine
from locojax.rollout.sampling import SamplerRows, sample
from locojax.rollout.settings import EngineSettings
from locojax.types import SampleRequest, SamplingParams

SMOLLM2 = ModelSpec(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, norm_eps=1e-5, rope=RopeSpec(100000.0), max_context=8192, tied_embeddings=True,
)  # fmt: skip
ROWS = 128


class NoText:
    """A vocabulary without text or EOS."""

    eos_ids = ()

    def token_bytes(self, id: int) -> bytes:
        return b""


def group(run: int) -> list[SampleRequest]:
    return [request(f"group{run}/{i}", 64, 128, 8) for i in range(16)]


def ragged(run: int) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    lengths = [256 if i in (3, 11) else int(rng.integers(8, 32)) for i in range(16)]
    return [request(f"ragged{run}/{i}", 64, n, 8) for i, n in enumerate(lengths)]


def single(run: int) -> list[SampleRequest]:
    return [request(f"single{run}", 64, 128, 1)]


def request(name: str, num_prompt: int, num_new: int, num_samples: int) -> SampleRequest:
    prompt = np.random.default_rng(abs(hash(name)) % 2**32).integers(2, SMOLLM2.vocab_size, num_prompt)
    params = SamplingParams(max_tokens=num_new, stop=(), seed=0)
    return SampleRequest(name, tuple(prompt.tolist()), params, num_samples)


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median wall time of `call`, compiled and run once before."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def draw(key: int, *shape: int, dtype: Any) -> jax.Array:
    return (0.02 * jax.random.normal(jax.random.key(key), shape, jnp.float32)).astype(dtype)


@dataclasses.dataclass
class Gemms:
    """The model's matrix products at 128 rows, timed whenever asked, so that they see the load that the engine sees."""

    weights: Any
    dtype: Any

    def __post_init__(self) -> None:
        layers = self.weights["layers"]
        shared = {name: layers[0][name].shape for name in ("qkv", "o", "gate_up", "down")}
        self.inputs = {name: draw(0, ROWS, shape[0], dtype=self.dtype) for name, shape in shared.items()}
        self.inputs["head"] = draw(0, ROWS, SMOLLM2.hidden_size, dtype=self.dtype)
        self.head = jnp.array(decoder.unembedding(self.weights).T)
        self.big = draw(1, 2048, 2048, dtype=self.dtype)
        self.multiply = jax.jit(lambda x, ws: [x @ w for w in ws])
        self.rates: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Appends the rate of each product, in GFLOP/s."""
        cases = {
            name: [self.head] if name == "head" else [layer[name] for layer in self.weights["layers"]]
            for name in self.inputs
        }
        for name, ws in cases.items():
            self._note(name, self.inputs[name], ws, 3)
        self._note("2048x2048", self.big, [self.big], 3)

    def _note(self, name: str, x: jax.Array, ws: list[jax.Array], repeats: int) -> None:
        operations = sum(2 * x.shape[0] * w.shape[0] * w.shape[1] for w in ws)
        rate = operations / seconds(lambda: self.multiply(x, ws), repeats) / 1e9
        self.rates.setdefault(name, []).append(rate)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(rates) for name, rates in self.rates.items()}

    def iteration_ms(self) -> float:
        """All products of one decode iteration at 128 rows, at their median rates."""
        rates, total = self.medians(), 0.0
        for name in ("qkv", "o", "gate_up", "down"):
            shape = self.weights["layers"][0][name].shape
            total += SMOLLM2.num_layers * 2 * ROWS * shape[0] * shape[1] / rates[name]
        shape = self.head.shape
        return (total + 2 * ROWS * shape[0] * shape[1] / rates["head"]) / 1e6


def parts(dtype: Any) -> dict[str, float]:
    """Milliseconds an iteration of what isn't a matrix product, at 128 rows, 16 prompts of 64, 64 own tokens."""
    K, h = SMOLLM2.num_kv_heads, SMOLLM2.head_dim
    q = draw(0, ROWS, SMOLLM2.num_heads, h, dtype=dtype)
    G = SMOLLM2.num_heads // K
    prompt, own_k = draw(1, 16, K, 64, h, dtype=dtype), draw(2, ROWS, K, 64, h, dtype=dtype)
    own = [draw(i, ROWS, K, G + 64, h, dtype=dtype) for i in range(8)]
    row = jnp.arange(ROWS, dtype=jnp.int32)
    full = jnp.full(ROWS, 64, jnp.int32)

    @jax.jit
    def attend(own: list[jax.Array]) -> list[jax.Array]:
        return [
            attention.decode_shared(
                q, prompt, prompt, full[:16], row.reshape(16, 8), row // 8, row % 8, own_k, x, full
            )[0]
            for x in own
        ]

    logits = draw(2, ROWS, SMOLLM2.vocab_size, dtype=jnp.float32) * 100
    rows = SamplerRows(
        jnp.zeros((ROWS, 2), jnp.uint32), row, jnp.ones(ROWS), row * 0, jnp.ones(ROWS), jnp.zeros(ROWS)
    )
    return {
        "attention": seconds(lambda: attend(own)) / len(own) * SMOLLM2.num_layers * 1e3,
        "sampling": seconds(lambda: sample(logits, rows, truncates=False)) * 1e3,
    }


def measure(dtype: Any, repeats: int) -> dict[str, Any]:
    """Every workload in one dtype: tokens/s, the bound, and where a decode iteration's time goes."""
    params = decoder.init_params(SMOLLM2, jax.random.key(0))
    weights = jax.block_until_ready(decoder.unstack(params, SMOLLM2, dtype))
    del params
    engine = Engine(SMOLLM2, EngineSettings(max_slots=ROWS, dtype=dtype), NoText())
    engine.load(weights, version=0)
    gemms = Gemms(weights, dtype)
    out: dict[str, Any] = {}
    for workload in (group, ragged, single):
        name = workload.__name__
        start = time.perf_counter()
        engine.generate(workload(0))
        cold, rates = time.perf_counter() - start, []
        for run in range(1, repeats + 1):
            gemms.measure()
            before, start = engine.stats(), time.perf_counter()
            engine.generate(workload(run))
            rates.append((engine.stats().num_tokens - before.num_tokens) / (time.perf_counter() - start))
            gemms.measure()
        after = engine.stats()
        iterations = after.num_iterations - before.num_iterations
        out[name] = {
            "tokens_per_second": statistics.median(rates),
            "cold_seconds": cold,
            "iteration_ms": 1e3 * (after.decode_seconds - before.decode_seconds) / iterations,
            "prefill_seconds": after.prefill_seconds - before.prefill_seconds,
            "host_ms_per_iteration": 1e3 * (after.host_seconds - before.host_seconds) / iterations,
            "occupancy": (after.row_iterations - before.row_iterations)
            / (after.padded_row_iterations - before.padded_row_iterations),
            "recompiled": after.num_compilations - before.num_compilations,
        }
    out["gemm_gflops"] = gemms.medians()
    out["gemm_ms"] = gemms.iteration_ms()
    out["parts_ms"] = parts(dtype)
    rate = max(rate for name, rate in gemms.medians().items() if name != "2048x2048")
    out["bound"] = rate * 1e9 / (2 * num_parameters(SMOLLM2))
    return out


def describe(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: bound {result['bound']:.0f} tokens/s; GEMM GFLOP/s:",
          ", ".join(f"{k} {v:.0f}" for k, v in result["gemm_gflops"].items()))  # fmt: skip
    for workload in ("group", "ragged", "single"):
        r = result[workload]
        share = f" ({r['tokens_per_second'] / result['bound']:.0%} of the bound)" if workload == "group" else ""
        print(f"  {workload}: {r['tokens_per_second']:.0f} tokens/s{share}, {r['iteration_ms']:.1f} ms an iteration,"
              f" host {r['host_ms_per_iteration']:.2f} ms, prefill {r['prefill_seconds']:.2f} s,"
              f" occupancy {r['occupancy']:.0%}, {r['recompiled']} recompilations,"
              f" first run {r['cold_seconds']:.0f} s")  # fmt: skip
    named = result["gemm_ms"] + sum(result["parts_ms"].values())
    rest = result["group"]["iteration_ms"] - named
    print(f"  an iteration of group: GEMMs {result['gemm_ms']:.0f} ms, "
          + ", ".join(f"{k} {v:.0f} ms" for k, v in result["parts_ms"].items()) + f", rest {rest:.0f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    results = {}
    for name in args.dtype:
        results[name] = measure(jnp.dtype(name), args.repeats)
        describe(name, results[name])
    best = max(results, key=lambda name: results[name]["group"]["tokens_per_second"])
    ours, bound = results[best]["group"]["tokens_per_second"], results[best]["bound"]
    print(json.dumps({
        "name": "rollout",
        "ours": round(ours, 1),
        "against": "the bound of this machine's best matrix product at 128 rows, same dtype, same run",
        "theirs": round(bound, 1),
        "ratio": round(ours / bound, 3),
        "unit": "tokens/s",
        "conditions": {
            "model": "SmolLM2-135M shapes, random weights", "workload": "16 x 64 prompt tokens x 8 samples x 128 new",
            "dtype": best, "single_stream": round(results[best]["single"]["tokens_per_second"], 1),
            "ragged": round(results[best]["ragged"]["tokens_per_second"], 1),
            "other_dtypes": {n: round(r["group"]["tokens_per_second"], 1) for n, r in results.items() if n != best},
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}", "jax": jax.__version__,
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
