"""The C++ kernels against numpy in fp64, whichever form the machine's compiler makes of them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import BF16_STEP, draw, exact, kernels  # noqa: F401  (a fixture)

from locojax.models import attention, decoder
from locojax.models.dense import native_rms_norm, rms_norm
from locojax.models.logprobs import target_logprobs_plain
from locojax.models.lora import Adapters, OfLayer, adapted_product, packed, present_in
from locojax.models.native import ops
from locojax.models.packed_logprobs import packed_target_logprobs
from locojax.models.spec import RopeSpec
from locojax.rollout import head, layout_rows
from locojax.rollout.programs import pick_adapters
from locojax.rollout.sampling import WholeLogits

# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(1, 64, 64), (2, 576, 960), (7, 2, 1), (13, 66, 70), (128, 96, 130), (193, 64, 64), (385, 32, 200)],
)
def test_a_packed_product_is_the_product(M, K, N):
    x, w = draw(M, K), draw(K, N)
    packed = ops.pack(w)
    assert packed.shape == (K, N) and packed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ops.unpack(packed), w)
    expected = exact(x) @ exact(w)
    scale = np.abs(exact(x)) @ np.abs(exact(w))
    wide, narrow = (exact(jax.jit(ops.matmul, static_argnums=2)(x, packed, dtype)) for dtype in ("float32", "bfloat16"))
    assert np.max(np.abs(wide - expected) / scale) < 1e-6
    assert np.max(np.abs(narrow - expected) / (np.abs(expected) + 1e-3 * scale)) < BF16_STEP


def test_a_row_has_the_same_bits_whatever_its_neighbours():
    x, packed = draw(200, 64), ops.pack(draw(64, 192))
    whole = np.asarray(ops.matmul(x, packed, jnp.float32))
    for rows in (slice(0, 1), slice(3, 8), slice(100, 200)):
        np.testing.assert_array_equal(ops.matmul(x[rows], packed, jnp.float32), whole[rows])


def test_stacked_matrices_are_packed_one_by_one():
    w = draw(3, 64, 70)
    packed = ops.pack(w)
    assert packed.shape == (3, 64, 70)
    np.testing.assert_array_equal(ops.unpack(packed), w)
    np.testing.assert_array_equal(packed.panels[1], ops.pack(w[1]).panels)
    assert not ops.packs((5, 8)) and ops.packs((6, 8)) and not ops.packs((6,))


def test_what_a_product_refuses():
    with pytest.raises(TypeError, match="A packed product is of bfloat16. Got: float32"):
        ops.matmul(jnp.ones((2, 64)), ops.pack(draw(64, 64)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="expected x .M, K., w .N / 64, K / 2, 64, 2."):
        ops.matmul(draw(2, 32), ops.pack(draw(64, 64)))


@pytest.mark.parametrize("shape", [(1, 16), (5, 3, 64), (40, 576)])
def test_a_norm(shape):
    x, weight = draw(*shape, scale=3.0), draw(shape[-1])
    expected = exact(x) / np.sqrt(np.mean(exact(x) ** 2, -1, keepdims=True) + 0.5) * exact(weight)
    found = jax.jit(ops.rms_norm, static_argnums=2)(x, weight, 0.5)
    np.testing.assert_allclose(exact(found), expected, rtol=BF16_STEP)

    def gradient(form):
        return jax.vjp(lambda x, weight: form(x, weight, 0.5), x, weight)[1](draw(*shape, seed=9))

    for ours, plain in zip(gradient(native_rms_norm), gradient(rms_norm), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_a_norm_of_what_isn_t_finite_stays_in_its_row():
    x = draw(3, 32).at[1, 5].set(jnp.nan)
    found = exact(ops.rms_norm(x, draw(32), 1e-5))
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


# --- attention --------------------------------------------------------------------------------------------------------


def rows_of(B, K, G, h, sizes, seed=0):
    q = draw(B, K * G, h, seed=seed)
    def arrays(seed):
        return tuple(draw(B, K, size, h, seed=seed + i) for i, size in enumerate(sizes))

    return q, arrays(seed + 1), arrays(seed + 11)


def attended(q, keys, values, num_tokens):
    """The same in fp64."""
    q, k, v = exact(q), np.concatenate([*map(exact, keys)], 2), np.concatenate([*map(exact, values)], 2)
    B, H, h = q.shape
    group = H // k.shape[1]
    out = np.zeros_like(q)
    for b in range(B):
        for head_ in range(H):
            n, own = int(num_tokens[b]), head_ // group
            scores = k[b, own, :n] @ q[b, head_] / np.sqrt(h)
            weights = np.exp(scores - scores.max())
            out[b, head_] = weights @ v[b, own, :n] / weights.sum()
    return out


def new_token(q, K, seed=50):
    """(k, v, rope) for `ops.attend_rows`, each row at an angle of its own."""
    B, _, h = q.shape
    rope = decoder.rope_tables(RopeSpec(theta=10000.0), h, 7 * jnp.arange(B, dtype=jnp.int32)[:, None])
    return draw(B, K, h, seed=seed), draw(B, K, h, seed=seed + 1), tuple(each[:, 0] for each in rope)


def stored(q, k, v, rope, position, keys, values):
    """q rotated, and keys and values with the new token's, by the plain form."""
    q, k = decoder.rotated(q, k, rope)
    return q, tuple(
        tuple(layout_rows._put(x, begin, position, new) for begin, x in layout_rows._begins(arrays))
        for arrays, new in ((keys, k), (values, v))
    )


