"""The multi-tenant trainer: many LoRA adapters over one frozen base, in one compiled program.

    create(model_id, lora, seed)          an adapter in a slot of its own
    begin(model_id, data, loss, ...)      a call, checked and packed into rows
    advance(works)                        one micro-batch of rows of any calls: models, losses and settings side by side
    optim_step(model_id, adam)            applies and clears what the model's calls added
    state(model_id) / restore(...)        what a checkpoint holds

Each model trains as it would in a `Trainer` of its own; nothing that another one sends changes a bit of it. It is used
from one thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from locojax.errors import CapacityError, ConfigError, RequestError
from locojax.models import decoder
from locojax.models.attention import PackedKernel
from locojax.models.executables import Executables, Program, beside_jax_cache
from locojax.models.lora import LoraSpec, adapter_parameters, init_adapter
from locojax.models.native import build as native
from locojax.models.native import ops
from locojax.models.platform import auto_dtype, auto_tile
from locojax.models.spec import ModelSpec
from locojax.training import programs, tenant_programs
from locojax.training.inputs import check_data
from locojax.training.losses import LossConfig, find_loss
from locojax.training.microbatch import Score
from locojax.training.packing import pack
from locojax.training.programs import Fixed, Hyper, Outputs, ProgramSpec, Tree
from locojax.training.settings import TrainerSettings
from locojax.training.tenant_rows import Row, option_values, stack_rows, tenant_options, tenant_rows
from locojax.training.tenant_state import checked_state, narrow, ranks, widen
from locojax.training.tenant_work import RowProgram, Tenant, Work
from locojax.training.trainer import Phase, no_phase
from locojax.types import AdamParams, Datum, Kernels, OptimStepResult

SnapshotDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class TenantSettings:
    """How the trainer computes and how much it holds.

    Attributes:
      row_tokens, rows, compute_dtype, remat, tile_tokens, share_prefixes, with_entropy, keep_transposes: see
        `TrainerSettings`. On CPU about 2000 tokens a micro-batch run at full speed; a smaller one is answered sooner.
      max_adapters: slots. Each takes 16 bytes (weights, gradient, Adam's two moments) for every parameter of an adapter
        of max_rank on all modules, whatever the model's own rank.
      max_rank: the largest rank a model may have; a lower one computes as much.
      max_targets: targets a position that cross_entropy may have; each power of two up to it is a program of its own.
      short_row_tokens, short_rows: a second shape of micro-batch, for calls all of whose data fit into such a row: they
        don't wait for a long row's worth of padding, nor attend over it. None: one shape for all.
      kernels: whose products with the base; see `models.native.build`.
      snapshot_dtype: of what `snapshot` gives, for samplers.
    """

    row_tokens: int
    rows: int = 1
    max_adapters: int = 8
    max_rank: int = 32
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    remat: str = "linear"
    tile_tokens: int | None = None
    share_prefixes: bool = True
    with_entropy: bool = False
    keep_transposes: bool | Literal["auto"] = "auto"
    max_targets: int = 128
    short_row_tokens: int | None = None
    short_rows: int = 1
    kernels: Kernels = "auto"
    snapshot_dtype: SnapshotDtype = "float32"

    def __post_init__(self) -> None:
        TrainerSettings(  # raises for what both have
            self.row_tokens, self.rows, self.compute_dtype, remat=self.remat, tile_tokens=self.tile_tokens
        )
        for name in ("max_adapters", "max_rank", "max_targets", "short_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"The trainer's {name} must be at least 1", got=getattr(self, name))
        if self.short_row_tokens is not None and not 1 <= self.short_row_tokens < self.row_tokens:
            raise ConfigError(
                "The trainer's short_row_tokens must be shorter than its rows",
                got=self.short_row_tokens,
                expected=f"1 to {self.row_tokens - 1}",
            )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, row_tokens) of the micro-batches, shortest rows first."""
        long = (self.rows, self.row_tokens)
        return (long,) if self.short_row_tokens is None else ((self.short_rows, self.short_row_tokens), long)

    def shape_for(self, longest: int) -> tuple[int, int]:
        """That of a call whose longest datum has so many tokens; the longest rows', if none is long enough."""
        return next((shape for shape in self.shapes if longest <= shape[1]), self.shapes[-1])


class TenantTrainer:
    """Trains many adapters beside one base.

    Args:
      spec: the model. base_params: its tree, any float dtype; leaves that are jax arrays of the compute dtype already
        are shared with the caller, who must not donate them.
      phase: see `Trainer`.
    """

    def __init__(self, spec: ModelSpec, base_params: Tree, settings: TenantSettings, *, phase: Phase | None = None):
        dtype = auto_dtype() if settings.compute_dtype == "auto" else settings.compute_dtype
        self.spec, self.settings = spec, settings
        tile = settings.tile_tokens or auto_tile()
        packed = native.chosen(settings.kernels, dtype)
        attention: PackedKernel = "native" if packed and ops.attends_packed(spec.head_dim) else "plain"
        self.program = ProgramSpec(
            spec, None, dtype, settings.remat, tile, settings.with_entropy, attention=attention
        )
        self._phase = phase or no_phase
        base = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), base_params)
        keep = settings.keep_transposes
        keep = jax.default_backend() == "cpu" if keep == "auto" else keep
        if keep and packed:
            base = {**base, "layers": jax.jit(decoder.join)(base["layers"])}
        transposes = programs.transposed(base, dtype) if keep else {}
        if keep and packed:
            base, transposes = {**base, "layers": _packed(base["layers"])}, _packed(transposes)
            if ops.suits_loss(spec.hidden_size, spec.vocab_size):
                base[tenant_programs.PACKED_HEAD] = jax.jit(ops.Unembedding.of)(decoder.head_weight(base))
        self._fixed = Fixed(base, transposes)
        self._bank = tenant_programs.empty_bank(spec, settings.max_adapters, settings.max_rank)
        self._tenants: dict[str, Tenant] = {}
        self._metric_names = tenant_programs.metric_names()
        self._executables = Executables(beside_jax_cache())
        self._programs: dict[tuple[str, RowProgram | SnapshotDtype | None], Program] = {}

    @property
    def model_ids(self) -> tuple[str, ...]:
        return tuple(self._tenants)

    def lora(self, model_id: str) -> LoraSpec:
        return self._tenant(model_id).lora

    def policy_version(self, model_id: str) -> int:
        """Optimizer steps that were applied."""
        return self._tenant(model_id).policy_version

    def num_accumulated_tokens(self, model_id: str) -> int:
        """Tokens whose gradient waits for `optim_step`."""
        return self._tenant(model_id).num_accumulated

    def create(self, model_id: str, lora: LoraSpec, seed: int) -> None:
        """A fresh adapter, as `lora.init_adapter` draws it.

        Raises:
          RequestError: the id is taken, or the rank is above the largest.
          CapacityError: every slot is taken.
        """
        if model_id in self._tenants:
            raise RequestError(f"The model {model_id!r} exists already")
        if lora.rank > self.settings.max_rank:
            raise RequestError(
                f"The LoRA rank of model {model_id!r} is too large",
                got=lora.rank,
                expected=f"at most {self.settings.max_rank}",
                remedy="Ask for a lower rank, or start the server with a larger maximum (max_rank)",
            )
        taken = {tenant.slot for tenant in self._tenants.values()}
        free = [slot for slot in range(self.settings.max_adapters) if slot not in taken]
        if not free:
            raise CapacityError(
                f"There is no room for model {model_id!r}",
                got=f"{len(taken)} models being trained",
                expected=f"at most {self.settings.max_adapters}",
                remedy="Unload a model that is no longer needed, or start the server with more room (max_adapters)",
            )
        weights = jax.device_get(init_adapter(self.spec, lora, seed))
        self._write(free[0], weights, None)
        self._tenants[model_id] = Tenant(model_id, free[0], lora)

    def remove(self, model_id: str) -> None:
        """Frees the slot and sets all of it to 0. Calls on the model that weren't finished are at an end."""
        tenant = self._tenant(model_id)
        del self._tenants[model_id]
        tenant.is_removed = True
        self._write(tenant.slot, {}, None)

    def begin(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss: str,
        loss_config: LossConfig | None = None,
        *,
        gradient: bool = True,
        score: Score = "all",
    ) -> Work:
        """Checks a call and packs it; nothing has run when this raises, and nothing has when it returns.

        Args:
          gradient: add to what waits for the model's `optim_step`; else a forward pass alone.
          score: see `microbatch.Score`.

        Raises:
          RequestError: an unknown model; the loss, a setting of it or a datum is malformed, or there are no data.
          CapacityError: a datum is longer than a row.
        """
        tenant, found = self._tenant(model_id), find_loss(loss)
        options = tenant_options(found, loss_config)
        checked = check_data(data, found, options, self.spec.vocab_size)
        widest = max(range(len(checked)), key=lambda i: checked[i].targets.shape[1])
        if checked[widest].targets.shape[1] > self.settings.max_targets:
            raise RequestError(
                f"Datum {widest} has too many targets a position",
                got=checked[widest].targets.shape[1],
                expected=f"at most {self.settings.max_targets}",
                remedy="Keep the likeliest targets, or start the server with a larger maximum (max_targets)",
            )
        scores_all = score == "all"
        # By the model's own data alone: a row's bits must not depend on what other models send.
        shape = self.settings.shape_for(max(len(datum.tokens) for datum in checked))
        with self._phase("pack"):
            packed = pack(
                [datum.tokens for datum in checked],
                [datum.num_free for datum in checked],
                row_tokens=shape[1],
                rows=1,
                targets=[datum.targets for datum in checked] if scores_all else None,
                share_prefixes=self.settings.share_prefixes,
                skip=None if scores_all else [not datum.reads.any() for datum in checked],
            )
            rows = tenant_rows(packed, checked, score)
        names = (*self._metric_names[loss], "loss", "num_tokens", "num_nonfinite")
        names = (*names, "entropy") if self.settings.with_entropy else names
        entropy, made = self.settings.with_entropy, (checked, packed)
        return Work(tenant, found, option_values(options), rows, gradient, entropy, names, made, shape)

    def advance(self, works: Sequence[Work]) -> None:
        """Computes one micro-batch: rows of the given calls, in their order, as many as there is room for.

        Only rows of the first unfinished call's `Work.program` go together; others wait for a later call of this. A
        row's result and gradient are the same to the bit whatever rows it shares the micro-batch with. Finished calls
        are passed over; with none left nothing is done.
        """
        waiting = [work for work in dict.fromkeys(works) if not work.done]
        if not waiting:
            return
        program = waiting[0].program
        rows: list[Row] = []
        whose: list[Work] = []
        for work in waiting:
            if work.program == program:
                more = work.next_rows(program.num_rows - len(rows))
                rows += more
                whose += [work] * len(more)
        with self._phase("train"):
            outputs = self._compute(rows, program)
        for r, work in enumerate(whose):
            work.take(outputs, r)

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResult:
        """One AdamW step on what the model's finished calls added, which is cleared; see `Trainer.optim_step`.

        Raises:
          RequestError: an unknown model, or a setting that is not finite in fp32 or out of range.
        """
        tenant, hyper = self._tenant(model_id), _hyper(adam)
        metrics = {"learning_rate": adam.learning_rate}
        if tenant.num_accumulated == 0:
            self.discard(model_id)
            return OptimStepResult(
                False, tenant.policy_version, {"grad_norm": 0.0, **metrics}, "no gradient was accumulated"
            )
        with self._phase("train"):
            of_module = ranks(self.spec, tenant.lora)
            self._bank, is_applied, norm = self._call("update", self._bank, np.int32(tenant.slot), of_module, hyper)
            applied, grad_norm = bool(is_applied), float(norm)
        tenant.num_accumulated = 0
        tenant.policy_version += applied
        reason = None if applied else f"the gradient is not finite (norm {grad_norm}); the weights were left unchanged"
        return OptimStepResult(applied, tenant.policy_version, {"grad_norm": grad_norm, **metrics}, reason)

    def discard(self, model_id: str) -> None:
        """Drops the model's accumulated gradient."""
        tenant = self._tenant(model_id)
        tenant.num_accumulated = 0
        accumulators = self._call("clear", self._bank.accumulators, np.int32(tenant.slot))
        self._bank = self._bank._replace(accumulators=accumulators)

    def adapter(self, model_id: str) -> dict[str, dict[str, np.ndarray]]:
        """The weights, fp32, at the model's own rank, on the host: a copy that later steps don't touch."""
        return self._read(self._tenant(model_id), self._bank.weights)

    def snapshot(self, model_id: str) -> dict[str, dict[str, np.ndarray]]:
        """The same in `settings.snapshot_dtype`, rounded where it is before it leaves the device."""
        return self._read(self._tenant(model_id), self._bank.weights, self.settings.snapshot_dtype)

    def state(self, model_id: str) -> dict[str, Any]:
        """What a checkpoint holds, at the model's own rank: numpy copies, in the form of `Trainer.state`.

        {"trainable": adapter, "optimizer": {"count", "mu", "nu"}, "policy_version"}. The accumulated gradient isn't
        part of it.
        """
        tenant, bank = self._tenant(model_id), self._bank
        return {
            "trainable": self._read(tenant, bank.weights),
            "optimizer": {
                "count": np.asarray(bank.steps)[tenant.slot].copy(),
                "mu": self._read(tenant, bank.mu),
                "nu": self._read(tenant, bank.nu),
            },
            "policy_version": np.asarray(tenant.policy_version, np.int64),
        }

    def accumulated_gradient(self, model_id: str) -> dict[str, dict[str, np.ndarray]]:
        """The sum added since the last `optim_step`, as `adapter` gives the weights."""
        return self._read(self._tenant(model_id), self._bank.accumulators)

    def restore(self, model_id: str, state: Mapping[str, Any], *, optimizer: bool) -> None:
        """Takes a state over, dropping any accumulated gradient.

        Without the optimizer, Adam and the version start anew.

        Raises:
          RequestError: an unknown model.
          CheckpointError: the state is of another model or adapter: names the first leaf that differs.
        """
        tenant = self._tenant(model_id)
        checked_state(adapter_parameters(self.spec, tenant.lora), state, optimizer)
        self._write(tenant.slot, state["trainable"], state["optimizer"] if optimizer else None)
        tenant.policy_version = int(state["policy_version"]) if optimizer else 0
        tenant.num_accumulated = 0

    def warm_up(self) -> None:
        """Compiles what every model needs, with one target a position, so that no request waits for it.

        The slots must be free.

        Raises:
          ConfigError: a model exists.
        """
        if self._tenants:
            raise ConfigError("Warming up needs every slot free", got=f"{len(self._tenants)} models")
        # Made and not run: a micro-batch of nothing takes as long as a full one.
        weights, accumulators = self._bank.weights, self._bank.accumulators
        for num_rows, row_tokens in self.settings.shapes:
            nothing = stack_rows([], num_rows, row_tokens, 1)
            self._begin("accumulate", RowProgram(num_rows, row_tokens, 1, True),
                        weights, accumulators, self._fixed, nothing)  # fmt: skip
            self._begin("score", RowProgram(num_rows, row_tokens, 1, False), weights, self._fixed, nothing)
        everything = LoraSpec(self.settings.max_rank, unembed=True)
        hyper, slot = _hyper(AdamParams()), np.int32(0)
        self._bank, applied, _ = self._call("update", self._bank, slot, ranks(self.spec, everything), hyper)
        applied.block_until_ready()
        self._bank = self._bank._replace(accumulators=self._call("clear", self._bank.accumulators, slot))
        self._call("read", self._bank.weights, slot, of="float32")
        self._call("read", self._bank.weights, slot, of=self.settings.snapshot_dtype)
        self._write(0, {}, None)
        self._executables.wait()

    def _begin(self, name: str, of: RowProgram | SnapshotDtype | None, *args: Any) -> Program:
        """One of `tenant_programs`, being made for these arguments; `of` tells those of one name apart."""
        if (name, of) not in self._programs:
            static: dict[str, Any] = {}
            if of is not None:
                static = {"spec": self.program} if isinstance(of, RowProgram) else {"dtype": of}
            lower = partial(getattr(tenant_programs, name).lower, *args, **static)
            self._programs[name, of] = self._executables.begin(f"tenants-{name}", lower, args, static)
        return self._programs[name, of]

    def _call(self, name: str, *args: Any, of: RowProgram | SnapshotDtype | None = None) -> Any:
        return self._begin(name, of, *args).result()(*args)

    def _compute(self, rows: Sequence[Row], program: RowProgram) -> Outputs:
        stacked = stack_rows(rows, program.num_rows, program.row_tokens, program.num_targets)
        bank = self._bank
        if program.gradient:
            accumulators, outputs = self._call(
                "accumulate", bank.weights, bank.accumulators, self._fixed, stacked, of=program
            )
            self._bank = bank._replace(accumulators=accumulators)
        else:
            outputs = self._call("score", bank.weights, self._fixed, stacked, of=program)
        return jax.device_get(outputs)

    def _tenant(self, model_id: str) -> Tenant:
        if model_id not in self._tenants:
            raise RequestError(
                f"There is no model {model_id!r} in training",
                remedy="Create it, or load it from a checkpoint; a model that was unloaded is gone",
            )
        return self._tenants[model_id]

    def _read(self, tenant: Tenant, tree: Tree, dtype: SnapshotDtype = "float32") -> dict[str, dict[str, np.ndarray]]:
        return narrow(jax.device_get(self._call("read", tree, np.int32(tenant.slot), of=dtype)), tenant.lora)

    def _write(self, slot: int, weights: Tree, optimizer: Mapping[str, Any] | None) -> None:
        own = (weights, *((optimizer["mu"], optimizer["nu"]) if optimizer else ({}, {})))
        trees = [widen(self.spec, self.settings.max_rank, tree) for tree in own]
        count = np.int32(optimizer["count"] if optimizer else 0)
        self._bank = self._call("write", self._bank, np.int32(slot), *trees, count)


@jax.jit
def _packed(layers: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Matrices as the C++ kernels read them; vectors as they are."""
    return {name: ops.pack(leaf) if leaf.ndim == 3 and ops.packs(leaf.shape) else leaf for name, leaf in layers.items()}


def _hyper(adam: AdamParams) -> Hyper:
    """The settings as fp32 scalars, checked."""
    with np.errstate(over="ignore"):
        hyper = Hyper(*(np.float32(value) for value in dataclasses.astuple(adam)))
    for name, value in hyper._asdict().items():
        lowest, highest = (0.0, 1.0) if name in ("beta1", "beta2") else (0.0, math.inf)
        if name in ("learning_rate", "weight_decay"):
            lowest = -math.inf
        if not math.isfinite(value) or not lowest <= value < highest:
            raise RequestError(
                f"The optimizer setting {name!r} is out of range",
                got=getattr(adam, name),
                expected="a finite number" if lowest < 0 else f"a number from {lowest:g} to below {highest:g}",
            )
    return hyper
