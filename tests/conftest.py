"""Settings every test runs under: several CPU devices, strict jax, checked shapes.

`XLA_FLAGS` and the import hook must be in place before jax and `locojax` are imported, so they are set when this
file is imported, which pytest does before any test module.
"""

from __future__ import annotations

import functools
import gc
import os
import pathlib
from collections.abc import Iterator

import jaxtyping
import pytest

NUM_CPU_DEVICES = 4

# Rooms with array code, whose jaxtyping signatures are checked while a function is traced (not when it runs).
CHECKED_ROOMS = ("locojax.models", "locojax.rollout", "locojax.training")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={NUM_CPU_DEVICES}"]
).strip()
jaxtyping.install_import_hook(CHECKED_ROOMS, "beartype.beartype")

import jax  # noqa: E402  (after the settings that it reads on import)


def _cache_dir() -> pathlib.Path:
    """Compiled programs outlive the run, apart from a user's own cache: a rerun of the suite skips XLA."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "locojax" / "tests" / f"jax-{jax.__version__}"


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(_cache_dir()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


MAPS = pathlib.Path("/proc/self/maps")
MANY_MAPS = 15_000
"""A compiled program takes dozens of memory mappings, and Linux lets a process have 65,530: beyond them XLA crashes."""


LONGEST_FIRST = (
    "test_conformance", "test_hosts", "test_colocated", "test_kernels", "test_single_controller", "test_fit",
    "test_crash", "test_journal_resume", "test_pipelined", "test_cli_serve",
)  # fmt: skip
"""Files that take longest, so that none of them begins when the rest is nearly done: a process of several takes a file
at a time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order."""
    rank = {name: n for n, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a file's tests, if there are many, drops what jax and the file's own caches hold of compiled programs."""
    yield
    if not MAPS.exists() or MAPS.read_bytes().count(b"\n") < MANY_MAPS:
        return
    for cached in vars(request.module).values():
        if isinstance(cached, functools._lru_cache_wrapper):
            cached.cache_clear()
    jax.clear_caches()
    gc.collect()
