"""Sessions: who a client is, whether it still lives, and what goes when it doesn't."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from locojax.server import callers
from locojax.server.service_errors import ServiceError
from locojax.server.service_settings import ServiceSettings
from locojax.server.service_times import iso_time, seconds_of
from locojax.server.store import Store
from locojax.server.store_tables import CHECKPOINTS, MODELS, SAMPLERS, SESSIONS, Session

DEFAULT_PROJECT = "default"
OWNER = "local"
SAVED_EVERY = 30.0  # seconds between two writes of a session's last heartbeat


class Sessions:
    """The session endpoints. Times on the wire are ISO 8601 in UTC.

    Attributes:
      ended: called with a session's id when it has finished or expired: the desks free what it held.
    """

    def __init__(self, store: Store, settings: ServiceSettings):
        self._store, self._settings = store, settings
        self.ended: list[Callable[[str, str], None]] = []
        self._sessions: dict[str, Session] = {}
        self._saved: dict[str, float] = {}
        self._by_key: dict[str, str] = {}

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
        session_id = self._by_key.get(idempotency_key) if idempotency_key is not None else None
        if session_id is None:
            session_id = str(uuid.uuid4())
            now = time.time()
            session = Session(
                session_id, now, now, display_name=display_name, tags=list(tags), sdk_version=sdk_version,
                user_metadata=None if user_metadata is None else dict(user_metadata), project_id=project_id,
                owner=callers.owner(),
            )  # fmt: skip
            self._sessions[session_id] = session
            if idempotency_key is not None:
                self._by_key[idempotency_key] = session_id
            await self._store.insert(session)
        return {"type": "create_session", "session_id": session_id}

    async def heartbeat(self, session_id: str) -> dict[str, Any]:
        """POST /session_heartbeat. 404: unknown. 410: finished or expired. Never waits for the database."""
        self.require(session_id)
        return {"type": "session_heartbeat"}

    async def finish(self, session_id: str, reason: Mapping[str, Any] | None, detail: str | None) -> dict[str, Any]:
        """POST /sessions/{id}/finish: the first reason wins; its models and ephemeral samplers are freed."""
        session = self._find(session_id)
        if session.state == "active":
            session.reason = dict(reason) if reason else {"type": "success"}
            session.detail = detail
            await self._end(session, "finished")
        return {}

    async def list(self, *, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """GET /sessions -> {"sessions": [id]}, newest first."""
        newest = sorted(self._seen(), key=lambda one: one.created_at, reverse=True)
        return {"sessions": [one.session_id for one in newest[offset : offset + limit]]}

    async def get(self, session_id: str) -> dict[str, Any]:
        """GET /sessions/{id} -> training_run_ids, sampler_ids, user_metadata, display_name."""
        session = self._find(session_id)

        def query(connection: sa.Connection) -> tuple[Sequence[str], Sequence[str]]:
            models = sa.select(MODELS.c.model_id).where(MODELS.c.session_id == session_id).order_by(MODELS.c.created_at)
            samplers = sa.select(SAMPLERS.c.sampler_id).where(SAMPLERS.c.session_id == session_id)
            return (
                connection.execute(models).scalars().all(),
                connection.execute(samplers.order_by(SAMPLERS.c.created_at)).scalars().all(),
            )

        models, samplers = await self._store.read(query)
        return {
            "training_run_ids": [*models], "sampler_ids": [*samplers], "display_name": session.display_name,
            "user_metadata": text_metadata(session.user_metadata),
        }  # fmt: skip

    async def search(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """POST /sessions/search (contract section 12): `request` is its JSON -> {"sessions": [...], "next_cursor"?}."""
        found = [one for one in self._seen() if _matches(one, request)]
        found.sort(key=lambda one: (one.created_at, one.session_id), reverse=True)
        if cursor := request.get("cursor"):
            after = (seconds_of(cursor["last_created_at"]), cursor["last_session_id"])
            found = [one for one in found if (seconds_of(iso_time(one.created_at)), one.session_id) < after]
        limit = request.get("limit") or 50
        page = found[:limit]
        ids = [one.session_id for one in page]

        def query(connection: sa.Connection) -> dict[str, tuple[int, int]]:
            counted = (
                sa.select(CHECKPOINTS.c.session_id, sa.func.count(), sa.func.sum(CHECKPOINTS.c.size_bytes))
                .where(CHECKPOINTS.c.session_id.in_(ids))
                .group_by(CHECKPOINTS.c.session_id)
            )
            return {session_id: (number, int(size or 0)) for session_id, number, size in connection.execute(counted)}

        sizes = await self._store.read(query)
        body: dict[str, Any] = {"sessions": [_summary(one, *sizes.get(one.session_id, (0, 0))) for one in page]}
        if len(found) > limit:
            last = page[-1]
            body["next_cursor"] = {"last_created_at": iso_time(last.created_at), "last_session_id": last.session_id}
        return body

    async def set_project(self, session_id: str, project_id: str) -> dict[str, Any]:
        """PUT /sessions/{id}/project."""
        session = self._find(session_id)
        session.project_id = project_id
        await self._store.update(session, "project_id")
        return {}

    # For the desks.

    def require(self, session_id: str) -> Session:
        """An active session, which this counts as a sign of life of. ServiceError 404 or 410 otherwise."""
        session = self._find(session_id)
        if session.state != "active":
            how = "expired: no heartbeat came" if session.state == "expired" else "was finished by its client"
            raise ServiceError(
                410,
                f"The session {session_id} {how}",
                remedy="Make a new ServiceClient; checkpoints are kept, and a model can be created from one",
            )
        session.last_seen = time.time()
        return session

    def known(self, session_id: str) -> None:
        """ServiceError 404: the caller knows no such session, not even one that has ended."""
        self._find(session_id)

    def may_see(self, session_id: str) -> bool:
        """Whether the caller may know of what belongs to a session; of what belongs to none, everybody may."""
        session = self._sessions.get(session_id)
        return session is None or callers.may_see(session.owner)

    def get_now(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def active(self) -> Sequence[Session]:
        """Those that neither finished nor expired, oldest first; of a caller, those that it may see."""
        return [one for one in self._seen() if one.state == "active"]

    def load(self) -> None:
        """Reads what an earlier process left; nobody's heartbeats can have come meanwhile, so all are alive now."""
        now = time.time()
        for session in self._store.load(Session, order_by=SESSIONS.c.created_at):
            if session.state == "active":
                session.last_seen = now
            self._sessions[session.session_id] = session

    async def expire(self, now: float) -> None:
        """Ends the sessions whose clients have gone silent, and writes the heartbeats of the others now and then."""
        for session in self.active():
            if session.last_seen + self._settings.session_timeout < now:
                await self._end(session, "expired")
            elif session.last_seen - self._saved.get(session.session_id, session.created_at) > SAVED_EVERY:
                self._saved[session.session_id] = session.last_seen
                await self._store.update(session, "last_seen")

    async def _end(self, session: Session, state: str) -> None:
        session.state, session.ended_at = state, time.time()
        self._saved.pop(session.session_id, None)
        written = self._store.update(session, "state", "reason", "detail", "ended_at", "last_seen")
        why = "the session expired: no heartbeat came" if state == "expired" else "the session was finished"
        for told in self.ended:
            told(session.session_id, why)
        await asyncio.shield(written)

    def _seen(self) -> Sequence[Session]:
        return [one for one in self._sessions.values() if callers.may_see(one.owner)]

    def _find(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or not callers.may_see(session.owner):
            raise ServiceError(
                404, f"There is no session {session_id!r}", remedy="Make a new ServiceClient; it creates a session"
            )
        return session


def text_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata as clients read it back: texts as they are, other values as JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def _status(session: Session) -> dict[str, Any] | None:
    """None for one that expired: it neither finished nor is it known to be running."""
    if session.state == "finished":
        return {"type": "client_finished", "reason": session.reason or {"type": "success"}, "detail": session.detail}
    return {"type": "active"} if session.state == "active" else None


def _summary(session: Session, num_checkpoints: int, num_bytes: int) -> dict[str, Any]:
    return {
        "session_id": session.session_id, "created_at": iso_time(session.created_at), "owner": session.owner or OWNER,
        "project_id": session.project_id or DEFAULT_PROJECT, "status": _status(session),
        "checkpoints_count": num_checkpoints, "checkpoint_storage_bytes": num_bytes,
        "display_name": session.display_name, "user_metadata": text_metadata(session.user_metadata),
    }  # fmt: skip


def _matches(session: Session, request: Mapping[str, Any]) -> bool:
    metadata = text_metadata(session.user_metadata) or {}
    owner = request.get("owner") or {}
    return (
        _is_named(session, request.get("session_id"), request.get("display_name"))
        and (not request.get("project_ids") or (session.project_id or DEFAULT_PROJECT) in request["project_ids"])
        and all(metadata.get(key) == value for key, value in (request.get("user_metadata") or {}).items())
        and (owner.get("type") != "user" or (session.owner or OWNER) in owner.get("owner_urns", ()))
        and (not request.get("statuses") or any(_has_status(session, one) for one in request["statuses"]))
    )


def _is_named(session: Session, session_id: str | None, display_name: str | None) -> bool:
    """Either one matches, if any is asked for; of a display name each word must be in it, in any case."""
    if session_id is None and display_name is None:
        return True
    if session_id == session.session_id:
        return True
    shown = (session.display_name or "").lower()
    return display_name is not None and all(word in shown for word in display_name.lower().split())


def _has_status(session: Session, wanted: Mapping[str, Any]) -> bool:
    status = _status(session)
    if status is None or status["type"] != wanted["type"]:
        return False
    reasons = wanted.get("reasons")
    return not reasons or status["reason"].get("type") in reasons
