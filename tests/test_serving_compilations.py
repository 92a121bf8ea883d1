"""What counts as a compilation, and what was only read from the persistent cache."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from locojax.hosts.serving_compilations import READ_AHEAD_AFTER, CompilationCounter, ReadAhead


def test_programs_that_the_persistent_cache_held_are_not_counted(tmp_path):
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0,
                "jax_persistent_cache_min_entry_size_bytes": -1}  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        x = jnp.arange(7, dtype=jnp.float32)

        def program(x):
            return jnp.sin(x) * 1.2345

        counts = []
        with CompilationCounter() as counter:
            for function in (jax.jit(program), jax.jit(lambda x: program(x) + 1.0), jax.jit(program)):
                function(x).block_until_ready()
                counts.append(counter.num_compilations)
                jax.clear_caches()
        jax.jit(lambda x: program(x) + 2.0)(x).block_until_ready()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert counts == [1, 2, 2]
    assert counter.num_compilations == 2, "it has left"


def test_programs_are_read_ahead_once_there_has_been_nothing_to_do_for_a_while():
    leisure, now = threading.Event(), [0.0]
    leisure.set()
    read_ahead = ReadAhead(leisure, lambda: 0, clock=lambda: now[0])
    read_ahead.worked()
    seen = [leisure.is_set()]
    for seconds in (READ_AHEAD_AFTER / 2, READ_AHEAD_AFTER):
        now[0] = seconds
        read_ahead.idle()
        seen.append(leisure.is_set())
    read_ahead.worked()
    assert [*seen, leisure.is_set()] == [False, False, True, False]
