"""Compiling what a workload will need before it comes, by running the engine's own code on shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from locojax.models.executables import Program
from locojax.models.spec import ModelSpec
from locojax.rollout import stacks
from locojax.rollout.batch import decode_rows
from locojax.rollout.layouts import Cache, Layout
from locojax.rollout.pages import Expected, KvMemory, Shape
from locojax.rollout.prefilling import Loaded, Prefiller
from locojax.rollout.programs import Compiler, DecodeRows
from locojax.rollout.rows import RowsMemory
from locojax.rollout.settings import PLAIN_ROWS, EngineSettings
from locojax.types import SampleRequest

log = logging.getLogger(__name__)

PINNED_STOPS = 16
"""Room for stop ids where shapes are fixed beforehand."""


class ShapesOnly(Compiler):
    """Compiles what it is asked to run, in another compiler, and returns shapes in place of arrays.

    A decode program is taken to sample token 0 until it would return.
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
        left = (rows.remaining - rows.fresh) * rows.alive
        num_iterations = 0
        while num_iterations < int(args[4]) and np.sum(left > num_iterations) > int(args[5]):
            num_iterations += 1
        gained = np.minimum(num_iterations + rows.fresh.astype(np.int32), rows.remaining) * rows.alive
        cache, drawn, _, _ = outputs
        nothing = jax.tree.map(lambda out: np.zeros(out.shape, out.dtype), drawn)
        return cache, nothing, gained, np.asarray(num_iterations, np.int32)


def expected(
    requests: Sequence[SampleRequest],
    max_tokens: Sequence[int],
    longest_prompt: int,
    num_slots: int,
    num_hosts: int = 1,
) -> Expected:
    """What requests like these, arriving together, will ask of each host's memory. max_tokens: of a sample of each."""
    longest = max([longest_prompt, *(len(request.prompt) for request in requests)])
    if sum(request.num_samples for request in requests) <= num_slots * num_hosts:
        return Expected(longest)
    num_prompts = min(-(-len(requests) // num_hosts), num_slots)
    return Expected(longest, num_prompts, max(max_tokens))


def stagger(max_tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Lengths under which a batch of samples passes through every smaller number of rows: the last one, before which
    all others have had slots, runs to its end; those that only a larger size holds stop at once, the largest size's
    first."""
    ends = sorted(sizes, reverse=True)
    lengths = [
        most if n == 0 else min(most, 1 + sum(n < size for size in ends[1:]))
        for n, most in enumerate(reversed(max_tokens))
    ]
    return lengths[::-1]


def prepare_waves(
    compiler: Compiler,
    spec: ModelSpec,
    settings: EngineSettings,
    layout: Layout,
    loaded: Loaded,
    prefiller: Prefiller,
    num_tokens: int,
) -> None:
    """Compiles what a prompt takes that comes when a slot gets free, in each shape in which all slots are taken."""
    shapes = {key[1] for key in compiler.keys("decode")}
    most = max(shape.rows for shape in shapes)
    for shape in shapes:
        if shape.rows == most and num_tokens <= settings.max_prefill_tokens:
            cache = jax.eval_shape(partial(layout.new_cache, spec, shape, settings.dtype))
            prefiller.prepare_alone(loaded, cache, shape, num_tokens, settings.page_size)


def use_spare(memory: KvMemory, programs: Sequence[Program]) -> Sequence[Program]:
    """Has the spare shapes used once all of their `programs` are there; returns what is yet to be waited for."""
    if not programs or not isinstance(memory, RowsMemory) or not all(each.compiled.done() for each in programs):
        return programs
    failed = [error for each in programs if (error := each.compiled.exception()) is not None]
    if failed:
        log.warning("numbers of rows between the larger ones aren't used, samples take the next larger: %s", failed[0])
    else:
        memory.use_spare()
    return ()


def prepare_server(
    compiler: Compiler,
    spec: ModelSpec,
    settings: EngineSettings,
    layout: Layout,
    shapes: Sequence[Shape],
    spare: Sequence[Shape],
    loaded: Loaded,
    prefiller: Prefiller,
) -> list[Program]:
    """Compiles what `Engine.warm_up_server` promises: decoding in each shape, prefill, moves between the shapes.

    Returns when a short prompt can be answered, and nothing is left to compile: programs for longer prompts and more
    samples that an earlier process kept are read behind, the smaller ones first. Those of the `spare` shapes are made
    behind in any case; they are returned, and all are done when such a shape can be used.
    """
    count = np.zeros((), np.int32)

    def new_cache(shape: Shape) -> Cache:
        return jax.eval_shape(partial(layout.new_cache, spec, shape, settings.dtype))

    def prepare_decode(shape: Shape, cache: Cache) -> list[Program]:
        rows = decode_rows([], shape.rows, PINNED_STOPS, layout.tables([], shape.rows, shape, 1))
        return [
            compiler.prepare(
                "decode", (loaded.signature, shape, shape.rows, PINNED_STOPS, 1, truncates, 0), loaded.weights,
                loaded.adapters, layout.decode_part(cache), rows, count, count, truncates=truncates, num_top=0,
            )
            for truncates in sorted({True, shape.rows < PLAIN_ROWS})
        ]  # fmt: skip

    cache = new_cache(shapes[0])
    urgent = prepare_decode(shapes[0], cache)
    stack = loaded.adapters
    if stack is not None and stack.scale.ndim:
        nothing = stacks.fitted(stack, {})
        urgent.append(compiler.prepare("set_adapter", loaded.signature, stack, nothing, np.float32(0), count))
    urgent += prefiller.prepare(loaded, cache, settings.page_size)[:1]
    for shape in shapes[1:]:
        prepare_decode(shape, new_cache(shape))
    layout.warm_moves(spec, shapes, settings.dtype)
    behind = [program for shape in spare for program in prepare_decode(shape, new_cache(shape))]
    if spare:
        behind.append(compiler.later(partial(layout.warm_moves, spec, [*shapes, *spare], settings.dtype)))
    compiler.wait(urgent, behind)
    return behind
