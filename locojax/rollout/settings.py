"""How an engine runs, and the memory and layout that follow from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from locojax.errors import ConfigError
from locojax.models.attention import Kernel, kernel_of
from locojax.models.kernels import ragged_fits
from locojax.models.native import build, ops
from locojax.models.spec import ModelSpec
from locojax.rollout.layout_rows import RowsLayout
from locojax.rollout.layouts import Contiguous, Layout, Paged
from locojax.rollout.pages import ContiguousMemory, KvMemory, PagedMemory
from locojax.rollout.rows import RowsMemory
from locojax.rollout.scheduler import Scheduler
from locojax.types import Kernels, LogprobsOf

EXACT_ROWS = 64
"""From so many rows up, XLA's fp32 GEMMs on CPU sum in one order whatever their number of rows, so that a sampled
token's log-prob was within 2e-6 nats of the trainer's. With fewer they differed by 6e-6 on average, 5e-5 at most."""

LEAST_BETWEEN = 16
"""Fewest rows of `sizes_between`."""

PLAIN_ROWS = 64
"""With fewer rows and fixed shapes, the program that can truncate serves all: its cost is a copy of the logits."""


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """How an engine runs. Results don't depend on any of it but `logprobs_of`, `dtype` and `seed`.

    Attributes:
      max_slots: samples that run at once.
      min_rows: fewest rows that are decoded together, empty ones included (`EXACT_ROWS`).
      max_prefill_tokens: prompt tokens computed in one go; longer prompts are computed in chunks of it.
      max_iterations: decode iterations in one program run, 8 at most while a sample has stop strings or is streamed.
      turn_seconds: what one program run may take, about; fewer iterations are run where they would take longer. None:
        any time.
      kv_bytes: memory for keys and values, in bytes.
      layout: "contiguous" where gathers are slow (CPU) and work comes in waves of a kind, "paged" for a paged
        attention kernel, "rows" for a server on CPU: nothing compiles for the lengths and numbers that arrive.
      page_size: tokens of a page, paged and rows only; a power of two. Rows: 128 is good.
      max_context: the model's own, or a lower limit on prompt and completion together.
      logprobs_of: which distribution returned log-probs are of; see `types.LogprobsOf`.
      dtype: of weights' products and of the stored keys and values. Logits are fp32 always.
      seed: what requests without a seed of their own derive theirs from.
      attention: the form that decoding over pages takes. auto: `tpu` on TPU, if the model's heads allow it.
      kernels: whether decoding over rows attends by the C++ kernel; see `models.native.build`.
    """

    max_slots: int = 128
    min_rows: int = 1
    max_prefill_tokens: int = 1024
    max_iterations: int = 32
    kv_bytes: int = 4 << 30
    layout: Literal["contiguous", "paged", "rows"] = "contiguous"
    page_size: int = 16
    max_context: int | None = None
    logprobs_of: LogprobsOf = "raw"
    dtype: Any = jnp.float32
    prefix_cache: bool = True
    seed: int = 0
    attention: Kernel | Literal["auto"] = "auto"
    kernels: Kernels = "auto"
    turn_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_slots", "min_rows", "max_prefill_tokens", "max_iterations", "kv_bytes", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"The engine's {name} is out of range", got=getattr(self, name), expected="1 or more")
        if self.turn_seconds is not None and not self.turn_seconds > 0:
            raise ConfigError("The engine's turn_seconds must be above 0", got=self.turn_seconds)
        if self.page_size & (self.page_size - 1):
            raise ConfigError("The engine's page_size must be a power of two", got=self.page_size)


def row_sizes(max_slots: int, min_rows: int = 1) -> tuple[int, ...]:
    """Numbers of rows that decode programs are compiled for: quarters of the most, down to `min_rows`."""
    sizes = [max_slots]
    while sizes[-1] >= 16:
        sizes.append(-(-sizes[-1] // 4))
    least = min(max(min_rows, 1), max_slots)
    return tuple(sorted({least, *(size for size in sizes if size > least)}))


def sizes_between(sizes: Sequence[int]) -> tuple[int, ...]:
    """Halves between quarters, where a program of fewer rows is clearly faster: the products of SmolLM2's layers take
    98 ms with 128 rows, 54 with 64, 36 with 32, 24 with 16 and 20 with 8 (two cores, bf16)."""
    return tuple(size // 2 for before, size in itertools.pairwise(sizes) if size // 2 >= max(2 * before, LEAST_BETWEEN))


def scheduler_of(memory: KvMemory, settings: EngineSettings) -> Scheduler:
    """The scheduler that `settings` ask for."""
    return Scheduler(
        memory,
        max_iterations=settings.max_iterations,
        max_iterations_watched=min(8, settings.max_iterations),
        prefix_cache=settings.prefix_cache,
    )


def memory_and_layout(spec: ModelSpec, settings: EngineSettings) -> tuple[KvMemory, Layout]:
    """The books and the device side of the KV memory that `settings` asks for.

    Raises:
      ConfigError: kv_bytes don't hold a single token.
    """
    bytes_per_token = 2 * spec.num_layers * spec.kv_size * jnp.dtype(settings.dtype).itemsize
    max_tokens = settings.kv_bytes // bytes_per_token
    sizes, max_entries = row_sizes(settings.max_slots, settings.min_rows), 2 * settings.max_slots
    if settings.layout == "paged":
        num_pages = max_tokens // settings.page_size
        paged = PagedMemory(num_pages, settings.page_size, sizes, max_entries)
        if num_pages:
            return paged, Paged(num_pages, settings.page_size, _paged_kernel(spec, settings))
    elif settings.layout == "rows":
        context = min(settings.max_context or spec.max_context, spec.max_context)
        rows = RowsMemory(max_tokens, settings.page_size, sizes, max_entries, context, sizes_between(sizes))
        if rows.capacities:
            native = build.chosen(settings.kernels, jnp.dtype(settings.dtype).name) and ops.attends(
                spec.num_heads, spec.num_kv_heads, spec.head_dim
            )
            return rows, RowsLayout(rows.pool.num_pages, settings.page_size, settings.max_slots, context, native)
    elif max_tokens:
        return ContiguousMemory(max_tokens, sizes, max_entries), Contiguous()
    raise ConfigError(
        "The engine's kv_bytes are too few", got=settings.kv_bytes, expected=f"many times {bytes_per_token} (one token)"
    )


def _paged_kernel(spec: ModelSpec, settings: EngineSettings) -> Kernel:
    fits = ragged_fits(spec.num_kv_heads, spec.head_dim, settings.dtype)
    if settings.attention == "tpu" and not fits:
        raise ConfigError(
            "The kernel for paged attention can't be compiled for this model",
            got=f"{spec.num_kv_heads} kv heads of {spec.head_dim} in {jnp.dtype(settings.dtype).name}",
            expected="heads of a multiple of 128, and kv heads that fill tiles of 8 words",
            remedy='Set attention="plain"',
        )
    if settings.attention == "auto":
        return kernel_of(jax.default_backend()) if fits else "plain"
    return settings.attention
