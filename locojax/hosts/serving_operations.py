"""What each operation of `hosts.protocol` does to the trainer and the samplers, once it is its turn."""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from locojax.errors import RequestError
from locojax.hosts import tenant_checkpoints
from locojax.hosts.protocol import (
    AdapterConfig,
    CloseSampler,
    CreateModel,
    LoadWeights,
    ModelState,
    OpenSampler,
    Operation,
    OptimStep,
    RemoveModel,
    RestoreModel,
    Result,
    Sample,
    Sampled,
    SaveAdapter,
    Saved,
    SaveState,
    Tokens,
)
from locojax.hosts.serving_lanes import Work
from locojax.hosts.tenant_checkpoints import Base, TenantCheckpoint
from locojax.models.lora import LoraSpec
from locojax.rollout.stats import EngineStats
from locojax.types import AdamParams, Datum, OptimStepResult


class Tenants(Protocol):
    """What serving needs of `training.tenants.TenantTrainer`; see there."""

    @property
    def model_ids(self) -> tuple[str, ...]: ...

    def create(self, model_id: str, lora: LoraSpec, seed: int) -> None: ...
    def remove(self, model_id: str) -> None: ...
    def begin(
        self, model_id: str, data: tuple[Datum, ...], loss: str, loss_config: Mapping[str, Any], *, gradient: bool
    ) -> Work: ...
    def advance(self, works: list[Any]) -> None: ...
    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResult: ...
    def discard(self, model_id: str) -> None: ...
    def state(self, model_id: str) -> dict[str, Any]: ...
    def restore(self, model_id: str, state: Mapping[str, Any], *, optimizer: bool) -> None: ...
    def adapter(self, model_id: str) -> Mapping[str, Any]: ...
    def snapshot(self, model_id: str) -> Mapping[str, Any]: ...
    def lora(self, model_id: str) -> LoraSpec: ...
    def policy_version(self, model_id: str) -> int: ...


class Sampling(Protocol):
    """What serving needs of `hosts.samplers.Samplers`; see there."""

    @property
    def ids(self) -> tuple[str, ...]: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def stats(self) -> EngineStats: ...

    def open(self, sampler_id: str, adapter: Mapping[str, Any] | None, lora: LoraSpec | None, version: int) -> None: ...
    def close(self, sampler_id: str) -> bool: ...
    def add(self, operation_id: str, sample: Sample) -> None: ...
    def abort(self, operation_id: str) -> bool: ...
    def step(self) -> list[tuple[str, Sampled]]: ...
    def drain(self) -> list[Tokens]: ...


