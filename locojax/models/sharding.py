"""Which device holds which part of a parameter: mesh construction, and logical axes -> mesh axes, by one table.

A mesh has two axes. `fsdp`: rows of a micro-batch are split over it, and so are the weights, which each device makes
whole for itself, a layer at a time or all at once (Zhao et al. 2023, fully sharded data parallelism). `tensor`: the
compiler splits heads, ffn and vocabulary over it (Shoeybi et al. 2019); its devices compute the same rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from locojax.errors import ConfigError
from locojax.models.spec import ModelSpec, Parameter

FSDP, TENSOR = "fsdp", "tensor"

MESH_AXES: Mapping[str, str] = {
    "rows": FSDP,
    "embed": FSDP,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "ffn": TENSOR,
    "vocab": TENSOR,
}
"""Logical axis -> mesh axis; those that aren't named (layers, rank, head_dim) are never split."""


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """The mesh that a run asks for: sizes of its axes. fsdp -1: whatever is left of the devices."""

    fsdp: int = -1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise ConfigError("The mesh's tensor axis must be at least 1", got=self.tensor)
        if self.fsdp != -1 and self.fsdp < 1:
            raise ConfigError("The mesh's fsdp axis must be at least 1, or -1 for all devices", got=self.fsdp)


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh [fsdp, tensor] over `devices`, in the order of hosts and, within a host, of ids.

    So a host's rows lie side by side. A tensor group never spans two hosts: its devices compute the same rows, which
    only one host has.

    Args:
      devices: all that take part; None: all of all processes. Those of a TPU topology that isn't there will do too.

    Raises:
      ConfigError: the axes don't fit the devices, or a tensor group would span hosts.
    """
    found = sorted(jax.devices() if devices is None else devices, key=lambda device: (device.process_index, device.id))
    fsdp = len(found) // spec.tensor if spec.fsdp == -1 else spec.fsdp
    if fsdp * spec.tensor != len(found):
        raise ConfigError(
            f"A mesh of fsdp {'all' if spec.fsdp == -1 else spec.fsdp} x tensor {spec.tensor} does not fit the devices",
            got=f"{len(found)} devices",
            expected=f"a multiple of {spec.tensor}" if spec.fsdp == -1 else f"{fsdp * spec.tensor}",
        )
    grid = np.array(found, dtype=object).reshape(fsdp, spec.tensor)
    if any(len({device.process_index for device in group}) > 1 for group in grid):
        per_host = len(found) // len({device.process_index for device in found})
        raise ConfigError(
            f"The mesh's tensor axis of {spec.tensor} would span hosts of {per_host} devices",
            expected=f"a tensor axis of {_divisors(per_host)}",
        )
    return Mesh(grid, (FSDP, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def num_local_shards(mesh: Mesh) -> int:
    """Parts of a micro-batch's rows that this process holds: its share of the fsdp axis."""
    own = jax.process_index()
    return sum(group[0].process_index == own for group in mesh.devices)


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of more than one process."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def check_divides(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises ConfigError, naming the dimension and its divisors, unless the mesh divides what is dear to replicate.

    KV heads and the vocabulary that the tensor axis doesn't divide are replicated over it instead.
    """
    for axis, name, size in (
        (FSDP, "hidden_size", spec.hidden_size),
        (TENSOR, "num_heads", spec.num_heads),
        (TENSOR, "intermediate_size", spec.intermediate_size),
    ):
        if size % mesh.shape[axis]:
            raise ConfigError(
                f"The model's {name} of {size} can't be divided over the mesh's {axis} axis",
                got=f"{axis} = {mesh.shape[axis]}",
                expected=f"one of {_divisors(size)}",
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def partition(parameter: Parameter, spec: ModelSpec, mesh: Mesh) -> PartitionSpec:
    """Where each dimension of a parameter goes; see the table. Vectors are small, and replicated.

    A matrix without an embed axis (half of an adapter's) is split over fsdp along its longest dimension that divides.
    """
    if sum(axis != "layers" for axis in parameter.axes) < 2:
        return PartitionSpec()
    found: list[Any] = []
    for axis, size in zip(parameter.axes, parameter.shape, strict=True):
        wanted = MESH_AXES.get(axis)
        # A head is never cut in two: that would be a sum over devices inside every score.
        units = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}.get(axis, size)
        found.append(wanted if wanted is not None and units % mesh.shape[wanted] == 0 else None)
    if FSDP not in found:
        parts = [mesh.shape[FSDP] * (1 if other is None else mesh.shape[other]) for other in found]
        sizes = enumerate(zip(parameter.axes, parameter.shape, parts, strict=True))
        fitting = [i for i, (axis, size, number) in sizes if axis != "layers" and size % number == 0]
        if fitting:
            longest = max(fitting, key=lambda i: parameter.shape[i])
            found[longest] = FSDP if found[longest] is None else (FSDP, found[longest])
    return PartitionSpec(*found)


def partitions(declared: Any, spec: ModelSpec, mesh: Mesh) -> Any:
    """`partition` of every `Parameter` in a tree."""
    return jax.tree.map(lambda parameter: partition(parameter, spec, mesh), declared)


def without_fsdp(of: PartitionSpec) -> PartitionSpec:
    """The same, whole on every device of the fsdp axis."""
    return PartitionSpec(*(None if entry == FSDP else _other(entry) for entry in of))


def only_fsdp(of: PartitionSpec) -> PartitionSpec:
    """The part that names the fsdp axis: what a program that is manual over it is told."""
    return PartitionSpec(*(FSDP if _has_fsdp(entry) else None for entry in of))


def fsdp_dimension(of: PartitionSpec) -> int:
    """The dimension that is split over fsdp; -1 if none is."""
    return next((i for i, entry in enumerate(of) if _has_fsdp(entry)), -1)


def _has_fsdp(entry: Any) -> bool:
    return entry == FSDP or (isinstance(entry, tuple) and FSDP in entry)


def _other(entry: Any) -> Any:
    return next((axis for axis in entry if axis != FSDP), None) if isinstance(entry, tuple) else entry


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A tree of `PartitionSpec` -> one of `NamedSharding`."""
    return jax.tree.map(lambda of: NamedSharding(mesh, of), tree)


def whole(shard: Array, dimension: int, dtype: DTypeLike) -> Array:
    """Inside a program that is manual over fsdp: the whole array in `dtype`, from each device's part along `dimension`.

    Cast first, so that no more is sent than `dtype` holds. Its gradient is summed over the devices in the part's own
    dtype, and each keeps its own part of the sum.
    """
    return _whole(shard, dimension, jnp.dtype(dtype), shard.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _whole(shard: Array, dimension: int, dtype: Any, own_dtype: Any) -> Array:
    return jax.lax.all_gather(shard.astype(dtype), FSDP, axis=dimension, tiled=True)


def _whole_fwd(shard: Array, dimension: int, dtype: Any, own_dtype: Any):
    return _whole(shard, dimension, dtype, own_dtype), None


def _whole_bwd(dimension: int, dtype: Any, own_dtype: Any, kept: None, g: Array):
    return (jax.lax.psum_scatter(g.astype(own_dtype), FSDP, scatter_dimension=dimension, tiled=True),)


_whole.defvjp(_whole_fwd, _whole_bwd)


def placed(leaf: Any, sharding: NamedSharding, dtype: DTypeLike) -> Array:
    """A copy of an array as a global one, each device holding its part.

    Args:
      leaf: a whole array that every process has the same, numpy or jax; or a global one on the same devices.
    """
    if isinstance(leaf, Array) and not leaf.is_fully_addressable:
        return copied_to(leaf, sharding, jnp.dtype(dtype))
    array = np.asarray(leaf)
    # Copied, as jax may take a numpy array's memory over, and what is placed here may be donated.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.array(array[index], jnp.dtype(dtype)))


@partial(jax.jit, static_argnames=("sharding", "dtype"))
def copied_to(leaf: Array, sharding: NamedSharding, dtype: Any) -> Array:
    """A copy of a global array under another sharding of the same devices."""
    return jax.lax.with_sharding_constraint(jnp.copy(leaf.astype(dtype)), sharding)


def device_bytes(tree: Any) -> int:
    """Bytes that a tree of shapes with shardings takes on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def gathered(tree: Any) -> Any:
    """The tree in numpy, whole on every process. Every process that holds a part must call it. Leaf by leaf, so that
    no device needs room for more than one whole leaf."""
    return jax.tree.map(_gathered, tree)


def _gathered(leaf: Any) -> np.ndarray:
    if isinstance(leaf, Array) and not leaf.is_fully_addressable and isinstance(leaf.sharding, NamedSharding):
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = copied_to(leaf, everywhere, leaf.dtype).addressable_data(0)
    return np.array(leaf)


def own_copy(replicated: Array) -> Array:
    """What this process's first device holds of a replicated global array, as an array of that device alone."""
    first = min(replicated.addressable_shards, key=lambda shard: shard.device.id)
    return first.data
