"""Settings near a plan's own that fit where it doesn't, and the smallest slice that a plan fits on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from locojax.errors import ConfigError, LocoError
from locojax.measure.fit import Report, Say, fit
from locojax.measure.fit_chips import GIB, Slice
from locojax.measure.fit_programs import Plan
from locojax.models.remat import POLICIES

Fit = Callable[..., Report]
"""`fit.fit`, or what a test puts in its place."""

MIN_TILE = 128


@dataclasses.dataclass(frozen=True)
class Found:
    """One way out: what is changed, in words, and what then fits; None: nothing along this way does."""

    change: str
    report: Report | None


def nearest(failed: Report, *, say: Say = print, fit: Fit = fit) -> list[Found]:
    """For each setting alone, the least change of it under which the programs that don't fit do.

    What is tried first is what costs least: fewer rows, other tiles, keeping less for the backward pass, splitting
    layers over more devices, the longest row's tokens over some, more chips.
    """
    names = tuple(program.name for program in failed.failing() if not program.crashed)
    if not names:
        return []
    return [
        Found(*_first(way, list(candidates), names, say, fit)) for way, candidates in _ways(failed.plan, failed.slice)
    ]


def smallest(plan: Plan, slices: list[Slice], *, say: Say = print, fit: Fit = fit) -> Report | None:
    """The plan on the smallest of the slices, given in order of size, that it fits; None if it fits none.

    A micro-batch has as many tokens on each as `plan` has on the first, or a row on every device if that is more.
    """
    tokens = plan.micro_batch_tokens(slices[0].num_devices)
    for slice in slices:
        plan = _with_tokens(plan, tokens, slice)
        try:
            report = fit(plan, slice, only=("forward_backward",), say=say)
        except ConfigError as error:
            say(f"{slice.name}: {error.problem}")
            continue
        say(f"{slice.name}: {'fits' if report.fits else 'does not fit'} ({report.peak / GIB:.1f} GiB a device)")
        if report.fits:
            whole = fit(plan, slice, done=report.programs, say=say)
            if whole.fits:
                return whole
    return None


def _ways(plan: Plan, slice: Slice) -> Iterator[tuple[str, Iterator[tuple[str, Plan, Slice]]]]:
    replace, tokens = dataclasses.replace, plan.micro_batch_tokens(slice.num_devices)

    def rows() -> Iterator[tuple[str, Plan, Slice]]:
        fewer = plan.rows // 2
        while fewer >= 1:
            smaller = replace(plan, rows=fewer)
            yield f"--micro-batch-tokens {smaller.micro_batch_tokens(slice.num_devices)}", smaller, slice
            fewer //= 2

    def tiles() -> Iterator[tuple[str, Plan, Slice]]:
        tile = plan.tile_tokens // 2
        while tile >= MIN_TILE:
            yield f"--tile {tile}", replace(plan, tile_tokens=tile), slice
            tile //= 2

    def remat() -> Iterator[tuple[str, Plan, Slice]]:
        names = list(POLICIES)
        for name in names[names.index(plan.remat) + 1 :]:
            yield f"--remat {name}", replace(plan, remat=name), slice

    def tensor() -> Iterator[tuple[str, Plan, Slice]]:
        parts = plan.tensor * 2
        while slice.num_devices % (parts * plan.sequence) == 0 and plan.model.num_heads % parts == 0:
            yield f"--tensor {parts}", _with_tokens(replace(plan, tensor=parts), tokens, slice), slice
            parts *= 2

    def sequence() -> Iterator[tuple[str, Plan, Slice]]:
        parts = plan.sequence * 2
        while slice.num_devices % (parts * plan.tensor) == 0:
            split = replace(plan, sequence=parts)  # fewer rows at a time: as many would leave a device's tokens as many
            fewer = split.micro_batch_tokens(slice.num_devices)
            yield f"--sequence-parallel {parts} --micro-batch-tokens {fewer}", split, slice
            parts *= 2

    def chips() -> Iterator[tuple[str, Plan, Slice]]:
        for larger in slice.larger():
            yield f"--topology {larger.name}", _with_tokens(plan, tokens, larger), larger

    yield "token budget", rows()
    yield "tile", tiles()
    yield "remat policy", remat()
    yield "sharding", tensor()
    if plan.rows == 1:  # with more, fewer of them do as well
        yield "a row over devices", sequence()
    yield "chips", chips()


def _with_tokens(plan: Plan, tokens: int, slice: Slice) -> Plan:
    """The plan with micro-batches of so many tokens on the slice, rounded up to whole rows on each device."""
    one_row = dataclasses.replace(plan, rows=1).micro_batch_tokens(slice.num_devices)
    return dataclasses.replace(plan, rows=max(1, -(-tokens // one_row)))


def _first(
    way: str, candidates: list[tuple[str, Plan, Slice]], names: tuple[str, ...], say: Say, fit: Fit
) -> tuple[str, Report | None]:
    for change, plan, slice in candidates:
        say(f"trying {change}")
        try:
            report = fit(plan, slice, only=names, say=say)
        except LocoError as error:  # this mesh can't be, or the compiler can't make this program
            say(str(error))
            continue
        if report.fits:
            return change, report
    return way, None
