"""Training runs and checkpoints: what the REST client and the `tinker` command line ask."""

from __future__ import annotations

import asyncio
import pathlib
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from locojax.server import callers
from locojax.server.checkpoints import KINDS, CheckpointFiles, TinkerPath, UrlSigner, checked_ttl, read_peft
from locojax.server.service_errors import ServiceError
from locojax.server.service_names import ModelNames, digest_of
from locojax.server.service_settings import ServiceSettings
from locojax.server.service_times import iso_time
from locojax.server.sessions import OWNER, Sessions, text_metadata
from locojax.server.store import Store, count, row, select
from locojax.server.store_tables import CHECKPOINTS, IDEMPOTENCY, MODELS, Checkpoint, Model
from locojax.types import PEFT_FILES

Key = tuple[str, str, str]

IDEMPOTENCY_RETENTION = 86400.0


class CheckpointDesk:
    """`checkpoint_id` is `weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`; a bare name is a 400.

    All checkpoints are known in memory: there are as many as directories.
    """

    def __init__(
        self, store: Store, settings: ServiceSettings, files: CheckpointFiles, names: ModelNames, sessions: Sessions,
        key: bytes,
    ):  # fmt: skip
        self._store, self._settings, self._files, self._names, self._sessions = store, settings, files, names, sessions
        self._signer = UrlSigner(key)
        self._known: dict[Key, Checkpoint] = {}
        self._writing: set[Key] = set()

    # The endpoints.

    async def training_runs(self, *, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """GET /training_runs -> {"training_runs", "cursor"}, newest first."""
        only = callers.only_of()
        mine = [] if only is None else [sa.or_(MODELS.c.owner.is_(None), MODELS.c.owner == only)]

        def query(connection: sa.Connection) -> tuple[list[Model], int]:
            newest = MODELS.c.created_at.desc()
            models = select(connection, Model, *mine, order_by=newest, limit=limit, offset=offset)
            return models, count(connection, Model, *mine)

        models, total = await self._store.read(query)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"training_runs": [self._run_json(model) for model in models], "cursor": cursor}

    async def training_run(self, run_id: str) -> dict[str, Any]:
        """GET /training_runs/{id}. 404: unknown."""
        return self._run_json(await self._model(run_id))

    async def of_run(self, run_id: str) -> dict[str, Any]:
        """GET /training_runs/{id}/checkpoints -> {"checkpoints", "cursor": null}."""
        await self._model(run_id)
        return {"checkpoints": [checkpoint_json(one) for one in self._of_run(run_id)], "cursor": None}

    async def all(self, *, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        """GET /checkpoints -> {"checkpoints", "cursor"}, newest first."""
        newest = self._newest(one for one in self._known.values() if callers.may_see(one.owner))
        cursor = {"offset": offset, "limit": limit, "total_count": len(newest)}
        return {"checkpoints": [checkpoint_json(one) for one in newest[offset : offset + limit]], "cursor": cursor}

    async def delete(self, run_id: str, checkpoint_id: str) -> None:
        """DELETE .../checkpoints/{ckpt}: the files too. 404: unknown."""
        await self._delete(self._own(run_id, checkpoint_id))

    async def publish(self, run_id: str, checkpoint_id: str, public: bool) -> None:
        """POST / DELETE .../publish. What is so already stays so.

        The hosted service answers 409 then, which its client repeats for five minutes; and a client that never got the
        first answer asks again.
        """
        checkpoint = self._own(run_id, checkpoint_id)
        if checkpoint.public != public:
            checkpoint.public = public
            await self._store.update(checkpoint, "public")

    async def set_ttl(self, run_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """PUT .../ttl; None: for ever. Allowed: 3600 s to 10 years."""
        checkpoint = self._own(run_id, checkpoint_id)
        checkpoint.expires_at = _expiry(checked_ttl(ttl_seconds))
        await self._store.update(checkpoint, "expires_at")

    async def external_urls(self, run_id: str, checkpoint_id: str, base_url: str) -> dict[str, Any]:
        """GET .../external_weights_urls -> {"urls": {file: signed URL}, "expires"}.

        A URL is `<base_url>/api/v1/_download?path=...&expires=...&signature=...`; see `verify_download`.
        """
        path = TinkerPath.of(run_id, checkpoint_id)
        self._find(path)
        if path.kind != "external_weights":
            raise ServiceError(
                400,
                f"{path} has no files to download",
                expected="a checkpoint of save_weights_external: external_weights/<name>",
                remedy="Save one from the model (a client of `weights` can be created and saved as external weights)",
            )
        directory = self._files.directory(path)
        found = await asyncio.to_thread(lambda: sorted(f for f in directory.rglob("*") if f.is_file()))
        expires = int(time.time() + self._settings.url_lifetime)
        names = [file.relative_to(directory).as_posix() for file in found]
        urls = {name: self._signer.url(base_url, f"{path}#{name}", expires) for name in names}
        return {"urls": urls, "expires": iso_time(expires)}

    async def archive_url(self, run_id: str, checkpoint_id: str, base_url: str) -> tuple[str, str]:
        """GET .../archive (older SDKs): the signed URL of a tar of the checkpoint, and when it expires (ISO 8601)."""
        path = TinkerPath.of(run_id, checkpoint_id)
        self._find(path)
        expires = int(time.time() + self._settings.url_lifetime)
        return self._signer.url(base_url, str(path), expires), iso_time(expires)

    async def verify_download(self, path: str, expires: str, signature: str) -> pathlib.Path:
        """The file (or, for an archive, the directory) that a signed URL names. 403: forged, expired. 404: deleted."""
        self._signer.verify(path, expires, signature, time.time())
        # A checkpoint's name may hold a "#"; a file's name can't be longer than what follows the last one.
        whole, separator, name = path.rpartition("#")
        as_archive = not separator or self._holds(path)
        checkpoint = TinkerPath.parse(path if as_archive else whole)
        self._find(checkpoint)
        directory = self._files.directory(checkpoint)
        found = directory if as_archive else (directory / name).resolve()
        if not found.is_relative_to(directory) or not await asyncio.to_thread(found.exists):
            raise ServiceError(404, f"There is no file {name[:200]!r} in {checkpoint}")
        return found

    async def weights_info(self, tinker_path: str) -> dict[str, Any]:
        """POST /weights_info."""
        found = self._find(TinkerPath.parse(tinker_path))
        return {
            "base_model": found.base_model, "is_lora": True, "lora_rank": found.rank, "train_unembed": found.unembed,
            "train_mlp": found.mlp, "train_attn": found.attention, "optimizer_config": {"type": "adamw"},
        }  # fmt: skip

    async def copy(self, request: Mapping[str, Any], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """POST /copy_weights: `request` is its JSON -> {"tinker_path"}."""
        digest = digest_of({key: value for key, value in request.items() if value is not None})
        if (before := await self._answered(idempotency_key, digest)) is not None:
            return before
        source_path = TinkerPath.parse(request["source_path"])
        source = self._find(source_path)
        session_id, number = request.get("session_id"), request.get("model_seq_id")
        if session_id is not None and not self._sessions.may_see(session_id):
            self._sessions.known(session_id)  # says that there is none
        run_id = f"copy-{uuid.uuid4().hex}" if session_id is None else f"{session_id}:train:{number}"
        target = TinkerPath(run_id, source_path.kind, source_path.name)
        self.reserve(target)
        try:
            size = await asyncio.to_thread(self._files.copy, source_path, target)
            owner = callers.owner()
            await self._add_run(run_id, source, session_id, number, owner)
            await self._add(target, source, size, session_id, request.get("ttl_seconds"), source.user_metadata, owner)
        except FileNotFoundError as error:
            raise _gone(source_path) from error
        finally:
            self.release(target)
        answer = {"tinker_path": str(target)}
        if idempotency_key is not None:
            values = {"key": idempotency_key, "digest": digest, "response": answer, "created_at": time.time()}
            await self._store.write(lambda connection: connection.execute(sa.insert(IDEMPOTENCY), values))
        return answer

    async def import_peft(self, directory: str, name: str, *, base_model: str | None = None) -> dict[str, Any]:
        """A PEFT directory on the server's disk becomes a sampler checkpoint -> {"tinker_path"}.

        Imported again, the same files have the same path. Only the adapter's description is read here; the engine
        checks the weights when they are used.
        """
        adapter = await asyncio.to_thread(read_peft, pathlib.Path(directory))
        base = self._names.checked(base_model) if base_model else (*self._names.all(), "unknown")[0]
        run_id = f"import-{adapter['digest']}"
        target = TinkerPath(run_id, "sampler_weights", TinkerPath.of(run_id, f"sampler_weights/{name}").name)
        if (target.run_id, target.kind, target.name) in self._known:
            return {"tinker_path": str(target)}
        modules = adapter["target_modules"]
        described = Checkpoint(
            run_id, target.kind, target.name, time.time(), 0, base, adapter["r"],
            attention=any(one in modules for one in ("q_proj", "k_proj", "v_proj", "o_proj")),
            mlp=any(one in modules for one in ("gate_proj", "up_proj", "down_proj")),
            unembed=any(one in modules for one in ("lm_head", "embed_tokens")),
        )  # fmt: skip

        def copy() -> int:
            written = self._files.new_directory()
            written.mkdir()
            for file in PEFT_FILES:
                (written / file).write_bytes((pathlib.Path(directory) / file).read_bytes())
            return self._files.place(written, target)

        size = await asyncio.to_thread(copy)
        await self._add_run(run_id, described, None, None, None)
        await self._add(target, described, size, None, None, None, None)
        return {"tinker_path": str(target)}

    # For the other desks.

    def find(self, tinker_path: str, kinds: Sequence[str], remedy: str) -> tuple[Checkpoint, pathlib.Path]:
        """A checkpoint and its directory. ServiceError 404: unknown; 400: of another kind than these."""
        path = TinkerPath.parse(tinker_path)
        if path.kind not in kinds:
            raise ServiceError(
                400,
                f"{path} is a {KINDS[path.kind]} checkpoint, which can't be used here",
                expected=" or ".join(f"tinker://{path.run_id}/{kind}/<name>" for kind in kinds),
                remedy=remedy,
            )
        return self._find(path), self._files.directory(path)

    def paths(self, kind: str) -> list[str]:
        """The paths of a kind's checkpoints, newest first."""
        return [one.tinker_path for one in self._newest(filter(_is_seen, self._known.values())) if one.kind == kind]

    def reserve(self, path: TinkerPath, *, overwrite: bool = False) -> None:
        """Nobody else may now save under this name, until `release`. ServiceError 400: it is taken."""
        key = (path.run_id, path.kind, path.name)
        if key in self._writing or (key in self._known and not overwrite):
            raise ServiceError(
                400,
                f"The checkpoint {path} exists already",
                remedy="Choose another name, or delete it first"
                + (", or save with overwrite=True" if path.kind == "weights" else ""),
            )
        self._files.directory(path)  # refuses what can't be a folder
        self._writing.add(key)

    def release(self, path: TinkerPath) -> None:
        """See `reserve`."""
        self._writing.discard((path.run_id, path.kind, path.name))

    async def keep(
        self, path: TinkerPath, written: str, model: Model, ttl_seconds: int | None, metadata: dict[str, Any] | None
    ) -> int:
        """Puts what the engine wrote in its place and remembers it; returns its size in bytes."""
        size = await asyncio.to_thread(self._files.place, pathlib.Path(written), path)
        described = Checkpoint(
            path.run_id, path.kind, path.name, 0.0, size, model.base_model, model.rank, model.attention, model.mlp,
            model.unembed,
        )  # fmt: skip
        await self._add(path, described, size, model.session_id, ttl_seconds, metadata, model.owner)
        self.release(path)
        return size

    def new_directory(self) -> str:
        """Where the engine shall write a checkpoint."""
        return str(self._files.new_directory())

    # Start-up and upkeep.

    def load(self, keep: set[str]) -> None:
        """Reads what is known; `keep`: directories that the engine is writing."""
        for checkpoint in self._store.load(Checkpoint):
            self._known[checkpoint.run_id, checkpoint.kind, checkpoint.name] = checkpoint
        self._files.clean(keep)

    async def expire(self, now: float) -> None:
        """Deletes the checkpoints whose time is over, and forgets old idempotency keys."""
        for checkpoint in list(self._known.values()):
            if checkpoint.expires_at is not None and checkpoint.expires_at < now:
                await self._delete(checkpoint)
        old = sa.delete(IDEMPOTENCY).where(IDEMPOTENCY.c.created_at < now - IDEMPOTENCY_RETENTION)
        await self._store.write(lambda connection: connection.execute(old))

    def num_checkpoints(self) -> int:
        return len(self._known)

    # Inside.

    def _find(self, path: TinkerPath) -> Checkpoint:
        found = self._known.get((path.run_id, path.kind, path.name))
        if found is None or not _is_seen(found) or (found.expires_at is not None and found.expires_at < time.time()):
            raise _gone(path)
        return found

    def _own(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """One that the caller may change: others' public ones can only be read."""
        path = TinkerPath.of(run_id, checkpoint_id)
        found = self._find(path)
        if not callers.may_see(found.owner):
            raise _gone(path)
        return found

    def _holds(self, path: str) -> bool:
        try:
            parsed = TinkerPath.parse(path)
        except ServiceError:
            return False
        return (parsed.run_id, parsed.kind, parsed.name) in self._known

    @staticmethod
    def _newest(checkpoints: Any) -> list[Checkpoint]:
        now = time.time()
        living = [one for one in checkpoints if one.expires_at is None or one.expires_at >= now]
        return sorted(living, key=lambda one: one.created_at, reverse=True)

    def _of_run(self, run_id: str) -> list[Checkpoint]:
        return self._newest(one for one in self._known.values() if one.run_id == run_id and _is_seen(one))

    async def _model(self, run_id: str) -> Model:
        found = await self._store.read(lambda connection: select(connection, Model, MODELS.c.model_id == run_id))
        if not found or not (callers.may_see(found[0].owner) or self._of_run(run_id)):
            raise ServiceError(404, f"There is no training run {run_id[:200]!r}")
        return found[0]

    def _run_json(self, model: Model) -> dict[str, Any]:
        checkpoints = self._of_run(model.model_id)
        body: dict[str, Any] = {
            "training_run_id": model.model_id, "base_model": model.base_model, "is_lora": True,
            "model_owner": model.owner or OWNER, "corrupted": False, "lora_rank": model.rank,
            "last_request_time": iso_time(model.last_request),
            "user_metadata": text_metadata(model.user_metadata), "status": model.state,
        }  # fmt: skip
        for field, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
            body[field] = next((checkpoint_json(one) for one in checkpoints if one.kind == kind), None)
        return body

    async def _add(
        self, path: TinkerPath, described: Checkpoint, size: int, session_id: str | None, ttl_seconds: int | None,
        metadata: dict[str, Any] | None, owner: str | None,
    ) -> None:  # fmt: skip
        checkpoint = Checkpoint(
            path.run_id, path.kind, path.name, time.time(), size, described.base_model, described.rank,
            described.attention, described.mlp, described.unembed, session_id, _expiry(ttl_seconds), False, metadata,
            owner,
        )  # fmt: skip
        values = row(checkpoint)
        same = sa.and_(
            CHECKPOINTS.c.run_id == path.run_id, CHECKPOINTS.c.kind == path.kind, CHECKPOINTS.c.name == path.name
        )

        def job(connection: sa.Connection) -> None:
            connection.execute(sa.delete(CHECKPOINTS).where(same))
            connection.execute(sa.insert(CHECKPOINTS), values)

        await self._store.write(job)
        self._known[path.run_id, path.kind, path.name] = checkpoint

    async def _add_run(
        self, run_id: str, source: Checkpoint, session_id: str | None, number: int | None, owner: str | None
    ) -> None:
        found = await self._store.read(lambda connection: count(connection, Model, MODELS.c.model_id == run_id))
        if not found:
            now = time.time()
            await self._store.insert(
                Model(
                    run_id, session_id or "", number or 0, now, now, source.base_model, "copied", 1, source.rank, None,
                    source.attention, source.mlp, source.unembed, source.user_metadata, source.tinker_path,
                    owner=owner,
                )
            )  # fmt: skip

    async def _delete(self, checkpoint: Checkpoint) -> None:
        path = TinkerPath(checkpoint.run_id, checkpoint.kind, checkpoint.name)
        self._known.pop((path.run_id, path.kind, path.name), None)
        await self._store.delete(checkpoint)
        await asyncio.to_thread(self._files.remove, path)

    async def _answered(self, key: str | None, digest: str) -> dict[str, Any] | None:
        if key is None:
            return None
        statement = sa.select(IDEMPOTENCY.c.digest, IDEMPOTENCY.c.response).where(IDEMPOTENCY.c.key == key)
        found = await self._store.read(lambda connection: connection.execute(statement).one_or_none())
        if found is not None and found.digest != digest:
            raise ServiceError(400, "This idempotency key was sent before, with another request")
        return None if found is None else found.response


def _is_seen(one: Checkpoint) -> bool:
    """Whether the caller may read it."""
    return one.public or callers.may_see(one.owner)


def checkpoint_json(one: Checkpoint) -> dict[str, Any]:
    """A Checkpoint as the API has it."""
    return {
        "checkpoint_id": f"{one.kind}/{one.name}", "checkpoint_type": KINDS[one.kind], "time": iso_time(one.created_at),
        "tinker_path": one.tinker_path, "size_bytes": one.size_bytes, "public": one.public,
        "base_model": one.base_model, "training_run_id": one.run_id,
        "expires_at": None if one.expires_at is None else iso_time(one.expires_at),
        "user_metadata": text_metadata(one.user_metadata),
    }  # fmt: skip


def _expiry(ttl_seconds: int | None) -> float | None:
    return None if ttl_seconds is None else time.time() + ttl_seconds


def _gone(path: TinkerPath) -> ServiceError:
    return ServiceError(
        404, f"There is no checkpoint {path}", remedy="It was never saved, was deleted, or its ttl has run out"
    )
