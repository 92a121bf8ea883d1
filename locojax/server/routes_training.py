"""Routes of trainable models: their creation, their operations, and what a client may ask about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request, Response

from locojax.hosts.protocol import AdapterConfig
from locojax.server import requests, wire_train
from locojax.server.routes_base import TableRoutes, Workers, answer, read_body
from locojax.server.service import Service
from locojax.server.wire_content import MAX_BODY_BYTES
from locojax.server.wire_errors import WireError


class TrainingRoutes(TableRoutes):
    """`/create_model` to `/unload_model`: each answers at once with a future, `/get_info` alone with its result."""

    def __init__(self, service: Service, workers: Workers):
        self._desk = service.training
        self._workers = workers

    def table(self) -> Sequence[tuple[str, str, Callable[..., Any], type[requests.Request] | None]]:
        return [
            ("POST", "/create_model", self.create_model, requests.CreateModel),
            ("POST", "/get_info", self.get_info, requests.GetInfo),
            ("POST", "/forward_backward", self.forward_backward, None),
            ("POST", "/forward", self.forward, None),
            ("POST", "/optim_step", self.optim_step, requests.OptimStep),
            ("POST", "/save_weights", self.save_weights, requests.SaveWeights),
            ("POST", "/load_weights", self.load_weights, requests.LoadWeights),
            ("POST", "/save_weights_for_sampler", self.save_for_sampler, requests.SaveWeightsForSampler),
            ("POST", "/save_weights_external", self.save_external, requests.SaveWeightsExternal),
            ("POST", "/create_custom_loss", self.create_custom_loss, requests.CreateCustomLoss),
            ("POST", "/unload_model", self.unload_model, requests.UnloadModel),
        ]

    async def create_model(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.CreateModel)
        lora = body.lora_config
        promise = await self._desk.create_model(
            body.session_id,
            body.model_seq_id,
            body.base_model,
            AdapterConfig(lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed),
            user_metadata=body.user_metadata,
            optimizer=body.optimizer_config.type,
        )
        return answer(promise.as_json())

    async def get_info(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.GetInfo)
        return answer(await self._desk.get_info(body.model_id))

    async def forward_backward(self, request: Request) -> Response:
        return await self._train(request, forward_only=False)

    async def forward(self, request: Request) -> Response:
        """Before SDK 0.25; later ones set forward_only in a forward_backward."""
        return await self._train(request, forward_only=True)

    async def _train(self, request: Request, *, forward_only: bool) -> Response:
        raw = await read_body(request, MAX_BODY_BYTES)
        body = await self._workers.run(
            wire_train.decode_train,
            raw,
            content_type=request.headers.get("content-type"),
            content_encoding=request.headers.get("content-encoding"),
            gradient=not forward_only,
        )
        _sequence(body.seq_id)
        return answer((await self._desk.forward_backward(body)).as_json())

    async def optim_step(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.OptimStep)
        adam = body.adam_params
        promise = await self._desk.optim_step(body.model_id, body.seq_id, adam.params(), optimizer=adam.type)
        return answer(promise.as_json())

    async def save_weights(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.SaveWeights)
        promise = await self._desk.save_weights(
            body.model_id,
            body.seq_id,
            body.name,
            ttl_seconds=body.ttl_seconds,
            overwrite=body.overwrite,
            user_metadata=body.user_metadata,
        )
        return answer(promise.as_json())

    async def load_weights(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.LoadWeights)
        if body.model_id is not None:
            promise = await self._desk.load_weights(
                body.model_id, _sequence(body.seq_id), body.path, optimizer_state=body.optimizer
            )
            return answer(promise.as_json())
        if body.session_id is None or body.model_seq_id is None:  # the request's own check excludes it
            raise WireError("session_id or model_seq_id is missing", status=422)
        promise = await self._desk.create_model_from(
            body.session_id,
            body.model_seq_id,
            body.path,
            optimizer_state=body.optimizer,
            base_model=body.base_model,
            user_metadata=body.user_metadata,
            optimizer="adamw" if body.optimizer_config is None else body.optimizer_config.type,
        )
        return answer(promise.as_json())

    async def save_for_sampler(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.SaveWeightsForSampler)
        promise = await self._desk.save_weights_for_sampler(
            body.model_id,
            body.seq_id,
            path=body.path,
            sampling_session_seq_id=body.sampling_session_seq_id,
            kind=body.kind,
            ttl_seconds=body.ttl_seconds,
            user_metadata=body.user_metadata,
        )
        return answer(promise.as_json())

    async def save_external(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.SaveWeightsExternal)
        promise = await self._desk.save_weights_external(
            body.model_id,
            body.seq_id,
            body.path,
            ttl_seconds=body.ttl_seconds,
            age_encryption_recipients=tuple(body.age_encryption_recipients or ()),
        )
        return answer(promise.as_json())

    async def create_custom_loss(self, request: Request) -> Response:
        await self._workers.parse(request, requests.CreateCustomLoss, requests.MAX_TELEMETRY_BYTES)
        raise WireError(
            "This server runs no custom losses of its own",
            remedy="Use forward_backward_custom, which computes the loss in the client",
        )

    async def unload_model(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.UnloadModel)
        return answer((await self._desk.unload_model(body.model_id)).as_json())


def _sequence(seq_id: int | None) -> int:
    if seq_id is None:
        raise WireError("seq_id is missing", expected="the operation's number: 1, 2, 3, ... for each model", status=422)
    return seq_id
