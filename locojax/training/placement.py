"""Where a trainer's trees live, and which compiled programs run on them: on one device, or over a mesh (`sharded`)."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from locojax.training import programs
from locojax.training.losses import Options
from locojax.training.programs import Fixed, Hyper, MicroBatch, Outputs, ProgramSpec, Tree, Updated


class Placement(abc.ABC):
    """What `Trainer` asks of the devices that it trains on.

    Attributes:
      num_local_shards: devices of this process that rows of a micro-batch are split over.
      num_shards: those of all processes.
    """

    num_local_shards: int
    num_shards: int

    @abc.abstractmethod
    def trainable(self, tree: Tree) -> Tree:
        """A copy in fp32, where it is trained."""

    @abc.abstractmethod
    def base(self, tree: Tree, dtype: DTypeLike) -> Tree:
        """A copy of the model's tree that is read only."""

    @abc.abstractmethod
    def optimizer(self, state: Mapping[str, Any]) -> optax.ScaleByAdamState:
        """A copy of a saved state of Adam."""

    @abc.abstractmethod
    def new_optimizer(self, trainable: Tree) -> optax.ScaleByAdamState:
        """See `programs.init_optimizer`."""

    @abc.abstractmethod
    def copied(self, tree: Tree) -> Tree:
        """With memory of its own: what is donated later must not be anyone else's."""

    @abc.abstractmethod
    def zeros_like(self, trainable: Tree) -> Tree:
        """Accumulators of nothing."""

    @abc.abstractmethod
    def working(self, trainable: Tree) -> Tree:
        """What is trained, as `accumulate` and `score` read it; made again when it has changed."""

    @abc.abstractmethod
    def gradient(self, accumulators: Tree) -> Tree:
        """What the accumulators hold, one leaf for each that is trained."""

    @abc.abstractmethod
    def transposed(self, params: Tree, spec: ProgramSpec) -> dict[str, jax.Array]:
        """See `programs.transposed`."""

    @abc.abstractmethod
    def accumulate(
        self,
        working: Tree,
        accumulators: Tree,
        fixed: Fixed,
        batch: MicroBatch,
        options: Options,
        *,
        spec: ProgramSpec,
        loss_name: str,
    ) -> tuple[Tree, Outputs]:
        """See `programs.accumulate`. batch: this process's rows, numpy."""

    @abc.abstractmethod
    def score(
        self, working: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str
    ) -> Outputs:
        """See `programs.score`."""

    @abc.abstractmethod
    def likeliest(
        self, working: Tree, fixed: Fixed, batch: MicroBatch, *, spec: ProgramSpec, num_top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `programs.likeliest`: this process's positions, in numpy."""

    @abc.abstractmethod
    def update(
        self, trainable: Tree, optimizer: optax.ScaleByAdamState, accumulators: Tree, hyper: Hyper
    ) -> Updated:
        """See `programs.update`."""

    @abc.abstractmethod
    def fetch(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        """In numpy: this process's positions, and the metrics of all. Waits for them."""


class OneDevice(Placement):
    """Everything on jax's default device."""

    num_local_shards = num_shards = 1

    def trainable(self, tree: Tree) -> Tree:
        return self._copied(tree, jnp.float32)

    def base(self, tree: Tree, dtype: DTypeLike) -> Tree:
        return self._copied(tree, dtype)

    def optimizer(self, state: Mapping[str, Any]) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(**self._copied(dict(state)))

    def new_optimizer(self, trainable: Tree) -> optax.ScaleByAdamState:
        return programs.init_optimizer(trainable)

    def copied(self, tree: Tree) -> Tree:
        return self._copied(tree)

    def zeros_like(self, trainable: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, trainable)

    def working(self, trainable: Tree) -> Tree:
        return trainable

    def gradient(self, accumulators: Tree) -> Tree:
        return accumulators

    def transposed(self, params: Tree, spec: ProgramSpec) -> dict[str, jax.Array]:
        return programs.transposed(params, spec.compute_dtype)

    def accumulate(
        self,
        working: Tree,
        accumulators: Tree,
        fixed: Fixed,
        batch: MicroBatch,
        options: Options,
        *,
        spec: ProgramSpec,
        loss_name: str,
    ) -> tuple[Tree, Outputs]:
        return programs.accumulate(
            working, accumulators, fixed, batch, options, spec=spec, loss_name=loss_name
        )

    def score(
        self, working: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str
    ) -> Outputs:
        return programs.score(working, fixed, batch, options, spec=spec, loss_name=loss_name)

    def likeliest(
        self, working: Tree, fixed: Fixed, batch: MicroBatch, *, spec: ProgramSpec, num_top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return jax.device_get(programs.likeliest(working, fixed, batch, spec=spec, num_top=num_top))

    def update(
        self, trainable: Tree, optimizer: optax.ScaleByAdamState, accumulators: Tree, hyper: Hyper
    ) -> Updated:
        return programs.update(trainable, optimizer, accumulators, hyper)

    def fetch(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        return jax.device_get(list(outputs))

    @staticmethod
    def _copied(tree: Tree, dtype: Any = None) -> Tree:
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), tree)
