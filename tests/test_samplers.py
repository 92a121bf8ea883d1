"""Samplers over one engine: snapshots, rows that come and go, and what a sample may ask for, against an oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_models import SPEC, VOCAB, Bytes, log_softmax, oracle_logits, oracle_logprobs, prompts, weights

from locojax.errors import RequestError
from locojax.hosts.protocol import Sample
from locojax.hosts.samplers import Samplers
from locojax.models.lora import Adapters, LoraSpec, empty_stack, init_adapter
from locojax.rollout.engine import Engine
from locojax.rollout.settings import EngineSettings
from locojax.types import MASKED_LOGPROB, SamplingParams

BYTES_PER_TOKEN = 2 * SPEC.num_layers * SPEC.kv_size * 4
SETTINGS = EngineSettings(
    max_slots=16, max_prefill_tokens=64, max_iterations=4, layout="rows", page_size=8,
    kv_bytes=32768 * BYTES_PER_TOKEN,
)  # fmt: skip
RANK = 4


def lora(rank=RANK, **switches):
    return LoraSpec(rank=rank, alpha=8.0, **{"unembed": True, **switches})


def adapter(seed, spec=None):
    """Both factors random: a fresh adapter's `b` is zero and would show nothing."""
    tree = init_adapter(SPEC, spec or lora(), seed)
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [0.2 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


@pytest.fixture(scope="module")
def shared():
    """One engine for all tests of a kind, as compiling is most of what a tiny model costs."""
    return {}


def samplers(shared, *, max_resident=2, stack_dtype=jnp.float32, **settings):
    chosen = dataclasses.replace(SETTINGS, **settings)
    made = Engine(SPEC, chosen, Bytes())
    made = Engine(SPEC, chosen, Bytes(), compiler=shared.setdefault(made.compiler.spec, made.compiler))
    made.load(weights(), version=0, adapters=empty_stack(SPEC, RANK, max_resident + 1, stack_dtype))
    return Samplers(made, max_resident=max_resident)


def sample(sampler_id, prompt=(5, 6, 7), num_samples=1, seed=7, max_tokens=6, **more):
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    params = {"stop": (), **{name: value for name, value in more.items() if name in names}}
    rest = {name: value for name, value in more.items() if name not in names}
    return Sample(sampler_id, tuple(prompt), SamplingParams(max_tokens, seed=seed, **params), num_samples, **rest)


def run(made):
    done = {}
    while made.num_unfinished:
        done.update(made.step())
    return done


def assert_of(sampled, prompt, tree, spec=None):
    """The log-probs are those of this adapter (None: the base)."""
    applied = None if tree is None else Adapters(tree, jnp.float32((spec or lora()).scale))
    for completion in sampled.completions:
        expected = oracle_logprobs(prompt, completion.tokens, adapters=applied)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_samplers_of_any_rank_and_modules_share_a_batch(shared):
    made = samplers(shared)
    narrow = lora(2, mlp=False, unembed=False)
    made.open("base", None, None, 0)
    made.open("a", adapter(1), lora(), 3)
    made.open("b", adapter(2, narrow), narrow, 9)
    assert made.ids == ("base", "a", "b")
    for name in made.ids:
        made.add(name, sample(name, num_samples=3))
    done = run(made)
    assert_of(done["base"], (5, 6, 7), None)
    assert_of(done["a"], (5, 6, 7), adapter(1))
    assert_of(done["b"], (5, 6, 7), adapter(2, narrow), narrow)
    assert [done[name].completions[0].policy_version for name in made.ids] == [0, 3, 9]


def test_only_what_nobody_can_write_is_taken_without_a_copy(shared):
    made = samplers(shared)
    tree = jax.tree.map(np.array, adapter(1))
    tree["q"]["a"].flags.writeable = False
    made.open("a", tree, lora(), 1)
    kept = made._open["a"].adapter
    assert kept["q"]["a"] is tree["q"]["a"]
    before = jax.tree.map(np.copy, tree)
    for module, parts in tree.items():
        for name, leaf in parts.items():
            if leaf.flags.writeable:
                leaf += 1
                np.testing.assert_array_equal(kept[module][name], before[module][name])


def test_a_bfloat16_stack_is_given_what_it_samples_with(shared):
    """Of a lower rank, and with modules missing: kept as they are, and sampled from as rounded."""
    small = lora(2, mlp=False)
    tree = adapter(3, small)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), tree)
    made = samplers(shared, stack_dtype=jnp.bfloat16)
    made.open("a", tree, small, 1)
    kept = made._open["a"].adapter
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), kept) == jax.tree.map(
        lambda leaf: (leaf.shape, "bfloat16"), tree
    )
    made.add("s", sample("a", max_tokens=8))
    assert_of(run(made)["s"], (5, 6, 7), rounded, small)


