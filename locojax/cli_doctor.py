"""`locojax doctor RUN`: does what a run left prove that nothing was lost or done twice?"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

from locojax.config import Config, load
from locojax.errors import ConfigError, LocoError
from locojax.hosts.checkpoint import Checkpoints
from locojax.hosts.journal import ledgers
from locojax.hosts.journal_check import Findings, check_journal, check_metrics, check_rollouts
from locojax.hosts.journal_files import Folder, open_folder
from locojax.hosts.journal_resume import journal_folder, lives
from locojax.hosts.runlog import read_metrics
from locojax.hosts.shared_checkpoints import CHECKPOINTS

WRONG = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument("words", metavar="RUN", nargs="+", help="a run's folder, as runs/demo")
    parser.add_argument("--no-checkpoints", action="store_true", help="don't read the checkpoints: they may be large")
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Prints what was found, of each run; 0 if nothing is wrong, else 1."""
    code = 0
    for word in options.words:
        found = examine(pathlib.Path(word), reads_checkpoints=not options.no_checkpoints)
        print(f"{word}: {'nothing is wrong' if not found.wrong else f'{len(found.wrong)} wrong'}")
        for label, texts in (("proven", found.proven), ("note", found.notes), ("WRONG", found.wrong)):
            for text in texts:
                print(f"  {label:6}  {text}")
        code = WRONG if found.wrong else code
    return code


def examine(run_folder: pathlib.Path, *, reads_checkpoints: bool = True) -> Findings:
    """Everything that a run left, checked.

    Raises:
      ConfigError: it isn't a run's folder.
    """
    written = run_folder / "config.toml"
    if not written.exists():
        raise ConfigError(f"{str(run_folder)!r} is not a run's folder: it has no config.toml")
    config, found = load(written), Findings()
    versions: Sequence[tuple[int, int]] = ()
    if config.run.journal == "off":
        found.notes.append("the run kept no journal (run.journal=off): only metrics and checkpoints can be checked")
    else:
        folder = _journal(config, run_folder)
        records, torn = ledgers(folder)
        versions = check_journal(records, torn, found)
        check_rollouts(folder, lives(records), found)
    metrics = read_metrics(run_folder / "metrics.jsonl")
    check_metrics(metrics, versions if config.run.journal != "off" else [(0, m.policy_version) for m in metrics], found)
    if reads_checkpoints:
        _check_checkpoints(run_folder / CHECKPOINTS, config, versions, found)
    return found


def _journal(config: Config, run_folder: pathlib.Path) -> Folder:
    """In the folder that was named, wherever it has been moved to."""
    return open_folder(str(run_folder / "journal")) if config.run.journal == "auto" else journal_folder(config)


def _check_checkpoints(
    path: pathlib.Path, config: Config, versions: Sequence[tuple[int, int]], found: Findings
) -> None:
    """Every checkpoint's files have their sums, it loads, and holds the weights that the journal says."""
    if not path.is_dir():
        found.notes.append("there is no checkpoint yet")
        return
    checkpoints = Checkpoints(path, config, read_only=True)
    damaged = checkpoints.check(set_aside=False)
    found.wrong += damaged
    for step in checkpoints.steps():
        if any(f"step {step} is damaged" in text for text in damaged):
            continue
        try:
            position = checkpoints.position(step)
            state = checkpoints.restore_as_saved(step)
        except LocoError as error:
            found.wrong.append(str(error))
            continue
        version = int(np.asarray(state["policy_version"]))
        if position.next_step != step:
            found.wrong.append(f"the checkpoint of step {step} says that it is of step {position.next_step}")
        elif versions and step <= len(versions) and step > 0 and versions[step - 1][1] != version:
            found.wrong.append(
                f"the checkpoint of step {step} holds policy version {version}, and the journal says "
                f"{versions[step - 1][1]}"
            )
        elif versions and step > len(versions):
            found.wrong.append(f"there is a checkpoint of step {step}, and the journal ends at step {len(versions)}")
        else:
            found.proven.append(f"the checkpoint of step {step} loads, and holds policy version {version}")
    checkpoints.close()


