"""Trainable models: their creation, their operations in order of seq_id, and what a client may ask about them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from locojax.errors import RequestError
from locojax.hosts.protocol import (
    AdapterConfig,
    CreateModel,
    EngineInfo,
    LoadWeights,
    ModelState,
    OpenSampler,
    Operation,
    OptimStep,
    RemoveModel,
    RestoreModel,
    SaveAdapter,
    Saved,
    SaveState,
)
from locojax.server.checkpoints import TinkerPath, checked_ttl
from locojax.server.futures import Futures, Promise
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_engine import EngineDesk
from locojax.server.service_errors import ServiceError
from locojax.server.service_models import Line, Slots
from locojax.server.service_names import ModelNames, digest_of
from locojax.server.service_provenance import LOSS, SequenceBook
from locojax.server.service_sampling import SamplingDesk
from locojax.server.service_settings import ServiceSettings
from locojax.server.sessions import Sessions
from locojax.server.store import Store
from locojax.server.store_tables import MODELS, FutureRecord, Model
from locojax.server.wire import TrainBody
from locojax.server.wire_checks import validate_train
from locojax.types import AdamParams, OptimStepResult

LIVE = ("creating", "live")
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


class TrainingDesk:
    """The training endpoints.

    Each operation is idempotent on (model_id, seq_id), creation on (session_id, model_seq_id): the same payload again
    gives the first promise; another payload is refused (400).

    A request that is refused is passed over in the order: the operations behind it don't wait for it.
    """

    def __init__(
        self, store: Store, settings: ServiceSettings, futures: Futures, engine: EngineDesk, sessions: Sessions,
        names: ModelNames, checkpoints: CheckpointDesk, sampling: SamplingDesk, sequences: SequenceBook,
    ):  # fmt: skip
        self._store, self._settings, self._futures, self._engine = store, settings, futures, engine
        self._sessions, self._names, self._checkpoints = sessions, names, checkpoints
        self._sampling, self._sequences = sampling, sequences
        self._lines: dict[str, Line] = {}
        self._slots = Slots()
        self._queue: collections.deque[tuple[Line, FutureRecord, Operation]] = collections.deque()
        engine.handle("create_model", self._created, self._not_created)
        engine.handle("create_from", self._created, self._not_created)
        engine.handle("load_weights", self._loaded, self._ended)
        engine.handle("optim_step", self._stepped, self._ended)
        engine.handle("unload_model", self._unloaded, self._ended)
        for kind in ("forward_backward", "forward"):
            engine.handle(kind, self._computed, self._ended)
        for kind in SAVES:
            engine.handle(kind, self._saved, self._not_saved)
        engine.started.append(self._engine_started)
        engine.ready.append(self._engine_ready)
        sessions.ended.append(self._session_ended)

    # Creation.

    async def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        adapter: AdapterConfig,
        *,
        user_metadata: Mapping[str, Any] | None = None,
        optimizer: str = "adamw",
    ) -> Promise:
        """POST /create_model. Any `optimizer` but adamw is refused."""
        _check_optimizer(optimizer)
        digest = digest_of("create", base_model, dataclasses.astuple(adapter), user_metadata)
        model_id = f"{session_id}:train:{model_seq_id}"
        if (record := self._futures.known(_creation(model_id), digest)) is not None:
            return Promise(record.request_id, model_id)
        model = self._new_model(session_id, model_seq_id, self._names.checked(base_model), adapter, user_metadata)
        return await self._create(model, "create_model", digest, CreateModel(model_id, adapter))

    async def create_model_from(
        self,
        session_id: str,
        model_seq_id: int,
        path: str,
        *,
        optimizer_state: bool = False,
        base_model: str | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        optimizer: str = "adamw",
    ) -> Promise:
        """POST /load_weights, new form: a model out of a checkpoint, with that checkpoint's adapter settings."""
        _check_optimizer(optimizer)
        digest = digest_of("load", path, optimizer_state, base_model, user_metadata)
        model_id = f"{session_id}:train:{model_seq_id}"
        if (record := self._futures.known(_creation(model_id), digest)) is not None:
            return Promise(record.request_id, model_id)
        found, directory = self._loadable(path, optimizer_state)
        adapter = AdapterConfig(found.rank, None, found.attention, found.mlp, found.unembed)
        name = self._names.checked(base_model) if base_model else found.base_model
        model = self._new_model(session_id, model_seq_id, name, adapter, user_metadata)
        model.source = path
        operation = RestoreModel(model_id, str(directory), optimizer_state)
        return await self._create(model, "create_from", digest, operation)

    def _new_model(
        self, session_id: str, number: int, base_model: str, adapter: AdapterConfig, metadata: Mapping[str, Any] | None
    ) -> Model:
        self._sessions.require(session_id)
        model_id = f"{session_id}:train:{number}"
        if model_id in self._lines:
            raise ServiceError(
                400, f"The model {model_id} exists already, and the result of its creation is no longer kept",
                expected="a model_seq_id that this session hasn't used",
            )  # fmt: skip
        own = [
            line for line in self._lines.values() if line.model.session_id == session_id and line.model.state in LIVE
        ]
        if len(own) >= self._settings.max_models_per_session:
            raise ServiceError(
                400, f"The session {session_id} has as many models as it may", got=len(own),
                remedy="Make another ServiceClient, whose session then is another, or close this one",
            )  # fmt: skip
        now = time.time()
        return Model(
            model_id, session_id, number, now, now, base_model, "creating", 1, adapter.rank, adapter.seed,
            adapter.attention, adapter.mlp, adapter.unembed, None if metadata is None else dict(metadata),
        )  # fmt: skip

    async def _create(self, model: Model, kind: str, digest: str, operation: Operation) -> Promise:
        line = self._lines[model.model_id] = Line(model)
        record = FutureRecord(
            _creation(model.model_id), kind, model.session_id, model.model_id, 0, digest, time.time(),
            detail={"path": model.source},
        )  # fmt: skip
        self._futures.add(record)
        self._queue.append((line, record, operation))
        self._admit()
        inserted = self._store.insert(model)
        await asyncio.gather(inserted, self._futures.save(record))
        return Promise(record.request_id, model.model_id)

    def _admit(self) -> None:
        """Hands creations to the engine while it has slots; refuses when none will come free by itself."""
        info = self._engine.info
        if info is None or not self._engine.link.ready:
            return
        while self._queue:
            line, record, operation = self._queue[0]
            if len(self._slots.held) >= info.max_adapters and line.model.state == "creating":
                if self._slots.leaving:
                    return
                self._queue.popleft()
                holders = self._slots.taken(list(self._slots.held.values()), info.max_adapters)
                self._futures.fail(record, self._not_created(record, "user", holders)[1], "user")
                continue
            self._queue.popleft()
            if record.state != "pending":
                continue  # its session ended meanwhile
            self._slots.held[line.model.model_id] = line
            line.admitted = True
            self._engine.run(record, operation)
            self._advance(line)

    # The operations.

    async def load_weights(self, model_id: str, seq_id: int, path: str, *, optimizer_state: bool = False) -> Promise:
        """POST /load_weights, legacy form: only as the model's first request (seq_id 1), else 400."""
        line, digest = self._require(model_id), digest_of("load_weights", path, optimizer_state)
        if (promise := self._promised(model_id, seq_id, digest)) is not None:
            return promise
        with _passing_over(self, line, seq_id):
            if seq_id > 1:
                raise ServiceError(
                    400, f"LoadWeights is not permitted with seq_id {seq_id}", expected="a model's first request",
                    remedy="Create a training client from the checkpoint instead: create_training_client_from_state",
                )  # fmt: skip
            _, directory = self._loadable(path, optimizer_state)
            operation = LoadWeights(model_id, str(directory), optimizer_state)
            return await self._operate(line, seq_id, "load_weights", digest, operation, {"path": path})

    async def get_info(self, model_id: str) -> dict[str, Any]:
        """POST /get_info."""
        model = self._require(model_id).model
        info = self._engine.info
        data: dict[str, Any] = {"model_name": model.base_model}
        if info is not None:
            data["arch"] = info.family
        if self._settings.tokenizer_id is not None:
            data["tokenizer_id"] = self._settings.tokenizer_id
        return {
            "type": "get_info", "model_id": model_id, "model_data": data, "model_name": model.base_model,
            "is_lora": True, "lora_rank": model.rank, "optimizer_config": {"type": "adamw"},
        }  # fmt: skip

    async def forward_backward(self, body: TrainBody) -> Promise:
        """POST /forward_backward and /forward; `body` is wire.TrainBody: model_id, seq_id, data, loss, loss_config,
        gradient, provenance."""
        line = self._require(body.model_id)
        seq_id = line.model.next_seq if body.seq_id is None else body.seq_id
        kind = "forward_backward" if body.gradient else "forward"
        digest = digest_of(kind, body.digest)
        if (promise := self._promised(body.model_id, seq_id, digest)) is not None:
            return promise
        with _passing_over(self, line, seq_id):
            line.check(seq_id)
            if self._engine.info is not None:
                body = await asyncio.to_thread(validate_train, body, self._engine.info)
            if body.loss == LOSS:
                body = await self._sequences.resolve(line.model.session_id, body)
            # The same request may have come in once more while this one was looked at.
            if (promise := self._promised(body.model_id, seq_id, digest)) is not None:
                return promise
            return await self._operate(line, seq_id, kind, digest, body.operation(), {})

    async def optim_step(self, model_id: str, seq_id: int, adam: AdamParams, *, optimizer: str = "adamw") -> Promise:
        """POST /optim_step."""
        line, digest = self._require(model_id), digest_of("optim_step", dataclasses.astuple(adam))
        if (promise := self._promised(model_id, seq_id, digest)) is not None:
            return promise
        with _passing_over(self, line, seq_id):
            _check_optimizer(optimizer)
            return await self._operate(line, seq_id, "optim_step", digest, OptimStep(model_id, adam), {})

    async def save_weights(
        self,
        model_id: str,
        seq_id: int,
        path: str,
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Promise:
        """POST /save_weights: a training checkpoint `tinker://<model_id>/weights/<path>`."""
        detail: dict[str, Any] = {"ttl": ttl_seconds, "overwrite": overwrite, "metadata": user_metadata}
        return await self._save(model_id, seq_id, "save_weights", "weights", path, detail)

    async def save_weights_for_sampler(
        self,
        model_id: str,
        seq_id: int,
        *,
        path: str | None = None,
        sampling_session_seq_id: int | None = None,
        kind: str = "snapshot",
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Promise:
        """POST /save_weights_for_sampler: named (a PEFT directory) or, without `path`, an ephemeral sampling session."""
        if path is not None:
            # An inflight name is a target that later saves move.
            detail = {"ttl": ttl_seconds, "overwrite": kind == "inflight", "metadata": user_metadata}
            return await self._save(model_id, seq_id, "save_weights_for_sampler", "sampler_weights", path, detail)
        line = self._require(model_id)
        digest = digest_of("save_ephemeral", sampling_session_seq_id, kind)
        if (promise := self._promised(model_id, seq_id, digest)) is not None:
            return promise
        with _passing_over(self, line, seq_id):
            if kind not in ("snapshot", "inflight"):
                raise ServiceError(400, "Unknown kind of sampler", got=repr(kind), expected="snapshot or inflight")
            number = f"{model_id}:{seq_id}" if sampling_session_seq_id is None else str(sampling_session_seq_id)
            sampler_id = f"{line.model.session_id}:sample:{number}"
            self._sampling.check_new(sampler_id)
            engine_id = f"{model_id}:inflight" if kind == "inflight" else sampler_id
            detail = {"sampler_id": sampler_id, "engine_id": engine_id, "kind": kind}
            operation = OpenSampler(engine_id, model_id=model_id)
            return await self._operate(line, seq_id, "save_weights_for_sampler", digest, operation, detail)

    async def save_weights_external(
        self,
        model_id: str,
        seq_id: int,
        path: str,
        *,
        ttl_seconds: int | None = None,
        age_encryption_recipients: tuple[str, ...] = (),
    ) -> Promise:
        """POST /save_weights_external: a PEFT directory to download."""
        detail = {"ttl": ttl_seconds, "recipients": list(age_encryption_recipients)}
        return await self._save(model_id, seq_id, "save_weights_external", "external_weights", path, detail)

    async def _save(
        self, model_id: str, seq_id: int, kind: str, folder: str, name: str, detail: dict[str, Any]
    ) -> Promise:
        line, digest = self._require(model_id), digest_of(kind, folder, name, detail)
        if (promise := self._promised(model_id, seq_id, digest)) is not None:
            return promise
        with _passing_over(self, line, seq_id):
            line.check(seq_id)
            checked_ttl(detail["ttl"])
            if detail.get("recipients"):
                raise ServiceError(
                    400, "This server can't encrypt external weights", got="age_encryption_recipients",
                    remedy="Leave it out: the files are fetched from your own machine",
                )  # fmt: skip
            path = TinkerPath.of(model_id, f"{folder}/{name}")
            self._checkpoints.reserve(path, overwrite=bool(detail.get("overwrite")))
            directory = self._checkpoints.new_directory()
            operation = SaveState(model_id, directory) if folder == "weights" else SaveAdapter(model_id, directory)
            detail = {**detail, "folder": folder, "name": name, "directory": directory}
            return await self._operate(line, seq_id, kind, digest, operation, detail)

    async def unload_model(self, model_id: str) -> Promise:
        """POST /unload_model (older SDKs): frees the model once what was submitted has run."""
        request_id = f"{model_id}:unload"
        if self._futures.get(request_id) is not None:
            return Promise(request_id, model_id)
        line = self._require(model_id)
        record = FutureRecord(
            request_id, "unload_model", line.model.session_id, model_id, line.model.next_seq, "", time.time()
        )
        self._futures.add(record)
        line.closing = record
        for held in list(line.held.values()):
            if held is not None:
                self._fail_held(held[0], f"the model was unloaded before seq_id {line.model.next_seq} arrived")
        line.held.clear()
        self._close_if_idle(line)
        await self._futures.save(record)
        return Promise(request_id, model_id)

    async def _operate(
        self, line: Line, seq_id: int, kind: str, digest: str, operation: Operation, detail: dict[str, Any]
    ) -> Promise:
        model = line.model
        line.check(seq_id)
        if line.closing is not None:
            raise ServiceError(410, f"The model {model.model_id} is being unloaded")
        record = FutureRecord(
            f"{model.model_id}:{seq_id}", kind, model.session_id, model.model_id, seq_id, digest, time.time(),
            detail=detail,
        )  # fmt: skip
        model.last_request = record.created_at
        self._futures.add(record)
        line.unfinished[seq_id] = record
        line.held[seq_id] = (record, operation)
        self._advance(line)
        await self._futures.save(record)
        return Promise(record.request_id, model.model_id)

    def _advance(self, line: Line) -> None:
        if line.advance(self._engine.run):
            self._store.update(line.model, "next_seq", "last_request")

    def _promised(self, model_id: str, seq_id: int, digest: str) -> Promise | None:
        record = self._futures.known(f"{model_id}:{seq_id}", digest)
        return None if record is None else Promise(record.request_id, model_id)

    # What the engine answers.

    def _created(self, record: FutureRecord, state: ModelState) -> dict[str, Any]:
        line = self._lines[record.owner]
        model = line.model
        adapter = state.adapter
        model.rank, model.seed = adapter.rank, adapter.seed
        model.attention, model.mlp, model.unembed = adapter.attention, adapter.mlp, adapter.unembed
        if model.state == "creating":  # its session may have ended meanwhile
            model.state = "live"
        self._store.update(model, "state", "rank", "seed", "attention", "mlp", "unembed")
        if record.kind == "create_model":
            return {"type": "create_model", "model_id": model.model_id}
        return {"type": "load_weights", "model_id": model.model_id, "path": record.detail["path"]}

    def _not_created(self, record: FutureRecord, category: str, message: str) -> tuple[str, str]:
        line = self._lines[record.owner]
        self._slots.held.pop(record.owner, None)
        if line.model.state == "creating":
            self._lose(line, "failed", f"it was never made: {message}")
        self._admit()
        return category, message

    def _loaded(self, record: FutureRecord, state: ModelState) -> dict[str, Any]:
        self._finished(record)
        return {"type": "load_weights", "model_id": record.owner, "path": record.detail["path"]}

    def _computed(self, record: FutureRecord, result: Any) -> Any:
        self._finished(record)
        return result

    def _stepped(self, record: FutureRecord, result: OptimStepResult) -> dict[str, Any]:
        self._finished(record)
        body: dict[str, Any] = {"type": "optim_step", "metrics": dict(result.metrics)}
        if result.skipped_because is not None:
            body["skipped_because"] = result.skipped_because
        return body

    async def _saved(self, record: FutureRecord, saved: Saved | None) -> dict[str, Any]:
        self._finished(record)
        line, detail = self._lines[record.owner], record.detail
        if "sampler_id" in detail:
            await self._sampling.opened(line.model, detail["sampler_id"], detail["engine_id"], detail["kind"])
            return {"type": record.kind, "sampling_session_id": detail["sampler_id"]}
        path = TinkerPath(record.owner, detail["folder"], detail["name"])
        try:
            size = await self._checkpoints.keep(
                path, detail["directory"], line.model, detail["ttl"], detail.get("metadata")
            )
        finally:
            self._checkpoints.release(path)
        body: dict[str, Any] = {"type": record.kind, "path": str(path)}
        if record.kind == "save_weights_external":
            body["size_bytes"] = size
        return body

    def _not_saved(self, record: FutureRecord, category: str, message: str) -> tuple[str, str]:
        if "folder" in record.detail:
            path = TinkerPath(record.owner, record.detail["folder"], record.detail["name"])
            self._checkpoints.release(path)
        return self._ended(record, category, message)

    def _unloaded(self, record: FutureRecord, _: None) -> dict[str, Any]:
        self._free(self._lines[record.owner])
        return {"type": "unload_model", "model_id": record.owner}

    def _ended(self, record: FutureRecord, category: str, message: str) -> tuple[str, str]:
        self._finished(record)
        line = self._lines[record.owner]
        if record.kind == "unload_model":
            self._free(line)
        if line.model.state in ("failed", "lost", "gone") and line.model.problem:
            # The engine can only say that it has no such model.
            return category, f"The model {record.owner} is not there: {line.model.problem}"
        return category, message

    def _finished(self, record: FutureRecord) -> None:
        line = self._lines[record.owner]
        line.unfinished.pop(record.seq, None)
        self._close_if_idle(line)

    def _close_if_idle(self, line: Line) -> None:
        if line.closing is not None and not line.unfinished and line.closing.operation_id is None:
            line.model.state = "removing"
            self._slots.leaving.add(line.model.model_id)
            self._engine.run(line.closing, RemoveModel(line.model.model_id))

    # How models end.

    def stop(self, record: FutureRecord) -> None:
        """Ends a pending request of a model before it runs, if it can."""
        line = self._lines.get(record.owner)
        if line is None or record.operation_id is None or self._engine.stop(record):
            if line is not None:
                line.unfinished.pop(record.seq, None)
            self._futures.fail(record, "Cancelled before it ran.", "user")

    def explain(self, record: FutureRecord) -> tuple[str, str | None]:
        """Why a request of a model isn't done yet."""
        line = self._lines.get(record.owner)
        return ("active", None) if line is None else line.explain(record)

    def knows(self, model_id: str) -> bool:
        return model_id in self._lines

    def used(self, model_id: str, seq: str) -> bool:
        """Whether the model has had a request of this number (or "create", "unload")."""
        return not seq.isdecimal() or int(seq) < self._lines[model_id].model.next_seq

    def lines(self) -> list[Line]:
        """The models that are there, oldest first."""
        return [line for line in self._lines.values() if line.model.state in LIVE]

    def _session_ended(self, session_id: str, why: str) -> None:
        for line in self._lines.values():
            if line.model.session_id != session_id or line.model.state not in LIVE:
                continue
            was_admitted = line.admitted
            self._lose(line, "gone", why)
            if was_admitted:
                self._remove(line)

    def _lose(self, line: Line, state: str, problem: str) -> None:
        """The model can't be used any more: what waits for a lower seq_id fails, and so does its creation."""
        model = line.model
        model.state, model.problem = state, problem
        self._store.update(model, "state", "problem")
        waiting = [entry[0] for entry in line.held.values() if entry is not None]
        line.held.clear()
        for record in waiting:
            self._fail_held(record, problem)
        creation = self._futures.get(_creation(model.model_id))
        if creation is not None and creation.operation_id is None and state != "failed":
            self._futures.fail(creation, f"The model {model.model_id} was not made: {problem}", "user")

    def _fail_held(self, record: FutureRecord, problem: str) -> None:
        line = self._lines[record.owner]
        line.unfinished.pop(record.seq, None)
        text = f"seq_id {record.seq} of model {record.owner} was not run: {problem}."
        category = "server" if line.model.state == "lost" else "user"
        self._futures.fail(record, self._not_held(record, text), category)

    def _not_held(self, record: FutureRecord, text: str) -> str:
        if "folder" in record.detail:
            self._checkpoints.release(TinkerPath(record.owner, record.detail["folder"], record.detail["name"]))
        return text

    def _remove(self, line: Line) -> None:
        model_id = line.model.model_id
        self._slots.leaving.add(model_id)
        self._engine.call(RemoveModel(model_id)).add_done_callback(lambda done: self._removed(line, done))

    def _removed(self, line: Line, done: asyncio.Future[Any]) -> None:
        # Whether it was removed or the engine never had it: it holds no slot.
        if not done.cancelled():
            self._slots.held.pop(line.model.model_id, None)
            self._slots.leaving.discard(line.model.model_id)
            self._admit()

    def _free(self, line: Line) -> None:
        model = line.model
        if model.state not in ("lost", "failed"):
            model.state, model.problem = "gone", "it was unloaded"
            self._store.update(model, "state", "problem")
        line.closing = None
        self._slots.held.pop(model.model_id, None)
        self._slots.leaving.discard(model.model_id)
        self._admit()

    # The engine's life, and ours.

    def _engine_started(self, info: EngineInfo) -> None:
        problem = "the engine process was restarted, and the weights that it held in memory are gone"
        for line in self._lines.values():
            if not line.admitted or line.model.state not in (*LIVE, "removing"):
                continue
            last = next(iter(self._checkpoints_of(line.model)), None)
            kept = f"its last training checkpoint is {last}" if last else "it has no training checkpoint"
            for record in line.unfinished.values():
                if record.operation_id is not None and self._engine.link.withdraw(record.operation_id):
                    self._futures.fail(record, f"{problem}; {kept}", "server")
            line.unfinished.clear()
            self._lose(line, "lost", f"{problem}; {kept}")
            line.admitted = False
        self._slots = Slots()

    def _checkpoints_of(self, model: Model) -> list[str]:
        prefix = f"tinker://{model.model_id}/weights/"
        return [path for path in self._checkpoints.paths("weights") if path.startswith(prefix)]

    def _engine_ready(self, info: EngineInfo) -> None:
        for model_id in set(info.open_models).difference(self._slots.held):
            self._engine.call(RemoveModel(model_id))  # of a session that ended while we were away
        self._admit()

    def load(self) -> None:
        """Reads what an earlier process left. What had arrived, but was not handed to the engine, is lost with it."""
        for model in self._store.load(Model, order_by=MODELS.c.created_at):
            line = self._lines[model.model_id] = Line(model, admitted=model.state in (*LIVE, "removing"))
            if model.state in LIVE:
                self._slots.held[model.model_id] = line
        for record in sorted(self._futures.pending(), key=lambda one: one.seq):
            found = self._lines.get(record.owner)
            if found is None or record.kind == "sample":
                continue
            if record.operation_id is not None:
                if record.request_id != _creation(record.owner):
                    found.unfinished[record.seq] = record
                self._engine.link.expect(record.operation_id)
            else:
                self._futures.fail(
                    record, "The server's API process was restarted before this was run. Send it again.", "server"
                )
                found.pass_over(record.seq)
                if record.request_id == _creation(record.owner):
                    found.model.state, found.model.problem = "failed", "the server was restarted before it was made"
                    self._store.update(found.model, "state", "problem")
                    self._slots.held.pop(record.owner, None)
        for line in self._lines.values():
            self._advance(line)

    def _require(self, model_id: str) -> Line:
        line = self._lines.get(model_id)
        if line is None:
            raise ServiceError(
                404, f"There is no model {model_id[:200]!r}", expected="a model_id that create_model returned"
            )
        model = line.model
        if model.state not in LIVE:
            raise ServiceError(
                400 if model.state == "failed" else 410,
                f"The model {model_id} is not there: {model.problem or 'it was unloaded'}",
                remedy="Create a new one, or create one from a checkpoint",
            )
        self._sessions.require(model.session_id)
        return line

    def _loadable(self, path: str, optimizer_state: bool) -> tuple[Any, Any]:
        parsed = TinkerPath.parse(path)
        if optimizer_state:
            remedy = (
                "Load it without the optimizer state, or load a training checkpoint: save_state gives "
                f"tinker://{parsed.run_id}/weights/<name>"
            )
            return self._checkpoints.find(path, ("weights",), remedy)
        return self._checkpoints.find(path, ("weights", "sampler_weights", "external_weights"), "")

    def pass_over(self, line: Line, seq_id: int) -> None:
        """A request was refused: those behind it must not wait for it."""
        line.pass_over(seq_id)
        self._advance(line)


class _passing_over:
    """Whatever refuses a request inside leaves no gap in its model's order."""

    def __init__(self, desk: TrainingDesk, line: Line, seq_id: int):
        self._desk, self._line, self._seq_id = desk, line, seq_id

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError | ServiceError):
            self._desk.pass_over(self._line, self._seq_id)


def _creation(model_id: str) -> str:
    return f"{model_id}:create"


def _check_optimizer(name: str) -> None:
    if name not in ("adamw", "adam"):
        raise ServiceError(400, "This server has no such optimizer", got=repr(name), expected="'adamw'")
