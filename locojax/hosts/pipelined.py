"""The pipelined step: finished groups go into the gradient while later ones are still decoded or graded.

    synchronous   decode all ......... grade the last . forward and backward ............. update
    pipelined     decode, and forward and backward of what is graded ... the last of it . update

The gradient is the synchronous step's, up to the order in which floats are added: every group's data are weighted by
the batch's denominators, and for `loss.normalise` constant and completions these are known before anything is sampled,
if no grade fails. If one does, what was accumulated is dropped and the batch is trained as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from locojax.config import Config
from locojax.errors import ConfigError
from locojax.hosts import learning
from locojax.hosts.learning import Lesson, Trained
from locojax.hosts.mismatch import check_first_step
from locojax.hosts.updates import loss_inputs
from locojax.hosts.worker import HostWorker
from locojax.rl.datums import DatumStats
from locojax.training.aggregation import Totals
from locojax.types import Datum, Group


def check_pipelined(config: Config, num_hosts: int) -> None:
    """Raises ConfigError if the step can't be pipelined: several hosts train in one program, all at once."""
    if config.run.pipelined and num_hosts > 1:
        raise ConfigError(
            "run.pipelined is true and there are several hosts, which train all at once",
            got=f"{num_hosts} hosts",
            expected="1 host, or run.pipelined=false",
        )


class Pipeline:
    """One step's gradient, taken in group by group.

    Args:
      num_completions: of the step's whole batch.

    Attributes:
      seconds: spent on groups before the last one was finished: what the synchronous step does afterwards.
    """

    def __init__(self, worker: HostWorker, config: Config, num_completions: int):
        self._worker, self._config = worker, config
        self._budget = int(config.training.rows) * int(config.training.row_tokens)
        # Tokens are of no loss's denominator here: `check` refuses loss.normalise=tokens.
        self._totals = Totals(0, num_completions, config.rollout.max_tokens)
        self._waiting: list[Datum] = []
        self._data: list[Datum] = []
        self._outputs: list[Mapping[str, np.ndarray]] = []
        self._sums: list[Mapping[str, float]] = []
        self.seconds = 0.0

    def add(self, group: Group) -> None:
        """A graded group; trained on once there is enough for a micro-batch."""
        self._waiting += learning.lesson([group], self._config).data
        if sum(len(datum.tokens) for datum in self._waiting) >= self._budget:
            start = time.perf_counter()
            self._flush()
            self.seconds += time.perf_counter() - start

    def finish(self, totals: Totals, *, step_index: int) -> Trained | None:
        """The update. None: the denominators are others than was thought; nothing was done, and nothing is left over.

        Raises:
          NumericsError: at the first step, sampler and trainer disagree by more than `run.max_gap`.
        """
        if totals.num_completions != self._totals.num_completions:
            self._worker.trainer.discard()
            return None
        self._flush()
        gap = learning.gap(self._data, self._outputs)
        if step_index == 0:
            check_first_step(gap, self._config.run.max_gap)
        update = self._worker.optim_step(learning.adam_params(self._config, step_index))
        return Trained(update, tuple(self._sums), gap)

    def _flush(self) -> None:
        if not self._waiting:
            return
        lesson = Lesson(tuple(self._waiting), (), self._totals, (), DatumStats())
        data = loss_inputs(self._worker, self._config, lesson)
        settings = learning.loss_config(self._config, self._totals)
        result = self._worker.forward_backward(data, self._config.loss.name, settings)
        self._data += data
        self._outputs += result.outputs
        self._sums.append(result.metrics)
        self._waiting = []
