"""What an engine process serves and how: plain values that a command line can pass on as JSON. No jax."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal, get_args

from locojax.errors import ConfigError
from locojax.types import Kernels, LogprobsOf

Dtype = Literal["auto", "float32", "bfloat16"]

_AT_LEAST_ONE = (
    "max_adapters", "max_rank", "row_tokens", "rows", "kv_bytes", "max_slots", "min_rows", "max_prefill_tokens",
    "max_iterations", "max_resident_samplers",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ServeSettings:
    """How one engine process serves a model.

    Attributes:
      model: as `models.hub.load_model` takes it. name: what clients call it; None: `model`.
      alpha: LoRA's, of every new adapter; the scale is alpha / rank.
      max_adapters: models that may be trained side by side. max_rank: the highest rank of an adapter.
      row_tokens: a training row's length, the most that a datum may have; auto: the context, at most 1024.
      rows: rows of a micro-batch; tenants share it row by row.
      compute_dtype: of training; auto: see `models.platform.auto_dtype`. sample_dtype: of sampling, likewise.
      remat: see `TrainerSettings.remat`.
      kernels: whose products and attention: see `models.native.build`.
      max_context: prompt and completion together; None: the model's own.
      kv_bytes: for keys and values; auto: see `serving_memory.auto_kv_bytes`.
      max_slots, min_rows, max_prefill_tokens, max_iterations, turn_seconds: see `EngineSettings`. A turn is what a new
        request waits for at most, while there is no training.
      max_resident_samplers: samplers whose adapters are on the device at once; more wait in host memory.
      logprobs_of: which distribution a sampled token's log-prob is of. Tinker's: tempered.
      sampling_share: of the device's time while there is both sampling and training to do; above 0, below 1.
      warm_up: compile what will be needed before the first request. Without it the first of each kind waits.
      cache_dir: where compiled programs and converted models are kept; None: `config.cache_folder()`.
      status_seconds: between two `EngineStatus` messages.
    """

    model: str
    name: str | None = None
    alpha: float = 32.0
    max_adapters: int = 8
    max_rank: int = 32
    row_tokens: int | Literal["auto"] = "auto"
    rows: int = 1
    compute_dtype: Dtype = "auto"
    sample_dtype: Dtype = "auto"
    remat: str = "linear"
    kernels: Kernels = "auto"
    max_context: int | None = None
    kv_bytes: int | Literal["auto"] = "auto"
    max_slots: int = 128
    min_rows: int = 1
    max_prefill_tokens: int = 1024
    max_iterations: int = 32
    turn_seconds: float = 0.25
    max_resident_samplers: int = 8
    logprobs_of: LogprobsOf = "tempered"
    sampling_share: float = 0.5
    warm_up: bool = True
    cache_dir: str | None = None
    status_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value != "auto" and int(value) < 1:
                raise ConfigError(f"The server's {name} is out of range", got=value, expected="1 or more")
        if not 0 < self.sampling_share < 1:
            raise ConfigError(
                "The server's sampling_share is out of range", got=self.sampling_share, expected="above 0, below 1"
            )
        for name in ("alpha", "status_seconds", "turn_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"The server's {name} must be above 0", got=getattr(self, name))
        for name in ("compute_dtype", "sample_dtype"):
            if getattr(self, name) not in ("auto", "float32", "bfloat16"):
                raise ConfigError(f"Unknown {name} {getattr(self, name)!r}", expected="auto, float32 or bfloat16")
        if self.kernels not in get_args(Kernels):
            raise ConfigError(f"Unknown kernels {self.kernels!r}", expected="auto, native or xla")
        if self.logprobs_of not in ("raw", "tempered"):
            raise ConfigError(f"Unknown logprobs_of {self.logprobs_of!r}", expected="raw or tempered")

    def to_json(self) -> str:
        """What `from_json` reads, and `hosts.serving.main` takes."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeSettings:
        """Raises ConfigError when the text is no JSON object of known settings."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"The server's settings are not JSON ({error})") from error
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or "model" not in values:
            raise ConfigError("The server's settings name no model", got=text[:200], expected='{"model": ..., ...}')
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"Unknown server setting {unknown[0]!r}", expected="one of " + ", ".join(known))
        return cls(**values)
