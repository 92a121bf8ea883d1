"""Nothing that one model's owner sends changes another by one bit; nor does a row's place, or who is beside it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from tenant_models import LORA_A, LORA_B, TENANTS, base, run, tenants
from test_tenants import bits, wide
from test_trainer import SPEC, close, rollouts

from locojax.errors import RequestError
from locojax.models.lora import LoraSpec
from locojax.training.tenants import TenantTrainer
from locojax.types import AdamParams

ADAM = AdamParams(1e-2, weight_decay=0.01)


def with_input(datum, field, values):
    return dataclasses.replace(datum, inputs={**datum.inputs, field: values.astype(np.float32)})


def scaled(data, field, factor):
    return [with_input(datum, field, datum.inputs[field] * np.float32(factor)) for datum in data]


def train_b(trainer, mates=None, *, mates_first=False):
    """Three steps of model b; `mates(trainer, step)` begins works that share its micro-batches. What b's owner sees."""
    seen = []
    for step in range(3):
        others = mates(trainer, step) if mates is not None else []
        work = trainer.begin("b", rollouts(seed=step), ("ppo", "cross_entropy", "gspo")[step])
        run(trainer, *((*others, work) if mates_first else (work, *others)))  # three rows each, four a micro-batch
        result = work.result()
        seen.append(bits([dict(output) for output in result.outputs]))
        seen.append(dict(result.metrics))
        seen.append(bits(trainer.accumulated_gradient("b")))
        seen.append(trainer.optim_step("b", ADAM))
        seen.append(bits(trainer.state("b")))
    return seen


def overflowing(trainer, step):
    """Advantages near fp32's largest: the gradient is not finite."""
    return [trainer.begin("a", scaled(rollouts(seed=step + 40), "advantages", 1e38), "importance_sampling")]


def broken_weights(trainer, step):
    """Weights beyond fp32 from the first step on, and an eps of 0: every activation of a is NaN."""
    if step == 0:
        run(trainer, trainer.begin("a", rollouts(seed=50), "cross_entropy"))
        for _ in range(3):
            trainer.optim_step("a", AdamParams(1e38, eps=0.0, weight_decay=1e38))
            run(trainer, trainer.begin("a", rollouts(seed=50), "cross_entropy"))
    work = trainer.begin("a", rollouts(seed=step + 40), "cross_entropy")
    return [work]


def stepping(trainer, step):
    """Huge steps and decay beside b's."""
    run(trainer, trainer.begin("a", rollouts(seed=step + 60), "dro", {"beta": 1e6}))
    trainer.optim_step("a", AdamParams(1e6, weight_decay=1e6))
    return [trainer.begin("a", rollouts(seed=step + 40), "stable_reinforce", {"kl_coeff": 1e30, "temperature": 1e-6})]


def refused(trainer, step):
    """What is refused leaves nothing behind."""
    bad = rollouts(seed=step + 40)
    for field, value in (("advantages", np.nan), ("logprobs", np.inf)):
        with pytest.raises(RequestError, match=f"{field} holds a value that is not finite"):
            trainer.begin("a", [with_input(datum, field, np.full(len(datum.tokens), value)) for datum in bad], "ppo")
    out = [dataclasses.replace(bad[0], tokens=np.full_like(bad[0].tokens, SPEC.vocab_size))]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        trainer.begin("a", out, "ppo")
    with pytest.raises(RequestError, match="out of range"):
        trainer.optim_step("a", AdamParams(float("nan")))
    return []


def other_programs(trainer, step):
    """Forward passes and several targets a position are computed apart."""
    return [
        trainer.begin("a", rollouts(seed=step + 40), "ppo", gradient=False),
        trainer.begin("a", wide(rollouts(seed=step), 2), "cross_entropy"),
    ]


@pytest.fixture(scope="module")
def alone():
    return train_b(tenants(with_a=False))


