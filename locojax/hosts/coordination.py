"""Joining jax's processes into one run. The only file that knows jax's coordination service.

jax offers no public way to its key-value store (orbax uses the same private client), nor to run the service anywhere
but in host 0, nor to part from it without waiting for hosts that are gone: hence what is private here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed
from jax._src.lib import _jax

from locojax.hosts.coordinator import CoordinatorProcess

_PREFIX = "locojax/"
_JAX_SILENCE_SECONDS = 3600  # our own watch speaks first, and names the host
_SHUTDOWN_SECONDS = 60  # hosts end at different times on a busy machine; jax aborts the process after it


class CoordinationBoard:
    """A `watch.Board` in the coordination service, which host 0 keeps."""

    def __init__(self, client: Any):
        self._client = client

    def put(self, key: str, value: str) -> None:
        self._client.key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def claim(self, key: str, value: str) -> bool:
        try:
            self._client.key_value_set(_PREFIX + key, value, allow_overwrite=False)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str, seconds: float) -> str:
        try:
            return self._client.blocking_key_value_get(_PREFIX + key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError(key) from error
            raise

    def read(self, folder: str) -> Mapping[str, str]:
        pairs = self._client.key_value_dir_get(f"{_PREFIX}{folder}/")
        return {key.rpartition("/")[2]: value for key, value in pairs}

    def forget(self, key: str) -> None:
        self._client.key_value_delete(_PREFIX + key)


def join(
    address: str | None, num_hosts: int | None, rank: int | None, *, seconds: float, linger_seconds: float
) -> CoordinationBoard:
    """Waits until all hosts have joined. Without arguments jax finds them in the cluster's environment.

    Args:
      seconds: the longest wait; after it jax ends the process, with a dump of its stack.
      linger_seconds: how long the board outlives host 0.

    Raises:
      ValueError: no arguments, and no cluster.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    with _own_service(linger_seconds):
        jax.distributed.initialize(
            address,
            num_hosts,
            rank,
            initialization_timeout=int(seconds) + 1,
            heartbeat_timeout_seconds=_JAX_SILENCE_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    jax.device_count()  # starts the backend, for which all hosts wait once more
    return CoordinationBoard(distributed.global_state.client)


def place() -> tuple[int, int]:
    """(this host's rank, number of hosts), once joined; jax.process_index would start the backend, and wait for all."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def leave() -> None:
    """Waits, briefly, for the others to leave as well."""
    jax.distributed.shutdown()


def abandon() -> None:
    """Parts from hosts that are gone or about to end: without it, this process's exit would wait for them."""
    distributed.global_state.client = None
    distributed.global_state.service = None


@contextlib.contextmanager
def _own_service(linger_seconds: float) -> Iterator[None]:
    """Inside, jax's service starts in a process of its own, and a client can be dropped without a farewell."""
    service, client = _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_service = functools.partial(CoordinatorProcess, linger_seconds=linger_seconds)
    _jax.get_distributed_runtime_client = functools.partial(client, shutdown_on_destruction=False)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service, _jax.get_distributed_runtime_client = service, client
