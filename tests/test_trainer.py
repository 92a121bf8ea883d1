"""The trainer: no cut, packing or sharing changes the gradient; a step that must not happen doesn't."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.errors import CapacityError, ConfigError, RequestError
from locojax.models import decoder
from locojax.models.logprobs import target_logprobs_plain
from locojax.models.lora import Adapters, LoraSpec
from locojax.models.remat import POLICIES
from locojax.models.spec import ModelSpec, RopeSpec
from locojax.training.aggregation import aggregation_weights
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

SPEC = ModelSpec(
    family="llama",
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0),
    max_context=128,
    tied_embeddings=True,
)
SETTINGS = TrainerSettings(row_tokens=48, rows=2, compute_dtype="float32", tile_tokens=16)
LORA = LoraSpec(rank=4, alpha=8.0, unembed=True)
POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


def drawn_params():
    drawn = decoder.init_params(SPEC, jax.random.key(1))
    # Larger than a fresh model's, so that attention and log-probs are far from uniform.
    return jax.tree.map(lambda leaf: np.asarray(leaf) * (4.0 if leaf.ndim > 1 else 1.0), drawn)


@pytest.fixture(scope="module")
def params():
    return drawn_params()


def make_trainer(params, lora=None, **changes):
    trainer = Trainer(SPEC, params, dataclasses.replace(SETTINGS, **changes), lora=lora, seed=3)
    if lora is not None:  # with b zero, a would get no gradient
        rng = np.random.default_rng(5)
        state = trainer.state()
        state["trainable"] = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, jnp.float32), state["trainable"]
        )
        trainer.restore(state)
    return trainer


def rollouts(num_prompts=3, num_samples=4, seed=0, header=7):
    """RL-like data: a common header, prompts, samples of them of ragged length; loss on the completions."""
    rng = np.random.default_rng(seed)
    common, data = rng.integers(0, 67, header), []
    for _ in range(num_prompts):
        prompt = np.concatenate([common, rng.integers(0, 67, 5)])
        for _ in range(num_samples):
            completion = rng.integers(0, 67, rng.integers(1, 12))
            sequence = np.concatenate([prompt, completion])
            on = np.arange(1, len(sequence)) >= len(prompt)
            advantages = np.where(on, rng.normal(), 0.0).astype(np.float32)
            logprobs = np.where(on, -4.0 + 0.3 * rng.normal(size=len(on)), 0.0).astype(np.float32)
            inputs = {"target_tokens": sequence[1:], "advantages": advantages, "logprobs": logprobs}
            data.append(Datum(sequence[:-1], {**inputs, "weights": on.astype(np.float32)}))
    return data


def supervised(data):
    return [Datum(d.tokens, {k: d.inputs[k] for k in ("target_tokens", "weights")}) for d in data]


def close(a, b, rtol=1e-5):
    """Equal to rtol of each leaf's largest value: small entries of a gradient are differences of large terms."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max())


def gradient_of(trainer, calls, loss, config=None, score="all"):
    for call in calls:
        trainer.forward_backward(call, loss, config, score=score)
    gradient = jax.tree.map(np.asarray, trainer.accumulated_gradient)
    trainer.discard()
    return gradient


WIDTH = 24  # of the oracle's rows


@jax.jit
def row_logprobs(params, tokens, positions, until, targets, adapters):
    """One datum a row, through the plain head: log-probs [R, T, K]."""
    hidden, _ = decoder.forward(params, SPEC, tokens, positions, until, adapters=adapters)
    R, T, D = hidden.shape
    low_rank = None
    if adapters is not None:
        head = adapters.tree["head"]
        low_rank = (hidden.reshape(R * T, D) @ head["a"] * adapters.scale, head["b"])
    logprobs, _ = target_logprobs_plain(
        hidden.reshape(R * T, D),
        decoder.head_weight(params),
        targets.reshape(R * T, -1),
        jnp.ones(R * T, bool),
        low_rank=low_rank,
    )
    return logprobs.reshape(R, T, -1)


def rows(data, values, dtype):
    """[R, WIDTH, ...]: each datum's values in a row of its own, zeros after them."""
    trailing = values[0].shape[1:]
    out = np.zeros((len(data), WIDTH, *trailing), dtype)
    for row, value in zip(out, values, strict=True):
        row[: len(value)] = value
    return jnp.asarray(out)