@pytest.mark.parametrize("mates", [overflowing, broken_weights, stepping, refused, other_programs])
@pytest.mark.parametrize("mates_first", [False, True])
def test_another_model_is_the_same_to_the_bit(alone, mates, mates_first):
    assert train_b(tenants(), mates, mates_first=mates_first) == alone


def test_the_poison_is_real():
    """A test above must be able to fail: the gradient overflows, and the weights are broken."""
    trainer = tenants()
    run(trainer, *overflowing(trainer, 0))
    assert any(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.accumulated_gradient("a")))
    before = bits(trainer.state("a"))
    result = trainer.optim_step("a", ADAM)
    assert not result.applied and "the gradient is not finite" in result.skipped_because
    assert bits(trainer.state("a")) == before and result.policy_version == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(trainer.accumulated_gradient("a"))), "what was bad is gone"

    (work,) = broken_weights(trainer, 0)
    (broken,) = run(trainer, work)
    assert broken.metrics["num_nonfinite:sum"] > 0
    assert any(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.adapter("a")))


def test_the_order_and_the_cut_do_not_change_a_bit():
    """A row alone in a micro-batch, first of four or last of four gives the same sums."""
    gradients = []
    for order in ("b", "ab", "ba"):
        trainer = tenants()
        works = {
            "a": trainer.begin("a", rollouts(seed=3)[:6], "cross_entropy"),
            "b": trainer.begin("b", rollouts(), "ppo"),
        }
        run(trainer, *(works[model_id] for model_id in order))
        gradients.append(bits(trainer.accumulated_gradient("b")))
    narrow = TenantTrainer(SPEC, base(), dataclasses.replace(TENANTS, rows=1))
    narrow.create("b", LORA_B, 1)
    narrow.restore("b", tenants().state("b"), optimizer=False)
    run(narrow, narrow.begin("b", rollouts(), "ppo"))
    assert gradients[0] == gradients[1] == gradients[2]
    close(narrow.accumulated_gradient("b"), trainer.accumulated_gradient("b"))


def test_a_slot_that_is_freed_while_it_is_used_leaves_nothing_to_the_next_model(alone):
    def mates(trainer, step):
        """Removes a in the middle of a call of at least five rows, and puts another model in its slot."""
        data = scaled(rollouts(num_prompts=8, seed=step + 40), "advantages", 1e38)
        work = trainer.begin("a", data, "importance_sampling")
        trainer.advance([work])
        trainer.remove("a")
        assert work.done and work.num_rows_left == 0
        with pytest.raises(RequestError, match="call on model 'a' did not finish. Got: the model was removed"):
            work.result()
        trainer.create("a", LoraSpec(8, attention=False), step)
        assert bits(trainer._bank.accumulators) == zeros
        return [work, trainer.begin("a", rollouts(seed=step), "cispo")]

    trainer = tenants()
    zeros = bits(trainer._bank.accumulators)
    seen = []
    for step in range(3):
        others = mates(trainer, step)
        work = trainer.begin("b", rollouts(seed=step), ("ppo", "cross_entropy", "gspo")[step])
        while not work.done:
            trainer.advance([work, *others])
        seen.append(bits([dict(output) for output in work.result().outputs]))
        trainer.optim_step("b", ADAM)
        seen.append(bits(trainer.state("b")))
    assert seen == [part for i, part in enumerate(alone) if i % 5 in (0, 4)]


def test_a_slot_used_before_is_as_good_as_new():
    used, fresh = tenants(), TenantTrainer(SPEC, base(), TENANTS)
    broken_weights(used, 0)
    run(used, *overflowing(used, 0))
    used.remove("a")
    used.remove("b")
    assert bits(used._bank) == bits(fresh._bank)
    for trainer in (used, fresh):
        trainer.create("c", LORA_A, 4)
        run(trainer, trainer.begin("c", rollouts(), "cross_entropy"))
        trainer.optim_step("c", ADAM)
    assert bits(used.state("c")) == bits(fresh.state("c"))
