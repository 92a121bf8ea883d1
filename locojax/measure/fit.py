"""Does it fit? The programs of a plan, compiled for a slice that needn't be there, and what the compiler says of them.

libtpu compiles for TPU on any machine; nothing is run and no weights exist. `fit_search` looks for settings that fit.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from locojax.errors import ConfigError
from locojax.measure import fit_apart
from locojax.measure.fit_chips import CPU, GIB, Chip, Slice
from locojax.measure.fit_count import Assumptions, Work, count
from locojax.measure.fit_programs import LOSSES, Engine, Plan, Program, Trainer, heads, target

Say = Callable[[str], None]
"""Told what is being done, as compiling takes a while."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array of a compiled program: its bytes on a device, its shape and where in the source it is made."""

    num_bytes: int
    shape: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What is known of one program, of one device.

    Attributes:
      arguments, outputs, aliased, temporaries: bytes; None where the compiler gave up before it knew. Outputs that take
        an argument's memory are `aliased`, and not counted twice.
      peak: bytes of this program's own memory; where it was refused, what the compiler said that it needs at least.
      beside: what else is resident while it runs, by name: bytes.
      refused: the compiler's words, if it doesn't fit by itself; else None.
      crashed: the compiler didn't say anything about the device's memory, as it came to grief.
      buffers: the largest temporaries.
      seconds: of compiling.
    """

    name: str
    peak: int
    beside: Mapping[str, int]
    work: Work
    arguments: int | None = None
    outputs: int | None = None
    aliased: int | None = None
    temporaries: int | None = None
    refused: str | None = None
    crashed: bool = False
    buffers: tuple[Buffer, ...] = ()
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Bytes in use on a device at this program's peak."""
        return self.peak + sum(self.beside.values())


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome. programs: of the trainer, then of the engine. losses: the loss alone, where it was asked for."""

    plan: Plan
    slice: Slice
    programs: tuple[Compiled, ...]
    losses: tuple[Compiled, ...] = ()

    @property
    def limit(self) -> float:
        """Bytes of a device's memory."""
        return self.slice.chip.hbm_gib * GIB

    @property
    def peak(self) -> int:
        """Bytes on the fullest device, over all programs."""
        return max(program.total for program in self.programs)

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit and not any(program.refused for program in self.programs)

    def failing(self) -> list[Compiled]:
        """Programs that don't fit."""
        return [program for program in self.programs if program.refused or program.total > self.limit]


def devices_of(slice: Slice) -> Sequence[Any]:
    """The slice's devices, as jax knows them, to compile for.

    Raises:
      ConfigError: libtpu isn't installed, or this machine has fewer CPU devices than asked for.
    """
    if slice.chip.name == CPU:
        found = jax.devices("cpu")
        if len(found) < slice.num_devices:
            raise ConfigError(
                f"The topology {slice.name} has more devices than jax shows here",
                got=f"{len(found)} CPU devices",
                remedy=f"Set XLA_FLAGS=--xla_force_host_platform_device_count={slice.num_devices}",
            )
        return found[: slice.num_devices]
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "Compiling for TPU takes libtpu, which is not installed",
            expected="no TPU: the package alone will do",
            remedy="Install it: pip install 'locojax[fit]'",
        )
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=f"{slice.chip.libtpu}:{slice.shape}").devices


def fit(
    plan: Plan,
    slice: Slice,
    *,
    only: Sequence[str] = (),
    done: Sequence[Compiled] = (),
    with_losses: bool = False,
    say: Say = print,
) -> Report:
    """Compiles the plan's programs for the slice, in a process apart: what ends the compiler must not end its caller.

    Args:
      only: names of programs; none: all of them.
      done: what has been compiled of the same plan and slice, and need not be again.
      with_losses: also the loss by itself, fused and plain.

    Raises:
      ConfigError: the mesh doesn't divide the model, or there is no compiler for the slice.
    """
    names = tuple(only)
    made = list(done)
    while True:
        known = tuple(program.name for program in made)
        ended = fit_apart.run(compile_each, (plan, slice, names, known, with_losses), made.append, say)
        if ended is None:
            break
        # The compiler gave up with more than an error: that program is refused, the others are tried once more.
        name, rest, words = ended
        made.append(Compiled(name, 0, {}, Work(), refused=f"the compiler crashed: {words}", crashed=True))
        if not rest:
            break
        names = rest
    return Report(
        plan,
        slice,
        tuple(program for program in made if program.name not in LOSSES),
        tuple(program for program in made if program.name in LOSSES),
    )