@pytest.mark.parametrize(
    ("K", "G", "h", "sizes"),
    [(3, 3, 64, (16, 16, 40)), (2, 1, 32, (8, 8)), (1, 7, 128, (16,)), (2, 5, 96, (40,)), (1, 2, 256, (33, 7)),
     (1, 9, 64, (4, 4, 24, 96))],
)  # fmt: skip
def test_attention_over_rows(K, G, h, sizes):
    q, keys, values = rows_of(5, K, G, h, sizes)
    tokens = jnp.asarray([1, sum(sizes), sizes[0], min(17, sum(sizes)), sum(sizes) - 1], jnp.int32)
    new, position = new_token(q, K), tokens - 1
    ours, kept = jax.jit(ops.attend_rows)(q, *new, position, keys, values)
    turned, kept_plainly = stored(q, *new, position, keys, values)
    for mine, plain in zip(jax.tree.leaves(kept), jax.tree.leaves(kept_plainly), strict=True):
        np.testing.assert_allclose(exact(mine), exact(plain), rtol=BF16_STEP, atol=1e-6)
    expected = attended(turned, *kept, tokens)
    np.testing.assert_allclose(exact(ours), expected, rtol=2 * BF16_STEP, atol=2e-3)
    plainly = attention.decode_rows(turned, *kept_plainly, tokens)
    np.testing.assert_allclose(exact(ours), exact(plainly), atol=4 * BF16_STEP)


def test_attention_reads_no_token_that_doesn_t_count_and_no_other_row():
    q, keys, values = rows_of(3, 2, 2, 32, (16, 16))
    new, position = new_token(q, 2), jnp.asarray([4, 19, 31], jnp.int32)
    clean, _ = ops.attend_rows(q, *new, position, keys, values)
    beyond = jnp.arange(16)[None] >= jnp.asarray([5, 16, 16])[:, None]
    first = jnp.where(beyond[:, None, :, None], jnp.nan, keys[0])
    poisoned = first, keys[1].at[0].set(jnp.nan).at[1, :, 4:].set(jnp.nan)
    poisoned_values = values[0].at[0, :, 5:].set(jnp.inf), values[1].at[2].set(jnp.nan)
    dirty, _ = ops.attend_rows(q, *new, position, poisoned, poisoned_values)
    np.testing.assert_array_equal(exact(dirty)[:2], exact(clean)[:2])
    assert np.isnan(exact(dirty)[2]).any()


