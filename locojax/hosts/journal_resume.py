"""Where a run that was lost goes on, told from its journal: what still holds, and what is void. No jax."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from locojax import settings
from locojax.config import Config, run_folder
from locojax.errors import CheckpointError
from locojax.hosts.journal import ledgers
from locojax.hosts.journal_files import Folder, NoFolder, open_folder
from locojax.hosts.journal_records import Evaluated, Record, Started, Trained
from locojax.rl.rewards import source_digest

_FREE = (
    "run.dir", "run.name", "run.cache_", "run.journal", "run.grace_seconds", "run.pipelined", "run.eval_",
    "run.checkpoint_every", "run.checkpoint_at_end", "run.keep_last", "run.keep_best", "run.max_gap",
    "run.max_idle_steps", "hosts.", "report.", "grading.", "rollout.max_slots", "rollout.kv_memory_gib",
    "rollout.decode_iterations", "training.rows", "training.row_tokens", "training.remat", "training.mesh_",
)  # fmt: skip
"""Settings that change neither what is sampled nor what is learnt from it: a resumed run may have others."""

REWARD_TEXT = "data.reward's text"
"""Named as a setting where it is another one than before, or than another host's."""


def journal_folder(config: Config) -> Folder:
    """Where this run's journal is, by `run.journal`."""
    where = config.run.journal
    if where == "off":
        return NoFolder()
    if where == "auto":
        return open_folder(str(run_folder(config) / "journal"))
    return open_folder(f"{where.rstrip('/')}/{config.run.name}")


def deciding(config: Config) -> dict[str, str]:
    """The resolved settings that decide what is sampled and learnt, in words, and what the reward's file holds."""
    free = list(_FREE)
    if config.optimizer.schedule == "constant" and config.run.passes == 1:
        free.append("run.num_steps")  # else the learning rate, or the batches, follow from it
    values = {leaf.key: str(settings.get(config, leaf.key)) for leaf in settings.leaves(Config)}
    values[REWARD_TEXT] = source_digest(config.data.reward)
    return {key: value for key, value in values.items() if not key.startswith(tuple(free))}


@dataclasses.dataclass(frozen=True)
class Life:
    """One start of the run, on all hosts whose ledgers are at hand. Filled by `lives`."""

    started: Started  # of its first host
    records: tuple[Record, ...]  # of all its hosts


def lives(of_hosts: Mapping[int, Sequence[Record]]) -> list[Life]:
    """The run's starts, in order."""
    found: dict[int, tuple[Started, list[Record]]] = {}
    for _, records in sorted(of_hosts.items()):
        current: list[Record] = []
        for record in records:
            if isinstance(record, Started):
                _, current = found.setdefault(record.run, (record, []))
            current.append(record)
    return [Life(started, tuple(records)) for _, (started, records) in sorted(found.items())]


def trained_in_force(all_lives: Sequence[Life]) -> list[Trained]:
    """What the weights are made of: a start goes on from a checkpoint, and voids what was trained from there on."""
    found = []
    for index, life in enumerate(all_lives):
        later = min((other.started.next_step for other in all_lives[index + 1 :]), default=None)
        for record in life.records:
            if isinstance(record, Trained) and (later is None or record.step < later):
                found.append(record)
    return found


@dataclasses.dataclass(frozen=True)
class Resumption:
    """How a run goes on. Filled by host 0; all hosts go by it.

    Attributes:
      run: the number of this start.
      next_step: of the checkpoint, or 0.
      lost_step: the first step that was not trained before the run was lost, >= `next_step`.
      evaluations: held-out accuracies found by then, by step; NaN is None. -1: before the first step.
      changed: settings that decide what is learnt, and differ: the journal's steps from `next_step` on are void.
      num_hosts_before: of the last start; 0: there was none.
    """

    run: int = 1
    next_step: int = 0
    lost_step: int = 0
    evaluations: Mapping[int, float | None] = dataclasses.field(default_factory=dict)
    changed: tuple[str, ...] = ()
    num_hosts_before: int = 0

    def encode(self) -> str:
        return json.dumps({**vars(self), "evaluations": list(self.evaluations.items())})

    @classmethod
    def decode(cls, text: str) -> Resumption:
        fields = json.loads(text)
        return cls(**{**fields, "evaluations": dict(fields["evaluations"]), "changed": tuple(fields["changed"])})


def resumption(found_ledgers: Mapping[int, Sequence[Record]], next_step: int, now: Mapping[str, str]) -> Resumption:
    """Where the run goes on, from a checkpoint of `next_step`, under the deciding settings `now`."""
    found = lives(found_ledgers)
    if not found:
        return Resumption(next_step=next_step, lost_step=next_step)
    last = found[-1].started
    changed = tuple(key for key in sorted({*now, *last.settings}) if now.get(key) != last.settings.get(key))
    trained, evaluations = next_step, dict[int, float | None]()
    for life in found:
        if life.started.settings != last.settings:  # a later start went another way
            trained, evaluations = next_step, {}
            continue
        for record in life.records:
            if isinstance(record, Trained):
                trained = max(trained, record.step + 1)
            elif isinstance(record, Evaluated):
                evaluations[record.step] = record.accuracy
    if changed:
        trained = next_step
        evaluations = {step: accuracy for step, accuracy in evaluations.items() if step < next_step}
    return Resumption(last.run + 1, next_step, trained, evaluations, changed, last.num_hosts)


def has_begun(config: Config) -> bool:
    """Whether the run has left anything to go on from."""
    folder = run_folder(config)
    return (folder / "metrics.jsonl").exists() or _holds_a_run(journal_folder(config))


def check_new(folder: Folder) -> None:
    """Raises CheckpointError if a run's journal is there already."""
    if _holds_a_run(folder):
        raise CheckpointError(
            f"The journal {folder.path!r} already holds a run",
            remedy="Continue it with --resume, choose another run.name, or remove the folder",
        )


def _holds_a_run(folder: Folder) -> bool:
    return any(ledgers(folder)[0].values())
