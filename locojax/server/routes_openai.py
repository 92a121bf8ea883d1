"""Routes of the OpenAI dialect: `/v1/...` and, as the hosted service has them, `/oai/api/v1/...`."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from locojax.errors import LocoError
from locojax.hosts.protocol import Sampled, Tokens
from locojax.server import openai
from locojax.server.openai_requests import (
    MAX_OPENAI_BYTES,
    ChatRequest,
    ChatTokenizer,
    CompletionRequest,
    Plan,
    plan_chat,
    plan_completion,
)
from locojax.server.routes_base import Routes, Workers, answer, describe_body, to_json
from locojax.server.service import Service
from locojax.server.service_errors import ServiceError

_QUEUE_EVENTS = 1000  # of a stream whose reader is slow; then sampling's tokens wait in the service


class OpenAIRoutes(Routes):
    """`/v1/models`, `/v1/completions` and `/v1/chat/completions`.

    Args:
      load_tokenizer: reads the served model's tokenizer; called once, in a thread, by the first request that needs it.
    """

    def __init__(self, service: Service, workers: Workers, load_tokenizer: Callable[[], ChatTokenizer]):
        self._service = service
        self._workers = workers
        self._load = load_tokenizer
        self._loading = asyncio.Lock()
        self._tokenizer: ChatTokenizer | None = None

    def router(self) -> APIRouter:
        router = APIRouter()
        for prefix in ("/v1", "/oai/api/v1"):
            router.add_api_route(prefix + "/models", self.models, methods=["GET"])
            for path, function, body in (
                ("/completions", self.complete, CompletionRequest),
                ("/chat/completions", self.chat, ChatRequest),
            ):
                router.add_api_route(
                    prefix + path,
                    function,
                    methods=["POST"],
                    response_class=Response,
                    openapi_extra=describe_body(body),
                )
        return router

    async def models(self) -> Response:
        names = self._service.sampling.names()
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "locojax"} for name in names]
        return answer({"object": "list", "data": data})

    async def complete(self, request: Request) -> Response:
        body = await self._workers.parse(request, CompletionRequest, MAX_OPENAI_BYTES)
        tokenizer = await self._ready_tokenizer()
        return await self._sample(body, await self._workers.run(plan_completion, body, tokenizer), tokenizer)

    async def chat(self, request: Request) -> Response:
        body = await self._workers.parse(request, ChatRequest, MAX_OPENAI_BYTES)
        tokenizer = await self._ready_tokenizer()
        return await self._sample(body, await self._workers.run(plan_chat, body, tokenizer), tokenizer)

    async def _ready_tokenizer(self) -> ChatTokenizer:
        ready, health = self._service.health()
        if not ready:  # Tinker's clients wait for futures; these would wait for their answer with nothing to see
            raise ServiceError(503, "The model is not ready yet", got=health.get("doing"), remedy="Try again soon")
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await self._workers.run(self._load)
            return self._tokenizer

    async def _sample(self, body: CompletionRequest | ChatRequest, plan: Plan, tokenizer: ChatTokenizer) -> Response:
        id = ("chatcmpl-" if plan.kind == "chat.completion" else "cmpl-") + uuid.uuid4().hex
        created = int(time.time())
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            events = _Events(self._service, plan, tokenizer, id, created, include_usage)
            # The first event is awaited here: what is refused is still answered with its status.
            first = await anext(events, None)
            if first is None:
                raise ServiceError(400, "This request samples nothing")
            return StreamingResponse(_lines(first, events), media_type="text/event-stream")
        results = await _whole(self._service, plan)
        return answer(await self._workers.run(openai.response, plan, results, tokenizer, id, created))


async def _whole(service: Service, plan: Plan) -> list[Sampled]:
    """All prompts' results; the first failure cancels the rest."""

    async def one(index: int) -> Sampled:
        stream = service.sampling.stream(plan.samples[index], base_model=plan.base_model, model_path=plan.model_path)
        async for item in stream:
            if isinstance(item, Sampled):
                return item
        raise ServiceError(500, "The engine ended a sample without a result")

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(len(plan.samples))]
    except* LocoError as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Events:
    """The events of a streamed answer, from all prompts' samples as they come: an async iterator of JSON bodies."""

    def __init__(
        self, service: Service, plan: Plan, tokenizer: ChatTokenizer, id: str, created: int, include_usage: bool
    ):
        self._service, self._plan, self._tokenizer = service, plan, tokenizer
        self._id, self._created, self._include_usage = id, created, include_usage
        self._events = self._run()

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Cancels what is still being sampled."""
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[dict[str, Any], None]:
        plan = self._plan
        queue: asyncio.Queue[tuple[int, Tokens | Sampled | Exception]] = asyncio.Queue(_QUEUE_EVENTS)
        tasks = [asyncio.create_task(self._follow(index, queue)) for index in range(len(plan.samples))]
        lengths: list[list[int]] = [[] for _ in plan.samples]
        texts = [
            [openai.StreamedText(plan.stops, self._tokenizer) for _ in range(sample.num_samples)]
            for sample in plan.samples
        ]
        begun: set[int] = set()
        try:
            left = len(tasks)
            while left:
                prompt, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Sampled):
                    left -= 1
                    lengths[prompt] = [len(completion.tokens) for completion in item.completions]
                    if not plan.samples[prompt].stream:
                        whole = openai.whole_chunks(plan, self._id, self._created, prompt, item, self._tokenizer)
                        for event in whole:
                            yield self._event(event)
                    continue
                index = prompt * plan.samples[prompt].num_samples + item.sample_index
                if plan.kind == "chat.completion" and index not in begun:
                    begun.add(index)
                    yield self._event(openai.first_chunk(plan, self._id, self._created, index))
                yield self._event(self._chunk(index, item, texts[prompt][item.sample_index]))
            if self._include_usage:
                yield openai.usage_chunk(plan, self._id, self._created, lengths)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _chunk(self, index: int, item: Tokens, text: openai.StreamedText) -> dict[str, Any]:
        shown = text.add(item.text, item.tokens, item.finished)
        scored = openai.streamed_logprobs(self._plan, item.tokens, item.logprobs, text, self._tokenizer)
        reason = None if not item.finished else "stop" if text.stopped else "length"
        return openai.chunk(self._plan, self._id, self._created, index, shown, scored, reason)

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        """With usage asked for, each event has the field, and only the last one a value."""
        return {**event, "usage": None} if self._include_usage else event

    async def _follow(self, prompt: int, queue: asyncio.Queue[tuple[int, Tokens | Sampled | Exception]]) -> None:
        stream = self._service.sampling.stream(
            self._plan.samples[prompt], base_model=self._plan.base_model, model_path=self._plan.model_path
        )
        try:
            async for item in stream:
                await queue.put((prompt, item))
        except LocoError as error:
            await queue.put((prompt, error))


async def _lines(first: dict[str, Any], events: _Events) -> AsyncIterator[bytes]:
    """Server-sent events. An error after the first is an event too: the status has long been sent."""
    try:
        yield _line(first)
        async for event in events:
            yield _line(event)
        yield b"data: [DONE]\n\n"
    except LocoError as error:
        yield _line(openai.error_body(str(error), error.status if isinstance(error, ServiceError) else 500))
    finally:
        with contextlib.suppress(RuntimeError):  # it is running its own clean-up already
            await events.aclose()


def _line(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