def test_a_snapshot_does_not_move(shared):
    """The tree that was given may change, be donated or be replaced; the sampler doesn't."""
    made = samplers(shared)
    tree = jax.tree.map(np.array, adapter(1))
    made.open("a", tree, lora(), 1)
    jax.tree.map(lambda leaf: leaf.fill(np.nan), tree)
    for name in ("b", "c", "d"):  # more than there are rows: the snapshot leaves its row and comes back
        made.open(name, adapter(2), lora(), 2)
        made.add(name, sample(name))
    made.add("a", sample("a"))
    done = run(made)
    assert_of(done["a"], (5, 6, 7), adapter(1))
    assert done["a"].completions[0].policy_version == 1


def test_more_samplers_than_rows_all_finish(shared):
    """7 samplers, 2 rows, samples in any order and length: each gets its own weights, and the rows are shared out."""
    made = samplers(shared)
    for i in range(7):
        made.open(f"s{i}", adapter(i), lora(), i)
    rng, given, asked, done = np.random.default_rng(0), prompts(4), {}, {}
    for n in range(30):
        which, prompt = int(rng.integers(7)), given[rng.integers(4)]
        asked[f"o{n}"] = (which, prompt)
        made.add(f"o{n}", sample(f"s{which}", prompt, max_tokens=int(rng.integers(1, 9))))
        if n % 3 == 0:
            done.update(made.step())
    assert made.num_waiting
    done.update(run(made))
    assert sorted(done) == sorted(asked)
    for name, (which, prompt) in asked.items():
        assert_of(done[name], prompt, adapter(which))
        assert done[name].completions[0].policy_version == which


def test_a_busy_sampler_does_not_keep_others_out(shared):
    """Both rows always have work, and more comes at every step; a third sampler still gets its turn."""
    made = samplers(shared)
    for name in ("a", "b", "c"):
        made.open(name, adapter(1), lora(), 1)
    for n in range(3):
        made.add(f"a{n}", sample("a", max_tokens=9))
        made.add(f"b{n}", sample("b", max_tokens=9))
    made.add("c", sample("c"))
    done: dict = {}
    for n in range(3, 40):
        done.update(made.step())
        if "c" in done:
            break
        made.add(f"a{n}", sample("a", max_tokens=9))
        made.add(f"b{n}", sample("b", max_tokens=9))
    assert "c" in done
    run(made)


def test_an_open_sampler_can_be_replaced_while_it_samples(shared):
    """kind=inflight: tokens before under the old weights, after under the new; others don't notice."""
    made = samplers(shared)
    made.open("a", adapter(1), lora(), 1)
    made.open("b", adapter(2), lora(), 2)
    made.add("a", sample("a", max_tokens=12))
    made.add("b", sample("b", max_tokens=12))
    assert made.step() == []
    made.open("a", adapter(3), lora(), 3)
    done = run(made)
    completion = done["a"].completions[0]
    before, after = (
        oracle_logprobs((5, 6, 7), completion.tokens, adapters=Adapters(adapter(i), jnp.float32(2))) for i in (1, 3)
    )
    np.testing.assert_allclose(completion.logprobs[:5], before[:5], atol=2e-5)
    np.testing.assert_allclose(completion.logprobs[5:], after[5:], atol=2e-5)
    assert len(completion.tokens) == 12 and completion.policy_version == 1
    assert_of(done["b"], (5, 6, 7), adapter(2))
    made.add("again", sample("a"))
    assert_of(run(made)["again"], (5, 6, 7), adapter(3))


def test_closing_a_sampler_aborts_its_samples(shared):
    made = samplers(shared)
    for name in ("a", "b", "c"):
        made.open(name, adapter(1), lora(), 1)
        made.add(name, sample(name, max_tokens=12))
    made.step()
    assert made.close("a") and made.close("c") and not made.close("a")
    done = run(made)
    assert [done[name].completions[0].stop_reason for name in ("a", "b", "c")] == ["abort", "length", "abort"]
    assert len(done["a"].completions[0].tokens) == 5 and done["c"].completions[0].tokens == ()
    with pytest.raises(RequestError) as error:
        made.add("x", sample("a"))
    assert str(error.value) == "Sampler 'a' isn't open. It was closed or has expired: create another one."
    assert not made.abort("a")


def test_seeds_are_per_sample_reproducible_and_independent_of_batch_mates(shared):
    made = samplers(shared)
    made.open("a", adapter(1), lora(), 1)
    made.open("b", adapter(2), lora(), 1)
    made.add("alone", sample("a", num_samples=4, seed=3, max_tokens=8))
    alone = run(made)["alone"]
    for n, prompt in enumerate(prompts(4)):
        made.add(f"mate{n}", sample("b", prompt, num_samples=2, seed=n, max_tokens=3 + n))
    made.add("together", sample("a", num_samples=4, seed=3, max_tokens=8))
    together = run(made)["together"]
    assert [c.tokens for c in together.completions] == [c.tokens for c in alone.completions]
    assert len({c.tokens for c in alone.completions}) == 4
    for name in ("u", "v"):
        made.add(name, sample("a", seed=None, max_tokens=8))
    fresh = run(made)
    assert fresh["u"].completions[0].tokens != fresh["v"].completions[0].tokens


