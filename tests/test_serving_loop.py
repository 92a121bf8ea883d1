"""The policy of the serving loop, on a trainer and samplers that only note what is done to them."""

from __future__ import annotations

import numpy as np
import pytest
from serving_fakes import Run, create, fb, optim, sample, slowly

from locojax.hosts.protocol import (
    Cancel,
    CloseSampler,
    Failed,
    Finished,
    ForwardBackward,
    OpenSampler,
    RemoveModel,
    Shutdown,
    Submit,
)
from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_share import Share
from locojax.types import Datum


def test_operations_of_a_model_run_in_order_and_share_micro_batches_up_to_a_barrier():
    run = Run()
    answers = run(
        create("A"), fb("1", "A", 1), fb("2", "A", 2), optim("3", "A"), fb("4", "A", 5), optim("5", "A")
    )
    assert run.did("micro", "optim") == [
        ("micro", (("A", 1), ("A", 2))), ("optim", "A"), ("micro", (("A", 4),)), ("micro", (("A", 1),)), ("optim", "A"),
    ]  # fmt: skip
    assert [type(answers[str(i)]) for i in range(1, 6)] == [Finished] * 5
    assert answers["5"].result.policy_version == 2


def test_forward_passes_and_gradients_take_micro_batches_of_their_own_in_order():
    run = Run()
    forward = Submit("2", ForwardBackward("A", (Datum(np.zeros(2, np.int32), {}),), "ppo", gradient=False))
    run(create("A"), fb("1", "A"), forward, fb("3", "A"))
    assert run.did("micro") == [("micro", (("A", 1),))] * 3


def test_a_long_queue_of_one_model_holds_another_up_by_one_micro_batch():
    run = Run()
    run(create("A"), create("B"), fb("a1", "A", 40), fb("b1", "B", 1), optim("b2", "B"), until="b2")
    micros = run.did("micro")
    assert len(micros) <= 3, micros
    assert any(("B", 1) in taken and ("A", 3) in taken for _, taken in micros), "B's micro-batch is filled up with A's"


def test_two_models_with_long_queues_take_turns():
    run = Run()
    run(create("A"), create("B"), fb("a", "A", 16), fb("b", "B", 16))
    first = [taken[0][0] for _, taken in run.did("micro")]
    assert first[:6] in (["A", "B"] * 3, ["B", "A"] * 3)


def test_an_operation_that_fails_fails_alone():
    run = Run()
    answers = run(
        create("A"), fb("1", "A", 1, "bad"), fb("2", "A"), optim("3", "A"), fb("4", "nobody"), optim("5", "A")
    )
    assert answers["1"] == Failed("1", "user", "Unknown loss 'bad'.")
    assert answers["4"] == Failed("4", "user", "There is no model 'nobody'.")
    assert isinstance(answers["2"], Finished) and isinstance(answers["5"], Finished)


def test_a_micro_batch_that_fails_takes_its_works_along_and_no_other():
    run = Run(rows=2)
    answers = run(
        create("A"), create("B"), fb("a1", "A", 1, "boom"), fb("b1", "B", 1), fb("b2", "B", 1), optim("a2", "A"),
        optim("b3", "B"),
    )  # fmt: skip
    assert answers["a1"].category == answers["b1"].category == "server"
    assert "ValueError: something blew up" in answers["a1"].message
    assert "What model 'A' had accumulated since its last optim_step was dropped" in answers["a1"].message
    assert run.did("discard") == [("discard", "A"), ("discard", "B")]
    assert all(isinstance(answers[op], Finished) for op in ("b2", "a2", "b3"))


def test_a_slot_that_is_not_to_be_had_is_the_users_to_mend():
    run = Run()
    answers = run(*(create(f"m{i}") for i in range(5)))
    assert answers["m4:create"] == Failed("m4:create", "user", "All 4 slots are taken.")


