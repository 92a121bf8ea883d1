"""How the service keeps and serves things."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
    """Times are in seconds.

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
      max_snapshots_per_model: so many ephemeral samplers of a model are kept, those used last; no client ever says that
        it needs one no more.
      max_models_per_session: a session may not hold more trainable models at once.
      url_lifetime: how long a signed download URL is valid.
      imports: (name, directory) of PEFT adapters that become sampler checkpoints at the start.
      tick: how often what has run out is looked for.
      keep_seconds: how long saving what models have learnt may take when the server is told to stop.
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
    max_snapshots_per_model: int = 16
    max_models_per_session: int = 64
    url_lifetime: float = 3600.0
    imports: tuple[tuple[str, str], ...] = ()
    tick: float = 1.0
    keep_seconds: float = 15.0

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.data_dir / 'locojax.sqlite'}"