def test_a_new_token_that_isn_t_finite_is_stored_as_zero_and_one_beyond_the_row_nowhere():
    q, keys, values = rows_of(3, 1, 2, 32, (8, 8))
    k, v, rope = new_token(q, 1)
    k, v = k.at[0, 0, 5].set(jnp.nan), v.at[0, 0, 6].set(-jnp.inf)
    _, (new_keys, new_values) = ops.attend_rows(q, k, v, rope, jnp.asarray([9, 16, 400], jnp.int32), keys, values)
    np.testing.assert_array_equal(exact(new_keys[1])[0, 0, 1, [5, 21]], 0)  # a pair that is turned together
    np.testing.assert_array_equal(exact(new_values[1])[0, 0, 1], exact(jnp.where(jnp.isfinite(v), v, 0))[0, 0])
    assert np.isfinite(exact(new_keys[1])).all()
    for before, after in zip([*keys, *values], [*new_keys, *new_values], strict=True):
        np.testing.assert_array_equal(exact(after)[1:], exact(before)[1:])
        assert (exact(after)[0] != exact(before)[0]).any() == (before is keys[1] or before is values[1])


def test_a_loop_that_appends_works_in_place():
    """A copy of a layer's keys on each token would cost more than attention itself."""
    q, keys, values = rows_of(2, 1, 2, 32, (8, 8))
    k, v, rope = new_token(q, 1)

    def tokens(keys, values):
        def one(i, carry):
            q, stored = carry
            return ops.attend_rows(q, k, v, rope, jnp.full(2, i), *stored)

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(16), one, (q, (tuple(keys), tuple(values))))

    program = jax.jit(tokens, donate_argnums=(0, 1)).lower(keys, values).compile()
    assert "locojax_attend_rows" in (text := program.as_text())
    assert not re.findall(r"= bf16\[2,1,8,32\]\S* copy\(", text)


def test_heads_that_there_is_a_form_for():
    assert ops.attends(9, 3, 64) and not ops.attends(9, 3, 80) and not ops.attends(9, 2, 64)


def untils(T, *ends):
    """Rows of segments that end there; the last tokens are padding."""
    out = np.arange(1, T + 1)
    start = 0
    for end in ends:
        out[start:end] = end
        start = end
    return out


SHARED = untils(150)
SHARED[:20] = 130  # a prefix of two continuations
SHARED[20:70] = 70
SHARED[70:130] = 130


@pytest.mark.parametrize(
    ("rows", "K", "G", "h"),
    [([untils(70, 70)], 1, 1, 64), ([untils(200, 50, 51, 180), untils(200, 200)], 2, 3, 32), ([SHARED], 1, 2, 64),
     ([untils(97, 97)], 3, 1, 96), ([untils(33, 20)], 1, 2, 128), ([untils(130, 64, 129)], 2, 2, 8)],
)  # fmt: skip
def test_attention_within_packed_rows_and_its_gradient(rows, K, G, h):
    until = jnp.asarray(np.stack(rows), jnp.int32)
    R, T = until.shape
    q, k, v, g = draw(R, T, K * G, h), draw(R, T, K, h, seed=1), draw(R, T, K, h, seed=2), draw(R, T, K * G, h, seed=3)
    wide = [each.astype(jnp.float32) for each in (q, k, v)]
    expected, pull = jax.vjp(lambda q, k, v: attention.packed(q, k, v, until), *wide)
    ours, pull_ours = jax.vjp(jax.jit(lambda q, k, v: attention.packed(q, k, v, until, kernel="native")), q, k, v)
    np.testing.assert_allclose(exact(ours), expected, rtol=BF16_STEP, atol=2 * BF16_STEP)
    for name, one, other in zip("qkv", pull_ours(g), pull(g.astype(jnp.float32)), strict=True):
        error = np.linalg.norm(exact(one) - np.asarray(other)) / np.linalg.norm(other)
        assert error < 2 * BF16_STEP, (name, error)
        size = np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(exact(one), other, rtol=2 * BF16_STEP, atol=4 * BF16_STEP * size, err_msg=name)


