"""Fused linear cross-entropy against its plain twin, tokamax, numpy's finite differences and the compiler's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models.logprobs import target_logprobs, target_logprobs_plain
from locojax.models.unembedding import Chunk

N, D, V, R = 37, 16, 101, 4


def inputs(num_targets=1, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(D, V)) * 0.5, jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (N, num_targets)), jnp.int32)
    active = jnp.asarray(rng.random(N) < 0.6)
    low_rank = (
        jnp.asarray(rng.normal(size=(N, R)), jnp.float32),
        jnp.asarray(rng.normal(size=(R, V)) * 0.3, jnp.float32),
    )
    g = jnp.asarray(rng.normal(size=(N, num_targets)), jnp.float32)
    g_entropy = jnp.asarray(rng.normal(size=(N,)), jnp.float32)
    return hidden, head, targets, active, low_rank, g, g_entropy


def close(a, b, rtol=1e-5, atol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("use_low_rank", [False, True])
@pytest.mark.parametrize("vocab_first", [False, True])
@pytest.mark.parametrize(("tile", "chunk"), [(8, None), (64, None), (16, 40)])  # 101 entries: the last 40 overlap
def test_values_and_gradients_equal_the_plain_twin(num_targets, use_low_rank, vocab_first, tile, chunk):
    hidden, head, targets, active, low_rank, g, ge = inputs(num_targets)
    head = head.T if vocab_first else head
    low_rank = low_rank if use_low_rank else None

    def scalar(function, hidden, head, low_rank, **options):
        logprobs, entropy = function(
            hidden, head, targets, active, low_rank=low_rank, vocab_first=vocab_first, **options
        )
        return jnp.sum(logprobs * g) + jnp.sum(entropy * ge), (logprobs, entropy)

    ours = jax.jit(
        jax.value_and_grad(
            lambda *a: scalar(
                target_logprobs, *a, tile=tile, chunk=chunk, with_entropy=True, entropy_gradient=True
            ),
            argnums=(0, 1, 2),
            has_aux=True,
        )
    )(hidden, head, low_rank)
    plain = jax.value_and_grad(lambda *a: scalar(target_logprobs_plain, *a), argnums=(0, 1, 2), has_aux=True)(
        hidden, head, low_rank
    )
    close(ours, plain)


@pytest.mark.parametrize("use_low_rank", [False, True])
@pytest.mark.parametrize("chunk", [None, 40])
def test_a_frozen_head_gets_no_gradient_and_hidden_the_same_one(use_low_rank, chunk):
    hidden, head, targets, active, low_rank, g, _ = inputs()
    low_rank = low_rank if use_low_rank else None

    def ours(hidden, head, low_rank):
        options = {"tile": 8, "chunk": chunk, "low_rank": low_rank, "train_head": False, "with_entropy": True}
        return jnp.sum(target_logprobs(hidden, head, targets, active, **options)[0] * g)

    def plain(hidden, head, low_rank):
        return jnp.sum(target_logprobs_plain(hidden, head, targets, active, low_rank=low_rank)[0] * g)

    d_hidden, d_head, d_low_rank = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(hidden, head, low_rank)
    p_hidden, _, p_low_rank = jax.grad(plain, argnums=(0, 1, 2))(hidden, head, low_rank)
    close((d_hidden, d_low_rank), (p_hidden, p_low_rank))
    assert not np.any(np.asarray(d_head))


@pytest.mark.parametrize("train_head", [False, True])
def test_only_learning_positions_get_a_gradient_but_all_active_ones_a_logprob(train_head):
    hidden, head, targets, active, _, g, _ = inputs()
    learning = active & (jnp.arange(N) % 3 == 0)

    def ours(hidden):
        logprobs, _ = target_logprobs(
            hidden, head, targets, active, tile=8, train_head=train_head, learning=learning
        )
        return jnp.sum(logprobs * g), logprobs

    (_, logprobs), d_hidden = jax.jit(jax.value_and_grad(ours, has_aux=True))(hidden)
    close(logprobs, target_logprobs_plain(hidden, head, targets, active)[0])
    masked = jnp.where(learning[:, None], g, 0.0)
    plain = jax.grad(lambda h: jnp.sum(target_logprobs_plain(h, head, targets, active)[0] * masked))(hidden)
    close(d_hidden, plain)


def test_gradients_equal_finite_differences():
    hidden, head, targets, active, _, g, ge = (
        np.asarray(leaf, np.float64) if i in (0, 1, 5, 6) else leaf for i, leaf in enumerate(inputs(2))
    )
    on = np.asarray(active)

    def oracle(hidden, head):
        logits = hidden @ head
        logp = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
        lp = np.take_along_axis(logp, np.asarray(targets), -1)
        entropy = -np.sum(np.exp(logp) * logp, -1)
        return np.sum((lp * g)[on]) + np.sum((entropy * ge)[on])

    def ours(hidden, head):
        options = {"tile": 16, "with_entropy": True, "entropy_gradient": True}
        lp, entropy = target_logprobs(hidden, head, targets, active, **options)
        return jnp.sum(lp * g.astype(np.float32)) + jnp.sum(entropy * ge.astype(np.float32))

    grads = jax.jit(jax.grad(ours, argnums=(0, 1)))(jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32))
    rng, h = np.random.default_rng(1), 1e-6
    for argument, array in enumerate((hidden, head)):
        for _ in range(3):
            direction = rng.normal(size=array.shape)
            arguments = [hidden, head]
            ends = []
            for sign in (1, -1):
                arguments[argument] = array + sign * h * direction
                ends.append(oracle(*arguments))
            expected = (ends[0] - ends[1]) / (2 * h)
            np.testing.assert_allclose(np.sum(np.asarray(grads[argument]) * direction), expected, rtol=1e-4)


@pytest.mark.parametrize("use_low_rank", [False, True])
@pytest.mark.parametrize("chunk", [None, 40])
def test_in_bf16_a_token_that_is_nearly_sure_keeps_its_small_gradient(use_low_rank, chunk):
    """A target's 1 - p of 0.0005 is nothing to a p rounded to bf16; the policies of RL are mostly as sure as that."""
    hidden, head, _, _, low_rank, _, _ = inputs()
    head = head.astype(jnp.bfloat16)
    hidden, low_rank = hidden.astype(jnp.bfloat16), tuple(0.01 * leaf for leaf in low_rank) if use_low_rank else None
    exact = [np.asarray(leaf, np.float64) for leaf in (hidden, head)]
    targets = jnp.asarray(np.argmax(exact[0] @ exact[1], -1), jnp.int32)[:, None]
    hidden = hidden * 8  # logits so far apart that the likeliest has nearly all
    active = jnp.ones(N, bool)

    def of(hidden, head, low_rank, function, **options):
        return jnp.sum(function(hidden, head, targets, active, low_rank=low_rank, **options)[0])

    options = {"tile": 16, "chunk": chunk, "train_head": False}
    gradient = jax.jit(
        jax.grad(lambda h: of(h, head, low_rank, target_logprobs, **options)),
        compiler_options={"xla_allow_excess_precision": False},  # round where it says so, as an accelerator does
    )
    ours = gradient(hidden)
    whole = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (hidden, head, low_rank))
    expected = jax.grad(lambda h: of(h, *whole[1:], target_logprobs_plain))(whole[0])
    error = np.linalg.norm(np.asarray(ours, np.float32) - expected, axis=-1)
    size = np.linalg.norm(expected, axis=-1)
    assert np.median(size) < 0.05
    np.testing.assert_array_less(error[size > 1e-6], 0.05 * size[size > 1e-6])