def compile_each(
    plan: Plan,
    slice: Slice,
    names: Sequence[str],
    known: Sequence[str],
    with_losses: bool,
    begin: Callable[[str, tuple[str, ...]], None],
) -> Iterator[Compiled]:
    """Compiles one program after the other: those of `names`, or all, but for what is `known`.

    begin: told each one's name, and those still to come, beforehand.
    """
    devices = devices_of(slice)
    for axis in ("tensor", "sequence"):
        if (num := len(devices)) % (size := getattr(plan, axis)):
            raise ConfigError(f"A {axis} axis of {size} does not divide {slice.name}", got=f"{num} devices")
    found = _programs(plan, devices) + (heads(plan, devices[0]) if with_losses else [])
    wanted = [program for program in found if not names or program.name in names or program.name in LOSSES]
    wanted = [program for program in wanted if program.name not in known]
    for place, program in enumerate(wanted):
        begin(program.name, tuple(later.name for later in wanted[place + 1 :]))
        yield _compiled(program, plan, slice)


def _programs(plan: Plan, devices: Sequence[Any]) -> list[Program]:
    """All programs, each with what is in memory beside it."""
    trainer = Trainer.of(plan, devices)
    found = trainer.programs()
    if plan.rollout.where == "none":
        return found
    engine = Engine.of(plan, devices[0])
    of_engine, published = engine.programs(), trainer.publish()
    if plan.rollout.where == "separate":
        return [*found, *published, *of_engine]
    held = {name: size for name, size in trainer.held().items() if name != "accumulators"}
    beside = {"trainer": sum(held.values())}
    return [
        *(dataclasses.replace(program, beside={**program.beside, **engine.held()}) for program in (*found, *published)),
        *(dataclasses.replace(program, beside={**program.beside, **beside}) for program in of_engine),
    ]


def _compiled(program: Program, plan: Plan, slice: Slice) -> Compiled:
    begun = time.monotonic()
    with target(program.device):
        traced = program.trace()
        lowered = traced.lower()
    over_mesh = program.device is None
    work = count(traced, Assumptions(program.trips, plan.tensor if over_mesh else 1, plan.sequence if over_mesh else 1))
    try:
        made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed, words = needed_bytes(str(error)), " ".join(str(error).split())[:300]
        # None: not for want of the device's memory, but of a kernel's own, say; there can't be a verdict then.
        return Compiled(
            program.name, needed or 0, program.beside, work, refused=words, crashed=needed is None,
            seconds=time.monotonic() - begun,
        )  # fmt: skip
    memory = made.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        name=program.name,
        peak=memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes,
        beside=program.beside,
        work=work,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        buffers=largest_buffers(made.as_text()),
        seconds=time.monotonic() - begun,
    )


_NEEDED = (
    re.compile(r"total memory required for HLO temporaries \(([\d.]+)([KMGT])"),
    re.compile(r"Used ([\d.]+)([KMGT])i?B? of [\d.]+[KMGT]i?B? hbm"),
)


def needed_bytes(message: str) -> int | None:
    """What the compiler said a program needs, when it refused it for want of memory; None if it didn't."""
    for pattern in _NEEDED:
        if found := pattern.search(message):
            return int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1))
    return None


_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4,
               "f64": 8, "s64": 8, "u64": 8}  # fmt: skip
_MADE = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\w+)\[([\d,]*)\][^ ]* (\w[\w-]*)\(")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_NO_MEMORY = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant", "while", "conditional"}


def largest_buffers(text: str, number: int = 6) -> tuple[Buffer, ...]:
    """The largest results of a compiled program's instructions, by size and place in the source, one of each.

    text: the program, as the compiler prints it. What is made inside a fusion takes no memory, and isn't listed.
    """
    found: dict[tuple[str, str], Buffer] = {}
    fused = False
    for line in text.splitlines():
        if line.endswith("{") and "->" in line:
            fused = "fused_computation" in line
        made = None if fused else _MADE.match(line)
        if made is None or made[4] in _NO_MEMORY or made[2] not in _ITEM_BYTES:
            continue
        num_bytes = _ITEM_BYTES[made[2]]
        for size in filter(None, made[3].split(",")):
            num_bytes *= int(size)
        origin = _ORIGIN.search(line)
        where = _short(origin[1]) if origin else made[1].split(".")[0]
        shape = f"{made[2]}[{made[3]}]"
        found.setdefault((shape, where), Buffer(num_bytes, shape, where))
    return tuple(sorted(found.values(), key=lambda buffer: -buffer.num_bytes)[:number])


def _short(origin: str) -> str:
    """The last parts of jax's path to an operation, without its wrappers."""
    parts = [part for part in origin.split("/") if not part.startswith(("jit(", "jvp(", "transpose(", "shard_map"))]
    return "/".join(parts[-3:]) or origin


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that a program takes at least: arithmetic, memory and network at their peaks."""

    compute: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> str:
        """Which of the three takes longest."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def roofline(program: Compiled, chip: Chip) -> Roofline | None:
    """Williams et al. 2009, with the network as a third roof; None for a CPU, whose peaks nobody states.

    Memory: the larger of what products read and write, and the arguments and outputs once each.
    """
    if chip.libtpu is None:
        return None
    once = (program.arguments or 0) + (program.outputs or 0)
    work = program.work
    return Roofline(
        work.flops / (chip.tflops * 1e12),
        max(work.memory_bytes, once) / (chip.memory_gbs * 1e9),
        work.network_bytes / (chip.network_gbs * 1e9),
    )
