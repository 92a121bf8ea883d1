"""Cases C01 to C06, and what must hold of any group's advantages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from locojax.errors import ConfigError
from locojax.rl.advantages import AdvantageKind, advantages, check_advantage_kind

KINDS: list[AdvantageKind] = ["mean", "std", "rloo"]
REWARDS = st.lists(
    st.one_of(st.none(), st.just(math.nan), st.floats(-10, 10), st.sampled_from([0.0, 0.1, 1.0])),
    min_size=1,
    max_size=16,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [1.0, 0.1, 0.3])
def test_c01_an_all_equal_group_has_zero_variance(kind: AdvantageKind, reward: float) -> None:
    result = advantages([reward] * 7, kind)  # 7 x 0.1 / 7 is not 0.1: the residue must not become a signal
    np.testing.assert_array_equal(result.values, np.zeros(7, np.float32))
    assert result.zero_variance and not result.has_signal and result.num_unscorable == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("std", [1.7320, -0.5773, -0.5773, -0.5773]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_c02_one_of_four(kind: AdvantageKind, expected: list[float]) -> None:
    result = advantages([1, 0, 0, 0], kind)
    np.testing.assert_allclose(result.values, expected, atol=1e-4)
    assert result.values.dtype == np.float32 and result.mean_reward == 0.25 and result.has_signal


@pytest.mark.parametrize("kind", KINDS)
def test_c03_a_group_of_one_gets_zero(kind: AdvantageKind) -> None:
    assert advantages([1.0], kind).values.tolist() == [0.0]


def test_c03_a_group_size_without_any_advantage_is_refused_by_name() -> None:
    check_advantage_kind("mean", 1)
    check_advantage_kind("std", 2)
    with pytest.raises(ConfigError) as caught:
        check_advantage_kind("std", 1)
    assert str(caught.value) == (
        "Advantages of kind 'std' need a standard deviation, which a group of one has not. Got: group size 1. "
        "Expected: group size 2 or more. Raise the group size, to 8 for instance."
    )
    with pytest.raises(ConfigError, match="need the other samples' mean"):
        check_advantage_kind("rloo", 1)
    with pytest.raises(ConfigError, match="at least one sample. Got: group size 0"):
        check_advantage_kind("mean", 0)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_c04_an_unscorable_reward_is_left_out(missing: float | None) -> None:
    result = advantages([1, missing, 0])
    assert result.values.tolist() == [0.5, 0.0, -0.5]
    assert result.scorable.tolist() == [True, False, True]
    assert result.num_unscorable == 1 and result.mean_reward == 0.5


def test_c05_an_unscorable_group_has_no_signal() -> None:
    result = advantages([math.nan, math.nan], "std")
    assert result.values.tolist() == [0.0, 0.0] and not result.has_signal and not result.zero_variance
    assert math.isnan(result.mean_reward)


def test_c06_leave_one_out_with_normalisation_does_not_exist() -> None:
    for kind in ("rloo_std", "rloo+std"):
        with pytest.raises(ConfigError, match="Unknown kind of advantage .* Expected: mean, std, rloo"):
            advantages([1, 0, 0, 0], kind)  # type: ignore[arg-type]
    assert np.max(np.abs(advantages([1, 0, 0, 0], "rloo").values)) <= 10


@given(REWARDS, st.sampled_from(KINDS))
def test_any_group_is_finite_centred_and_bounded(rewards: list[float | None], kind: AdvantageKind) -> None:
    result = advantages(rewards, kind)
    assert np.isfinite(result.values).all()
    assert (result.values[~result.scorable] == 0).all()
    assert abs(float(np.sum(result.values, dtype=np.float64))) < 1e-4
    num = int(result.scorable.sum())
    bound = math.sqrt(max(num - 1, 1)) if kind == "std" else 20.0 * 16 / 15 + 20.0
    assert np.max(np.abs(result.values)) <= bound + 1e-4


@given(REWARDS, st.sampled_from(KINDS), st.randoms())
def test_advantages_follow_their_samples(rewards: list[float | None], kind: AdvantageKind, random) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = advantages([rewards[i] for i in order], kind)
    np.testing.assert_allclose(shuffled.values, advantages(rewards, kind).values[order], atol=1e-5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    oracle = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(advantages(rewards, "rloo").values, oracle, atol=1e-4)
