"""A tiny model and vocabulary for the rollout tests, and an oracle that knows nothing of caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from locojax.models import decoder
from locojax.models.spec import ModelSpec, RopeSpec

EOS = 1
VOCAB = 97
SPEC = ModelSpec(
    family="qwen3", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, norm_eps=1e-6, rope=RopeSpec(10000.0), max_context=128, qk_norm=True,
)  # fmt: skip


class Bytes:
    """Token 2 + b is the byte b of "a".."z" and so on; EOS is empty; `table` overrides."""

    eos_ids = (EOS,)

    def __init__(self, table=None):
        self.table = table or {}

    def token_bytes(self, id):
        return self.table.get(id, b"" if id == EOS else bytes([32 + id % 95]))


@functools.cache
def params(seed=0):
    """Weights large enough that the distribution is far from flat, so that log-probs and argmax mean something."""
    tree = decoder.init_params(SPEC, jax.random.key(seed))
    layers = {name: leaf * (1 if name.endswith("norm") else 6) for name, leaf in tree["layers"].items()}
    return {**tree, "layers": layers, "head": tree["head"] * 15}


@functools.cache
def weights(seed=0):
    return decoder.unstack(params(seed), SPEC, jnp.float32)


@functools.partial(jax.jit, static_argnames=())
def _logits(tree, adapters, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    until = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)
    hidden, _ = decoder.forward(tree, SPEC, tokens, positions, until, adapters=adapters)
    return decoder.logits(tree, hidden, adapters)


def oracle_logits(tokens, seed=0, adapters=None, length=128):
    """f32[len(tokens), V]: the whole sequence in one plain forward pass. Padded, so that it compiles once."""
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_logits(params(seed), adapters, jnp.asarray(padded)))[0, : len(tokens)]


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def oracle_logprobs(prompt, tokens, **kwargs):
    """f64[len(tokens)]: log-probs of `tokens` after `prompt`."""
    sequence = [*prompt, *tokens]
    table = log_softmax(oracle_logits(sequence, **kwargs))
    return np.array([table[i - 1, sequence[i]] for i in range(len(prompt), len(sequence))])


def prompts(count, *, shortest=3, longest=20, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(2, VOCAB, rng.integers(shortest, longest + 1)).tolist()) for _ in range(count)]
