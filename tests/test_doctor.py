"""`locojax doctor`: what it proves of a sound run's records, and the words for each thing that can be wrong."""

from __future__ import annotations

import dataclasses

import pytest

from locojax import cli
from locojax.hosts.journal_check import Findings, check_journal, check_metrics
from locojax.hosts.journal_records import Record, Started, Trained
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.phases import StepAccount


def started(run: int = 1, next_step: int = 0, rank: int = 0) -> Started:
    return Started(run, rank, 2, next_step, 4, 2, None, {})


def trained(step: int, *places: int, ids: tuple[str, ...] = ("a", "b"), before: int | None = None) -> Trained:
    before = step if before is None else before
    return Trained(step, before, before + 1, places, tuple(ids[place] for place in places), None)


SOUND: dict[int, list[Record]] = {
    0: [started(), trained(0, 0), trained(1, 1, ids=("c", "d")), started(2, 1), trained(1, 0, ids=("c", "d"))],
    1: [started(rank=1), trained(0, 1), started(2, 1, rank=1), trained(1, 1, ids=("c", "d"))],
}


def wrong(ledgers: dict[int, list[Record]]) -> list[str]:
    found = Findings()
    check_journal(ledgers, {}, found)
    assert bool(found.proven) != bool(found.wrong)
    return found.wrong


def test_a_sound_journal_is_proof():
    found = Findings()
    assert check_journal(SOUND, {"ledger.host0.log": 7}, found) == [(0, 1), (1, 2)]
    assert found.proven == ["4 prompts of 2 steps trained once each", "versions 0 to 2, without a gap"]
    assert found.notes[0] == "ledger.host0.log ends in a torn record of 7 bytes; the next start cuts it off"
    assert not found.wrong


@pytest.mark.parametrize(
    ("ledgers", "text"),
    [
        ({}, "the journal holds no start of the run"),
        ({0: [started(), trained(1, 0, 1)]}, "step 1 has no record that it was trained, and later ones have"),
        ({0: SOUND[0], 1: SOUND[1][:1]}, "step 1: 1 prompt of 2 not trained, at 1"),
        ({0: [started(), trained(0, 0, 1), trained(0, 1)]}, "step 1: trained more than once: b"),
        ({0: [started(), trained(0, 0, 1), trained(1, 0, 1)]}, "step 2: a was trained before, in the same epoch (1)"),
        (
            {0: [started(), trained(0, 0, 1), trained(1, 0, 1, ids=("c", "d"), before=4)]},
            "step 1 ended with policy version 1, and step 2 began with 4",
        ),
        ({0: [started(), trained(0, 0, 1, before=3)]}, "the first step began with policy version 3, not 0"),
        (
            {0: [started(), trained(0, 0)], 1: [started(rank=1), trained(0, 1, before=1)]},
            "step 1: the hosts disagree on the policy version: 0 to 1, 1 to 2",
        ),
    ],
)
def test_what_is_wrong_is_said_in_words(ledgers, text):
    assert text in wrong(ledgers)


def test_a_prompt_comes_again_in_the_next_epoch_and_pass():
    four = [("a", "b"), ("c", "d"), ("b", "a"), ("d", "c")]
    ledger: list[Record] = [started(), *(trained(step, 0, 1, ids=ids) for step, ids in enumerate(four))]
    assert not wrong({0: ledger})
    first = dataclasses.replace(started(), period=1)
    assert not wrong({0: [first, trained(0, 0, 1), trained(1, 0, 1)]})


def line(step: int, version: int) -> StepMetrics:
    numbers = {field.name: 0 for field in dataclasses.fields(StepMetrics) if field.default is dataclasses.MISSING}
    return StepMetrics(**{**numbers, "step": step, "policy_version": version, "account": StepAccount(step, {}, 1.0)})


def test_metrics_are_held_against_the_journal():
    found = Findings()
    check_metrics([line(0, 1), line(2, 9), line(2, 3)], [(0, 1), (1, 2), (2, 3)], found)
    assert found.wrong == [
        "metrics.jsonl has no lines of step 2, not 1",
        "metrics.jsonl has 2 lines of step 3, not 1",
        "metrics.jsonl says policy version 9 after step 3, the journal 3",
    ]
    found = Findings()
    check_metrics([line(0, 1), line(1, 2)], [(0, 1)], found)
    assert found.wrong == ["metrics.jsonl has 2 steps, and the journal 1"]
    found = Findings()
    check_metrics([line(0, 1)], [(0, 1)], found)
    assert found.proven == ["1 step in metrics.jsonl, one line each"]


def test_the_command_takes_run_folders_only(tmp_path, capsys):
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "is not a run's folder: it has no config.toml" in capsys.readouterr().err


def test_the_command_prints_and_its_code_is_1_when_something_is_wrong(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "journal").mkdir()
    assert cli.main(["doctor", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert f"{tmp_path}: 1 wrong" in printed and "WRONG   the journal holds no start of the run" in printed
    (tmp_path / "config.toml").write_text("[run]\njournal = \"off\"\n")
    assert cli.main(["doctor", str(tmp_path), "--no-checkpoints"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
