"""The trainer: owns parameters, accumulators, optimizer state and version; the training verbs.

    forward_backward(data, loss)  adds a gradient; any number of times, in any cut
    optim_step(adam)              applies and clears what was added; the policy version goes up by one
    forward(data, loss)           the same figures without a gradient
    likeliest(data, num_top)      the likeliest next tokens at every position
    state() / restore(state)      what a checkpoint holds

Full fine-tuning trains fp32 master weights, cast to the compute dtype inside the program. LoRA trains fp32 adapters
beside a base that is kept in the compute dtype and gets no gradient.

Over a mesh (see `sharded`) every host calls the same verbs, each with its own data, perhaps none; one that computes
waits for the others. Hosts agree once a call on what they run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from locojax.errors import ConfigError, LocoError, RequestError
from locojax.models import lora as lora_module
from locojax.models import sharding
from locojax.models.attention import kernel_of
from locojax.models.kernels import LANES
from locojax.models.lora import LoraSpec
from locojax.models.platform import auto_dtype, auto_tile
from locojax.models.sharding import SEQUENCE
from locojax.models.spec import ModelSpec
from locojax.training import programs
from locojax.training.agreement import Agree, Counts, agreed
from locojax.training.inputs import Checked, check_data
from locojax.training.losses import Loss, LossConfig, Options, find_loss, read_options
from locojax.training.microbatch import Score, assemble, micro_batches
from locojax.training.over_mesh import placement_of
from locojax.training.plan import Plan, planned, replanned
from locojax.training.program_budget import Asked, ProgramBudget
from locojax.training.programs import Fixed, Hyper, MicroBatch, ProgramSpec, Tree
from locojax.training.saved_state import check_same
from locojax.training.settings import TrainerSettings
from locojax.types import AdamParams, Datum, ForwardBackwardResult, OptimStepResult

What = Literal["gradient", "forward", "reference"]

Phase = Callable[[Literal["pack", "train"]], AbstractContextManager[None]]


class Trainer:
    """Trains one model, or one adapter beside it.

    Args:
      spec: the model. params: its tree (numpy or jax leaves, any float dtype); copied, so the caller's stays whole.
      lora: None: full fine-tuning.
      seed: of a fresh adapter's weights.
      phase: entered while packing ("pack") and computing ("train"), for whoever accounts for time.
      mesh: of `sharding.make_mesh`; None: one device.
      agree: how hosts tell each other numbers; needed if the mesh has devices of several processes.

    Raises:
      ConfigError: the mesh doesn't divide the model or its rows, or spans processes without `agree`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Tree,
        settings: TrainerSettings,
        *,
        lora: LoraSpec | None = None,
        seed: int = 0,
        phase: Phase | None = None,
        mesh: Mesh | None = None,
        agree: Agree | None = None,
    ):
        dtype = auto_dtype() if settings.compute_dtype == "auto" else settings.compute_dtype
        self.spec, self.settings, self.lora = spec, settings, lora
        form = kernel_of(jax.default_backend()) if settings.attention == "auto" else settings.attention
        sequence = 1 if mesh is None else mesh.shape[SEQUENCE]
        sharding.check_rows(settings.row_tokens, sequence, LANES if form == "tpu" else 1)
        tile = settings.tile_tokens or auto_tile()
        self.program = ProgramSpec(spec, lora, dtype, settings.remat, tile, settings.with_entropy, form, sequence)
        self._programs = ProgramBudget(settings.max_programs, (settings.rows, settings.row_tokens))
        self.policy_version = 0
        self._phase = phase or no_phase
        self.mesh, self._agree = mesh, agree
        if mesh is not None and sharding.spans_processes(mesh) and agree is None:
            raise ConfigError(
                "A trainer over several processes needs a way for them to agree", remedy="Give it agree=Group.agree"
            )
        self._placement = placement_of(self.program, settings.gather, mesh)
        self._trainable: Tree
        self._frozen: Tree = None
        if lora is None:
            self._trainable = self._placement.trainable(params)
        else:
            self._trainable = self._placement.trainable(lora_module.init_adapter(spec, lora, seed))
            self._frozen = self._placement.base(params, jnp.dtype(dtype))
        self._reference: Tree = None
        if settings.keep_reference and lora is None:
            self._reference = self._placement.base(params, jnp.dtype(dtype))
        self._optimizer = self._placement.new_optimizer(self._trainable)
        keep = settings.keep_transposes
        self._keep_transposes = jax.default_backend() == "cpu" if keep == "auto" else keep
        self._working: Tree = None  # None: not made yet, or of older weights; so too the transposes
        self._transposes: Mapping[str, jax.Array] | None = None
        self._accumulators: Tree = None  # None: nothing accumulated, and no memory taken
        self._num_accumulated = 0  # tokens whose loss is in the accumulators

    @property
    def num_programs(self) -> int:
        """Programs that the data so far have asked for; `TrainerSettings.max_programs` is their bound."""
        return self._programs.num_programs

    @property
    def num_accumulated_tokens(self) -> int:
        """Tokens whose gradient waits for `optim_step`."""
        return self._num_accumulated

    @property
    def trainable(self) -> Tree:
        """The fp32 weights being trained. Read before the next `optim_step`, which reuses their memory."""
        return self._trainable

    @property
    def frozen(self) -> Tree:
        """The base beside an adapter; None in full fine-tuning."""
        return self._frozen

    @property
    def accumulated_gradient(self) -> Tree:
        """The sum added since the last `optim_step`, fp32; None if nothing was. Over a mesh, a call for all hosts."""
        return None if self._accumulators is None else self._placement.gradient(self._accumulators)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        loss_config: LossConfig | None = None,
        *,
        score: Score = "all",
        plan: Plan | None = None,
        told: np.ndarray | None = None,
    ) -> ForwardBackwardResult:
        """Adds the gradient of the summed loss to what waits for `optim_step`.

        Everything is checked before anything runs: an error leaves the gradient as it was.

        Args:
          plan: of data with the same tokens, targets and `score`, from `plan`; what the loss reads now, it read then.
          told: with a plan, what every host told of its own: i64[hosts, len(counts.ints)]; hosts then don't agree here.

        Returns:
          outputs in datum order, and metrics, those of all hosts summed: `loss:sum`, `num_tokens:sum` (with a loss),
          `num_nonfinite:sum` (sequences left out because a log-prob was not finite), `entropy:sum`, the loss's own
          sums, `num_computed_tokens:sum` (after sharing prefixes), `num_datum_tokens:sum`, `num_row_tokens:sum`
          (padding included), `num_micro_batches:sum` (of each host alike).

        Raises:
          RequestError: the loss, a setting of it or a datum is malformed, here or on another host; or there are no
            data, and no other hosts that may have some.
          CapacityError: a datum is longer than a row, or a program more than `settings.max_programs` is needed.
        """
        return self._run(data, loss, loss_config, score, "gradient", plan, told)

    def forward(
        self,
        data: Sequence[Datum],
        loss: str,
        loss_config: LossConfig | None = None,
        *,
        score: Score = "all",
        plan: Plan | None = None,
        told: np.ndarray | None = None,
    ) -> ForwardBackwardResult:
        """As `forward_backward`, leaving the gradient alone."""
        return self._run(data, loss, loss_config, score, "forward", plan, told)

    def plan(
        self, data: Sequence[Datum], loss: str, loss_config: LossConfig | None = None, *, score: Score = "all"
    ) -> Plan:
        """Checks and packs, without the other hosts: for a caller that has more to agree on at the same time.

        It then hands the plan, and what all hosts told, to `forward_backward`. Where this raises, the others must be
        told `Counts.refusal().ints`.
        """
        kind = find_loss(loss)
        checked = self._checked(data, kind, read_options(kind, loss_config))
        return self._planned(checked, score)

    def reference_logprobs(
        self, data: Sequence[Datum], *, plan: Plan | None = None, told: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Log-probs of each datum's targets under the weights that the trainer was made with; 0 where `weights` is 0.

        With LoRA those are the base's, without the adapter. Full fine-tuning needs `settings.keep_reference`.

        Args:
          plan, told: as of `forward`, with the loss "cross_entropy" and `score` "active".

        Raises:
          ConfigError: the reference wasn't kept.
        """
        if self.lora is None and self._reference is None:
            raise ConfigError(
                "The trainer keeps no reference policy", remedy="Make it with TrainerSettings(keep_reference=True)"
            )
        result = self._run(data, "cross_entropy", None, "active", "reference", plan, told)
        return [output["logprobs"] for output in result.outputs]

    def likeliest(self, data: Sequence[Datum], num_top: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The `num_top` likeliest next tokens at every position of each datum, and their log-probs.

        Computed in tiles, in rows as training packs them: [positions, vocabulary] never exists. Over a mesh, a call for
        all hosts.

        Returns: of each datum, ids i32[N, num_top] and log-probs f32[N, num_top], the likeliest first.

        Raises:
          RequestError: `num_top` is out of range, or as `forward`.
          CapacityError: a datum is longer than a row.
        """
        if not 1 <= num_top <= self.spec.vocab_size:
            raise RequestError(
                "The number of likeliest tokens is out of range", got=num_top, expected=f"1 to {self.spec.vocab_size}"
            )
        with self._phase("pack"):
            loss, options, plan, counts = self._settled(data, "cross_entropy", None, "all", None, None)
            self._programs.admit(Asked.of(f"{num_top} likeliest tokens", loss.name, options, counts.widths(loss)))
            packed = plan.packed.padded(counts.num_micro_batches)
            shards = self._placement.num_local_shards
            batches = micro_batches(packed, plan.checked, "all", counts.widths(loss), shards)
        with self._phase("train"):
            if self._working is None:
                self._working = self._placement.working(self._trainable)
            fixed = Fixed(self._frozen, {})
            found = [
                self._placement.likeliest(self._working, fixed, batch, spec=self.program, num_top=num_top)
                for batch in batches
            ]
        lengths = [len(datum.tokens) for datum in plan.checked]
        shape = (*packed.tokens.shape, num_top)
        ids, logprobs = (packed.gather(np.stack(part).reshape(shape), lengths) for part in zip(*found, strict=True))
        return list(zip(ids, logprobs, strict=True))

    def optim_step(self, adam: AdamParams) -> OptimStepResult:
        """One AdamW step on the accumulated gradient, which is cleared whether it could be applied or not.

        With no gradient, or one that is not finite, nothing changes: not the weights (no decay either), not Adam's
        state, not the version.
        """
        if self._num_accumulated == 0:
            self.discard()
            return OptimStepResult(
                False, self.policy_version, {"learning_rate": adam.learning_rate}, "no gradient was accumulated"
            )
        hyper = Hyper(*(np.float32(value) for value in dataclasses.astuple(adam)))
        with self._phase("train"):
            updated = self._placement.update(self._trainable, self._optimizer, self._accumulators, hyper)
            applied, grad_norm = bool(updated.applied), float(updated.grad_norm)
        self._trainable, self._optimizer = updated.trainable, updated.optimizer
        self._accumulators, self._num_accumulated = updated.accumulators, 0
        self._weights_changed()
        self.policy_version += applied
        metrics = {"grad_norm": grad_norm, "learning_rate": adam.learning_rate}
        reason = None if applied else f"the gradient is not finite (norm {grad_norm}); the weights were left unchanged"
        return OptimStepResult(applied, self.policy_version, metrics, reason)

    def discard(self) -> None:
        """Drops the accumulated gradient."""
        self._accumulators, self._num_accumulated = None, 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: a copy, as a tree of arrays; it stays as it is while training goes on.

        The accumulated gradient isn't part of it, nor is LoRA's frozen base. Over a mesh its arrays are global, each
        device holding its part: `sharding.gathered` makes a tree of them whole on every host.
        """
        return {
            "trainable": self._placement.copied(self._trainable),
            "optimizer": self._placement.copied(self._optimizer._asdict()),
            "policy_version": np.asarray(self.policy_version, np.int64),
        }

    def restore(self, state: Mapping[str, Any], *, with_optimizer: bool = True) -> None:
        """Takes a state over, dropping any accumulated gradient. Without the optimizer, Adam starts afresh.

        Over several hosts, each gives the same: numpy, or global arrays on the same devices. The state may be of a
        trainer over another mesh.

        Raises:
          CheckpointError: the state is of another model or adapter: names the first leaf that differs.
        """
        own = {"trainable": self._trainable, "optimizer": self._optimizer._asdict()}
        wanted = ("trainable", "optimizer") if with_optimizer else ("trainable",)
        for name in wanted:
            check_same(own[name], state.get(name), name)
        self._trainable = self._placement.trainable(state["trainable"])
        if with_optimizer:
            self._optimizer = self._placement.optimizer(state["optimizer"])
        else:
            self._optimizer = self._placement.new_optimizer(self._trainable)
        self.policy_version = int(state["policy_version"])
        self._weights_changed()
        self.discard()

    def _run(
        self,
        data: Sequence[Datum],
        loss_name: str,
        loss_config: LossConfig | None,
        score: Score,
        what: What,
        plan: Plan | None = None,
        told: np.ndarray | None = None,
    ) -> ForwardBackwardResult:
        with self._phase("pack"):
            loss, options, plan, counts = self._settled(data, loss_name, loss_config, score, plan, told)
            packed = plan.packed.padded(counts.num_micro_batches)
            widths = counts.widths(loss)
            self._programs.admit(Asked.of(what, loss.name, options, widths))
            batches = micro_batches(packed, plan.checked, score, widths, self._placement.num_local_shards)
        with self._phase("train"):
            outputs = [self._compute(batch, options, loss, what) for batch in batches]
            outputs = self._placement.fetch(outputs)  # waits for all of them
        result = assemble(packed, plan.checked, outputs, self.settings.with_entropy)
        metrics = dict(result.metrics)
        metrics["num_datum_tokens:sum"] = float(counts.num_datum_tokens)
        metrics["num_computed_tokens:sum"] = float(counts.num_computed_tokens)
        metrics["num_row_tokens:sum"] *= self._placement.num_shards // self._placement.num_local_shards
        if what == "gradient":
            self._num_accumulated += int(metrics["num_tokens:sum"])
        return dataclasses.replace(result, metrics=metrics)

    def _planned(self, checked: Sequence[Checked], score: Score) -> Plan:
        settings = self.settings
        rows = settings.rows * self._placement.num_local_shards
        share = settings.share_prefixes and self.program.attention == "plain"
        return planned(checked, score, settings.row_tokens, rows, share_prefixes=share)

    def _settled(
        self,
        data: Sequence[Datum],
        loss_name: str,
        loss_config: LossConfig | None,
        score: Score,
        plan: Plan | None,
        told: np.ndarray | None,
    ) -> tuple[Loss, Options, Plan, Counts]:
        """What this host runs, and what all hosts' counts are. An error here is told to the others before it is
        raised, so that they don't wait for a host that will not come."""
        try:
            loss = find_loss(loss_name)
            options = read_options(loss, loss_config)
            checked = self._checked(data, loss, options)
            plan = self._planned(checked, score) if plan is None else replanned(plan, checked, score)
        except LocoError:
            if self._agree is not None and told is None:
                self._agree("pack", Counts.refusal().ints)
            raise
        if self._agree is None:
            return loss, options, plan, plan.counts
        return loss, options, plan, agreed(self._agree("pack", plan.counts.ints) if told is None else told)

    def _checked(self, data: Sequence[Datum], loss: Loss, options: Options) -> list[Checked]:
        if not data and self._agree is not None:
            return []  # other hosts may have some
        return check_data(data, loss, options, self.spec.vocab_size)

    def _compute(self, batch: MicroBatch, options: Options, loss: Loss, what: What) -> programs.Outputs:
        on, spec = self._placement, self.program
        if what == "reference":
            base = self._frozen if self._reference is None else self._reference
            spec = dataclasses.replace(spec, lora=None)
            return on.score({}, Fixed(base, {}), batch, options, spec=spec, loss_name=loss.name)
        if self._working is None:
            self._working = on.working(self._trainable)
        if what == "forward":
            fixed = Fixed(self._frozen, {})
            return on.score(self._working, fixed, batch, options, spec=spec, loss_name=loss.name)
        if self._accumulators is None:
            self._accumulators = on.zeros_like(self._trainable)
        if self._transposes is None:
            weights = self._working if self.lora is None else self._frozen
            self._transposes = on.transposed(weights, spec) if self._keep_transposes else {}
        fixed = Fixed(self._frozen, self._transposes)
        self._accumulators, outputs = on.accumulate(
            self._working, self._accumulators, fixed, batch, options, spec=spec, loss_name=loss.name
        )
        return outputs

    def _weights_changed(self) -> None:
        self._working = None
        if self.lora is None:  # LoRA's base, whose transposes these are, never changes
            self._transposes = None


def no_phase(name: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()
