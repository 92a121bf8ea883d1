"""Sampling: stops, seeds, log-probs and their shapes, snapshots that stay, requests that don't wait for one another."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import tinker
from conformance.client import (
    EOS,
    TEXTS,
    Client,
    close_to,
    datum,
    equal,
    fingerprint,
    forward,
    is_ascii,
    refused,
    sample,
    scored,
    settled,
    since,
    snapshot,
    spelled,
    tensor,
    train,
)
from tinker import types

PROMPT = TEXTS[0]
ANSWER = 57


def drawn(sampler: tinker.SamplingClient, **options: Any) -> Any:
    """The first sequence of a sample of PROMPT."""
    return sample(sampler, PROMPT, **options).result().sequences[0]


def full_sample(sampler: tinker.SamplingClient, prompt: list[int], **options: Any) -> Any:
    """A sample with options of `SamplingClient.sample` itself; one token unless `params` says more."""
    params = types.SamplingParams(**{"max_tokens": 1, "stop": [], **options.pop("params", {})})
    return sampler.sample(
        prompt=types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params, **options
    ).result()


def teach_eos(client: Client) -> tinker.TrainingClient:
    """A model that answers PROMPT by ANSWER and an end of sequence."""
    trainer = client.trainer(rank=8)
    tokens = [*PROMPT, ANSWER, EOS, ANSWER - 1]
    weights = [0.0] * (len(PROMPT) - 1) + [1.0, 1.0, 1.0]
    for _ in range(40):
        trainer.forward_backward([datum(tokens, weights)], "cross_entropy")
        step = trainer.optim_step(types.AdamParams(learning_rate=0.003))
    step.result()
    return trainer


def probe_greedy_is_repeatable(client: Client) -> None:
    """Temperature 0: the same tokens again, in any company, and a shorter answer is a prefix of a longer one."""
    sampler = client.base_sampler()
    first = drawn(sampler, temperature=0.0, max_tokens=16)
    assert len(first.tokens) == 16 and first.stop_reason == "length"
    crowd = [sample(sampler, text, num_samples=3, max_tokens=12) for text in TEXTS]
    again = drawn(sampler, temperature=0.0, max_tokens=16)
    for future in crowd:
        future.result()
    assert again.tokens == first.tokens
    assert drawn(sampler, temperature=0.0, max_tokens=5).tokens == first.tokens[:5]
    assert np.isfinite(first.logprobs).all()


def probe_seeds(client: Client) -> None:
    """A seed's samples are all different from one another, and the same the next time, whatever else runs (C27)."""
    sampler = client.base_sampler()
    first = [s.tokens for s in sample(sampler, PROMPT, num_samples=32, max_tokens=12, seed=7).result().sequences]
    assert len({tuple(tokens) for tokens in first}) == 32
    other = sample(sampler, TEXTS[1], num_samples=5, max_tokens=20, seed=7)
    again = [s.tokens for s in sample(sampler, PROMPT, num_samples=32, max_tokens=12, seed=7).result().sequences]
    other.result()
    assert again == first
    assert [
        s.tokens for s in sample(sampler, PROMPT, num_samples=32, max_tokens=12, seed=8).result().sequences
    ] != first
    fewer = [s.tokens for s in sample(sampler, PROMPT, num_samples=4, max_tokens=12, seed=7).result().sequences]
    assert fewer == first[:4]


def probe_without_a_seed_samples_differ(client: Client) -> None:
    sampler = client.base_sampler()
    runs = [sample(sampler, PROMPT, num_samples=4, max_tokens=12).result().sequences for _ in range(2)]
    assert len({tuple(s.tokens) for run in runs for s in run}) == 8


def probe_logprobs_belong_to_the_tokens(client: Client) -> None:
    """One log-prob a token, equal to what scoring the whole gives."""
    sampler = client.base_sampler()
    sequence = drawn(sampler, max_tokens=10, seed=3)
    assert len(sequence.logprobs) == len(sequence.tokens) == 10
    close_to(sequence.logprobs, scored(sampler, [*PROMPT, *sequence.tokens])[len(PROMPT) :], 1e-3)


def probe_stop_ids_and_strings(client: Client) -> None:
    """A stop ends the sample right after the token that completes it, which stays; reason "stop"."""
    sampler = client.base_sampler()
    tokens = drawn(sampler, max_tokens=12, seed=11).tokens
    cut = next(i for i in range(2, 12) if is_ascii(tokens[i]) and tokens[i] not in tokens[:i])
    by_id = drawn(sampler, max_tokens=12, seed=11, stop=[tokens[cut]])
    assert by_id.tokens == tokens[: cut + 1] and by_id.stop_reason == "stop"
    assert len(by_id.logprobs) == cut + 1
    for stop in (spelled([tokens[cut]]), [spelled([tokens[cut]])]):
        by_text = drawn(sampler, max_tokens=12, seed=11, stop=stop)
        assert by_text.tokens == tokens[: cut + 1] and by_text.stop_reason == "stop"
    missed = drawn(sampler, max_tokens=cut, seed=11, stop=[tokens[cut]])
    assert missed.tokens == tokens[:cut] and missed.stop_reason == "length"


