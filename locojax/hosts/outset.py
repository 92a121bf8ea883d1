"""Where a run begins, or goes on, alike on all hosts: settings, the newest sound checkpoint, the journal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable

from locojax import settings
from locojax.config import Config
from locojax.errors import CheckpointError, ConfigError
from locojax.hosts.checkpoint import Position
from locojax.hosts.group import Group
from locojax.hosts.journal import Journal, discard_rollouts, ledgers, torn_tail
from locojax.hosts.journal_files import Folder
from locojax.hosts.journal_records import Started
from locojax.hosts.journal_resume import (
    REWARD_TEXT,
    Resumption,
    check_new,
    deciding,
    has_begun,
    journal_folder,
    resumption,
)
from locojax.hosts.shared_checkpoints import SharedCheckpoints
from locojax.rl.batches import BatchOrder
from locojax.rl.rewards import source_digest

_MAY_DIFFER = ("run.dir", "run.cache_", "run.journal")
"""Settings that may be a host's own."""


def check_same_settings(config: Config, group: Group) -> None:
    """Raises ConfigError, on every host, unless all were started with the same settings."""
    if group.size == 1:
        return
    lines = [f"{leaf.key}={settings.get(config, leaf.key)}" for leaf in settings.leaves(Config)]
    lines.append(f"{REWARD_TEXT}={source_digest(config.data.reward)}")
    mine = [line for line in lines if not line.startswith(_MAY_DIFFER)]
    digests = [hashlib.blake2b(line.encode(), digest_size=6).hexdigest() for line in mine]
    said = [text.split() for text in group.exchange("start", " ".join(digests))]
    for other, theirs in enumerate(said):
        differ = [line.partition("=")[0] for line, *pair in zip(mine, digests, theirs, strict=True) if len({*pair}) > 1]
        if differ:
            raise ConfigError(
                f"Hosts {group.rank} and {other} were started with different settings: {', '.join(differ)}",
                remedy="Start every host with the same configuration",
            )


@dataclasses.dataclass(frozen=True)
class Outset:
    """Filled by `find_outset`, alike on all hosts.

    Attributes:
      goes_on: whether the run has begun before.
      restores: whether the weights come from a checkpoint; else from the model.
    """

    position: Position
    goes_on: bool
    restores: bool
    resumption: Resumption

    def first_new_step(self) -> int:
        """The first step that was not trained before; those from `position` up to it are trained again, from what was
        sampled and graded for them."""
        return self.resumption.lost_step


def find_outset(
    config: Config, group: Group, checkpoints: SharedCheckpoints, *, resume: bool | None, say: Callable[[str], None]
) -> Outset:
    """Where this start of the run begins; a meeting or two.

    Args:
      resume: None: goes on if the run has begun, on host 0.

    Raises:
      CheckpointError: there is nothing to go on from, or it was made with other settings, or can't be read; or a new
        run's journal is there already. On host 0: the others then end with it.
    """
    folder = journal_folder(config)
    if not resume:
        # Host 0 looks before the meeting, and the others write after it: they may share the folder.
        if resume is False and group.is_first:
            check_new(folder)
        begun = group.is_first and resume is None and has_begun(config)
        if not group.agree("begin", [begun])[0, 0]:
            return Outset(Position(0, None, None), False, False, Resumption())
    told = json.dumps(_told(config, checkpoints, folder, must=bool(resume))) if group.is_first else ""
    fields = json.loads(group.exchange("resume", told)[0])
    found = Outset(Position(**fields["position"]), True, fields["restores"], Resumption.decode(fields["resumption"]))
    for note in fields["notes"]:
        say(note)
    if found.restores:
        checkpoints.goes_on_from(found.position)
    before, now = found.resumption.num_hosts_before, group.size
    if before not in (0, now):
        say(f"{_hosts(now)} now, {_hosts(before)} before: prompts are shared out anew, what was graded is kept")
    if found.resumption.changed:
        discard_rollouts(folder, found.position.next_step)
        names = ", ".join(found.resumption.changed)
        say(f"other settings than before ({names}): steps from {found.position.next_step + 1} on are sampled anew")
    return found


def _told(config: Config, checkpoints: SharedCheckpoints, folder: Folder, *, must: bool) -> dict[str, object]:
    """What host 0 tells the others. `must`: there must be something to go on from."""
    records, torn = ledgers(folder)
    notes = [torn_tail(name, size) for name, size in torn.items()]
    damaged, position = checkpoints.newest_sound()
    has_begun_before = any(records.values())
    if position is None and (damaged or (must and not has_begun_before)):
        raise CheckpointError(
            f"There is no {'sound ' if damaged else ''}checkpoint to resume from in {str(checkpoints.folder)!r}",
            got="; ".join(damaged) or None,
            remedy="Run once more with --resume to begin again from what the journal holds"
            if damaged and has_begun_before
            else "Start without --resume, or check run.dir and run.name",
        )
    start = position or Position(0, None, None)
    found = resumption(records, start.next_step, deciding(config))
    if position is None and -1 in found.evaluations:
        start = Position(0, found.evaluations[-1], found.evaluations[-1])
    return {
        "position": dataclasses.asdict(start),
        "restores": position is not None,
        "resumption": found.encode(),
        "notes": damaged + notes,
    }


def open_journal(
    config: Config, group: Group, outset: Outset, order: BatchOrder, say: Callable[[str], None]
) -> Journal:
    """This host's journal of this start.

    Raises:
      CheckpointError: it can't be written.
    """
    resumed = outset.resumption
    started = Started(
        run=resumed.run,
        rank=group.rank,
        num_hosts=group.size,
        next_step=outset.position.next_step,
        num_prompts=order.num_prompts,
        prompts_per_step=order.batch_size,
        period=order.period,
        settings=deciding(config),
    )
    return Journal(journal_folder(config), started, recalls=resumed.run > 1, say=say)


def _hosts(number: int) -> str:
    return "1 host" if number == 1 else f"{number} hosts"
