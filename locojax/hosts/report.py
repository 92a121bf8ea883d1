"""The picture of a run: report.html (one file, no network) and report.png, from its metrics alone."""

from __future__ import annotations

import html
import io
import math
import os
import pathlib
import string
from collections.abc import Sequence
from typing import Any

from locojax import settings
from locojax.config import Config
from locojax.hosts.alarms import alarms
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.phases import PHASES

# Okabe and Ito's palette, told apart by colour-blind readers; a phase keeps its colour in every run.
_COLOURS = dict(
    zip(
        PHASES,
        "#999999 #56B4E9 #0072B2 #F0E442 #CC79A7 #D55E00 #009E73 #E69F00 #8B6BB1 #A6761D #444444 #B8D8BA".split(),
        strict=True,
    )
)
_REWARD, _HELD_OUT, _WARN = "#0072B2", "#D55E00", "#CC79A7"
_MAX_BARS = 80  # more steps than this share bars, each the mean of its steps
STYLE: dict[str, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "svg.fonttype": "none",  # text stays text: small, sharp, searchable
    "svg.hashsalt": "locojax",  # the same metrics give the same file
}
"""How every picture that LoCoJAX draws looks, as matplotlib's settings."""


def draw(folder: pathlib.Path, history: Sequence[StepMetrics], config: Config) -> None:
    """Writes `folder`/report.html and report.png.

    Args:
      history: at least one step, in order.
      config: the run's, resolved.

    Raises:
      OSError: the folder can't be written.
    """
    import matplotlib  # takes most of a second to import; `locojax --help` must not wait for it

    with matplotlib.rc_context(STYLE):
        figure = _figure(history)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        unfinished = folder / "report.png.tmp"
        figure.savefig(unfinished, format="png", dpi=110)
    os.replace(unfinished, folder / "report.png")
    svg = picture.getvalue()
    page = _page(svg[svg.index("<svg") :], history, config)
    unfinished = folder / "report.html.tmp"
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, folder / "report.html")


def _figure(history: Sequence[StepMetrics]) -> Any:
    from matplotlib.figure import Figure  # not pyplot: it keeps figures in a global
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 8.2))
    # Fixed places: matplotlib's layout engines take longer than the rest of the drawing.
    places = {"left": 0.055, "right": 0.885, "bottom": 0.065, "top": 0.955, "hspace": 0.3, "wspace": 0.17}
    axes = figure.subplots(2, 2, gridspec_kw=places)
    _draw_reward(axes[0, 0], history)
    _draw_account(axes[0, 1], history)
    _draw_gap(axes[1, 0], history)
    _draw_shares(axes[1, 1], history)
    for one in axes.flat:
        one.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def held_out_curve(history: Sequence[StepMetrics]) -> list[tuple[int, float]]:
    """(updates so far, accuracy) of every evaluation."""
    curve = []
    for metrics in history:
        if metrics.held_out_before is not None:
            curve.append((metrics.step, metrics.held_out_before))
        if metrics.held_out is not None:
            curve.append((metrics.step + 1, metrics.held_out))
    return curve


def _draw_reward(axes: Any, history: Sequence[StepMetrics]) -> None:
    rewards = [metrics.reward_mean for metrics in history]
    steps = [metrics.step for metrics in history]
    axes.plot(steps, rewards, color=_REWARD, marker="o", markersize=3.5, label="training reward (mean)")
    curve = held_out_curve(history)
    if curve:
        axes.plot(*zip(*curve, strict=True), color=_HELD_OUT, marker="s", linewidth=2, label="held-out accuracy")
        axes.annotate(
            f"{curve[-1][1]:.2f}", curve[-1], xytext=(6, 4), textcoords="offset points", color=_HELD_OUT, weight="bold"
        )
    values = [value for value in rewards + [accuracy for _, accuracy in curve] if math.isfinite(value)]
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.03, 1.06)
    axes.set(title="Is it learning?", xlabel="updates so far", ylabel="reward, accuracy")
    axes.legend(loc="best")


def bars(history: Sequence[StepMetrics], most: int = _MAX_BARS) -> list[tuple[float, float, dict[str, float]]]:
    """(centre, width, mean seconds per phase) of each bar of the accounting; "unaccounted" is one of the phases."""
    size = math.ceil(len(history) / most)
    found = []
    for start in range(0, len(history), size):
        part = [metrics.account for metrics in history[start : start + size]]
        mean: dict[str, float] = {
            name: sum(account.seconds.get(name, 0.0) for account in part) / len(part) for name in PHASES
        }
        mean["unaccounted"] = sum(account.unaccounted for account in part) / len(part)
        found.append(((part[0].step + part[-1].step) / 2 + 1, 0.85 * len(part), mean))
    return found


