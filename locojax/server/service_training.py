"""Trainable models: their creation, their operations in order of seq_id, and what a client may ask about them."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from locojax.hosts.protocol import (
    AdapterConfig,
    CreateModel,
    LoadWeights,
    ModelState,
    OpenSampler,
    OptimStep,
    RestoreModel,
    SaveAdapter,
    Saved,
    SaveState,
)
from locojax.server import encryption
from locojax.server.checkpoints import TinkerPath, checked_ttl
from locojax.server.futures import Futures, Promise
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_engine import EngineDesk
from locojax.server.service_errors import ServiceError
from locojax.server.service_lifecycle import Models
from locojax.server.service_names import ModelNames, digest_of
from locojax.server.service_provenance import LOSS, SequenceBook
from locojax.server.service_sampling import SamplingDesk
from locojax.server.service_settings import ServiceSettings
from locojax.server.store_tables import FutureRecord
from locojax.server.wire import TrainBody
from locojax.server.wire_checks import validate_train
from locojax.types import AdamParams, OptimStepResult

SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


class TrainingDesk:
    """The training endpoints.

    Each operation is idempotent on (model_id, seq_id), creation on (session_id, model_seq_id): the same payload again
    gives the first promise; another payload is refused (400).

    A request that is refused is passed over in the order: the operations behind it don't wait for it.
    """

    def __init__(
        self, settings: ServiceSettings, futures: Futures, engine: EngineDesk, names: ModelNames, models: Models,
        checkpoints: CheckpointDesk, sampling: SamplingDesk, sequences: SequenceBook,
    ):  # fmt: skip
        self._settings, self._futures, self._engine, self._names = settings, futures, engine, names
        self._models, self._checkpoints, self._sampling, self._sequences = models, checkpoints, sampling, sequences
        engine.handle("load_weights", self._loaded, models.ended)
        engine.handle("optim_step", self._stepped, models.ended)
        for kind in ("forward_backward", "forward"):
            engine.handle(kind, self._computed, models.ended)
        for kind in SAVES:
            engine.handle(kind, self._saved, self._not_saved)

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
        if (promise := self._models.creation(session_id, model_seq_id, digest)) is not None:
            return promise
        model = self._models.new_model(
            session_id, model_seq_id, self._names.checked(base_model), adapter, user_metadata
        )
        return await self._models.create(model, "create_model", digest, CreateModel(model.model_id, adapter))

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
        if (promise := self._models.creation(session_id, model_seq_id, digest)) is not None:
            return promise
        found, directory = self._loadable(path, optimizer_state)
        adapter = AdapterConfig(found.rank, None, found.attention, found.mlp, found.unembed)
        name = self._names.checked(base_model) if base_model else found.base_model
        model = self._models.new_model(session_id, model_seq_id, name, adapter, user_metadata)
        model.source = path
        operation = RestoreModel(model.model_id, str(directory), optimizer_state)
        return await self._models.create(model, "create_from", digest, operation)

    # The operations.

    async def load_weights(self, model_id: str, seq_id: int, path: str, *, optimizer_state: bool = False) -> Promise:
        """POST /load_weights, legacy form: only as the model's first request (seq_id 1), else 400."""
        line, digest = self._models.require(model_id), digest_of("load_weights", path, optimizer_state)
        if (promise := self._models.promised(model_id, seq_id, digest)) is not None:
            return promise
        with self._models.passing_over(line, seq_id):
            if seq_id > 1:
                raise ServiceError(
                    400, f"LoadWeights is not permitted with seq_id {seq_id}", expected="a model's first request",
                    remedy="Create a training client from the checkpoint instead: create_training_client_from_state",
                )  # fmt: skip
            _, directory = self._loadable(path, optimizer_state)
            operation = LoadWeights(model_id, str(directory), optimizer_state)
            return await self._models.operate(line, seq_id, "load_weights", digest, operation, {"path": path})

    async def get_info(self, model_id: str) -> dict[str, Any]:
        """POST /get_info."""
        model = self._models.require(model_id).model
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
        line = self._models.require(body.model_id)
        seq_id = line.model.next_seq if body.seq_id is None else body.seq_id
        kind = "forward_backward" if body.gradient else "forward"
        digest = digest_of(kind, body.digest)
        if (promise := self._models.promised(body.model_id, seq_id, digest)) is not None:
            return promise
        with self._models.passing_over(line, seq_id):
            line.check(seq_id)
            if self._engine.info is not None:
                body = await asyncio.to_thread(validate_train, body, self._engine.info)
            if body.loss == LOSS:
                body = await self._sequences.resolve(line.model.session_id, body)
            # The same request may have come in once more while this one was looked at.
            if (promise := self._models.promised(body.model_id, seq_id, digest)) is not None:
                return promise
            return await self._models.operate(line, seq_id, kind, digest, body.operation(), {})

    async def optim_step(self, model_id: str, seq_id: int, adam: AdamParams, *, optimizer: str = "adamw") -> Promise:
        """POST /optim_step."""
        line, digest = self._models.require(model_id), digest_of("optim_step", dataclasses.astuple(adam))
        if (promise := self._models.promised(model_id, seq_id, digest)) is not None:
            return promise
        with self._models.passing_over(line, seq_id):
            _check_optimizer(optimizer)
            return await self._models.operate(line, seq_id, "optim_step", digest, OptimStep(model_id, adam), {})

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
        """POST /save_weights_for_sampler: a PEFT directory or, without `path`, an ephemeral sampling session."""
        if path is not None:
            # An inflight name is a target that later saves move.
            named: dict[str, Any] = {"ttl": ttl_seconds, "overwrite": kind == "inflight", "metadata": user_metadata}
            return await self._save(model_id, seq_id, "save_weights_for_sampler", "sampler_weights", path, named)
        line = self._models.require(model_id)
        digest = digest_of("save_ephemeral", sampling_session_seq_id, kind)
        if (promise := self._models.promised(model_id, seq_id, digest)) is not None:
            return promise
        with self._models.passing_over(line, seq_id):
            if kind not in ("snapshot", "inflight"):
                raise ServiceError(400, "Unknown kind of sampler", got=repr(kind), expected="snapshot or inflight")
            number = f"{model_id}:{seq_id}" if sampling_session_seq_id is None else str(sampling_session_seq_id)
            sampler_id = f"{line.model.session_id}:sample:{number}"
            self._sampling.check_new(sampler_id)
            engine_id = f"{model_id}:inflight" if kind == "inflight" else sampler_id
            detail = {"sampler_id": sampler_id, "engine_id": engine_id, "kind": kind}
            operation = OpenSampler(engine_id, model_id=model_id)
            return await self._models.operate(line, seq_id, "save_weights_for_sampler", digest, operation, detail)

    async def save_weights_external(
        self,
        model_id: str,
        seq_id: int,
        path: str,
        *,
        ttl_seconds: int | None = None,
        age_encryption_recipients: tuple[str, ...] = (),
    ) -> Promise:
        """POST /save_weights_external: a PEFT directory to download, each file encrypted if there are recipients."""
        detail = {"ttl": ttl_seconds, "recipients": list(age_encryption_recipients)}
        return await self._save(model_id, seq_id, "save_weights_external", "external_weights", path, detail)

    async def _save(
        self, model_id: str, seq_id: int, kind: str, folder: str, name: str, detail: dict[str, Any]
    ) -> Promise:
        line, digest = self._models.require(model_id), digest_of(kind, folder, name, detail)
        if (promise := self._models.promised(model_id, seq_id, digest)) is not None:
            return promise
        with self._models.passing_over(line, seq_id):
            line.check(seq_id)
            checked_ttl(detail["ttl"])
            encryption.recipients(detail.get("recipients", ()))  # refuses what could not be encrypted to
            path = TinkerPath.of(model_id, f"{folder}/{name}")
            self._checkpoints.reserve(path, overwrite=bool(detail.get("overwrite")))
            directory = self._checkpoints.new_directory()
            operation = SaveState(model_id, directory) if folder == "weights" else SaveAdapter(model_id, directory)
            detail = {**detail, "folder": folder, "name": name, "directory": directory}
            return await self._models.operate(line, seq_id, kind, digest, operation, detail)

    async def unload_model(self, model_id: str) -> Promise:
        """POST /unload_model (older SDKs): frees the model once what was submitted has run."""
        return await self._models.unload(model_id)

    # What the engine answers.

    def _loaded(self, record: FutureRecord, state: ModelState) -> dict[str, Any]:
        self._models.finished(record)
        return {"type": "load_weights", "model_id": record.owner, "path": record.detail["path"]}

    def _computed(self, record: FutureRecord, result: Any) -> Any:
        self._models.finished(record)
        return result

    def _stepped(self, record: FutureRecord, result: OptimStepResult) -> dict[str, Any]:
        self._models.finished(record)
        body: dict[str, Any] = {"type": "optim_step", "metrics": dict(result.metrics)}
        if result.skipped_because is None:
            line = self._models.line(record.owner)
            line.stepped = max(line.stepped, record.seq)
        else:
            body["skipped_because"] = result.skipped_because
        return body

    async def _saved(self, record: FutureRecord, saved: Saved | None) -> dict[str, Any]:
        self._models.finished(record)
        line, detail = self._models.line(record.owner), record.detail
        if "sampler_id" in detail:
            await self._sampling.opened(line.model, detail["sampler_id"], detail["engine_id"], detail["kind"])
            return {"type": record.kind, "sampling_session_id": detail["sampler_id"]}
        path = TinkerPath(record.owner, detail["folder"], detail["name"])
        try:
            if keys := detail.get("recipients"):
                await asyncio.to_thread(encryption.encrypt_directory, pathlib.Path(detail["directory"]), keys)
            size = await self._checkpoints.keep(
                path, detail["directory"], line.model, detail["ttl"], detail.get("metadata")
            )
        finally:
            self._checkpoints.release(path)
        if record.kind == "save_weights":
            line.saved = max(line.saved, record.seq)
        body: dict[str, Any] = {"type": record.kind, "path": str(path)}
        if record.kind == "save_weights_external":
            body["size_bytes"] = size
        return body

    def _not_saved(self, record: FutureRecord, category: str, message: str) -> tuple[str, str]:
        if "folder" in record.detail:
            path = TinkerPath(record.owner, record.detail["folder"], record.detail["name"])
            self._checkpoints.release(path)
        return self._models.ended(record, category, message)

    def _loadable(self, path: str, optimizer_state: bool) -> tuple[Any, Any]:
        parsed = TinkerPath.parse(path)
        if optimizer_state:
            remedy = (
                "Load it without the optimizer state, or load a training checkpoint: save_state gives "
                f"tinker://{parsed.run_id}/weights/<name>"
            )
            return self._checkpoints.find(path, ("weights",), remedy)
        return self._checkpoints.find(path, ("weights", "sampler_weights", "external_weights"), "")


def _check_optimizer(name: str) -> None:
    if name not in ("adamw", "adam"):
        raise ServiceError(400, "This server has no such optimizer", got=repr(name), expected="'adamw'")
