"""What an engine process tells of its work about once a second. No jax."""

from __future__ import annotations

import dataclasses

from locojax.hosts.protocol import EngineStatus
from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_lanes import Lanes
from locojax.hosts.serving_operations import Sampling, Tenants


@dataclasses.dataclass
class Totals:
    """Since the start of the engine process."""

    trained_tokens: int = 0
    optimizer_steps: int = 0
    operations: int = 0
    failures: int = 0


def engine_status(
    trainer: Tenants,
    samplers: Sampling,
    lanes: Lanes,
    clock: PhaseClock,
    totals: Totals,
    *,
    num_held: int,
    num_disk_jobs: int,
    num_compilations: int,
    num_programs_behind: int,
    num_unacknowledged: int,
) -> EngineStatus:
    """The present figures.

    Args:
      num_held: samples that wait for their sampler to be opened.
      num_disk_jobs: checkpoints that are being written or read.
      num_compilations: programs that this process has compiled, those of its start included.
      num_programs_behind: programs that are yet to be read or compiled when there is nothing else to do.
      num_unacknowledged: answers that no front end has stored yet.
    """
    stats, waiting = samplers.stats, samplers.num_waiting
    gauges = {
        "num_running_samples": samplers.num_unfinished - waiting,
        "num_waiting_samples": waiting + num_held,
        "num_models": len(trainer.model_ids),
        "num_samplers": len(samplers.ids),
        "num_queued_operations": len(lanes),
        "num_disk_jobs": num_disk_jobs,
        "num_programs_behind": num_programs_behind,
        "num_unacknowledged_answers": num_unacknowledged,
    }
    running = {
        "sampled_tokens": stats.num_tokens,
        "prompt_tokens": stats.num_prompt_tokens,
        "prefix_hits": stats.num_prefix_hits,
        "compilations": num_compilations,
        **dataclasses.asdict(totals),
    }
    return EngineStatus(gauges, running, clock.seconds(), lanes.lengths())
