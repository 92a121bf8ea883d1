"""The OpenAI dialect as functions: what a request asks for, and the answer made of what was sampled."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import EOS, tiny_tokenizer

from locojax.hosts.protocol import Sampled
from locojax.server import openai, requests
from locojax.server.openai_requests import ChatRequest, CompletionRequest, plan_chat, plan_completion
from locojax.server.wire_errors import WireError
from locojax.types import Completion

TOKENIZER = tiny_tokenizer()
(EOS_ID,) = TOKENIZER.eos_ids


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def completion(text: str, reason: str = "length", index: int = 0) -> Completion:
    tokens = ids(text)
    return Completion(index, tokens, -np.arange(1, len(tokens) + 1, dtype=np.float32), text, reason, None, 0)


def complete(body: dict[str, object]) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", **body})


def test_a_plain_completion():
    plan = plan_completion(complete({"prompt": "ab", "max_tokens": 3, "stop": "\n", "seed": 5, "n": 2}), TOKENIZER)
    (sample,) = plan.samples
    assert sample.prompt == ids("ab") and sample.num_samples == 2 and not sample.stream
    assert (sample.params.max_tokens, sample.params.stop, sample.params.seed) == (3, ("\n",), 5)
    assert (plan.base_model, plan.model_path) == ("tiny", None)
    answer = openai.response(
        plan, [Sampled((completion("xy\n", "stop"), completion("xyz", index=1)))], TOKENIZER, "cmpl-1", 7
    )
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "xy", "stop"),
        (1, "xyz", "length"),
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert (answer["object"], answer["id"], answer["created"]) == ("text_completion", "cmpl-1", 7)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
def test_every_form_of_a_prompt(prompt, expected):
    assert [s.prompt for s in plan_completion(complete({"prompt": prompt}), TOKENIZER).samples] == expected


@pytest.mark.parametrize(
    ("model", "base", "path"),
    [
        ("org/name", "org/name", None),
        ("tinker://s:train:0/sampler_weights/a", None, "tinker://s:train:0/sampler_weights/a"),
        ("org/name;tinker://s:train:0/sampler_weights/a", None, "tinker://s:train:0/sampler_weights/a"),
    ],
)
def test_what_model_names(model, base, path):
    plan = plan_completion(complete({"model": model, "prompt": "a"}), TOKENIZER)
    assert (plan.base_model, plan.model_path) == (base, path)


def test_stops_are_not_shown():
    show = openai.visible
    assert show("ab" + EOS, (*ids("ab"), EOS_ID), (), TOKENIZER) == ("ab", True)
    assert show("ab", ids("ab"), ("x",), TOKENIZER) == ("ab", False)
    assert show("abxyc", ids("abxyc"), ("xy", "by"), TOKENIZER) == ("ab", True)


def test_streamed_text_never_shows_the_beginning_of_a_stop():
    for whole, stops, expected in [
        ("one</s>", ["</s>"], "one"),
        ("a<b</x", ["</s>"], "a<b</x"),
        ("aab", ["ab"], "a"),
        ("abcabd", ["abd"], "abc"),
    ]:
        text = openai.StreamedText(stops, TOKENIZER)
        pieces = [text.add(letter, ids(letter), i == len(whole) - 1) for i, letter in enumerate(whole)]
        assert "".join(pieces) == expected, whole
        for end in range(1, len(pieces)):
            assert expected.startswith("".join(pieces[:end]))
        assert text.stopped == (expected != whole)


def test_logprobs_of_a_completion():
    plan = plan_completion(complete({"prompt": "ab", "logprobs": 2}), TOKENIZER)
    assert plan.samples[0].topk_sample_logprobs == 2 and not plan.samples[0].prompt_logprobs
    top = (np.array([[ids("x")[0], ids("q")[0]]]), np.array([[-1.0, -2.0]], np.float32))
    answer = openai.response(plan, [Sampled((completion("x"),), topk_sample_logprobs=(top,))], TOKENIZER, "i", 0)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["x"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"x": -1.0, "q": -2.0}],
        "text_offset": [0],
    }


def test_of_tokens_that_read_alike_the_likeliest_is_shown():
    plan = plan_completion(complete({"prompt": "ab", "logprobs": 3}), TOKENIZER)
    x = ids("x")[0]
    one, other = [id for id in range(256) if TOKENIZER.token_bytes(id)[0] >= 0x80][:2]
    top = (np.array([[one, x, other]]), np.array([[-0.5, -1.0, -2.0]], np.float32))  # halves of a character
    answer = openai.response(plan, [Sampled((completion("x"),), topk_sample_logprobs=(top,))], TOKENIZER, "i", 0)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "x": -1.0}]


def test_echo_scores_the_prompt_alone_when_no_tokens_are_wanted():
    plan = plan_completion(complete({"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 0}), TOKENIZER)
    (sample,) = plan.samples
    assert sample.prompt_logprobs and sample.topk_prompt_logprobs == 1 and sample.params.max_tokens == 1
    sampled = Sampled(
        (completion("z"),),
        prompt_logprobs=np.array([np.nan, -0.5], np.float32),
        topk_prompt_logprobs=(np.array([[0], [ids("b")[0]]]), np.array([[-99999.0], [-0.5]], np.float32)),
        topk_sample_logprobs=((np.array([[0]]), np.array([[-9.0]], np.float32)),),
    )
    answer = openai.response(plan, [sampled], TOKENIZER, "i", 0)
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_chat():
    body = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    plan = plan_chat(ChatRequest.model_validate({**body, "logprobs": True, "top_logprobs": 1}), TOKENIZER)
    (sample,) = plan.samples
    assert sample.prompt == ids("hi") and sample.topk_sample_logprobs == 1 and sample.params.max_tokens is None
    top = (np.array([[ids("x")[0]]]), np.array([[-1.0]], np.float32))
    answer = openai.response(plan, [Sampled((completion("x"),), topk_sample_logprobs=(top,))], TOKENIZER, "i", 0)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "x"}
    one = {"token": "x", "logprob": -1.0, "bytes": [ord("x")]}
    assert choice["logprobs"] == {"content": [{**one, "top_logprobs": [one]}]}
    assert answer["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (CompletionRequest, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias are not implemented"),
        (CompletionRequest, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty and"),
        (CompletionRequest, {"prompt": "a", "suffix": "x"}, "suffix is not implemented"),
        (CompletionRequest, {"prompt": "a", "top_p": 0}, "top_p: Input should be greater than 0"),
        (ChatRequest, {"messages": []}, "messages: "),
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools are not implemented"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "content of type 'image_url' is not implemented",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(kind, body, says):
    with pytest.raises(WireError, match=says) as caught:
        requests.parse(kind, json.dumps({"model": "tiny", **body}).encode())
    assert caught.value.status == 422


def test_too_much_at_once_is_refused():
    with pytest.raises(WireError, match="too many completions. Got: 3 prompts x 1000. Expected: at most 1024"):
        plan_completion(complete({"prompt": ["a", "b", "c"], "n": 1000}), TOKENIZER)
    with pytest.raises(WireError, match="prompt is empty"):
        plan_completion(complete({"prompt": ["a", ""]}), TOKENIZER)
