"""What an engine process of `locojax serve` holds in memory: its arrays by shape, and its resident size beside them.

Starts an engine with the server's defaults in this process, samples 128 completions at once (16 prompts of 64 tokens x
8 x 48 new tokens) and trains on 8 x 256 tokens. The resident size is Linux's VmRSS, after the C heap was trimmed.

    python benchmarks/server_memory.py [--model smollm2-135m] [--arrays 20]
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import pathlib
import queue
from typing import Any

from locojax.config import cache_folder

# Before jax is imported: programs that a server on this machine has compiled are found again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from locojax.hosts.protocol import AdapterConfig, CreateModel, OpenSampler, Sample  # noqa: E402
from locojax.hosts.serving_clock import PhaseClock  # noqa: E402
from locojax.hosts.serving_compilations import CompilationCounter  # noqa: E402
from locojax.hosts.serving_memory import GIB, give_back  # noqa: E402
from locojax.hosts.serving_settings import ServeSettings  # noqa: E402
from locojax.hosts.serving_start import start  # noqa: E402
from locojax.types import AdamParams, Datum, SamplingParams  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS, TRAINED_TOKENS = 64, 48, 256


class NoFrontEnd:
    """A link that nobody is at the other end of."""

    num_unacknowledged = 0

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def tell(self, message: Any) -> None: ...


def resident() -> dict[str, float]:
    """GiB now and at most."""
    gc.collect()
    give_back()
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: round(int(found[name].split()[0]) / 2**20, 2) for name in ("VmRSS", "VmHWM")}


def report(when: str, most: int) -> tuple[float, float]:
    """Prints the largest arrays; returns GiB of all of them, and resident."""
    sizes: collections.Counter[Any] = collections.Counter()
    for array in jax.live_arrays():
        sizes[array.shape, str(array.dtype)] += array.nbytes
    arrays, size = sum(sizes.values()) / GIB, resident()
    print(f"{when}: arrays {arrays:.2f} GiB, resident {size['VmRSS']:.2f} GiB (at most {size['VmHWM']:.2f})")
    for (shape, dtype), num_bytes in sizes.most_common(most):
        print(f"  {num_bytes / 2**20:8.0f} MiB  {dtype} {list(shape)}")
    return arrays, size["VmRSS"]


def work(loop: Any) -> None:
    """Samples and trains, as the loop would if it were asked to."""
    trainer, samplers = loop._trainer, loop._samplers
    loop._operations.run(OpenSampler("base"))
    loop._operations.run(CreateModel("model", AdapterConfig(rank=32, seed=0)))
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(3, trainer.spec.vocab_size - 1, count)

    params = SamplingParams(max_tokens=NEW_TOKENS, stop=())
    for i in range(16):
        prompt = tuple(tokens(PROMPT_TOKENS).tolist())
        samplers.add(f"sample{i}", Sample("base", prompt, params, num_samples=8))
    while samplers.num_unfinished:
        samplers.step()
    rows = [tokens(TRAINED_TOKENS + 1) for _ in range(8)]
    called = trainer.begin("model", [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows], "cross_entropy")
    while not called.done:
        trainer.advance([called])
    trainer.optim_step("model", AdamParams())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--arrays", type=int, default=20, metavar="N", help="print the N largest shapes")
    options = parser.parse_args()
    with CompilationCounter() as counter:
        loop = start(ServeSettings(options.model), NoFrontEnd(), PhaseClock(), counter, print)
    report("ready", options.arrays)
    work(loop)
    arrays, size = report("after sampling and training", options.arrays)
    conditions = {"model": options.model, "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    line = {"name": "server_memory", "ours": size, "against": "the arrays it holds", "theirs": round(arrays, 2),
            "ratio": round(size / arrays, 2), "unit": "GiB", "conditions": conditions}  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
