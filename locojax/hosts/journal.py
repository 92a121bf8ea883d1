"""What a run has done, written down as it is done, so that a run that lost its machine goes on where it stood.

Each host writes two kinds of files (`journal_files`) of records (`journal_records`):

    ledger.host0.log                 starts, draws, trained batches, published versions, evaluations; kept for good
    rollouts/step_000037.host0.log   one step's completions, as they are sampled and when they are whole, and their
                                     grades; kept as long as a checkpoint before it is

A record is the operating system's as it is written; an fsync is begun after each finished group (at most every 0.2 s)
and each trained batch, and awaited when the run ends. Losing the process loses nothing that was written; losing the
machine, at most what came after the last fsync, which is then sampled or trained again, to the same tokens. No jax.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from locojax.errors import CheckpointError
from locojax.hosts.journal_begun import Unfinished, unfinished
from locojax.hosts.journal_files import Appender, Folder
from locojax.hosts.journal_records import (
    Admitted,
    Decoded,
    Drawn,
    Evaluated,
    Graded,
    Piece,
    Published,
    Record,
    Sampled,
    Saved,
    Started,
    Trained,
    completion_mark,
    decode,
    encode,
    fingerprint,
)
from locojax.rollout.request import Begun, Gained
from locojax.types import Completion, Prompt, Reward

_LEDGER = re.compile(r"ledger\.host(\d+)\.log")
_ROLLOUTS = re.compile(r"rollouts/step_(\d+)\.host(\d+)\.log")


@dataclasses.dataclass(frozen=True)
class Recalled:
    """A group that an earlier process sampled. `rewards[i]` None: sample i was not graded yet."""

    prompt: str  # `fingerprint`
    completions: tuple[Completion, ...]
    rewards: tuple[Reward | None, ...]
    seconds: float

    @property
    def num_graded(self) -> int:
        return sum(reward is not None for reward in self.rewards)


class Journal:
    """One host's journal of one process of the run.

    Args:
      folder: where all hosts' journals are, or this host's.
      started: written first.
      recalls: whether the rollouts found there are of this run, and may be used.
      say: told of what is cut off.

    Raises:
      CheckpointError: it can't be read or written, by any method.

    Example:
      with Journal(open_folder("runs/a/journal"), started, recalls=True) as journal:
          notes = journal.step(3, places, prompts, policy_version=3)
          notes.known, notes.sampled(0, completions, 1.5), notes.graded(0, 0, Reward(1.0))
          journal.trained(3, 3, 4, places, prompts, None)
    """

    def __init__(
        self, folder: Folder, started: Started, *, recalls: bool, say: Callable[[str], None] = lambda text: None
    ):
        self._folder, self._rank, self._say = folder, started.rank, say
        self._found = rollout_files(folder) if recalls else {}
        self._ledger = folder.appender(f"ledger.host{started.rank}.log")
        self._rollouts: Appender | None = None  # this step's
        self._before: Appender | None = None  # the last step's
        self._rollouts_step = -1
        self._lock = threading.Lock()  # guards the three, and the time
        self.seconds = 0.0  # spent writing, by all threads
        self._add(self._ledger, started)
        self._ledger.sync(wait=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:  # else what ended the run is told, not what it led to
                raise

    def step(
        self, step: int, places: Sequence[int], prompts: Sequence[Prompt], *, policy_version: int, group_size: int
    ) -> StepNotes:
        """Notes of a step whose prompts have just been drawn; `places`: theirs in the batch of all hosts."""
        self._drawn(step, places, prompts)
        found, begun = self._recalled(step)
        if step != self._rollouts_step:
            self._open_rollouts(step)  # cuts off a torn tail, so what was found of it has been said
        notes = StepNotes(self, step, found, begun, policy_version, group_size)
        notes._extend(places, prompts)
        return notes

    def trained(
        self,
        step: int,
        version_before: int,
        version_after: int,
        places: Sequence[int],
        prompts: Sequence[Prompt],
        skipped: str | None,
    ) -> None:
        """The step's batch went into the weights, or could not (`skipped`)."""
        ids = tuple(prompt.prompt_id for prompt in prompts)
        if self._rollouts is not None:
            self._rollouts.sync()
        self._add(self._ledger, Trained(step, version_before, version_after, tuple(places), ids, skipped))
        self._ledger.sync()

    def published(self, version: int) -> None:
        self._add(self._ledger, Published(version))

    def evaluated(self, step: int, accuracy: float) -> None:
        """`step` -1: before the first."""
        self._add(self._ledger, Evaluated(step, accuracy if accuracy == accuracy else None))

    def saved(self, next_step: int, *, oldest_kept: int) -> None:
        """A checkpoint was begun. Rollouts of steps before `oldest_kept` will not be asked for again."""
        self._add(self._ledger, Saved(next_step))
        self._ledger.sync()
        for step, names in rollout_files(self._folder).items():
            for name in names if step < oldest_kept else ():
                self._folder.remove(name)

    def close(self) -> None:
        """Returns when everything is on disk."""
        with self._lock:
            files = [file for file in (self._before, self._rollouts) if file is not None]
            self._before = self._rollouts = None
        try:
            for file in files:
                file.close()
        finally:
            self._ledger.close()

    def _drawn(self, step: int, places: Sequence[int], prompts: Sequence[Prompt]) -> None:
        self._add(self._ledger, Drawn(step, tuple(places), tuple(prompt.prompt_id for prompt in prompts)))

    def _open_rollouts(self, step: int) -> None:
        start = time.perf_counter()
        new = self._folder.appender(f"rollouts/step_{step:06d}.host{self._rank}.log")
        with self._lock:
            old, self._before, self._rollouts, self._rollouts_step = self._before, self._rollouts, new, step
        if old is not None:  # of two steps ago: by now it is on disk, and nobody waits
            old.close()
        with self._lock:
            self.seconds += time.perf_counter() - start

    def _recalled(self, step: int) -> tuple[Mapping[int, Sequence[Recalled]], Mapping[int, Sequence[Unfinished]]]:
        files = []
        for name in self._found.get(step, ()):
            records, torn = read(self._folder, name)
            files.append(records)
            if torn:
                self._say(torn_tail(name, torn))
        return recalled(record for records in files for record in records), unfinished(files)

    def _add(self, file: Appender, record: Record) -> None:
        start = time.perf_counter()
        file.append(encode(record))
        with self._lock:
            self.seconds += time.perf_counter() - start

    def _add_rollout(self, step: int, record: Admitted | Decoded | Sampled | Graded) -> None:
        start = time.perf_counter()
        payload = encode(record)
        with self._lock:
            if self._rollouts is None or step != self._rollouts_step:
                return  # a grade that comes when its step was given up
            self._rollouts.append(payload)
            self._rollouts.sync()
            self.seconds += time.perf_counter() - start


