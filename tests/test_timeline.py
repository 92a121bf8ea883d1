"""Step accounting, with a clock that moves only when told."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locojax.hosts.phases import PHASES
from locojax.measure.timeline import Timeline, describe


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def test_phases_and_the_rest_add_up_to_the_wall_time():
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.step(7):
        clock.pass_(0.25)
        with timeline.phase("decode"):
            clock.pass_(2.0)
        with timeline.phase("train"):
            clock.pass_(1.5)
        with timeline.phase("decode"):
            clock.pass_(0.25)
    account = timeline.last()
    assert (account.step, account.wall) == (7, 4.0)
    assert account.seconds == {"decode": 2.25, "train": 1.5}
    assert account.unaccounted == 0.25
    assert describe(account) == "4.00 s: decode 56.2 %, train 37.5 %, unaccounted 6.2 %"


def test_a_nested_phase_is_taken_off_its_parent():
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.step(0), timeline.phase("decode"):
        clock.pass_(1.0)
        with timeline.phase("prefill"):
            clock.pass_(0.5)
            with timeline.phase("admit"):
                clock.pass_(0.125)
        clock.pass_(2.0)
    assert timeline.last().seconds == {"decode": 3.0, "prefill": 0.5, "admit": 0.125}
    assert timeline.last().unaccounted == 0


def test_steps_are_kept_apart_and_time_between_them_is_nobodys():
    clock = Clock()
    timeline = Timeline(clock)
    with timeline.phase("evaluate"):  # before the first step
        clock.pass_(9.0)
    for index in range(2):
        with timeline.step(index), timeline.phase("train"):
            clock.pass_(1.0 + index)
        clock.pass_(5.0)
    assert [(a.step, a.wall, dict(a.seconds)) for a in timeline.accounts] == [
        (0, 1.0, {"train": 1.0}),
        (1, 2.0, {"train": 2.0}),
    ]


def test_what_a_step_leaves_to_be_done_is_in_the_next_one_s_account():
    clock = Clock()
    timeline = Timeline(clock)
    for index in range(3):
        with timeline.step(index), timeline.phase("train"):
            clock.pass_(1.0)
        clock.pass_(8.0)
        for _ in range(2 - index):
            with timeline.after_step("record"):
                clock.pass_(0.25)
    assert [(a.wall, dict(a.seconds), a.unaccounted) for a in timeline.accounts] == [
        (1.0, {"train": 1.0}, 0.0),
        (1.5, {"train": 1.0, "record": 0.5}, 0.0),
        (1.25, {"train": 1.0, "record": 0.25}, 0.0),
    ]
    with timeline.step(3), pytest.raises(RuntimeError, match="'record' comes after a step, and one is open"):
        with timeline.after_step("record"):
            pass


def test_an_error_closes_what_is_open():
    clock = Clock()
    timeline = Timeline(clock)
    with pytest.raises(KeyError), timeline.step(0), timeline.phase("reward"), timeline.phase("wait"):
        clock.pass_(1.0)
        raise KeyError
    with timeline.step(1), timeline.phase("train"):
        clock.pass_(1.0)
    assert timeline.accounts[0].seconds["wait"] == 1.0
    assert timeline.last().seconds == {"train": 1.0}


def test_misuse_is_named():
    timeline = Timeline(Clock())
    with pytest.raises(RuntimeError, match="no step has ended yet"):
        timeline.last()
    with pytest.raises(ValueError, match="'trian' is not a phase; phases are admit, prefill, decode"):
        with timeline.phase("trian"):
            pass
    with pytest.raises(RuntimeError, match="steps don't nest"), timeline.step(0), timeline.step(1):
        pass
    caught = []

    def enter():
        try:
            with timeline.phase("decode"):
                pass
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert caught == ["a timeline belongs to the thread that made it: time the wait, not the background work"]


tree = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 8), inner, st.integers(0, 8)), max_size=4),
    max_leaves=12,
)


@given(tree, st.integers(0, 8))
def test_any_nesting_adds_up_exactly(phases, outside):
    clock = Clock()
    timeline = Timeline(clock)
    expected = {}

    def walk(children):
        for name, before, inner, after in children:
            with timeline.phase(name):
                clock.pass_(before / 8)
                walk(inner)
                clock.pass_(after / 8)
            expected[name] = expected.get(name, 0) + (before + after) / 8

    with timeline.step(0):
        clock.pass_(outside / 8)
        walk(phases)
    assert timeline.last().seconds == expected
    assert timeline.last().unaccounted == outside / 8
