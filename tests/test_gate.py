"""The gate's texts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from locojax.errors import NumericsError
from locojax.hosts.gate import check_first_step
from locojax.training.mismatch import mismatch


def test_an_absurd_gap_is_refused():
    found = mismatch([np.array([-1.0, -1.0])], [np.array([-3.0, -3.0])])
    check_first_step(found, 2.0)
    with pytest.raises(NumericsError) as caught:
        check_first_step(found, 1.0)
    assert str(caught.value) == (
        "Sampler and trainer disagree too much to train: mean |difference of log-probs| over 2 tokens at the first "
        "step. Got: 2 nats. Expected: at most 1 (run.max_gap). "
        "Sample from the weights that are trained; compare rollout.dtype with training.compute_dtype."
    )


def test_a_gap_that_is_not_finite_is_refused_however_small_the_rest():
    found = mismatch([np.array([-1.0, -1.0])], [np.array([-1.0, math.nan])])
    with pytest.raises(NumericsError, match="1 log-probs of sampled tokens are not finite at the first step"):
        check_first_step(found, 1.0)