def test_inactive_positions_may_hold_nan():
    hidden, head, targets, active, low_rank, g, _ = inputs()
    poisoned = jnp.where(active[:, None], hidden, jnp.nan)

    def total(hidden):
        logprobs, entropy = target_logprobs(hidden, head, targets, active, tile=8, with_entropy=True)
        return jnp.sum(logprobs * g), (logprobs, entropy)

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    close(run(poisoned), run(hidden), rtol=0, atol=0)
    d_hidden = np.asarray(run(poisoned)[1])
    assert not np.any(d_hidden[~np.asarray(active)])


@pytest.mark.parametrize("train_head", [False, True])
def test_a_position_with_nan_and_no_cotangent_poisons_nothing(train_head):
    hidden, head, targets, active, _, g, _ = inputs()
    bad = int(np.flatnonzero(np.asarray(active))[2])
    g = g.at[bad].set(0.0)

    def total(hidden, head):
        logprobs, _ = target_logprobs(hidden, head, targets, active, tile=8, train_head=train_head)
        return jnp.sum(jnp.where(g == 0, 0.0, logprobs) * g)

    d_hidden, d_head = jax.jit(jax.grad(total, argnums=(0, 1)))(hidden.at[bad].set(jnp.nan), head)
    assert np.all(np.isfinite(d_hidden)) and np.all(np.isfinite(d_head))
    assert not np.any(np.asarray(d_hidden)[bad])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_position_and_every_position(share):
    hidden, head, targets, _, _, g, _ = inputs()
    active = jnp.full((N,), bool(share))
    run = jax.jit(lambda h: target_logprobs(h, head, targets, active, tile=8, with_entropy=True))
    close(run(hidden), target_logprobs_plain(hidden, head, targets, active))


