"""PEFT adapters in and out: names, orientation, and above all the scale (case C31)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from locojax.errors import CheckpointError, ModelError
from locojax.models import decoder
from locojax.models.lora import Adapters, LoraSpec, adapter_parameters, delta
from locojax.models.peft import load_adapter, save_adapter
from locojax.models.spec import ModelSpec, Parameter, RopeSpec
from locojax.models.weights import HF_MODULES, load_directory

GOLDEN = Path(__file__).parent / "golden"
CASE = "llama_gqa"
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def spec():
    return ModelSpec.from_hf_config(json.loads((GOLDEN / CASE / "config.json").read_text()))


def random_adapter(spec, lora, seed=0):
    draw = np.random.default_rng(seed)
    declared = adapter_parameters(spec, lora)
    return jax.tree.map(
        lambda p: draw.normal(0, 0.2, p.shape).astype(np.float32), declared, is_leaf=lambda p: isinstance(p, Parameter)
    )


def logits(params, spec, adapters=None):
    tokens = jnp.asarray(np.load(GOLDEN / CASE / "vectors.npz")["tokens"][:, :16])
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), tokens.shape)
    until = jnp.full(tokens.shape, 16, jnp.int32)
    hidden, _ = decoder.forward(params, spec, tokens, positions, until, adapters=adapters)
    return np.asarray(decoder.logits(params, hidden, adapters))


LORAS = [
    LoraSpec(4, alpha=16.0),
    LoraSpec(4, alpha=16.0, mlp=False),
    LoraSpec(8, alpha=2.0, attention=False, unembed=True, rslora=True),
    LoraSpec(1, attention=False, mlp=False, unembed=True),
]


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("unembed_name", ["lm_head", "model.unembed_tokens"])
def test_what_is_saved_is_what_is_loaded(lora, unembed_name, spec, tmp_path):
    adapter = random_adapter(spec, lora)
    on_device = jax.tree.map(jnp.asarray, adapter)
    save_adapter(tmp_path / "out", on_device, lora, spec, base_model="tiny", unembed_name=unembed_name)
    loaded_lora, loaded = load_adapter(tmp_path / "out", spec)
    assert loaded_lora == lora
    assert jax.tree.structure(loaded) == jax.tree.structure(adapter)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(adapter), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert (f"{PREFIX}{unembed_name}.lora_A.weight" in names) == lora.unembed
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (lora.rank, lora.alpha, lora.rslora)
    assert config["base_model_name_or_path"] == "tiny"


@pytest.mark.parametrize("lora", LORAS)
def test_merging_the_files_by_pefts_rule_gives_what_the_decoder_computes(lora, spec, tmp_path):
    """W + scale * B @ A on Hugging Face's own tensors, the scale read from adapter_config.json alone."""
    adapter = random_adapter(spec, lora)
    save_adapter(tmp_path / "adapter", adapter, lora, spec, base_model="tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    merged, deltas = (
        load_file(GOLDEN / CASE / "model.safetensors"),
        load_file(tmp_path / "adapter/adapter_model.safetensors"),
    )
    for name in [name for name in deltas if "lora_A" in name]:
        target = name.removeprefix(PREFIX).replace("lora_A.", "")
        merged[target] = merged[target] + scale * deltas[name.replace("lora_A", "lora_B")] @ deltas[name]
    (tmp_path / "merged").mkdir()
    save_file({n: np.asarray(t, np.float32) for n, t in merged.items()}, tmp_path / "merged" / "model.safetensors")
    expected = logits(jax.tree.map(jnp.asarray, load_directory(tmp_path / "merged", spec)), spec)

    base = jax.tree.map(jnp.asarray, load_directory(GOLDEN / CASE, spec))
    loaded_lora, loaded = load_adapter(tmp_path / "adapter", spec)
    adapters = Adapters(jax.tree.map(jnp.asarray, loaded), jnp.float32(loaded_lora.scale))
    np.testing.assert_allclose(logits(base, spec, adapters), expected, atol=1e-4)
    assert np.abs(expected - logits(base, spec)).max() > 0.05