def probe_stop_string_over_several_tokens(client: Client) -> None:
    sampler = client.base_sampler()
    for seed in range(20):
        tokens = drawn(sampler, max_tokens=16, seed=seed).tokens
        pairs = [i for i in range(15) if is_ascii(tokens[i]) and is_ascii(tokens[i + 1])]
        if pairs:
            i = pairs[0]
            stopped = drawn(sampler, max_tokens=16, seed=seed, stop=[spelled(tokens[i : i + 2])])
            assert stopped.tokens == tokens[: i + 2] and stopped.stop_reason == "stop"
            return
    raise AssertionError("no two ASCII bytes in a row were ever sampled")


def probe_end_of_sequence(client: Client) -> None:
    """No `stop`: EOS ends it and is included; at the cap too it is "stop", not "length" (C24); `stop=[]`: nothing ends
    it, EOS neither (C25)."""
    sampler = snapshot(teach_eos(client))
    ended = drawn(sampler, temperature=0.0, max_tokens=8, stop=None)
    assert ended.tokens == [ANSWER, EOS] and ended.stop_reason == "stop", ended
    capped = drawn(sampler, temperature=0.0, max_tokens=2, stop=None)
    assert capped.tokens == [ANSWER, EOS] and capped.stop_reason == "stop", capped
    short = drawn(sampler, temperature=0.0, max_tokens=1, stop=None)
    assert short.tokens == [ANSWER] and short.stop_reason == "length", short
    endless = drawn(sampler, temperature=0.0, max_tokens=8, stop=[])
    assert len(endless.tokens) == 8 and endless.tokens[:2] == [ANSWER, EOS] and endless.stop_reason == "length"
    listed = drawn(sampler, temperature=0.0, max_tokens=8, stop=[EOS])
    assert listed.tokens == [ANSWER, EOS] and listed.stop_reason == "stop"


def probe_prompt_at_the_end_of_the_context(client: Client) -> None:
    """C26: a prompt that fills the context is refused with the number; others of the batch are not affected."""
    sampler = client.base_sampler()
    fine = sample(sampler, PROMPT)
    with refused("256"):
        sample(sampler, [65] * 256).result()
    assert len(fine.result().sequences) == 1
    open_end = sample(sampler, [65] * 250, max_tokens=None).result().sequences[0]
    assert 1 <= len(open_end.tokens) <= 6 and open_end.stop_reason == "length"


def probe_bad_sampling_settings(client: Client) -> None:
    sampler = client.base_sampler()
    for options in ({"max_tokens": 0}, {"max_tokens": -3}, {"temperature": -1.0}, {"top_p": 1.5}, {"top_p": -0.1}):
        name = next(iter(options))
        with refused(name):
            sample(sampler, PROMPT, **options).result()
    with refused("num_samples"):
        sample(sampler, PROMPT, num_samples=0).result()
    assert len(drawn(sampler).tokens) == 8


def probe_compute_logprobs(client: Client) -> None:
    """As many as the prompt has tokens, None first; the base model's and an adapter's, as the trainer sees them."""
    trainer = client.trainer()
    train(trainer)
    for text in TEXTS:
        got = scored(snapshot(trainer), text)
        assert len(got) == len(text) and got[0] is None and None not in got[1:]
        close_to(got[1:], forward(trainer, [datum(text)])[0], 1e-3)
    assert scored(client.base_sampler(), [65]) == [None]


def probe_topk_prompt_logprobs(client: Client) -> None:
    """k a position, likeliest first, none at position 0; the prompt's own token as in prompt_logprobs."""
    result = full_sample(client.base_sampler(), PROMPT, include_prompt_logprobs=True, topk_prompt_logprobs=5)
    top = result.topk_prompt_logprobs
    assert len(top) == len(PROMPT) and not top[0]
    for i in range(1, len(PROMPT)):
        row = dict(top[i])
        ranked = [lp for _, lp in top[i]]
        assert len(row) == 5 and ranked == sorted(ranked, reverse=True)
        own = result.prompt_logprobs[i]
        if PROMPT[i] in row:
            close_to(row[PROMPT[i]], own, 1e-4)
        else:
            assert own <= ranked[-1] + 1e-5


