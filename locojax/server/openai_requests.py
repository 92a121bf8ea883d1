"""OpenAI's completions and chat completions: their requests, and the samples that answer them.

Existing evaluation tools speak this dialect, so they can look at any checkpoint: `model` is the base model's name or a
`tinker://.../sampler_weights/...` path. What is not implemented is refused by name, never ignored.
Source of the shapes: OpenAI's API reference, "Completions (legacy)" and "Chat Completions".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import pydantic
from pydantic import Field

from locojax.hosts.protocol import Sample
from locojax.server.requests import Request, Text
from locojax.server.wire_errors import WireError
from locojax.types import SamplingParams

MAX_OPENAI_BYTES = 16 << 20
MAX_SAMPLES = 1024  # over all prompts of one request
_TINKER = "tinker://"

Stop = Annotated[str, Field(max_length=1024)] | Annotated[list[Text], Field(max_length=16)] | None


class ChatTokenizer(Protocol):
    """What these endpoints need of `models.tokenizer.Tokenizer`."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str: ...

    def token_bytes(self, id: int) -> bytes: ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]: ...


class StreamOptions(Request):
    include_usage: bool = False


class _Sampling(Request):
    """What both endpoints share. `top_k` and `min_p` are extensions that other servers have too."""

    model: Text
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31, strict=True)] = -1
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES, strict=True)] = 1
    stop: Stop = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, strict=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None

    @pydantic.model_validator(mode="after")
    def _is_implemented(self) -> _Sampling:
        if self.presence_penalty or self.frequency_penalty or self.logit_bias:
            raise ValueError("presence_penalty, frequency_penalty and logit_bias are not implemented: leave them out")
        return self

    def params(self, max_tokens: int | None) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=tuple(text for text in stop if text) or None,
            seed=self.seed,
        )


class CompletionRequest(_Sampling):
    """POST /v1/completions. `echo` with `logprobs` scores the prompt: what log-likelihood evaluations ask for."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31, strict=True)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @pydantic.model_validator(mode="after")
    def _is_implemented_here(self) -> CompletionRequest:
        if self.suffix:
            raise ValueError("suffix is not implemented: leave it out")
        if self.best_of not in (None, 1, self.n):
            raise ValueError("best_of is not implemented: leave it out")
        return self


class ContentPart(Request):
    type: str
    text: str = ""


class Message(Request):
    """Content in parts must be text: this server's models read nothing else."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None

    @pydantic.model_validator(mode="after")
    def _is_text(self) -> Message:
        for part in self.content if isinstance(self.content, list) else ():
            if part.type != "text":
                raise ValueError(f"content of type {part.type!r} is not implemented: this server's models read text")
        return self

    def for_template(self) -> dict[str, str]:
        """{"role", "content"}, parts joined."""
        parts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        return {"role": self.role, "content": "".join(parts)}


class ChatRequest(_Sampling):
    """POST /v1/chat/completions. `chat_template_kwargs` reach the model's template, e.g. {"enable_thinking": false}."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31, strict=True)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31, strict=True)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20, strict=True)] = 0
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @pydantic.model_validator(mode="after")
    def _is_implemented_here(self) -> ChatRequest:
        if self.tools:
            raise ValueError("tools are not implemented: leave them out")
        if (self.response_format or {}).get("type", "text") != "text":
            raise ValueError("response_format other than text is not implemented: leave it out")
        return self


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request, ready to be sampled. Filled by `plan_completion` and `plan_chat`.

    Attributes:
      kind: which dialect the answer is in.
      base_model, model_path: which sampler; one of the two.
      samples: one for each prompt.
      stops: strings whose text, and all behind it, is not shown.
      num_top: how many likeliest tokens to report with each token; None: no log-probs at all. The engine tells them
        with the whole sample only, so a stream that wants them has each choice in one piece.
      echo: show the prompt too.  drop_sampled: only the prompt was asked for (max_tokens 0).
    """

    kind: Literal["text_completion", "chat.completion"]
    model: str
    base_model: str | None
    model_path: str | None
    samples: tuple[Sample, ...]
    stops: tuple[str, ...]
    num_top: int | None
    echo: bool = False
    drop_sampled: bool = False


def plan_completion(request: CompletionRequest, tokenizer: ChatTokenizer) -> Plan:
    """Raises WireError for a prompt that can't be sampled from."""
    prompts = [_tokens(prompt, tokenizer) for prompt in _prompts(request.prompt)]
    _check_number(len(prompts), request.n)
    scored = request.echo and request.logprobs is not None
    params = request.params(None if request.max_tokens is None else max(request.max_tokens, 1))
    top = request.logprobs or 0
    samples = tuple(
        Sample(
            sampler_id="",
            prompt=prompt,
            params=params,
            num_samples=request.n,
            prompt_logprobs=scored,
            topk_prompt_logprobs=top if scored else 0,
            topk_sample_logprobs=top,
            stream=request.stream and not request.echo and not top,
        )
        for prompt in prompts
    )
    return _plan("text_completion", request, samples, request.logprobs, request.echo, request.max_tokens == 0)


def plan_chat(request: ChatRequest, tokenizer: ChatTokenizer) -> Plan:
    """Raises RequestError when the model has no chat template, or its template refuses the messages."""
    prompt = tokenizer.chat(
        [message.for_template() for message in request.messages],
        add_generation_prompt=True,
        **{key: value for key, value in request.chat_template_kwargs.items() if key not in _OWN_VARIABLES},
    )
    _check_number(1, request.n)
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    top = request.top_logprobs if request.logprobs else 0
    sample = Sample(
        sampler_id="",
        prompt=tuple(prompt),
        params=request.params(limit),
        num_samples=request.n,
        topk_sample_logprobs=top,
        stream=request.stream and not top,
    )
    return _plan("chat.completion", request, (sample,), request.top_logprobs if request.logprobs else None)


_OWN_VARIABLES = ("messages", "add_generation_prompt", "tools", "conversations", "chat_template")


def _plan(
    kind: Literal["text_completion", "chat.completion"],
    request: _Sampling,
    samples: tuple[Sample, ...],
    num_top: int | None,
    echo: bool = False,
    drop_sampled: bool = False,
) -> Plan:
    # The hosted service also writes "<base model>;<path>".
    base, _, path = request.model.rpartition(";") if _TINKER in request.model else (request.model, "", "")
    stop = samples[0].params.stop
    return Plan(
        kind,
        request.model,
        None if path else base,
        path or None,
        samples,
        tuple(text for text in (stop if isinstance(stop, tuple) else ()) if isinstance(text, str)),
        num_top,
        echo,
        drop_sampled,
    )


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [list(prompt)]  # type: ignore[arg-type]  # a list of ids is one prompt
    return list(prompt)  # type: ignore[arg-type]


def _tokens(prompt: str | list[int], tokenizer: ChatTokenizer) -> tuple[int, ...]:
    tokens = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if not tokens:
        raise WireError("prompt is empty", expected="at least one token", status=400)
    return tokens


def _check_number(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SAMPLES:
        raise WireError(
            "This request asks for too many completions",
            got=f"{num_prompts} prompts x {n}",
            expected=f"at most {MAX_SAMPLES}",
            remedy="Send it in parts",
        )