def test_attention_within_rows_keeps_what_is_no_number_where_it_is_seen():
    until = jnp.asarray(untils(200, 100, 200)[None], jnp.int32)
    q, k, v = draw(1, 200, 2, 32), draw(1, 200, 1, 32, seed=1), draw(1, 200, 1, 32, seed=2)
    clean = np.asarray(attention.packed(q, k, v, until, kernel="native").astype(jnp.float32))
    dirty = np.asarray(attention.packed(q, k.at[0, 150].set(jnp.nan), v, until, kernel="native").astype(jnp.float32))
    assert np.isnan(dirty[0, 150:]).all()
    np.testing.assert_array_equal(dirty[0, :100], clean[0, :100])


# --- adapters ---------------------------------------------------------------------------------------------------------

SCALE = jnp.asarray([0.0, 1.0, 0.5, 2.0], jnp.float32)


def of_layer(layer, a, b):
    """A module's part of packed adapters, as a layer of `run_layers_unrolled` gets it."""
    stack = packed(Adapters({"q": {"a": a, "b": b}}, SCALE)).tree["q"]
    return jax.tree.map(lambda leaf: OfLayer(leaf, jnp.int32(layer)), stack)


def mixed(M, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 4, M), jnp.int32)


@pytest.mark.parametrize(
    ("M", "K", "sizes", "r"),
    [(1, 64, (64,), 8), (7, 96, (128, 64, 64), 4), (130, 64, (64, 192), 32), (50, 64, (64,), 40)],
)
@pytest.mark.parametrize("index", [mixed, lambda M: jnp.zeros(M, jnp.int32), lambda M: jnp.full(M, 3, jnp.int32)])
def test_an_adapted_product_adds_each_row_s_own_adapter(M, K, sizes, r, index):
    x, w, index = draw(M, 1, K), draw(K, sum(sizes)), index(M)
    factors = [(draw(2, 4, K, r, seed=i, scale=0.2), draw(2, 4, r, F, seed=i, scale=0.2)) for i, F in enumerate(sizes)]
    parts = [of_layer(1, a, b) for a, b in factors]
    adapters = Adapters({}, SCALE, index, present_in(index, 4))
    ours = exact(jax.jit(adapted_product)(x, ops.pack(w), parts, adapters))[:, 0]
    deltas = []
    for a, b in factors:
        inner = np.einsum("mk,mkr->mr", exact(x)[:, 0], exact(a[1])[index]) * np.asarray(SCALE)[index][:, None]
        deltas.append(np.einsum("mr,mrf->mf", inner, exact(b[1])[index]))
    added = np.concatenate(deltas, 1)
    expected = exact(x)[:, 0] @ exact(w) + added
    # The inner activation is rounded to bf16 too, as everywhere.
    np.testing.assert_allclose(ours, expected, rtol=BF16_STEP, atol=BF16_STEP * np.abs(added).max() + 0.01)


def test_another_adapter_s_numbers_reach_no_row():
    x, w, index = draw(20, 1, 64), ops.pack(draw(64, 64)), jnp.asarray([1, 2] * 10, jnp.int32)
    a, b = draw(1, 4, 64, 8), draw(1, 4, 8, 64)

    def run(a, b):
        parts = [of_layer(0, a, b)]
        return np.asarray(adapted_product(x, w, parts, Adapters({}, SCALE, index, present_in(index, 4))))[:, 0]

    clean, dirty = run(a, b), run(a.at[0, 2].set(jnp.nan), b.at[0, 2].set(jnp.inf))
    np.testing.assert_array_equal(dirty[::2], clean[::2])
    assert np.isnan(dirty[1::2].astype(np.float32)).all()
    alone = adapted_product(x[4:5], w, [of_layer(0, a, b)], Adapters({}, SCALE, index[4:5], present_in(index[4:5], 4)))
    np.testing.assert_array_equal(np.asarray(alone)[0, 0], clean[4])


