"""A plausible step's metrics, for tests that read them."""

from __future__ import annotations

import dataclasses

from locojax.hosts.metrics import StepMetrics
from locojax.hosts.phases import StepAccount

_STEP = StepMetrics(
    step=0,
    policy_version=1,
    account=StepAccount(0, {"decode": 2.0, "train": 1.5}, 4.0),
    reward_mean=0.25,
    reward_std=0.4,
    num_completions=128,
    completion_tokens_mean=12.5,
    truncated_share=0.0,
    zero_variance_share=0.25,
    unscorable_share=0.0,
    generated_tokens_per_second=812.0,
    trained_tokens=1600,
    padding_share=0.1,
    gap_mean=2e-7,
    gap_p99=2e-6,
    gap_max=6e-6,
    gap_k3=1e-12,
    ratios_outside=0.0,
    loss=-0.1,
    grad_norm=0.7,
    learning_rate=2e-5,
)


def step_metrics(step: int = 0, **changes) -> StepMetrics:
    account = dataclasses.replace(_STEP.account, step=step)
    return dataclasses.replace(_STEP, **{"step": step, "policy_version": step + 1, "account": account, **changes})
