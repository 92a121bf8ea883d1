"""The journal: what is read back, what a torn or damaged file costs, and what a full or closed disk says."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import fsspec
import numpy as np
import pytest

from locojax.config import load
from locojax.errors import CheckpointError
from locojax.hosts import journal, journal_files
from locojax.hosts.journal import Journal, ledgers, recalled, rollout_files
from locojax.hosts.journal_begun import unfinished
from locojax.hosts.journal_files import MAGIC, frame, open_folder, unframe
from locojax.hosts.journal_records import (
    Admitted,
    Decoded,
    Drawn,
    Evaluated,
    Graded,
    Piece,
    Published,
    Sampled,
    Saved,
    Started,
    Trained,
    completion_mark,
    decode,
    encode,
    fingerprint,
)
from locojax.hosts.journal_resume import Resumption, deciding, lives, resumption, trained_in_force
from locojax.rollout.request import Begun, Gained
from locojax.types import Completion, Prompt, Reward

PROMPTS = [Prompt(f"p/{i}", f"{i}+1=", (5, 6, i), str(i + 1), {}) for i in range(3)]


def completion(sample: int, version: int = 0, text: str = "a\ud800\n") -> Completion:
    tokens = (7, 8 + sample, 2)
    return Completion(sample, tokens, np.array([-0.5, -1e-7, -3], np.float32), text, "stop", 2, version)


def started(rank: int = 0, run: int = 1, next_step: int = 0, num_hosts: int = 1, **settings: str) -> Started:
    return Started(run, rank, num_hosts, next_step, 12, 3, None, settings)


def group(version: int = 0) -> tuple[Completion, ...]:
    return (completion(0, version), completion(1, version))


RECORDS = [
    started(a="1"),
    Drawn(3, (0, 2), ("p/0", "p/2")),
    Admitted(3, 3, (0, 2), ("f", "g")),
    Decoded(3, (Piece(0, 1, 4, (7, 8, 9), (-0.5, -1.0, -0.25)), Piece(2, 0, 0, (3,), (-2.0,)))),
    Sampled(3, 2, "p/2", "f", 0.25, group()),
    Graded(3, 2, 1, 77, Reward(0.1 + 0.2)),
    Graded(3, 2, 0, 77, Reward(None, error="grader died: ü")),
    Graded(3, 2, 0, 77, Reward(1)),
    Graded(3, 2, 0, 77, Reward(-math.inf)),
    Trained(3, 3, 4, (0, 2), ("p/0", "p/2"), None),
    Published(4),
    Evaluated(-1, None),
    Saved(4),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_comes_back_as_it_was(record):
    found = decode(encode(record))
    if not isinstance(record, Sampled):
        assert found == record
        return
    assert isinstance(found, Sampled) and dataclasses.replace(found, completions=()) == dataclasses.replace(
        record, completions=()
    )
    for ours, theirs in zip(record.completions, found.completions, strict=True):
        assert theirs.logprobs.dtype == np.float32 and np.array_equal(theirs.logprobs, ours.logprobs)
        assert dataclasses.replace(theirs, logprobs=ours.logprobs) == ours


def test_a_record_of_another_version_is_refused_with_a_way_on():
    with pytest.raises(CheckpointError, match="can't be understood: KeyError 'Dreamt'.*run.journal=off"):
        decode(b'{"kind":"Dreamt"}\n')


def test_a_file_cut_at_any_byte_of_its_last_record_keeps_the_others(tmp_path):
    whole = MAGIC + b"".join(frame(encode(record)) for record in RECORDS[:4])
    last = len(frame(encode(RECORDS[3])))
    path = tmp_path / "ledger.host0.log"
    for cut in range(len(whole) - last, len(whole)):
        path.write_bytes(whole[:cut])
        folder = open_folder(str(tmp_path))
        found, torn = journal.read(folder, path.name)
        assert len(found) == 3 and torn == cut - (len(whole) - last), cut
        file = folder.appender(path.name)
        file.append(encode(RECORDS[5]))
        file.close()
        found, torn = journal.read(folder, path.name)
        assert found[3:] == [RECORDS[5]] and torn == 0, cut


def test_a_flipped_bit_anywhere_is_seen():
    payloads = [encode(record) for record in RECORDS[:3]]
    whole = MAGIC + b"".join(map(frame, payloads))
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        found, good = unframe(bytes(damaged))
        assert found == payloads[: len(found)] and len(found) < 3 and good <= at, at


def test_a_tail_of_zeros_is_no_record():
    assert unframe(MAGIC + bytes(64)) == ([], len(MAGIC))


def test_a_foreign_file_is_not_written_over(tmp_path):
    (tmp_path / "ledger.host0.log").write_text("somebody's diary")
    with pytest.raises(CheckpointError, match=r"ledger\.host0\.log does not begin as a journal does"):
        Journal(open_folder(str(tmp_path)), started(), recalls=True)
    assert (tmp_path / "ledger.host0.log").read_text() == "somebody's diary"


def write_step(folder, *, step: int = 3, rank: int = 0, grades=((0, 0), (0, 1), (1, 0)), version: int = 3) -> None:
    """Two groups sampled, of which the grades in `grades` (index, sample) are there."""
    with Journal(folder, started(rank), recalls=True) as made:
        notes = made.step(step, [0, 1, 2], PROMPTS, policy_version=version, group_size=2)
        for index in (0, 1):
            notes.sampled(index, group(version), 1.5)
        for index, sample in grades:
            notes.graded(index, group(version)[sample], Reward(float(sample)))


@pytest.mark.parametrize("where", ["{tmp}/journal", "memory://journal-{name}"])
def test_what_was_sampled_and_graded_is_known_again(where, tmp_path, request):
    path = where.format(tmp=tmp_path, name=tmp_path.name)
    write_step(open_folder(path))
    with Journal(open_folder(path), started(run=2), recalls=True) as again:
        known = again.step(3, [0, 1, 2], PROMPTS, policy_version=3, group_size=2).known
    assert sorted(known) == [0, 1] and known[0].seconds == 1.5
    assert known[0].rewards == (Reward(0.0), Reward(1.0)) and known[1].rewards == (Reward(0.0), None)
    assert known[0].completions[1].tokens == (7, 9, 2)
    records = ledgers(open_folder(path))[0][0]
    assert [type(record).__name__ for record in records] == ["Started", "Drawn"] * 2


def test_what_is_cut_off_is_said(tmp_path):
    folder, said = open_folder(str(tmp_path)), []
    write_step(folder)
    path = tmp_path / "rollouts" / "step_000003.host0.log"
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(folder, started(run=2), recalls=True, say=said.append) as again:
        known = again.step(3, [0, 1, 2], PROMPTS, policy_version=3, group_size=2).known
    assert known[1].rewards == (None, None), "the torn grade is given again"
    (text,) = said
    assert text.startswith("the journal's rollouts/step_000003.host0.log ended in a torn record: its last ")
    assert journal.read(folder, "rollouts/step_000003.host0.log")[1] == 0


def test_what_is_no_longer_asked_for_is_not_used(tmp_path):
    folder = open_folder(str(tmp_path))
    write_step(folder)
    other = [dataclasses.replace(PROMPTS[0], answer="9"), *PROMPTS[1:]]
    cases = [
        (PROMPTS, 4, 2, []),  # other weights
        (PROMPTS, 3, 3, []),  # a larger group
        (other, 3, 2, [1]),  # another answer
    ]
    for prompts, version, size, expected in cases:
        with Journal(folder, started(run=2), recalls=True) as again:
            assert sorted(again.step(3, [0, 1, 2], prompts, policy_version=version, group_size=size).known) == expected
    with Journal(folder, started(run=2), recalls=False) as again:
        assert not again.step(3, [0, 1, 2], PROMPTS, policy_version=3, group_size=2).known


def test_grades_and_groups_may_be_in_different_hosts_files(tmp_path):
    """Resumed on another number of hosts, a host grades what another had sampled."""
    folder = open_folder(str(tmp_path))
    write_step(folder, rank=1)
    with Journal(folder, started(0, run=2), recalls=True) as again:
        notes = again.step(3, [1], PROMPTS[1:2], policy_version=3, group_size=2)
        notes.graded(0, notes.known[0].completions[1], Reward(0.5))
    records = [record for name in rollout_files(folder)[3] for record in journal.read(folder, name)[0]]
    assert recalled(records)[1][0].rewards == (Reward(0.0), Reward(0.5))


def test_a_late_grade_of_an_earlier_step_is_dropped_and_rollouts_are_forgotten_in_time(tmp_path):
    folder = open_folder(str(tmp_path))
    with Journal(folder, started(), recalls=False) as made:
        old = made.step(0, [0], PROMPTS[:1], policy_version=0, group_size=2)
        for step in (1, 2, 3):
            made.step(step, [0], PROMPTS[:1], policy_version=step, group_size=2)
        old.graded(0, completion(0), Reward(1.0))
        made.saved(4, oldest_kept=2)
    assert sorted(rollout_files(folder)) == [2, 3]
    admitted = Admitted(3, 3, (0,), (fingerprint(PROMPTS[0]),))
    assert journal.read(folder, "rollouts/step_000003.host0.log")[0] == [admitted]


def gains(*lengths: tuple[int, int, int, int], version: int = 3) -> list[tuple[int, Gained]]:
    """(index, sample, start, count) of each piece; token i of a sample is 10 * sample + i, its log-prob -i."""
    return [
        (index, Gained("r", sample, start,
                       Begun(tuple(10 * sample + i for i in range(start, start + count)),
                             tuple(-float(i) for i in range(start, start + count)), version)))
        for index, sample, start, count in lengths
    ]  # fmt: skip


def begun(*lengths: int, version: int = 3) -> dict[int, Begun]:
    """Samples 0, 1, ... of so many tokens each."""
    return {sample: gains((0, sample, 0, n), version=version)[0][1].begun for sample, n in enumerate(lengths) if n}


def test_what_was_being_sampled_is_gone_on_with(tmp_path):
    folder = open_folder(str(tmp_path))
    with Journal(folder, started(), recalls=False) as made:
        notes = made.step(3, [0, 1, 2], PROMPTS, policy_version=3, group_size=2)
        assert notes.begun == {}
        notes.gained(gains((0, 0, 0, 2), (0, 1, 0, 2), (1, 1, 0, 1), (2, 0, 0, 2)))
        notes.gained(gains((0, 0, 2, 1), (0, 1, 2, 2)))
        notes.gained([])
        notes.sampled(2, group(3), 0.5)
    with Journal(folder, started(run=2), recalls=True) as again:
        notes = again.step(3, [0, 1, 2], PROMPTS, policy_version=3, group_size=2)
        assert notes.begun == {0: begun(3, 4), 1: begun(0, 1)} and set(notes.known) == {2}
        notes.gained(gains((0, 0, 3, 2)))  # lost once more
    with Journal(folder, started(run=3), recalls=True) as third:
        assert third.step(3, [0], PROMPTS[:1], policy_version=3, group_size=2).begun == {0: begun(5, 4)}
    other = [dataclasses.replace(PROMPTS[0], tokens=(9,)), *PROMPTS[1:]]
    for prompts, version, size, expected in (
        (PROMPTS, 3, 1, {0: begun(5)}),  # smaller groups; of the second, sample 1 alone was begun
        (PROMPTS, 4, 2, {}),  # other weights
        (other, 3, 2, {1: begun(0, 1)}),  # another prompt
    ):
        with Journal(folder, started(rank=1, run=4), recalls=True) as again:
            found = again.step(3, [0, 1], prompts[:2], policy_version=version, group_size=size).begun
            assert {index: samples for index, samples in found.items() if samples} == expected


def test_pieces_of_other_weights_are_void_and_a_host_goes_on_with_the_file_that_has_most():
    admitted = [Admitted(3, version, (0,), ("f",)) for version in (3, 4)]
    first, more, new = (
        Decoded(3, (Piece(0, 0, start, tuple(range(start, end)), (-1.0,) * (end - start)),))
        for start, end in ((0, 2), (2, 5), (0, 1))
    )
    (group,) = unfinished([[admitted[0], first, more]])[0]
    assert group.samples == {0: Begun((0, 1, 2, 3, 4), (-1.0,) * 5, 3)} and group.num_tokens == 5
    (group,) = unfinished([[admitted[0], first, admitted[1], new]])[0]
    assert (group.version, group.num_tokens) == (4, 1)
    (group,) = unfinished([[admitted[0], first, more, admitted[0], new]])[0]  # it began anew
    assert group.num_tokens == 1
    files = [[admitted[0], first], [admitted[0], more], [admitted[0]]]  # the second went on with the first's
    assert [each.num_tokens for each in unfinished(files)[0]] == [2]


def test_fingerprints_and_marks_tell_apart():
    assert fingerprint(PROMPTS[0]) != fingerprint(dataclasses.replace(PROMPTS[0], meta={"a": 1}))
    assert completion_mark(completion(0)) != completion_mark(completion(1))


def trained(step: int, run_ids=("p/0",)) -> Trained:
    return Trained(step, step, step + 1, (0,), tuple(run_ids), None)


def test_a_resumption_counts_what_was_trained_and_names_what_changed():
    first = [started(num_hosts=2, lr="1"), trained(0), Evaluated(0, 0.5), trained(1), trained(2)]
    second = [started(1, num_hosts=2, lr="1"), trained(0), trained(1)]
    found = resumption({0: first, 1: second}, 1, {"lr": "1"})
    assert found == Resumption(2, 1, 3, {0: 0.5}, (), 2) and Resumption.decode(found.encode()) == found
    # A start that was lost early knows as much as the one before it.
    again = [*first, started(run=2, next_step=1, lr="1"), trained(1)]
    assert resumption({0: again}, 1, {"lr": "1"}).lost_step == 3
    other = resumption({0: first}, 1, {"lr": "2", "new": "x"})
    assert other.changed == ("lr", "new") and other.lost_step == 1 and other.evaluations == {0: 0.5}
    mixed = [*first, started(run=2, next_step=1, lr="2"), trained(1), Evaluated(1, 0.7)]
    assert resumption({0: mixed}, 1, {"lr": "2"}) == Resumption(3, 1, 2, {1: 0.7}, (), 1)
    assert resumption({}, 4, {}) == Resumption(1, 4, 4)


def test_a_later_start_voids_what_it_trains_again():
    ledger = [started(), trained(0), trained(1), trained(2), started(run=2, next_step=1), trained(1), trained(2)]
    assert [record.step for record in trained_in_force(lives({0: ledger}))] == [0, 1, 2]
    assert len(lives({0: ledger})) == 2


def test_what_the_reward_s_file_holds_decides(tmp_path, monkeypatch):
    reward = tmp_path / "grading_of_a_test.py"
    text = "def score(prompt, completion, answer, meta):\n    return 1.0\n"
    monkeypatch.syspath_prepend(tmp_path)
    for spec in (f"{reward}:score", "grading_of_a_test:score"):
        reward.write_text(text)
        before = deciding(load(None, [f"data.reward={spec}"]))
        assert before == deciding(load(None, [f"data.reward={spec}"]))
        reward.write_text(text.replace("1.0", "0.5"))
        after = deciding(load(None, [f"data.reward={spec}"]))
        assert [key for key in before if before[key] != after[key]] == ["data.reward's text"]
    assert deciding(load(None, ["data.reward=nowhere.py:score"]))["data.reward's text"] == ""
    assert deciding(load(None, ["data.reward=no_such_module:score"]))["data.reward's text"] == ""


def test_settings_that_decide_and_settings_that_are_free():
    base = load(None, [])
    free = load(None, ["run.keep_last=9", "hosts.balance=false", "grading.num_workers=2", "run.num_steps=99"])
    assert deciding(free) == deciding(base)
    for key in ("optimizer.learning_rate=1", "rollout.temperature=0.5", "data.reward=exact", "loss.name=ppo"):
        name = key.partition("=")[0]
        theirs = deciding(load(None, [key]))
        assert [k for k, v in deciding(base).items() if theirs[k] != v] == [name]
    decaying = "optimizer.schedule=linear"
    assert deciding(load(None, [decaying])) != deciding(load(None, [decaying, "run.num_steps=99"]))


def test_a_full_disk_is_told_and_what_came_before_stays(tmp_path):
    """A process that may write no file above 4 KiB stands in for a full disk."""
    script = f"""
