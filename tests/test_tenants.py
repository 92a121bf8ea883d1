"""The multi-tenant trainer: each model trains as in a trainer of its own, and what can't be done is refused by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tenant_models import LORA_A, LORA_B, TENANTS, base, drawn_state, run, tenants
from test_trainer import SETTINGS, SPEC, close, rollouts

from locojax.errors import CapacityError, CheckpointError, ConfigError, RequestError
from locojax.models.executables import Executables
from locojax.models.lora import LoraSpec
from locojax.training import tenant_programs
from locojax.training.losses import LOSSES
from locojax.training.tenants import TenantTrainer
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

COMPILED = "/jax/core/compile/backend_compile_duration"
CONFIGS = {
    "cross_entropy": {"temperature": 0.8},
    "importance_sampling": {"temperature": 1.3},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {"clip_high_threshold": 1.5},
    "dro": {"beta": 0.2},
    "gspo": {"clip_low_threshold": 0.9},
    "stable_reinforce": {"ratio_cap": 1.2, "kl_coeff": 0.3},
}


def trainer_like(trainer, model_id):
    """A Trainer of one adapter in the same state."""
    one = Trainer(SPEC, base(), dataclasses.replace(SETTINGS, with_entropy=False), lora=trainer.lora(model_id))
    one.restore(trainer.state(model_id))
    return one


def wide(data, K, seed=0):
    """Data with K targets a position, some of weight 0."""
    rng, out = np.random.default_rng(seed), []
    for datum in data:
        n = len(datum.tokens)
        weights = (rng.normal(size=(n, K)) * (rng.random((n, 1)) < 0.7)).astype(np.float32)
        out.append(Datum(datum.tokens, {"target_tokens": rng.integers(0, 67, (n, K)), "weights": weights}))
    return out


def bits(tree):
    """Leaves by path, as bytes: NaN equals NaN, and 0 isn't -0."""
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_a_trainer_with_one_adapter(loss):
    assert set(CONFIGS) == set(LOSSES)
    trainer, data = tenants(), rollouts()
    one = trainer_like(trainer, "a")
    mate = trainer.begin("b", rollouts(seed=9)[:3], "dro" if loss != "dro" else "ppo")
    work = trainer.begin("a", data, loss, CONFIGS[loss])
    _, result = run(trainer, mate, work)
    expected = one.forward_backward(data, loss, CONFIGS[loss])
    for ours, theirs in zip(result.outputs, expected.outputs, strict=True):
        close(dict(ours), dict(theirs))
    same = set(expected.metrics) - {"num_row_tokens:sum", "num_micro_batches:sum"}
    assert set(result.metrics) == same | {"num_row_tokens:sum", "num_rows:sum"}
    for name in same:
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4), name
    gradient = trainer.accumulated_gradient("a")
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    close(gradient, one.accumulated_gradient)


def test_several_targets_a_position():
    trainer, data = tenants(), wide(rollouts()[:6], 3)
    one = trainer_like(trainer, "a")
    mate = trainer.begin("b", rollouts(seed=9)[:3], "ppo")
    result, _ = run(trainer, trainer.begin("a", data, "cross_entropy"), mate)
    expected = one.forward_backward(data, "cross_entropy")
    assert result.outputs[0]["logprobs"].shape == (len(data[0].tokens), 3)
    for ours, theirs in zip(result.outputs, expected.outputs, strict=True):
        close(dict(ours), dict(theirs))
    close(trainer.accumulated_gradient("a"), one.accumulated_gradient)


def test_an_adapter_without_the_head_equals_its_trainer():
    trainer, data = tenants(), rollouts(seed=2)
    one = trainer_like(trainer, "b")
    run(trainer, trainer.begin("a", data[:2], "cross_entropy"), trainer.begin("b", data, "ppo"))
    one.forward_backward(data, "ppo")
    close(trainer.accumulated_gradient("b"), one.accumulated_gradient)


def test_a_forward_pass_gives_the_same_figures_and_no_gradient():
    trainer, data = tenants(), rollouts()
    (forward,) = run(trainer, trainer.begin("a", data, "ppo", gradient=False))
    assert trainer.num_accumulated_tokens("a") == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(trainer.accumulated_gradient("a")))
    (result,) = run(trainer, trainer.begin("a", data, "ppo"))
    assert trainer.num_accumulated_tokens("a") == result.metrics["num_tokens:sum"] > 0
    for ours, theirs in zip(forward.outputs, result.outputs, strict=True):
        close(dict(ours), dict(theirs))


def test_active_scores_alone_give_the_same_gradient():
    gradients = []
    for score in ("all", "active"):
        trainer = tenants()
        run(trainer, trainer.begin("a", rollouts(), "ppo", score=score))
        gradients.append(trainer.accumulated_gradient("a"))
    close(*gradients)