def test_products_that_are_left_to_the_plain_form():
    x, index = draw(4, 1, 64), mixed(4)
    adapters = Adapters({}, SCALE, index, present_in(index, 4))

    def part(r=8, F=64, dtype=jnp.bfloat16):
        return of_layer(0, jnp.zeros((1, 4, 64, r), dtype), jnp.zeros((1, 4, r, F), dtype))

    w = ops.pack(draw(64, 64))
    assert adapted_product(x, w, [part()], adapters) is not None
    assert adapted_product(x, draw(64, 64), [part()], adapters) is None
    assert adapted_product(x, w, [part()], dataclasses.replace(adapters, present=None)) is None
    for odd in (part(r=7), part(F=32), part(dtype=jnp.float32), None):
        assert adapted_product(x, w, [odd], adapters) is None


# --- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B", [1, 9, 70])
@pytest.mark.parametrize("index", ["mixed", "none", "no adapters"])
def test_the_head_s_kernels_say_what_stored_logits_would(B, index):
    V, D, r = 1024, 64, 6
    table, hidden = draw(V, D), draw(B, D)
    weights = {"layers": [], "embed": table, decoder.UNEMBED: ops.pack(table.T)}
    adapters = None
    if index != "no adapters":
        stack = Adapters({"head": {"a": draw(4, D, r, scale=0.2), "b": draw(4, r, V, scale=0.2)}}, SCALE)
        adapters = pick_adapters(packed(stack), mixed(B) if index == "mixed" else jnp.zeros(B, jnp.int32), packed=True)
    logits = head.logits(weights, hidden, adapters)
    assert isinstance(logits, head.PackedLogits)
    expected = exact(hidden) @ exact(table).T
    if index == "mixed":
        part, own = stack.tree["head"], np.asarray(mixed(B))
        inner = np.einsum("bd,bdr->br", exact(hidden), exact(part["a"])[own]) * np.asarray(SCALE)[own][:, None]
        expected += np.einsum("br,brv->bv", inner, exact(part["b"])[own])
    values = logits.values()
    np.testing.assert_allclose(values, expected, atol=1e-4 if index != "mixed" else 0.1)
    whole, scale = WholeLogits(values), jnp.where(jnp.arange(B) % 2, 1.0, 0.7)
    for ours, stored in zip(*(jax.tree.leaves(x.masses(scale, scale == 1)) for x in (logits, whole)), strict=True):
        np.testing.assert_allclose(ours, stored, rtol=2e-6)
    block = jnp.arange(B, dtype=jnp.int32) % 4
    np.testing.assert_array_equal(logits.block(block), whole.block(block))


