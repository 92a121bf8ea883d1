"""What fits into an engine's stacked adapters. Host arrays only: the device's part is `programs.set_adapter`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from locojax.errors import RequestError
from locojax.models.lora import Adapters, stack_axis


def require(adapters: Adapters | None) -> Adapters:
    """The engine's stack. Raises RequestError if it has none."""
    if adapters is None or not adapters.scale.ndim:
        raise RequestError(
            "The engine has no stack of adapters", remedy="Give load one: models.lora.empty_stack makes it"
        )
    return adapters


def copied(stack: Adapters, adapter: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """One adapter at its own rank, in the stack's dtype; copied, except arrays that are so and can't be written.

    Raises:
      RequestError: it has modules, shapes or a rank that the stack has no place for.
    """
    _check(stack, adapter)
    return {
        module: {name: _kept(leaf, stack.tree[module][name].dtype) for name, leaf in parts.items()}
        for module, parts in adapter.items()
    }


def _kept(leaf: Any, dtype: Any) -> np.ndarray:
    if isinstance(leaf, np.ndarray) and leaf.dtype == dtype and not leaf.flags.writeable:
        return leaf
    return np.array(leaf, dtype)


def fitted(stack: Adapters, adapter: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """One adapter as the stack stores it: lower ranks padded with zeros, and modules that it lacks zero.

    Raises:
      RequestError: as `copied`.
    """
    _check(stack, adapter)
    return {
        module: {name: _padded(_shape(module, leaf), leaf.dtype, adapter.get(module, {}).get(name))
                 for name, leaf in parts.items()}
        for module, parts in stack.tree.items()
    }  # fmt: skip


def _shape(module: str, stacked: Any) -> tuple[int, ...]:
    """A leaf's own, of a stack's leaf, which has one more axis."""
    axis = stack_axis(module)
    return (*stacked.shape[:axis], *stacked.shape[axis + 1 :])


def _check(stack: Adapters, adapter: Mapping[str, Any]) -> None:
    unknown = sorted(set(adapter) - set(stack.tree))
    if unknown:
        raise RequestError("An adapter has modules that the engine has no place for", got=unknown)
    for module, parts in adapter.items():
        for name, leaf in parts.items():
            shape = _shape(module, stack.tree[module][name])
            rank_axis = len(shape) - (1 if name == "a" else 2)
            fits = leaf.ndim == len(shape) and all(
                have <= room if axis == rank_axis else have == room
                for axis, (have, room) in enumerate(zip(leaf.shape, shape, strict=True))
            )
            if not fits:
                raise RequestError(
                    f"An adapter's {module}.{name} doesn't fit the engine's stack", got=list(leaf.shape),
                    expected=f"{list(shape)}, of which the rank may be lower than {shape[rank_axis]}",
                )  # fmt: skip


def _padded(shape: tuple[int, ...], dtype: Any, leaf: Any) -> np.ndarray:
    """A leaf that `_check` has seen, at the stack's rank; None: zeros. Not copied where it is so already."""
    if leaf is None or leaf.shape != shape:
        padded = np.zeros(shape, dtype)
        if leaf is not None:
            padded[tuple(slice(0, size) for size in leaf.shape)] = leaf
        return padded
    return np.asarray(leaf, dtype)