@pytest.mark.parametrize("convention", ["raw", "tempered"])
def test_everything_that_may_be_asked_of_a_prompt(shared, convention):
    made = samplers(shared, logprobs_of=convention)
    made.open("base", None, None, 0)
    prompt, temperature = prompts(1, shortest=19)[0], 0.5
    targets = np.random.default_rng(0).integers(0, VOCAB, (len(prompt) - 1, 3))
    targets[2, 1] = -1
    asked = sample("base", prompt, max_tokens=5, temperature=temperature, prompt_logprobs=True, topk_prompt_logprobs=3,
                   target_prompt_logprobs=targets, prompt_alt_tokens=3, topk_sample_logprobs=2,
                   num_samples=2)  # fmt: skip
    made.add("all", asked)
    made.add("last", dataclasses.replace(asked, prompt_logprobs_last_n=4))
    done = run(made)
    got, last = done["all"], done["last"]
    P, of = len(prompt), 1.0 if convention == "raw" else 1 / temperature
    table = log_softmax(oracle_logits(prompt) * of)[:-1]  # row i: of position i + 1
    expected = table[np.arange(P - 1), prompt[1:]]
    assert np.isnan(got.prompt_logprobs[0])
    np.testing.assert_allclose(got.prompt_logprobs[1:], expected, atol=2e-5)
    best = np.argsort(-table, -1)[:, :3]
    assert got.topk_prompt_logprobs[0][1:].tolist() == best.tolist()
    np.testing.assert_allclose(got.topk_prompt_logprobs[1][1:], np.take_along_axis(table, best, 1), atol=2e-5)
    wanted = np.take_along_axis(table, np.maximum(targets, 0), 1)
    wanted[2, 1] = 0.0
    np.testing.assert_allclose(got.target_prompt_logprobs, wanted, atol=2e-5)
    ids, logprobs = got.prompt_alt_tokens
    np.testing.assert_allclose(logprobs[1:], np.take_along_axis(table, ids[1:], 1), atol=2e-5)
    assert len({tuple(row) for row in ids.T.tolist()}) == 3, "the draws differ"
    for ids, logprobs in (got.topk_prompt_logprobs, got.prompt_alt_tokens):
        assert ids.shape == logprobs.shape == (P, 3)
        assert ids[0].tolist() == [0] * 3 and logprobs[0].tolist() == [MASKED_LOGPROB] * 3
    for completion, (ids, logprobs) in zip(got.completions, got.topk_sample_logprobs, strict=True):
        rows = log_softmax(oracle_logits([*prompt, *completion.tokens]) * of)[P - 1 : -1]
        assert ids.tolist() == np.argsort(-rows, -1)[:, :2].tolist()
        np.testing.assert_allclose(logprobs, np.take_along_axis(rows, ids, 1), atol=2e-5)
    assert np.isnan(last.prompt_logprobs[: P - 4]).all()
    np.testing.assert_array_equal(last.prompt_logprobs[P - 4 :], got.prompt_logprobs[P - 4 :])
    assert (last.topk_prompt_logprobs[1][: P - 4] == MASKED_LOGPROB).all()
    assert got.num_cached_prompt_tokens == 0


def test_alternatives_are_drawn_from_what_is_predicted(shared):
    """Frequencies over many draws at one position, against the distribution."""
    made = samplers(shared)
    made.open("base", None, None, 0)
    drawn = []
    for seed in range(8):
        made.add(f"o{seed}", sample("base", (5, 6), seed=seed, prompt_alt_tokens=97, max_tokens=1))
        drawn += run(made)[f"o{seed}"].prompt_alt_tokens[0][1].tolist()
    probability = np.exp(log_softmax(oracle_logits([5, 6])[0]))
    frequency = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    assert np.abs(frequency - probability).sum() < 0.35
    assert np.abs(frequency - probability).max() < 0.06


def test_cached_prompt_tokens_are_counted(shared):
    made = samplers(shared)
    made.open("a", adapter(1), lora(), 1)
    made.open("b", adapter(2), lora(), 1)
    counts = []
    for name, sampler in (("o1", "a"), ("o2", "a"), ("o3", "b")):
        made.add(name, sample(sampler, (9, 8, 7, 6)))
        counts.append(run(made)[name].num_cached_prompt_tokens)
    made.open("b", adapter(3), lora(), 2)  # forgets b's prompts, not a's
    for name, sampler in (("o4", "a"), ("o5", "b")):
        made.add(name, sample(sampler, (9, 8, 7, 6)))
        counts.append(run(made)[name].num_cached_prompt_tokens)
    assert counts == [0, 4, 0, 4, 0]


