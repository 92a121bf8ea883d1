"""A model small enough for any test, as a Hugging Face directory: bytes as tokens, random weights."""

from __future__ import annotations

import pathlib

import jax
import numpy as np

from locojax.models import decoder
from locojax.models.random_model import END, byte_tokenizer
from locojax.models.spec import ModelSpec
from locojax.models.tokenizer import Tokenizer
from locojax.models.weights import save_directory

EOS = END

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def tiny_tokenizer() -> Tokenizer:
    """One token a byte, and an end-of-sequence token."""
    return byte_tokenizer()


def write_tiny_model(directory: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Writes the model; weights are the same for the same seed."""
    spec = ModelSpec.from_hf_config(CONFIG)
    params = jax.tree.map(np.asarray, decoder.init_params(spec, jax.random.key(seed)))
    save_directory(directory, params, spec, CONFIG)
    tiny_tokenizer().save(directory)
    return directory