import resource, signal
from locojax.errors import CheckpointError
from locojax.hosts.journal_files import open_folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
file = open_folder({str(tmp_path)!r}).appender("ledger.host0.log")
for number in range(100):
    try:
        file.append(b"x" * 200)
    except CheckpointError as error:
        print(number, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    number, text = int(lines[0].split()[0]), lines[0]
    assert "can't be written: File too large" in text and "Free some space and continue with --resume" in text
    assert len(lines) == 100 - number, "every later record is refused too: none may follow a torn one"
    payloads, torn = open_folder(str(tmp_path)).read("ledger.host0.log")
    assert len(payloads) == number and torn > 0


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"The journal in '.*file/journal' can't be written: Not a directory"):
        Journal(open_folder(str(tmp_path / "file" / "journal")), started(), recalls=False)
    with pytest.raises(CheckpointError, match="The journal in 'nowhere://a' can't be opened: .*nowhere"):
        open_folder("nowhere://a")
    with pytest.raises(CheckpointError, match="can't be written: Read-only file system.*run.journal"):
        with journal_files.reporting("a", "written"):
            raise OSError(30, os.strerror(30))


def test_a_sync_that_fails_is_told_by_the_next_call(tmp_path, monkeypatch):
    file = open_folder(str(tmp_path)).appender("ledger.host0.log")
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="can't be written: Input/output error"):
        file.sync(wait=True)
    with pytest.raises(CheckpointError, match="can't be written: Input/output error"):
        file.append(b"more")
    monkeypatch.setattr(os, "fsync", real)


def test_an_object_store_gets_whole_parts(tmp_path):
    path = f"memory://parts-{tmp_path.name}"
    for part in ("a", "b"):
        file = open_folder(path).appender("ledger.host0.log")
        file.append(part.encode())
        file.sync(wait=True)
        file.append(part.upper().encode())
        file.close()
    assert open_folder(path).read("ledger.host0.log") == ([b"a", b"A", b"b", b"B"], 0)
    assert len(fsspec.filesystem("memory").find(path.removeprefix("memory:/"))) == 4
    open_folder(path).remove("ledger.host0.log")
    assert open_folder(path).names() == []
