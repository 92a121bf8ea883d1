"""The trainer over a mesh: no way of splitting rows and weights over devices changes the gradient or the step."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from test_trainer import LORA, SETTINGS, SPEC, close, drawn_params, rollouts

from locojax.models import sharding
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.training.trainer import Trainer
from locojax.types import AdamParams

ADAM = AdamParams(learning_rate=1e-3)
MESHES = [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)]


@pytest.fixture(scope="module")
def params():
    return drawn_params()


def mesh_of(fsdp, tensor=1):
    return make_mesh(MeshSpec(fsdp, tensor), jax.devices()[: fsdp * tensor])


def make(params, lora, mesh, **changes):
    trainer = Trainer(SPEC, params, dataclasses.replace(SETTINGS, **changes), lora=lora, seed=3, mesh=mesh)
    if lora is not None:  # with b zero, a would get no gradient
        rng = np.random.default_rng(5)
        state = sharding.gathered(trainer.state())
        state["trainable"] = jax.tree.map(
            lambda leaf: (rng.normal(size=leaf.shape) * 0.1).astype(np.float32), state["trainable"]
        )
        trainer.restore(state)
    return trainer


def run(trainer, data, loss, steps=2):
    """(the first gradient, its result, the state after the steps)."""
    first = None
    for _ in range(steps):
        result = trainer.forward_backward(data, loss, score="active")
        if first is None:
            first = sharding.gathered(trainer.accumulated_gradient), result
        assert trainer.optim_step(ADAM).applied
    return *first, sharding.gathered(trainer.state())


@pytest.fixture(scope="module")
def alone(params):
    """What one device makes of each case, computed once."""
    found = {}

    def get(lora, loss):
        if (lora, loss) not in found:
            found[lora, loss] = run(make(params, lora, None), rollouts(), loss)
        return found[lora, loss]

    return get


@pytest.mark.parametrize("gather", ["program", "layer"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("fsdp, tensor", MESHES)
def test_no_mesh_changes_the_gradient_or_the_step(params, alone, lora, fsdp, tensor, gather):
    trainer = make(params, lora, mesh_of(fsdp, tensor), gather=gather)
    gradient, result, state = run(trainer, rollouts(), "importance_sampling")
    expected_gradient, expected, expected_state = alone(lora, "importance_sampling")
    close(gradient, expected_gradient)
    close(state["trainable"], expected_state["trainable"], rtol=1e-6)
