"""A trainer's trees and programs over a mesh of devices (see `sharded`), of this process and, perhaps, of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from locojax.models import sharding
from locojax.models.sharding import FSDP, SEQUENCE
from locojax.training import sharded
from locojax.training.losses import Options
from locojax.training.placement import OneDevice, Placement
from locojax.training.programs import Fixed, Hyper, MicroBatch, Outputs, ProgramSpec, Tree, Updated
from locojax.training.sharded import Gather, Over


class OverMesh(Placement):
    """The `Placement` of a trainer over a mesh.

    Raises:
      ConfigError: the mesh doesn't divide the model.
    """

    def __init__(self, spec: ProgramSpec, over: Over):
        sharding.check_divides(spec.model, over.mesh)
        if spec.sequence != over.mesh.shape[SEQUENCE]:
            raise ValueError(f"the program is of a sequence axis of {spec.sequence}, the mesh's is another")
        self._spec, self._over = spec, over
        self._partitions = sharded.partitions(spec, over)
        self.num_local_shards, self.num_shards = sharding.num_local_shards(over.mesh), over.mesh.shape[FSDP]

    def trainable(self, tree: Tree) -> Tree:
        return self._placed(tree, self._partitions.trainable, jnp.float32)

    def base(self, tree: Tree, dtype: DTypeLike) -> Tree:
        return self._placed(tree, self._partitions.base, dtype)

    def optimizer(self, state: Mapping[str, Any]) -> optax.ScaleByAdamState:
        moments = {name: self.trainable(state[name]) for name in ("mu", "nu")}
        return optax.ScaleByAdamState(count=self._placed(state["count"], PartitionSpec(), jnp.int32), **moments)

    def new_optimizer(self, trainable: Tree) -> optax.ScaleByAdamState:
        return sharded.new_optimizer(trainable, spec=self._spec, over=self._over)

    def copied(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: sharding.copied_to(leaf, leaf.sharding, leaf.dtype), tree)

    def zeros_like(self, trainable: Tree) -> Tree:
        return sharded.zeros(trainable, spec=self._spec, over=self._over)

    def working(self, trainable: Tree) -> Tree:
        if self._over.gather == "layer":
            return trainable
        return sharded.working(trainable, spec=self._spec, over=self._over)

    def gradient(self, accumulators: Tree) -> Tree:
        return sharded.gradient(accumulators, spec=self._spec, over=self._over)

    def transposed(self, params: Tree, spec: ProgramSpec) -> dict[str, Array]:
        return sharded.transposed({"layers": params["layers"]}, spec=spec, over=self._over)

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
        rows = self._rows(batch)
        return sharded.accumulate(
            working, accumulators, fixed, rows, options, spec=spec, loss_name=loss_name, over=self._over
        )

    def score(
        self, working: Tree, fixed: Fixed, batch: MicroBatch, options: Options, *, spec: ProgramSpec, loss_name: str
    ) -> Outputs:
        rows = self._rows(batch)
        return sharded.score(working, fixed, rows, options, spec=spec, loss_name=loss_name, over=self._over)

    def likeliest(
        self, working: Tree, fixed: Fixed, batch: MicroBatch, *, spec: ProgramSpec, num_top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        found = sharded.likeliest(working, fixed, self._rows(batch), spec=spec, num_top=num_top, over=self._over)
        return _local_rows(found[0]), _local_rows(found[1])

    def update(
        self, trainable: Tree, optimizer: optax.ScaleByAdamState, accumulators: Tree, hyper: Hyper
    ) -> Updated:
        return sharded.update(trainable, optimizer, accumulators, hyper, spec=self._spec, over=self._over)

    def fetch(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        def metric(value: Array) -> np.ndarray:
            return np.asarray(value.addressable_data(0))

        return [
            Outputs(
                _local_rows(output.logprobs),
                _local_rows(output.elementwise),
                _local_rows(output.entropy),
                jax.tree.map(metric, output.metrics),
            )
            for output in outputs
        ]

    def _placed(self, tree: Tree, of: Tree, dtype: DTypeLike) -> Tree:
        places = sharding.shardings(of, self._over.mesh)
        return jax.tree.map(lambda leaf, place: sharding.placed(leaf, place, dtype), tree, places)

    def _rows(self, batch: MicroBatch) -> MicroBatch:
        def one(local: np.ndarray, of: PartitionSpec) -> Array:
            rows = local.shape[0] // self.num_local_shards * self.num_shards
            place = NamedSharding(self._over.mesh, of)
            return jax.make_array_from_process_local_data(place, local, (rows, *local.shape[1:]))

        return sharded.placed_batch(batch, one)


def placement_of(program: ProgramSpec, gather: Gather | Literal["auto"], mesh: Mesh | None) -> Placement:
    """Where a trainer's programs run: on one device, or over the mesh."""
    if mesh is None:
        return OneDevice()
    return OverMesh(program, Over(mesh, auto_gather(mesh) if gather == "auto" else gather))


def auto_gather(mesh: Mesh) -> Gather:
    """When weights are made whole unless it is set: see `TrainerSettings.gather`."""
    return "step" if mesh.devices.flat[0].platform == "cpu" else "layer"


def _local_rows(array: Any) -> Any:
    """This process's positions, flat, of an array [R, T, ...] split over fsdp and sequence, replicated over tensor."""
    rows: dict[int, dict[int, Any]] = {}
    for shard in array.addressable_shards:
        row, token = (index.start or 0 for index in shard.index[:2])
        rows.setdefault(row, {})[token] = np.asarray(shard.data)
    whole = [np.concatenate([parts[token] for token in sorted(parts)], axis=1) for _, parts in sorted(rows.items())]
    return np.concatenate(whole).reshape(-1, *array.shape[2:])