class Operations:
    """Runs operations other than ForwardBackward and Sample, each whole but for what it does on the disk.

    Args:
      base: the model that the adapters are beside.
      alpha: of new adapters.
      max_rank: what the sampler's rows hold.
    """

    def __init__(self, trainer: Tenants, samplers: Sampling, base: Base, *, alpha: float, max_rank: int):
        self._trainer, self._samplers, self._base = trainer, samplers, base
        self._alpha, self._max_rank = alpha, max_rank
        self._seeds: dict[str, int | None] = {}  # of each model's fresh weights; None: they came from elsewhere

    def on_disk(self, operation: Operation) -> Callable[[], Any] | None:
        """What the operation reads or writes, to be called on any thread, or None if it does neither.

        Of a save it is all that is left to do, and returns `Saved`: the copy has been taken when this returns. What it
        returns of a load or an opening is to be given to `run`.

        Raises:
          LocoError: it can't be done as asked.
        """
        match operation:
            case SaveState(model_id, directory):
                lora, state = self._known(model_id), self._trainer.state(model_id)
                seed = self._seeds.get(model_id)
                write = partial(tenant_checkpoints.write_state, pathlib.Path(directory), state, lora, seed, self._base)
                return partial(_saved, write)
            case SaveAdapter(model_id, directory):
                lora, adapter = self._known(model_id), self._trainer.adapter(model_id)
                write = partial(tenant_checkpoints.write_adapter, pathlib.Path(directory), adapter, lora, self._base)
                return partial(_saved, write)
            case RestoreModel(model_id, directory, optimizer):
                self._refuse_known(model_id)
            case LoadWeights(model_id, directory, optimizer):
                self._known(model_id)
            case OpenSampler(model_id=None, directory=str(directory)):
                return partial(tenant_checkpoints.read_adapter, pathlib.Path(directory), self._base)
            case _:
                return None
        return partial(tenant_checkpoints.read_checkpoint, pathlib.Path(directory), self._base, optimizer=optimizer)

    def run(self, operation: Operation, found: Any = None) -> Result:
        """The operation's result.

        Args:
          found: what `on_disk` read.

        Raises:
          LocoError: it can't be done as asked; nothing has changed.
          TypeError: a ForwardBackward or a Sample, or a save, of which `on_disk` does all.
        """
        match operation:
            case CreateModel():
                return self._create(operation)
            case RestoreModel():
                return self._restore(operation, found)
            case LoadWeights():
                return self._load(operation, found)
            case RemoveModel(model_id):
                if model_id in self._trainer.model_ids:  # else it is gone already, which is what was asked for
                    self._trainer.remove(model_id)
                self._seeds.pop(model_id, None)
                return None
            case OptimStep(model_id, adam):
                return self._trainer.optim_step(model_id, adam)
            case OpenSampler():
                self._open(operation, found)
                return None
            case CloseSampler(sampler_id):
                self._samplers.close(sampler_id)
                return None
        raise TypeError(f"{type(operation).__name__} is not run whole")

    def _create(self, operation: CreateModel) -> ModelState:
        model_id, wanted = operation.model_id, operation.adapter
        self._refuse_known(model_id)
        lora = LoraSpec(
            rank=wanted.rank,
            alpha=self._alpha,
            attention=wanted.attention,
            mlp=wanted.mlp,
            unembed=wanted.unembed,
        )
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed
        self._trainer.create(model_id, lora, seed)
        self._seeds[model_id] = seed
        return self._model_state(model_id)

    def _restore(self, operation: RestoreModel, found: TenantCheckpoint) -> ModelState:
        model_id = operation.model_id
        self._refuse_known(model_id)
        self._trainer.create(model_id, found.lora, found.seed or 0)
        try:
            self._take_over(model_id, found, operation.optimizer)
        except BaseException:
            self._trainer.remove(model_id)
            raise
        return self._model_state(model_id)

    def _load(self, operation: LoadWeights, found: TenantCheckpoint) -> ModelState:
        model_id = operation.model_id
        tenant_checkpoints.check_same(found.lora, self._known(model_id), pathlib.Path(operation.directory))
        self._take_over(model_id, found, operation.optimizer)
        return self._model_state(model_id)

    def _take_over(self, model_id: str, found: TenantCheckpoint, optimizer: bool) -> None:
        """The checkpoint's weights, and with `optimizer` all else, become the model's."""
        self._trainer.restore(model_id, found.state or {"trainable": found.adapter}, optimizer=optimizer)
        self._seeds[model_id] = found.seed

    def _open(self, operation: OpenSampler, found: tuple[LoraSpec, dict[str, Any]] | None) -> None:
        sampler_id = operation.sampler_id
        if operation.model_id is not None and operation.directory is not None:
            raise RequestError(f"Sampler {sampler_id!r} is to have two sources", expected="a model or a directory")
        if operation.model_id is not None:
            lora = self._known(operation.model_id)
            version = self._trainer.policy_version(operation.model_id)
            self._samplers.open(sampler_id, self._trainer.snapshot(operation.model_id), lora, version)
        elif operation.directory is not None:
            assert found is not None, "its directory has been read"
            lora, adapter = found
            if lora.rank > self._max_rank:
                raise RequestError(
                    f"The adapter in {pathlib.Path(operation.directory).name!r} has too high a rank",
                    got=lora.rank,
                    expected=f"at most {self._max_rank}",
                    remedy="Start the server with a higher max_rank",
                )
            self._samplers.open(sampler_id, adapter, lora, 0)
        else:
            self._samplers.open(sampler_id, None, None, 0)

    def _known(self, model_id: str) -> LoraSpec:
        if model_id not in self._trainer.model_ids:
            raise RequestError(
                f"There is no model {model_id!r}",
                got=", ".join(self._trainer.model_ids) or "no models",
                remedy="It was never created, or has been removed; load a checkpoint of it to go on",
            )
        return self._trainer.lora(model_id)

    def _refuse_known(self, model_id: str) -> None:
        if model_id in self._trainer.model_ids:
            raise RequestError(f"Model {model_id!r} exists already", remedy="Create it under another id")

    def _model_state(self, model_id: str) -> ModelState:
        lora = self._trainer.lora(model_id)
        fields = {field.name for field in dataclasses.fields(AdapterConfig)} - {"seed"}
        adapter = AdapterConfig(seed=self._seeds[model_id], **{name: getattr(lora, name) for name in fields})
        return ModelState(adapter, lora.alpha, self._trainer.policy_version(model_id))


def _saved(write: Callable[[], int]) -> Saved:
    return Saved(write())
