"""What an engine samples with: the weights, the adapters beside them, and which version each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from locojax.models import decoder, lora
from locojax.models.decoder import Params
from locojax.models.lora import Adapters
from locojax.rollout import stacks
from locojax.rollout.prefilling import Loaded
from locojax.rollout.programs import Compiler


class Policy:
    """See the module's head. `version` is None until weights have been taken."""

    def __init__(self) -> None:
        self.loaded = Loaded({}, None, 0)
        self.version: int | None = None
        self._versions: dict[int, int] = {}  # of adapters that were replaced by themselves

    def take(self, weights: Params, version: int, adapters: Adapters | None) -> None:
        """Everything anew; row 0 of stacked adapters becomes no adapter."""
        if adapters is not None and decoder.is_packed(weights):
            adapters = jax.jit(lora.packed)(adapters)
        if adapters is not None and adapters.scale.ndim:
            own = jax.tree.map(jnp.copy, adapters)  # `replace` gives its memory away
            adapters = dataclasses.replace(own, scale=own.scale.at[0].set(0.0))
        leaves, tree = jax.tree.flatten((weights, adapters))
        signature = hash((tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)))
        self.loaded, self.version, self._versions = Loaded(weights, adapters, signature), version, {}

    def copied(self, adapter: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
        """See `stacks.copied`. Raises RequestError as `fitted`."""
        return stacks.copied(stacks.require(self.loaded.adapters), adapter)

    def fitted(self, adapter: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
        """One adapter as the stack stores it. Raises RequestError: there is no stack, or it has no place for this."""
        return stacks.fitted(stacks.require(self.loaded.adapters), adapter)

    def replace(self, compiler: Compiler, row: int, fitted: Mapping[str, Any], scale: float, version: int) -> None:
        """One row of the stack, whose memory is reused."""
        replaced = compiler.call(
            "set_adapter", self.loaded.signature, self.loaded.adapters, fitted, np.float32(scale),
            np.asarray(row, np.int32),
        )  # fmt: skip
        self.loaded = dataclasses.replace(self.loaded, adapters=replaced)
        self._versions[row] = version

    def version_of(self, adapter: int) -> int:
        """The version of an adapter's completions, -1 before there are weights."""
        return self._versions.get(adapter, -1 if self.version is None else self.version)

    @property
    def num_adapters(self) -> int:
        """Values that a request's adapter may take: 1 with no adapters loaded, as 0 is none."""
        scale = None if self.loaded.adapters is None else self.loaded.adapters.scale
        if scale is None:
            return 1
        return scale.shape[0] if scale.ndim else 2
