"""The C++ kernels for bf16 on CPU against what XLA makes of the same, at SmolLM2-135M's shapes.

  layers N     the products of all 30 layers with N rows, one after another as decoding does them
  attend N     64 tokens of 128 rows, the last of N, through 30 layers' attention: turned, stored, and attended from
  norms        30 norms of 1024 tokens, one after another
  masses       the head for 128 rows, each with an adapter of rank 32: what drawing a token asks
  packed       attention within rows of 4 x 256 tokens, forward and backward, of one layer
  adapted      training's joined gate and up of one layer, 4 rows of 256 tokens with adapters of their own, forward and
               backward
  gated        the activation after it, forward and backward
  loss         log-probs of 512 targets under the adapted head, forward and backward
  loss bare    the same where the head isn't adapted

Kernels and XLA take turns, so that both meet the same machine; a line is the median of `--repeats` of each. The bounds
are the machine's own: a product of 2048 x 2048 by XLA, in the same run. The last line printed is one JSON object; its
`ratio` is the worst line's.

    python benchmarks/kernels.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from locojax.models import attention, decoder, lora
from locojax.models.dense import adapted_rows, dense, gated, matmul, rms_norm
from locojax.models.logprobs import target_logprobs
from locojax.models.lora import Adapters
from locojax.models.native import build, ops
from locojax.models.packed_logprobs import packed_target_logprobs
from locojax.models.spec import RopeSpec
from locojax.rollout import head
from locojax.rollout.layout_rows import RowsLayout
from locojax.rollout.pages import Shape
from locojax.rollout.programs import pick_adapters

D, F, V, LAYERS, HEADS, KV_HEADS, HEAD_DIM, RANK = 576, 1536, 49152, 30, 9, 3, 64, 32
MATRICES = ((D, D + 2 * KV_HEADS * HEAD_DIM), (D, D), (D, 2 * F), (F, D))  # qkv, o, gate and up, down
ROWS = 128
DECODED, PAGE = 64, 128  # tokens in one call of `attend`, and those that an array of a row begins with

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def draw(*shape: int, scale: float = 0.03) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape) * scale, jnp.bfloat16)


def weighed(out: jax.Array) -> jax.Array:
    """A sum whose cotangent differs from number to number: XLA multiplies by one that doesn't in a shorter way."""
    weights = np.random.default_rng(0).normal(size=out.shape).astype(np.float32)
    return jnp.sum(out.astype(jnp.float32) * weights)


