"""Routes about the server itself and its clients' sessions: configuration, health, sessions, telemetry, API keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response

from locojax.server import callers, requests
from locojax.server.routes_base import TableRoutes, Workers, answer
from locojax.server.service import Service
from locojax.server.service_errors import ServiceError
from locojax.server.sessions import OWNER

CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,  # on one machine zstd costs more than it saves
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_max_concurrent_requests": 2000,
    "sample_enable_stuck_detection": True,
    "use_pyqwest_transport": True,
    "sample_use_retrieve_futures": True,  # one poll a client, where there would be one a sample
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,  # the client then computes custom losses itself
    # Older clients: 0.18 to 0.24, and 0.26 to 0.36. Others ignore what they don't know.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
}
"""What /client/config answers: how the SDK shall talk to this server."""

DYNAMIC_CONFIG: Mapping[str, Any] = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=1 << 63)]


class SessionRoutes(TableRoutes):
    """`/client`, `/healthz`, `/create_session` and its like."""

    def __init__(self, service: Service, workers: Workers):
        self._service = service
        self._workers = workers

    def table(self) -> Sequence[tuple[str, str, Callable[..., Any], type[requests.Request] | None]]:
        return [
            ("POST", "/client/config", self.client_config, requests.ClientConfig),
            ("POST", "/client/dynamic_config", self.dynamic_config, requests.ClientConfig),
            ("POST", "/auth/token", self.auth_token, None),
            ("GET", "/auth/apikey/me", self.own_key, None),
            ("DELETE", "/auth/apikey/me", self.forget_key, None),
            ("GET", "/healthz", self.healthz, None),
            ("GET", "/get_server_capabilities", self.capabilities, None),
            ("POST", "/create_session", self.create, requests.CreateSession),
            ("POST", "/session_heartbeat", self.heartbeat, requests.SessionHeartbeat),
            ("POST", "/sessions/search", self.search, requests.SearchSessions),
            ("GET", "/sessions", self.list, None),
            ("POST", "/sessions/{session_id}/finish", self.finish, requests.FinishSession),
            ("PUT", "/sessions/{session_id}/project", self.set_project, requests.SetProject),
            ("GET", "/sessions/{session_id}/trace_export", self.trace_export, None),
            ("GET", "/sessions/{session_id}", self.get, None),
            ("POST", "/telemetry", self.telemetry, requests.Telemetry),
            ("GET", "/audit", self.hosted_only, None),
            ("GET", "/billing/usage/events", self.hosted_only, None),
            ("GET", "/billing/usage/checkpoints/current", self.hosted_only, None),
        ]

    async def client_config(self, request: Request) -> Response:
        await self._workers.parse(request, requests.ClientConfig)
        return answer(CLIENT_CONFIG)

    async def dynamic_config(self, request: Request) -> Response:
        await self._workers.parse(request, requests.ClientConfig)
        return answer(DYNAMIC_CONFIG)

    async def auth_token(self) -> Response:
        raise ServiceError(
            404, "This server gives out no tokens", remedy="Use the API key itself, as the header X-API-Key"
        )

    async def own_key(self) -> Response:
        """`tinker auth login` asks whether its key is good; that it came here says so."""
        details: dict[str, dict[str, str]] = {"org_details": {}, "user_details": {}}
        name = callers.owner() or OWNER
        return answer({"key_id": 0, "name": name, "note": "a key of this LoCoJAX server", "details": details})

    async def forget_key(self) -> Response:
        return answer()

    async def healthz(self) -> Response:
        ready, body = self._service.health()
        return answer(body, 200 if ready else 503)

    async def capabilities(self) -> Response:
        return answer(self._service.capabilities())

    async def create(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.CreateSession)
        return answer(
            await self._service.sessions.create(
                tags=body.tags,
                user_metadata=body.user_metadata,
                sdk_version=body.sdk_version,
                project_id=body.project_id,
                display_name=body.display_name,
                idempotency_key=request.headers.get("x-idempotency-key"),
            )
        )

    async def heartbeat(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.SessionHeartbeat)
        return answer(await self._service.sessions.heartbeat(body.session_id))

    async def finish(self, request: Request, session_id: str) -> Response:
        body = await self._workers.parse(request, requests.FinishSession, requests.MAX_TELEMETRY_BYTES)
        reason = body.reason.model_dump()
        return answer(await self._service.sessions.finish(session_id, reason, body.detail))

    async def list(self, limit: Limit = 20, offset: Offset = 0) -> Response:
        return answer(await self._service.sessions.list(limit=limit, offset=offset))

    async def get(self, session_id: str) -> Response:
        return answer(await self._service.sessions.get(session_id))

    async def search(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.SearchSessions)
        return answer(await self._service.sessions.search(body.model_dump(mode="json")))

    async def set_project(self, request: Request, session_id: str) -> Response:
        body = await self._workers.parse(request, requests.SetProject)
        return answer(await self._service.sessions.set_project(session_id, body.project_id))

    async def trace_export(self, session_id: str) -> Response:
        await self._service.sessions.get(session_id)
        return answer({"status": "failed", "error": "This server records no traces of sessions."})

    async def telemetry(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.Telemetry, requests.MAX_TELEMETRY_BYTES)
        return answer(self._service.accept_telemetry(body.model_dump(mode="json")))

    async def hosted_only(self) -> Response:
        raise ServiceError(404, "This server keeps no audit log and bills nobody: only the hosted service does")
