"""A quick part of the cookbook's recipes, where LOCOJAX_COOKBOOK names an interpreter that has them."""

from __future__ import annotations

import json
import os
import pathlib
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conformance import recipes
from conformance.server import ROOT

from locojax.models.decoder import forward
from locojax.models.hub import load_model
from locojax.models.lora import Adapters, LoraSpec, init_adapter
from locojax.models.peft import save_adapter

pytestmark = pytest.mark.extended

COOKBOOK = os.environ.get("LOCOJAX_COOKBOOK")
NAMES = {"model": "local/tiny", "alias": "Qwen/Qwen3-8B-Base", "renderer": "role_colon", "sampler": "tinker://a",
         "state": "tinker://b"}  # fmt: skip


def test_every_recipe_is_spelled_out() -> None:
    for name, recipe in recipes.RECIPES.items():
        command = recipe.command("python3", NAMES, f"runs/{name}", 2)
        assert command[4].startswith("tinker_cookbook.recipes.") and "max_steps=2" in command
        assert not any("{" in argument for argument in command), command


def test_a_recipe_runs_after_the_one_whose_checkpoint_it_takes() -> None:
    assert recipes.in_order(["on_policy_distillation"]) == ["chat_sl", "on_policy_distillation"]
    assert recipes.in_order(["guess_number"]) == ["guess_form", "guess_number"]
    assert recipes.in_order(["chat_sl", "dpo", "on_policy_distillation"]) == [
        "chat_sl", "dpo", "on_policy_distillation",
    ]  # fmt: skip


def test_a_taught_model_is_the_base_with_the_adapter_merged_in(tmp_path: pathlib.Path) -> None:
    base = load_model(str(tiny.write_tiny_model(tmp_path / "tiny")))
    lora = LoraSpec(4, alpha=8.0, unembed=True)
    tree = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.05, np.float32), init_adapter(base.spec, lora, 0))
    save_adapter(tmp_path / "adapter", tree, lora, base.spec, base_model="tiny")
    folder = recipes.lay_out_taught(str(tmp_path / "tiny"), tmp_path / "adapter", tmp_path / "taught")
    taught = load_model(folder)
    assert taught.spec == base.spec
    place = jnp.arange(6, dtype=jnp.int32)[None]
    rows = base.spec, place + 3, place, jnp.full((1, 6), 6, jnp.int32)
    del tree["head"]
    params, layers = jax.tree.map(jnp.asarray, (base.params, tree))
    expected, _ = forward(params, *rows, adapters=Adapters(layers, jnp.float32(lora.scale)))
    np.testing.assert_allclose(forward(jax.tree.map(jnp.asarray, taught.params), *rows)[0], expected, atol=1e-4)
    assert not np.allclose(forward(params, *rows)[0], expected, atol=1e-2)


def test_first_and_last_are_quarters() -> None:
    assert recipes.ends([0.5]) == (0.5, 0.5)
    assert recipes.ends([0.0, 0.2, 0.9, 0.1, 0.5, 0.5, 0.6, 0.8]) == (0.1, 0.7)
    assert recipes.RECIPES["math_rl"].improved(0.1, 0.7) and not recipes.RECIPES["dpo"].improved(0.1, 0.7)


def test_the_page_shows_the_kept_runs_of_these_very_commands() -> None:
    lines = recipes.kept(ROOT / "docs" / "recipes.jsonl")
    assert recipes.table(lines) in (ROOT / "docs" / "recipes.md").read_text()
    names = {"model": "local/smollm2-135m", "alias": recipes.ALIASES["qwen3_instruct"], "renderer": "qwen3_instruct"}
    for line in lines:
        recipe = recipes.RECIPES[line["recipe"]]
        assert len(line["curve"]) == recipe.num_steps
        for argument in recipe.arguments:
            if "{sampler}" not in argument and "{state}" not in argument:
                assert argument.format(**names) in shlex.split(line["command"]), line["command"]


def test_a_new_run_takes_the_place_of_the_old_one(tmp_path: pathlib.Path) -> None:
    path, page = tmp_path / "kept.jsonl", tmp_path / "kept.md"
    page.write_text(f"# Runs\n\n{recipes.TABLE_HEAD}\n|old|\n\nAnd so on.\n")
    run = {"metric": "env/all/reward/total", "curve": [0.0, 0.5], "first": 0.0, "last": 0.5, "seconds": 9.7}
    for name, last in (("dpo", 0.5), ("math_rl", 0.25), ("dpo", 0.75)):
        recipes.keep({"recipe": name, **run, "last": last}, path)
    assert page.read_text().splitlines() == [
        "# Runs",
        "",
        recipes.TABLE_HEAD,
        "|---|---|---|---|---|---|",
        "| `math_rl` | 2 | reward/total | 0.000 | 0.250 | 10 |",
        "| `dpo` | 2 | reward/total | 0.000 | 0.750 | 10 |",
        "",
        "And so on.",
    ]


if COOKBOOK:

    def test_quick_recipes(tmp_path: pathlib.Path) -> None:
        assert COOKBOOK
        model = tiny.write_tiny_model(tmp_path / "tiny")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
        for result in recipes.run_all(COOKBOOK, str(model), recipes.QUICK, "role_colon", steps=2):
            assert result["status"] == 0, f"{result['error']}\nserver:\n{result['server']}"
