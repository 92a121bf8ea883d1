"""OpenAI's completions and chat completions: the answers, whole or streamed, out of what was sampled.

A stop (EOS, a stop string) ends a completion and is part of its tokens and log-probs, but not of the text shown.
Source of the shapes: OpenAI's API reference, "Completions (legacy)" and "Chat Completions".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from locojax.hosts.protocol import Sample, Sampled
from locojax.server.openai_requests import ChatTokenizer, Plan
from locojax.types import Completion


def visible(text: str, tokens: Sequence[int], stops: Sequence[str], tokenizer: ChatTokenizer) -> tuple[str, bool]:
    """What a reader sees of a finished completion, and whether a stop ended it: stops are in `text`, but not shown."""
    if tokens and tokens[-1] in tokenizer.eos_ids:
        ending = tokenizer.decode([tokens[-1]])
        return (text[: -len(ending)] if ending and text.endswith(ending) else text), True
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


class StreamedText:
    """Text of one sample as it comes: shows what can't any more turn out to be the beginning of a stop.

    Example: `shown = text.add(tokens.text, tokens.tokens, tokens.finished)`
    """

    def __init__(self, stops: Sequence[str], tokenizer: ChatTokenizer):
        self._stops, self._tokenizer = tuple(stops), tokenizer
        self._text = ""
        self._shown = 0
        self.stopped = False
        self.num_scored = 0  # characters that log-probs have been told of

    def add(self, text: str, tokens: Sequence[int], finished: bool) -> str:
        """The text that may be shown now."""
        self._text += text
        if finished:
            whole, self.stopped = visible(self._text, tokens, self._stops, self._tokenizer)
            end = len(whole)
        else:
            end = len(self._text) - self._held_back()
        new = self._text[self._shown : max(end, self._shown)]
        self._shown += len(new)
        return new

    def _held_back(self) -> int:
        """The longest ending of the text that a stop begins with."""
        lengths = itertools.chain.from_iterable(range(len(stop) - 1, 0, -1) for stop in self._stops)
        fitting = (n for n in lengths if any(self._text.endswith(stop[:n]) for stop in self._stops if len(stop) > n))
        return max(fitting, default=0)


def response(plan: Plan, results: Sequence[Sampled], tokenizer: ChatTokenizer, id: str, created: int) -> dict[str, Any]:
    """The JSON of a whole answer: choices in the order of prompts, then of samples."""
    choices = itertools.chain.from_iterable(
        response_choices(plan, prompt, sampled, tokenizer) for prompt, sampled in enumerate(results)
    )
    numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
    return {
        "id": id,
        "object": plan.kind,
        "created": created,
        "model": plan.model,
        "choices": numbered,
        "usage": usage(plan, [[len(completion.tokens) for completion in sampled.completions] for sampled in results]),
    }


def response_choices(plan: Plan, prompt: int, sampled: Sampled, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    """The choices of prompt number `prompt`, without their index."""
    sample = plan.samples[prompt]
    return [_choice(plan, sample, sampled, completion, tokenizer) for completion in sampled.completions]


def usage(plan: Plan, sampled_tokens: Sequence[Sequence[int]]) -> dict[str, int]:
    """Token counts: each prompt once, every completion, the token that stopped it included."""
    prompt = sum(len(sample.prompt) for sample in plan.samples)
    completion = 0 if plan.drop_sampled else sum(map(sum, sampled_tokens))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _choice(
    plan: Plan, sample: Sample, sampled: Sampled, completion: Completion, tokenizer: ChatTokenizer
) -> dict[str, Any]:
    text, stopped = visible(completion.text, completion.tokens, plan.stops, tokenizer)
    reason = "stop" if stopped or completion.stop_reason == "stop" else "length"
    top = sampled.topk_sample_logprobs
    scored = _Scored.of(completion, None if top is None else top[completion.sample_index])
    if plan.kind == "chat.completion":
        message = {"role": "assistant", "content": text}
        logprobs = None if plan.num_top is None else {"content": scored.for_chat(tokenizer)}
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}
    if plan.drop_sampled:
        text, scored, reason = "", _Scored((), (), None), "length"
    if plan.echo:
        text = tokenizer.decode(sample.prompt) + text
        scored = _Scored.of_prompt(sample, sampled).then(scored)
    logprobs = None if plan.num_top is None else scored.for_completion(tokenizer, plan.num_top)
    return {"text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclasses.dataclass(frozen=True)
class _Scored:
    """Tokens with their log-probs (None: nothing predicts it), and the likeliest ones at each place."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[tuple[tuple[int, float], ...], ...] | None

    @classmethod
    def of(cls, completion: Completion, top: tuple[np.ndarray, np.ndarray] | None) -> _Scored:
        return cls(completion.tokens, _numbers(completion.logprobs), None if top is None else _pairs(*top))

    @classmethod
    def of_prompt(cls, sample: Sample, sampled: Sampled) -> _Scored:
        scores = sampled.prompt_logprobs
        logprobs = (None,) * len(sample.prompt) if scores is None else _numbers(scores)
        top = sampled.topk_prompt_logprobs
        return cls(sample.prompt, logprobs, None if top is None else ((), *_pairs(top[0][1:], top[1][1:])))

    def then(self, other: _Scored) -> _Scored:
        top = None if self.top is None and other.top is None else (*self._tops(), *other._tops())
        return _Scored(self.tokens + other.tokens, self.logprobs + other.logprobs, top)

    def _tops(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        return ((),) * len(self.tokens) if self.top is None else self.top

    def for_completion(self, tokenizer: ChatTokenizer, num_top: int, start: int = 0) -> dict[str, Any]:
        """`start`: where in the choice's text these tokens begin."""
        words = [_word(token, tokenizer) for token in self.tokens]
        offsets = itertools.accumulate(map(len, words), initial=start)
        tops = [
            None if logprob is None else _by_word(top, tokenizer)
            for logprob, top in zip(self.logprobs, self._tops(), strict=True)
        ]
        return {
            "tokens": words,
            "token_logprobs": list(self.logprobs),
            "top_logprobs": tops if num_top else None,
            "text_offset": list(offsets)[:-1],
        }

    def for_chat(self, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            data = tokenizer.token_bytes(token)
            return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

        return [
            {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token, logprob, top in zip(self.tokens, self.logprobs, self._tops(), strict=True)
        ]


def _by_word(top: Sequence[tuple[int, float]], tokenizer: ChatTokenizer) -> dict[str, float]:
    """Log-probs by text, likeliest first; of tokens that read alike (parts of a character) the likeliest one's."""
    found: dict[str, float] = {}
    for token, logprob in top:
        found.setdefault(_word(token, tokenizer), logprob)
    return found


def _word(token: int, tokenizer: ChatTokenizer) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _numbers(logprobs: np.ndarray) -> tuple[float | None, ...]:
    return tuple(float(value) if np.isfinite(value) else None for value in logprobs)


def _pairs(ids: np.ndarray, logprobs: np.ndarray) -> tuple[tuple[tuple[int, float], ...], ...]:
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return tuple(tuple(zip(row, values, strict=True)) for row, values in rows)


def chunk(
    plan: Plan, id: str, created: int, index: int, text: str, scored: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    """One event of a streamed answer, about choice `index`."""
    if plan.kind == "chat.completion":
        choice: dict[str, Any] = {"index": index, "delta": {"content": text} if text or not reason else {}}
    else:
        choice = {"index": index, "text": text}
    choice |= {"logprobs": scored, "finish_reason": reason}
    return {"id": id, "object": _chunk_kind(plan), "created": created, "model": plan.model, "choices": [choice]}


def first_chunk(plan: Plan, id: str, created: int, index: int) -> dict[str, Any]:
    """A chat's stream begins by saying whose turn it is."""
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return {"id": id, "object": _chunk_kind(plan), "created": created, "model": plan.model, "choices": [choice]}


def whole_chunks(
    plan: Plan, id: str, created: int, prompt: int, sampled: Sampled, tokenizer: ChatTokenizer
) -> list[dict[str, Any]]:
    """The events of what can't be streamed token by token: all of a choice in one."""
    events: list[dict[str, Any]] = []
    first = prompt * plan.samples[prompt].num_samples
    for index, choice in enumerate(response_choices(plan, prompt, sampled, tokenizer), first):
        text = choice["text"] if plan.kind == "text_completion" else choice["message"]["content"]
        if plan.kind == "chat.completion":
            events.append(first_chunk(plan, id, created, index))
        events.append(chunk(plan, id, created, index, text, choice["logprobs"], choice["finish_reason"]))
    return events


def usage_chunk(plan: Plan, id: str, created: int, sampled_tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The last event, when stream_options asks for it."""
    head = {"id": id, "object": _chunk_kind(plan), "created": created, "model": plan.model, "choices": []}
    return {**head, "usage": usage(plan, sampled_tokens)}


def _chunk_kind(plan: Plan) -> str:
    return "chat.completion.chunk" if plan.kind == "chat.completion" else plan.kind


def streamed_logprobs(
    plan: Plan, tokens: tuple[int, ...], logprobs: np.ndarray, text: StreamedText, tokenizer: ChatTokenizer
) -> dict[str, Any] | None:
    """Log-probs of newly streamed tokens of the sample whose text is `text`.

    Who asks for the likeliest others gets each choice in one piece; see `whole_chunks`.
    """
    if plan.num_top is None:
        return None
    scored = _Scored(tokens, _numbers(logprobs), None)
    if plan.kind == "chat.completion":
        return {"content": scored.for_chat(tokenizer)}
    found = scored.for_completion(tokenizer, 0, start=text.num_scored)
    text.num_scored += sum(map(len, found["tokens"]))
    return found


def error_body(message: str, status: int) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
