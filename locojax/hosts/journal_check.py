"""Does a journal prove that every prompt was trained once? What `locojax doctor` finds in it, in words. No jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from locojax.hosts.journal import read, recalled, rollout_files
from locojax.hosts.journal_files import Folder
from locojax.hosts.journal_records import Record, Started, Trained
from locojax.hosts.journal_resume import Life, lives, trained_in_force
from locojax.hosts.metrics import StepMetrics

_SHOWN = 3


@dataclasses.dataclass
class Findings:
    """What was looked at: `proven` holds, `notes` is of interest, `wrong` must not be."""

    proven: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


def check_journal(
    ledgers: Mapping[int, Sequence[Record]], torn: Mapping[str, int], found: Findings
) -> list[tuple[int, int]]:
    """Every step trained once, by every host, each prompt once an epoch, versions without a gap.

    Returns:
      of each step, its (policy version before, after); what can't be told is left out.
    """
    for name, size in torn.items():
        found.notes.append(f"{name} ends in a torn record of {size} bytes; the next start cuts it off")
    all_lives = lives(ledgers)
    if not all_lives:
        found.wrong.append("the journal holds no start of the run")
        return []
    before = len(found.wrong)
    by_step: dict[int, list[Trained]] = collections.defaultdict(list)
    for record in trained_in_force(all_lives):
        by_step[record.step].append(record)
    num_steps = max(by_step, default=-1) + 1
    if num_steps:
        found.notes.append(f"{_count(num_steps, 'step')} in {_count(len(all_lives), 'start')} of the run")
    ids_of: dict[int, list[str]] = {}
    for step in range(num_steps):
        ids = _check_step(step, by_step.get(step, ()), all_lives[0].started, found)
        if ids is not None:
            ids_of[step] = ids
    _check_epochs(ids_of, all_lives[-1].started, found)
    versions = _check_versions(by_step, num_steps, found)
    if num_steps and len(found.wrong) == before:
        found.proven.append(f"{_count(sum(map(len, ids_of.values())), 'prompt')} of {_count(num_steps, 'step')} "
                            "trained once each")  # fmt: skip
        found.proven.append(f"versions {versions[0][0]} to {versions[-1][1]}, without a gap")
    return versions


def _check_step(step: int, records: Sequence[Trained], started: Started, found: Findings) -> list[str] | None:
    """The step's prompts in the order of the batch, or None if they can't be told."""
    name = f"step {step + 1}"
    if not records:
        found.wrong.append(f"{name} has no record that it was trained, and later ones have")
        return None
    ids = [""] * started.prompts_per_step
    times = collections.Counter(place for record in records for place in record.places)
    for record in records:
        for place, prompt_id in zip(record.places, record.prompt_ids, strict=True):
            if place < len(ids):
                ids[place] = prompt_id
    missing = [place for place in range(len(ids)) if not times[place]]
    if missing:
        found.wrong.append(f"{name}: {_count(len(missing), 'prompt')} of {len(ids)} not trained, at {_few(missing)}")
    if twice := [place for place, count in times.items() if count > 1]:
        found.wrong.append(f"{name}: trained more than once: {_few([ids[place] for place in twice])}")
    if len({(record.version_before, record.version_after) for record in records}) > 1:
        told = ", ".join(f"{record.version_before} to {record.version_after}" for record in records)
        found.wrong.append(f"{name}: the hosts disagree on the policy version: {told}")
    return None if missing else ids


def _check_epochs(ids_of: Mapping[int, Sequence[str]], started: Started, found: Findings) -> None:
    """Every prompt at most once before all have been there."""
    seen: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
    for step, ids in sorted(ids_of.items()):
        round_, index = (0, step) if started.period is None else divmod(step, started.period)
        for place, prompt_id in enumerate(ids):
            epoch = (index * started.prompts_per_step + place) // started.num_prompts
            if prompt_id in seen[round_, epoch]:
                found.wrong.append(f"step {step + 1}: {prompt_id} was trained before, in the same epoch ({epoch + 1})")
            seen[round_, epoch].add(prompt_id)


def _check_versions(by_step: Mapping[int, Sequence[Trained]], num_steps: int, found: Findings) -> list[tuple[int, int]]:
    versions = [(by_step[step][0].version_before, by_step[step][0].version_after) for step in range(num_steps)
                if by_step.get(step)]  # fmt: skip
    if versions and versions[0][0] != 0:
        found.wrong.append(f"the first step began with policy version {versions[0][0]}, not 0")
    for step, (one, next_one) in enumerate(zip(versions, versions[1:], strict=False), start=1):
        if one[1] != next_one[0]:
            found.wrong.append(f"step {step} ended with policy version {one[1]}, and step {step + 1} began with "
                               f"{next_one[0]}")  # fmt: skip
    return versions


def check_metrics(metrics: Sequence[StepMetrics], versions: Sequence[tuple[int, int]], found: Findings) -> None:
    """Every step has one line, under the version that the journal says."""
    before = len(found.wrong)
    times = collections.Counter(line.step for line in metrics)
    num_steps = max(times, default=-1) + 1
    for step in range(num_steps):
        if times[step] != 1:
            found.wrong.append(f"metrics.jsonl has {times[step] or 'no'} lines of step {step + 1}, not 1")
    for line in metrics:
        if line.step < len(versions) and line.policy_version != versions[line.step][1]:
            found.wrong.append(
                f"metrics.jsonl says policy version {line.policy_version} after step {line.step + 1}, the journal "
                f"{versions[line.step][1]}"
            )
    if len(versions) < num_steps:
        found.wrong.append(f"metrics.jsonl has {_count(num_steps, 'step')}, and the journal {len(versions)}")
    if num_steps and len(found.wrong) == before:
        found.proven.append(f"{_count(num_steps, 'step')} in metrics.jsonl, one line each")


def check_rollouts(folder: Folder, all_lives: Sequence[Life], found: Findings) -> None:
    """Of the rollouts that are still kept: what was graded, and that nothing was sampled twice."""
    num_graded = num_open = num_again = 0
    for _, names in sorted(rollout_files(folder).items()):
        records = []
        for name in names:
            part, torn = read(folder, name)
            records += part
            if torn:
                found.notes.append(f"{name} ends in a torn record of {torn} bytes; it will be sampled or graded again")
        for groups in recalled(records).values():
            best = max(group.num_graded for group in groups)
            num_graded += best
            num_open += len(groups[0].rewards) - best
            seen = collections.Counter((group.prompt, group.completions[0].policy_version) for group in groups)
            num_again += sum(count - 1 for count in seen.values())
    if num_again:
        found.wrong.append(f"{_count(num_again, 'group')} of the rollouts kept were sampled more than once")
    text = f"{_count(num_graded, 'graded completion')} kept for a resume"
    found.notes.append(text + (f", and {num_open} not graded yet" if num_open else ""))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _few(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
