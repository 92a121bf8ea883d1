"""Random weights from a config.json: the declared shapes and spread, the same everywhere, with a tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny import CONFIG, tiny_tokenizer

from locojax.errors import ModelError
from locojax.models import hub
from locojax.models.spec import ModelSpec, parameters
from locojax.models.weights import flatten


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "large" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**CONFIG, "vocab_size": 300, "hidden_size": 64, "attention_bias": True}))
    return path


def test_every_parameter_is_drawn_as_declared(config_path):
    model = hub.load_model(f"random:{config_path}")
    declared, drawn = flatten(parameters(model.spec)), flatten(model.params)
    assert list(drawn) == list(declared)
    for path, parameter in declared.items():
        weights = drawn[path]
        assert weights.shape == parameter.shape and weights.dtype == np.float32
        if parameter.init == "normal":
            assert abs(weights.std() / 0.02 - 1) < 0.1 and abs(weights.mean()) < 0.002
        else:
            assert (weights == {"ones": 1.0, "zeros": 0.0}[parameter.init]).all()
    matrices = [weights.ravel()[:64] for path, weights in drawn.items() if declared[path].init == "normal"]
    assert len(np.unique(np.stack(matrices), axis=0)) == len(matrices)  # no two share a stream


def test_two_hosts_draw_the_same_weights_by_file_or_folder(config_path):
    one, other = hub.load_model(f"random:{config_path}"), hub.load_model(f"random:{config_path.parent}")
    for path, weights in flatten(one.params).items():
        np.testing.assert_array_equal(weights, flatten(other.params)[path])
    assert one.spec == other.spec == hub.load_spec(f"random:{config_path}") == ModelSpec.from_hf_config(one.config)
    half = flatten(hub.load_model(f"random:{config_path}", "bfloat16").params)["embed",]
    np.testing.assert_array_equal(half, one.params["embed"].astype(half.dtype))


def test_without_tokenizer_files_a_token_is_a_byte(config_path):
    tokenizer = hub.load_tokenizer(f"random:{config_path}")
    ids = tokenizer.encode("3+4=é")
    assert len(ids) == 6 and max(ids) < 256 and tokenizer.decode(ids) == "3+4=é"
    assert tokenizer.eos_ids == (256,) and tokenizer.vocab_size == 257
    assert tokenizer.token_bytes(299) == b""  # the model may sample what has no token
    assert tokenizer.chat([{"role": "user", "content": "3+4="}]) == tokenizer.encode("3+4=")


def test_the_config_s_end_of_sequence_ids_end_a_completion_unless_they_are_bytes(config_path):
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "eos_token_id": [2, 290]}))
    assert hub.load_tokenizer(f"random:{config_path}").eos_ids == (290, 256)


def test_tokenizer_files_beside_the_config_are_used(config_path):
    bytes_only = tiny_tokenizer()
    bytes_only.chat_template = "Q: {{ messages[0]['content'] }}"
    bytes_only.save(config_path.parent)
    tokenizer = hub.load_model(f"random:{config_path}").tokenizer
    assert tokenizer.chat_text([{"role": "user", "content": "3+4="}]) == "Q: 3+4="


def test_what_can_t_be_made_is_refused(config_path, tmp_path):
    with pytest.raises(ModelError) as caught:
        hub.load_model(f"random:{tmp_path / 'absent.json'}")
    assert str(caught.value) == (
        f"The model 'random:{tmp_path / 'absent.json'}' can't be made. Got: no file {tmp_path / 'absent.json'}. "
        "Expected: random:PATH, where PATH is a Hugging Face config.json or the folder that holds it."
    )
    config_path.write_text(json.dumps({**CONFIG, "vocab_size": 200}))
    with pytest.raises(ModelError, match="Got: vocab_size 200. Expected: at least 257, one for each byte, and an end"):
        hub.load_model(f"random:{config_path}")
    tiny_tokenizer().save(config_path.parent)
    with pytest.raises(ModelError, match=f"Expected: at least 257, the tokens of {config_path.parent}"):
        hub.load_tokenizer(f"random:{config_path}")
