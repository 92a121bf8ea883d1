"""How a trainer computes: its settings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from locojax.errors import ConfigError
from locojax.models.attention import Kernel
from locojax.models.remat import POLICIES
from locojax.training.sharded import Gather


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """How the trainer computes; nothing here changes what it computes, up to rounding.

    Attributes:
      row_tokens, rows: a micro-batch's shape; over a mesh, rows of each device of its fsdp axis, whose tokens are split
        over its sequence axis. A datum must fit in row_tokens.
      compute_dtype: of activations and, inside the program, weights. auto: see `platform.auto_dtype`.
      remat: a key of `remat.POLICIES`: what the backward pass recomputes. "linear" takes the least time on CPU
        and less memory than "none": writing an activation out and reading it back costs more than most of them do.
      tile_tokens: positions the head works on at a time; its logits take tile_tokens x vocabulary x 4 bytes.
        None: see `platform.auto_tile`.
      share_prefixes: compute what sequences of a call have in common once. The TPU kernel can't, and then none is.
      attention: the form it takes. auto: `tpu` on TPU.
      with_entropy: report the entropy of the next-token distribution.
      keep_reference: keep the first weights, in the compute dtype, for `Trainer.reference_logprobs`.
      keep_transposes: keep the layers' weights transposed as well, for the backward pass: on CPU it runs up to twice as
        fast for the memory of one more copy in the compute dtype. auto: on CPU only.
      max_programs: how many programs the data's shapes may ask for: one for each verb, loss, number of targets and set
        of inputs, whatever the lengths. A call that needs one more is refused.
      gather: over a mesh, when weights are made whole; see `sharded.Gather`. auto: `step` on CPU, whose memory is large
        and whose network is slow; else `layer`.
    """

    row_tokens: int
    rows: int = 1
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    remat: str = "linear"
    tile_tokens: int | None = None
    share_prefixes: bool = True
    with_entropy: bool = True
    keep_reference: bool = False
    keep_transposes: bool | Literal["auto"] = "auto"
    gather: Gather | Literal["auto"] = "auto"
    attention: Kernel | Literal["auto"] = "auto"
    max_programs: int = 16

    def __post_init__(self) -> None:
        for name in ("row_tokens", "rows", "tile_tokens", "max_programs"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"The trainer's {name} must be at least 1", got=getattr(self, name))
        if self.remat not in POLICIES:
            raise ConfigError(f"Unknown remat policy {self.remat!r}", expected="one of " + ", ".join(POLICIES))
        if self.compute_dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(
                f"Unknown compute dtype {self.compute_dtype!r}", expected="auto, float32 or bfloat16"
            )
        if self.gather not in ("auto", "layer", "step"):
            raise ConfigError(f"Unknown gather {self.gather!r}", expected="auto, layer or step")
        if self.attention not in ("auto", "plain", "tpu"):
            raise ConfigError(f"Unknown form of attention {self.attention!r}", expected="auto, plain or tpu")