def test_steps_are_those_of_a_trainer_of_the_same_rank():
    """Also with the settings changing every step; what is beyond a model's rank and modules stays exactly 0."""
    trainer = tenants()
    ones = {model_id: trainer_like(trainer, model_id) for model_id in "ab"}
    for step, adam in enumerate(
        [AdamParams(1e-2, weight_decay=0.1), AdamParams(3e-3, 0.8, 0.9, 1e-8, grad_clip_norm=0.5), AdamParams(1e-3)]
    ):
        data = {"a": rollouts(seed=step), "b": rollouts(seed=step + 20)}
        run(trainer, *(trainer.begin(model_id, data[model_id], "cross_entropy") for model_id in "ba"))
        for model_id, one in ones.items():
            one.forward_backward(data[model_id], "cross_entropy")
            expected, got = one.optim_step(adam), trainer.optim_step(model_id, adam)
            assert got.applied and got.policy_version == expected.policy_version == step + 1
            assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
            # Adam divides by the gradient's own size: where that is rounding, so is the step.
            close(trainer.state(model_id), one.state(), rtol=2e-4)
    for tree in trainer._bank[:3]:
        slot = tenant_programs.read(tree, np.int32(0), dtype="float32")  # a's, of rank 4
        assert all(not parts["a"][..., 4:].any() and not parts["b"][..., 4:, :].any() for parts in slot.values())
        slot = tenant_programs.read(tree, np.int32(1), dtype="float32")  # b has attention only
        assert not any(leaf.any() for name in ("gate", "up", "down", "head") for leaf in slot[name].values())


