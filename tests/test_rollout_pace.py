"""How long a run of decoding may be."""

from locojax.rollout.pace import UNKNOWN, Pace


def test_runs_are_as_long_as_the_last_one_of_their_kind_says():
    pace = Pace(0.25)
    assert pace.fit(1, 32) == UNKNOWN
    pace.took(1, UNKNOWN, 0.02)
    assert pace.fit(1, 32) == 25 and pace.fit(1, 8) == 8
    assert pace.fit(128, 32) == UNKNOWN and pace.fit(128, 1) == 1  # other rows say nothing of these
    pace.took(128, 2, 4.0)  # a program had to be read first
    assert pace.fit(128, 32) == 1
    pace.took(128, 1, 0.1)
    assert pace.fit(128, 32) == 2
    pace.took(128, 0, 0.3)
    assert pace.fit(128, 32) == 2
    pace.took(4, 8, 0.0)
    assert pace.fit(4, 32) == 32


def test_nobody_waits():
    pace = Pace(None)
    pace.took(1, 1, 100.0)
    assert pace.fit(1, 32) == 32
