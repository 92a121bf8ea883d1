"""What `locojax fit` found: as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from locojax.measure.fit import Compiled, Report, roofline
from locojax.measure.fit_chips import GIB
from locojax.measure.fit_search import Found
from locojax.models.remat import POLICIES, kept_bytes
from locojax.models.spec import num_parameters


def to_json(report: Report, ways: Sequence[Found] = ()) -> dict[str, Any]:
    """Everything, for programs: bytes, seconds, and `fits`, `peak_gib`, `programs`."""
    plan = report.plan
    return {
        "fits": report.fits,
        "peak_gib": report.peak / GIB,
        "hbm_gib": report.slice.chip.hbm_gib,
        "topology": report.slice.name,
        "num_devices": report.slice.num_devices,
        "num_parameters": num_parameters(plan.model),
        "micro_batch_tokens": plan.micro_batch_tokens(report.slice.num_devices),
        "settings": {
            "row_tokens": plan.row_tokens, "rows": plan.rows, "tensor": plan.tensor, "sequence": plan.sequence,
            "remat": plan.remat,
            "tile_tokens": plan.tile_tokens, "lora_rank": None if plan.lora is None else plan.lora.rank,
            "rollout": plan.rollout.where,
        },
        "programs": {program.name: _program_json(program, report) for program in report.programs},
        "losses": {program.name: _program_json(program, report) for program in report.losses},
        "ways": [
            {"change": found.change, "fits": found.report is not None,
             "peak_gib": None if found.report is None else found.report.peak / GIB}
            for found in ways
        ],
    }  # fmt: skip


def _program_json(program: Compiled, report: Report) -> dict[str, Any]:
    roof = roofline(program, report.slice.chip)
    return {
        "total_gib": program.total / GIB,
        "peak_bytes": program.peak,
        "argument_bytes": program.arguments,
        "output_bytes": program.outputs,
        "aliased_bytes": program.aliased,
        "temporary_bytes": program.temporaries,
        "beside_bytes": dict(program.beside),
        "flops": program.work.flops,
        "memory_bytes": program.work.memory_bytes,
        "network_bytes": program.work.network_bytes,
        "roofline_seconds": None if roof is None else roof.seconds,
        "bound": None if roof is None else roof.bound,
        "refused": program.refused,
        "compile_seconds": program.seconds,
        "buffers": [[buffer.num_bytes, buffer.shape, buffer.origin] for buffer in program.buffers],
    }


def show(report: Report, ways: Sequence[Found] = ()) -> Group:
    """What the terminal shows: memory and work of every program, the largest buffers, the verdict."""
    parts: list[RenderableType] = [_memory(report), _work(report), _buffers(report), _policies(report)]
    if report.losses:
        parts.append(_losses(report))
    parts.append(_verdict(report))
    if ways:
        parts.append(_ways(ways))
    return Group(*parts)


def gib(number: float | None) -> str:
    """Bytes in GiB; a dash for what isn't known."""
    return "-" if number is None else f"{number / GIB:.2f}"


