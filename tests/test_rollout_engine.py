"""The engine against an oracle that recomputes whole sequences without a cache, in every layout and under pressure."""

import dataclasses
import functools

import numpy as np
import pytest
from rollout_models import SPEC, VOCAB, Bytes, oracle_logits, oracle_logprobs, prompts, weights

from locojax.errors import RequestError
from locojax.rollout.engine import Engine
from locojax.rollout.programs import Compiler
from locojax.rollout.settings import EngineSettings
from locojax.types import MASKED_LOGPROB, SampleRequest, SamplingParams

BYTES_PER_TOKEN = 2 * SPEC.num_layers * SPEC.kv_size * 4
SMALL = EngineSettings(max_slots=16, max_prefill_tokens=64, max_iterations=8, kv_bytes=4096 * BYTES_PER_TOKEN)
PAGED = dataclasses.replace(SMALL, layout="paged", page_size=4)
ROWS = dataclasses.replace(SMALL, layout="rows", page_size=8)
LAYOUTS = pytest.mark.parametrize("settings", [SMALL, PAGED, ROWS], ids=["contiguous", "paged", "rows"])


@functools.cache
def compiler(spec):
    """Engines of all tests share programs: compiling is most of what a tiny model costs."""
    return Compiler(spec)


def engine(settings=SMALL, tokens=None, seed=0, share=True):
    made = Engine(SPEC, settings, tokens or Bytes())
    if share:
        made = Engine(SPEC, settings, tokens or Bytes(), compiler=compiler(made.compiler.spec))
    made.load(weights(seed), version=seed)
    return made


def request(name, prompt, num_samples=1, **params):
    params.setdefault("max_tokens", 12)
    params.setdefault("seed", 7)
    return SampleRequest(name, tuple(prompt), SamplingParams(**params), num_samples)


def batch(count=5, num_samples=3, **params):
    return [request(f"r{i}", p, num_samples, **{"seed": i, **params}) for i, p in enumerate(prompts(count))]


def tokens_of(results):
    return [[c.tokens for c in result.completions] for result in results]


def logprobs_of(results):
    return np.concatenate([c.logprobs for result in results for c in result.completions])


def assert_same(results, expected):
    assert tokens_of(results) == tokens_of(expected)
    np.testing.assert_allclose(logprobs_of(results), logprobs_of(expected), atol=1e-5)


