"""Compiling what a workload will need before it comes, by running the engine's own code on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from locojax.rollout.programs import Compiler, DecodeRows


class ShapesOnly(Compiler):
    """Compiles what it is asked to run, in another compiler, and returns shapes in place of arrays.

    A decode program is taken to sample token 0 for as many iterations as it may run.
    """

    def __init__(self, real: Compiler):
        super().__init__(real.spec)
        self._real = real

    def keys(self, name: str) -> list[Any]:
        return self._real.keys(name)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        return jax.eval_shape(function, *args)

    def call(self, name: str, key: Any, *args: Any, **static: Any) -> Any:
        outputs = self._real.prepare(name, key, *args, **static).out_info
        if name != "decode":
            return outputs
        rows: DecodeRows = args[3]
        num_iterations = int(args[4])
        gained = np.minimum(num_iterations + rows.fresh.astype(np.int32), rows.remaining) * rows.alive
        cache, drawn, _, _ = outputs
        nothing = jax.tree.map(lambda out: np.zeros(out.shape, out.dtype), drawn)
        return cache, nothing, gained, np.asarray(num_iterations, np.int32)


def stagger(max_tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Lengths under which a batch of samples passes through every smaller number of rows: the first runs to its end,
    those that only a larger size holds stop at once, the largest size's first."""
    ends = sorted(sizes, reverse=True)
    return [
        most if n == 0 else min(most, 1 + sum(n < size for size in ends[1:])) for n, most in enumerate(max_tokens)
    ]
