"""How trainable models come to be, hold a slot, take their operations in order, and end.

create -> (a slot is free) -> creating -> live -> gone (unloaded, or its session ended)
                          \\-> failed          \\-> lost (with the engine process)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from locojax.errors import RequestError
from locojax.hosts.protocol import AdapterConfig, EngineInfo, ModelState, Operation, RemoveModel
from locojax.server import callers
from locojax.server.checkpoints import TinkerPath
from locojax.server.futures import Futures, Promise
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_engine import EngineDesk
from locojax.server.service_errors import ServiceError
from locojax.server.service_models import Line, Slots
from locojax.server.service_settings import ServiceSettings
from locojax.server.sessions import Sessions
from locojax.server.store import Store
from locojax.server.store_tables import MODELS, FutureRecord, Model

LIVE = ("creating", "live")


class Models:
    """All models, by id, those that have ended too."""

    def __init__(
        self, store: Store, settings: ServiceSettings, futures: Futures, engine: EngineDesk, sessions: Sessions,
        checkpoints: CheckpointDesk,
    ):  # fmt: skip
        self._store, self._settings, self._futures, self._engine = store, settings, futures, engine
        self._sessions, self._checkpoints = sessions, checkpoints
        self._lines: dict[str, Line] = {}
        self._slots = Slots()
        self._queue: collections.deque[tuple[Line, FutureRecord, Operation]] = collections.deque()
        engine.handle("create_model", self._created, self._not_created)
        engine.handle("create_from", self._created, self._not_created)
        engine.handle("unload_model", self._unloaded, self.ended)
        engine.started.append(self._engine_started)
        engine.ready.append(self._engine_ready)
        sessions.ended.append(self._session_ended)

    # For the training desk.

    def new_model(
        self, session_id: str, number: int, base_model: str, adapter: AdapterConfig, metadata: Mapping[str, Any] | None
    ) -> Model:
        """A model that isn't there yet. ServiceError 400: it is, or the session has as many as it may."""
        session = self._sessions.require(session_id)
        model_id = f"{session_id}:train:{number}"
        if model_id in self._lines:
            raise ServiceError(
                400, f"The model {model_id} exists already, and the result of its creation is no longer kept",
                expected="a model_seq_id that this session hasn't used",
            )  # fmt: skip
        own = [line for line in self.lines() if line.model.session_id == session_id]
        if len(own) >= self._settings.max_models_per_session:
            raise ServiceError(
                400, f"The session {session_id} has as many models as it may", got=len(own),
                remedy="Make another ServiceClient, whose session then is another, or close this one",
            )  # fmt: skip
        now = time.time()
        return Model(
            model_id, session_id, number, now, now, base_model, "creating", 1, adapter.rank, adapter.seed,
            adapter.attention, adapter.mlp, adapter.unembed, None if metadata is None else dict(metadata),
            owner=session.owner,
        )  # fmt: skip

    async def create(self, model: Model, kind: str, digest: str, operation: Operation) -> Promise:
        """Makes the model as soon as there is a slot."""
        line = self._lines[model.model_id] = Line(model)
        record = FutureRecord(
            creation_of(model.model_id), kind, model.session_id, model.model_id, 0, digest, time.time(),
            detail={"path": model.source},
        )  # fmt: skip
        self._futures.add(record)
        self._queue.append((line, record, operation))
        self._admit()
        inserted = self._store.insert(model)
        await asyncio.gather(inserted, self._futures.save(record))
        return Promise(record.request_id, model.model_id)

    async def unload(self, model_id: str) -> Promise:
        """Frees a model once what was submitted has run."""
        request_id = f"{model_id}:unload"
        if self._futures.get(request_id) is not None:
            return Promise(request_id, model_id)
        line = self.require(model_id)
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

    async def operate(
        self, line: Line, seq_id: int, kind: str, digest: str, operation: Operation, detail: dict[str, Any]
    ) -> Promise:
        """Puts an operation into its model's order."""
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
        line.advance(self._engine.run)
        await self._futures.save(record, self._store.updating(model, "next_seq", "last_request"))
        return Promise(record.request_id, model.model_id)

    def creation(self, session_id: str, number: int, digest: str) -> Promise | None:
        """The promise of the same creation, if it was asked for before. ServiceError 404: there is no such session."""
        self._sessions.known(session_id)
        model_id = f"{session_id}:train:{number}"
        return self._promise(creation_of(model_id), model_id, digest)

    def promised(self, model_id: str, seq_id: int, digest: str) -> Promise | None:
        """The promise of the same request, if it came before."""
        return self._promise(f"{model_id}:{seq_id}", model_id, digest)

    def _promise(self, request_id: str, model_id: str, digest: str) -> Promise | None:
        record = self._futures.known(request_id, digest)
        return None if record is None else Promise(record.request_id, model_id)

    def finished(self, record: FutureRecord) -> None:
        """An operation has its result."""
        line = self._lines[record.owner]
        line.unfinished.pop(record.seq, None)
        self._close_if_idle(line)

    def ended(self, record: FutureRecord, category: str, message: str) -> tuple[str, str]:
        """An operation has failed: the category and text to tell."""
        self.finished(record)
        line = self._lines[record.owner]
        if record.kind == "unload_model":
            self._free(line)
        if line.model.state in ("failed", "lost", "gone") and line.model.problem:
            # The engine can only say that it has no such model.
            return category, f"The model {record.owner} is not there: {line.model.problem}"
        return category, message

    def require(self, model_id: str) -> Line:
        """A model that is there, of a session that lives. ServiceError 404, 410, or 400 for one that was never made."""
        line = self._lines.get(model_id)
        if line is None or not callers.may_see(line.model.owner):
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

    @contextlib.contextmanager
    def passing_over(self, line: Line, seq_id: int) -> Iterator[None]:
        """Whatever refuses a request inside leaves no gap in its model's order: those behind it don't wait."""
        try:
            yield
        except (RequestError, ServiceError):
            line.pass_over(seq_id)
            self._advance(line)
            raise

    def line(self, model_id: str) -> Line:
        """A model that is known, and what has arrived for it."""
        return self._lines[model_id]

    def stop(self, record: FutureRecord) -> None:
        """Ends a pending request of a model before it runs, if it can."""
        line = self._lines[record.owner]
        if record.operation_id is not None and not self._engine.stop(record):
            return  # the engine has it, and will answer
        line.unfinished.pop(record.seq, None)
        self._futures.fail(record, self._not_held(record, "Cancelled before it ran."), "user")
        if record.request_id == creation_of(record.owner):
            self._lose(line, "failed", "its creation was cancelled")

    def explain(self, record: FutureRecord) -> tuple[str, str | None]:
        """Why a request of a model isn't done yet."""
        return self._lines[record.owner].explain(record)

    def knows(self, model_id: str) -> bool:
        return model_id in self._lines

    def used(self, model_id: str, seq: str) -> bool:
        """Whether the model has had a request of this number (or "create", "unload")."""
        return seq in ("create", "unload") or (seq.isdecimal() and int(seq) < self._lines[model_id].model.next_seq)

    def lines(self) -> list[Line]:
        """The models that are there, oldest first."""
        return [line for line in self._lines.values() if line.model.state in LIVE]

    # Slots.

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
                holders = self._slots.taken(info.max_adapters, line.model.owner)
                self._futures.fail(record, self._not_created(record, "user", holders)[1], "user")
                continue
            self._queue.popleft()
            if record.state != "pending":
                continue  # its session ended meanwhile
            self._slots.held[line.model.model_id] = line
            line.admitted = True
            self._engine.run(record, operation)
            self._advance(line)

    def _advance(self, line: Line) -> None:
        if line.advance(self._engine.run):
            self._store.update(line.model, "next_seq", "last_request")

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

    def _unloaded(self, record: FutureRecord, _: None) -> dict[str, Any]:
        self._free(self._lines[record.owner])
        return {"type": "unload_model", "model_id": record.owner}

    def _close_if_idle(self, line: Line) -> None:
        if line.closing is not None and not line.unfinished and line.closing.operation_id is None:
            line.model.state = "removing"
            self._slots.leaving.add(line.model.model_id)
            self._engine.run(line.closing, RemoveModel(line.model.model_id))

    # Ends.

    def _session_ended(self, session_id: str, why: str) -> None:
        for line in self._lines.values():
            if line.model.session_id != session_id or line.model.state not in LIVE:
                continue
            was_admitted = line.admitted
            self._lose(line, "gone", why)
            if was_admitted:
                self._remove(line.model.model_id)

    def _lose(self, line: Line, state: str, problem: str) -> None:
        """The model can't be used any more: what waits for a lower seq_id fails, and so does its creation."""
        model = line.model
        model.state, model.problem = state, problem
        self._store.update(model, "state", "problem")
        waiting = [entry[0] for entry in line.held.values() if entry is not None]
        line.held.clear()
        for record in waiting:
            self._fail_held(record, problem)
        creation = self._futures.get(creation_of(model.model_id))
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

    def _remove(self, model_id: str) -> None:
        self._slots.leaving.add(model_id)
        self._engine.call(RemoveModel(model_id)).add_done_callback(lambda done: self._removed(model_id, done))

    def _removed(self, model_id: str, done: asyncio.Future[Any]) -> None:
        # Whether it was removed or the engine never had it: it holds no slot.
        if not done.cancelled():
            self._slots.held.pop(model_id, None)
            self._slots.leaving.discard(model_id)
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
            self._slots.held[model_id] = None
            self._remove(model_id)
        self._admit()

    def load(self) -> None:
        """Reads what an earlier process left. What had arrived, but was not handed to the engine, is lost with it."""
        for model in self._store.load(Model, order_by=MODELS.c.created_at):
            line = self._lines[model.model_id] = Line(model, admitted=model.state in (*LIVE, "removing"))
            if model.state in LIVE:
                self._slots.held[model.model_id] = line
                line.stepped = model.next_seq - 1  # it may have been; that it is saved twice does no harm
        expected: set[str] = set()
        for record in sorted(self._futures.pending(), key=lambda one: one.seq):
            found = self._lines.get(record.owner)
            if found is None or record.kind == "sample":
                continue
            if record.operation_id is not None:
                if record.request_id != creation_of(record.owner):
                    found.unfinished[record.seq] = record
                expected.add(record.request_id)
                self._engine.link.expect(record.operation_id)
            else:
                self._futures.fail(
                    record, "The server's API process was restarted before this was run. Send it again.", "server"
                )
                found.pass_over(record.seq)
        for line in self._lines.values():
            if line.model.state == "creating" and creation_of(line.model.model_id) not in expected:
                self._slots.held.pop(line.model.model_id, None)
                self._lose(line, "failed", "the server was restarted before it was made")
            self._advance(line)


def creation_of(model_id: str) -> str:
    """The request id of a model's creation."""
    return f"{model_id}:create"
