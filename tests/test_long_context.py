"""Any mix of lengths is one shape: no compilation once there was a step, memory that stays flat, and little padding."""

from __future__ import annotations

import numpy as np
import pytest
from test_trainer import SPEC, drawn_params

from locojax.hosts.memory import Alive, MemoryWatch
from locojax.training import programs
from locojax.training.packing import pack
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

LADDER = (3, 5, 9, 17, 30, 51, 96)
ROW = 96


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
    settings = TrainerSettings(row_tokens=ROW, rows=2, compute_dtype="float32", tile_tokens=16)
    trainer = Trainer(SPEC, drawn_params(), settings)
    rng = np.random.default_rng(0)
    watch, alive, compiled = MemoryWatch(patience=5, max_bytes=0), [], []
    for step in range(200):
        trainer.forward_backward(batch(rng, step), "importance_sampling", score="active")
        assert trainer.optim_step(AdamParams(learning_rate=1e-4)).applied
        assert watch.after_step() == []
        alive.append(Alive.now().num_bytes)
        compiled.append(programs.accumulate._cache_size() + programs.update._cache_size())
    assert len(set(compiled[1:])) == 1
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