def test_a_broken_sampler_does_not_reach_its_neighbours(shared):
    made = samplers(shared)
    made.open("good", adapter(1), lora(), 1)
    made.add("expected", sample("good", num_samples=3))
    expected = run(made)["expected"]
    made.open("nan", jax.tree.map(lambda leaf: leaf * np.nan, adapter(2)), lora(), 1)
    made.add("nan", sample("nan", num_samples=3))
    made.add("good", sample("good", num_samples=3))
    done = run(made)
    assert all(np.isnan(c.logprobs).all() for c in done["nan"].completions)
    for got, want in zip(done["good"].completions, expected.completions, strict=True):
        assert got.tokens == want.tokens
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=5e-6)


def test_bits_do_not_depend_on_which_adapters_are_present(shared):
    made = samplers(shared, min_rows=64, max_slots=64)
    made.open("a", adapter(1), lora(), 1)
    made.open("b", adapter(2), lora(), 1)
    made.add("alone", sample("a", num_samples=4))
    alone = run(made)["alone"]
    made.add("mixed", sample("a", num_samples=4))
    made.add("mates", sample("b", (8, 9), num_samples=7))
    mixed = run(made)["mixed"]
    for got, want in zip(mixed.completions, alone.completions, strict=True):
        np.testing.assert_array_equal(got.logprobs, want.logprobs)


def test_streams_name_their_operations(shared):
    made = samplers(shared)
    made.open("base", None, None, 0)
    made.add("s", sample("base", num_samples=2, max_tokens=9, stream=True))
    events, done = [], {}
    while made.num_unfinished:
        done.update(made.step())
        events += made.drain()
    for completion in done["s"].completions:
        mine = [e for e in events if (e.operation_id, e.sample_index) == ("s", completion.sample_index)]
        assert sum((e.tokens for e in mine), ()) == completion.tokens and mine[-1].finished
        np.testing.assert_array_equal(np.concatenate([e.logprobs for e in mine]), completion.logprobs)


def test_what_can_not_be_run_is_refused(shared):
    made = samplers(shared)
    made.open("base", None, None, 0)
    for change, message in [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (97,)}, "a token outside of the vocabulary. Got: 97"),
        ({"max_tokens": 126}, "A prompt of 3 tokens and max_tokens 126 don't fit in the context. Expected: 128 tokens"
         " in all. Lower max_tokens, leave it out to sample until the context is full, or shorten the prompt."),
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=message.replace(".", "[.]")):
            made.add("bad", sample("base", **change))
    made.add("clamped", sample("base", (3,) * 125, max_tokens=None))
    assert len(run(made)["clamped"].completions[0].tokens) == 3
    with pytest.raises(RequestError, match="An adapter's down.a doesn't fit the engine's stack"):
        made.open("wide", adapter(1, lora(8)), lora(8), 1)
    with pytest.raises(RequestError, match="3 samplers can't be resident in an engine with 2 rows for adapters"):
        Samplers(made._engine, max_resident=3)
    assert made.ids == ("base",) and made.num_unfinished == 0


def test_replacing_an_adapter_compiles_nothing(shared):
    made = samplers(shared)
    made.open("a", adapter(1), lora(), 1)
    made.add("first", sample("a"))
    run(made)
    before = made.stats.num_compilations
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        for n, spec in enumerate((lora(1), lora(3, attention=False), lora(4, unembed=False))):
            made.open(f"n{n}", jax.tree.map(np.asarray, init_adapter(SPEC, spec, n)), spec, n)
            made.add(f"o{n}", sample(f"n{n}"))
            run(made)
    finally:
        jax.monitoring.clear_event_listeners()
    assert made.stats.num_compilations == before
    assert len(compiled) <= 40, compiled  # init_adapter's own, in this loop


def test_an_engine_refuses_to_replace_what_is_in_use(shared):
    made = samplers(shared)
    made.open("a", adapter(1), lora(), 1)
    made.add("o", sample("a", max_tokens=12))
    made.step()
    with pytest.raises(RequestError) as error:
        made._engine.set_adapter(1, adapter(2), 2.0, 2)
    assert str(error.value) == (
        "Adapter 1 can't be replaced while 1 of its samples run."
        " Step until they finish, abort them, or replace it with interrupt=True."
    )
    with pytest.raises(RequestError, match="No such row of the stacked adapters. Got: 0. Expected: 1 to 2."):
        made._engine.set_adapter(0, None, 1.0, 1)
    run(made)