def test_a_number_that_isn_t_one_is_not_lost_in_a_maximum():
    table = draw(512, 64)
    weights = {"layers": [], "embed": table, decoder.UNEMBED: ops.pack(table.T)}
    hidden = draw(3, 64).at[1, 5].set(jnp.nan)
    found, own = head.logits(weights, hidden, None).masses(jnp.ones(3), jnp.ones(3, bool))
    assert np.isnan(found.mass[1]).all() and np.isnan(own[1]).all()
    assert np.isfinite(found.mass[::2]).all()


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "D", "V", "r"),
    [
        (5, 64, 512, 4), (97, 32, 1088, 8), (200, 64, 320, 2), (193, 96, 256, 40), (5, 64, 512, 0), (201, 96, 1088, 0),
        (9, 32, 4160, 0), (9, 48, 4160, 18),  # those with several blocks in a part
    ],
)  # fmt: skip
def test_log_probs_of_targets_and_their_gradient(N, D, V, r):
    hidden, weight, inner, b = draw(N, D), draw(D, V, scale=0.3), draw(N, r), draw(r, V, scale=0.3)
    rng = np.random.default_rng(N)
    targets = jnp.asarray(rng.integers(0, V, (N, 1)), jnp.int32)
    active, learning = (jnp.asarray(rng.random(N) < share) for share in (0.8, 0.9))
    g = jnp.asarray(rng.normal(size=(N, 1)) * (rng.random((N, 1)) < 0.7), jnp.float32)
    unread = ~active[:, None] & (jnp.arange(D)[None] == 3)  # what isn't active isn't read
    head_ = ops.Unembedding.of(weight)

    def ours(hidden, inner, b):
        return packed_target_logprobs(hidden, head_, (inner, b) if r else None, targets, active, learning)

    def plain(hidden, inner, b):
        low_rank = (inner, b) if r else None
        return target_logprobs_plain(hidden, weight.astype(jnp.float32), targets, active, low_rank=low_rank)[0]

    wide = [each.astype(jnp.float32) for each in (hidden, inner, b)]
    expected, pull = jax.vjp(plain, *wide)
    found, pull_ours = jax.vjp(jax.jit(ours), jnp.where(unread, jnp.nan, hidden), inner, wide[2])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(jax.jit(ours)(hidden, inner, b), found, atol=1e-6)  # without a gradient
    wanted = pull(jnp.where(learning[:, None], g, 0))
    for name, one, other in list(zip(("hidden", "inner", "b"), pull_ours(g), wanted, strict=True))[: 3 if r else 1]:
        assert np.isfinite(exact(one)).all(), name
        # d(logits) is rounded to bf16, and so is what reaches bf16 inputs.
        size = np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(exact(one), other, rtol=BF16_STEP, atol=2 * BF16_STEP * size, err_msg=name)
        error = np.linalg.norm(exact(one) - np.asarray(other)) / np.linalg.norm(other)
        assert error < BF16_STEP, (name, error)


@pytest.mark.parametrize("low_rank", [None, (jnp.zeros((1, 2), jnp.bfloat16), jnp.zeros((2, 128)))])
def test_a_token_that_is_all_but_sure_keeps_its_gradient(low_rank):
    """1 - p is made before it is rounded: in bf16, a p near 1 is 1."""
    weight = jnp.zeros((64, 128), jnp.bfloat16).at[0, 7].set(12.0)
    hidden, on = jnp.zeros((1, 64), jnp.bfloat16).at[0, 0].set(1.0), jnp.ones(1, bool)

    def logprob(hidden):
        targets = jnp.full((1, 1), 7, jnp.int32)
        return packed_target_logprobs(hidden, ops.Unembedding.of(weight), low_rank, targets, on, on)[0, 0]

    p = 1 / (1 + 127 * np.exp(-12.0))
    np.testing.assert_allclose(jax.grad(logprob)(hidden).astype(jnp.float32)[0, 0], 12 * (1 - p), rtol=BF16_STEP)


@pytest.mark.parametrize("low_rank", [None, (draw(4, 2), jnp.zeros((2, 256)))])
def test_a_position_of_nan_is_seen_and_stays_alone(low_rank):
    hidden, on = draw(4, 64).at[2, 1].set(jnp.nan), jnp.ones(4, bool)
    head_ = ops.Unembedding.of(draw(64, 256))

    def logprobs(hidden):
        return packed_target_logprobs(hidden, head_, low_rank, jnp.zeros((4, 1), jnp.int32), on, on)

    found, pull = jax.vjp(logprobs, hidden)
    assert np.isnan(found[2]).all() and np.isfinite(np.delete(found, 2)).all()
    (d,) = pull(jnp.ones((4, 1)).at[2].set(0.0))  # quarantined
    assert np.isfinite(d.astype(jnp.float32)).all() and not d[2].any()