def logprobs_one_by_one(params, data, adapters=None):
    """What packing has to reproduce: [R, WIDTH, K]."""
    tokens = rows(data, [d.tokens for d in data], np.int32)
    positions = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), tokens.shape)
    until = jnp.asarray([[len(d.tokens)] * WIDTH for d in data], jnp.int32)
    targets = rows(data, [d.inputs["target_tokens"].reshape(len(d.tokens), -1) for d in data], np.int32)
    return row_logprobs(params, tokens, positions, jnp.maximum(until, positions + 1), targets, adapters)


def oracle_gradient(params, data, adapters=None):
    """Of the summed importance-sampling loss, one datum a row, by plain autodiff."""
    advantages, q = (rows(data, [d.inputs[name] for d in data], np.float32) for name in ("advantages", "logprobs"))

    def total(trainable):
        base, beside = (trainable, None) if adapters is None else (params, Adapters(trainable, adapters.scale))
        return -jnp.sum(jnp.exp(logprobs_one_by_one(base, data, beside)[:, :, 0] - q) * advantages)

    return jax.jit(jax.grad(total))(jax.tree.map(jnp.asarray, params) if adapters is None else adapters.tree)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
def test_the_gradient_is_that_of_the_data_one_by_one(params, lora, share):
    data = rollouts()
    trainer = make_trainer(params, lora, share_prefixes=share)
    adapters = None if lora is None else Adapters(trainer.state()["trainable"], jnp.float32(lora.scale))
    expected = oracle_gradient(params, data, adapters)
    close(gradient_of(trainer, [data], "importance_sampling", score="active"), expected)
    close(gradient_of(trainer, [data], "importance_sampling", score="all"), expected)


@pytest.mark.parametrize("loss", ["cross_entropy", *POLICY_LOSSES])
def test_no_cut_packing_or_sharing_changes_the_gradient(params, loss):
    data = rollouts()
    reference = gradient_of(make_trainer(params, row_tokens=32, rows=1, share_prefixes=False), [data], loss)
    cuts = {
        "two calls": [data[:5], data[5:]],
        "one by one": [[datum] for datum in data],
        "reversed": [data[::-1]],
    }
    for calls in cuts.values():
        close(gradient_of(make_trainer(params), calls, loss), reference)


@pytest.mark.parametrize(
    "changes",
    [{"row_tokens": 120}, {"row_tokens": 30, "rows": 3}, {"remat": "none"}, {"tile_tokens": 7, "remat": "full"}],
    ids=["long rows", "three rows", "remat", "small tiles"],
)
def test_no_shape_of_the_computation_changes_the_gradient(params, changes):
    data, loss = rollouts(), "importance_sampling"
    reference = gradient_of(make_trainer(params), [data], loss)
    close(gradient_of(make_trainer(params, **changes), [data], loss, score="active"), reference)


def test_packed_logprobs_are_those_of_each_datum_alone(params):
    """C30: and in every aggregation mode the loss is, too."""
    data = rollouts()
    trainer = make_trainer(params)
    result = trainer.forward(data, "cross_entropy")
    assert result.metrics["num_computed_tokens:sum"] < result.metrics["num_datum_tokens:sum"]
    alone = [lp[: len(d.tokens), 0] for d, lp in zip(data, np.asarray(logprobs_one_by_one(params, data)), strict=True)]
    for output, expected in zip(result.outputs, alone, strict=True):
        np.testing.assert_allclose(output["logprobs"], expected, atol=1e-5)
    masks = [datum.inputs["weights"] for datum in data]
    for kind in ("sum", "tokens", "completions"):
        weights = aggregation_weights(masks, kind)
        weighted = [
            Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"], "weights": w})
            for d, w in zip(data, weights, strict=True)
        ]
        expected_loss = -sum(float(np.sum(w * lp)) for w, lp in zip(weights, alone, strict=True))
        assert trainer.forward(weighted, "cross_entropy").metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-5)


def test_packing_does_not_leak(params):
    """C30: another sequence's tokens leave a row mate's log-probs bit-equal."""
    data = supervised(rollouts(num_prompts=2, num_samples=1, header=0))
    trainer = make_trainer(params, row_tokens=96, rows=1)
    before = trainer.forward(data, "cross_entropy").outputs
    changed = Datum((data[0].tokens + 1) % 67, data[0].inputs)
    after = trainer.forward([changed, data[1]], "cross_entropy").outputs
    assert np.array_equal(before[1]["logprobs"], after[1]["logprobs"])
    assert not np.array_equal(before[0]["logprobs"], after[0]["logprobs"])


