"""What tests of the C++ kernels share."""

import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models.native import build

BF16_STEP = 2.0**-8  # of a number of 1: what rounding to bf16 changes is half of it


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Skips where there is no compiler; CI installs one. A compiler that fails is a failure."""
    try:
        build.give_to_jax()
    except build.NoCompiler as error:
        pytest.skip(str(error))


def draw(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) * scale, jnp.bfloat16)


def exact(array):
    return np.asarray(array.astype(jnp.float32), np.float64)