def layers(rows: int) -> tuple[Case, Case]:
    x, weights = draw(rows, D), [[draw(*shape) for shape in MATRICES] for _ in range(LAYERS)]

    def run(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def all_layers(x: jax.Array, weights: Any) -> jax.Array:
            for qkv, o, gate_up, down in weights:
                x = x + product(product(x, qkv)[:, :D], o)
                x = x + product(product(x, gate_up)[:, :F], down)
            return x

        return all_layers

    return (run(ops.matmul), (x, jax.tree.map(ops.pack, weights))), (run(matmul), (x, weights))


def attend(tokens: int) -> tuple[Case, Case]:
    q, k = draw(ROWS, HEADS, HEAD_DIM, scale=1.0), draw(ROWS, KV_HEADS, HEAD_DIM, scale=1.0)
    rope = tuple(each[:, 0] for each in decoder.rope_tables(RopeSpec(1e4), HEAD_DIM, jnp.zeros((ROWS, 1), jnp.int32)))
    caches = [tuple((draw(ROWS, KV_HEADS, tokens, HEAD_DIM, scale=1.0),) for _ in "kv") for _ in range(LAYERS)]

    def run(native: bool) -> Callable[..., jax.Array]:
        layout = RowsLayout(0, PAGE, 0, tokens, native)
        tables = layout.tables([], ROWS, Shape(0, 0, ROWS, tokens), 1)

        def some_tokens(q: jax.Array, caches: Any) -> Any:
            def one(own: jax.Array, carry: Any) -> Any:
                q, caches = carry
                kept = []
                for layer in caches:
                    q, layer = layout.decode(layer, tables, jnp.full(ROWS, own), q, k, k, rope)
                    kept.append(layer)
                return q, kept

            return jax.lax.fori_loop(jnp.int32(tokens - DECODED), jnp.int32(tokens), one, (q, caches))

        return some_tokens

    return (run(True), (q, caches)), (run(False), (q, caches))


def norms() -> tuple[Case, Case]:
    x, weight = draw(8 * ROWS, D, scale=1.0), draw(D)

    def run(form: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def all_layers(x: jax.Array, weight: jax.Array) -> jax.Array:
            for _ in range(LAYERS):
                x = form(x, weight, 1e-5)
            return x

        return all_layers

    return (run(ops.rms_norm), (x, weight)), (run(rms_norm), (x, weight))


def masses() -> tuple[Case, Case]:
    table, hidden = draw(V, D), draw(ROWS, D, scale=1.0)
    stack = Adapters({"head": {"a": draw(2, D, RANK), "b": draw(2, RANK, V)}}, jnp.ones(2))
    one, index = jnp.ones(ROWS), jnp.ones(ROWS, jnp.int32)

    def run(weights: Any, hidden: jax.Array, stack: Adapters) -> Any:
        mine = pick_adapters(stack, index, packed=True)
        logits = head.logits({"layers": [], "embed": table, **weights}, hidden, mine)
        found, _ = logits.masses(one, one == 1)
        return found, logits.block(index)

    return (run, ({decoder.UNEMBED: ops.pack(table.T)}, hidden, lora.packed(stack))), (run, ({}, hidden, stack))


def packed() -> tuple[Case, Case]:
    until = jnp.full((4, 256), 256, jnp.int32)
    inputs = [draw(4, 256, heads, HEAD_DIM, scale=1.0) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def run(kernel: attention.PackedKernel) -> Callable[..., Any]:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return weighed(attention.packed(q, k, v, until, kernel=kernel))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))

    return (run("native"), tuple(inputs)), (run("plain"), tuple(inputs))


def adapted() -> tuple[Case, Case]:
    x, w, scale = draw(4, 256, D, scale=1.0), draw(D, 2 * F), jnp.ones(4)
    factors = [(draw(4, D, RANK).astype(jnp.float32), draw(4, RANK, F).astype(jnp.float32)) for _ in range(2)]
    lengths = jnp.full(4, 256, jnp.int32)

    def ours(x: jax.Array, factors: Any, w: ops.Packed, w_t: ops.Packed) -> jax.Array:
        return weighed(adapted_rows(x, w, w_t, factors, scale, lengths))

    def theirs(x: jax.Array, factors: Any, w: jax.Array, w_t: jax.Array) -> jax.Array:
        more = lora.deltas(x, [{"a": a, "b": b} for a, b in factors], scale, None)
        return weighed(dense(x, w, w_t, train=False) + jnp.concatenate(more, -1))

    grads = (jax.value_and_grad(form, argnums=(0, 1)) for form in (ours, theirs))
    return (next(grads), (x, factors, ops.pack(w), ops.pack(w.T))), (next(grads), (x, factors, w, w.T))


def activations() -> tuple[Case, Case]:
    def theirs(both: jax.Array) -> jax.Array:
        gate, up = jnp.split(both, 2, -1)
        return jax.nn.silu(gate) * up

    def run(form: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda both: weighed(form(both)))

    inputs = (draw(1024, 2 * F, scale=1.0),)
    return (run(gated), inputs), (run(theirs), inputs)


def loss(head_is_adapted: bool) -> tuple[Case, Case]:
    table, hidden, inner, b = draw(V, D), draw(512, D, scale=1.0), draw(512, RANK), draw(RANK, V).astype(jnp.float32)
    targets, on = jnp.arange(512, dtype=jnp.int32)[:, None], jnp.ones(512, bool)

    def chosen(inner: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        return (inner, b) if head_is_adapted else None

    def ours(hidden: jax.Array, inner: jax.Array, b: jax.Array, unembedding: ops.Unembedding) -> jax.Array:
        return jnp.sum(packed_target_logprobs(hidden, unembedding, chosen(inner, b), targets, on, on))

    def theirs(hidden: jax.Array, inner: jax.Array, b: jax.Array, table: jax.Array) -> jax.Array:
        found, _ = target_logprobs(
            hidden, table, targets, on, tile=128, low_rank=chosen(inner, b), train_head=False, vocab_first=True
        )
        return jnp.sum(found)

    learns = (0, 1, 2) if head_is_adapted else 0
    both = (jax.value_and_grad(form, argnums=learns) for form in (ours, theirs))
    unembedding = ops.Unembedding.of(table.T)
    return (next(both), (hidden, inner, b, unembedding)), (next(both), (hidden, inner, b, table))


LINES: dict[str, Callable[[], tuple[Case, Case]]] = {
    "layers 1": lambda: layers(1), "layers 8": lambda: layers(8), "layers 128": lambda: layers(128),
    "layers 1024": lambda: layers(1024), "attend 128": lambda: attend(128), "attend 256": lambda: attend(256),
    "norms": norms, "masses": masses, "packed": packed, "adapted": adapted, "gated": activations,
    "loss": lambda: loss(True), "loss bare": lambda: loss(False),
}  # fmt: skip


def timed(cases: tuple[Case, Case], repeats: int) -> list[float]:
    """Milliseconds of each case, medians of runs in turns."""
    programs = [(jax.jit(function), arguments) for function, arguments in cases]
    for program, arguments in programs:
        jax.block_until_ready(program(*arguments))
    found: list[list[float]] = [[], []]
    for _ in range(repeats):
        for times, (program, arguments) in zip(found, programs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(times) for times in found]


def gemm_gflops(repeats: int) -> float:
    x = draw(2048, 2048)
    case: Case = (jnp.matmul, (x, x))
    return 2 * 2048**3 / min(timed((case, case), repeats)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    reason = build.why_not("bfloat16")
    if reason is not None:
        raise SystemExit(f"There are no C++ kernels to measure: {reason}")
    print(f"a product of 2048 x 2048 by XLA: {gemm_gflops(repeats):.0f} GFLOP/s")
    print(f"{'line':12} {'ours ms':>9} {'XLA ms':>9} {'ratio':>7}")
    ratios, lines = {}, {}
    for name, make in LINES.items():
        ours, theirs = timed(make(), repeats)
        ratios[name], lines[name] = theirs / ours, {"ours_ms": ours, "xla_ms": theirs}
        print(f"{name:12} {ours:9.2f} {theirs:9.2f} {ratios[name]:7.2f}", flush=True)
    worst = min(ratios, key=ratios.__getitem__)
    print(json.dumps({
        "name": "kernels", "ours": lines[worst]["ours_ms"], "against": f"XLA on the line where it is nearest: {worst}",
        "theirs": lines[worst]["xla_ms"], "ratio": ratios[worst], "unit": "ms", "conditions": {"lines": lines},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
