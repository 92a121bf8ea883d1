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


def fitted(stack: Adapters, adapter: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """One adapter as the stack stores it: lower ranks padded with zeros, and modules that it lacks zero. All f32.

    Raises:
      RequestError: it has modules, shapes or a rank that the stack has no place for.
    """
    unknown = sorted(set(adapter) - set(stack.tree))
    if unknown:
        raise RequestError("An adapter has modules that the engine has no place for", got=unknown)
    return {
        module: {
            name: _padded(module, name, leaf, adapter[module][name] if module in adapter else None)
            for name, leaf in parts.items()
        }
        for module, parts in stack.tree.items()
    }


def _padded(module: str, name: str, stack: Any, leaf: Any) -> Any:
    """One leaf of an adapter at the stack's rank. `stack` is that of all, with one more axis; None: zeros."""
    axis = stack_axis(module)
    shape = (*stack.shape[:axis], *stack.shape[axis + 1 :])
    if leaf is None:
        return np.zeros(shape, np.float32)
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
    if leaf.shape == shape:
        return leaf if leaf.dtype == np.float32 else np.asarray(leaf, np.float32)
    padded = np.zeros(shape, np.float32)
    padded[tuple(slice(0, size) for size in leaf.shape)] = leaf
    return padded
