"""Which of two ways to run the same work is faster: equal work first, then a speed-up with its uncertainty.

The protocol is the LoCoJAX paper's (arXiv 2611.16301). Both sides go through the same batches twice, and the second
pass is scored: by then everything is compiled and warm. Each side is launched several times. Before any speed is looked
at, the launches must be shown to have done the same work; if they did not, there is no result.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from locojax.errors import ComparisonError
from locojax.measure import speedup
from locojax.measure.launches import Launch, StepWork, read_launch
from locojax.measure.speedup import NUM_RESAMPLES, Scored, Speedup, Verdict

MARGIN = 1.111
"""A speed-up counts from here on: A needs 10 % less time."""

MAX_PROMPT_GAP = 0.5  # tokens, between a step's mean prompt lengths
OUTPUT_RATIOS = (0.8, 1.25)  # of mean and of longest output
MAX_TRUNCATION_GAP = 0.10
_OWN_SETTINGS = ("run.name", "run.dir", "run.cache_dir")  # differ between any two launches
_UNEQUAL = "The launches did not do equal work"

Method = Literal["bootstrap", "welch"]


@dataclasses.dataclass(frozen=True)
class Side:
    """The launches of A or of B, and their scored steps. Filled by `compare`."""

    name: Literal["A", "B"]
    launches: tuple[Launch, ...]
    scored: tuple[tuple[StepWork, ...], ...]  # [L][S]

    @property
    def times(self) -> Scored:
        return Scored(
            np.array([[step.seconds for step in steps] for steps in self.scored]),
            np.array([[step.output_tokens.sum() for step in steps] for steps in self.scored], np.float64),
        )

    def work(self) -> dict[str, float]:
        """What its launches worked on, in the mean of all of them; `longest_output` of them all. In tokens, but for
        `truncated_share`."""
        steps = [step for launch in self.scored for step in launch]
        return {
            "prompt": float(np.mean([step.prompt_tokens.mean() for step in steps])),
            "output": mean_output(steps),
            "longest_output": longest_output(steps),
            "truncated_share": truncated_share(steps),
        }

    def label(self, index: int) -> str:
        """How a launch is called in a refusal. Example: "A (runs/co-1)"."""
        return f"{self.name} ({self.launches[index].folder})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A against B. Filled by `compare`; shown by `compare_report`.

    Attributes:
      first_scored: steps from this one on were scored.
      differences: settings that differ between the sides, by key: A's and B's values, each as text.
    """

    a: Side
    b: Side
    speedup: Speedup
    method: Method
    margin: float
    passes: int
    seed: int
    num_resamples: int
    first_scored: int
    differences: dict[str, tuple[str, str]]

    @property
    def verdict(self) -> Verdict:
        return self.speedup.verdict(self.margin)


def compare(
    a: Sequence[pathlib.Path],
    b: Sequence[pathlib.Path],
    *,
    passes: int = 2,
    margin: float = MARGIN,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    method: Method = "bootstrap",
) -> Comparison:
    """Compares the launches of A with those of B.

    Args:
      a, b: run folders.
      passes: 2: a run's steps are two passes over the same batches (`run.passes=2`), and the second is scored. 1: every
        step but the first, which compiles, is scored.
      seed: of the resampling.

    Raises:
      ComparisonError: a run can't be scored so, or the launches did not do equal work; the step and both figures are
        named.
    """
    if margin < 1:
        raise ComparisonError("The margin is a speed-up to be exceeded", got=margin, expected="at least 1")
    sides = []
    for name, folders in (("A", a), ("B", b)):
        launches = tuple(read_launch(folder) for folder in folders)
        scored = tuple(scored_steps(launch, passes) for launch in launches)
        sides.append(Side(name, launches, scored))  # type: ignore[arg-type]  # name is one of the two literals
    side_a, side_b = sides
    check_equal_work(side_a, side_b)
    if method == "welch":
        found = speedup.welch(side_a.times, side_b.times)
    else:
        found = speedup.bootstrap(side_a.times, side_b.times, seed=seed, num_resamples=num_resamples)
    first = side_a.scored[0][0].step
    return Comparison(
        side_a, side_b, found, method, margin, passes, seed, num_resamples, first, _differences(side_a, side_b)
    )


def scored_steps(launch: Launch, passes: int) -> tuple[StepWork, ...]:
    """The last pass over the batches, checked to be of the same prompts as the one before; of one pass, all but step 0.

    Raises:
      ComparisonError: the steps are not `passes` times the same batches, or there is none to score.
    """
    steps = launch.steps
    if passes == 1:
        if len(steps) < 2:
            problem = f"The run {launch.folder} has nothing to score: its first step only warms up"
            raise ComparisonError(problem, got="1 step", expected="at least 2")
        return steps[1:]
    remedy = "Train with run.passes=2, or compare with --passes 1, which scores every step after the first"
    if len(steps) % passes:
        problem = f"The run {launch.folder} is not {passes} passes over the same batches"
        raise ComparisonError(problem, got=f"{len(steps)} steps", remedy=remedy)
    size = len(steps) // passes
    before, last = steps[-2 * size : -size], steps[-size:]
    for one, other in zip(before, last, strict=True):
        if difference := _first_difference(one.prompt_ids, other.prompt_ids):
            got = f"steps {one.step} and {other.step}: {difference}"
            problem = f"The run {launch.folder} is not {passes} passes over the same batches"
            raise ComparisonError(problem, got=got, expected="the same prompts in the same order", remedy=remedy)
    return last


