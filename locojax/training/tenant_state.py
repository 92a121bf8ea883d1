"""An adapter at its own rank, as checkpoints and samplers have it, and at the largest rank, as slots hold it. Numpy.

Legend: r the adapter's rank, R the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from locojax.models.lora import HEAD, LoraSpec, adapter_parameters
from locojax.models.spec import ModelSpec
from locojax.training.saved_state import check_same

RANK_AXIS: Mapping[str, int] = {"a": -1, "b": -2}


def ranks(spec: ModelSpec, lora: LoraSpec) -> dict[str, np.ndarray]:
    """i32[] by module that a slot has room for: the adapter's rank, or 0 where it has no part."""
    own = adapter_parameters(spec, lora)
    return {module: np.asarray(lora.rank if module in own else 0, np.int32) for module in _room(spec, 1)}


def narrow(tree: Mapping[str, Any], lora: LoraSpec) -> dict[str, dict[str, np.ndarray]]:
    """The adapter's own columns and modules, out of a slot: at the largest rank its arrays themselves."""
    modules = (*lora.modules, HEAD) if lora.unembed else lora.modules
    return {module: {name: _columns(leaf, RANK_AXIS[name], lora.rank) for name, leaf in tree[module].items()}
            for module in modules}  # fmt: skip


def _columns(leaf: np.ndarray, axis: int, rank: int) -> np.ndarray:
    if leaf.shape[axis] == rank:
        return leaf
    own = np.moveaxis(leaf, axis, 0)[:rank]
    return np.moveaxis(own, 0, axis).copy()  # so that the rest isn't kept


def widen(spec: ModelSpec, max_rank: int, tree: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """fp32 at the largest rank: 0 in the columns and modules that the adapter hasn't."""
    out = {}
    for module, parts in _room(spec, max_rank).items():
        out[module] = {name: np.zeros(part.shape, np.float32) for name, part in parts.items()}
        for name, leaf in tree.get(module, {}).items():
            room = np.moveaxis(out[module][name], RANK_AXIS[name], 0)
            own = np.moveaxis(np.asarray(leaf, np.float32), RANK_AXIS[name], 0)
            room[: own.shape[0]] = own
    return out


def checked_state(declared: Mapping[str, Any], state: Mapping[str, Any], optimizer: bool) -> None:
    """Raises CheckpointError unless the state has the leaves that the adapter declares, by path and shape."""
    check_same(declared, state.get("trainable"), "trainable")
    if optimizer:
        own = {"count": np.zeros((), np.int32), "mu": declared, "nu": declared}
        check_same(own, state.get("optimizer"), "optimizer")
        check_same(np.zeros(()), state.get("policy_version"), "policy_version")


def _room(spec: ModelSpec, max_rank: int) -> dict[str, Any]:
    return adapter_parameters(spec, LoraSpec(max_rank, attention=True, mlp=True, unembed=True))
