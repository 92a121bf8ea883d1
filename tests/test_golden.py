"""Our decoder against Hugging Face transformers, on the vectors that golden/make.py wrote (fp32)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.errors import ModelError
from locojax.models import decoder
from locojax.models.spec import ModelSpec
from locojax.models.weights import load_directory

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
TOLERANCE = 1e-4  # largest seen: 5e-6 on logits of standard deviation 1, 2.2e-5 on those of 6 (tied heads)


def read_config(case):
    return json.loads((GOLDEN / case / "config.json").read_text())


def logits_of(case, config):
    spec = ModelSpec.from_hf_config(config)
    params = jax.tree.map(jnp.asarray, load_directory(GOLDEN / case, spec))
    tokens = jnp.asarray(np.load(GOLDEN / case / "vectors.npz")["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    until = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)
    hidden, _ = decoder.forward(params, spec, tokens, positions, until)
    return np.asarray(decoder.logits(params, hidden))


def expected(case):
    return np.load(GOLDEN / case / "vectors.npz")["logits"]


def test_every_family_and_option_has_a_case():
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case):
    np.testing.assert_allclose(logits_of(case, read_config(case)), expected(case), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if "rope" in case])
def test_rope_scaling_matters_to_its_vectors(case):
    """Or else the test above could not see it ignored."""
    config = read_config(case)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    assert np.abs(logits_of(case, config) - expected(case)).max() > 0.1


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_the_rope_settings_give_one_spec(case):
    """transformers 5 writes `rope_parameters`; most checkpoints on the hub have `rope_theta` and `rope_scaling`."""
    config = read_config(case)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = dict(config["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    old["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    assert ModelSpec.from_hf_config(old) == ModelSpec.from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64},
            "use_sliding_window",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_name(changes, named):
    config = {**read_config("llama_gqa"), **changes}
    with pytest.raises(ModelError, match=named):
        ModelSpec.from_hf_config(config)
