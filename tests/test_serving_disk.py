"""The loop of an engine process while its disk is slow: only what needs the disk waits."""

from __future__ import annotations

import threading
import time

import pytest
from serving_fakes import Run, create, fb, optim, sample

from locojax.errors import CheckpointError
from locojax.hosts import serving_disk, tenant_checkpoints
from locojax.hosts.protocol import (
    Cancel,
    Failed,
    Finished,
    LoadWeights,
    OpenSampler,
    RemoveModel,
    SaveAdapter,
    Saved,
    SaveState,
    Submit,
)


def save(op, model_id, directory="weights/x"):
    return Submit(op, SaveState(model_id, directory))


def waits_for(run, *operations, gives=5):
    """What stands in for a disk: it takes until these operations are answered, then gives `gives`."""

    def slow(*_, **__):
        deadline = time.monotonic() + 20
        while not run.link.answers.keys() >= set(operations):
            assert time.monotonic() < deadline, f"{operations} wait for the disk"
            time.sleep(0.001)
        run.log.append(("disk",))
        return gives

    return slow


def test_a_save_that_is_slow_holds_up_nothing_but_its_models_next_save(monkeypatch):
    run = Run()
    monkeypatch.setattr(tenant_checkpoints, "write_state", waits_for(run, "b1", "b2", "a2", "x"))
    monkeypatch.setattr(tenant_checkpoints, "write_adapter", waits_for(run, gives=7))
    run.link.then["a2"] = [sample("x", "s")]
    answers = run(
        create("A"), create("B"), Submit("o", OpenSampler("s", model_id="A")), save("a1", "A"), fb("b1", "B", 9),
        optim("b2", "B"), optim("a2", "A"), Submit("a3", SaveAdapter("A", "sampler_weights/x")), optim("a4", "A"),
        until="a4",
    )  # fmt: skip
    assert answers["a1"] == Finished("a1", Saved(5))
    assert answers["a3"] == Finished("a3", Saved(7))
    opened, written, copied = ("copy adapter", "A"), ("disk",), ("copy adapter", "A")
    assert run.did("disk", "copy adapter") == [opened, written, copied, written]


def test_what_is_written_is_what_it_was_when_the_save_ran(monkeypatch):
    run, written = Run(), []
    slow = waits_for(run, "2")

    def write(directory, state, *rest):
        written.append(state)
        return slow()

    monkeypatch.setattr(tenant_checkpoints, "write_state", write)
    run(create("A"), save("1", "A"), optim("2", "A"), until="1")
    assert written == [{"version": 0}]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CheckpointError("'weights/x' could not be written (No space left on device)"), "No space left on device"),
        (ValueError("a bug"), "The server failed at SaveState (ValueError: a bug). Its log says more."),
    ],
)
def test_what_goes_wrong_while_writing_reaches_the_one_who_asked(monkeypatch, error, text):
    def fail(*_):
        raise error

    run = Run()
    monkeypatch.setattr(tenant_checkpoints, "write_state", fail)
    answers = run(create("A"), save("1", "A"), optim("2", "A"), save("3", "nobody"), until=("1", "2", "3"))
    assert answers["1"].category == "server" and text in answers["1"].message
    assert answers["3"].category == "user" and "There is no model 'nobody'" in answers["3"].message
    assert isinstance(answers["2"], Finished)


def test_saves_beyond_the_most_wait_for_room_and_are_all_answered(monkeypatch):
    run, num_jobs = Run(), []

    def write(*_):
        time.sleep(0.002)
        num_jobs.append(len(run.loop._disk))
        return 1

    monkeypatch.setattr(serving_disk, "MAX_JOBS", 2)
    monkeypatch.setattr(tenant_checkpoints, "write_state", write)
    saves = [save(f"{model}{i}", model) for i in range(3) for model in "ABCD"]
    answers = run(*(create(model) for model in "ABCD"), *saves, until=[one.operation_id for one in saves])
    assert max(num_jobs) <= 2
    assert all(answers[message.operation_id] == Finished(message.operation_id, Saved(1)) for message in saves)


def test_a_load_waits_for_its_file_and_others_do_not(monkeypatch):
    run = Run()
    found = tenant_checkpoints.TenantCheckpoint(None, 7, {"weights": 1}, None)
    monkeypatch.setattr(tenant_checkpoints, "read_checkpoint", waits_for(run, "b1", "b2", gives=found))
    monkeypatch.setattr(tenant_checkpoints, "check_same", lambda *_: None)
    run.link.then["b1"] = [Cancel("a1")]  # too late: it has begun
    answers = run(
        create("A"), create("B"), Submit("a1", LoadWeights("A", "weights/x", False)), optim("a2", "A"),
        fb("b1", "B", 9), optim("b2", "B"), until="a2",
    )  # fmt: skip
    assert isinstance(answers["a1"], Finished) and answers["a1"].result.adapter.seed == 7
    assert run.did("disk", "restore", "optim")[-3:] == [("disk",), ("restore", "A"), ("optim", "A")]


def test_a_model_that_is_removed_while_its_file_is_read(monkeypatch):
    run = Run()
    monkeypatch.setattr(tenant_checkpoints, "read_checkpoint", waits_for(run, "gone"))
    run.link.then["A:create"] = [Submit("1", LoadWeights("A", "weights/x", False)), optim("2", "B")]
    run.link.then["2"] = [Submit("gone", RemoveModel("A")), create("C")]
    answers = run(create("B"), create("A"), until="C:create")
    assert answers["1"] == Failed("1", "user", "Model 'A' was removed before this ran.")
    assert run.did("restore") == []


def test_a_sampler_from_disk_opens_when_it_has_been_read_and_its_samples_wait(monkeypatch):
    run = Run()
    lora = type("Lora", (), {"rank": 4})()
    monkeypatch.setattr(tenant_checkpoints, "read_adapter", waits_for(run, "b1", gives=(lora, {})))
    answers = run(
        create("B"), Submit("o", OpenSampler("s", directory="sampler_weights/x")), sample("x", "s"), fb("b1", "B"),
        until="x",
    )  # fmt: skip
    assert isinstance(answers["o"], Finished) and isinstance(answers["x"], Finished)
    assert [entry[0] for entry in run.did("disk", "open")] == ["disk", "open"]


def test_shutdown_waits_for_what_is_being_written_but_not_for_ever(monkeypatch):
    run = Run()
    monkeypatch.setattr(tenant_checkpoints, "write_state", lambda *_: time.sleep(0.05) or 5)
    assert run(create("A"), save("1", "A"), optim("2", "A"))["1"] == Finished("1", Saved(5)), "2 ends the loop"

    run, hanging = Run(), threading.Event()
    monkeypatch.setattr(serving_disk, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(tenant_checkpoints, "write_state", lambda *_: hanging.wait(20))
    began = time.monotonic()
    answers = run(create("A"), save("1", "A"), optim("2", "A"), until="2")
    assert time.monotonic() - began < 10
    assert answers["1"] == Failed("1", "server", "The engine was stopped before this was done. Send it again.")
    hanging.set()