def test_temperature_divides_the_hidden_states():
    """C21: logits [2, 1, 0]; tempered log-probs at 0.5 and 2."""
    hidden, head = jnp.ones((1, 1), jnp.float32), jnp.asarray([[2.0, 1.0, 0.0]])
    targets, active = jnp.asarray([[0, 1, 2]], jnp.int32), jnp.ones(1, bool)
    for temperature, expected in ((1.0, -0.4076), (0.5, -0.1429), (2.0, -0.6803)):
        logprobs, _ = target_logprobs(hidden / temperature, head, targets, active, tile=1)
        np.testing.assert_allclose(logprobs[0, 0], expected, atol=1e-4)


@pytest.mark.extended
def test_values_and_gradients_equal_tokamax():
    """At its chunks' own multiples: tokamax 0.0.17 pads other shapes with columns of logit 0 and counts them."""
    import tokamax

    num, vocab = 1024, 2048
    rng = np.random.default_rng(3)
    hidden = jnp.asarray(rng.normal(size=(num, 128)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(128, vocab)) * 0.3, jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocab, num), jnp.int32)

    def ours(hidden, head):
        return -jnp.sum(target_logprobs(hidden, head, targets[:, None], jnp.ones(num, bool), tile=256)[0])

    def theirs(hidden, head):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tokamax.linear_softmax_cross_entropy_loss(hidden, targets, head, implementation="chunked_xla")

    close(
        jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(hidden, head),
        jax.jit(jax.value_and_grad(theirs, argnums=(0, 1)))(hidden, head),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("train_head", [False, True])
def test_temporaries_do_not_grow_with_positions_times_vocab(train_head):
    """The compiler's own count for value_and_grad: a tile of logits and what is as large as the arguments."""

    def temporaries(num, vocab, tile):
        def total(hidden, head, targets, active):
            logprobs, _ = target_logprobs(hidden, head, targets, active, tile=tile, train_head=train_head)
            return jnp.sum(logprobs)

        arguments = (
            jax.ShapeDtypeStruct((num, 32), jnp.float32),
            jax.ShapeDtypeStruct((32, vocab), jnp.float32),
            jax.ShapeDtypeStruct((num, 1), jnp.int32),
            jax.ShapeDtypeStruct((num,), jnp.bool_),
        )
        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    tile, vocab = 64, 8192
    logits = tile * vocab * 4
    small, large = temporaries(512, vocab, tile), temporaries(8192, vocab, tile)
    full = 8192 * vocab * 4
    assert large - small < 8 * (8192 - 512) * 32 * 4  # a few copies of hidden, not of [N, V]
    assert large < full / 8
    assert temporaries(8192, vocab, 2 * tile) - large < 6 * logits  # a few tiles of logits, forward and backward


@pytest.mark.parametrize(
    ("size", "positions", "splits"), [(16_384, 8, True), (16_383, 8, False), (16_384, 40_000, False)]
)
def test_few_positions_of_a_narrow_type_are_summed_in_parts_of_the_vocabulary(size, positions, splits):
    """A product of few results runs on part of the cores; and what is added in parts is the same sum."""
    shapes = jax.ShapeDtypeStruct((positions, size), jnp.bfloat16), jax.ShapeDtypeStruct((size, 16), jnp.bfloat16)

    def summed(d, weight):
        return Chunk(((weight, True),), jnp.int32(0), size, None).to_inputs(d)[0]

    assert ("reduce_sum" in str(jax.make_jaxpr(summed)(*shapes))) == splits
    if positions < 100:
        rng = np.random.default_rng(0)
        d, weight = (jnp.asarray(rng.normal(size=shape.shape), jnp.bfloat16) for shape in shapes)
        exact = np.asarray(d, np.float64) @ np.asarray(weight, np.float64)
        np.testing.assert_allclose(summed(d, weight), exact, rtol=1e-4, atol=1e-3)