def test_active_scores_equal_all_scores_where_they_are_given(params):
    data, trainer = rollouts(), make_trainer(params)
    everywhere = trainer.forward(data, "ppo", score="all")
    active = trainer.forward(data, "ppo", score="active")
    assert everywhere.metrics["loss:sum"] == pytest.approx(active.metrics["loss:sum"], rel=1e-6)
    for datum, a, b in zip(data, everywhere.outputs, active.outputs, strict=True):
        on = datum.inputs["advantages"] != 0
        np.testing.assert_allclose(a["logprobs"][on], b["logprobs"][on], atol=1e-5)
        np.testing.assert_allclose(a["entropy"][on], b["entropy"][on], atol=1e-4)
        assert not b["logprobs"][~on].any() and np.all(a["logprobs"] < 0)


def test_data_without_signal_cost_nothing_and_change_nothing(params):
    data, trainer = rollouts(), make_trainer(params)
    silent = [Datum(d.tokens, {**d.inputs, "advantages": d.inputs["advantages"] * 0}) for d in data[:6]]
    mixed = trainer.forward_backward(silent + data[6:], "importance_sampling", score="active")
    gradient = jax.tree.map(np.asarray, trainer.accumulated_gradient)
    trainer.discard()
    alone = trainer.forward_backward(data[6:], "importance_sampling", score="active")
    close(gradient, trainer.accumulated_gradient)
    assert mixed.metrics["num_computed_tokens:sum"] == alone.metrics["num_computed_tokens:sum"]
    assert mixed.outputs[0]["logprobs"].shape == data[0].tokens.shape and not mixed.outputs[0]["logprobs"].any()


def test_losses_are_sums(params):
    """C19: the same datum twice in a call, and two calls of one each, give twice the gradient of one."""
    data, trainer = rollouts()[:1], make_trainer(params)
    twice = jax.tree.map(lambda leaf: 2 * leaf, gradient_of(trainer, [data], "importance_sampling"))
    close(gradient_of(trainer, [data * 2], "importance_sampling"), twice)
    close(gradient_of(trainer, [data, data], "importance_sampling"), twice)


def test_token_mean_is_the_same_for_every_cut(params):
    """C08: the denominator is the batch's, not the micro-batch's."""
    data = rollouts()
    weights = aggregation_weights([d.inputs["weights"] for d in data], "tokens")
    data = [
        Datum(d.tokens, {**d.inputs, "advantages": d.inputs["advantages"] * w})
        for d, w in zip(data, weights, strict=True)
    ]
    trainer = make_trainer(params)
    whole = gradient_of(trainer, [data], "importance_sampling")
    for size in (1, 3, 6):
        cut = [data[i : i + size] for i in range(0, len(data), size)]
        close(gradient_of(trainer, cut, "importance_sampling"), whole)


def test_all_weights_zero_is_a_no_op(params):
    """C15."""
    data, trainer = supervised(rollouts()), make_trainer(params)
    zero = [Datum(d.tokens, {**d.inputs, "weights": d.inputs["weights"] * 0}) for d in data[:1]]
    for score in ("all", "active"):
        assert trainer.forward_backward(zero, "cross_entropy", score=score).metrics["loss:sum"] == 0.0
    assert not trainer.optim_step(AdamParams(weight_decay=0.5)).applied
    alone = gradient_of(trainer, [data[1:]], "cross_entropy")
    close(gradient_of(trainer, [zero, data[1:]], "cross_entropy"), alone)


def test_no_data_and_no_gradient(params):
    """C16: refused by name; a step with nothing to apply advances nothing and decays nothing."""
    trainer = make_trainer(params)
    before = trainer.state()
    with pytest.raises(RequestError, match="nothing to train on"):
        trainer.forward_backward([], "cross_entropy")
    result = trainer.optim_step(AdamParams(weight_decay=0.5))
    assert not result.applied and result.policy_version == 0
    assert result.skipped_because == "no gradient was accumulated"
    close(trainer.state()["trainable"], before["trainable"], rtol=0)


