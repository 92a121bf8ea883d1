"""Profiles as a table, as JSON and as a chart: of one model's hosts, or of models of several sizes."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from locojax.errors import ConfigError
from locojax.hosts.report import STYLE
from locojax.measure.division import CLASSES, ROWS, Class
from locojax.measure.profile import Profile

LEGEND: Mapping[Class, str] = {
    "compute": "compute",
    "network": "network, and waiting in it",
    "host": "host orchestration",
    "unaccounted": "unaccounted",
}
_COLOURS: Mapping[Class, dict[str, Any]] = {  # of Okabe and Ito's palette
    "compute": {"color": "#009E73"},
    "network": {"color": "#E69F00"},
    "host": {"color": "#0072B2"},
    "unaccounted": {"color": "white", "edgecolor": "#888888", "hatch": "////", "linewidth": 0.5},
}
_SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def to_json(profile: Profile) -> dict[str, Any]:
    """Everything that was found, for programs, and for `profile --scale` to draw later."""
    return {
        "model": profile.model,
        "num_parameters": profile.num_parameters,
        "step": profile.step,
        "seconds_before": profile.seconds_before,
        "place": dict(profile.place),
        "shares": profile.shares(),
        "hosts": [
            {
                "wall": division.wall,
                "shares": division.shares(),
                "seconds": {row: dict(values) for row, values in division.seconds.items()},
            }
            for division in profile.hosts
        ],
    }


def table(profile: Profile) -> Group:
    """What the terminal shows: every host's shares, then each phase's seconds by class, the mean over hosts."""
    place = profile.place
    title = (
        f"{profile.model}, {size_name(profile.num_parameters)} parameters, step {profile.step} on "
        f"{place['num_hosts']} host{'s' if place['num_hosts'] > 1 else ''}, {place['num_devices']} {place['platform']} "
        f"device{'s' if place['num_devices'] > 1 else ''}"
    )
    shares = _table()
    shares.add_column("")
    for name in CLASSES:
        shares.add_column(name, justify="right")
    shares.add_column("sum", justify="right")
    shares.add_column("step", justify="right")
    for index, division in enumerate(profile.hosts):
        shares.add_row(f"host {index}", *_percent(division.shares()), f"{division.wall:.3f} s")
    if len(profile.hosts) > 1:
        shares.add_row("mean", *_percent(profile.shares()), "")
    parts: list[RenderableType] = [Text(title, style="bold"), shares, _phases(profile)]
    if profile.seconds_before is not None:
        note = f"network includes waiting in it; the step before, not recorded, took {profile.seconds_before:.3f} s"
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def scale_table(profiles: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each model, smallest first. Args: profiles: as `to_json` made them."""
    shown = _table()
    shown.add_column("parameters", justify="right", no_wrap=True)
    for name in CLASSES:
        shown.add_column(name, justify="right")
    for column in ("sum", "step"):
        shown.add_column(column, justify="right")
    shown.add_column("model", overflow="fold")
    for profile in _by_size(profiles):
        wall = sum(host["wall"] for host in profile["hosts"]) / len(profile["hosts"])
        shares = _percent(profile["shares"])
        shown.add_row(size_name(profile["num_parameters"]), *shares, f"{wall:.3f} s", profile["model"])
    return shown


def _by_size(profiles: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(profiles, key=lambda profile: profile["num_parameters"])


def _phases(profile: Profile) -> Table:
    shown = _table()
    shown.add_column("seconds by phase" + (", mean of hosts" if len(profile.hosts) > 1 else ""))
    for name in CLASSES:
        shown.add_column(name, justify="right")
    for row in ROWS:
        found = [division.seconds[row] for division in profile.hosts if row in division.seconds]
        if found:
            means = [sum(values[name] for values in found) / len(profile.hosts) for name in CLASSES]
            shown.add_row(row, *(f"{mean:.3f}" if mean else "" for mean in means))
    return shown


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _percent(shares: Mapping[Class, float]) -> list[str]:
    return [*(f"{100 * shares[name]:.1f} %" for name in CLASSES), f"{100 * sum(shares.values()):.1f} %"]


def size_name(number: float) -> str:
    """Example: 134515008 -> "135M"."""
    for unit, letter in _SIZES:
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:g}"


def read_profile(path: pathlib.Path) -> dict[str, Any] | None:
    """A file that `to_json` was written to; None if it holds another object, as a model's config.json does.

    Raises:
      ConfigError: it can't be read, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}", expected="a model's config.json, or a profile") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object", expected="a model's config.json, or a profile")
    return found if "shares" in found and "num_parameters" in found else None


def draw_hosts(profile: Profile, path: pathlib.Path) -> None:
    """Draws a bar for each host. Raises OSError if the file can't be written, ValueError for an unknown format."""
    bars = [(f"host {index}", division.shares()) for index, division in enumerate(profile.hosts)]
    _draw(bars, f"{profile.model}: where step {profile.step} went", "", path)


def draw_scale(profiles: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws a bar for each model, smallest first: the shares against the number of parameters.

    Args:
      profiles: as `to_json` made them.

    Raises:
      OSError: the file can't be written. ValueError: for an unknown format.
    """
    ordered = _by_size(profiles)
    bars = [(size_name(profile["num_parameters"]), profile["shares"]) for profile in ordered]
    places = [profile["place"] for profile in ordered]
    ran_on = dict.fromkeys(f"hosts: {place['num_hosts']}, devices: {place['num_devices']}" for place in places)
    _draw(bars, "Where a step goes, by model size", f"parameters ({'; '.join(ran_on)})", path)


def _draw(bars: Sequence[tuple[str, Mapping[Class, float]]], title: str, x_label: str, path: pathlib.Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(6.5, 3.5 + len(bars)), 4.8))
        axes = figure.subplots(gridspec_kw={"left": 0.12, "right": 0.66, "bottom": 0.14, "top": 0.9})
        bottom = [0.0] * len(bars)
        for name in CLASSES:
            heights = [100 * shares[name] for _, shares in bars]
            axes.bar(range(len(bars)), heights, 0.7, bottom=bottom, label=LEGEND[name], **_COLOURS[name])
            for index, height in enumerate(heights):
                if height >= 5:
                    colour = "#222222" if name in ("unaccounted", "network") else "white"
                    middle = bottom[index] + height / 2
                    axes.text(index, middle, f"{height:.0f}", ha="center", va="center", color=colour)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_xticks(range(len(bars)), [label for label, _ in bars])
        axes.set(title=title, ylabel="share of the step, %", xlabel=x_label, ylim=(0, 100))
        axes.grid(axis="x", visible=False)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))  # as they are stacked
        unfinished = path.with_name(f".{path.name}.tmp")
        figure.savefig(unfinished, format=path.suffix.lstrip(".") or "png", dpi=110)
    os.replace(unfinished, path)