class StepNotes:
    """One host's notes of one step, by index of its prompts. Filled by `Journal.step`.

    Attributes:
      known: what an earlier process sampled of it, under the same weights.
      begun: of prompts that aren't known, by sample, what an earlier process had sampled before it was lost.
    """

    def __init__(
        self,
        journal: Journal,
        step: int,
        found: Mapping[int, Sequence[Recalled]],
        unfinished: Mapping[int, Sequence[Unfinished]],
        policy_version: int,
        group_size: int,
    ):
        self._journal, self._step, self._found, self._unfinished = journal, step, found, unfinished
        self._policy_version, self._group_size = policy_version, group_size
        self._places: list[int] = []
        self._prompts: list[Prompt] = []
        self.known: dict[int, Recalled] = {}
        self.begun: dict[int, Mapping[int, Begun]] = {}

    def draw(self, place: int, prompt: Prompt) -> None:
        """One prompt more is this host's, the next by index."""
        self._journal._drawn(self._step, [place], [prompt])
        self._extend([place], [prompt])

    def _extend(self, places: Sequence[int], prompts: Sequence[Prompt]) -> None:
        to_sample: dict[int, str] = {}  # by place
        for index, (place, prompt) in enumerate(zip(places, prompts, strict=True), start=len(self._places)):
            found = self._found.get(place, ())
            usable = [each for each in found if _is_of(each, prompt, self._policy_version, self._group_size)]
            if usable:
                self.known[index] = max(usable, key=lambda each: each.num_graded)
                continue
            to_sample[place] = fingerprint(prompt)
            of = to_sample[place], self._policy_version
            begun = [each for each in self._unfinished.get(place, ()) if (each.prompt, each.version) == of]
            if begun:
                samples = max(begun, key=lambda each: each.num_tokens).samples
                self.begun[index] = {i: part for i, part in samples.items() if i < self._group_size}
        self._places += places
        self._prompts += prompts
        if to_sample:
            admitted = Admitted(self._step, self._policy_version, tuple(to_sample), tuple(to_sample.values()))
            self._journal._add_rollout(self._step, admitted)

    def gained(self, gained: Iterable[tuple[int, Gained]]) -> None:
        """What samples that run have gained, each with the index of its prompt."""
        pieces = tuple(
            Piece(self._places[index], each.sample_index, each.start, each.begun.tokens, each.begun.logprobs)
            for index, each in gained
        )
        if pieces:
            self._journal._add_rollout(self._step, Decoded(self._step, pieces))

    def sampled(self, index: int, completions: Sequence[Completion], seconds: float) -> None:
        """All completions of a prompt are there, `seconds` after the step's first admission."""
        prompt = self._prompts[index]
        record = Sampled(
            self._step, self._places[index], prompt.prompt_id, fingerprint(prompt), seconds, tuple(completions)
        )
        self._journal._add_rollout(self._step, record)

    def graded(self, index: int, completion: Completion, reward: Reward) -> None:
        """One completion has its grade; any thread may say so."""
        mark = completion_mark(completion)
        self._journal._add_rollout(
            self._step, Graded(self._step, self._places[index], completion.sample_index, mark, reward)
        )


