"""What the rollout engine refuses, and that others run on."""

import dataclasses

import numpy as np
import pytest
from rollout_models import SPEC, Bytes
from test_rollout_engine import (
    BYTES_PER_TOKEN,
    SMALL,
    engine,
    request,
    run_to_end,
)

from locojax.errors import RequestError
from locojax.rollout.engine import Engine
from locojax.types import SampleRequest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "Request 'bad': the prompt is empty. Got: 0 tokens. Expected: at least 1 token."),
        ({"prompt": (3, 97)}, "Request 'bad': the prompt has a token outside of the vocabulary. Got: 97."
         " Expected: ids in [0, 97)."),
        ({"num_samples": 0}, "Request 'bad': num_samples is out of range. Got: 0. Expected: 1 to 65536."),
        ({"max_tokens": 0}, "Request 'bad': max_tokens is out of range. Got: 0."
         " Expected: at least 1, or none for the rest of the context."),
        ({"temperature": -1.0}, "Request 'bad': temperature is out of range. Got: -1.0. Expected: 0 or more."),
        ({"temperature": float("nan")}, "Request 'bad': temperature is out of range. Got: nan. Expected: 0 or more."),
        ({"top_p": 0.0}, "Request 'bad': top_p is out of range. Got: 0.0. Expected: above 0, at most 1."),
        ({"top_k": -2}, "Request 'bad': top_k is out of range. Got: -2. Expected: at least 1, or -1 for no limit."),
        ({"min_p": 1.0}, "Request 'bad': min_p is out of range. Got: 1.0. Expected: 0 or more, below 1."),
        ({"adapter": 1}, "Request 'bad': no such adapter is loaded. Got: 1. Expected: 0 (none) to 0."),
        ({"stop": ("",)}, "Request 'bad': a stop is malformed. Got: ''."
         " Expected: non-empty strings, or token ids in [0, 97)."),
        ({"topk_prompt_logprobs": 98}, "Request 'bad': topk_prompt_logprobs is out of range. Got: 98."
         " Expected: 0 to 97."),
        ({"topk_sample_logprobs": -1}, "Request 'bad': topk_sample_logprobs is out of range. Got: -1."
         " Expected: 0 to 97."),
        ({"prompt_logprobs_last_n": -1}, "Request 'bad': prompt_logprobs_last_n is out of range. Got: -1."
         " Expected: 0 or more, or none for all."),
        ({"target_prompt_logprobs": np.zeros((2, 1), np.int64)}, "Request 'bad': target_prompt_logprobs has the wrong"
         " shape. Got: [2, 1]. Expected: [1, 1 to 97], a row for each prompt token but the first."),
        ({"target_prompt_logprobs": np.full((1, 1), 97)}, "Request 'bad': target_prompt_logprobs has a token outside of"
         " the vocabulary. Got: [97]. Expected: ids in [0, 97), or -1 for none."),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused_and_others_run(change, message):
    good, made = request("good", (4, 5)), engine()
    bad = dataclasses.replace(good, request_id="bad")
    for name, value in change.items():
        if name in {field.name for field in dataclasses.fields(SampleRequest)}:
            bad = dataclasses.replace(bad, **{name: value})
        else:
            bad = dataclasses.replace(bad, params=dataclasses.replace(bad.params, **{name: value}))
    made.add(good)
    with pytest.raises(RequestError) as error:
        made.add(bad)
    assert str(error.value) == message
    assert [r.request_id for r in run_to_end(made)] == ["good"]


def test_an_engine_says_what_it_lacks():
    empty = Engine(SPEC, SMALL, Bytes())
    empty.add(request("a", (4, 5)))
    with pytest.raises(RequestError, match="^The engine has no weights. Call load first.$"):
        empty.step()
    with pytest.raises(RequestError, match="^Request 'a' is already running. Use another request_id.$"):
        empty.add(request("a", (4, 5)))
    tight = engine(dataclasses.replace(SMALL, kv_bytes=100 * BYTES_PER_TOKEN))
    with pytest.raises(RequestError, match="Request 'a': 60 prompt tokens and up to 60 new ones don't fit"):
        tight.add(request("a", [2] * 60, max_tokens=60))


def test_a_request_that_never_fits_is_refused_at_once_and_others_run():
    made = engine(dataclasses.replace(SMALL, kv_bytes=128 * BYTES_PER_TOKEN), share=False)
    with pytest.raises(RequestError) as error:
        made.add(request("big", (5,) * 30, max_tokens=60))
    assert str(error.value) == (
        "Request 'big': 30 prompt tokens and up to 60 new ones don't fit in the KV memory."
        f" Got: kv_bytes={128 * BYTES_PER_TOKEN}. Lower max_tokens or raise the engine's kv_bytes."
    )
    made.add(request("small", (5,) * 8, max_tokens=4, stop=()))
    assert len(run_to_end(made)[0].completions[0].tokens) == 4
