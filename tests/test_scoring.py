"""Scoring on the trainer: log-probs, entropy and the likeliest tokens of sequences of any length, in tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_trainer import LORA, SPEC, drawn_params, make_trainer

from locojax.errors import CapacityError, RequestError
from locojax.models import decoder
from locojax.models.lora import Adapters
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import Datum

TOP = 5


@pytest.fixture(scope="module")
def params():
    return drawn_params()


def sequences(*lengths):
    rng = np.random.default_rng(2)
    drawn = [rng.integers(0, SPEC.vocab_size, n).astype(np.int32) for n in lengths]
    return [Datum(tokens, {"target_tokens": np.roll(tokens, -1)}) for tokens in drawn]


def all_logprobs(params, tokens, adapters=None):
    """[N, V] from the decoder alone, one sequence at a time, everything at once."""
    n = len(tokens)
    row = jnp.asarray(tokens)[None], jnp.arange(n, dtype=jnp.int32)[None], jnp.full((1, n), n, jnp.int32)
    params = jax.tree.map(jnp.asarray, params)
    hidden, _ = decoder.forward(params, SPEC, *row, adapters=adapters)
    tree = {**params, "layers": []}
    return np.asarray(jax.nn.log_softmax(decoder.logits(tree, hidden, adapters)[0], axis=-1))


def check(trainer, params, data, adapters=None):
    found = trainer.likeliest(data, TOP)
    scored = trainer.forward(data, "cross_entropy").outputs
    assert len(found) == len(scored) == len(data)
    for datum, (ids, logprobs), outputs in zip(data, found, scored, strict=True):
        expected = all_logprobs(params, datum.tokens, adapters)
        order = np.argsort(-expected, axis=-1, kind="stable")[:, :TOP]
        np.testing.assert_array_equal(ids, order)
        np.testing.assert_allclose(logprobs, np.take_along_axis(expected, order, axis=-1), atol=2e-5)
        targets = np.asarray(datum.inputs["target_tokens"])[:, None]
        np.testing.assert_allclose(outputs["logprobs"], np.take_along_axis(expected, targets, -1)[:, 0], atol=2e-5)
        np.testing.assert_allclose(outputs["entropy"], -np.sum(np.exp(expected) * expected, axis=-1), atol=2e-5)


def test_a_long_sequence_is_scored_as_the_decoder_alone_would(params):
    """48 tokens are three of this trainer's tiles."""
    check(make_trainer(params), params, sequences(48, 7))


def test_an_adapter_is_scored_with_its_own_head(params):
    trainer = make_trainer(params, LORA)
    check(trainer, params, sequences(30), Adapters(trainer.trainable, jnp.float32(LORA.scale)))


@pytest.mark.extended
@pytest.mark.parametrize("gather", ["step", "layer"])
def test_over_a_mesh_too(params, gather):
    settings = TrainerSettings(row_tokens=48, rows=1, compute_dtype="float32", tile_tokens=16, gather=gather)
    mesh = make_mesh(MeshSpec(2, 2), jax.devices()[:4])
    check(Trainer(SPEC, params, settings, mesh=mesh), params, sequences(48, 7))


def test_what_cannot_be_scored_is_refused(params):
    trainer = make_trainer(params)
    with pytest.raises(RequestError, match="likeliest tokens is out of range. Got: 0. Expected: 1 to 67"):
        trainer.likeliest(sequences(4), 0)
    with pytest.raises(CapacityError, match="49"):
        trainer.likeliest(sequences(49), 1)
