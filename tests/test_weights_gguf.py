"""GGUF files, written here with the `gguf` package from the golden models as llama.cpp's converter would write them."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from locojax.errors import ModelError
from locojax.models import gguf as gguf_files
from locojax.models.spec import ModelSpec
from locojax.models.weights import TreeBuilder, flatten, load_directory

GOLDEN = Path(__file__).parent / "golden"
Q = gguf.GGMLQuantizationType


def permute(weights, num_heads):
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def converted(case):
    """(architecture, config, {GGUF name: tensor}) of a golden model."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    architecture = config["model_type"]
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    tensors = {}
    for name, tensor in load_file(GOLDEN / case / "model.safetensors").items():
        if architecture == "llama" and "q_proj" in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        tensors[names.get_name(name, (".weight", ".bias"))] = tensor
    return architecture, config, tensors


def write(path, architecture, config, tensors, kind=Q.F32, *, more=()):
    """`kind` is the block type of the matrices; vectors are always F32, as llama.cpp keeps them."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in more:
        (
            writer.add_float32
            if isinstance(value, float)
            else writer.add_uint32
            if isinstance(value, int)
            else writer.add_string
        )(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        elif tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path, dtype="float32"):
    model = gguf_files.read(path)
    builder = TreeBuilder(ModelSpec.from_hf_config(model.config), dtype, path.name)
    for name, tensor in model.tensors(stored=dtype == "stored"):
        builder.put(name, tensor)
    return model.config, builder.finish()


def golden_tree(case):
    config = json.loads((GOLDEN / case / "config.json").read_text())
    spec = ModelSpec.from_hf_config(config)
    return spec, load_directory(GOLDEN / case, spec)


CASES = ["llama_gqa", "llama_tied_biases_wide_heads", "qwen2", "qwen2_tied", "qwen3"]


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_gives_the_model_it_was_made_from(case, tmp_path):
    """Spec and every leaf, bit for bit: names, q/k row order, biases, tied heads, the norm's eps."""
    spec, tree = golden_tree(case)
    config, ours = load(write(tmp_path / "model.gguf", *converted(case)))
    assert ModelSpec.from_hf_config(config) == spec
    assert flatten(ours).keys() == flatten(tree).keys()
    for path, leaf in flatten(ours).items():
        np.testing.assert_array_equal(leaf, flatten(tree)[path], err_msg=".".join(path))


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Q.F16, 2**-11),
        (Q.BF16, 2**-8),
        (Q.Q8_0, 1 / 127),
        (Q.Q5_0, 1 / 15),
        (Q.Q5_1, 1 / 30),
        (Q.Q4_0, 1 / 7),
        (Q.Q4_1, 1 / 14),
    ],
)
def test_block_types_come_back_within_their_own_rounding(kind, step, tmp_path):
    """Half a quantisation step of the largest weight. The hidden size, 32, is one block; biased models have 48 too."""
    architecture, config, tensors = converted("llama_gqa")
    tensors = {name: tensor for name, tensor in tensors.items() if "ffn_down" not in name}
    down = {f"blk.{layer}.ffn_down.weight": (np.ones((32, 48), np.float32), Q.F32) for layer in range(2)}
    _, tree = golden_tree("llama_gqa")
    _, ours = load(write(tmp_path / "model.gguf", architecture, config, {**tensors, **down}, kind))
    for path, leaf in flatten(ours).items():
        if path[-1] != "down":
            exact = flatten(tree)[path]
            np.testing.assert_allclose(leaf, exact, rtol=0, atol=step * np.abs(exact).max(), err_msg=".".join(path))
    assert (ours["layers"]["q"] != tree["layers"]["q"]).any(), "nothing was rounded: the block type was not used"


@pytest.mark.parametrize(("kind", "dtype"), [(Q.F16, np.float16), (Q.BF16, ml_dtypes.bfloat16), (Q.Q8_0, np.float32)])
def test_stored_dtype(kind, dtype, tmp_path):
    architecture, config, tensors = converted("qwen3")
    tensors = {
        name: (tensor, Q.F32) if tensor.ndim == 2 and tensor.shape[1] % 32 else tensor
        for name, tensor in tensors.items()
    }
    path = write(tmp_path / "model.gguf", architecture, config, tensors, kind)
    _, ours = load(path, "stored")
    _, as_float = load(path)
    assert ours["layers"]["q"].dtype == ours["head"].dtype == dtype
    assert ours["layers"]["attn_norm"].dtype == np.float32
    np.testing.assert_array_equal(ours["layers"]["q"].astype(np.float32), as_float["layers"]["q"])


