"""Sessions: who a client is, whether it still lives, and what goes when it doesn't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Sessions:
    """The session endpoints. Times on the wire are ISO 8601 in UTC."""

    async def create(
        self,
        *,
        tags: Sequence[str] = (),
        user_metadata: Mapping[str, Any] | None = None,
        sdk_version: str | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """POST /create_session -> {"type": "create_session", "session_id"}."""
        raise NotImplementedError

    async def heartbeat(self, session_id: str) -> dict[str, Any]:
        """POST /session_heartbeat. 404: unknown. 410: finished or expired. Never waits for the database."""
        raise NotImplementedError

    async def finish(self, session_id: str, reason: Mapping[str, Any] | None, detail: str | None) -> dict[str, Any]:
        """POST /sessions/{id}/finish: the first reason wins; its models and ephemeral samplers are freed."""
        raise NotImplementedError

    async def list(self, *, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """GET /sessions -> {"sessions": [id]}, newest first."""
        raise NotImplementedError

    async def get(self, session_id: str) -> dict[str, Any]:
        """GET /sessions/{id} -> training_run_ids, sampler_ids, user_metadata, display_name."""
        raise NotImplementedError

    async def search(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """POST /sessions/search (contract section 12): `request` is its JSON -> {"sessions": [...], "next_cursor"?}."""
        raise NotImplementedError

    async def set_project(self, session_id: str, project_id: str) -> dict[str, Any]:
        """PUT /sessions/{id}/project."""
        raise NotImplementedError
