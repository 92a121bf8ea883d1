"""The Tinker API without HTTP: what each endpoint does, over a store, an engine connection and the futures between them.

`Service` is put together here, and is nothing but its parts:

    sessions      create_session .. sessions/search         (sessions.py)
    training      create_model, forward_backward .. unload   (service_training.py)
    sampling      create_sampling_session, asample, streams  (service_sampling.py)
    futures       retrieve_future(s), cancel_future          (futures.py)
    checkpoints   training runs, checkpoints, weights_info   (service_checkpoints.py)

Every method is a coroutine of the one event loop, takes what a request holds and returns the JSON that answers it; a
refusal is a `ServiceError`, whose status is 400, 401, 403, 404, 410, 413, 422 or (asample alone, when too much waits) 429.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from locojax.server.futures import Futures
from locojax.server.service_checkpoints import CheckpointDesk
from locojax.server.service_sampling import SamplingDesk
from locojax.server.service_training import TrainingDesk
from locojax.server.sessions import Sessions


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
    """How the service keeps and serves things; times in seconds.

    Attributes:
      data_dir: holds `checkpoints/` and, without `database`, the SQLite file.
      database: an SQLAlchemy URL; None: `<data_dir>/locojax.sqlite`.
      model_names: what clients may call the base model, the first being what we call it; (): the engine's name for it.
        A name is accepted with and without a `:suffix`.
      tokenizer_id: what clients load the tokenizer by; None: the model's name.
      session_timeout: without a heartbeat for so long a session ends and frees what it held.
      long_poll: the longest that a poll of a future waits.
      delivered_retention, undelivered_retention: how long results are kept after delivery, and without one.
      provenance_retention: how long what was sampled is remembered for stable_reinforce; each use renews it.
      max_waiting_samples: above, asample is answered 429 (clients wait and come again).
      max_models_per_session: a session may not hold more trainable models at once.
      url_lifetime: how long a signed download URL is valid.
    """

    data_dir: pathlib.Path
    database: str | None = None
    model_names: tuple[str, ...] = ()
    tokenizer_id: str | None = None
    session_timeout: float = 300.0
    long_poll: float = 30.0
    delivered_retention: float = 600.0
    undelivered_retention: float = 3600.0
    provenance_retention: float = 86400.0
    max_waiting_samples: int = 20_000
    max_models_per_session: int = 64
    url_lifetime: float = 3600.0


class Service:
    """One server: `start` it inside the event loop that serves it, `stop` it there.

    Args:
      settings: see there.
      address: the engine process's socket, for `multiprocessing.connection.Client`.
      authkey: the engine connection's key.
    """

    sessions: Sessions
    training: TrainingDesk
    sampling: SamplingDesk
    futures: Futures
    checkpoints: CheckpointDesk

    def __init__(self, settings: ServiceSettings, address: str, authkey: bytes):
        raise NotImplementedError

    async def start(self) -> None:
        """Opens the store, picks up what an earlier process left, and begins to connect to the engine."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stops the background tasks, writes what is unwritten, and leaves the engine as it is."""
        raise NotImplementedError

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Ready or not, and the body of healthz: {"status": "ok"} or {"status": "starting", "doing": ..., ...}."""
        raise NotImplementedError

    def capabilities(self) -> dict[str, Any]:
        """GET /get_server_capabilities."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """For the web page and metrics: engine (state, info, gauges, totals, seconds, queues, num_restarts), futures by
        state, sessions, models, last errors."""
        raise NotImplementedError

    def accept_telemetry(self, events: dict[str, Any]) -> dict[str, Any]:
        """POST /telemetry: kept in memory, the last few hundred, never sent on."""
        raise NotImplementedError