@pytest.mark.parametrize(("rslora", "each"), [(False, 64.0), (True, 181.02)])
def test_c31_the_scale_survives_the_file(rslora, each, tmp_path):
    """A and B all ones, alpha 16, rank 8, x ones(4): 64 per output, rsLoRA 181.02; not 512, not 32."""
    spec = ModelSpec("llama", 8, 4, 8, 1, 1, 1, 4, 1e-5, rope=RopeSpec(10000.0), max_context=8)
    lora = LoraSpec(8, alpha=16.0, mlp=False, rslora=rslora)
    ones = jax.tree.map(
        lambda p: np.ones(p.shape, np.float32),
        adapter_parameters(spec, lora),
        is_leaf=lambda p: isinstance(p, Parameter),
    )
    save_adapter(tmp_path / "out", ones, lora, spec, base_model="tiny")
    loaded_lora, loaded = load_adapter(tmp_path / "out", spec)
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), loaded["q"])
    contribution = delta(jnp.ones((1, 1, 4)), weights, jnp.float32(loaded_lora.scale), None)[0]
    np.testing.assert_allclose(contribution, np.full((1, 4), each), rtol=1e-4)


def test_an_adapter_of_a_few_modules_leaves_the_others_at_zero(spec, tmp_path):
    """PEFT's own default adapts q and v alone."""
    lora = LoraSpec(2, alpha=4.0, mlp=False)
    adapter = random_adapter(spec, lora)
    save_adapter(tmp_path / "out", adapter, lora, spec, base_model="tiny")
    file = tmp_path / "out" / "adapter_model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if "q_proj" in n or "v_proj" in n}, file)
    loaded_lora, loaded = load_adapter(tmp_path / "out", spec)
    assert loaded_lora == lora
    np.testing.assert_array_equal(loaded["v"]["b"], adapter["v"]["b"])
    assert not loaded["k"]["a"].any() and not loaded["o"]["b"].any()


@pytest.fixture
def saved(spec, tmp_path):
    save_adapter(tmp_path / "out", random_adapter(spec, LORAS[0]), LORAS[0], spec, base_model="tiny")
    return tmp_path / "out"


def change_tensors(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_every_tensor_is_accounted_for(saved, spec):
    name = f"{PREFIX}model.layers.1.{HF_MODULES['up']}.lora_B.weight"
    taken = load_file(saved / "adapter_model.safetensors")[name]
    change_tensors(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"lacks 1 tensors. Got: no {name}"):
        load_adapter(saved, spec)
    change_tensors(saved, lambda tensors: tensors.update({name: taken[:, :2].copy()}))
    with pytest.raises(ModelError, match=r"has the wrong shape. Got: \[48, 2\]. Expected: \[48, 4\], for rank 4"):
        load_adapter(saved, spec)
    change_tensors(saved, lambda tensors: tensors.update({name: taken, f"{PREFIX}model.norm.lora_A.weight": taken}))
    with pytest.raises(ModelError, match="no place for. Got: base_model.model.model.norm.lora_A.weight"):
        load_adapter(saved, spec)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'. Expected: 'LORA'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": None}, "has no r or no lora_alpha. The scale can't be guessed"),
    ],
)
def test_options_that_change_the_result_are_refused_by_name(changes, named, saved, spec):
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=named):
        load_adapter(saved, spec)


def test_what_is_no_adapter_is_refused_and_nothing_is_overwritten(saved, spec):
    with pytest.raises(ModelError, match="is not a PEFT adapter. Expected: adapter_config.json and adapter_model"):
        load_adapter(saved.parent, spec)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_adapter(saved, random_adapter(spec, LORAS[0]), LORAS[0], spec, base_model="tiny")
