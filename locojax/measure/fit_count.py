"""Arithmetic and traffic of a program, counted from what jax traced: the compiler's own count takes a loop's body once.

Counted are products of matrices, and what passes between devices where the program says so itself (over the fsdp axis);
loops count by their length. The compiler fuses most else away. Figures are of one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one run of a program, on one device.

    Attributes:
      flops: of products. memory_bytes: their operands and results, each read or written once.
      network_bytes: received from other devices.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    network_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * value for value in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What a trace doesn't tell.

    Attributes:
      trips: of loops whose number of rounds is known only when they run.
      automatic_parts: devices that the compiler splits each product over, besides those the program names.
      sequence: devices that rows are split over; the one that has their ends attends to most.
    """

    trips: int = 1
    automatic_parts: int = 1
    sequence: int = 1


def count(traced: Any, assumed: Assumptions) -> Work:
    """traced: a `jax.stages.Traced`."""
    work = _of_jaxpr(traced.jaxpr.jaxpr, assumed)
    parts = assumed.automatic_parts
    return Work(work.flops / parts, work.memory_bytes / parts, work.network_bytes)


def _of_jaxpr(jaxpr: Any, assumed: Assumptions) -> Work:
    total = Work()
    for equation in jaxpr.eqns:
        rule = _RULES.get(equation.primitive.name, _inner)
        total = total + rule(equation, assumed)
    return total


def _inner(equation: Any, assumed: Assumptions) -> Work:
    """Whatever programs are among an equation's parameters, once each."""
    total = Work()
    for name, value in equation.params.items():
        # Rules of custom derivatives are functions beside the program, not run by it.
        if name not in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"):
            for found in jax.tree.leaves(value, is_leaf=_is_program):
                if _is_program(found):
                    total = total + _of_jaxpr(getattr(found, "jaxpr", found), assumed)
    return total


def _is_program(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def _scan(equation: Any, assumed: Assumptions) -> Work:
    return _of_jaxpr(equation.params["jaxpr"].jaxpr, assumed) * equation.params["length"]


def _while(equation: Any, assumed: Assumptions) -> Work:
    return _of_jaxpr(equation.params["body_jaxpr"].jaxpr, assumed) * assumed.trips


def _cond(equation: Any, assumed: Assumptions) -> Work:
    branches = [_of_jaxpr(branch.jaxpr, assumed) for branch in equation.params["branches"]]
    return max(branches, key=lambda work: work.flops)


def _bytes(variable: Any) -> float:
    return math.prod(variable.aval.shape) * np.dtype(variable.aval.dtype).itemsize


def _dot(equation: Any, assumed: Assumptions) -> Work:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    flops = 2 * math.prod(out.shape) * math.prod(left.shape[axis] for axis in contracted)
    return Work(flops, sum(_bytes(variable) for variable in (*equation.invars, *equation.outvars)))


def _kernel(equation: Any, assumed: Assumptions) -> Work:
    """A Pallas kernel: its body once for each point of its grid, and its operands and results once.

    Of a causal mask's blocks the kernel skips those above the diagonal, which a trace doesn't show: half of them, or of
    the last of S parts of a row, 1 / 2S.
    """
    grid = equation.params["grid_mapping"].grid
    rounds = math.prod(size for size in grid if isinstance(size, int))
    body = _of_jaxpr(equation.params["jaxpr"], assumed)
    share = 1 - 0.5 / assumed.sequence if str(equation.params.get("name", "")).startswith("splash") else 1.0
    moved = sum(_bytes(variable) for variable in (*equation.invars, *equation.outvars) if variable.aval.shape)
    return Work(body.flops * rounds * share, moved)


def _all_gather(equation: Any, assumed: Assumptions) -> Work:
    size = equation.params["axis_size"]
    return Work(network_bytes=sum(map(_bytes, equation.outvars)) * (size - 1) / size)


def _reduce_scatter(equation: Any, assumed: Assumptions) -> Work:
    size = equation.params["axis_size"]
    return Work(network_bytes=sum(map(_bytes, equation.invars)) * (size - 1) / size)


def _all_reduce(equation: Any, assumed: Assumptions) -> Work:
    """A reduce-scatter and an all-gather; the trace doesn't say over how many devices: of many."""
    return Work(network_bytes=2 * sum(map(_bytes, equation.invars)))


_RULES: Mapping[str, Callable[[Any, Assumptions], Work]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "dot_general": _dot,
    "pallas_call": _kernel,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "psum": _all_reduce,
    "psum_invariant": _all_reduce,
}
