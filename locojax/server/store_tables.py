"""What the server remembers, as tables and as the records that hold their rows.

A record's fields are its table's columns, by name. Times are seconds since 1970, UTC.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sqlalchemy as sa

SCHEMA_VERSION = 2
"""2 has the owners of sessions, models and checkpoints."""

METADATA = sa.MetaData()

ID = sa.String(512)
SHORT = sa.String(64)


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, METADATA, *columns)


def _key(name: str) -> sa.Column[Any]:
    return sa.Column(name, ID, primary_key=True)


def _text(name: str, *, nullable: bool = True, index: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text if not index else ID, nullable=nullable, index=index)


def _json(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.JSON)


def _time(name: str, *, index: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Double, index=index)


def _owner() -> sa.Column[Any]:
    """Whose it is (see `callers`); null: everybody's."""
    return sa.Column("owner", ID)


META = _table("meta", _key("key"), _text("value", nullable=False))
"""The schema's version, the key that URLs are signed with, the engine that was last connected to."""

SESSIONS = _table(
    "sessions", _key("session_id"), _time("created_at", index=True), _time("last_seen"), sa.Column("state", SHORT),
    _json("reason"), _text("detail"), _text("display_name"), _json("user_metadata"), _json("tags"), _text("project_id"),
    _text("sdk_version"), _time("ended_at"), _owner(),
)  # fmt: skip

MODELS = _table(
    "models", _key("model_id"), _text("session_id", index=True), sa.Column("model_seq_id", sa.BigInteger),
    _time("created_at", index=True), _time("last_request"), _text("base_model"), sa.Column("state", SHORT),
    sa.Column("next_seq", sa.BigInteger), sa.Column("rank", sa.Integer), sa.Column("seed", sa.BigInteger),
    sa.Column("attention", sa.Boolean), sa.Column("mlp", sa.Boolean), sa.Column("unembed", sa.Boolean),
    _json("user_metadata"), _text("source"), _text("problem"), _owner(),
)  # fmt: skip

SAMPLERS = _table(
    "samplers", _key("sampler_id"), _text("session_id", index=True), _time("created_at"), sa.Column("kind", SHORT),
    _text("base_model"), _text("model_path"), _text("model_id"), _text("engine_id"), sa.Column("state", SHORT),
    sa.Column("num_clients", sa.Integer),
)  # fmt: skip

FUTURES = _table(
    "futures", _key("request_id"), sa.Column("kind", SHORT), _text("session_id", index=True), _text("owner"),
    sa.Column("seq", sa.BigInteger), sa.Column("digest", SHORT), sa.Column("state", SHORT), _text("operation_id"),
    _json("detail"), _text("error"), sa.Column("category", SHORT), _time("created_at", index=True),
    _time("finished_at"), _time("delivered_at"),
)  # fmt: skip

RESULTS = _table("results", _key("request_id"), sa.Column("content", sa.LargeBinary, nullable=False))
"""Apart from `futures`, so that reading what futures there are doesn't read their results."""

CHECKPOINTS = _table(
    "checkpoints", _key("run_id"), sa.Column("kind", SHORT, primary_key=True), _key("name"),
    _time("created_at", index=True), sa.Column("size_bytes", sa.BigInteger), _time("expires_at", index=True),
    sa.Column("public", sa.Boolean), _json("user_metadata"), _text("base_model"), sa.Column("rank", sa.Integer),
    sa.Column("attention", sa.Boolean), sa.Column("mlp", sa.Boolean), sa.Column("unembed", sa.Boolean),
    _text("session_id"), _owner(),
)  # fmt: skip

SEQUENCES = _table(
    "sequences", _key("sequence_id"), _text("session_id", index=True), sa.Column("tokens", sa.LargeBinary),
    sa.Column("logprobs", sa.LargeBinary), sa.Column("temperature", sa.Double), _time("used_at", index=True),
)  # fmt: skip

IDEMPOTENCY = _table(
    "idempotency", _key("key"), sa.Column("digest", SHORT), _json("response"), _time("created_at", index=True)
)


@dataclasses.dataclass
class Session:
    """`state`: active, finished (the client said so) or expired (its heartbeats stopped)."""

    session_id: str
    created_at: float
    last_seen: float
    state: str = "active"
    reason: dict[str, Any] | None = None
    detail: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None
    tags: list[str] | None = None
    project_id: str | None = None
    sdk_version: str | None = None
    ended_at: float | None = None
    owner: str | None = None


@dataclasses.dataclass
class Model:
    """`state`: creating, live, removing, gone, lost (with the engine process), failed (never made) or copied (only
    checkpoints were ever under this name). `problem` says why, for lost and failed."""

    model_id: str
    session_id: str
    model_seq_id: int
    created_at: float
    last_request: float
    base_model: str  # as the client named it
    state: str
    next_seq: int
    rank: int
    seed: int | None
    attention: bool
    mlp: bool
    unembed: bool
    user_metadata: dict[str, Any] | None = None
    source: str | None = None  # the checkpoint that it began as
    problem: str | None = None
    owner: str | None = None


@dataclasses.dataclass
class Sampler:
    """A sampling session. `kind`: base, checkpoint, ephemeral or inflight. `engine_id`: of the engine's sampler."""

    sampler_id: str
    session_id: str
    created_at: float
    kind: str
    base_model: str
    model_path: str | None
    model_id: str | None
    engine_id: str
    state: str = "open"  # or closed (its session ended), lost (with the engine process), dropped (too many since)
    num_clients: int = 0


@dataclasses.dataclass
class FutureRecord:
    """An accepted request. `owner`: the model or sampling session whose `seq` it is. `detail`: what its end needs."""

    request_id: str
    kind: str
    session_id: str
    owner: str
    seq: int
    digest: str
    created_at: float
    state: str = "pending"  # or done, or failed
    operation_id: str | None = None  # once given to the engine
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    category: str | None = None
    finished_at: float | None = None
    delivered_at: float | None = None


@dataclasses.dataclass
class Checkpoint:
    """`kind`: weights (training), sampler_weights or external_weights (both PEFT directories)."""

    run_id: str
    kind: str
    name: str
    created_at: float
    size_bytes: int
    base_model: str
    rank: int
    attention: bool
    mlp: bool
    unembed: bool
    session_id: str | None = None
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    owner: str | None = None

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


@dataclasses.dataclass
class Sequence:
    """What was sampled: its tokens (int32, little-endian) and their log-probs (float32) as they were drawn.

    `temperature`: of the distribution that the log-probs are of.
    """

    sequence_id: str
    session_id: str
    tokens: bytes
    logprobs: bytes
    temperature: float
    used_at: float


OWNED = (SESSIONS, MODELS, CHECKPOINTS)

TABLES: dict[type, sa.Table] = {
    Session: SESSIONS, Model: MODELS, Sampler: SAMPLERS, FutureRecord: FUTURES, Checkpoint: CHECKPOINTS,
    Sequence: SEQUENCES,
}  # fmt: skip
