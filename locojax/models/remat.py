"""What the backward pass keeps of a layer, and what it makes again: policies by name.

A layer's input is kept always (the scan over layers carries it), except that `offload` keeps it in the host's memory.
Shape letters: D hidden, F ffn, H heads, K kv heads, h head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from locojax.models.attention import ATTENDED
from locojax.models.dense import INNER
from locojax.models.spec import ModelSpec

LINEAR = "linear"
"""Name of what the policy "linear" keeps of linear layers: their outputs, adapters included."""

LAYER_INPUT = "layer_input"
"""Name of the one activation that every policy keeps."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """A policy.

    Attributes:
      keeps: in words, beside the layer's input.
      repeats: in words, what is computed a second time.
      saveable: for `jax.checkpoint`; None: no checkpoint at all.
    """

    keeps: str
    repeats: str
    saveable: Callable[..., Any] | None


POLICIES: Mapping[str, Remat] = {
    "none": Remat("every activation", "nothing", None),
    "linear": Remat(
        "outputs of linear layers and of attention",
        "norms, rope, activation functions",
        jax.checkpoint_policies.save_only_these_names(LINEAR, INNER, ATTENDED),
    ),
    "dots": Remat(
        "outputs of products with weights",
        "attention, norms, rope, activation functions",
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
    "attention": Remat(
        "the output of attention and its normalizers",
        "linear layers, norms, rope, activation functions",
        jax.checkpoint_policies.save_only_these_names(ATTENDED),
    ),
    "full": Remat("nothing", "the layer's forward pass", jax.checkpoint_policies.nothing_saveable),
    "offload": Remat(
        "nothing; the layer's input in the host's memory",
        "the layer's forward pass",
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
}
"""From the dearest in memory to the cheapest."""


def kept_bytes(name: str, spec: ModelSpec, itemsize: int) -> float:
    """Bytes of a device's memory that one token takes in one layer between the forward and the backward pass.

    Counted from the declared sizes; "none" isn't, as what XLA keeps then depends on what it fuses: nan.
    """
    D, F, Q, KV = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    linear = Q + 2 * KV + D + 2 * F + D
    attended = Q * itemsize + 4 * spec.num_heads
    kept: dict[str, float] = {
        "none": float("nan"),
        "linear": (D + linear) * itemsize + attended,
        "dots": (D + linear) * itemsize,
        "attention": D * itemsize + attended,
        "full": D * itemsize,
        "offload": 0,
    }
    return float(kept[name])