def test_the_shortest_datum(params):
    """C17: one token and its target work; none is refused by index."""
    trainer = make_trainer(params)
    result = trainer.forward_backward([Datum(np.array([5]), {"target_tokens": np.array([6])})], "cross_entropy")
    assert result.outputs[0]["logprobs"].shape == (1,) and result.outputs[0]["logprobs"][0] < 0
    empty = np.zeros(0, np.int64)
    with pytest.raises(RequestError, match="Datum 1: tokens is not a list of at least 1 token"):
        data = [Datum(np.array([5]), {"target_tokens": np.array([6])}), Datum(empty, {"target_tokens": empty})]
        trainer.forward_backward(data, "cross_entropy")


def test_several_targets_a_position(params):
    data, trainer = supervised(rollouts())[:3], make_trainer(params)
    rng = np.random.default_rng(2)
    wide = []
    for k, datum in zip((1, 2, 3), data, strict=True):
        n = len(datum.tokens)
        inputs = {"target_tokens": rng.integers(0, 67, (n, k)), "weights": rng.normal(size=(n, k)).astype(np.float32)}
        wide.append(Datum(datum.tokens, inputs))
    result = trainer.forward(wide, "cross_entropy")
    for datum, output in zip(wide, result.outputs, strict=True):
        expected = logprobs_one_by_one(params, [datum])[0, : len(datum.tokens)]
        np.testing.assert_allclose(output["logprobs"], expected, atol=1e-5)
        np.testing.assert_allclose(output["elementwise_loss"], -datum.inputs["weights"] * expected, atol=1e-4)


def test_lora_starts_as_its_base_bit_for_bit(params):
    """C31: b is zero at the start."""
    data = supervised(rollouts())
    base = make_trainer(params).forward(data, "cross_entropy")
    adapted = Trainer(SPEC, params, SETTINGS, lora=LORA, seed=9).forward(data, "cross_entropy")
    for a, b in zip(base.outputs, adapted.outputs, strict=True):
        assert np.array_equal(a["logprobs"], b["logprobs"])


def test_the_lora_scale_is_alpha_over_rank():
    """C31: 64 a output; 181.02 with rsLoRA."""
    from locojax.models.lora import delta

    weights = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 4))}
    for rslora, expected in ((False, 64.0), (True, 181.02)):
        scale = jnp.float32(LoraSpec(rank=8, alpha=16.0, rslora=rslora).scale)
        np.testing.assert_allclose(delta(jnp.ones((1, 1, 4)), weights, scale, None), expected, atol=1e-2)








def test_a_sequence_that_is_not_finite_is_left_out_and_counted():
    """Token 66's embedding overflows: its sequence is quarantined, the others' loss is as without it."""
    spec = dataclasses.replace(SPEC, tied_embeddings=False)  # a tied head would break every log-prob
    params = jax.tree.map(np.array, decoder.init_params(spec, jax.random.key(1)))
    params["embed"][66] = np.inf
    trainer = Trainer(spec, params, dataclasses.replace(SETTINGS, share_prefixes=False, row_tokens=24, rows=1))
    data = [Datum(d.tokens % 60, d.inputs) for d in rollouts()]
    bad_tokens = data[0].tokens.copy()
    bad_tokens[3] = 66
    expected = trainer.forward(data[1:], "importance_sampling").metrics
    result = trainer.forward([Datum(bad_tokens, data[0].inputs), *data[1:]], "importance_sampling")
    assert result.metrics["num_nonfinite:sum"] == 1 and expected["num_nonfinite:sum"] == 0
    assert result.metrics["num_tokens:sum"] == expected["num_tokens:sum"]
    assert result.metrics["loss:sum"] == pytest.approx(expected["loss:sum"], rel=1e-5)
    assert not result.outputs[0]["elementwise_loss"].any()


def test_an_untied_head_gets_its_own_gradient():
    """Tied, the embedding's gradient is the sum of both uses: of the untied model's two, the head's transposed."""
    tied = jax.tree.map(lambda leaf: 3 * np.asarray(leaf), decoder.init_params(SPEC, jax.random.key(1)))
    untied = {**tied, "head": tied["embed"].T}
    data = rollouts()
    both = gradient_of(Trainer(SPEC, tied, SETTINGS), [data], "importance_sampling")
    apart_spec = dataclasses.replace(SPEC, tied_embeddings=False)
    apart = gradient_of(Trainer(apart_spec, untied, SETTINGS), [data], "importance_sampling")
    close(both["embed"], apart["embed"] + apart["head"].T)
    close(both["layers"], apart["layers"])






