"""The fused loss against others, at a vocabulary of 248k: log-probs of given tokens, and the gradient of hidden states.

    python benchmarks/loss.py [--vocab 248320] [--hidden 512] [--tokens 1024]

Measured in one process, in turns: the fused loss (models/logprobs.py), a plain log-softmax, optax's cross-entropy, and
tokamax's `chunked_xla` where it is installed. Memory is what the compiler says of temporaries; the head is frozen, as
with LoRA. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from locojax.models.logprobs import target_logprobs

MIB = 1 << 20
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(hidden [N, D], head [D, V], targets i32[N]) -> the sum of log-probs."""


def fused(hidden: jax.Array, head: jax.Array, targets: jax.Array, *, tile: int) -> jax.Array:
    active = jnp.ones(targets.shape[0], bool)
    return jnp.sum(target_logprobs(hidden, head, targets[:, None], active, tile=tile, train_head=False)[0])


def plain(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(jnp.matmul(hidden, head, preferred_element_type=jnp.float32), axis=-1)
    return jnp.sum(jnp.take_along_axis(logp, targets[:, None], axis=-1))


def of_optax(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
    return -jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def of_tokamax(hidden: jax.Array, head: jax.Array, targets: jax.Array, *, lib: Any) -> jax.Array:
    return -lib.linear_softmax_cross_entropy_loss(hidden, targets, head, reduction="sum", implementation="chunked_xla")


def losses(tile: int) -> dict[str, Loss]:
    """All that can be run here, ours first."""
    found: dict[str, Loss] = {"fused": partial(fused, tile=tile), "plain log-softmax": plain, "optax": of_optax}
    try:
        import tokamax
    except ImportError:
        print("tokamax is not installed: left out")
        return found
    return {**found, "tokamax chunked_xla": partial(of_tokamax, lib=tokamax)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(options.tokens, options.hidden)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(options.hidden, options.vocab)).astype(np.float32) * 0.02)
    targets = jnp.asarray(rng.integers(0, options.vocab, options.tokens), jnp.int32)
    programs = {
        name: jax.jit(jax.value_and_grad(loss)).lower(hidden, head, targets).compile()
        for name, loss in losses(options.tile).items()
    }
    memory = {name: program.memory_analysis().temp_size_in_bytes / MIB for name, program in programs.items()}
    results = {name: jax.device_get(program(hidden, head, targets)) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.rounds):
        for name, program in programs.items():
            begun = time.perf_counter()
            jax.block_until_ready(program(hidden, head, targets))
            seconds[name].append(time.perf_counter() - begun)
    ours = results["fused"]
    print(f"{'loss':<22}{'seconds':>10}{'temporaries, MiB':>20}{'largest difference of gradients':>34}")
    for name in programs:
        apart = float(np.max(np.abs(results[name][1] - ours[1])))
        print(f"{name:<22}{statistics.median(seconds[name]):>10.3f}{memory[name]:>20.1f}{apart:>34.1e}")
    others = [name for name in programs if name != "fused"]
    rival = "tokamax chunked_xla" if "tokamax chunked_xla" in programs else "plain log-softmax"
    print(
        json.dumps(
            {
                "name": "loss",
                "ours": statistics.median(seconds["fused"]),
                "against": rival,
                "theirs": statistics.median(seconds[rival]),
                "ratio": statistics.median(seconds[rival]) / statistics.median(seconds["fused"]),
                "unit": "seconds",
                "conditions": {
                    "tokens": options.tokens, "hidden": options.hidden, "vocab": options.vocab, "tile": options.tile,
                    "dtype": "float32", "device": jax.devices()[0].device_kind, "jax": jax.__version__,
                    "seconds": {name: statistics.median(seconds[name]) for name in others},
                    "temporaries_mib": memory,
                },
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