def test_a_sample_queued_before_an_optim_step_sees_the_weights_before_it():
    run = Run()
    answers = run(
        create("A"), Submit("o", OpenSampler("s", model_id="A")), sample("x", "s", 3), fb("1", "A"), optim("2", "A"),
        Submit("o2", OpenSampler("s2", model_id="A")), sample("y", "s2"), sample("z", "s"), until="y",
    )  # fmt: skip
    assert answers["x"].result.completions[0].policy_version == 0
    assert answers["z"].result.completions[0].policy_version == 0
    assert answers["y"].result.completions[0].policy_version == 1


def test_a_sample_waits_for_its_sampler_to_be_opened_and_so_does_its_end():
    run = Run()
    answers = run(
        create("A"), fb("1", "A", 8), Submit("o", OpenSampler("s", model_id="A")), sample("x", "s"),
        Submit("c", CloseSampler("s")), until="c",
    )  # fmt: skip
    assert isinstance(answers["x"], Finished) and isinstance(answers["c"], Finished)
    assert run.did("open", "close") == [("open", "s", 0), ("close", "s")]


def test_a_sample_of_no_sampler_fails_at_once():
    assert Run()(sample("x", "s"))["x"] == Failed("x", "user", "There is no sampler 's'.")


def test_samples_fail_with_the_opening_they_waited_for():
    answers = Run()(Submit("o", OpenSampler("s", model_id="A")), sample("x", "s"))
    assert answers["o"].category == "user" and "There is no model 'A'" in answers["o"].message
    assert answers["x"] == Failed("x", "user", "There is no sampler 's'.")


def test_removing_a_model_fails_what_is_queued_for_it_and_frees_its_slot():
    run = Run()
    run.link.then["A:create"] = [
        fb("1", "A", 9), optim("2", "A"), Submit("3", OpenSampler("s", model_id="A")), sample("x", "s"),
        Submit("c", CloseSampler("s")), Submit("4", RemoveModel("A")), fb("5", "A"), Submit("6", RemoveModel("A")),
        create("B"),
    ]  # fmt: skip
    answers = run(create("A"), until="6")
    assert answers["1"] == Failed("1", "user", "Model 'A' was removed before this ran.")
    assert answers["2"].message == "Model 'A' was removed before this ran."
    assert "There is no sampler 's'" in answers["x"].message
    assert answers["c"].result is None and answers["4"].result is None and answers["6"].result is None
    assert isinstance(answers["5"], Failed)
    assert run.link.info.open_models == ("B",)


def test_sampling_and_training_share_the_device():
    run = Run(rows=1)
    slowly(run.samplers, "step")
    slowly(run.trainer, "advance")
    answers = run(
        create("A"), Submit("o", OpenSampler("s", model_id="A")), sample("x", "s", 60), fb("1", "A", 20), until="x"
    )
    assert isinstance(answers["1"], Finished)
    kinds = [entry[0] for entry in run.did("micro", "step")]
    between = kinds[kinds.index("micro") : len(kinds) - kinds[::-1].index("micro")]
    assert 8 <= between.count("step") <= 40, "neither starves"


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.75, 75), (0.25, 25)])
def test_the_share_is_of_time_not_of_turns(share, expected):
    sides = Share(share)
    spent = {"sampling": 0.0, "training": 0.0}
    for _ in range(400):
        side = sides.next(sampling=True, training=True)
        seconds = {"sampling": 0.1, "training": 0.9}[side]
        spent[side] += seconds
        sides.spent(side, seconds)
    assert 100 * spent["sampling"] / sum(spent.values()) == pytest.approx(expected, abs=3)


def test_time_that_one_side_had_to_itself_is_not_held_against_it():
    sides = Share(0.5)
    for _ in range(100):
        sides.spent(sides.next(sampling=True, training=False), 1.0)
    sides.next(sampling=True, training=True)
    sides.spent("sampling", 1.0)
    assert sides.next(sampling=True, training=True) == "training"
    sides.spent("training", 1.5)
    assert sides.next(sampling=True, training=True) == "sampling", "sampling's 100 s are forgotten"


