"""Which device holds which part of a parameter: mesh construction, and logical axes -> mesh axes, by one table.

A mesh has three axes. `fsdp`: rows of a micro-batch are split over it. `sequence`: the tokens of each row are, for rows
too long for one device; attention gathers keys and values over it (Llama 3 herd, Grattafiori et al. 2024, section
3.3.2: all-gather context parallelism), all else is token by token. Weights are split over both together, and each
device makes them whole for itself, a layer at a time or all at once (Zhao et al. 2023, fully sharded data parallelism).
`tensor`: the compiler splits heads, ffn and vocabulary over it (Shoeybi et al. 2019); its devices compute the same
tokens.
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

FSDP, SEQUENCE, TENSOR = "fsdp", "sequence", "tensor"

DATA = (FSDP, SEQUENCE)
"""The axes whose devices have tokens of their own: those that weights are split over, and gradients summed."""

MESH_AXES: Mapping[str, str | tuple[str, ...]] = {
    "rows": FSDP,
    "tokens": SEQUENCE,
    "embed": DATA,
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
    sequence: int = 1

    def __post_init__(self) -> None:
        for axis in (TENSOR, SEQUENCE):
            if getattr(self, axis) < 1:
                raise ConfigError(f"The mesh's {axis} axis must be at least 1", got=getattr(self, axis))
        if self.fsdp != -1 and self.fsdp < 1:
            raise ConfigError("The mesh's fsdp axis must be at least 1, or -1 for all devices", got=self.fsdp)


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh [fsdp, sequence, tensor] over `devices`, in the order of hosts and, within a host, of ids.

    So a host's rows lie side by side. The devices of a row never span two hosts: only one of them has it.

    Args:
      devices: all that take part; None: all of all processes. Those of a TPU topology that isn't there will do too.

    Raises:
      ConfigError: the axes don't fit the devices, or a row would span hosts.
    """
    found = sorted(jax.devices() if devices is None else devices, key=lambda device: (device.process_index, device.id))
    of_row = spec.sequence * spec.tensor
    fsdp = len(found) // of_row if spec.fsdp == -1 else spec.fsdp
    if fsdp * of_row != len(found):
        middle = "" if spec.sequence == 1 else f" x sequence {spec.sequence}"
        raise ConfigError(
            f"A mesh of fsdp {'all' if spec.fsdp == -1 else spec.fsdp}{middle} x tensor {spec.tensor} does not fit the"
            " devices",
            got=f"{len(found)} devices",
            expected=f"a multiple of {of_row}" if spec.fsdp == -1 else f"{fsdp * of_row}",
        )
    grid = np.array(found, dtype=object).reshape(fsdp, spec.sequence, spec.tensor)
    if any(len({device.process_index for device in group.flat}) > 1 for group in grid):
        per_host = len(found) // len({device.process_index for device in found})
        sizes = {SEQUENCE: spec.sequence, TENSOR: spec.tensor}
        axes = " x ".join(f"{axis} axis of {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigError(
            f"The mesh's {axes} would span hosts of {per_host} devices",
            expected=f"a row on {_divisors(per_host)} devices",
        )
    return Mesh(grid, (FSDP, SEQUENCE, TENSOR), axis_types=(AxisType.Auto,) * 3)


def num_parts(mesh: Mesh) -> int:
    """Devices that weights are split over."""
    return math.prod(mesh.shape[axis] for axis in DATA)


