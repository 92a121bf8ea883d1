"""Drawing a token: conventions by hand-computed cases, distributions by chi-square, cost by reading the jaxpr."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.rollout import sampling
from locojax.rollout.sampling import SamplerRows, sample
from locojax.types import SamplingParams


def rows(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    def full(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (num_rows,)))

    return SamplerRows(
        key=jnp.asarray(np.stack([sampling.key_of(seed, i) for i in range(num_rows)])),
        position=full(position, np.int32),
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
    )


def draw(logits, count, **settings):
    """`count` tokens from one distribution."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    return np.asarray(sample(logits, rows(count, **settings))[0])


def chi_square(tokens, probabilities):
    """(statistic - dof) / sqrt(2 dof): about standard normal when the tokens come from `probabilities`."""
    expected = probabilities * len(tokens)
    keep = expected > 5
    seen = np.bincount(tokens, minlength=len(probabilities))
    assert not seen[probabilities == 0].any()
    statistic = ((seen - expected)[keep] ** 2 / expected[keep]).sum()
    return (statistic - keep.sum()) / math.sqrt(2 * keep.sum())


def softmax(logits):
    e = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return e / e.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_raw_or_tempered_as_asked(temperature):
    """C21."""
    raw = [-0.4076, -1.4076, -2.4076]
    tempered = {0.5: [-0.1429, -2.1429, -4.1429], 1.0: raw, 2.0: [-0.6803, -1.1803, -1.6803]}[temperature]
    logits = jnp.broadcast_to(jnp.asarray([2.0, 1.0, 0.0]), (64, 3))
    for convention, expected in (("raw", raw), ("tempered", tempered)):
        token, logprob = sample(logits, rows(64, temperature=temperature), convention)
        assert set(np.asarray(token)) >= {0, 1}
        np.testing.assert_allclose(logprob, np.asarray(expected)[token], atol=1e-4)


def test_greedy_takes_the_lowest_of_equals_and_reports_a_finite_raw_log_prob():
    """C22."""
    logits = np.zeros((3, 600), np.float32)
    logits[0, [7, 400]] = 5.0
    logits[1, [599, 598]] = 5.0
    token, logprob = sample(jnp.asarray(logits), rows(3, temperature=0.0))
    assert token.tolist() == [7, 598, 0]
    expected = [np.log(softmax(row)[t]) for row, t in zip(logits, token, strict=True)]
    np.testing.assert_allclose(logprob, expected, atol=1e-5)
    assert sample(jnp.asarray(logits), rows(3, temperature=0.0), "tempered")[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 3), (0.75, 2), (0.45, 1), (1e-6, 1)])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p, kept):
    """C23."""
    tokens = draw(np.log([0.3, 0.5, 0.2]), 400, top_p=top_p)
    assert set(tokens) == set([1, 0, 2][:kept])


def test_truncation_follows_a_numpy_oracle():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=300).astype(np.float32) * 2
    for settings in (
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
        {"top_k": 280, "top_p": 0.999, "temperature": 3.0},  # beyond the candidates: the whole row is sorted
        {"top_k": sampling.MAX_CANDIDATES},
    ):
        allowed = truncated(logits, **settings)
        assert abs(chi_square(draw(logits, 10000, seed=3, **settings), allowed)) < 4, settings


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    p = softmax(np.asarray(logits, np.float64) / temperature)
    order = np.argsort(-p, kind="stable")
    keep = order[: top_k or len(p)]
    mass = p[keep] / p[keep].sum()
    if top_p < 1:
        keep = keep[: int(np.searchsorted(np.cumsum(mass), top_p)) + 1]
    keep = keep[p[keep] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[keep] = p[keep] / p[keep].sum()
    return out


def test_the_candidates_decide_the_same_as_a_full_sort(monkeypatch):
    """A row whose top-p isn't reached within the candidates must come from the sorted row, and exactly."""
    logits = np.random.default_rng(1).normal(size=600).astype(np.float32)
    batch = jnp.broadcast_to(jnp.asarray(logits), (500, 600))
    flat = rows(500, top_p=0.95)
    first = np.asarray(sample(batch, flat)[0])
    jax.clear_caches()
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 600)
    np.testing.assert_array_equal(first, sample(batch, flat)[0])
    jax.clear_caches()  # the program traced under the patched size must not outlive it
    assert len(set(first)) > 150


@pytest.mark.parametrize("vocab", [7, 300, 1031, 4096])
def test_draws_follow_the_softmax(vocab):
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    logits[: vocab // 5] = -np.inf
    for temperature in (1.0, 0.7):
        tokens = draw(logits, 8000, temperature=temperature, seed=vocab)
        assert abs(chi_square(tokens, softmax(logits / temperature))) < 4


def test_a_promise_that_nothing_truncates_changes_nothing():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(64, 512)).astype(np.float32))
    mixed = rows(64, temperature=np.resize([0.0, 0.5, 1.0, 2.0], 64))
    for with_branch, without in zip(sample(logits, mixed), sample(logits, mixed, truncates=False), strict=True):
        np.testing.assert_allclose(with_branch, without, atol=1e-6)
    assert [sampling.truncates(SamplingParams(**p)) for p in ({}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1})] == [
        False, True, True, True,
    ]  # fmt: skip


def test_a_row_does_not_depend_on_its_batch():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(6, 512)).astype(np.float32))
    mixed = rows(6, temperature=[1.0, 0.0, 0.5, 1.0, 1.0, 2.0], top_k=[0, 0, 3, 0, 0, 0], top_p=[1, 1, 1, 0.9, 1, 1])
    together = sample(logits, mixed)
    for i in range(6):
        alone = sample(logits[i : i + 1], jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], mixed))
        np.testing.assert_array_equal(together[0][i], alone[0][0])
        np.testing.assert_allclose(together[1][i], alone[1][0], atol=1e-6)


def test_keys_differ_by_seed_sample_and_position():
    seen = {tuple(np.asarray(sampling.uniforms(rows(1, seed=s, position=p)))[0]) for s in range(4) for p in range(4)}
    assert len(seen) == 16
    assert len({tuple(sampling.key_of(seed, i)) for seed in (0, 1, 2**70) for i in range(50)}) == 150


def test_tokens_without_mass_are_never_drawn():
    u = jnp.asarray([0.0, 0.5, 1 - 2**-24, 1 - 2**-24])
    masses = jnp.asarray([[0.0, 0.0, 1.0, 0.0]] * 3 + [[1e-30, 0.0, 1.0, 0.0]])
    assert sampling.invert(masses, u).tolist() == [2, 2, 2, 2]


def test_no_random_number_per_vocabulary_entry():
    vocab = 49152
    jaxpr = jax.make_jaxpr(lambda x, r: sample(x, r))(jnp.zeros((8, vocab)), rows(8))
    assert largest_random_shape(jaxpr.jaxpr) == 8 * 2


def largest_random_shape(jaxpr):
    """Entries of the largest output of any primitive that makes random bits, sub-jaxprs included."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        if "random_bits" in eqn.primitive.name or "threefry" in eqn.primitive.name:
            sizes += [int(np.prod(v.aval.shape)) for v in eqn.outvars]
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                sizes.append(largest_random_shape(inner))
    return max(sizes)


def test_block_size_divides_real_vocabularies():
    for vocab in (49152, 128256, 151936, 152064, 262144):
        assert vocab % sampling.block_size(vocab) == 0
        assert 64 <= sampling.block_size(vocab) <= 1024