def test_nothing_appears_beyond_the_rank_whatever_the_settings():
    """An eps of 0 makes 0 / 0 of a gradient that is 0; within the rank that is the client's own NaN."""
    trainer = tenants()
    run(trainer, trainer.begin("a", rollouts(), "cross_entropy"))
    assert trainer.optim_step("a", AdamParams(1e6, eps=0.0, weight_decay=1e6)).applied
    slot = tenant_programs.read(trainer._bank.weights, np.int32(0), dtype="float32")
    for parts in slot.values():
        assert not np.asarray(parts["a"][..., 4:]).any() and not np.asarray(parts["b"][..., 4:, :]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_is_the_adapter_in_the_samplers_dtype_and_stays_as_it_is(dtype):
    trainer = TenantTrainer(SPEC, base(), dataclasses.replace(TENANTS, snapshot_dtype=dtype))
    for model_id, spec in (("a", LORA_A), ("full rank", dataclasses.replace(LORA_A, rank=TENANTS.max_rank))):
        trainer.create(model_id, spec, 7)
        taken = trainer.snapshot(model_id)
        expected = jax.tree.map(lambda leaf: leaf.astype(dtype), trainer.adapter(model_id))
        assert {leaf.dtype for leaf in jax.tree.leaves(taken)} == {jnp.dtype(dtype)}
        before = bits(taken)
        assert before == bits(expected)
        run(trainer, trainer.begin(model_id, rollouts(), "cross_entropy"))
        trainer.optim_step(model_id, AdamParams(0.1))
        assert bits(taken) == before != bits(trainer.snapshot(model_id))


def test_a_fresh_model_is_drawn_as_a_trainers_and_equals_the_base():
    trainer = TenantTrainer(SPEC, base(), TENANTS)
    for model_id, seed in (("a", 7), ("b", 8), ("again", 7)):
        trainer.create(model_id, LORA_A, seed)
    assert bits(trainer.adapter("a")) == bits(Trainer(SPEC, base(), SETTINGS, lora=LORA_A, seed=7).trainable)
    assert bits(trainer.adapter("a")) == bits(trainer.adapter("again")) != bits(trainer.adapter("b"))
    for parts in trainer.adapter("b").values():
        bound = parts["a"].shape[-2] ** -0.5  # of a uniform distribution: PEFT's
        assert 0.9 * bound < np.abs(parts["a"]).max() <= bound and abs(parts["a"].mean()) < 0.2 * bound
        assert not parts["b"].any()
    assert trainer.model_ids == ("a", "b", "again") and trainer.lora("a") == LORA_A
    data = rollouts()[:3]
    one = Trainer(SPEC, base(), SETTINGS, lora=LORA_A)
    (result,) = run(trainer, trainer.begin("b", data, "cross_entropy", gradient=False))
    for datum, output, expected in zip(data, result.outputs, one.reference_logprobs(data), strict=True):
        on = datum.inputs["weights"] != 0
        np.testing.assert_allclose(output["logprobs"][on], expected[on], rtol=1e-5)


def test_a_restored_model_goes_on_as_if_it_had_not_stopped():
    """Uninterrupted equals restored, in another slot, to the bit; without Adam's state it doesn't."""
    trainer = tenants()
    adam = AdamParams(1e-2)

    def train(trainer, model_id, seed):
        run(trainer, trainer.begin(model_id, rollouts(seed=seed), "ppo"))
        return trainer.optim_step(model_id, adam)

    train(trainer, "a", 0)
    saved = trainer.state("a")
    before = bits(saved)
    train(trainer, "a", 1)
    whole = trainer.state("a")
    assert bits(saved) == before, "the state changed with later steps"

    restored, without = (TenantTrainer(SPEC, base(), TENANTS) for _ in range(2))
    for other, optimizer in ((restored, True), (without, False)):
        other.create("other", LORA_B, 5)
        other.create("a", LORA_A, 99)
        run(other, other.begin("a", rollouts(seed=3), "ppo"))
        other.restore("a", saved, optimizer=optimizer)
        assert other.num_accumulated_tokens("a") == 0
        assert train(other, "a", 1).policy_version == (2 if optimizer else 1)
    assert bits(restored.state("a")) == bits(whole)
    assert bits(without.adapter("a")) != bits(whole["trainable"])


def test_a_step_without_a_gradient_changes_nothing():
    trainer = tenants()
    before = bits(trainer.state("a"))
    result = trainer.optim_step("a", AdamParams(1.0, weight_decay=0.5))
    assert not result.applied and result.policy_version == 0
    assert result.metrics == {"grad_norm": 0.0, "learning_rate": 1.0}
    assert result.skipped_because == "no gradient was accumulated"
    run(trainer, trainer.begin("a", rollouts(), "ppo"))
    trainer.discard("a")
    assert not trainer.optim_step("a", AdamParams()).applied
    assert bits(trainer.state("a")) == before


def test_no_program_is_made_after_warming_up(monkeypatch):
    """Whatever the mix of losses, settings, lengths and models: neither compiled nor read from an earlier run's."""
    own_shapes = dataclasses.replace(TENANTS, rows=2, max_adapters=4)  # no other test has compiled for these
    trainer = TenantTrainer(SPEC, base(), own_shapes)
    trainer.warm_up()
    assert not any(leaf.any() for leaf in jax.tree.leaves(trainer._bank))
    made: list[str] = []
    begin = Executables.begin

    def counted(self, name, *args):
        made.append(name)
        return begin(self, name, *args)

    monkeypatch.setattr(Executables, "begin", counted)
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: made.append(name) if name == COMPILED else None
    )
    try:
        trainer.create("a", LORA_A, 0)
        trainer.create("b", LoraSpec(3, attention=False), 1)
        trainer.create("c", LORA_B, 2)
        for step, (loss, config) in enumerate(CONFIGS.items()):
            works = [
                trainer.begin("b", rollouts(seed=step)[: step + 1], loss, config),
                trainer.begin("c", rollouts(seed=step + 7, header=step + 1), "cross_entropy"),
                trainer.begin("a", rollouts(num_prompts=1, seed=step + 3), "gspo", gradient=step % 2 == 0),
            ]
            run(trainer, *works)
            for model_id in "abc":
                trainer.optim_step(model_id, AdamParams(10.0**-step, grad_clip_norm=step))
            trainer.restore("a", trainer.state("a"), optimizer=True)
            trainer.adapter("b")
        trainer.remove("b")
        assert not made
        run(trainer, trainer.begin("a", wide(rollouts()[:2], 2), "cross_entropy"))
        assert any(name.startswith("tenants-") for name in made), "programs are not counted"
        jax.jit(lambda x: x * 2 + len(made))(np.arange(3.0)).block_until_ready()  # too small for any cache on disk
        assert COMPILED in made, "compilations are not counted"
    finally:
        jax.monitoring.clear_event_listeners()
    with pytest.raises(ConfigError, match="needs every slot free. Got: 2 models"):
        trainer.warm_up()


