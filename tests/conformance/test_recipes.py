"""A quick part of the cookbook's recipes, where LOCOJAX_COOKBOOK names an interpreter that has them."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import tiny
from conformance import recipes

pytestmark = pytest.mark.extended

COOKBOOK = os.environ.get("LOCOJAX_COOKBOOK")


def test_every_recipe_is_spelled_out(tmp_path: pathlib.Path) -> None:
    for name, recipe in recipes.RECIPES.items():
        command = recipe.command("python3", "local/tiny", "role_colon", tmp_path / name, 2)
        assert command[4].startswith("tinker_cookbook.recipes.") and "max_steps=2" in command
        assert not any("{" in argument for argument in command), command


if COOKBOOK:

    def test_quick_recipes(tmp_path: pathlib.Path) -> None:
        assert COOKBOOK
        model = tiny.write_tiny_model(tmp_path / "tiny")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
        for result in recipes.run_all(COOKBOOK, str(model), recipes.QUICK, 2, "role_colon"):
            assert result["status"] == 0, f"{result['error']}\nserver:\n{result['server']}"
