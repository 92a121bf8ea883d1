"""The losses against hand-computed cases, numpy oracles in double precision, and finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.errors import RequestError
from locojax.training.aggregation import Totals, aggregation_weights
from locojax.training.kl import LOG_RATIO_BOUND, kl_estimate, kl_in_reward
from locojax.training.losses import (
    LOSSES,
    ClipOptions,
    CrossEntropyInputs,
    Options,
    PolicyInputs,
    PolicyOptions,
    correction_weights,
    find_loss,
    needed_inputs,
    read_options,
)

POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")


def f32(*values):
    return jnp.asarray(values, jnp.float32)


def run(name, lp, inputs, options=None, on=None, segments=None):
    """(elementwise loss, its sum's gradient by lp, metrics) of a policy loss, as numpy."""
    loss = LOSSES[name]
    n = lp.shape[0]
    on = jnp.asarray(inputs.advantages != 0) if on is None else on
    segments = jnp.zeros(n, jnp.int32) if segments is None else segments
    options = loss.options() if options is None else options

    def total(lp):
        result = loss.function(jnp.where(on, lp, 0.0), on, inputs, segments, options)
        return jnp.sum(result.elementwise), result

    (_, result), gradient = jax.value_and_grad(total, has_aux=True)(lp)
    return np.asarray(result.elementwise), np.asarray(gradient), {k: float(v) for k, v in result.metrics.items()}


def test_ppo_clips_where_it_should():
    """C09: per-token loss and whether the gradient flows."""
    lp, advantages = jnp.log(f32(1.5, 1.5, 0.5, 0.5)), f32(1, -1, 1, -1)
    elementwise, gradient, metrics = run("ppo", lp, PolicyInputs(jnp.zeros(4), advantages))
    np.testing.assert_allclose(elementwise, [-1.2, 1.5, -0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 1.5, -0.5, 0.0], rtol=1e-6)
    assert metrics["num_clipped"] == 2 and metrics["ratio"] == pytest.approx(4.0)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """C10."""
    lp, advantages = f32(0, 5, -5), f32(1, 2, 0)  # the third is masked: it carries no advantage
    options = read_options(find_loss("cispo"), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    elementwise, gradient, _ = run("cispo", lp, PolicyInputs(jnp.zeros(3), advantages), options)
    np.testing.assert_allclose(elementwise, [0, -12, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1, -2.4, 0], rtol=1e-6)


def test_cispo_is_one_sided_by_default():
    lp = jnp.log(f32(0.01, 10.0))
    _, gradient, _ = run("cispo", lp, PolicyInputs(jnp.zeros(2), f32(1, 1)))
    np.testing.assert_allclose(gradient, [-0.01, -4.0], rtol=1e-5)


def test_gspo_takes_the_geometric_mean():
    """C14: 100 tokens of 0.012 each are a ratio of 1.0121, not of 3.3201."""
    inputs = PolicyInputs(jnp.full(100, -0.012), jnp.ones(100), sequence_ratio_mask=jnp.ones(100))
    elementwise, gradient, metrics = run("gspo", jnp.zeros(100), inputs)
    np.testing.assert_allclose(elementwise, -np.exp(0.012), rtol=1e-5)
    np.testing.assert_allclose(gradient, -np.exp(0.012), rtol=1e-5)
    assert metrics["ratio"] / 100 == pytest.approx(1.0121, abs=1e-4)


def test_gspo_keeps_sequences_apart_and_masked_tokens_out_of_the_ratio():
    lp = f32(0.5, 0.5, -0.5, -0.5, 9.0)
    mask, segments = f32(1, 0, 1, 1, 0), jnp.asarray([0, 0, 1, 1, 5], jnp.int32)
    inputs = PolicyInputs(f32(0.4, -3.0, -0.4, -0.6, 0.0), f32(1, 1, 1, 1, 0), sequence_ratio_mask=mask)
    elementwise, _, _ = run("gspo", lp, inputs, segments=segments)
    np.testing.assert_allclose(elementwise, -np.exp([0.1, 0.1, 0.0, 0.0, -np.inf]), rtol=1e-5)


def oracle(name, lp, frozen, q, advantages, low, high, beta):
    """The loss in float64; `frozen` stands for lp where a stop_gradient is."""
    ratio = np.exp(lp - q)
    if name == "importance_sampling":
        return -np.sum(ratio * advantages)
    if name == "dro":
        return -np.sum(lp * advantages - 0.5 * beta * (lp - q) ** 2)
    if name == "cispo":
        return -np.sum(np.clip(np.exp(frozen - q), low, high) * lp * advantages)
    if name == "stable_reinforce":
        return np.sum(-np.minimum(np.exp(frozen - q), high) * lp * advantages + 0.5 * beta * (lp - q) ** 2)
    if name == "gspo":
        ratio = np.exp(np.mean(frozen - q)) * np.exp(lp - frozen)
    return -np.sum(np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_values_and_gradients_equal_finite_differences(name):
    rng = np.random.default_rng(4)
    n, h = 12, 1e-6
    q = rng.normal(size=n) - 3
    lp = q + 0.3 * rng.normal(size=n)
    advantages = rng.normal(size=n)
    low, high = (0.9, 1.1) if name != "cispo" else (0.0, 1.1)
    bounds = {} if name in ("importance_sampling", "dro") else {"clip_low_threshold": low, "clip_high_threshold": high}
    if name == "stable_reinforce":
        bounds = {"ratio_cap": high, "kl_coeff": 0.2}
    options = read_options(find_loss(name), bounds | ({"beta": 0.2} if name == "dro" else {}))
    inputs = PolicyInputs(jnp.asarray(q, jnp.float32), jnp.asarray(advantages, jnp.float32))
    elementwise, gradient, _ = run(name, jnp.asarray(lp, jnp.float32), inputs, options)

    def value(at):
        return oracle(name, at, lp, q, advantages, low, high, 0.2)

    assert elementwise.sum() == pytest.approx(value(lp), rel=1e-5)
    expected = [(value(lp + h * e) - value(lp - h * e)) / (2 * h) for e in np.eye(n)]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def test_stable_reinforce_holds_sampled_tokens_without_advantage_to_the_sampler():
    """lp and q differ by 0.5: r = 1.6487, k2 = 0.125. The second token counts by its weight, the third not at all."""
    loss = find_loss("stable_reinforce")
    options = read_options(loss, {"kl_coeff": 0.4, "ratio_cap": 1.5})
    lp, q, advantages, weights = f32(-1, -1, -1), f32(-1.5, -1.5, 0), f32(2, 0, 0), f32(1, 0.5, 0)
    arrays = {"advantages": np.asarray(advantages), "weights": np.asarray(weights)}
    on = loss.reads(arrays, options)
    assert on.tolist() == [True, True, False]
    inputs = PolicyInputs(q, advantages, weights=weights)
    elementwise, gradient, metrics = run("stable_reinforce", lp, inputs, options, jnp.asarray(on))
    np.testing.assert_allclose(elementwise, [1.5 * 2 + 0.4 * 0.125, 0.4 * 0.5 * 0.125, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.5 * 2 + 0.4 * 0.5, 0.4 * 0.5 * 0.5, 0], rtol=1e-6)
    assert metrics["k2"] == pytest.approx(0.1875) and metrics["num_clipped"] == 2

    unweighted = loss.reads({"advantages": np.asarray(advantages)}, options)
    assert unweighted.tolist() == [True, False, False]
    elementwise, _, metrics = run("stable_reinforce", lp, PolicyInputs(q, advantages), options, jnp.asarray(unweighted))
    np.testing.assert_allclose(elementwise, [3.05, 0, 0], rtol=1e-6)
    no_kl = read_options(loss, {})
    assert loss.reads(arrays, no_kl).tolist() == [True, False, False]
    with pytest.raises(RequestError, match="stable_reinforce is out of range.*ratio_cap 0, kl_coeff 0.*above 0"):
        read_options(loss, {"ratio_cap": 0})


def test_cross_entropy_weighs_every_target():
    lp, weights = f32(-1, -2, -3, -4).reshape(2, 2), f32(1, 0.5, 0, -2).reshape(2, 2)
    loss = LOSSES["cross_entropy"]

    def total(lp):
        on = jnp.asarray([True, True])
        return jnp.sum(
            loss.function(lp, on, CrossEntropyInputs(weights), jnp.zeros(2, jnp.int32), Options()).elementwise
        )

    value, gradient = jax.value_and_grad(total)(lp)
    assert float(value) == 1 + 1 + 0 - 8
    np.testing.assert_array_equal(gradient, -weights)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_positions_without_advantage_may_hold_anything(name):
    """They contribute exactly 0, to the loss and to the gradient, whatever lp and q are."""
    lp, q, advantages = f32(-1.0, np.nan, -2.0, 3e38), f32(-1.1, 0.0, -1.8, -3e38), f32(1, 0, -1, 0)
    elementwise, gradient, metrics = run(name, lp, PolicyInputs(q, advantages))
    assert np.all(np.isfinite(elementwise)) and np.all(np.isfinite(gradient))
    assert not elementwise[[1, 3]].any() and not gradient[[1, 3]].any() and gradient[[0, 2]].all()
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_absurd_log_ratio_stays_finite(name):
    for gap in (200.0, -200.0):
        lp, inputs = f32(gap, -1.0), PolicyInputs(f32(0.0, -1.0), f32(-1, -1))
        elementwise, gradient, _ = run(name, lp, inputs)
        assert np.all(np.isfinite(elementwise)) and np.all(np.isfinite(gradient))


def test_correction_weights():
    """C13: TIS and IcePop on ratios 1, 3, 0.2; no gradient through them."""
    inputs = PolicyInputs(jnp.zeros(3), jnp.ones(3), old_logprobs=jnp.log(f32(1, 3, 0.2)))
    tis, icepop = PolicyOptions(tis_cap=2.0), PolicyOptions(icepop_low=0.5, icepop_high=2.0)
    np.testing.assert_allclose(correction_weights(inputs, tis), [1, 2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(correction_weights(inputs, icepop), [1, 0, 0], rtol=1e-6)
    slope = jax.grad(
        lambda old: jnp.sum(correction_weights(PolicyInputs(jnp.zeros(3), jnp.ones(3), old_logprobs=old), tis))
    )
    assert not np.any(slope(inputs.old_logprobs))


def test_the_correction_multiplies_the_loss_and_the_ratio_is_to_the_old_policy():
    old = jnp.log(f32(1, 3, 0.2))
    inputs = PolicyInputs(jnp.zeros(3), jnp.ones(3), old_logprobs=old)
    elementwise, gradient, _ = run("importance_sampling", old + 0.1, inputs, PolicyOptions(tis_cap=2.0))
    expected = -np.exp(0.1) * np.array([1, 2, 0.2])
    np.testing.assert_allclose(elementwise, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_kl_estimators():
    """C11."""
    for kind, expected in (("k1", 1.0), ("k2", 0.5), ("k3", 0.3679)):
        assert kl_estimate(np.float64(-1), np.float64(-2), kind) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(RequestError, match="Unknown KL estimator 'k4'.*k1, k2, k3"):
        kl_estimate(0.0, 0.0, "k4")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_an_absurd_kl_stays_finite(kind):
    """C12: policy -200, reference 0: the log-ratio is bounded before exp."""
    inputs = PolicyInputs(f32(-200.0), f32(0.0), ref_logprobs=f32(0.0), weights=f32(1.0))
    options = PolicyOptions(kl=kind, kl_coefficient=0.1)
    elementwise, gradient, metrics = run("importance_sampling", f32(-200.0), inputs, options, on=jnp.asarray([True]))
    assert np.isfinite(elementwise).all() and np.isfinite(gradient).all() and np.isfinite(metrics["kl"])
    if kind == "k3":
        assert metrics["kl"] == pytest.approx(np.exp(LOG_RATIO_BOUND) - 1 - LOG_RATIO_BOUND, rel=1e-5)


def softmax(theta):
    e = np.exp(theta - theta.max())
    return e / e.sum()


def test_the_gradient_each_kl_estimator_really_has():
    """Expected on-policy gradient, over all tokens of a small vocabulary, against finite differences of both KLs."""
    rng = np.random.default_rng(0)
    theta, ref = rng.normal(size=6), softmax(rng.normal(size=6))
    policy, h = softmax(theta), 1e-6

    def forward_kl(t):
        p = softmax(t)
        return np.sum(p * np.log(p / ref))

    def reverse_kl(t):
        return np.sum(ref * np.log(ref / softmax(t)))

    def slope(function):
        return np.array([(function(theta + h * e) - function(theta - h * e)) / (2 * h) for e in np.eye(6)])

    inputs = PolicyInputs(
        jnp.asarray(np.log(policy), jnp.float32),
        jnp.zeros(6),
        ref_logprobs=jnp.asarray(np.log(ref), jnp.float32),
        weights=jnp.asarray(policy, jnp.float32),  # the expectation over the policy's own tokens
    )

    def in_loss(kind):
        def total(t):
            everywhere = jnp.ones(6, bool)
            lp = jax.nn.log_softmax(t)
            result = LOSSES["ppo"].function(
                lp, everywhere, inputs, jnp.zeros(6, jnp.int32), ClipOptions(kl=kind, kl_coefficient=1.0)
            )
            return jnp.sum(result.elementwise)

        return np.asarray(jax.grad(total)(jnp.asarray(theta, jnp.float32)))

    np.testing.assert_allclose(in_loss("k1"), 0.0, atol=1e-6)
    np.testing.assert_allclose(in_loss("k2"), slope(forward_kl), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(in_loss("k3"), slope(reverse_kl), rtol=1e-4, atol=1e-6)

    # In the reward: the score function times (- coefficient x k1) is the descent direction of KL(policy || ref).
    advantages = kl_in_reward(np.zeros(6), np.log(policy), np.log(ref), np.ones(6), kind="k1", coefficient=1.0)
    score = np.eye(6) - policy  # row a: d log p(a) / d theta
    np.testing.assert_allclose(-(policy * advantages) @ score, slope(forward_kl), rtol=1e-4, atol=1e-6)


def test_token_mean_and_sequence_mean():
    """C07: five tokens of loss 2 and one of loss 10."""
    masks, losses = [np.array([1, 1, 1, 1, 1, 0]), np.array([0, 1])], [np.full(6, 2.0), np.full(2, 10.0)]

    def total(kind):
        weights = aggregation_weights(masks, kind)
        return sum(float(np.sum(w * value)) for w, value in zip(weights, losses, strict=True))

    assert total("tokens") == pytest.approx(3.3333, abs=1e-4)
    assert total("completions") == pytest.approx(6.0)
    assert total("sum") == pytest.approx(20.0)
    totals = Totals.of(masks, max_tokens=10)
    assert totals.denominator("constant") == 20
    constant = aggregation_weights(masks, "constant", totals)
    np.testing.assert_allclose([w.max() for w in constant], 1 / 20)
    with pytest.raises(RequestError, match="'completions' has no common denominator. Expected: sum, tokens, constant"):
        totals.denominator("completions")


def test_a_masked_completion_is_in_no_denominator():
    """C18."""
    weights = aggregation_weights([np.ones(4), np.zeros(4)], "tokens")
    assert float(sum(w.sum() for w in weights)) == 1.0
    weights = aggregation_weights([np.ones(4), np.zeros(4)], "completions")
    assert float(sum(w.sum() for w in weights)) == 1.0


@pytest.mark.parametrize("kind", ["sum", "tokens", "completions"])
def test_nothing_left_gives_zeros(kind):
    """C15: mean modes do not divide by 0."""
    assert not np.any(aggregation_weights([np.zeros(3)], kind)[0])


def test_denominators_add_up_over_hosts():
    masks = [np.ones(5), np.ones(1), np.ones(3)]
    whole = aggregation_weights(masks, "completions")
    totals = Totals.of(masks[:2]) + Totals.of(masks[2:])
    assert totals == Totals(9, 3)
    parts = [
        *aggregation_weights(masks[:2], "completions", totals),
        *aggregation_weights(masks[2:], "completions", totals),
    ]
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(RequestError, match="Unknown aggregation 'mean'"):
        aggregation_weights(masks, "mean")


def test_what_is_unknown_is_named_with_the_nearest():
    with pytest.raises(RequestError, match="Unknown loss 'importance_samplin'.*Did you mean 'importance_sampling'"):
        find_loss("importance_samplin")
    with pytest.raises(RequestError, match="ppo has no setting 'clip_low'.*Did you mean 'clip_low_threshold'"):
        read_options(find_loss("ppo"), {"clip_low": 0.8})
    with pytest.raises(RequestError, match="'beta' of dro is not a finite number.*Got: 'x'"):
        read_options(find_loss("dro"), {"beta": "x"})
    with pytest.raises(RequestError, match="'beta' of dro is not a finite number.*Got: nan"):
        read_options(find_loss("dro"), {"beta": float("nan")})
    with pytest.raises(RequestError, match="clip_low_threshold is above clip_high_threshold.*1.3 and 1.2"):
        read_options(find_loss("ppo"), {"clip_low_threshold": 1.3})
    with pytest.raises(RequestError, match="icepop_low and icepop_high are set together"):
        read_options(find_loss("ppo"), {"icepop_low": 0.5})
    with pytest.raises(RequestError, match="'temperature' is not positive"):
        read_options(find_loss("cross_entropy"), {"temperature": 0})
    with pytest.raises(RequestError, match=r"Unknown KL estimator 'k5' \(kl\)"):
        read_options(find_loss("ppo"), {"kl": "k5"})


def test_a_configured_correction_needs_its_inputs():
    ppo = find_loss("ppo")
    assert set(needed_inputs(ppo, read_options(ppo, {}))) == {"logprobs", "advantages"}
    assert "old_logprobs" in needed_inputs(ppo, read_options(ppo, {"tis_cap": 2}))
    assert {"ref_logprobs", "weights"} <= set(needed_inputs(ppo, read_options(ppo, {"kl": "k2"})))
