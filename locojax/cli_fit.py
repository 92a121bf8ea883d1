"""`locojax fit MODEL --topology SLICE`: does it fit in memory? Checked by the TPU's own compiler, without a TPU."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from locojax.errors import ConfigError
from locojax.measure import fit_chips
from locojax.measure.fit_apart import TPU_COMPILER

if TYPE_CHECKING:
    from locojax.measure.fit_programs import Plan

EPILOG = """\
Compiles the programs that training and rollout run, from shapes alone, and adds up what the compiler says of each one's
memory and what else is on the device at that time. If something doesn't fit, it looks for the nearest settings that do.
The exit code is 0 if everything fits, 1 if not.

  locojax fit qwen3-8b --topology v6e:2x4 --context 16384 --lora-rank 32
  locojax fit my/config.json --topology v5p:2x2x1 --context 22528 --lora-rank 32 --micro-batch-tokens 180224
  locojax fit dense-123b --topology v5p --context 22528 --lora-rank 32      # the smallest slice of v5p
  locojax fit smollm2-135m --topology cpu --context 8192

It takes libtpu, which needs no TPU: pip install 'locojax[fit]'.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `locojax fit`."""
    parser.epilog = EPILOG
    kinds = "; ".join(f"{chip.name}:SHAPE" for chip in fit_chips.CHIPS.values())
    parser.add_argument("words", metavar="MODEL", nargs="*", help="a known name, a config.json, a directory or hub id")
    parser.add_argument("--topology", required=True, metavar="SLICE",
                        help=f"{kinds}; a kind alone: the smallest slice of it; cpu: this machine")  # fmt: skip
    parser.add_argument("--context", type=int, required=True, metavar="N", help="tokens of the longest sequence: a row")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--lora-rank", type=int, metavar="R", help="train an adapter over attention and MLP")
    trained.add_argument("--full", action="store_true", help="train all weights (default)")
    parser.add_argument("--micro-batch-tokens", type=int, metavar="N",
                        help="tokens of a micro-batch over all devices (default: a row on each)")  # fmt: skip
    parser.add_argument("--tensor", type=int, default=1, metavar="N", help="devices that a layer is split over")
    parser.add_argument("--sequence-parallel", type=int, default=1, metavar="N",
                        help="devices that a row's tokens are split over")  # fmt: skip
    parser.add_argument("--remat", default="full", metavar="POLICY", help="what the backward pass keeps (default full)")
    parser.add_argument("--tile", type=int, default=1024, metavar="N", help="positions of one tile of the head")
    parser.add_argument("--rollout", choices=("colocated", "separate", "none"), default="colocated",
                        help="engines on the trainer's devices, on their own, or not looked at")  # fmt: skip
    parser.add_argument("--max-slots", type=int, default=64, metavar="N", help="samples that an engine runs at once")
    parser.add_argument("--kv-gib", type=float, default=8.0, metavar="X", help="an engine's memory for keys and values")
    parser.add_argument("--programs", metavar="A,B", help="compile only these")
    parser.add_argument("--losses", action="store_true", help="also the loss alone, fused and by a plain log-softmax")
    parser.add_argument("--no-search", action="store_true", help="don't look for settings that fit")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; -: to standard output")
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Compiles, searches and shows. 0: it fits; 1: it doesn't."""
    if len(options.words) != 1:
        raise ConfigError("`locojax fit` takes one model", got=" ".join(options.words) or "none")
    for name in ("context", "lora_rank", "micro_batch_tokens", "tensor", "sequence_parallel", "tile", "max_slots",
                 "kv_gib"):  # fmt: skip
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ConfigError(f"Argument --{name.replace('_', '-')} must be above 0", got=value)
    whole_kind = ":" not in options.topology and options.topology != fit_chips.CPU
    slices = fit_chips.slices_of(options.topology.lower()) if whole_kind else [_slice(options.topology)]
    os.environ.update(TPU_COMPILER)  # before jax is imported
    from locojax.measure import fit_report, fit_search
    from locojax.measure.fit import fit

    plan = _plan(options, slices[0])
    errors = Console(stderr=True)

    def say(text: str) -> None:
        errors.print(text, style="dim", highlight=False)

    ways: list[fit_search.Found] = []
    if whole_kind:
        found = fit_search.smallest(plan, slices, say=say)
        if found is None:
            raise ConfigError(f"No slice of {options.topology} is enough", got=", ".join(s.name for s in slices))
        report = found
    else:
        names = tuple(options.programs.split(",")) if options.programs else ()
        report = fit(plan, slices[0], only=names, with_losses=options.losses, say=say)
        if not report.programs:
            raise ConfigError("No program is named that", got=options.programs)
        if not report.fits and not options.no_search:
            ways = fit_search.nearest(report, say=say)
    text = json.dumps(fit_report.to_json(report, ways), indent=1)
    if options.json == "-":
        sys.stdout.write(text + "\n")
        return 0 if report.fits else 1
    Console().print(fit_report.show(report, ways))
    if options.json is not None:
        try:
            pathlib.Path(options.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The file {options.json!r} can't be written: {error}") from error
    return 0 if report.fits else 1


def _slice(name: str) -> fit_chips.Slice:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / fit_chips.GIB
    return fit_chips.parse(name, machine)


def _plan(options: argparse.Namespace, slice: fit_chips.Slice) -> Plan:
    from locojax.measure import fit_models
    from locojax.measure.fit_programs import Plan, RolloutPlan
    from locojax.models.lora import LoraSpec
    from locojax.models.platform import auto_dtype
    from locojax.models.remat import POLICIES

    if options.remat not in POLICIES:
        raise ConfigError(f"Unknown remat policy {options.remat!r}", expected="one of " + ", ".join(POLICIES))
    on_cpu = slice.chip.name == fit_chips.CPU
    per_row = options.context * max(1, slice.num_devices // (options.tensor * options.sequence_parallel))
    rollout = RolloutPlan(options.rollout, options.max_slots, int(options.kv_gib * fit_chips.GIB))
    return Plan(
        fit_models.find(options.words[0]),
        None if options.lora_rank is None else LoraSpec(options.lora_rank),
        options.context,
        rows=-(-(options.micro_batch_tokens or per_row) // per_row),
        tensor=options.tensor,
        sequence=options.sequence_parallel,
        remat=options.remat,
        tile_tokens=options.tile,
        compute_dtype=auto_dtype("cpu") if on_cpu else "bfloat16",
        gather="step" if on_cpu else "layer",
        rollout=rollout,
        kernel="plain" if on_cpu else "tpu",
    )
