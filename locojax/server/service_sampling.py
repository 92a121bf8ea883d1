"""Sampling sessions, samples and their streams."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from locojax.hosts import protocol
from locojax.hosts.protocol import EngineInfo, Failed, Finished, Sample, Sampled, Tokens
from locojax.server.futures import Futures, Promise
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_engine import EngineDesk
from locojax.server.service_errors import ServiceError
from locojax.server.service_names import ModelNames
from locojax.server.service_provenance import SequenceBook
from locojax.server.service_samplers import BASE, EngineSamplers
from locojax.server.service_settings import ServiceSettings
from locojax.server.sessions import Sessions
from locojax.server.store import Store
from locojax.server.store_tables import SAMPLERS, FutureRecord, Model, Sampler
from locojax.server.wire import SampleBody
from locojax.server.wire_checks import validate_sample
from locojax.server.wire_tensors import Csr

SAMPLER_REMEDY = "Save one with save_weights_for_sampler: it gives a sampler_weights path"
MAX_RERUNS = 1
"""A sample that was running when the engine died is run again so often; it may have been what killed it."""

LARGE_PROMPT = 4096  # tokens; larger ones are checked in a thread


class SamplingDesk:
    """The sampling endpoints. asample is idempotent on (sampling_session_id, seq_id)."""

    def __init__(
        self, store: Store, settings: ServiceSettings, futures: Futures, engine: EngineDesk, sessions: Sessions,
        names: ModelNames, checkpoints: CheckpointDesk, sequences: SequenceBook,
    ):  # fmt: skip
        self._store, self._settings, self._futures, self._engine = store, settings, futures, engine
        self._sessions, self._names, self._checkpoints, self._sequences = sessions, names, checkpoints, sequences
        self._samplers: dict[str, Sampler] = {}
        self._pending: dict[str, FutureRecord] = {}
        self.engine_samplers = EngineSamplers(engine, self._refused)
        engine.handle("sample", self._sampled, self._not_sampled)
        engine.rerun = self._rerun
        engine.started.append(self._engine_started)
        engine.ready.append(self._engine_ready)
        sessions.ended.append(self._session_ended)

    # Sampling sessions.

    async def create_session(
        self,
        session_id: str,
        sampling_session_seq_id: int,
        *,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> dict[str, Any]:
        """POST /create_sampling_session -> {"type": "create_sampling_session", "sampling_session_id"}."""
        self._sessions.require(session_id)
        sampler_id = f"{session_id}:sample:{sampling_session_seq_id}"
        answer = {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        known = self._samplers.get(sampler_id)
        if known is not None:
            if known.model_path != model_path or (model_path is None and known.base_model != base_model):
                raise ServiceError(
                    400,
                    f"The sampling session {sampler_id} was opened before, on other weights",
                    expected="a sampling_session_seq_id that this session hasn't used",
                )
            return answer
        kind, name, engine_id = self._source(base_model, model_path)
        sampler = Sampler(sampler_id, session_id, time.time(), kind, name, model_path, None, engine_id)
        self._samplers[sampler_id] = sampler
        self.engine_samplers.open_soon(engine_id)
        await self._store.insert(sampler)
        return answer

    async def join_session(self, sampling_session_id: str) -> dict[str, Any]:
        """POST /join_sampling_session -> {"type": "join_sampling_session", "client_counter"}."""
        sampler = self._require(sampling_session_id)
        sampler.num_clients += 1
        await self._store.update(sampler, "num_clients")
        return {"type": "join_sampling_session", "client_counter": sampler.num_clients}

    async def sampler(self, sampling_session_id: str) -> dict[str, Any]:
        """GET /samplers/{id} -> {"sampler_id", "base_model", "model_path"?}."""
        sampler = self._find(sampling_session_id)
        body = {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model}
        if sampler.model_path is not None:
            body["model_path"] = sampler.model_path
        return body

    def _source(self, base_model: str | None, model_path: str | None) -> tuple[str, str, str]:
        """The kind, base model and engine sampler of what a client wants to sample."""
        if model_path is None:
            if base_model is None:
                raise ServiceError(400, "Neither base_model nor model_path says what to sample")
            name = self._names.checked(base_model)
            self.engine_samplers.add(BASE, None)
            return "base", name, BASE
        found, directory = self._checkpoints.find(model_path, ("sampler_weights",), SAMPLER_REMEDY)
        # With its time of writing: a name that is overwritten is another sampler.
        engine_id = f"{found.tinker_path}@{found.created_at:.6f}"
        self.engine_samplers.add(engine_id, str(directory))
        return "checkpoint", base_model or found.base_model, engine_id

    # Samples.

    async def asample(self, body: SampleBody) -> Promise:
        """POST /asample; `body` is wire.SampleBody: sampling_session_id | base_model | model_path, seq_id, sample,
        record_stability_info."""
        if body.sampling_session_id is None:
            _, _, engine_id = self._source(body.base_model, body.model_path)
            request_id, owner, session_id = f"sample:{uuid.uuid4().hex}", "", ""
        else:
            sampler = self._require(body.sampling_session_id)
            owner, session_id, engine_id = sampler.sampler_id, sampler.session_id, sampler.engine_id
            request_id = f"{owner}:{uuid.uuid4().hex if body.seq_id is None else body.seq_id}"
            if (promise := self._promised(request_id, body)) is not None:
                return promise
        body = await self._checked(body)
        # The same request may have come in once more while this one was looked at.
        if (promise := self._promised(request_id, body)) is not None:
            return promise
        if len(self._pending) + self._engine.num_streams >= self._settings.max_waiting_samples:
            raise ServiceError(
                429, "Too many samples wait on this server", got=len(self._pending), remedy="Send it again later"
            )
        record = FutureRecord(
            request_id, "sample", session_id, owner, body.seq_id or 0, body.digest, time.time(),
            detail=_remembered(body, engine_id),
        )  # fmt: skip
        self._futures.add(record)
        self._pending[request_id] = record
        self.engine_samplers.run(record, dataclasses.replace(body.sample, sampler_id=engine_id))
        await self._futures.save(record)
        return Promise(request_id, sample_sequence_ids=tuple(_sequence_ids(record)))

    def _promised(self, request_id: str, body: SampleBody) -> Promise | None:
        """The promise of the same request, unless it failed: then it may be tried again."""
        record = self._futures.known(request_id, body.digest)
        if record is None or record.state == "failed":
            return None
        return Promise(request_id, sample_sequence_ids=tuple(_sequence_ids(record)))

    async def _checked(self, body: SampleBody) -> SampleBody:
        info = self._engine.info
        if info is None:
            return body  # the engine checks it, once it is there
        if len(body.sample.prompt) > LARGE_PROMPT:
            return await asyncio.to_thread(validate_sample, body, info)
        return validate_sample(body, info)

    async def stream(
        self, sample: Sample, *, base_model: str | None = None, model_path: str | None = None
    ) -> AsyncIterator[Tokens | Sampled]:
        """For the OpenAI endpoints: tokens as they come (when `sample.stream`), at last the whole result.

        `sample.sampler_id` is filled in here. Closing the iterator cancels the sample. Raises ServiceError for a name
        that isn't served, and for a failure (status 400: the request's fault, 500: the engine's).
        """
        _, _, engine_id = self._source(base_model, model_path)
        body = SampleBody(None, base_model, model_path, None, sample, False, None, "")
        sample = dataclasses.replace((await self._checked(body)).sample, sampler_id=engine_id)
        await self.engine_samplers.opened(engine_id)
        operation_id, queue = self._engine.open_stream(sample)
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Failed):
                    raise ServiceError(400 if item.category == "user" else 500, item.message)
                if isinstance(item, Finished):
                    yield item.result  # type: ignore[misc]
                    return
                yield item
        finally:
            self._engine.close_stream(operation_id)

    def names(self) -> list[str]:
        """What /v1/models lists: the base model's names and each sampler checkpoint's path."""
        return [*self._names.all(), *self._checkpoints.paths("sampler_weights")]

    # What the engine answers.

    def _sampled(self, record: FutureRecord, sampled: Sampled) -> Sampled:
        self._pending.pop(record.request_id, None)
        if record.detail.get("record"):
            ids = _sequence_ids(record)
            self._sequences.record(record.session_id, ids, sampled, record.detail["temperature"])
        return sampled

    def _not_sampled(self, record: FutureRecord, category: str, message: str) -> tuple[str, str]:
        self._pending.pop(record.request_id, None)
        return category, message

    def _refused(self, record: FutureRecord, category: str, message: str) -> None:
        self._pending.pop(record.request_id, None)
        self._futures.fail(record, message, category)

    def _rerun(self, record: FutureRecord, sample: Sample) -> bool:
        reruns = record.detail.get("reruns", 0)
        if reruns >= MAX_RERUNS or not self.engine_samplers.can_open(sample.sampler_id):
            return False
        record.detail["reruns"] = reruns + 1
        self.engine_samplers.run(record, sample)
        return True

    # For the training desk.

    def check_new(self, sampler_id: str) -> None:
        """ServiceError 400: there is such a sampling session."""
        if sampler_id in self._samplers:
            raise ServiceError(
                400,
                f"The sampling session {sampler_id} exists already",
                expected="a sampling_session_seq_id that this session hasn't used",
            )

    async def opened(self, model: Model, sampler_id: str, engine_id: str, kind: str) -> None:
        """The engine has made an ephemeral sampler of a model."""
        kind = "inflight" if kind == "inflight" else "ephemeral"
        sampler = Sampler(
            sampler_id, model.session_id, time.time(), kind, model.base_model, None, model.model_id, engine_id
        )
        session = self._sessions.get_now(model.session_id)
        if session is None or session.state != "active":
            sampler.state = "closed"
            self._engine.call(protocol.CloseSampler(engine_id))
        else:
            self.engine_samplers.add(engine_id, None, reopens=False)
        self._samplers[sampler_id] = sampler
        self._drop_old(model.model_id)
        await self._store.insert(sampler)

    def _drop_old(self, model_id: str) -> None:
        """Closes a model's snapshots beyond the most, those first that were used longest ago and sample nothing."""
        busy = {one.owner for one in self._pending.values()}
        own = [one for one in self.samplers() if one.model_id == model_id and one.kind == "ephemeral"]
        idle = [one for one in own if one.sampler_id not in busy]
        idle.sort(key=lambda one: self.engine_samplers.last_used(one.engine_id))
        for sampler in idle[: max(len(own) - self._settings.max_snapshots_per_model, 0)]:
            sampler.state = "dropped"
            self._store.update(sampler, "state")
            self.engine_samplers.close(sampler.engine_id)

    # How sampling sessions end.

    def stop(self, record: FutureRecord) -> None:
        """Ends a pending sample with what it has, or before it began."""
        if self.engine_samplers.withdraw(record) or self._engine.stop(record):
            self._pending.pop(record.request_id, None)
            self._futures.fail(record, "Cancelled before it ran.", "user")

    def explain(self, record: FutureRecord) -> tuple[str, str | None]:
        """Why a sample isn't done yet."""
        if not self._engine.link.ready:
            return "paused_capacity", f"the engine isn't ready: {self._engine.link.doing}"
        if record.operation_id is None:
            return "active", "the sampler's weights are being loaded"
        return "active", f"{len(self._pending)} samples are running or waiting"

    def knows(self, sampler_id: str) -> bool:
        """Whether there is or was a sampling session that the caller may know of."""
        sampler = self._samplers.get(sampler_id)
        return sampler is not None and self._sessions.may_see(sampler.session_id)

    def samplers(self) -> list[Sampler]:
        return [one for one in self._samplers.values() if one.state == "open"]

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def tick(self, now: float) -> None:
        """Closes the engine's samplers of checkpoints that nobody has open or has used for a while."""
        self.engine_samplers.close_idle({one.engine_id for one in self.samplers()}, now)

    def _session_ended(self, session_id: str, why: str) -> None:
        for record in [one for one in self._pending.values() if one.session_id == session_id]:
            if self.engine_samplers.withdraw(record) or self._engine.stop(record):
                self._refused(record, "user", f"The sample was not run: {why}.")
        own = [one for one in self._samplers.values() if one.session_id == session_id and one.state == "open"]
        for sampler in own:
            sampler.state = "closed"
            self._store.update(sampler, "state")
            self._futures.forget_logs(sampler.sampler_id)
        for engine_id in {one.engine_id for one in own if one.kind in ("ephemeral", "inflight")}:
            self.engine_samplers.close(engine_id)

    def _engine_started(self, info: EngineInfo) -> None:
        for sampler in self.samplers():
            if sampler.kind in ("ephemeral", "inflight"):
                sampler.state = "lost"
                self._store.update(sampler, "state")
        self.engine_samplers.engine_started()

    def _engine_ready(self, info: EngineInfo) -> None:
        expected = {one.detail.get("engine_id", "") for one in self._futures.pending()}
        self.engine_samplers.engine_ready(info.open_samplers, expected)

    def load(self) -> None:
        """Reads what an earlier process left. What had not been handed to the engine is lost with it."""
        for sampler in self._store.load(Sampler, order_by=SAMPLERS.c.created_at):
            self._samplers[sampler.sampler_id] = sampler
            if sampler.state != "open":
                continue
            if sampler.kind in ("ephemeral", "inflight"):
                self.engine_samplers.add(sampler.engine_id, None, reopens=False)
            elif sampler.kind == "base":
                self.engine_samplers.add(BASE, None)
            elif sampler.model_path is not None:
                try:
                    directory = self._checkpoints.find(sampler.model_path, ("sampler_weights",), "")[1]
                except ServiceError:
                    continue  # deleted: sampling from it says so
                self.engine_samplers.add(sampler.engine_id, str(directory))
        for record in self._futures.pending():
            if record.kind != "sample":
                continue
            if record.operation_id is None:
                self._futures.fail(
                    record, "The server's API process was restarted before this was run. Send it again.", "server"
                )
            else:
                self._pending[record.request_id] = record
                self._engine.link.expect(record.operation_id)

    def _find(self, sampler_id: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None or not self.knows(sampler_id):
            raise ServiceError(
                404,
                f"There is no sampling session {sampler_id[:200]!r}",
                expected="an id that create_sampling_session or save_weights_for_sampler returned",
            )
        return sampler

    def _require(self, sampler_id: str) -> Sampler:
        sampler = self._find(sampler_id)
        self._sessions.require(sampler.session_id)
        if sampler.state == "lost":
            raise ServiceError(
                410,
                f"The sampling session {sampler_id} is gone: the engine process was restarted, and its weights were "
                "only in memory",
                remedy="Save the weights again, with a name (save_weights_for_sampler) to have them outlive a restart",
            )
        if sampler.state == "dropped":
            raise ServiceError(
                410,
                f"The sampling session {sampler_id} was dropped: only the {self._settings.max_snapshots_per_model} "
                "snapshots of a model that were used last are kept",
                remedy="Save weights that you will come back to under a name: save_weights_for_sampler",
            )
        if not self.engine_samplers.holds(sampler.engine_id):
            raise ServiceError(404, f"The checkpoint {sampler.model_path} of this sampling session was deleted")
        return sampler


def _remembered(body: SampleBody, engine_id: str) -> dict[str, Any]:
    """What the end of a sample needs to know of its beginning, as JSON."""
    detail: dict[str, Any] = {"num_samples": body.sample.num_samples, "engine_id": engine_id}
    if body.record_stability_info:
        detail |= {"record": True, "temperature": body.sample.params.temperature}
    if (layout := body.target_layout) is not None:
        detail["target_layout"] = [list(layout.shape), layout.crow.tolist(), layout.columns.tolist()]
    return detail


def target_layout(detail: dict[str, Any]) -> Csr | None:
    """The layout that a sample's target_prompt_logprobs came in, out of its future's detail."""
    if "target_layout" not in detail:
        return None
    shape, crow, columns = detail["target_layout"]
    return Csr((shape[0], shape[1]), np.asarray(crow, np.int64), np.asarray(columns, np.int64))


def _sequence_ids(record: FutureRecord) -> list[str]:
    return [f"{record.request_id}:{i}" for i in range(record.detail["num_samples"])]
