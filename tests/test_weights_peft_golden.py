"""Adapters beside Hugging Face's peft: what it computed with ours, and what we compute with those that it wrote.

The reference logits are peft's own, made by golden/make_peft.py; peft itself isn't needed here.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from locojax.models import decoder
from locojax.models.lora import Adapters, LoraSpec
from locojax.models.peft import load_adapter, save_adapter
from locojax.models.spec import ModelSpec
from locojax.models.weights import load_directory

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "peft" / "cases.json").read_text())["cases"]
OURS = [name for name in CASES if name.startswith("ours_")]


def spec_of(name):
    return ModelSpec.from_hf_config(json.loads((GOLDEN / CASES[name]["model"] / "config.json").read_text()))


def logits(name, spec, adapters):
    folder = GOLDEN / CASES[name]["model"]
    params = jax.tree.map(jnp.asarray, load_directory(folder, spec))
    tokens = jnp.asarray(np.load(folder / "vectors.npz")["tokens"][:, :16])
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), tokens.shape)
    until = jnp.full(tokens.shape, 16, jnp.int32)
    hidden, _ = decoder.forward(params, spec, tokens, positions, until, adapters=adapters)
    return np.asarray(decoder.logits(params, hidden, adapters))


@pytest.mark.parametrize("name", CASES)
def test_logits_with_an_adapter_are_pefts(name):
    spec = spec_of(name)
    lora, adapter = load_adapter(GOLDEN / "peft" / name, spec)
    expected = np.load(GOLDEN / "peft" / "vectors.npz")[name]
    found = logits(name, spec, Adapters(jax.tree.map(jnp.asarray, adapter), jnp.float32(lora.scale)))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - logits(name, spec, None)).max() > 1, "the adapter hardly matters"


@pytest.mark.parametrize("name", OURS)
def test_what_is_written_now_is_what_peft_has_read(name, tmp_path):
    """Otherwise the logits above say nothing of the directories that are written today."""
    spec, golden = spec_of(name), GOLDEN / "peft" / name
    lora, adapter = load_adapter(golden, spec)
    assert lora == LoraSpec(**CASES[name]["lora"])
    save_adapter(tmp_path / "again", adapter, lora, spec, base_model=CASES[name]["model"])
    config = [json.loads((folder / "adapter_config.json").read_text()) for folder in (golden, tmp_path / "again")]
    assert config[0] == config[1]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (golden, tmp_path / "again"))
    assert before.keys() == after.keys()
    for tensor in before:
        np.testing.assert_array_equal(before[tensor], after[tensor])