def scales_and_mins(packed):
    """ggml's `get_scale_min_k4`: eight 6-bit scales and eight 6-bit minima in twelve bytes."""
    scales, minima = [], []
    for j in range(8):
        if j < 4:
            scales.append(packed[j] & 63)
            minima.append(packed[j + 4] & 63)
        else:
            scales.append((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4)
            minima.append((packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
    return scales, minima


def decode_q4_k(block):
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    (scales, minima), quants = scales_and_mins(block[4:16]), block[16:144]
    values = []
    for j in range(8):
        nibbles = [(q >> 4 if j % 2 else q & 15) for q in quants[32 * (j // 2) : 32 * (j // 2) + 32]]
        values += [d * scales[j] * q - dmin * minima[j] for q in nibbles]
    return values


def decode_q5_k(block):
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    (scales, minima), high, quants = scales_and_mins(block[4:16]), block[16:48], block[48:176]
    values = []
    for j in range(8):
        low = [(q >> 4 if j % 2 else q & 15) for q in quants[32 * (j // 2) : 32 * (j // 2) + 32]]
        values += [d * scales[j] * (q + 16 * (high[i] >> j & 1)) - dmin * minima[j] for i, q in enumerate(low)]
    return values


def decode_q6_k(block):
    low, high = block[:128], block[128:192]
    scales, d = np.frombuffer(block[192:208], np.int8), np.frombuffer(block[208:], np.float16).astype(np.float32)[0]
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            ql, qh, sc = low[64 * half :], high[32 * half :], scales[8 * half :]
            quants = (
                ql[i] & 15 | (qh[i] & 3) << 4,
                ql[i + 32] & 15 | (qh[i] >> 2 & 3) << 4,
                ql[i] >> 4 | (qh[i] >> 4 & 3) << 4,
                ql[i + 32] >> 4 | qh[i] >> 6 << 4,
            )
            for part, q in enumerate(quants):
                values[128 * half + 32 * part + i] = d * int(sc[i // 16 + 2 * part]) * (q - 32)
    return values


@pytest.mark.parametrize(
    ("kind", "decode", "halves"),
    [(Q.Q4_K, decode_q4_k, (0, 2)), (Q.Q5_K, decode_q5_k, (0, 2)), (Q.Q6_K, decode_q6_k, (208,))],
)
def test_k_quants_against_a_scalar_reading_of_ggml(kind, decode, halves, tmp_path):
    """Random blocks in the embedding: these types can't be written by the package, and need rows of 256."""
    architecture, config, _ = converted("qwen2_tied")
    config = {**config, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 0, "vocab_size": 3}
    raw = np.random.default_rng(0).integers(0, 256, (3, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in halves:  # the blocks' own fp16 scales must be finite
        raw[:, at : at + 2] = np.array([[0.5], [-0.25], [2.0]], np.float16).view(np.uint8)
    tensors = {"token_embd.weight": (raw, kind), "output_norm.weight": np.ones(256, np.float32)}
    model = gguf_files.read(write(tmp_path / "model.gguf", architecture, config, tensors))
    embedding = dict(model.tensors())["model.embed_tokens.weight"]
    np.testing.assert_allclose(embedding, [decode(block.tobytes()) for block in raw], rtol=1e-6)


def test_scaled_rope_is_recovered(tmp_path):
    yarn = [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.scaling.original_context_length", 16),
    ]
    config, _ = load(write(tmp_path / "yarn.gguf", *converted("qwen3_rope_yarn"), more=yarn))
    assert ModelSpec.from_hf_config(config) == golden_tree("qwen3_rope_yarn")[0]
    linear = [("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0)]
    config, _ = load(write(tmp_path / "linear.gguf", *converted("llama_rope_linear"), more=linear))
    rope = ModelSpec.from_hf_config(config).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_llama3_rope_is_recovered_from_its_divisors_or_refused(tmp_path):
    architecture, config, tensors = converted("llama_rope_llama3")
    config = {**config, "head_dim": 16, "rope_parameters": {"rope_theta": 500000.0}}
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = (8192 / wavelengths - 1) / (4 - 1)  # Llama 3.1's reference code, as llama.cpp's converter has it
    divisors = np.where(wavelengths < 2048, 1, np.where(wavelengths > 8192, 32, 1 / ((1 - smooth) / 32 + smooth)))
    tensors["rope_freqs.weight"] = divisors.astype(np.float32)
    rope = ModelSpec.from_hf_config(load(write(tmp_path / "model.gguf", architecture, config, tensors))[0]).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("llama3", 32.0, 8192)
    tensors["rope_freqs.weight"][3] *= 1.5
    with pytest.raises(ModelError, match=r"rope_freqs.weight\) in a way that is not implemented. Got: divisors from"):
        load(write(tmp_path / "other.gguf", architecture, config, tensors))


def test_what_is_not_implemented_is_refused_by_its_name(tmp_path):
    architecture, config, tensors = converted("llama_gqa")
    with pytest.raises(ModelError, match="Got: general.architecture 'gemma3'. Expected: llama, qwen2, qwen3"):
        gguf_files.read(write(tmp_path / "a.gguf", "gemma3", config, tensors))
    experts = [("expert_count", 8)]
    with pytest.raises(ModelError, match="options that are not implemented. Got: llama.expert_count = 8"):
        gguf_files.read(write(tmp_path / "b.gguf", architecture, config, tensors, more=experts))
    partial = [("rope.dimension_count", 4)]
    with pytest.raises(ModelError, match="llama.rope.dimension_count = 4. Expected: the head dimension, 8"):
        gguf_files.read(write(tmp_path / "c.gguf", architecture, config, tensors, more=partial))
    longrope = [("rope.scaling.type", "longrope")]
    with pytest.raises(ModelError, match="longrope"):
        load(write(tmp_path / "d.gguf", architecture, config, tensors, more=longrope))
    tensors["output.weight"] = (np.zeros((1, gguf.GGML_QUANT_SIZES[Q.Q2_K][1]), np.uint8), Q.Q2_K)
    with pytest.raises(
        ModelError, match="Tensor 'output.weight' of e.gguf .* not implemented. Got: Q2_K. Expected: F32"
    ):
        gguf_files.read(write(tmp_path / "e.gguf", architecture, config, tensors))


def test_a_tensor_left_over_or_missing_is_named(tmp_path):
    architecture, config, tensors = converted("llama_gqa")
    more = {**tensors, "blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(ModelError, match="no place for. Got: blk.0.attn_sinks.weight"):
        load(write(tmp_path / "more.gguf", architecture, config, more))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelError, match="lacks 1 of the tensors .* no model.layers.1.mlp.up_proj.weight"):
        load(write(tmp_path / "less.gguf", architecture, config, tensors))


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model at all, whatever it is called")
    with pytest.raises(ModelError, match="is not a readable GGUF file"):
        gguf_files.read(tmp_path / "model.gguf")
