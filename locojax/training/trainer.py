"""The trainer: owns parameters, accumulators, optimizer state and version; the training verbs.

    forward_backward(data, loss)  adds a gradient; any number of times, in any cut
    optim_step(adam)              applies and clears what was added; the policy version goes up by one
    forward(data, loss)           the same figures without a gradient
    state() / restore(state)      what a checkpoint holds

Full fine-tuning trains fp32 master weights, cast to the compute dtype inside the program. LoRA trains fp32 adapters
beside a base that is kept in the compute dtype and gets no gradient.
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
import optax

from locojax.errors import CheckpointError, ConfigError
from locojax.models import lora as lora_module
from locojax.models.decoder import REMAT_POLICIES
from locojax.models.lora import LoraSpec
from locojax.models.spec import ModelSpec
from locojax.training import programs
from locojax.training.inputs import Checked, check_data
from locojax.training.losses import Loss, LossConfig, Options, find_loss, read_options
from locojax.training.microbatch import Score, assemble, micro_batches
from locojax.training.packing import Packed, pack
from locojax.training.platform import auto_dtype, auto_tile
from locojax.training.programs import Fixed, Hyper, MicroBatch, ProgramSpec, Tree
from locojax.types import AdamParams, Datum, ForwardBackwardResult, OptimStepResult

What = Literal["gradient", "forward", "reference"]

Phase = Callable[[Literal["pack", "train"]], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """How the trainer computes; nothing here changes what it computes, up to rounding.

    Attributes:
      row_tokens, rows: a micro-batch's shape. A datum must fit in row_tokens.
      compute_dtype: of activations and, inside the program, weights. auto: see `platform.auto_dtype`.
      remat: a key of `decoder.REMAT_POLICIES`: what the backward pass recomputes. "linear" takes the least time on CPU
        and less memory than "none": writing an activation out and reading it back costs more than most of them do.
      tile_tokens: positions the head works on at a time; its logits take tile_tokens x vocabulary x 4 bytes.
        None: see `platform.auto_tile`.
      share_prefixes: compute what sequences of a call have in common once.
      with_entropy: report the entropy of the next-token distribution.
      keep_reference: keep the first weights, in the compute dtype, for `Trainer.reference_logprobs`.
      keep_transposes: keep the layers' weights transposed as well, for the backward pass: on CPU it runs up to twice as
        fast for the memory of one more copy in the compute dtype. auto: on CPU only.
    """

    row_tokens: int
    rows: int = 1
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    remat: str = "linear"
    tile_tokens: int | None = None
    share_prefixes: bool = True
    with_entropy: bool = True
    keep_reference: bool = False
    keep_transposes: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("row_tokens", "rows", "tile_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"The trainer's {name} must be at least 1", got=getattr(self, name))
        if self.remat not in REMAT_POLICIES:
            raise ConfigError(f"Unknown remat policy {self.remat!r}", expected="one of " + ", ".join(REMAT_POLICIES))
        if self.compute_dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(
                f"Unknown compute dtype {self.compute_dtype!r}", expected="auto, float32 or bfloat16"
            )


class Trainer:
    """Trains one model, or one adapter beside it.

    Args:
      spec: the model. params: its tree (numpy or jax leaves, any float dtype); copied, so the caller's stays whole.
      lora: None: full fine-tuning.
      seed: of a fresh adapter's weights.
      phase: entered while packing ("pack") and computing ("train"), for whoever accounts for time.
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
    ):
        dtype = auto_dtype() if settings.compute_dtype == "auto" else settings.compute_dtype
        self.spec, self.settings, self.lora = spec, settings, lora
        self.program = ProgramSpec(
            spec, lora, dtype, settings.remat, settings.tile_tokens or auto_tile(), settings.with_entropy
        )
        self.policy_version = 0
        self._phase = phase or no_phase
        self._trainable: Tree
        self._frozen: Tree
        if lora is None:
            self._trainable, self._frozen = _copied(params, jnp.float32), None
        else:
            self._trainable = lora_module.init_adapter(spec, lora, seed)
            self._frozen = _copied(params, jnp.dtype(dtype))
        self._reference: Tree = None
        if settings.keep_reference and lora is None:
            self._reference = _copied(params, jnp.dtype(dtype))
        self._optimizer = programs.init_optimizer(self._trainable)
        keep = settings.keep_transposes
        self._keep_transposes = jax.default_backend() == "cpu" if keep == "auto" else keep
        self._transposes: Mapping[str, jax.Array] | None = None  # None: not made yet, or of older weights
        self._accumulators: Tree = None  # None: nothing accumulated, and no memory taken
        self._num_accumulated = 0  # tokens whose loss is in the accumulators

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
        """The sum added since the last `optim_step`, fp32; None if nothing was."""
        return self._accumulators

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        loss_config: LossConfig | None = None,
        *,
        score: Score = "all",
    ) -> ForwardBackwardResult:
        """Adds the gradient of the summed loss to what waits for `optim_step`.

        Everything is checked before anything runs: an error leaves the gradient as it was.

        Returns:
          outputs in datum order, and metrics: `loss:sum`, `num_tokens:sum` (with a loss), `num_nonfinite:sum`
          (sequences left out because a log-prob was not finite), `entropy:sum`, the loss's own sums,
          `num_computed_tokens:sum` (after sharing prefixes), `num_datum_tokens:sum`, `num_row_tokens:sum` (padding
          included), `num_micro_batches:sum`.

        Raises:
          RequestError: the loss, a setting of it or a datum is malformed, or there are no data.
          CapacityError: a datum is longer than a row.
        """
        return self._run(data, loss, loss_config, score, "gradient")

    def forward(
        self,
        data: Sequence[Datum],
        loss: str,
        loss_config: LossConfig | None = None,
        *,
        score: Score = "all",
    ) -> ForwardBackwardResult:
        """As `forward_backward`, leaving the gradient alone."""
        return self._run(data, loss, loss_config, score, "forward")

    def reference_logprobs(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probs of each datum's targets under the weights that the trainer was made with; 0 where `weights` is 0.

        With LoRA those are the base's, without the adapter. Full fine-tuning needs `settings.keep_reference`.

        Raises:
          ConfigError: the reference wasn't kept.
        """
        if self.lora is None and self._reference is None:
            raise ConfigError(
                "The trainer keeps no reference policy", remedy="Make it with TrainerSettings(keep_reference=True)"
            )
        result = self._run(data, "cross_entropy", None, "active", "reference")
        return [output["logprobs"] for output in result.outputs]

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
            updated = programs.update(self._trainable, self._optimizer, self._accumulators, hyper)
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

        The accumulated gradient isn't part of it, nor is LoRA's frozen base.
        """
        return {
            "trainable": _copied(self._trainable),
            "optimizer": _copied(self._optimizer._asdict()),
            "policy_version": np.asarray(self.policy_version, np.int64),
        }

    def restore(self, state: Mapping[str, Any], *, with_optimizer: bool = True) -> None:
        """Takes a state over, dropping any accumulated gradient. Without the optimizer, Adam starts afresh.

        Raises:
          CheckpointError: the state is of another model or adapter: names the first leaf that differs.
        """
        own = {"trainable": self._trainable, "optimizer": self._optimizer._asdict()}
        wanted = ("trainable", "optimizer") if with_optimizer else ("trainable",)
        for name in wanted:
            check_same(own[name], state.get(name), name)
        self._trainable = _copied(state["trainable"])
        if with_optimizer:
            self._optimizer = optax.ScaleByAdamState(**_copied(dict(state["optimizer"])))
        else:
            self._optimizer = programs.init_optimizer(self._trainable)
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
    ) -> ForwardBackwardResult:
        loss = find_loss(loss_name)
        options = read_options(loss, loss_config)
        checked = check_data(data, loss, options, self.spec.vocab_size)
        with self._phase("pack"):
            packed = self._pack(checked, score)
            batches = micro_batches(packed, checked, score)
        with self._phase("train"):
            outputs = [self._compute(batch, options, loss, what) for batch in batches]
            outputs = jax.device_get(outputs)  # waits for all of them
        result = assemble(packed, checked, outputs, self.settings.with_entropy)
        if what == "gradient":
            self._num_accumulated += int(result.metrics["num_tokens:sum"])
        return result

    def _pack(self, checked: Sequence[Checked], score: Score) -> Packed:
        scores_all = score == "all"
        return pack(
            [datum.tokens for datum in checked],
            [datum.num_free for datum in checked],
            row_tokens=self.settings.row_tokens,
            rows=self.settings.rows,
            targets=[datum.targets for datum in checked] if scores_all else None,
            share_prefixes=self.settings.share_prefixes,
            skip=None if scores_all else [not datum.reads.any() for datum in checked],
        )

    def _compute(self, batch: MicroBatch, options: Options, loss: Loss, what: What) -> programs.Outputs:
        static = {"spec": self.program, "loss_name": loss.name}
        if what == "reference":
            base = self._frozen if self._reference is None else self._reference
            static["spec"] = dataclasses.replace(self.program, lora=None)
            return programs.score(base, Fixed(None, {}), batch, options, **static)
        if what == "forward":
            return programs.score(self._trainable, Fixed(self._frozen, {}), batch, options, **static)
        if self._accumulators is None:
            self._accumulators = jax.tree.map(jnp.zeros_like, self._trainable)
        if self._transposes is None:
            weights = self._trainable if self.lora is None else self._frozen
            self._transposes = (
                programs.transposed(weights, self.program.compute_dtype) if self._keep_transposes else {}
            )
        self._accumulators, outputs = programs.accumulate(
            self._trainable, self._accumulators, Fixed(self._frozen, self._transposes), batch, options, **static
        )
        return outputs

    def _weights_changed(self) -> None:
        if self.lora is None:  # LoRA's base, whose transposes these are, never changes
            self._transposes = None


def no_phase(name: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def _copied(tree: Tree, dtype: Any = None) -> Tree:
    """Leaves as jax arrays with memory of their own: one that is donated later must not be anyone else's."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), tree)


def check_same(own: Tree, given: Tree, name: str) -> None:
    """Raises CheckpointError unless both trees have the same leaves, by path and shape."""
    own_leaves = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(own)}
    leaves = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(given)}
    for path in sorted(own_leaves | leaves):
        if own_leaves.get(path) != leaves.get(path):
            raise CheckpointError(
                f"The checkpoint's {name}{path} does not belong to this trainer",
                got=f"shape {leaves[path]}" if path in leaves else "nothing",
                expected=f"shape {own_leaves[path]}" if path in own_leaves else "nothing",
                remedy="Resume with the model and LoRA settings that the checkpoint was written with",
            )
