"""The C++ kernels of training's linear layers and gated activations, against numpy and jax in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import BF16_STEP, draw, exact, kernels  # noqa: F401  (a fixture)

from locojax.models import dense
from locojax.models.lora import Adapters, adapted_product
from locojax.models.native import ops


class Linear:
    """Random inputs: x [R, T, K], w [K, N], factors of modules of `sizes` columns, fp32; g [R, T, N]."""

    def __init__(self, R, T, K, sizes, r):
        N = sum(sizes)
        self.x, self.g, self.w = draw(R, T, K), draw(R, T, N, seed=1), draw(K, N, scale=K**-0.5)
        self.factors = [
            (draw(R, K, r, seed=i, scale=K**-0.5).astype("f4"), draw(R, r, F, seed=i, scale=r**-0.5).astype("f4"))
            for i, F in enumerate(sizes)
        ]
        self.scale = jnp.asarray(np.random.default_rng(R).uniform(0.5, 2, R), jnp.float32)
        self.packed, self.transposed = ops.pack(self.w), ops.pack(self.w.T)

    def ours(self, lengths):
        """(out, pull back g to x and the factors), jitted."""
        lengths = jnp.asarray(lengths, jnp.int32)

        def run(x, factors):
            return dense.adapted_rows(x, self.packed, self.transposed, factors, self.scale, lengths)

        return jax.jit(lambda x, factors, g: (run(x, factors), jax.vjp(run, x, factors)[1](g)))(
            self.x, self.factors, self.g
        )

    def expected(self, lengths):
        counts = jnp.arange(self.x.shape[1])[None, :, None] < jnp.asarray(lengths)[:, None, None]

        def run(x, factors):
            more = [self.scale[:, None, None] * (x @ a) @ b for a, b in factors]
            return jnp.where(counts, x @ self.w.astype("f4") + jnp.concatenate(more, -1), 0)

        factors = [(jnp.asarray(exact(a.astype("bfloat16")), "f4"), jnp.asarray(exact(b.astype("bfloat16")), "f4"))
                   for a, b in self.factors]  # fmt: skip
        out, pull = jax.vjp(run, self.x.astype("f4"), factors)
        return out, pull(self.g.astype("f4"))


def assert_close(found, expected, steps):
    """To so many roundings to bf16 of the largest numbers, and to half of one over all."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(found, expected, rtol=BF16_STEP, atol=steps * BF16_STEP * np.abs(expected).max())
    assert np.linalg.norm(found - expected) < BF16_STEP * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("R", "T", "K", "sizes", "r"),
    [
        (2, 7, 10, (64,), 2), (1, 260, 96, (128, 128), 32), (3, 50, 96, (128, 64, 64), 8), (2, 33, 64, (64,), 40),
        (1, 65, 128, (64, 128), 64), (2, 101, 64, (64, 64), 70),
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_linear_layers_with_each_row_s_adapters_and_their_gradient(R, T, K, sizes, r, share):
    case = Linear(R, T, K, sizes, r)
    lengths = [T if share == 1 else int(T * share) + row for row in range(R)]
    out, (d_x, d_factors) = case.ours(lengths)
    expected, (wanted_x, wanted_factors) = case.expected(lengths)
    assert_close(exact(out), expected, 1)
    assert_close(exact(d_x), wanted_x, 1)
    for found, wanted in zip(jax.tree.leaves(d_factors), jax.tree.leaves(wanted_factors), strict=True):
        assert found.dtype == jnp.float32
        assert_close(found, wanted, 1)
    for row, length in enumerate(lengths):
        assert not exact(out)[row, length:].any() and not exact(d_x)[row, length:].any()


def test_a_row_without_tokens_gets_nothing():
    case = Linear(2, 9, 64, (64,), 4)
    out, (d_x, [(d_a, d_b)]) = case.ours([9, 0])
    for each in (out, d_x, d_a, d_b):
        assert exact(each)[0].any() and not exact(each)[1].any()


def test_rows_don_t_meet():
    """A row of nothing but NaN changes no bit of another, in any direction; nor does what lies beyond its tokens."""
    case = Linear(3, 40, 64, (64, 64), 8)
    clean = case.ours([40, 40, 31])
    case.x, case.g = (each.at[1].set(jnp.nan).at[2, 31:].set(jnp.inf) for each in (case.x, case.g))
    case.factors = [(a.at[1].set(jnp.nan), b.at[1].set(jnp.inf)) for a, b in case.factors]
    dirty = case.ours([40, 40, 31])
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(exact(one)[::2], exact(other)[::2])
        assert np.isnan(exact(other)[1]).any()


def test_which_adapters_the_kernel_takes():
    def product(R=2, r=4, F=64, index=None, names=1):
        factors = {"a": jnp.zeros((R, 64, r)), "b": jnp.zeros((R, r, F))}
        adapters = Adapters({}, jnp.ones(R), index)
        w = ops.pack(draw(64, 64))
        return adapted_product(draw(2, 5, 64), w, [factors] * names, adapters, w)

    assert product().shape == (2, 5, 64)
    assert product(r=3) is None and product(F=32) is None  # numbers go in pairs, columns in panels
    assert product(index=jnp.zeros(2, jnp.int32)) is None  # adapters that rows pick
    assert adapted_product(draw(2, 5, 64), draw(64, 64), [], Adapters({}, jnp.ones(2))) is None  # not packed
    with pytest.raises(Exception, match="a product's shapes don't fit: expected x .R, T, K., w "):
        product(names=2)
    with pytest.raises(Exception, match="a product's shapes don't fit"):
        product(R=3)


@pytest.mark.parametrize(("shape", "F"), [((9,), 32), ((3, 70), 128), ((1,), 16)])
def test_gated_activations_and_their_gradient(shape, F):
    both, g = draw(*shape, 2 * F, scale=4), draw(*shape, F)

    def plain(both):
        gate, up = jnp.split(both, 2, -1)
        return jax.nn.silu(gate) * up

    expected, pull = jax.vjp(plain, both.astype("f4"))
    found, pull_ours = jax.vjp(jax.jit(dense.gated), both)
    np.testing.assert_allclose(exact(found), expected, rtol=BF16_STEP)
    np.testing.assert_allclose(exact(pull_ours(g)[0]), pull(g.astype("f4"))[0], rtol=BF16_STEP, atol=1e-6)


def test_gates_that_are_wide_open_or_shut():
    gate = jnp.asarray([200.0, -200.0, 0.0, 30.0, -30.0, jnp.nan, 1.0, -1.0] * 2, jnp.bfloat16)
    both = jnp.concatenate([gate, jnp.full(16, 2.0, jnp.bfloat16)])[None]
    found, pull = jax.vjp(dense.gated, both)
    expected = 2 * exact(gate) / (1 + np.exp(-exact(gate)))
    np.testing.assert_allclose(exact(found)[0], expected, rtol=BF16_STEP, atol=1e-30)
    (d,) = pull(jnp.ones((1, 16), jnp.bfloat16))
    assert np.isnan(exact(d)[0, [5, 13, 21, 29]]).all() and np.isfinite(np.delete(exact(d)[0], [5, 13, 21, 29])).all()