def test_tempered_logprobs(params):
    """C21: with the sampler's log-probs declared tempered, the ratio of an unchanged policy is 1."""
    data, trainer = rollouts(), make_trainer(params)
    scored = trainer.forward(data, "cross_entropy", {"temperature": 0.7})
    sampled = [
        Datum(d.tokens, {**d.inputs, "logprobs": np.where(d.inputs["weights"] != 0, o["logprobs"], 0)})
        for d, o in zip(data, scored.outputs, strict=True)
    ]
    metrics = trainer.forward(sampled, "ppo", {"temperature": 0.7}).metrics
    assert metrics["ratio:sum"] / metrics["num_tokens:sum"] == pytest.approx(1.0, abs=1e-5)
    assert trainer.forward(sampled, "ppo").metrics["ratio:sum"] / metrics["num_tokens:sum"] != pytest.approx(
        1, abs=0.05
    )


def test_one_program_serves_ragged_batches_and_changing_settings(params):
    """No compilation after the first call, whatever the lengths, the number of micro-batches or the learning rate."""
    from jax._src import test_util

    trainer = make_trainer(params)
    trainer.forward_backward(rollouts(), "ppo", score="active")
    trainer.optim_step(AdamParams())
    trainer.forward_backward(rollouts(), "ppo", score="active")
    trainer.optim_step(AdamParams())
    with test_util.count_jit_compilation_cache_miss() as count:
        for seed in range(1, 4):
            data = rollouts(num_prompts=seed + 1, seed=seed)
            trainer.forward_backward(data, "ppo", {"clip_high_threshold": 1.1 + seed / 10}, score="active")
            trainer.optim_step(AdamParams(learning_rate=1e-4 * seed, grad_clip_norm=float(seed)))
    assert count() == 0


def test_bfloat16_stays_near_float32(params):
    data = supervised(rollouts())
    exact = make_trainer(params).forward(data, "cross_entropy").metrics["loss:sum"]
    trainer = make_trainer(params, compute_dtype="bfloat16")
    assert trainer.forward_backward(data, "cross_entropy").metrics["loss:sum"] == pytest.approx(exact, rel=0.03)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trainer.accumulated_gradient))


def test_malformed_data_are_refused_by_datum_and_field(params):
    trainer = make_trainer(params)
    good = rollouts()[0]
    n = len(good.tokens)

    def refused(changes, *parts, tokens=None, loss="importance_sampling", drop=()):
        inputs = {k: v for k, v in {**good.inputs, **changes}.items() if k not in drop}
        bad = Datum(good.tokens if tokens is None else tokens, inputs)
        with pytest.raises(RequestError) as caught:
            trainer.forward_backward([good, bad], loss)
        for part in ("Datum 1", *parts):
            assert part in str(caught.value)

    outside = np.r_[1, 2, 67, good.tokens[3:]]
    refused({}, "tokens holds a token id outside", "67 at position 2", "0 to 66", tokens=outside)
    refused({"target_tokens": np.full(n, -1)}, "target_tokens holds a token id outside", "-1 at position 0")
    refused({"target_tokens": np.zeros(n)}, "target_tokens does not hold integers", "float64")
    refused({"target_tokens": np.zeros(n + 1, int)}, "target_tokens does not match its", f"({n + 1},)")
    refused({"target_tokens": np.zeros((n, 2), int)}, "target_tokens does not match its", f"({n}, 2)")
    refused({"advantages": np.zeros(n - 1)}, "advantages does not match target_tokens", f"({n - 1},)")
    refused(
        {"advantages": np.r_[np.zeros(n - 1), np.nan]},
        "advantages holds a value that is not finite",
        f"nan at position {n - 1}",
    )
    refused({"logprobs": np.array(["x"] * n)}, "logprobs does not hold numbers")
    refused({}, "has no input 'logprobs'", "the loss importance_sampling", drop=("logprobs",))
    refused({}, "has no input 'target_tokens'", drop=("target_tokens",))
    refused({}, "does not match", loss="cross_entropy", tokens=good.tokens[:-1])
    with pytest.raises(CapacityError, match="Datum 0 does not fit in a training row.*49 tokens.*at most 48"):
        trainer.forward([Datum(np.zeros(49, int), {"target_tokens": np.zeros(49, int)})], "cross_entropy")
    assert trainer.num_accumulated_tokens == 0


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="row_tokens must be at least 1"):
        TrainerSettings(row_tokens=0)
    with pytest.raises(ConfigError, match=f"Unknown remat policy 'most'.*one of {', '.join(POLICIES)}"):
        TrainerSettings(row_tokens=8, remat="most")
