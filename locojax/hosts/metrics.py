"""What a step is known by afterwards: one record, read by the run folder, the report, the alarms and the terminal."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from locojax.hosts.phases import StepAccount


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One training step. Filled by the loop; shares are in 0..1, gaps in nats, `None` means not measured.

    The gap is |sampler log-prob - trainer log-prob| over trained tokens, before any clipping.
    Example: StepMetrics(step=0, policy_version=1, reward_mean=0.25, ..., account=StepAccount(0, {"decode": 1.0}, 1.5))
    """

    step: int
    policy_version: int  # after the update
    account: StepAccount
    reward_mean: float  # over scorable completions
    reward_std: float
    num_completions: int
    completion_tokens_mean: float  # raw lengths, masked or not
    truncated_share: float  # of completions: stopped by max_tokens or the context
    zero_variance_share: float  # of groups: every scorable completion got the same reward
    unscorable_share: float  # of completions
    generated_tokens_per_second: float  # over prefill and decode
    trained_tokens: int
    padding_share: float  # of the packed rows
    gap_mean: float
    gap_p99: float
    gap_max: float
    gap_k3: float  # mean of exp(d) - 1 - d, d = trainer - sampler log-prob (Schulman's estimator of the KL)
    ratios_outside: float  # share of exp(d) outside [0.99, 1.01]
    loss: float
    grad_norm: float
    learning_rate: float
    held_out_before: float | None = None  # accuracy before this step, if it was measured (a run's first step)
    held_out: float | None = None  # accuracy, if this step ended with an evaluation
    update_skipped: str | None = None  # why the optimizer step was not applied
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)  # what one loss or task adds
    generate_seconds: Sequence[float] = ()  # of each host, by rank; with several hosts, in host 0's record

    def scalars(self) -> dict[str, float]:
        """Every number, flat, for metric writers. Example: {"reward_mean": 0.25, "seconds/decode": 1.0, ...}"""
        found = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        found |= {f"seconds/{name}": seconds for name, seconds in self.account.seconds.items()}
        found |= {"seconds/unaccounted": self.account.unaccounted, "seconds/wall": self.account.wall}
        return {**found, **self.extra}

    def to_json(self) -> str:
        """One line of metrics.jsonl: strict JSON, so a value that is not finite is written as null."""
        account = {"seconds": dict(self.account.seconds), "wall": self.account.wall}
        account["unaccounted"] = self.account.unaccounted
        fields = {**vars(self), "account": account, "extra": dict(self.extra)}
        fields["generate_seconds"] = list(self.generate_seconds)
        return json.dumps({name: None if _not_finite(value) else value for name, value in fields.items()})

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """Reads back what `to_json` wrote. Raises ValueError, TypeError or KeyError if it isn't that."""
        fields: dict[str, Any] = json.loads(line)
        account = fields.pop("account")
        fields["generate_seconds"] = tuple(fields.get("generate_seconds", ()))
        for field in dataclasses.fields(cls):
            if field.type == "float" and fields.get(field.name, 0.0) is None:
                fields[field.name] = math.nan
        return cls(account=StepAccount(fields["step"], account["seconds"], account["wall"]), **fields)


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended. Filled by the loop; the command line prints it.

    Example: RunResult(14, 0.05, 1.0, 92.0, "runs/demo")
    """

    num_steps: int  # trained in this run, resumed parts included
    held_out_first: float | None  # accuracy before the first step; None: no evaluation
    held_out_last: float | None
    seconds: float  # wall time of the whole run, loading and compiling included
    folder: str

    def line(self) -> str:
        """Example: "held-out accuracy 0.05 -> 1.00 in 14 steps, 92 s"."""
        took = f"{self.num_steps} steps, {self.seconds:.0f} s"
        if self.held_out_first is None or self.held_out_last is None:
            return f"trained {took}"
        return f"held-out accuracy {self.held_out_first:.2f} -> {self.held_out_last:.2f} in {took}"