def test_cancelling():
    run = Run(rows=1)
    run.link.then["o"] = [
        sample("x", "s", 10**6), fb("1", "A", 2), optim("2", "A"), Submit("w", OpenSampler("t", model_id="A")),
        sample("held", "t"), Cancel("held"), Cancel("2"), Cancel("x"), Cancel("unknown"),
    ]  # fmt: skip
    answers = run(create("A"), Submit("o", OpenSampler("s", model_id="A")), until="w")
    assert answers["held"] == Failed("held", "user", "The request was cancelled before it ran.")
    assert isinstance(answers["2"], Failed)
    assert isinstance(answers["x"], Finished), "a sample finishes with what it has"
    assert isinstance(answers["1"], Finished)
    assert run.did("optim") == []


def test_a_failure_of_sampling_ends_the_samples_that_run_and_not_the_engine():
    run = Run()
    run.samplers.broken = True
    run.link.then["x"] = [create("B")]
    answers = run(create("A"), Submit("o", OpenSampler("s", model_id="A")), sample("x", "s"), until="B:create")
    assert answers["x"].category == "server" and "the device is gone" in answers["x"].message
    assert isinstance(answers["B:create"], Finished)


@pytest.mark.parametrize("failing", ["advance", "optim_step"])
def test_a_failure_that_takes_the_state_along_ends_the_process(failing):
    run = Run()
    run.trainer.is_lost = True

    def fail(*_):
        raise ValueError("out of memory")

    setattr(run.trainer, failing, fail)
    with pytest.raises(RuntimeError, match="the trainer's state was lost"):
        run(create("A"), create("B"), fb("1", "A"), optim("2", "A"), fb("3", "B"), optim("4", "B"))
    answers = run.link.answers
    assert all(op in answers for op in "1234"), "everything is answered"
    failures = [answer.message for answer in answers.values() if isinstance(answer, Failed)]
    assert any("ValueError: out of memory" in message for message in failures)


def test_shutdown_answers_everything():
    run = Run(rows=1)
    messages = [
        create("A"), Submit("o", OpenSampler("s", model_id="A")), sample("x", "s", 10**6), fb("1", "A", 10**6),
        optim("2", "A"), Submit("w", OpenSampler("t", model_id="A")), sample("held", "t"),
    ]  # fmt: skip
    run.link.then["A:create"] = [Shutdown(), optim("late", "A")]
    answers = run(*messages, until="nothing")
    for op in ("x", "1", "2", "w", "held", "late"):
        assert answers[op] == Failed(op, "server", "The engine was stopped before this was done. Send it again.")


def test_status_adds_up():
    run = Run()
    run(create("A"), fb("1", "A", 9), optim("2", "A"), fb("3", "A", 1, "bad"))
    run.loop._next_status = 0.0
    run.loop._report()
    status = run.link.statuses[-1]
    assert status.totals["trained_tokens"] == 7 and status.totals["optimizer_steps"] == 1
    assert status.totals["operations"] == 4 and status.totals["failures"] == 1
    assert status.gauges["num_models"] == 1 and status.gauges["num_queued_operations"] == 0
    assert status.queues == {} and status.totals["compilations"] == 3


def test_the_clock_adds_up_and_nests():
    now = [100.0]
    clock = PhaseClock(lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    wait(1)
    with clock.phase("train"):
        wait(2)
        with clock.phase("pack"):
            wait(3)
        wait(4)
    wait(5)
    seconds = clock.seconds()
    assert (seconds["other"], seconds["train"], seconds["pack"]) == (6, 6, 3)
    assert sum(seconds.values()) == clock.elapsed == 15
    with pytest.raises(ValueError, match="'nap' is not a phase"), clock.phase("nap"):
        pass
