"""Any mix of lengths is one shape: no compilation once there was a step, memory that stays flat, and little padding."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_trainer import SPEC, drawn_params

from locojax.errors import CapacityError
from locojax.hosts.memory import Alive, MemoryWatch
from locojax.training.losses import LOSSES, read_options
from locojax.training.microbatch import Widths
from locojax.training.packing import pack
from locojax.training.program_budget import Asked
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

LADDER = (3, 5, 9, 17, 30, 51, 96)
ROW = 96
COMPILED = "/jax/core/compile/backend_compile_duration"


def batch(rng, step):
    """A few sequences of lengths from the ladder, another mix on every step."""
    lengths = rng.choice(LADDER, size=2 + step % 5)
    data = []
    for n in map(int, lengths):
        tokens = rng.integers(0, SPEC.vocab_size, n).astype(np.int32)
        noise = rng.normal(size=(2, n)).astype(np.float32)
        data.append(Datum(tokens, {"target_tokens": tokens, "logprobs": noise[0] - 3, "advantages": noise[1]}))
    return data


@pytest.mark.extended
def test_a_ladder_of_lengths_compiles_once_and_leaves_nothing_behind():
    settings = TrainerSettings(row_tokens=ROW, rows=2, compute_dtype="float32", tile_tokens=16, max_programs=1)
    trainer = Trainer(SPEC, drawn_params(), settings)
    rng = np.random.default_rng(0)
    watch, alive, after, compiled = MemoryWatch(patience=5, max_bytes=0), [], [], []

    def happened(name, seconds, **_):
        if name == COMPILED:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(happened)
    try:
        for step in range(200):
            trainer.forward_backward(batch(rng, step), "importance_sampling", score="active")
            assert trainer.optim_step(AdamParams(learning_rate=1e-4)).applied
            assert watch.after_step() == []
            alive.append(Alive.now().num_bytes)
            after.append(len(compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(happened)
    assert after[0] > 0, "compilations are not counted"
    assert set(after[1:]) == {after[1]} and trainer.num_programs == 1
    assert len(set(alive[1:])) == 1


def test_long_tailed_lengths_leave_little_padding():
    """Rollouts' lengths: most are short, some as long as a row."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(np.exp(rng.normal(5.5, 1.0, 512)).astype(int) + 16, 2048)
    data = [rng.integers(0, 1000, n).astype(np.int32) for n in lengths]
    packed = pack(data, [0] * len(data), row_tokens=2048, rows=1, share_prefixes=False)
    assert lengths.max() == 2048 and np.median(lengths) < 300
    assert packed.padding_share < 0.10
    assert 1 - lengths.sum() / (len(lengths) * 2048) > 0.6  # one sequence a row, padded to the longest


def test_a_program_too_many_is_refused_with_those_there_are():
    """Before it is compiled, and with the gradient so far as it was."""
    settings = TrainerSettings(row_tokens=ROW, rows=2, compute_dtype="float32", tile_tokens=16, max_programs=2)
    trainer = Trainer(SPEC, drawn_params(), settings)
    data = batch(np.random.default_rng(0), 0)
    for _ in range(2):
        trainer.forward_backward(data, "importance_sampling", score="active")
    tokens = data[0].tokens
    scored = Datum(tokens, {"target_tokens": tokens})
    trainer.forward([scored], "cross_entropy")
    trainer.forward([scored, Datum(tokens[:2], {"target_tokens": tokens[:2]})], "cross_entropy")
    num_tokens = trainer.num_accumulated_tokens
    two_targets = Datum(tokens, {"target_tokens": np.stack([tokens, tokens], 1), "weights": np.ones((len(tokens), 2))})
    for call in (
        lambda: trainer.forward([two_targets], "cross_entropy"),
        lambda: trainer.forward_backward(data, "ppo"),
        lambda: trainer.likeliest([scored], 3),
    ):
        with pytest.raises(CapacityError) as caught:
            call()
    assert str(caught.value) == (
        "The call needs another program than the 2 that this trainer has for its rows (2 x 96 tokens), which are all "
        "that its budget allows. Got: 3 likeliest tokens of cross_entropy, 1 target a position, inputs weights. "
        "Expected: one of: gradient of importance_sampling, 1 target a position, inputs advantages, logprobs; forward "
        "of cross_entropy, 1 target a position, inputs weights. Give all data of a loss the same inputs and number of "
        "targets, or raise the budget (training.max_programs)."
    )
    assert trainer.num_programs == 2 and trainer.num_accumulated_tokens == num_tokens


def test_settings_that_programs_depend_on_are_told_apart():
    loss, widths = LOSSES["ppo"], Widths(2, {"weights": (2,)})
    asked = [
        Asked.of("gradient", "ppo", read_options(loss, config), widths)
        for config in (None, {"clip_low_threshold": 0.5}, {"kl": "k3"}, {"tis_cap": 2.0})
    ]
    assert asked[0] == asked[1] and len(set(asked)) == 3  # a clip is an argument of the program
    assert str(asked[2]) == "gradient of ppo with kl k3, 2 targets a position, inputs weights"
    assert "with tis_cap" in str(asked[3])
