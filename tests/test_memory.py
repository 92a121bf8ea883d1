"""The watch over memory: what grows is named once; what runs out is told in settings."""

from __future__ import annotations

import mmap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.errors import CapacityError
from locojax.hosts.memory import (
    Alive,
    MemoryWatch,
    PeakByPhase,
    StepMemory,
    bytes_in_use,
    out_of_memory,
    resident_bytes,
    running_out_is_told,
)

SETTINGS = {"rows": 4, "row_tokens": 1024, "remat": "linear", "tile_tokens": 128}


def watch_over(history, **settings):
    """What the watch says after each of these steps; a step is how many arrays of each shape are alive."""
    looks = iter([Alive({((n,), "float32"): count for n, count in step.items()}) for step in history])
    watch = MemoryWatch(look=lambda: next(looks), **settings)
    return [watch.after_step() for _ in history]


def test_what_grows_with_every_step_is_named_once():
    leak = [{1000: 2, 7: 3 + step} for step in range(8)]
    said = watch_over(leak, patience=3, max_bytes=16)
    assert [len(found) for found in said] == [0, 0, 0, 1, 0, 0, 0, 0]
    (grown,) = said[3]
    assert (grown.kind, grown.before, grown.after, grown.num_bytes) == (((7,), "float32"), 3, 6, 3 * 7 * 4)
    assert str(grown).startswith("float32[7]: 3 -> 6")


@pytest.mark.parametrize(
    "history, settings",
    [
        ([{9: n} for n in (1, 2, 1, 2, 1, 2, 3)], {"patience": 3, "max_bytes": 0}),  # up and down
        ([{9: n} for n in range(8)], {"patience": 3, "max_bytes": 1000}),  # small
        ([{9: 5}] * 8, {"patience": 3, "max_bytes": 0}),
    ],
)
def test_what_stays_or_is_small_is_not(history, settings):
    assert not any(watch_over(history, **settings))


def test_it_sees_jax_arrays_and_lets_a_dropped_one_go():
    shape = (3, 17, 5)
    kept = [jnp.zeros(shape)]
    before = Alive.now().counts[shape, "float32"]
    kept.append(jnp.ones(shape))
    key = jax.random.key(0)
    now = Alive.now()
    assert now.counts[shape, "float32"] == before + 1 and now.num_bytes > 0 and key.shape == ()
    kept.pop()
    assert Alive.now().counts[shape, "float32"] == before


def test_peaks_are_kept_by_phase_and_taken_with_the_step():
    in_use = iter([5, 9, 7, 1])
    peaks = PeakByPhase(lambda: next(in_use))
    for phase in ("train", "decode", "train"):
        peaks.ended(phase)
    assert peaks.take() == {"train": 7, "decode": 9}
    peaks.ended("train")
    assert peaks.take() == {"train": 1}


def test_resident_memory_is_what_the_process_takes():
    before = resident_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # fresh from the system, whatever the heap has to spare
        np.frombuffer(block, np.uint8)[:] = 1
        assert resident_bytes() - before > 50 << 20 and bytes_in_use() >= before
        assert resident_bytes("VmHWM") >= resident_bytes()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, "Halve the rows of a micro-batch (now 4): the gradient stays the same"),
        ({"rows": 1}, "remat \"full\" in place of 'linear'"),
        ({"rows": 1, "remat": "full"}, "Shorten the rows (now 1024 tokens)"),
    ],
)
def test_running_out_names_the_setting_to_change(changes, words):
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes.")
    told = out_of_memory(error, {**SETTINGS, **changes}, planned=3 << 30)
    assert isinstance(told, CapacityError)
    assert "an allocation of 1099511627776 bytes" in str(told) and "the plan was 3.00 GiB" in str(told)
    assert words in str(told) and "`locojax fit` finds settings that fit" in str(told)


def test_a_real_one_is_known_and_others_are_left_alone():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        jax.block_until_ready(jnp.zeros((1 << 44,), jnp.int8) + jnp.int8(1))
    assert out_of_memory(caught.value, SETTINGS) is not None
    assert out_of_memory(ValueError("shapes differ"), SETTINGS) is None


def test_a_step_that_runs_out_of_memory_ends_with_what_to_change():
    settings = types.SimpleNamespace(row_tokens=1024, rows=4, remat="linear", tile_tokens=None)
    halve = "Halve the rows of a micro-batch \\(now 4\\)"
    with pytest.raises(CapacityError, match=halve), running_out_is_told(settings):
        jax.block_until_ready(jnp.zeros((1 << 44,), jnp.int8) + jnp.int8(1))
    with pytest.raises(ZeroDivisionError), running_out_is_told(settings):
        _ = 1 // 0


def test_a_step_tells_what_piles_up_and_its_peaks():
    memory, kept = StepMemory(), []
    said = []
    for _ in range(8):
        kept.append(jnp.zeros((601, 1000), jnp.float32))
        memory.ended("train")
        said += memory.grown()
    (text,) = [text for text in said if "601" in text]
    assert text.startswith("memory grows with every step: float32[601,1000]: 1 -> 6")
    assert set(memory.peaks()) == {"train_memory_gib"} and kept
