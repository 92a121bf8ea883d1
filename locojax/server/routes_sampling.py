"""Routes of sampling, and of the futures by which everything slow is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response

from locojax.server import requests, wire_results, wire_sample
from locojax.server.futures import FutureAnswer
from locojax.server.routes_base import TableRoutes, Workers, answer, read_body
from locojax.server.service import Service
from locojax.server.service_sampling import target_layout
from locojax.server.wire_content import MAX_BODY_BYTES

T = TypeVar("T")

_BINARY_KINDS = ("forward_backward", "forward", "sample")


class SamplingRoutes(TableRoutes):
    """`/create_sampling_session`, `/asample`, `/retrieve_future` and their like."""

    def __init__(self, service: Service, workers: Workers):
        self._desk, self._futures = service.sampling, service.futures
        self._workers = workers
        self._polls: set[asyncio.Task[Any]] = set()
        self._draining = False

    def table(self) -> Sequence[tuple[str, str, Callable[..., Any], type[requests.Request] | None]]:
        return [
            ("POST", "/create_sampling_session", self.create_session, requests.CreateSamplingSession),
            ("POST", "/join_sampling_session", self.join_session, requests.JoinSamplingSession),
            ("GET", "/samplers/{sampling_session_id}", self.sampler, None),
            ("POST", "/asample", self.asample, None),
            ("POST", "/retrieve_future", self.retrieve, requests.RetrieveFuture),
            ("POST", "/retrieve_futures", self.retrieve_many, requests.RetrieveFutures),
            ("POST", "/cancel_future", self.cancel, requests.CancelFuture),
        ]

    async def create_session(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.CreateSamplingSession)
        return answer(
            await self._desk.create_session(
                body.session_id,
                body.sampling_session_seq_id,
                base_model=body.base_model,
                model_path=body.model_path,
            )
        )

    async def join_session(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.JoinSamplingSession)
        return answer(await self._desk.join_session(body.sampling_session_id))

    async def sampler(self, sampling_session_id: str) -> Response:
        return answer(await self._desk.sampler(sampling_session_id))

    async def asample(self, request: Request) -> Response:
        raw = await read_body(request, MAX_BODY_BYTES)
        body = await self._workers.run(
            wire_sample.decode_sample, raw, content_encoding=request.headers.get("content-encoding")
        )
        return answer((await self._desk.asample(body)).as_json())

    async def retrieve(self, request: Request) -> Response:
        """Waits for the result; 408 with a reason when it takes longer than a poll should."""
        body = await self._workers.parse(request, requests.RetrieveFuture)
        found = await self._poll(self._futures.retrieve(body.request_id))
        if found is None:
            return answer(FutureAnswer(body.request_id, "pending", "").try_again(), 408)
        if found.state == "pending":
            return answer(found.try_again(), 408)
        response = await self._encode(found, request.headers.get("accept"))
        # Only what went out to someone who was still there is delivered; others ask again.
        if not await request.is_disconnected():
            self._futures.delivered(body.request_id)
        return response

    async def _encode(self, found: FutureAnswer, accept: str | None) -> Response:
        if found.state == "failed":
            return answer(found.error_body())
        if found.kind not in _BINARY_KINDS:
            return answer(found.result)
        layout = target_layout(found.detail)
        media_type, body = await self._workers.run(wire_results.encode, found.result, accept, layout)
        return Response(body, media_type=media_type)

    async def retrieve_many(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.RetrieveFutures, requests.MAX_TELEMETRY_BYTES)
        found = await self._poll(
            self._futures.retrieve_many(
                body.target.sampling_session_id,
                cloned_sampler_id=body.target.cloned_sampler_id,
                prev_cursor=body.prev_cursor,
                timeout=body.timeout,
                retrieved_request_ids=tuple(body.retrieved_request_ids),
            )
        )
        return answer({"completions": [], "cursor": body.prev_cursor} if found is None else found)

    async def _poll(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """What is waited for; None when the server stops meanwhile: the client asks again, whoever answers then."""
        task = asyncio.current_task()
        assert task is not None
        if self._draining:
            waiting.close()
            return None
        self._polls.add(task)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._draining:
                raise
            task.uncancel()  # it was `drain`
            return None
        finally:
            self._polls.discard(task)

    def drain(self) -> None:
        """The server stops: polls are answered now, not in half a minute."""
        self._draining = True
        for task in self._polls:
            task.cancel()

    async def cancel(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.CancelFuture)
        return answer(await self._futures.cancel(body.request_id))