@LAYOUTS
def test_log_probs_equal_those_of_a_plain_forward_pass(settings):
    requests = batch(temperature=0.8)
    for asked, result in zip(requests, engine(settings).generate(requests), strict=True):
        for completion in result.completions:
            expected = oracle_logprobs(asked.prompt, completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            assert completion.logprobs.dtype == np.float32


@LAYOUTS
def test_greedy_follows_the_oracle(settings):
    requests = batch(temperature=0.0, num_samples=1, stop=())
    for asked, result in zip(requests, engine(settings).generate(requests), strict=True):
        sequence = list(asked.prompt)
        for _ in range(12):
            sequence.append(int(np.argmax(oracle_logits(sequence)[-1])))
        assert result.completions[0].tokens == tuple(sequence[len(asked.prompt) :])


@LAYOUTS
def test_truncated_and_whole_distributions_share_a_batch(settings):
    """top_k 1 is argmax; its batch mates are drawn as without it."""
    plain = batch(count=3, stop=())
    expected = engine(settings).generate(plain)
    top = [dataclasses.replace(request(f"k{i}", p, 2, top_k=1, stop=())) for i, p in enumerate(prompts(3))]
    greedy = [request(f"g{i}", p, 2, temperature=0.0, stop=()) for i, p in enumerate(prompts(3))]
    mixed = engine(settings).generate([*plain, *top, *greedy])
    assert_same(mixed[:3], expected)
    assert tokens_of(mixed[3:6]) == tokens_of(mixed[6:])


def test_layouts_agree():
    requests = batch(count=6)
    assert_same(engine(PAGED).generate(requests), engine(SMALL).generate(requests))


@LAYOUTS
@pytest.mark.parametrize("others", [0, 7])
def test_a_sample_depends_on_its_seed_and_index_alone(settings, others):
    """C22, C27: not on batch mates, slots, order, or how many iterations a program runs."""
    alone = engine(settings).generate([request("x", (5, 6, 7, 8), 3, seed=11)])
    crowd = [request(f"o{i}", p, 2, seed=100 + i, max_tokens=5 + i) for i, p in enumerate(prompts(others, seed=9))]
    few = dataclasses.replace(settings, max_iterations=3, max_slots=6)
    together = engine(few).generate([*crowd, request("x", (5, 6, 7, 8), 3, seed=11)])
    assert_same(together[-1:], alone)
    assert len(set(tokens_of(alone)[0])) > 1, "the samples of a prompt are not all equal"
    assert tokens_of(engine(settings).generate([request("x", (5, 6, 7, 8), 3, seed=12)])) != tokens_of(alone)


@LAYOUTS
def test_preempted_samples_are_computed_again_with_the_same_result(settings):
    """KV memory for a fraction of what the samples want: some are put back, and nothing else changes."""
    requests = batch(count=8, num_samples=2, max_tokens=40, stop=())
    expected = engine(settings).generate(requests)
    small = engine(dataclasses.replace(settings, kv_bytes=300 * BYTES_PER_TOKEN))
    assert_same(small.generate(requests), expected)
    assert small.stats().num_preemptions > 0
    assert small.stats().num_tokens == 8 * 2 * 40


def test_eos_at_the_last_token_is_a_stop():
    """C24. The greedy path's own fourth token is declared EOS."""
    candidates = [request(f"c{i}", p, temperature=0.0, max_tokens=4, stop=()) for i, p in enumerate(prompts(8))]
    paths = zip(candidates, engine().generate(candidates), strict=True)
    asked, free = next((a, r) for a, r in paths if r.completions[0].tokens[3] not in r.completions[0].tokens[:3])
    assert free.completions[0].stop_reason == "length"
    fourth = free.completions[0].tokens[3]
    tokens = Bytes()
    tokens.eos_ids = (fourth,)
    (stopped,) = engine(tokens=tokens).generate([dataclasses.replace(asked, params=SamplingParams(4, 0.0))])
    assert stopped.completions[0].tokens == free.completions[0].tokens
    assert (stopped.completions[0].stop_reason, stopped.completions[0].stopped_by) == ("stop", fourth)


def test_eos_stops_unless_nothing_may():
    """C25. A vocabulary in which a third of all tokens end the text."""
    tokens = Bytes()
    tokens.eos_ids = tuple(range(2, VOCAB, 3))
    made = engine(tokens=tokens)
    default, none, ids = made.generate([
        request("none", (3, 4), 8, max_tokens=60),
        request("empty", (3, 4), 8, max_tokens=60, stop=()),
        request("ids", (3, 4), 8, max_tokens=60, stop=tuple(range(3, VOCAB, 3))),
    ])  # fmt: skip
    for completion in default.completions:
        assert completion.stop_reason == "stop" and completion.stopped_by == completion.tokens[-1]
        assert (np.isin(completion.tokens, tokens.eos_ids)).sum() == 1
    assert {(c.stop_reason, len(c.tokens)) for c in none.completions} == {("length", 60)}
    assert {c.stopped_by % 3 for c in ids.completions} == {0, 2}, "ids stop beside EOS"


def test_prompts_at_the_context_limit():
    """C26."""
    made = engine(dataclasses.replace(SMALL, max_context=16))
    made.add(request("fits", range(2, 17), max_tokens=4, stop=()))
    with pytest.raises(RequestError) as error:
        made.add(request("full", range(2, 18), max_tokens=4))
    assert str(error.value) == (
        "Request 'full': a prompt of 16 tokens leaves no room in a context of 16."
        " Expected: at most 15 prompt tokens. Shorten or drop the prompt."
    )
    (result,) = made.step()
    assert [len(c.tokens) for c in result.completions] == [1]
    assert result.completions[0].stop_reason == "length"


@LAYOUTS
@pytest.mark.parametrize("iterations", [1, 5, 8])
def test_stop_strings_do_not_depend_on_the_number_of_iterations(settings, iterations):
    asked = request("s", (20, 30), 6, max_tokens=50, stop=())
    without_eos = Bytes()
    without_eos.eos_ids = ()
    (free,) = engine().generate([asked])
    text = free.completions[0].text
    stop = text[17:20]
    made = engine(dataclasses.replace(settings, max_iterations=iterations), tokens=without_eos)
    (cut,) = made.generate([dataclasses.replace(asked, params=dataclasses.replace(asked.params, stop=(stop, "never")))])
    for whole, part in zip(free.completions, cut.completions, strict=True):
        end = whole.text.find(stop)
        assert part.text == (whole.text if end < 0 else whole.text[: end + 3])
        assert part.tokens == whole.tokens[: len(part.tokens)] and len(part.logprobs) == len(part.tokens)
    assert (cut.completions[0].stop_reason, cut.completions[0].stopped_by) == ("stop", stop)


@LAYOUTS
def test_new_weights_leave_no_trace_of_the_old(settings):
    """C28. Samples after a load equal those of a fresh engine, with the prefix cache on."""
    requests = batch(count=3)
    made = engine(settings, seed=0)
    made.generate(requests)
    made.load(weights(5), version=5)
    again = made.generate(requests)
    assert_same(again, engine(settings, seed=5).generate(requests))
    assert {c.policy_version for r in again for c in r.completions} == {5}


@LAYOUTS
def test_a_cached_prompt_gives_what_a_computed_one_does(settings):
    requests = batch(count=4)
    made = engine(settings)
    first = made.generate(requests)
    computed = made.stats().num_prompt_tokens
    assert_same(made.generate(requests), first)
    assert made.stats().num_prompt_tokens == computed
    assert_same(engine(dataclasses.replace(settings, prefix_cache=False)).generate(requests), first)


@LAYOUTS
def test_long_prompts_come_in_chunks(settings):
    requests = [request(f"r{i}", p, 2) for i, p in enumerate(prompts(3, shortest=70, longest=90))]
    whole = engine(dataclasses.replace(settings, max_prefill_tokens=512)).generate(requests)
    chunked = engine(dataclasses.replace(settings, max_prefill_tokens=32))
    assert_same(chunked.generate(requests), whole)
    asked, result = requests[0], whole[0]
    expected = oracle_logprobs(asked.prompt, result.completions[1].tokens)
    np.testing.assert_allclose(result.completions[1].logprobs, expected, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("budget", [64, 8], ids=["packed", "chunks"])
def test_prompt_log_probs(settings, budget):
    made = engine(dataclasses.replace(settings, max_prefill_tokens=budget))
    asked = dataclasses.replace(
        request("p", prompts(1, shortest=19)[0], 2), prompt_logprobs=True, topk_prompt_logprobs=3
    )
    made.generate([request("same", asked.prompt)])  # its cached prompt has no hidden states to score
    plain, result = made.generate([request("plain", asked.prompt), asked])
    assert plain.prompt_logprobs is None and plain.topk_prompt_logprobs is None
    assert np.isnan(result.prompt_logprobs[0])
    expected = oracle_logprobs(asked.prompt[:1], asked.prompt[1:])
    np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=1e-5)
    ids, values = result.topk_prompt_logprobs
    table = np.sort(oracle_logits(asked.prompt)[:-1], -1)
    assert ids.shape == values.shape == (len(asked.prompt), 3) and ids[0].tolist() == [0] * 3
    assert values[0].tolist() == [MASKED_LOGPROB] * 3
    for i in range(1, len(asked.prompt)):
        of_ids = [oracle_logprobs(asked.prompt[:i], [token])[0] for token in ids[i]]
        np.testing.assert_allclose(values[i], of_ids, atol=1e-5)
        assert np.all(np.diff(values[i]) <= 0) and np.argmax(oracle_logits(asked.prompt)[i - 1]) == ids[i, 0]
    assert table.shape[1] == VOCAB


def test_requests_with_a_common_header_are_computed_together():
    header = tuple(range(2, 40))
    requests = [request(f"r{i}", (*header, *p), 2) for i, p in enumerate(prompts(6, longest=6))]
    for asked, result in zip(requests, engine().generate(requests), strict=True):
        for completion in result.completions:
            expected = oracle_logprobs(asked.prompt, completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@LAYOUTS
def test_aborts_at_any_time_harm_nobody(settings):
    """Random arrivals and aborts; survivors equal an undisturbed run, and all memory comes back."""
    requests = batch(count=14, num_samples=2, max_tokens=20, stop=())
    expected = {r.request_id: r for r in engine(settings).generate(requests)}
    rng = np.random.default_rng(4)
    made = engine(dataclasses.replace(settings, kv_bytes=500 * BYTES_PER_TOKEN, max_iterations=3))
    waiting, results, aborted = list(requests), {}, set()
    while waiting or made.num_unfinished:
        for asked in waiting[: rng.integers(0, 4)]:
            made.add(asked)
            waiting.remove(asked)
        results.update({r.request_id: r for r in made.step()})
        name = requests[rng.integers(len(requests))].request_id
        if rng.random() < 0.3 and made.abort(name):
            aborted.add(name)
    assert aborted and len(results) == len(requests)
    for name, result in results.items():
        for got, want in zip(result.completions, expected[name].completions, strict=True):
            assert got.tokens == want.tokens[: len(got.tokens)]
            assert (got.stop_reason == "length") if name not in aborted else (got.stop_reason in ("abort", "length"))
    assert not made.abort("r0")
    made.load(weights(), version=1)
    assert_idle(made)


def assert_idle(made):
    assert not made._memory.rows.blocks
    if made.settings.layout != "contiguous":
        assert made._memory.pool.num_free == made._memory.pool.num_pages
    else:
        assert made._memory.open_prompt(1).index == 0


def test_a_load_while_samples_run_is_refused_or_interrupts():
    made = engine(dataclasses.replace(SMALL, max_iterations=4))
    made.add(request("a", (5, 6, 7), 2, max_tokens=12, stop=()))
    made.step()
    with pytest.raises(RequestError) as error:
        made.load(weights(3), version=3)
    assert str(error.value) == (
        "Weights of version 3 can't be loaded while 2 samples run."
        " Step until they finish, abort them, or load with interrupt=True."
    )
    made.load(weights(3), version=3, interrupt=True)
    (result,) = run_to_end(made)
    for completion in result.completions:
        assert completion.policy_version == 0 and len(completion.tokens) == 12
        before = oracle_logprobs((5, 6, 7), completion.tokens, seed=0)
        after = oracle_logprobs((5, 6, 7), completion.tokens, seed=3)
        np.testing.assert_allclose(completion.logprobs[:5], before[:5], atol=1e-5)
        np.testing.assert_allclose(completion.logprobs[5:], after[5:], atol=1e-5)


def run_to_end(made):
    results = []
    while made.num_unfinished:
        results += made.step()
    return results


@LAYOUTS
def test_ragged_waves_compile_nothing_after_a_warm_up(settings):
    made = engine(dataclasses.replace(settings, max_slots=32, max_prefill_tokens=512), share=False)
    longest = prompts(8, shortest=32, longest=32, seed=99)
    assert made.warm_up([request(f"w{i}", p, 4, max_tokens=60) for i, p in enumerate(longest)]) > 0
    compiled, rng = made.stats().num_compilations, np.random.default_rng(0)
    for step in range(5):
        lengths = [60, *rng.integers(1, 60, 7)]
        made.generate([
            request(f"{step}/{i}", p, 4, max_tokens=int(n), stop=(), seed=int(rng.integers(1 << 30)))
            for i, (p, n) in enumerate(zip(prompts(8, shortest=9, longest=32, seed=step), lengths, strict=True))
        ])  # fmt: skip
        made.load(weights(), version=step + 1)
    assert made.stats().num_compilations == compiled


@pytest.mark.extended
@pytest.mark.parametrize("settings", [SMALL, PAGED], ids=["contiguous", "paged"])
def test_samples_that_wait_for_slots_compile_nothing_after_a_warm_up(settings):
    """Groups end in pieces, so that at any time another number of prompts is open, and one or some more begin."""
    made = engine(dataclasses.replace(settings, max_slots=8, max_prefill_tokens=512), share=False)
    longest = prompts(8, shortest=32, longest=32, seed=99)
    assert made.warm_up([request(f"w{i}", p, 4, max_tokens=60) for i, p in enumerate(longest)]) > 0
    compiled, lengths = made.stats().num_compilations, set()
    for step in range(5):
        asked = prompts(8, shortest=9, longest=32, seed=step)
        results = made.generate([
            request(f"{step}/{i}", p, 4, max_tokens=60, stop=tuple(range(4)), seed=100 * step + i)
            for i, p in enumerate(asked)
        ])  # fmt: skip
        lengths |= {len(completion.tokens) for result in results for completion in result.completions}
        made.load(weights(), version=step + 1)
    assert len(lengths) > 10, "the lengths are not ragged"
    assert made.stats().num_compilations == compiled


def test_a_wave_compiles_the_same_whatever_came_before():
    made = engine(share=False)
    small = [request("a", (4, 5), max_tokens=60, stop=())]
    made.generate(small)
    made.generate(batch(count=5, max_tokens=60, stop=()))
    once = made.stats().num_compilations
    for i in range(2):
        made.load(weights(), version=i)
        made.generate(small)
    assert made.stats().num_compilations == once


def test_a_recompilation_is_counted():
    made = engine(share=False)
    made.generate([request("a", (4, 5))])
    once = made.stats().num_compilations
    made.generate([request("b", (4, 5))])
    assert made.stats().num_compilations == once
    made.generate([request("c", [5] * 60)])
    assert made.stats().num_compilations > once


def test_streams_are_aligned_and_complete():
    """Tokens of one to three bytes that split a multi-byte character."""
    table = {id: piece for id, piece in enumerate([b"\xe2\x82", b"\xac", b"\xc3", b"\xa9", b"ab", b"c"] * 16)}
    made = engine(tokens=Bytes(table))
    asked = request("s", (40, 41), 3, max_tokens=30, stop=())
    made.add(asked, stream=True)
    results, events = [], []
    while made.num_unfinished:
        results += made.step()
        events += made.drain()
    assert made.drain() == []
    for completion in results[0].completions:
        mine = [e for e in events if e.sample_index == completion.sample_index]
        assert len(mine) > 2 and [e.finished for e in mine] == [False] * (len(mine) - 1) + [True]
        assert sum((e.tokens for e in mine), ()) == completion.tokens
        np.testing.assert_array_equal(np.float32(sum((e.logprobs for e in mine), ())), completion.logprobs)
        for event in mine:
            assert event.data == b"".join(table[t] for t in event.tokens)
        assert "".join(e.text for e in mine) == completion.text
        assert completion.text == b"".join(e.data for e in mine).decode(errors="replace")


def test_tempered_log_probs_are_declared():
    asked = request("t", (8, 9), 2, temperature=0.5)
    raw = engine().generate([asked])[0].completions[0]
    made = engine(dataclasses.replace(SMALL, logprobs_of="tempered"))
    tempered = made.generate([asked])[0].completions[0]
    assert (raw.logprobs_of, tempered.logprobs_of) == ("raw", "tempered") and raw.tokens == tempered.tokens
    table = oracle_logits([8, 9, *tempered.tokens])[1:-1] / 0.5
    picked = (table - table.max(-1, keepdims=True))[np.arange(len(tempered.tokens)), tempered.tokens]
    expected = picked - np.log(np.exp(table - table.max(-1, keepdims=True)).sum(-1))
    np.testing.assert_allclose(tempered.logprobs, expected, atol=1e-5)


def test_generate_leaves_other_requests_results_to_step():
    made = engine()
    made.add(request("mine", (4, 5), max_tokens=2, stop=()))
    assert [r.request_id for r in made.generate([request("theirs", (6, 7), max_tokens=9, stop=())])] == ["theirs"]
    assert [r.request_id for r in made.step()] == ["mine"]
    with pytest.raises(RequestError):
        made.generate([request("ok", (6, 7)), request("bad", ())])
    assert made.num_unfinished == 0


def test_a_failed_program_leaves_the_engine_usable():
    made = engine(dataclasses.replace(SMALL, max_iterations=4))
    asked = request("a", (5, 6, 7), 2, max_tokens=12, stop=())
    expected = engine().generate([asked])
    made.add(asked)
    made.step()
    decode, made._decode = made._decode, lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.step()
    made._decode = decode
    assert_same(run_to_end(made), expected)