def torn_tail(name: str, num_bytes: int) -> str:
    """What is said of a file that ends in the middle of a record."""
    return f"the journal's {name} ended in a torn record: its last {num_bytes} bytes are cut off"


def read(folder: Folder, name: str) -> tuple[list[Record], int]:
    """(a file's records, bytes of its torn tail)."""
    payloads, torn = folder.read(name)
    return [decode(payload) for payload in payloads], torn


def ledgers(folder: Folder) -> tuple[dict[int, list[Record]], dict[str, int]]:
    """(every ledger's records by rank, torn bytes by file name)."""
    found, torn = {}, {}
    for name in folder.names():
        if match := _LEDGER.fullmatch(name):
            found[int(match[1])], num_torn = read(folder, name)
            if num_torn:
                torn[name] = num_torn
    return found, torn


def rollout_files(folder: Folder) -> dict[int, list[str]]:
    """Names of the files that hold rollouts, of all hosts, by step."""
    found: dict[int, list[str]] = {}
    for name in folder.names():
        if match := _ROLLOUTS.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    return found


def discard_rollouts(folder: Folder, first_step: int) -> None:
    """Removes all hosts' rollouts from a step on: they belong to a run that went another way."""
    for step, names in rollout_files(folder).items():
        for name in names if step >= first_step else ():
            folder.remove(name)


def recalled(records: Iterable[Record]) -> dict[int, list[Recalled]]:
    """Of one step's records, by place, the groups that were sampled, each with what grades there are.

    A grade may stand in another host's file than its completion: the hosts' shares change with their number.
    """
    groups: list[Sampled] = []
    rewards: dict[tuple[int, int, int], Reward] = {}
    for record in records:
        if isinstance(record, Sampled):
            groups.append(record)
        elif isinstance(record, Graded):
            rewards[record.place, record.sample, record.of] = record.reward
    found: dict[int, list[Recalled]] = {}
    for group in groups:
        of_each = tuple(
            rewards.get((group.place, each.sample_index, completion_mark(each))) for each in group.completions
        )
        found.setdefault(group.place, []).append(Recalled(group.prompt, group.completions, of_each, group.seconds))
    return found


def _is_of(group: Recalled, prompt: Prompt, policy_version: int, group_size: int) -> bool:
    """Whether it is what would be sampled now."""
    versions = {completion.policy_version for completion in group.completions}
    return group.prompt == fingerprint(prompt) and versions == {policy_version} and len(group.rewards) == group_size