def num_local_shards(mesh: Mesh) -> int:
    """Parts of a micro-batch's rows that this process holds: its share of the fsdp axis."""
    own = jax.process_index()
    return sum(group.flat[0].process_index == own for group in mesh.devices)


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of more than one process."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def check_divides(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises ConfigError, naming the dimension and its divisors, unless the mesh divides what is dear to replicate.

    KV heads and the vocabulary that the tensor axis doesn't divide are replicated over it instead.
    """
    parts, tensor = num_parts(mesh), mesh.shape[TENSOR]
    data = (f"{FSDP} axis", FSDP) if mesh.shape[SEQUENCE] == 1 else (f"{FSDP} and {SEQUENCE} axes", "their product")
    for axes, short, number, name, size in (
        (*data, parts, "hidden_size", spec.hidden_size),
        (f"{TENSOR} axis", TENSOR, tensor, "num_heads", spec.num_heads),
        (f"{TENSOR} axis", TENSOR, tensor, "intermediate_size", spec.intermediate_size),
    ):
        if size % number:
            raise ConfigError(
                f"The model's {name} of {size} can't be divided over the mesh's {axes}",
                got=f"{short} = {number}",
                expected=f"one of {_divisors(size)}",
            )


def check_rows(row_tokens: int, sequence: int, multiple: int = 1) -> None:
    """Raises ConfigError unless rows can be split over a sequence axis of this size, into parts of whole multiples."""
    if sequence > 1 and row_tokens % (sequence * multiple):
        of_kernel = f", in multiples of {multiple} as the attention kernel takes them" if multiple > 1 else ""
        raise ConfigError(
            f"Rows of {row_tokens} tokens can't be split over the mesh's sequence axis of {sequence}{of_kernel}",
            expected=f"a multiple of {sequence * multiple} tokens",
            remedy=f"Make rows of {-(-row_tokens // (sequence * multiple)) * sequence * multiple} tokens",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def partition(parameter: Parameter, spec: ModelSpec, mesh: Mesh) -> PartitionSpec:
    """Where each dimension of a parameter goes; see the table. Vectors are small, and replicated.

    A matrix without an embed axis (half of an adapter's) is split along its longest dimension that divides.
    """
    if sum(axis != "layers" for axis in parameter.axes) < 2:
        return PartitionSpec()
    found: list[Any] = []
    for axis, size in zip(parameter.axes, parameter.shape, strict=True):
        wanted = MESH_AXES.get(axis)
        # A head is never cut in two: that would be a sum over devices inside every score.
        units = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads}.get(axis, size)
        found.append(wanted if wanted is not None and units % _size(mesh, wanted) == 0 else None)
    if DATA not in found:
        parts = [num_parts(mesh) * (1 if other is None else _size(mesh, other)) for other in found]
        sizes = enumerate(zip(parameter.axes, parameter.shape, parts, strict=True))
        fitting = [i for i, (axis, size, number) in sizes if axis != "layers" and size % number == 0]
        if fitting:
            longest = max(fitting, key=lambda i: parameter.shape[i])
            found[longest] = DATA if found[longest] is None else (*DATA, found[longest])
    return PartitionSpec(*found)


def _size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def partitions(declared: Any, spec: ModelSpec, mesh: Mesh) -> Any:
    """`partition` of every `Parameter` in a tree."""
    return jax.tree.map(lambda parameter: partition(parameter, spec, mesh), declared)


def without_data(of: PartitionSpec) -> PartitionSpec:
    """The same, whole on every device of the axes `DATA`."""
    return PartitionSpec(*(_other(entry) for entry in of))


def only_data(of: PartitionSpec) -> PartitionSpec:
    """The part that names the axes `DATA`: what a program that is manual over them is told."""
    return PartitionSpec(*(DATA if _has_data(entry) else None for entry in of))


def data_dimension(of: PartitionSpec) -> int:
    """The dimension that is split over the axes `DATA`; -1 if none is."""
    return next((i for i, entry in enumerate(of) if _has_data(entry)), -1)


def _has_data(entry: Any) -> bool:
    return isinstance(entry, tuple) and FSDP in entry


def _other(entry: Any) -> Any:
    return next((axis for axis in entry if axis not in DATA), None) if isinstance(entry, tuple) else entry


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A tree of `PartitionSpec` -> one of `NamedSharding`."""
    return jax.tree.map(lambda of: NamedSharding(mesh, of), tree)


def whole(shard: Array, dimension: int, dtype: DTypeLike) -> Array:
    """Inside a program manual over the axes `DATA`: the whole array in `dtype`, from each device's part along
    `dimension`.

    Cast first, so that no more is sent than `dtype` holds. Its gradient is summed over the devices in the part's own
    dtype, and each keeps its own part of the sum.
    """
    return _whole(shard, dimension, jnp.dtype(dtype), shard.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _whole(shard: Array, dimension: int, dtype: Any, own_dtype: Any) -> Array:
    return jax.lax.all_gather(shard.astype(dtype), DATA, axis=dimension, tiled=True)


def _whole_fwd(shard: Array, dimension: int, dtype: Any, own_dtype: Any):
    return _whole(shard, dimension, dtype, own_dtype), None


def _whole_bwd(dimension: int, dtype: Any, own_dtype: Any, kept: None, g: Array):
    return (jax.lax.psum_scatter(g.astype(own_dtype), DATA, scatter_dimension=dimension, tiled=True),)


_whole.defvjp(_whole_fwd, _whole_bwd)


def whole_rows(part: Array) -> Array:
    """Inside a program manual over the sequence axis: rows [R, T, ...] from each device's part [R, T/S, ...] of them.

    Its gradient is summed over the devices in fp32, and each keeps that of its own part. No two of these should be free
    to run at the same time: of a program read from jax's persistent cache, XLA's CPU backend runs such messages in
    another order on each device, and takes one for the other (seen with jax 0.12).
    """
    return _whole_rows(part)


def _rows(part: Array) -> Array:
    return jax.lax.all_gather(part, SEQUENCE, axis=1, tiled=True)


_whole_rows = jax.custom_vjp(_rows)


def _whole_rows_fwd(part: Array):
    return _rows(part), None


def _whole_rows_bwd(kept: None, g: Array):
    summed = jax.lax.psum_scatter(g.astype(jnp.float32), SEQUENCE, scatter_dimension=1, tiled=True)
    return (summed.astype(g.dtype),)


_whole_rows.defvjp(_whole_rows_fwd, _whole_rows_bwd)


def first_token(part: Array) -> Array:
    """i32[]: where in its rows this device's part [R, T/S, ...] of them begins."""
    return jax.lax.axis_index(SEQUENCE) * part.shape[1]


def own_tokens(rows: Array, parts: int) -> Array:
    """The reverse of `whole_rows`: this device's part [R, T/S, ...] of rows [R, T, ...]; `parts` is S."""
    size = rows.shape[1] // parts
    return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(SEQUENCE) * size, size, axis=1)


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
