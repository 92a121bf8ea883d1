"""What the terminal and a plain log show."""

from __future__ import annotations

import io

from make_metrics import step_metrics
from rich.console import Console

from locojax.hosts.metrics import RunResult
from locojax.hosts.progress import Progress, slow_host, step_line


def shown(*, terminal: bool, act) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    times = iter(range(1000))
    with Progress(console, 20, clock=lambda: float(next(times))) as progress:
        act(progress)
    return out.getvalue()


def test_a_plain_log_has_one_line_per_long_activity_and_step():
    def act(progress):
        progress.begin("load", "smollm2-135m")
        for done in range(128):
            progress.generate(0, done, 128, 812.4)
        progress.train(0, 1, 4)
        progress.step(step_metrics(0), {})

    assert shown(terminal=False, act=act).splitlines() == [
        "[   1.0 s] load smollm2-135m ...",
        "step  1/20  reward 0.250    12 tokens     812 tokens/s  gap 2e-07    4.0 s: decode 50 %, train 38 %",
    ]


def test_a_terminal_sees_the_rate_while_it_generates():
    text = shown(terminal=True, act=lambda progress: progress.generate(2, 57, 128, 1812.4))
    assert "step 3/20  generate 57/128 completions, 1,812 tokens/s" in text


def test_an_alarm_is_told_when_it_starts_not_at_every_step():
    def act(progress):
        for step, alarm in enumerate([{"flat": "It is flat."}, {"flat": "Still flat."}, {}, {"flat": "Flat again."}]):
            progress.step(step_metrics(step), alarm)

    told = [line for line in shown(terminal=False, act=act).splitlines() if "!" in line]
    assert told == ["  ! It is flat.", "  ! Flat again."]


def test_text_in_brackets_is_not_taken_for_markup():
    assert "answer [bold] x" in shown(terminal=False, act=lambda progress: progress.note("answer [bold] x"))


def test_lines():
    assert step_line(step_metrics(9, held_out=0.875), 200).startswith("step  10/200  reward 0.250")
    assert step_line(step_metrics(9, held_out=0.875), 200).endswith("train 38 %  held-out 0.88")
    assert RunResult(14, 0.05, 1.0, 92.4, "runs/demo").line() == "held-out accuracy 0.05 -> 1.00 in 14 steps, 92 s"
    assert RunResult(3, None, None, 9.6, "runs/demo").line() == "trained 3 steps, 10 s"


def test_a_slow_host_is_named_in_the_step_line():
    assert slow_host([]) is None and slow_host([3.0]) is None and slow_host([2.0, 2.5, 2.1]) is None
    assert slow_host([0.01, 0.05]) is None  # of a hundredth of a second nobody need hear
    assert slow_host([1.0, 3.2, 2.1]) == "slowest host 1: 3.2 s, median 2.1 s"
    line = step_line(step_metrics(0, generate_seconds=(1.0, 3.2, 2.1)), 20)
    assert line.endswith("slowest host 1: 3.2 s, median 2.1 s")