def _memory(report: Report) -> Table:
    plan, devices = report.plan, report.slice.num_devices
    adapter = "full fine-tuning" if plan.lora is None else f"LoRA of rank {plan.lora.rank}"
    split = f", each over {plan.sequence} devices" if plan.sequence > 1 else ""
    table = Table(
        title=f"{num_parameters(plan.model) / 1e9:.2f} B parameters, {adapter}, {report.slice.name} ({devices} devices"
        f" of {report.slice.chip.hbm_gib:.2f} GiB), micro-batches of {plan.micro_batch_tokens(devices):,} tokens in"
        f" rows of {plan.row_tokens:,}{split}. GiB of each device:",
        title_justify="left",
    )
    table.add_column("program")
    for name in ("arguments", "outputs", "temporaries", "own peak", "beside it", "total"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    for program in report.programs:
        beside = sum(program.beside.values())
        outputs = None if program.outputs is None else program.outputs - (program.aliased or 0)
        fits = program.refused is None and program.total <= report.limit
        table.add_row(
            program.name, gib(program.arguments), gib(outputs), gib(program.temporaries), gib(program.peak),
            gib(beside), gib(program.total), "yes" if fits else "no",
        )  # fmt: skip
    return table


def _work(report: Report) -> Table:
    table = Table(title="Work of each device, and the least time that its peaks allow:", title_justify="left")
    table.add_column("program")
    for name in ("TFLOP", "GB in memory", "GB over network", "roofline", "bound by", "compiled in"):
        table.add_column(name, justify="right")
    for program in report.programs:
        roof, work = roofline(program, report.slice.chip), program.work
        table.add_row(
            program.name, f"{work.flops / 1e12:,.1f}", f"{work.memory_bytes / 1e9:,.1f}",
            f"{work.network_bytes / 1e9:,.1f}", "-" if roof is None else f"{roof.seconds:.3g} s",
            "-" if roof is None else roof.bound, f"{program.seconds:.0f} s",
        )  # fmt: skip
    return table


def _buffers(report: Report) -> RenderableType:
    fullest = max(report.programs, key=lambda program: program.total)
    if fullest.refused:
        return Text(f"{fullest.name}: {fullest.refused}")
    table = Table(title=f"Largest arrays made by {fullest.name}:", title_justify="left")
    for name in ("GiB", "shape", "from"):
        table.add_column(name, justify="right" if name == "GiB" else "left")
    for buffer in fullest.buffers:
        table.add_row(gib(buffer.num_bytes), buffer.shape, Text(buffer.origin))
    return table


def _policies(report: Report) -> Table:
    plan = report.plan
    tokens = plan.device_tokens * plan.model.num_layers
    table = Table(
        title="Remat policies, and what each keeps between forward and backward pass:", title_justify="left"
    )
    for name in ("policy", "keeps, beside the layer's input", "computes twice"):
        table.add_column(name)
    table.add_column("GiB of each device", justify="right")
    for name, policy in POLICIES.items():
        kept = kept_bytes(name, plan.model, jnp.dtype(plan.compute_dtype).itemsize) * tokens
        mark = " *" if name == plan.remat else ""
        table.add_row(name + mark, policy.keeps, policy.repeats, "-" if kept != kept else gib(kept))
    return table


def _losses(report: Report) -> Table:
    table = Table(title="The loss alone, on all positions of a device's rows:", title_justify="left")
    table.add_column("loss")
    for name in ("temporaries, GiB", "in all, GiB"):
        table.add_column(name, justify="right")
    for program in report.losses:
        table.add_row(program.name, gib(program.temporaries or program.peak), gib(program.peak))
    return table


def _verdict(report: Report) -> Text:
    fullest = max(report.programs, key=lambda program: program.total)
    if report.fits:
        share = report.peak / report.limit if report.limit else 0.0
        return Text(
            f"Fits: {report.peak / GIB:.1f} of {report.slice.chip.hbm_gib:.2f} GiB ({share:.0%}), in {fullest.name}.",
            style="bold green",
        )
    if crashed := [program for program in report.programs if program.crashed]:
        return Text(f"No verdict: of {crashed[0].name}, {crashed[0].refused}", style="bold red")
    failing = ", ".join(program.name for program in report.failing())
    return Text(
        f"Does not fit: {failing}. {fullest.name} needs {fullest.total / GIB:.1f} GiB of each device, which has "
        f"{report.slice.chip.hbm_gib:.2f}.",
        style="bold red",
    )


def _ways(ways: Sequence[Found]) -> Table:
    table = Table(title="What would fit, each change alone:", title_justify="left")
    table.add_column("change")
    table.add_column("peak, GiB", justify="right")
    for found in ways:
        if found.report is None:
            table.add_row(f"{found.change}: nothing that was tried", "-")
        else:
            table.add_row(found.change, gib(found.report.peak))
    return table
