"""The trainer's optimizer steps and its state: AdamW, gradients that are not finite, restoring."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_trainer import (
    LORA,
    close,
    drawn_params,
    make_trainer,
    rollouts,
)

from locojax.errors import CheckpointError
from locojax.types import AdamParams, Datum


@pytest.fixture(scope="module")
def params():
    return drawn_params()


def adamw(weights, gradients, adam):
    """AdamW by its paper, in float64."""
    m = v = np.zeros_like(weights)
    for t, gradient in enumerate(gradients, start=1):
        m = adam.beta1 * m + (1 - adam.beta1) * gradient
        v = adam.beta2 * v + (1 - adam.beta2) * gradient**2
        towards = (m / (1 - adam.beta1**t)) / (np.sqrt(v / (1 - adam.beta2**t)) + adam.eps)
        weights = weights - adam.learning_rate * (towards + adam.weight_decay * weights)
    return weights


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_optimizer_is_adamw(params, clip):
    data, trainer = rollouts(), make_trainer(params)
    adam = AdamParams(learning_rate=1e-2, beta2=0.999, eps=1e-8, weight_decay=0.1, grad_clip_norm=clip)
    weights = np.asarray(trainer.state()["trainable"]["layers"]["down"], np.float64)
    gradients = []
    for step in range(3):
        trainer.forward_backward(data[4 * step : 4 * step + 4], "importance_sampling")
        norm = np.sqrt(
            sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(trainer.accumulated_gradient))
        )
        gradient = np.asarray(trainer.accumulated_gradient["layers"]["down"], np.float64)
        gradients.append(gradient * (min(1.0, clip / norm) if clip else 1.0))
        result = trainer.optim_step(adam)
        assert result.applied and result.policy_version == step + 1
        assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    expected = adamw(weights, gradients, adam)
    np.testing.assert_allclose(trainer.state()["trainable"]["layers"]["down"], expected, rtol=2e-4, atol=1e-5)
    assert trainer.optim_step(adam).skipped_because  # the gradient was used up


def test_a_gradient_that_is_not_finite_changes_nothing(params):
    data, trainer = rollouts(), make_trainer(params)
    trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(AdamParams())
    before = trainer.state()
    huge = Datum(data[0].tokens, {**data[0].inputs, "advantages": np.where(data[0].inputs["advantages"] != 0, 3e38, 0)})
    trainer.forward_backward([huge], "importance_sampling", {})
    result = trainer.optim_step(AdamParams(weight_decay=0.5))
    assert not result.applied and result.policy_version == 1
    assert "not finite" in result.skipped_because
    close(trainer.state(), before, rtol=0)
    trainer.forward_backward(data, "importance_sampling")
    assert trainer.optim_step(AdamParams()).applied  # nothing of it is left over


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_restored_trainer_goes_on_as_the_first(params, lora):
    data, adam = rollouts(), AdamParams(learning_rate=1e-2)
    first = make_trainer(params, lora)
    first.forward_backward(data, "importance_sampling")
    first.optim_step(adam)
    saved = jax.tree.map(np.asarray, first.state())
    second = make_trainer(params, lora)
    second.forward_backward(data, "importance_sampling")  # dropped by restore
    second.restore(saved)
    assert second.policy_version == 1
    for trainer in (first, second):
        trainer.forward_backward(data[:4], "importance_sampling")
        trainer.optim_step(adam)
    close(first.state(), second.state(), rtol=0)


def test_restoring_another_model_is_refused_by_leaf(params):
    trainer = make_trainer(params)
    state = trainer.state()
    state["trainable"]["final_norm"] = np.zeros(31, np.float32)
    with pytest.raises(CheckpointError, match=r"trainable\['final_norm'\].*shape \(31,\).*shape \(32,\)"):
        trainer.restore(state)
