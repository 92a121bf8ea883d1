"""The sampler/trainer gap: values by hand, and the gate's texts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from locojax.errors import NumericsError
from locojax.hosts.mismatch import check_first_step, mismatch


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_differences_that_cancel_are_still_seen():  # C20
    found = mismatch([f32(-1, -2), f32(-0.5)], [f32(-1.1, -1.9), f32(-0.5)])
    assert found.num_tokens == 3
    assert found.mean_signed == pytest.approx(0.0, abs=1e-7)
    assert found.half_mean_square == pytest.approx(0.0033, abs=5e-5)
    assert found.mean == pytest.approx(0.2 / 3, rel=1e-5)
    assert found.max == pytest.approx(0.1, rel=1e-5)
    assert found.ratios_outside == pytest.approx(2 / 3)
    by_hand = (math.exp(-0.1) - 1 + 0.1 + math.exp(0.1) - 1 - 0.1) / 3
    assert found.k3 == pytest.approx(by_hand, rel=1e-4)


def test_the_sign_is_the_cookbooks():
    assert mismatch([f32(-1.0)], [f32(-1.5)]).mean_signed == pytest.approx(0.5)  # sampled minus trained


def test_equal_log_probs_and_no_tokens_are_zero():
    exact = mismatch([f32(-1, -2)], [f32(-1, -2)])
    assert (exact.mean, exact.p99, exact.max, exact.k3, exact.ratios_outside) == (0, 0, 0, 0, 0)
    assert mismatch([], []).num_tokens == 0
    assert mismatch([f32()], [f32()]).mean == 0


def test_p99_leaves_the_worst_out():
    found = mismatch([np.zeros(1000, np.float32)], [f32(*[0.001] * 995, *[1.0] * 5)])
    assert found.p99 == pytest.approx(0.001, rel=1e-5)
    assert found.max == 1.0


def test_huge_and_broken_values_stay_finite():
    found = mismatch([f32(-1000, -1, -math.inf)], [f32(0, math.nan, -1)])
    assert (found.num_tokens, found.num_not_finite, found.max) == (1, 2, 1000)
    assert math.isfinite(found.k3)
    with pytest.raises(NumericsError, match="2 log-probs of sampled tokens are not finite at the first step"):
        check_first_step(found, 1e9)


def test_arrays_that_do_not_line_up_are_named():
    with pytest.raises(ValueError, match=r"completion 1: sampler has \(2,\) log-probs, trainer \(1,\)"):
        mismatch([f32(0), f32(0, 0)], [f32(0), f32(0)])


def test_the_gate():
    found = mismatch([f32(-1, -1)], [f32(-3, -3)])
    check_first_step(found, 2.0)
    with pytest.raises(NumericsError) as caught:
        check_first_step(found, 1.0)
    assert str(caught.value) == (
        "Sampler and trainer disagree too much to train: mean |difference of log-probs| over 2 tokens at the first "
        "step. Got: 2 nats. Expected: at most 1 (run.max_gap). "
        "Sample from the weights that are trained; compare rollout.dtype with training.compute_dtype."
    )
