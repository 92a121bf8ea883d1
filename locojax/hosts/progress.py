"""The run on the terminal: a live line while something is going on, a lasting line a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from locojax.hosts.metrics import StepMetrics

_REFRESH_SECONDS = 0.2
SLOW, SLOW_SECONDS = 1.3, 0.1  # times the median, and by so much: a host that is worth naming


class Progress:
    """Shows what a run is doing. On a terminal the current activity is live; elsewhere each line stands for itself.

    Only long, rare activities (loading, compiling) get a line of their own in a plain log.

    Example:
      with Progress(Console(), num_steps=20) as progress:
          progress.begin("load", "smollm2-135m")
          progress.generate(step=0, done=57, total=128, tokens_per_second=812.0)
          progress.step(metrics, alarms(history))
    """

    def __init__(self, console: Console, num_steps: int, *, clock: Callable[[], float] = time.perf_counter):
        self._console, self._num_steps, self._clock = console, num_steps, clock
        self._start = clock()
        self._shown = 0.0
        self._alarms: frozenset[str] = frozenset()
        self._status = Status("starting", console=console) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, activity: str, detail: str = "") -> None:
        """A long activity begins. Example: begin("compile", "training step")"""
        text = f"{activity} {detail}".rstrip()
        if self._status is None:
            self._print(Text(f"[{self._clock() - self._start:6.1f} s] {text} ..."))
        else:
            self._status.update(Text(text))

    def generate(self, step: int, done: int, total: int, tokens_per_second: float) -> None:
        """`done` of `total` completions are finished."""
        self._live(step, f"generate {done}/{total} completions, {tokens_per_second:,.0f} tokens/s")

    def train(self, step: int, done: int, total: int) -> None:
        """`done` of `total` micro-batches are through forward and backward."""
        self._live(step, f"train {done}/{total} micro-batches")

    def evaluate(self, step: int, done: int, total: int) -> None:
        """`done` of `total` held-out prompts are answered."""
        self._live(step, f"evaluate {done}/{total} held-out prompts")

    def step(self, metrics: StepMetrics, alarms: Mapping[str, str]) -> None:
        """A step has ended: its line, and those alarms that did not sound the step before."""
        self._print(Text(step_line(metrics, self._num_steps)))
        for kind, text in alarms.items():
            if kind not in self._alarms:
                self._print(Text("  ! " + text, style="yellow"))
        self._alarms = frozenset(alarms)

    def note(self, text: str) -> None:
        """A line that stays. Example: note("held-out accuracy 0.05 before training")"""
        self._print(Text(text))

    def _live(self, step: int, text: str) -> None:
        now = self._clock()
        if self._status is not None and now - self._shown >= _REFRESH_SECONDS:
            self._shown = now
            self._status.update(Text(f"step {step + 1}/{self._num_steps}  {text}"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def step_line(metrics: StepMetrics, num_steps: int) -> str:
    """One step in one line, in columns that line up from step to step."""
    width = len(str(num_steps))
    account = metrics.account
    largest = sorted(account.seconds.items(), key=lambda item: -item[1])[:3]
    share = 100 / account.wall if account.wall > 0 else 0.0
    parts = [
        f"step {metrics.step + 1:{width}d}/{num_steps}",
        f"reward {metrics.reward_mean:5.3f}",
        f"{metrics.completion_tokens_mean:4.0f} tokens",
        f"{metrics.generated_tokens_per_second:6,.0f} tokens/s",
        f"gap {metrics.gap_mean:.0e}",
        f"{account.wall:5.1f} s: " + ", ".join(f"{name} {seconds * share:.0f} %" for name, seconds in largest),
    ]
    if slow := slow_host(metrics.generate_seconds):
        parts.append(slow)
    if num_stolen := int(metrics.extra.get("num_stolen_groups", 0)):
        parts.append(f"{num_stolen} group{'s' * (num_stolen > 1)} stolen")
    if metrics.held_out is not None:
        parts.append(f"held-out {metrics.held_out:.2f}")
    return "  ".join(parts)


def slow_host(generate_seconds: Sequence[float]) -> str | None:
    """Who kept the others waiting. Example: "slowest host 1: 3.2 s, median 2.1 s"."""
    if len(generate_seconds) < 2:
        return None
    slowest, median = max(generate_seconds), statistics.median(generate_seconds)
    if slowest <= SLOW * median or slowest - median < SLOW_SECONDS:
        return None
    return f"slowest host {list(generate_seconds).index(slowest)}: {slowest:.1f} s, median {median:.1f} s"
