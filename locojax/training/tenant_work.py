"""A tenant's call while it is worked off, and what is known of the tenant beside its slot's arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from locojax.errors import RequestError
from locojax.models.lora import LoraSpec
from locojax.training.inputs import Checked
from locojax.training.losses import Loss
from locojax.training.microbatch import assemble
from locojax.training.packing import Packed
from locojax.training.programs import MicroBatch, Outputs
from locojax.training.tenant_rows import Owner, Row, padded_targets
from locojax.types import ForwardBackwardResult


@dataclasses.dataclass
class Tenant:
    """One model: its slot, and what of it the bank of slots doesn't hold."""

    model_id: str
    slot: int
    lora: LoraSpec
    policy_version: int = 0
    num_accumulated: int = 0  # tokens whose loss is in the accumulators
    is_removed: bool = False

    @property
    def owner(self) -> Owner:
        return Owner(self.slot, self.lora.scale, self.lora.unembed)


class RowProgram(NamedTuple):
    """What a call's micro-batches are compiled for: their shape, targets a position, whether with a gradient."""

    num_rows: int
    row_tokens: int
    num_targets: int
    gradient: bool


class Work:
    """A call that `TenantTrainer.begin` made and `advance` works off, row by row."""

    def __init__(
        self,
        tenant: Tenant,
        loss: Loss,
        options: np.ndarray,
        rows: Sequence[MicroBatch],
        gradient: bool,
        with_entropy: bool,
        metric_names: Sequence[str],
        checked_and_packed: tuple[Sequence[Checked], Packed],
        shape: tuple[int, int],
    ):
        self._tenant, self._loss, self._options, self._rows = tenant, loss, options, rows
        self._gradient, self._with_entropy, self._metric_names = gradient, with_entropy, metric_names
        self._checked, self._packed = checked_and_packed
        self._shape = shape
        self._num_targets = max(datum.targets.shape[1] for datum in self._checked)
        self._outputs: list[Outputs] = []

    @property
    def model_id(self) -> str:
        return self._tenant.model_id

    @property
    def num_rows_left(self) -> int:
        """Rows not computed yet; 0 also when the model was removed."""
        return 0 if self._tenant.is_removed else len(self._rows) - len(self._outputs)

    @property
    def done(self) -> bool:
        return self.num_rows_left == 0

    @property
    def program(self) -> RowProgram:
        """Rows that agree in it can be computed together."""
        return RowProgram(*self._shape, padded_targets(self._num_targets), self._gradient)

    def result(self) -> ForwardBackwardResult:
        """As `Trainer.forward_backward` returns it, with `num_rows:sum` in place of `num_micro_batches:sum`.

        Raises:
          RequestError: the model was removed before all rows were computed, or rows are still left.
        """
        if len(self._outputs) < len(self._rows):
            raise RequestError(
                f"The call on model {self.model_id!r} did not finish",
                got="the model was removed" if self._tenant.is_removed else f"{self.num_rows_left} rows left",
            )
        result = assemble(self._packed, self._checked, self._outputs, self._with_entropy)
        metrics = dict(result.metrics)
        metrics["num_rows:sum"] = metrics.pop("num_micro_batches:sum")
        return ForwardBackwardResult(result.outputs, metrics)

    def next_rows(self, most: int) -> list[Row]:
        """Up to so many of the rows not computed yet."""
        start = len(self._outputs)
        rows = self._rows[start : start + min(most, self.num_rows_left)]
        return [Row(row, self._tenant.owner, self._loss.name, self._options) for row in rows]

    def take(self, outputs: Outputs, r: int) -> None:
        """Keeps row r of a micro-batch's outputs, host arrays."""
        metrics = {name: outputs.metrics[name][r] for name in self._metric_names}
        own = slice(0, self._num_targets)
        self._outputs.append(
            Outputs(outputs.logprobs[r][:, own], outputs.elementwise[r][:, own], outputs.entropy[r], metrics)
        )
        if self._gradient:
            self._tenant.num_accumulated += int(metrics["num_tokens"])
