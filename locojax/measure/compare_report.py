"""A comparison as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from locojax.hosts.report import STYLE
from locojax.measure.compare import Comparison, Side
from locojax.measure.speedup import LEVEL, Interval

_COLOURS = {"A": "#0072B2", "B": "#D55E00"}  # of Okabe and Ito's palette
_VERDICTS = {
    "faster": ("A is faster than B: both intervals lie above {margin:g}", "bold green"),
    "slower": ("A is slower than B: both intervals lie below 1/{margin:g}", "bold red"),
    "no verdict": ("no verdict: the intervals do not both lie beyond the margin of {margin:g}", "bold yellow"),
}


def table(comparison: Comparison) -> Group:
    """What the terminal shows: the times and what was worked on, the verdict, what it rests on, what differs."""
    a, b = comparison.a, comparison.b
    shown = Table(title_justify="left", header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    shown.add_column("")
    for side in (a, b):
        shown.add_column(side.name, justify="right")
    shown.add_column(f"A's speed-up, {100 * LEVEL:.0f} %", justify="right")
    times = {side.name: times_of(side) for side in (a, b)}
    for row, key, interval in (
        ("seconds a step", "seconds_per_step", comparison.speedup.per_step),
        ("ms an output token", "milliseconds_per_token", comparison.speedup.per_token),
    ):
        shown.add_row(row, _figure(times["A"][key]), _figure(times["B"][key]), _interval(interval))
    work_a, work_b = a.work(), b.work()
    for row, key in (("mean prompt", "prompt"), ("mean output", "output"), ("longest output", "longest_output")):
        shown.add_row(f"{row}, tokens", f"{work_a[key]:.1f}", f"{work_b[key]:.1f}", "equal work")
    shares = (f"{100 * work['truncated_share']:.1f} %" for work in (work_a, work_b))
    shown.add_row("completions cut off", *shares, "equal work")
    if any(len(side.launches) > 1 for side in (a, b)):
        shown.add_row("launches vary by", *(f"{100 * spread(side):.1f} %" for side in (a, b)), "")
    text, style = _VERDICTS[comparison.verdict]
    verdict = Text(text.format(margin=comparison.margin), style=style)
    names = [Text(f"{side.name}: {_launches(side)}") for side in (a, b)]
    parts: list[RenderableType] = [*names, shown, verdict, Text(_basis(comparison), style="dim")]
    if comparison.differences:
        pairs = [f"{key} = {left} | {right}" for key, (left, right) in comparison.differences.items()]
        parts.append(Text("settings of A | B that differ: " + "; ".join(pairs), style="dim"))
    return Group(*parts)


def times_of(side: Side) -> dict[str, float]:
    """The side's two times over all its launches and scored steps."""
    times = side.times
    return {
        "seconds_per_step": float(times.seconds.mean()),
        "milliseconds_per_token": float(1000 * times.seconds.sum() / times.tokens.sum()),
    }


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that the verdict rests on, for programs. Seconds and tokens are listed per launch and scored step."""
    return {
        "verdict": comparison.verdict,
        "margin": comparison.margin,
        "speedup_per_step": dataclasses.asdict(comparison.speedup.per_step),
        "speedup_per_token": dataclasses.asdict(comparison.speedup.per_token),
        "level": LEVEL,
        "method": comparison.method,
        "num_resamples": comparison.num_resamples if comparison.method == "bootstrap" else None,
        "seed": comparison.seed if comparison.method == "bootstrap" else None,
        "passes": comparison.passes,
        "scored_steps": [step.step for step in comparison.a.scored[0]],
        "a": _side_json(comparison.a),
        "b": _side_json(comparison.b),
        "differing_settings": {key: list(values) for key, values in comparison.differences.items()},
    }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        **times_of(side),
        "work": side.work(),
        "launches": [
            {
                "folder": str(launch.folder),
                "seconds": [step.seconds for step in steps],
                "output_tokens": [int(step.output_tokens.sum()) for step in steps],
            }
            for launch, steps in zip(side.launches, side.scored, strict=True)
        ],
    }


def draw(comparison: Comparison, path: pathlib.Path) -> None:
    """Writes a picture: every launch's seconds step by step, and the two speed-ups against the margin.

    The format follows the path's suffix, as matplotlib knows it. Raises OSError if the file can't be written,
    ValueError for a format that doesn't exist.
    """
    import matplotlib  # takes most of a second to import
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.4))
        places = {"left": 0.055, "right": 0.985, "bottom": 0.13, "top": 0.9, "wspace": 0.2, "width_ratios": (3, 2)}
        steps, speedups = figure.subplots(1, 2, gridspec_kw=places)
        _draw_steps(steps, comparison)
        _draw_speedups(speedups, comparison)
        unfinished = path.with_name(f".{path.name}.tmp")
        figure.savefig(unfinished, format=path.suffix.lstrip(".") or "png", dpi=110)
    os.replace(unfinished, path)


def _draw_steps(axes: Any, comparison: Comparison) -> None:
    from matplotlib.ticker import MaxNLocator

    for side in (comparison.a, comparison.b):
        for index, launch in enumerate(side.launches):
            seconds = [step.seconds for step in launch.steps]
            label = f"{side.name}: {_launches(side)}" if index == 0 else None
            axes.plot(range(len(seconds)), seconds, color=_COLOURS[side.name], alpha=0.75, marker=".", label=label)
    first = comparison.first_scored
    axes.axvspan(-0.5, first - 0.5, color="#f2f2f2", zorder=0)
    axes.set_yscale("log")  # the first step compiles, and would press all others to the floor
    axes.text(-0.4, 0.02, "not scored", color="#888888", transform=axes.get_xaxis_transform(), fontsize=9)
    axes.set_xlim(-0.5, len(comparison.a.launches[0].steps) - 0.5)
    axes.set(title="Seconds of each step", xlabel="step", ylabel="seconds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(loc="upper right")


def _draw_speedups(axes: Any, comparison: Comparison) -> None:
    intervals = {"per step": comparison.speedup.per_step, "per token": comparison.speedup.per_token}
    for height, interval in zip((1, 0), intervals.values(), strict=True):
        axes.plot([interval.low, interval.high], [height, height], color=_COLOURS["A"], linewidth=3)
        axes.plot([interval.estimate], [height], "o", color=_COLOURS["A"], markersize=8)
        axes.annotate(_interval(interval), (interval.estimate, height), xytext=(0, 11), textcoords="offset points",
                      ha="center")  # fmt: skip
    margin = comparison.margin
    axes.axvspan(1 / margin, margin, color="#f2f2f2", zorder=0)
    axes.axvline(1.0, color="#888888", linewidth=1)
    ends = [1 / margin, margin, *(end for interval in intervals.values() for end in (interval.low, interval.high))]
    room = 0.15 * (max(ends) - min(ends))
    axes.set_xlim(min(ends) - room, max(ends) + room)
    axes.set(title=f"A against B: {comparison.verdict}", xlabel="times faster; grey: within the margin")
    axes.set_yticks([1, 0], list(intervals))
    axes.set_ylim(-0.5, 1.5)
    axes.grid(axis="y", visible=False)


def _launches(side: Side) -> str:
    """Their folders' names, the first three at most. Example: "co-1, co-2, co-3 and 2 more"."""
    names = [launch.folder.resolve().name for launch in side.launches]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _interval(interval: Interval) -> str:
    return f"{interval.estimate:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _basis(comparison: Comparison) -> str:
    """The sentence under the verdict: what was scored, and how the intervals were made."""
    num_steps, sides = len(comparison.a.scored[0]), (comparison.a, comparison.b)
    last = comparison.first_scored + num_steps - 1
    what = "the last pass over the batches" if comparison.passes > 1 else "every step after the first"
    text = f"scored: steps {comparison.first_scored} to {last}, {what}, evaluation and checkpoints left out; "
    if comparison.method == "welch":
        return text + "Welch's intervals on the logarithms of launches"
    text += f"percentile bootstrap of launches and of steps in them, {comparison.num_resamples:,} resamples"
    if single := [side.name for side in sides if len(side.launches) == 1]:
        text += f"; {' and '.join(single)} {'was' if len(single) == 1 else 'were'} launched once, so how launches vary "
        text += "is not in the interval"
    return text


def spread(side: Side) -> float:
    """How much launches of one side vary: standard deviation over mean of their seconds a step; 0 for one launch."""
    means = side.times.seconds.mean(1)
    return float(np.std(means, ddof=1) / means.mean()) if len(means) > 1 else 0.0
