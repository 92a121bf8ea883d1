"""A trainer's saved state: does it belong to the trainer that is given it?"""

from __future__ import annotations

import jax
import numpy as np

from locojax.errors import CheckpointError
from locojax.training.programs import Tree


def check_same(own: Tree, given: Tree, name: str) -> None:
    """Raises CheckpointError unless both trees have the same leaves, by path and shape."""
    own_leaves = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(own)}
    leaves = {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(given)}
    for path in sorted(own_leaves | leaves):
        if own_leaves.get(path) != leaves.get(path):
            raise CheckpointError(
                f"The checkpoint's {name}{path} does not belong to this trainer",
                got=f"shape {leaves[path]}" if path in leaves else "nothing",
                expected=f"shape {own_leaves[path]}" if path in own_leaves else "nothing",
                remedy="Resume with the model and LoRA settings that the checkpoint was written with",
            )
