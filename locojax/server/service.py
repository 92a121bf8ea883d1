"""The Tinker API without HTTP: what each endpoint does, over a store, an engine connection and futures between them.

`Service` is put together here, and is nothing but its parts:

    sessions      create_session .. sessions/search         (sessions.py)
    training      create_model, forward_backward .. unload   (service_training.py)
    sampling      create_sampling_session, asample, streams  (service_sampling.py)
    futures       retrieve_future(s), cancel_future          (futures.py)
    checkpoints   training runs, checkpoints, weights_info   (service_checkpoints.py)

Every method is a coroutine of the one event loop, takes what a request holds and returns the JSON that answers it; a
refusal is a `ServiceError`, whose status is 400, 401, 403, 404, 410, 413, 422 or 429 (asample alone, when too much
waits): clients repeat 408, 409, 429 and 5xx for minutes, so what repeating can't mend is none of these.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import secrets
import time
from typing import Any

from locojax.server.checkpoints import CheckpointFiles
from locojax.server.connection import EngineLink
from locojax.server.futures import Futures
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_engine import EngineDesk
from locojax.server.service_errors import ServiceError
from locojax.server.service_keeping import Keeper
from locojax.server.service_lifecycle import Models
from locojax.server.service_names import ModelNames
from locojax.server.service_provenance import SequenceBook
from locojax.server.service_sampling import SamplingDesk
from locojax.server.service_settings import ServiceSettings
from locojax.server.service_tenure import Tenure
from locojax.server.service_training import TrainingDesk
from locojax.server.sessions import Sessions
from locojax.server.store import Store
from locojax.server.store_tables import FutureRecord

__all__ = ["Service", "ServiceSettings"]

log = logging.getLogger(__name__)

TRIM_EVERY = 30.0
MAX_TELEMETRY = 300


class Service:
    """One server: `start` it inside the event loop that serves it, `stop` it there.

    Args:
      settings: see there.
      address: the engine process's socket, for `multiprocessing.connection.Client`.
      authkey: the engine connection's key.

    Raises:
      ConfigError: the database can't be opened, is of another version, or another server uses it.
    """

    def __init__(self, settings: ServiceSettings, address: str, authkey: bytes):
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._store = store = Store(settings.database_url)
        self._tenure = None if settings.database is None else Tenure(store, settings.data_dir)
        if self._tenure is not None:
            self._tenure.take()
        self.sessions = Sessions(store, settings)
        self.futures = Futures(store, settings)
        self._engine = engine = EngineDesk(self.futures)
        engine.link = EngineLink(address, authkey, engine, incarnation=store.meta("incarnation"))
        engine.started.append(lambda info: self._met(info.incarnation))
        self._names = names = ModelNames(settings.model_names, lambda: engine.info)
        sequences = self._sequences = SequenceBook(store, settings)
        files = CheckpointFiles(settings.data_dir)
        self.checkpoints = CheckpointDesk(store, settings, files, names, self.sessions, self._signing_key())
        self.sampling = SamplingDesk(
            store, settings, self.futures, engine, self.sessions, names, self.checkpoints, sequences
        )
        self._models = Models(store, settings, self.futures, engine, self.sessions, self.checkpoints)
        self.training = TrainingDesk(
            settings, self.futures, engine, names, self._models, self.checkpoints, self.sampling, sequences
        )
        self._keeper = Keeper(engine, self._models, self.checkpoints)
        self.futures.explain = self._explain
        self.futures.missing = self._missing
        self.futures.may_see = self.sessions.may_see
        self.futures.stop = self._stop
        self.futures.stored = engine.link.acknowledge
        self.futures.find_sampler = self._find_sampler
        self._telemetry: collections.deque[dict[str, Any]] = collections.deque(maxlen=MAX_TELEMETRY)
        self._started_at = time.time()
        self._upkeep: asyncio.Task[None] | None = None

    def _met(self, incarnation: str) -> None:
        self._store.set_meta("incarnation", incarnation)

    def _signing_key(self) -> bytes:
        key = self._store.meta("signing_key")
        if key is None:
            key = secrets.token_hex(32)
            self._store.submit_meta("signing_key", key)
        return bytes.fromhex(key)

    async def start(self) -> None:
        """Picks up what an earlier process left, and begins to connect to the engine."""
        self.sessions.load()
        self.futures.load()
        writing = {one.detail["directory"] for one in self.futures.pending() if "directory" in one.detail}
        self.checkpoints.load(writing)
        self._models.load()
        self.sampling.load()
        for name, directory in self._settings.imports:
            imported = await self.checkpoints.import_peft(directory, name)
            log.info("Imported %s as %s", directory, imported["tinker_path"])
        self._engine.link.start()
        self._upkeep = asyncio.create_task(self._keep_up(), name="service-upkeep")

    async def keep_models(self) -> list[str]:
        """Saves what models have learnt since they were last saved, as the server is about to end; see `Keeper`."""
        return await self._keeper.keep(self._settings.keep_seconds)

    async def stop(self) -> None:
        """Stops the background tasks, writes what is unwritten, and leaves the engine as it is."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await self._engine.link.stop()
        await self._engine.settle()
        self.futures.write_deliveries()
        if self._tenure is not None:
            self._tenure.release()
        await asyncio.to_thread(self._store.close)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Ready or not, and the body of healthz: {"status": "ok"} or {"status": "starting", "doing": ..., ...}."""
        link = self._engine.link
        if link.ready:
            return True, {"status": "ok"}
        return False, {"status": "starting", "doing": link.doing, "seconds": round(time.time() - self._started_at, 1)}

    def capabilities(self) -> dict[str, Any]:
        """GET /get_server_capabilities."""
        info = self._engine.info
        models = []
        for name in self._names.all():
            model: dict[str, Any] = {"model_name": name, "trainable": True, "sampleable": True}
            if info is not None:
                model["max_context_length"] = info.max_context
            models.append(model)
        return {"supported_models": models}

    def status(self) -> dict[str, Any]:
        """For the web page and metrics.

        engine (state: "ready" or "starting", doing, num_restarts, info, gauges, totals, seconds, queues), futures by
        state, sessions, models, samplers, checkpoints (their number), errors (the last ones), uptime. Of what has an
        owner, the caller's; the engine's figures are of all.
        """
        seen = self.sessions.may_see
        return {
            "engine": self._engine_status(),
            "futures": self.futures.counts(),
            "sessions": [self._session_status(session) for session in self.sessions.active()],
            "models": [self._model_status(line) for line in self._models.lines() if seen(line.model.session_id)],
            "samplers": [
                {"sampler_id": one.sampler_id, "kind": one.kind, "model_path": one.model_path, "model_id": one.model_id}
                for one in self.sampling.samplers()
                if seen(one.session_id)
            ],
            "num_checkpoints": self.checkpoints.num_checkpoints(),
            "errors": [one for one in self.futures.last_errors if seen(_session_of(one["request_id"]))],
            "uptime": time.time() - self._started_at,
            "names": [*self._names.all()],
        }  # fmt: skip

    def _engine_status(self) -> dict[str, Any]:
        link, status, info = self._engine.link, self._engine.link.status, self._engine.info
        body: dict[str, Any] = {
            "state": "ready" if link.ready else "starting", "doing": link.doing,
            "num_restarts": max(link.num_starts - 1, 0), "num_inflight": link.num_inflight,
            "num_waiting": link.num_waiting, "gauges": {}, "totals": {}, "seconds": {}, "queues": {}, "info": {},
        }  # fmt: skip
        if status is not None:
            body |= {
                "gauges": dict(status.gauges), "totals": dict(status.totals), "seconds": dict(status.seconds),
                "queues": {name: n for name, n in status.queues.items() if self.sessions.may_see(_session_of(name))},
            }  # fmt: skip
        if info is not None:
            body["info"] = {
                "model_name": info.model_name, "family": info.family, "vocab_size": info.vocab_size,
                "max_context": info.max_context, "max_row_tokens": info.max_row_tokens, "max_rank": info.max_rank,
                "max_adapters": info.max_adapters,
            }  # fmt: skip
        return body

    def _session_status(self, session: Any) -> dict[str, Any]:
        return {
            "session_id": session.session_id, "display_name": session.display_name, "created_at": session.created_at,
            "seconds_since_heartbeat": time.time() - session.last_seen, "sdk_version": session.sdk_version,
        }  # fmt: skip

    def _model_status(self, line: Any) -> dict[str, Any]:
        model = line.model
        return {
            "model_id": model.model_id, "session_id": model.session_id, "base_model": model.base_model,
            "rank": model.rank, "state": model.state, "next_seq": model.next_seq, "num_waiting": len(line.held),
            "num_unfinished": len(line.unfinished), "last_request": model.last_request,
        }  # fmt: skip

    def accept_telemetry(self, events: dict[str, Any]) -> dict[str, Any]:
        """POST /telemetry: kept in memory, the last few hundred, never sent on."""
        self._telemetry.append(events)
        return {"status": "accepted"}

    # What the futures ask of the desks.

    def _explain(self, record: FutureRecord) -> tuple[str, str | None]:
        return self.sampling.explain(record) if record.kind == "sample" else self._models.explain(record)

    def _stop(self, record: FutureRecord) -> None:
        (self.sampling if record.kind == "sample" else self._models).stop(record)

    def _missing(self, request_id: str) -> ServiceError:
        """A request of a model or sampling session that we know was there once, or may as well be sent again."""
        owner, _, last = request_id.rpartition(":")
        was_known = (self._models.knows(owner) and self._models.used(owner, last)) or self.sampling.knows(owner)
        if was_known and self.sessions.may_see(_session_of(request_id)):
            return ServiceError(
                410,
                f"The result of the request {request_id} is no longer kept",
                remedy=f"Results are kept for {self._settings.delivered_retention:g} s after they were fetched, "
                f"and {self._settings.undelivered_retention:g} s if they weren't",
            )
        return ServiceError(404, f"There is no request {request_id[:200]!r}")

    def _find_sampler(self, sampling_session_id: str) -> None:
        if not self.sampling.knows(sampling_session_id):
            raise ServiceError(404, f"There is no sampling session {sampling_session_id[:200]!r}")

    async def _keep_up(self) -> None:
        """Ends what has run out: sessions every tick, results and checkpoints now and then."""
        trimmed = 0.0
        while True:
            await asyncio.sleep(self._settings.tick)
            now = time.time()
            try:
                if self._tenure is not None:
                    self._tenure.renew()
                await self.sessions.expire(now)
                if now - trimmed >= min(TRIM_EVERY, self._settings.delivered_retention):
                    trimmed = now
                    await self.futures.trim(now)
                    await self.checkpoints.expire(now)
                    await self._sequences.trim(now)
                    self.sampling.tick(now)
            except Exception:  # a full disk or an absent database must not end all upkeep: the next tick tries again
                log.exception("Upkeep failed; trying again in %g s", self._settings.tick)


def _session_of(id: str) -> str:
    """The session that a model, a sampling session or a request belongs to: their ids begin with its own."""
    return id.partition(":")[0]
