"""TPU slices that `locojax fit` compiles for: their chips' figures, and their names. No jax."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping

from locojax.errors import ConfigError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device, as jax counts them.

    Attributes:
      libtpu: the compiler's name of the kind; None: not a TPU.
      devices: of one chip; the figures below are of one device.
      hbm_gib: memory that a program may use, as the compiler itself says when one doesn't fit.
      tflops: dense bf16, 10^12 a second. memory_gbs, network_gbs: 10^9 bytes a second, of memory and of all links to
        other chips. All three are the vendor's published peaks.
      slices: topologies that can be rented, the smallest first.
    """

    name: str
    libtpu: str | None
    devices: int
    hbm_gib: float
    tflops: float
    memory_gbs: float
    network_gbs: float
    slices: tuple[str, ...]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e", 1, 15.75, 197, 819, 200, _FLAT),
        Chip("v5p", "v5p", 1, 95.73, 459, 2765, 600, _CUBES),
        Chip("v6e", "v6e", 1, 31.24, 918, 1640, 448, _FLAT),
        Chip("v7x", "tpu7x", 2, 94.74, 1153.5, 3690, 600, _CUBES),
    )
}

CPU = "cpu"
_ALIASES = {"tpu7x": "v7x", "v5litepod": "v5e", "v5lite": "v5e"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are rented together. `shape`: of the chips, as "2x2x1"; of `cpu`, the number of devices."""

    chip: Chip
    shape: str

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{self.shape}"

    @property
    def num_chips(self) -> int:
        return math.prod(int(side) for side in self.shape.split("x"))

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices

    def larger(self) -> list[Slice]:
        """Slices of the same kind with more chips, the smallest first."""
        others = [Slice(self.chip, shape) for shape in self.chip.slices]
        return [other for other in others if other.num_chips > self.num_chips]


def slices_of(kind: str) -> list[Slice]:
    """All slices of one kind of chip, the smallest first. Raises ConfigError if there is no such kind."""
    chip = _chip(kind)
    return [Slice(chip, shape) for shape in chip.slices]


def parse(name: str, cpu_gib: float = 0.0) -> Slice:
    """A topology's name, KIND:SHAPE. Example: parse("v5p:2x2x1"); "cpu:4" is this machine as 4 devices.

    Args:
      cpu_gib: memory of one device of `cpu`.

    Raises:
      ConfigError: there is no such kind or shape; lists those that there are.
    """
    kind, _, shape = name.lower().partition(":")
    if kind == CPU:
        if not re.fullmatch(r"[1-9]\d*", shape or "1"):
            raise ConfigError(f"Unknown topology {name!r}", expected="cpu or cpu:N, for N devices")
        return Slice(Chip(CPU, None, 1, cpu_gib, 0.0, 0.0, 0.0, ()), shape or "1")
    chip = _chip(kind, name)
    if shape not in chip.slices:
        raise ConfigError(
            f"Unknown topology {name!r}",
            got=f"the shape {shape!r}" if shape else "no shape",
            expected="one of " + ", ".join(f"{chip.name}:{known}" for known in chip.slices),
        )
    return Slice(chip, shape)


def _chip(kind: str, name: str | None = None) -> Chip:
    kind = _ALIASES.get(kind, kind)
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind, CHIPS, n=1)
        raise ConfigError(
            f"Unknown topology {name or kind!r}",
            expected="; ".join(f"{chip.name}: {', '.join(chip.slices)}" for chip in CHIPS.values()) + f"; {CPU}",
            remedy=f"Did you mean {near[0]}:{CHIPS[near[0]].slices[0]}?" if near else "Example: v5p:2x2x1",
        )
    return CHIPS[kind]