def _draw_account(axes: Any, history: Sequence[StepMetrics]) -> None:
    drawn = bars(history)
    centres, widths = [bar[0] for bar in drawn], [bar[1] for bar in drawn]
    bottom = [0.0] * len(drawn)
    for name in (*PHASES, "unaccounted"):
        heights = [seconds[name] for _, _, seconds in drawn]
        if not any(heights):
            continue
        style = {"color": "white", "edgecolor": "#888888", "hatch": "////", "linewidth": 0.5}
        if name in _COLOURS:
            style = {"color": _COLOURS[name]}
        axes.bar(centres, heights, widths, bottom=bottom, label=name, **style)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(title="Where does a step's time go?", xlabel="step", ylabel="seconds")
    axes.grid(axis="x", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    # Top to bottom as stacked, beside the bars and not on them.
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_gap(axes: Any, history: Sequence[StepMetrics]) -> None:
    steps = [metrics.step + 1 for metrics in history]
    curves = {
        "largest": ([metrics.gap_max for metrics in history], "#999999", ":"),
        "99th percentile": ([metrics.gap_p99 for metrics in history], "#56B4E9", "--"),
        "mean": ([metrics.gap_mean for metrics in history], _REWARD, "-"),
    }
    floor = 1e-9  # equal bit for bit is a gap of 0, which a logarithmic axis can't show
    for name, (values, colour, line) in curves.items():
        axes.plot(steps, [max(value, floor) for value in values], line, color=colour, label=name)
    axes.set_yscale("log")
    low = min(max(value, floor) for values, _, _ in curves.values() for value in values)
    high = max(max(value, floor) for values, _, _ in curves.values() for value in values)
    if math.isfinite(low + high):  # whole decades, and one more as room for the legend
        axes.set_ylim(10.0 ** math.floor(math.log10(low)), 10.0 ** (math.floor(math.log10(high)) + 2))
    title = "Do sampler and trainer agree?"
    axes.set(title=title, xlabel="step", ylabel="|log-prob difference| per token, nats")
    axes.legend(loc="upper right", ncols=3)


def _draw_shares(axes: Any, history: Sequence[StepMetrics]) -> None:
    steps = [metrics.step + 1 for metrics in history]
    curves = {
        "completions cut off": ([metrics.truncated_share for metrics in history], _HELD_OUT, "-"),
        "groups with one reward": ([metrics.zero_variance_share for metrics in history], _REWARD, "-"),
        "unscorable completions": ([metrics.unscorable_share for metrics in history], _WARN, "--"),
        "padding of packed rows": ([metrics.padding_share for metrics in history], "#999999", ":"),
    }
    for name, (values, colour, line) in curves.items():
        axes.plot(steps, [100 * value for value in values], line, color=colour, label=name)
    axes.set_ylim(-3, 103)
    axes.set(title="What is lost?", xlabel="step", ylabel="share, %")
    axes.legend(loc="best", ncols=2)


_PAGE = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$name - LoCoJAX run</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 2rem auto; padding: 0 1.2rem; color: #222;
  background: #fff }
h1 { margin-bottom: 0 } h2 { margin-top: 2rem } .sub { color: #666; margin-top: .2rem }
svg { width: 100%; height: auto }
table { border-collapse: collapse } td, th { padding: .15rem 1.2rem .15rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } tr.sum td { border-top: 1px solid #999; font-weight: 600 }
.facts { display: flex; flex-wrap: wrap; gap: 2.2rem; margin: 1.2rem 0 } .facts b { display: block; font-size: 1.5rem }
.facts span { color: #666 } .alarm { background: #fff4d6; border-left: 4px solid #e69f00; padding: .5rem 1rem }
pre { background: #f6f6f6; padding: 1rem; overflow: auto }
</style></head><body>
<h1>$name</h1><p class="sub">$subtitle</p>
<div class="facts">$facts</div>
$alarms
$svg
<h2>Where the time went</h2>
<table><tr><th>phase</th><th>seconds</th><th>share</th></tr>$account</table>
<h2>Settings</h2><details><summary>All, as config.toml</summary><pre>$config</pre></details>
</body></html>
""")


def _page(svg: str, history: Sequence[StepMetrics], config: Config) -> str:
    last = history[-1]
    curve = held_out_curve(history)
    wall = sum(metrics.account.wall for metrics in history)
    facts = [("steps", f"{last.step + 1} of {config.run.num_steps}"), ("reward", f"{last.reward_mean:.3f}")]
    if curve:
        facts.append(("held-out accuracy", f"{curve[0][1]:.2f} &rarr; {curve[-1][1]:.2f}"))
    facts += [
        ("seconds a step", f"{wall / len(history):.1f}"),
        ("generated tokens/s", f"{last.generated_tokens_per_second:,.0f}"),
        ("mean gap, nats", f"{last.gap_mean:.1e}"),
    ]
    subtitle = f"{config.model.name} on {config.data.source}, {config.loss.name}, {config.training.method} training"
    return _PAGE.substitute(
        name=html.escape(config.run.name),
        subtitle=html.escape(subtitle),
        facts="".join(f"<div><b>{value}</b><span>{label}</span></div>" for label, value in facts),
        alarms="".join(f'<p class="alarm">{html.escape(text)}</p>' for text in alarms(history).values()),
        svg=svg,
        account=account_rows(history),
        config=html.escape(settings.to_toml(config)),
    )


def account_rows(history: Sequence[StepMetrics]) -> str:
    """The whole run's accounting as table rows; the shares add up to 100 % because "unaccounted" is among them."""
    wall = sum(metrics.account.wall for metrics in history)
    totals: dict[str, float] = {
        name: sum(metrics.account.seconds.get(name, 0.0) for metrics in history) for name in PHASES
    }
    rows = sorted(((name, seconds) for name, seconds in totals.items() if seconds), key=lambda row: -row[1])
    rows.append(("unaccounted", sum(metrics.account.unaccounted for metrics in history)))
    share = 100 / wall if wall > 0 else 0.0
    cells = [
        f"<tr><td>{name}</td><td>{seconds:.2f}</td><td>{seconds * share:.1f} %</td></tr>" for name, seconds in rows
    ]
    total = f'<tr class="sum"><td>all steps</td><td>{wall:.2f}</td><td>{wall * share:.1f} %</td></tr>'
    return "".join([*cells, total])
