"""Hugging Face directories: what is read, what is refused, and what is written back."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from locojax.errors import CheckpointError, ModelError
from locojax.models.spec import ModelSpec
from locojax.models.weights import flatten, load_directory, save_directory, shard_paths

GOLDEN = Path(__file__).parent / "golden"
UNTIED, TIED = "llama_gqa", "qwen2_tied"


def read(directory):
    config = json.loads((directory / "config.json").read_text())
    return config, ModelSpec.from_hf_config(config)


def copy_of(case, folder, change):
    """A golden model whose tensors went through `change(tensors)`."""
    tensors = load_file(GOLDEN / case / "model.safetensors")
    change(tensors)
    shutil.copy(GOLDEN / case / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder, dtype="float32"):
    return load_directory(folder, read(folder)[1], dtype)


def assert_equal_trees(ours, theirs):
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], err_msg=".".join(path))


def test_matrices_are_stacked_and_transposed():
    tensors = load_file(GOLDEN / UNTIED / "model.safetensors")
    tree = load(GOLDEN / UNTIED)
    np.testing.assert_array_equal(tree["layers"]["gate"][1], tensors["model.layers.1.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(tree["layers"]["attn_norm"][0], tensors["model.layers.0.input_layernorm.weight"])
    np.testing.assert_array_equal(tree["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tree["head"], tensors["lm_head.weight"].T)


def test_shards_give_the_same_tree(tmp_path):
    tensors = load_file(GOLDEN / UNTIED / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(GOLDEN / UNTIED / "config.json", tmp_path)
    assert_equal_trees(load(tmp_path), load(GOLDEN / UNTIED))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"is incomplete. Got: no b.safetensors. Expected: model.safetensors, or"):
        load(tmp_path)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)])
def test_the_dtype_asked_for_is_given(dtype, numpy_dtype):
    for leaf, exact in zip(*(jax.tree.leaves(load(GOLDEN / TIED, d)) for d in (dtype, "float32")), strict=True):
        assert leaf.dtype == numpy_dtype
        np.testing.assert_array_equal(leaf, exact.astype(numpy_dtype))


def test_stored_dtype_is_kept_and_mixed_layers_become_float32(tmp_path):
    def change(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor.astype(ml_dtypes.bfloat16)
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(np.float16)

    tree = load(copy_of(UNTIED, tmp_path, change), "stored")
    assert tree["layers"]["up"].dtype == np.float32
    assert tree["layers"]["down"].dtype == tree["embed"].dtype == ml_dtypes.bfloat16
    exact = load(GOLDEN / UNTIED)["layers"]["up"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(tree["layers"]["up"], exact.astype(np.float32))


def test_missing_tensors_are_named_up_to_five(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if ".1." in name and "mlp" not in name]:
            del tensors[name]

    with pytest.raises(ModelError) as caught:
        load(copy_of(UNTIED, tmp_path, change))
    text = str(caught.value)
    assert "lacks 6 of the tensors" in text and "model.layers.1.input_layernorm.weight" in text
    assert "and 1 more" in text and "Download the checkpoint again" in text


def test_a_tensor_left_unread_is_named(tmp_path):
    extra = "model.layers.0.self_attn.q_proj.bias"
    folder = copy_of(UNTIED, tmp_path, lambda tensors: tensors.update({extra: np.zeros(32, np.float32)}))
    with pytest.raises(ModelError, match=f"1 tensors that this model has no place for. Got: {extra}"):
        load(folder)


def test_harmless_leftovers_are_not_errors(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    assert_equal_trees(load(copy_of(TIED, tmp_path, change)), load(GOLDEN / TIED))


def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    with pytest.raises(ModelError, match="says tie_word_embeddings, but its lm_head.weight differs"):
        load(copy_of(TIED, tmp_path, change))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    folder = copy_of(UNTIED, tmp_path, lambda tensors: tensors.update({name: np.zeros((48, 32), np.float32)}))
    with pytest.raises(ModelError, match=rf"'{name}' in .* has the wrong shape. Got: \[48, 32\]. Expected: \[32, 48\]"):
        load(folder)


def test_other_formats_and_damaged_files_are_refused(tmp_path):
    shutil.copy(GOLDEN / UNTIED / "config.json", tmp_path)
    with pytest.raises(ModelError, match="has no weights that can be read. Got: no model.safetensors. Expected"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="but pytorch_model.bin.*Convert the checkpoint to safetensors"):
        load(tmp_path)
    whole = (GOLDEN / UNTIED / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("case", [UNTIED, "llama_tied_biases_wide_heads", "qwen3"])
def test_what_is_saved_is_what_was_loaded(case, tmp_path):
    config, spec = read(GOLDEN / case)
    save_directory(tmp_path / "out", jax.tree.map(jax.numpy.asarray, load(GOLDEN / case)), spec, config)
    written, original = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(GOLDEN / case / "model.safetensors"),
    )
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(written[name], tensor)
    assert read(tmp_path / "out")[1] == spec
    assert read(tmp_path / "out")[0]["dtype"] == "float32"


def test_a_large_model_is_saved_in_shards_of_the_size_asked_for(tmp_path):
    config, spec = read(GOLDEN / UNTIED)
    tree = load(GOLDEN / UNTIED)
    save_directory(tmp_path / "out", tree, spec, config, dtype="bfloat16", max_shard_bytes=20_000)
    shards = shard_paths(tmp_path / "out")
    assert [shard.name for shard in shards] == [
        f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))
    ]
    assert len(shards) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(shard).values()) <= 20_000 for shard in shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert_equal_trees(load(tmp_path / "out", "stored"), load(GOLDEN / UNTIED, "bfloat16"))


def test_saving_over_something_is_refused_and_failing_leaves_nothing(tmp_path):
    config, spec = read(GOLDEN / UNTIED)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_directory(tmp_path / "full", load(GOLDEN / UNTIED), spec, config)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Could not write the model to"):
        save_directory(tmp_path / "file" / "out", load(GOLDEN / UNTIED), spec, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
