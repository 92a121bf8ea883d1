"""`locojax compare A B`: are the launches of A faster than those of B, on equal work?"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from typing import Any

from rich.console import Console

from locojax.errors import ConfigError
from locojax.measure import compare_report
from locojax.measure.compare import MARGIN, compare
from locojax.measure.launches import find_launches
from locojax.measure.speedup import NUM_RESAMPLES

EPILOG = """\
A and B are each a run's folder, a folder of several launches' folders, or a pattern ('runs/co-*'). Without a shell's
help, list launches by --a and --b. The launches must have done equal work: the same prompts in the same order on every
step, prompt lengths within half a token, mean and longest output within a ratio of 0.8 to 1.25, shares of completions
cut off within 10 points; otherwise nothing is compared, and the exit code is 2.

Make comparable launches with run.passes=2: the run's batches are gone through twice, and the second pass is scored.

  locojax train co.toml run.passes=2 run.num_steps=20 run.name=co-1      # and co-2, co-3; the same for single-1 ...
  locojax compare 'runs/co-*' 'runs/single-*' --plot speedup.png
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `locojax compare`."""
    parser.add_argument("words", metavar="A B", nargs="*", help="the two sides' launches")
    parser.add_argument("--a", nargs="+", metavar="RUN", help="launches of A, instead of the first argument")
    parser.add_argument("--b", nargs="+", metavar="RUN", help="launches of B, instead of the second argument")
    parser.add_argument("--passes", type=int, choices=(1, 2), default=2,
                        help="2: a run is two passes over its batches, the second is scored. 1: all steps but the first"
                        " are scored (default 2)")  # fmt: skip
    parser.add_argument("--margin", type=float, default=MARGIN,
                        help=f"A is called faster if both speed-ups surely exceed this (default {MARGIN})")  # fmt: skip
    parser.add_argument("--welch", action="store_true",
                        help="Welch's intervals on launches' logarithms: for modes of one stack")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the resampling (default 0)")
    parser.add_argument("--resamples", type=int, default=NUM_RESAMPLES,
                        help=f"of the bootstrap (default {NUM_RESAMPLES})")  # fmt: skip
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw it there (.png, .svg, .pdf)")
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser.epilog = EPILOG
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Compares, shows the table, writes what was asked for. 0 whatever the verdict; 2 if there can be none."""
    side_a, side_b = _sides(options)
    for name in ("seed", "resamples"):
        if (value := getattr(options, name)) < (1 if name == "resamples" else 0):
            raise ConfigError(f"Argument --{name} is out of range", got=value)
    comparison = compare(
        find_launches(side_a),
        find_launches(side_b),
        passes=options.passes,
        margin=options.margin,
        seed=options.seed,
        num_resamples=options.resamples,
        method="welch" if options.welch else "bootstrap",
    )
    Console().print(compare_report.table(comparison))
    if options.json is not None:
        _write(options.json, lambda path: path.write_text(json.dumps(compare_report.to_json(comparison), indent=1)))
    if options.plot is not None:
        _write(options.plot, lambda path: compare_report.draw(comparison, path))
    return 0


def _sides(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    words = options.words
    if options.a and options.b and not words:
        return options.a, options.b
    if len(words) != 2 or options.a or options.b:
        given = [*words, *(f"--{name}" for name in ("a", "b") if getattr(options, name))]
        raise ConfigError(
            "locojax compare compares two sides",
            got=" ".join(given) or "none",
            expected="locojax compare A B, or --a and --b with the launches of each",
        )
    return [words[0]], [words[1]]


def _write(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for a format that it doesn't know
        raise ConfigError(f"The file {str(path)!r} can't be written: {error}") from error
