"""Samples that were begun elsewhere go on from what was sampled of them, to the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from rollout_models import EOS, SPEC, VOCAB, Bytes, prompts, weights

from locojax.errors import RequestError
from locojax.rollout.engine import Engine
from locojax.rollout.request import Begun
from locojax.rollout.settings import EngineSettings
from locojax.types import SampleRequest, SamplingParams

REQUESTS = [
    SampleRequest(f"r{n}", prompt, SamplingParams(20 + n, stop=stop, seed=n), num_samples=3)
    for n, (prompt, stop) in enumerate(zip(prompts(4, seed=1), [(), (EOS,), ("a", "q"), (7, 8, 9)], strict=True))
]


def engine(**settings):
    few = EngineSettings(max_slots=8, min_rows=8, max_iterations=4, kv_bytes=1 << 22, **settings)
    made = Engine(SPEC, few, Bytes())
    made.load(weights(), version=3)
    return made


def whole():
    return {result.request_id: result.completions for result in engine().generate(REQUESTS)}


def check(made, expected):
    found = {}
    while made.num_unfinished:
        found |= {result.request_id: result.completions for result in made.step()}
    assert found.keys() == expected.keys()
    for name, completions in expected.items():
        for ours, theirs in zip(found[name], completions, strict=True):
            assert (ours.tokens, ours.text) == (theirs.tokens, theirs.text)
            assert (ours.stop_reason, ours.stopped_by) == (theirs.stop_reason, theirs.stopped_by)
            assert ours.policy_version == 3
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"layout": "paged", "page_size": 4}])
def test_what_is_told_while_it_runs_is_enough_to_go_on_from(settings):
    expected, first = whole(), engine(**settings)
    for request in REQUESTS:
        first.add(request)
    kept: dict[str, dict[int, Begun]] = {request.request_id: {} for request in REQUESTS}
    done = {}
    for _ in range(4):
        done |= {result.request_id: result for result in first.step()}
        for gained in first.gained():
            parts, new = kept[gained.request_id], gained.begun
            old = parts.get(gained.sample_index, Begun((), (), 3))
            assert gained.start == len(old.tokens)
            parts[gained.sample_index] = Begun(old.tokens + new.tokens, old.logprobs + new.logprobs, 3)
    assert first.gained() == []
    num_kept = sum(len(part.tokens) for parts in kept.values() for part in parts.values())
    assert num_kept > 50 and len(done) < len(REQUESTS)
    second = engine(**settings)
    for request in REQUESTS:
        second.add(request, begun=kept[request.request_id])
    check(second, expected)
    num_whole = sum(len(each.tokens) for completions in expected.values() for each in completions)
    assert second.stats().num_tokens == num_whole - num_kept


def test_one_that_had_ended_is_not_sampled_again():
    expected = whole()
    made = engine()
    for request in REQUESTS:
        parts = {each.sample_index: Begun(each.tokens, tuple(each.logprobs.tolist()), 3)
                 for each in expected[request.request_id]}
        made.add(request, begun=parts)
    check(made, expected)
    assert made.stats().num_tokens == 0


def test_likeliest_tokens_can_not_be_gone_on_with():
    request = SampleRequest("r", (5,), SamplingParams(4), topk_sample_logprobs=2)
    made = engine()
    with pytest.raises(RequestError, match="'r' asks for likeliest tokens, which begun samples lack"):
        made.add(request, begun={0: Begun((VOCAB - 1,), (-1.0,), 3)})
    assert not made.num_unfinished