@since("0.36")
def probe_topk_sample_logprobs(client: Client) -> None:
    result = full_sample(client.base_sampler(), PROMPT, topk_sample_logprobs=4, params={"max_tokens": 6})
    sequence = result.sequences[0]
    assert len(sequence.topk_logprobs) == 6
    for token, logprob, row in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert len(row) == 4
        ranked = [lp for _, lp in row]
        assert ranked == sorted(ranked, reverse=True)
        if token in dict(row):
            close_to(dict(row)[token], logprob, 1e-4)


@since("0.38")
def probe_target_prompt_logprobs(client: Client) -> None:
    """Log-probs of chosen tokens at each position; -1 asks for none and gets 0."""
    sampler = client.base_sampler()
    n = len(PROMPT)
    targets = np.full((n - 1, 3), -1)
    targets[:, 0] = PROMPT[1:]
    targets[: n // 2, 1] = 70
    result = full_sample(sampler, PROMPT, target_prompt_logprobs=tensor(targets, "int64"))
    got = np.array(result.target_prompt_logprobs.data).reshape(n - 1, 3)
    close_to(got[:, 0], scored(sampler, PROMPT)[1:], 1e-4)
    assert np.all(got[: n // 2, 1] < 0)
    equal(got[targets == -1], np.zeros((targets == -1).sum()))


@since("0.38")
def probe_prompt_alt_tokens(client: Client) -> None:
    result = full_sample(client.base_sampler(), PROMPT, prompt_alt_tokens_k=3)
    alt = result.prompt_alt_tokens
    tokens, logprobs = np.array(alt.tokens.data), np.array(alt.logprobs.data)
    assert tokens.shape == logprobs.shape == ((len(PROMPT) - 1) * 3,)
    assert tokens.min() >= 0 and tokens.max() <= EOS and np.all(logprobs <= 0) and len(set(tokens.tolist())) > 5


@since("0.38")
def probe_prompt_logprobs_of_the_last_n(client: Client) -> None:
    sampler = client.base_sampler()
    result = full_sample(sampler, PROMPT, include_prompt_logprobs=True, prompt_logprobs_last_n=4)
    got = result.prompt_logprobs
    assert len(got) == len(PROMPT) and all(lp is None for lp in got[:-4])
    close_to(got[-4:], scored(sampler, PROMPT)[-4:], 1e-4)


def probe_logprobs_are_of_the_tempered_distribution(client: Client) -> None:
    """C21, as the hosted service: at temperature t log-probs are of softmax(logits / t)."""
    sampler = client.base_sampler()
    probe = full_sample(sampler, [*PROMPT, 65], include_prompt_logprobs=True, topk_prompt_logprobs=32)
    known = dict(probe.topk_prompt_logprobs[-1])
    for temperature in (0.5, 2.0):
        sequences = (
            sample(sampler, PROMPT, num_samples=64, max_tokens=1, temperature=temperature, seed=1).result().sequences
        )
        got = {s.tokens[0]: s.logprobs[0] for s in sequences if s.tokens[0] in known}
        assert len(got) >= 2, "too few of the likeliest tokens were drawn"
        first, *rest = got
        for token in rest:
            gap = (known[token] - known[first]) / temperature
            close_to(got[token] - got[first], gap, 2e-3)


def probe_top_k_and_top_p_mixed(client: Client) -> None:
    """Requests with different filters in one batch each keep their own."""
    sampler = client.base_sampler()
    likeliest = full_sample(sampler, [*PROMPT, 65], include_prompt_logprobs=True, topk_prompt_logprobs=3)
    top = [token for token, _ in likeliest.topk_prompt_logprobs[-1]]
    futures = [
        (sample(sampler, PROMPT, num_samples=16, max_tokens=1, seed=1, top_k=1), set(top[:1])),
        (sample(sampler, PROMPT, num_samples=16, max_tokens=1, seed=1, top_k=3), set(top)),
        (sample(sampler, PROMPT, num_samples=16, max_tokens=1, seed=1, top_p=1e-6), set(top[:1])),
        (sample(sampler, PROMPT, num_samples=16, max_tokens=1, seed=1), None),
    ]
    for future, allowed in futures:
        tokens = {s.tokens[0] for s in future.result().sequences}
        assert tokens <= allowed if allowed is not None else len(tokens) > 3, (tokens, allowed)


def probe_snapshots_are_immutable(client: Client) -> None:
    """A sampler made at step n samples step n's policy for ever; sampling from it leaves training alone."""
    trainer = client.trainer()
    train(trainer)
    old = snapshot(trainer)
    before = scored(old, PROMPT)[1:]
    train(trainer)
    new = snapshot(trainer)
    after = scored(new, PROMPT)[1:]
    assert np.max(np.abs(np.array(before) - np.array(after))) > 1e-3, "training changed nothing"
    live = fingerprint(trainer)
    for _ in range(2):
        equal(scored(old, PROMPT)[1:], before)
        equal(scored(new, PROMPT)[1:], after)
    drawn(old, max_tokens=20)
    equal(fingerprint(trainer), live)
    close_to(after, forward(trainer, [datum(PROMPT)])[0], 1e-3)


@since("0.36")
def probe_inflight_samplers_follow(client: Client) -> None:
    """kind="inflight": a new save reaches the sampler that was made before."""
    trainer = client.trainer()
    train(trainer)
    sampler = settled(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    before = scored(sampler, PROMPT)[1:]
    train(trainer)
    settled(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    after = scored(sampler, PROMPT)[1:]
    assert np.max(np.abs(np.array(before) - np.array(after))) > 1e-3, f"the same weights: {before} {after}"
    close_to(after, forward(trainer, [datum(PROMPT)])[0], 1e-3)


def probe_new_weights_are_not_served_from_an_old_cache(client: Client) -> None:
    """C28: the same prompt before and after an update, through named samplers."""
    trainer = client.trainer()
    for name in ("a", "b"):
        train(trainer)
        path = trainer.save_weights_for_sampler(name).result().path
        sampler = trainer.create_sampling_client(path)
        drawn(sampler)
        close_to(scored(sampler, PROMPT)[1:], forward(trainer, [datum(PROMPT)])[0], 1e-3)


def probe_a_short_request_does_not_wait_for_a_long_one(client: Client) -> None:
    sampler = client.base_sampler()
    sample(sampler, PROMPT, num_samples=8, max_tokens=8).result()
    long = [sample(sampler, text, num_samples=4, max_tokens=220) for text in TEXTS]
    time.sleep(0.05)
    started = time.perf_counter()
    sample(sampler, PROMPT, max_tokens=2).result()
    waited = time.perf_counter() - started
    unfinished = sum(not future.done() for future in long)
    for future in long:
        future.result()
    total = time.perf_counter() - started
    assert unfinished or waited < 0.5 * total or total < 1.0, f"the short one took {waited:.2f} of {total:.2f} s"


def probe_staggered_requests(client: Client) -> None:
    """Requests that arrive one by one, of ragged lengths, all come back whole and in their own order."""
    sampler = client.base_sampler()
    futures = []
    for i in range(16):
        futures.append((i, sample(sampler, TEXTS[i % 4], num_samples=1 + i % 4, max_tokens=4 + 3 * i, seed=i)))
        time.sleep(0.02)
    for i, future in futures:
        sequences = future.result().sequences
        assert [len(s.tokens) for s in sequences] == [4 + 3 * i] * (1 + i % 4)


def probe_many_concurrent_samples(client: Client) -> None:
    """512 futures at once: none is lost."""
    sampler = client.base_sampler()
    futures = [sample(sampler, PROMPT, max_tokens=4, seed=i) for i in range(512)]
    answers = [tuple(future.result(timeout=120).sequences[0].tokens) for future in futures]
    assert len(answers) == 512 and len(set(answers)) > 400


@since("0.26")
def probe_sequence_ids(client: Client) -> None:
    """One id a sample, all different."""
    sampler = client.base_sampler()
    results = [sample(sampler, PROMPT, num_samples=3).result() for _ in range(2)]
    ids = [s.sequence_id for result in results for s in result.sequences]
    assert len(set(ids)) == 6 and all(ids)


@since("0.25")
def probe_pickled_client(client: Client) -> None:
    """A sampling client sent to another worker goes on under sequence numbers of its own."""
    sampler = client.base_sampler()
    drawn(sampler)
    clone = pickle.loads(pickle.dumps(sampler))
    assert len(drawn(clone).tokens) == 8
    assert len(drawn(sampler).tokens) == 8


def probe_base_model_of_a_path(client: Client) -> None:
    """A sampler made of a path alone knows its base model."""
    trainer = client.trainer()
    path = trainer.save_weights_for_sampler("for-a-path").result().path
    sampler = client.service().create_sampling_client(model_path=path)
    assert len(drawn(sampler).tokens) == 8
    assert sampler.get_base_model() == client.base_model
    assert sampler.get_tokenizer().decode(TEXTS[0]) == spelled(TEXTS[0])


@since("0.25")  # 0.16 sends chunks without their type
def probe_images_are_refused(client: Client) -> None:
    sampler = client.base_sampler()
    prompt = types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=4)])
    with refused("image"):
        sampler.sample(prompt=prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()