def check_equal_work(a: Side, b: Side) -> None:
    """Holds every launch against A's first. Raises ComparisonError for the first thing that differs too much."""
    reference, name = a.scored[0], a.label(0)
    for side in (a, b):
        for index, steps in enumerate(side.scored):
            if steps is not reference:
                _check_pair(reference, steps, name, side.label(index))


def _check_pair(steps_a: Sequence[StepWork], steps_b: Sequence[StepWork], name_a: str, name_b: str) -> None:
    def refuse(got: str, expected: str) -> None:
        raise ComparisonError(_UNEQUAL, got=f"{got} ({name_a} and {name_b})", expected=expected)

    if len(steps_a) != len(steps_b):
        refuse(f"{len(steps_a)} and {len(steps_b)} scored steps", "as many steps")
    for one, other in zip(steps_a, steps_b, strict=True):
        if difference := _first_difference(one.prompt_ids, other.prompt_ids):
            refuse(f"step {one.step}: {difference}", "the same prompts in the same order on every step")
        means = one.prompt_tokens.mean(), other.prompt_tokens.mean()
        if abs(means[0] - means[1]) > MAX_PROMPT_GAP:
            got = f"step {one.step}: mean prompt length {means[0]:.2f} and {means[1]:.2f} tokens"
            refuse(got, f"at most {MAX_PROMPT_GAP:g} token apart on every step")
        if len(one.output_tokens) != len(other.output_tokens):
            got = f"step {one.step}: {len(one.output_tokens)} and {len(other.output_tokens)} completions"
            refuse(got, "as many completions on every step")
    low, high = OUTPUT_RATIOS
    for what, measure in (("mean output length", mean_output), ("longest output", longest_output)):
        values = measure(steps_a), measure(steps_b)
        if not low * values[0] <= values[1] <= high * values[0]:
            worst = _most_apart(steps_a, steps_b, measure)
            got = f"{what} {values[0]:.1f} and {values[1]:.1f} tokens, most apart at {worst}"
            refuse(got, f"a ratio within {low:g} to {high:g}")
    shares = truncated_share(steps_a), truncated_share(steps_b)
    if abs(shares[0] - shares[1]) > MAX_TRUNCATION_GAP:
        worst = _most_apart(steps_a, steps_b, lambda steps: 100 * truncated_share(steps))
        got = f"{100 * shares[0]:.1f} % and {100 * shares[1]:.1f} % of completions cut off, most apart at {worst}"
        refuse(got, f"at most {100 * MAX_TRUNCATION_GAP:g} points apart")
    if not mean_output(steps_a) or not mean_output(steps_b):
        refuse("no output tokens", "completions with tokens")


def mean_output(steps: Sequence[StepWork]) -> float:
    """Mean length of the completions, in tokens."""
    return float(np.concatenate([step.output_tokens for step in steps]).mean())


def longest_output(steps: Sequence[StepWork]) -> float:
    """Length of the longest completion, in tokens."""
    return float(max(step.output_tokens.max() for step in steps))


def truncated_share(steps: Sequence[StepWork]) -> float:
    """Share of completions that were cut off, in 0..1."""
    return sum(step.num_truncated for step in steps) / sum(len(step.output_tokens) for step in steps)


def _most_apart(
    steps_a: Sequence[StepWork], steps_b: Sequence[StepWork], measure: Callable[[Sequence[StepWork]], float]
) -> str:
    """The step at which a figure differs most, with both of its values there."""
    values = [(one.step, measure([one]), measure([other])) for one, other in zip(steps_a, steps_b, strict=True)]
    step, value_a, value_b = max(values, key=lambda item: abs(item[1] - item[2]))
    return f"step {step}: {value_a:.1f} and {value_b:.1f}"


def _first_difference(one: Sequence[str], other: Sequence[str]) -> str | None:
    """Where two batches differ first, None if nowhere. Example: "prompt 3 is addition/17 and addition/4"."""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} prompts"
    for index, (left, right) in enumerate(zip(one, other, strict=True), start=1):
        if left != right:
            return f"prompt {index} is {left} and {right}"
    return None


def _differences(a: Side, b: Side) -> dict[str, tuple[str, str]]:
    keys = dict.fromkeys(key for side in (a, b) for launch in side.launches for key in launch.settings)
    found = {}
    for key in keys:
        if key not in _OWN_SETTINGS:
            left, right = (_values(side, key) for side in (a, b))
            if left != right:
                found[key] = (left, right)
    return found


def _values(side: Side, key: str) -> str:
    values = dict.fromkeys(str(launch.settings.get(key, "none")) for launch in side.launches)
    return ", ".join(values)