def test_slots_run_out_and_come_back():
    trainer = TenantTrainer(SPEC, base(), TENANTS)
    for i in range(3):
        trainer.create(f"m{i}", LORA_A, i)
    with pytest.raises(
        CapacityError, match="no room for model 'm3'. Got: 3 models being trained. Expected: at most 3. Unload a model"
    ):
        trainer.create("m3", LORA_A, 3)
    trainer.remove("m1")
    trainer.create("m3", LORA_B, 3)
    assert trainer.model_ids == ("m0", "m2", "m3")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.create("c", LoraSpec(9), 0), "rank of model 'c' is too large. Got: 9. Expected: at most 8"),
        (lambda t: t.create("a", LORA_A, 0), "The model 'a' exists already"),
        (lambda t: t.remove("x"), "There is no model 'x' in training. Create it, or load it from a checkpoint"),
        (lambda t: t.begin("x", rollouts(), "ppo"), "There is no model 'x'"),
        (lambda t: t.begin("a", rollouts(), "pp"), "Unknown loss 'pp'.*Did you mean 'ppo'"),
        (lambda t: t.begin("a", [], "ppo"), "There is nothing to train on"),
        (lambda t: t.begin("a", rollouts(), "ppo", {"tis_cap": 2}), "'tis_cap' of ppo is not off.*temperature, clip"),
        (lambda t: t.begin("a", rollouts(), "ppo", {"kl": "k2"}), "'kl' of ppo is not offered to models that share"),
        (
            lambda t: t.begin("a", wide(rollouts()[:2], 129), "cross_entropy"),
            "Datum 0 has too many targets a position. Got: 129. Expected: at most 128",
        ),
        (
            lambda t: t.begin("a", [Datum(np.array([1, 67]), {"target_tokens": np.array([1, 2])})], "cross_entropy"),
            "Datum 0: tokens holds a token id outside the vocabulary. Got: 67 at position 1. Expected: 0 to 66",
        ),
        (lambda t: t.optim_step("a", AdamParams(1e39)), "'learning_rate' is out of range. Got: 1e.39.*a finite number"),
        (lambda t: t.optim_step("a", AdamParams(beta2=1.0)), "'beta2' is out of range. Got: 1.0.*from 0 to below 1"),
        (lambda t: t.optim_step("a", AdamParams(eps=-1.0)), "'eps' is out of range. Got: -1.0"),
        (lambda t: t.begin("a", rollouts(), "ppo").result(), "call on model 'a' did not finish. Got: 3 rows left"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(call, text):
    trainer = tenants()
    run(trainer, trainer.begin("a", rollouts(), "ppo"))
    before = bits(trainer._bank)
    with pytest.raises(RequestError, match=text):
        call(trainer)
    assert bits(trainer._bank) == before


def test_short_data_have_rows_of_their_own_length():
    """The same gradient and log-probs as in long rows; one long datum sends its whole call to the long rows."""
    short = dataclasses.replace(TENANTS, short_row_tokens=TENANTS.row_tokens // 2, short_rows=2)
    data = rollouts()
    assert max(len(datum.tokens) for datum in data) <= short.row_tokens // 2
    results, gradients = [], []
    for settings in (TENANTS, short):
        trainer = TenantTrainer(SPEC, base(), settings)
        trainer.create("a", LORA_A, 0)
        trainer.restore("a", drawn_state(trainer, "a", 0), optimizer=False)
        work = trainer.begin("a", data, "importance_sampling")
        run(trainer, work)
        results.append(work)
        gradients.append(trainer.accumulated_gradient("a"))
    assert results[0].program[:2] == (4, TENANTS.row_tokens)
    assert results[1].program[:2] == (2, TENANTS.row_tokens // 2)
    close(gradients[1], gradients[0])
    for a, b in zip(results[0].result().outputs, results[1].result().outputs, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)
    tokens = np.arange(1, TENANTS.row_tokens + 1) % SPEC.vocab_size
    long = Datum(tokens, {"target_tokens": tokens, "weights": np.ones(len(tokens), np.float32)})
    assert trainer.begin("a", [long], "cross_entropy").program[:2] == (4, TENANTS.row_tokens)


def test_short_rows_are_shorter():
    with pytest.raises(ConfigError, match="short_row_tokens must be shorter than its rows. Got: 48. Expected: 1 to 47"):
        dataclasses.replace(TENANTS, short_row_tokens=48)


def test_a_datum_longer_than_a_row_is_refused():
    datum = Datum(np.zeros(49, np.int32), {"target_tokens": np.zeros(49, np.int32)})
    with pytest.raises(CapacityError, match="Datum 0 does not fit in a training row. Got: 49 tokens. Expected: at"):
        tenants().begin("a", [datum], "cross_entropy")


def test_a_state_of_another_adapter_is_refused():
    trainer = tenants()
    before, state = bits(trainer._bank), drawn_state(trainer, "b", 0)
    with pytest.raises(CheckpointError, match=r"trainable\['down'\]\['a'\] does not belong.*Got: nothing"):
        trainer.restore("a", state, optimizer=False)
    state = trainer.state("a")
    del state["optimizer"]["mu"]["q"]
    with pytest.raises(CheckpointError, match=r"optimizer\['mu'\]\['q'\]\['a'\] does not belong.*Got: nothing"):
        trainer.restore("a", state, optimizer=True)
    assert bits(trainer._bank) == before


def test_settings_are_checked():
    for field in ("rows", "max_adapters", "max_rank", "max_targets"):
        with pytest.raises(ConfigError, match=f"The trainer's {field} must be at least 1. Got: 0"):
            dataclasses.replace(TENANTS, **{field: 0})
