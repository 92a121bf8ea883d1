"""Which prompts a step trains on: a seeded order, epoch by epoch, that a resume continues without any state."""

from __future__ import annotations

import numpy as np

from locojax.errors import ConfigError, DataError


class BatchOrder:
    """A seeded order over prompts, cut into batches of one size. What a step gets depends on nothing but the arguments.

    Prompts are taken epoch by epoch: every prompt once before any twice. A batch that crosses into the next epoch is
    filled from that epoch's order, with the prompts already in the batch moved behind, so that no batch holds a prompt
    twice (its samples would be copies: a sample's seed is of step, prompt and index).

    Args:
      period: after so many steps the batches come again, in the same order; None: never.

    Example: BatchOrder(num_prompts=45, batch_size=16, seed=0).at(step=3) is a tuple of 16 indices in [0, 45).
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, period: int | None = None):
        """Raises DataError without prompts or when a batch needs more prompts than there are; ConfigError under 1."""
        if num_prompts < 1:
            raise DataError("There are no prompts to train on", remedy="Check the data set and its filters")
        if batch_size < 1:
            raise ConfigError("A batch must hold at least one prompt", got=batch_size)
        if batch_size > num_prompts:
            raise DataError(
                "A batch asks for more prompts than the data set holds",
                got=f"{batch_size} prompts a step from a data set of {num_prompts}",
                remedy=f"Ask for {num_prompts} prompts a step or fewer, or add prompts",
            )
        self.num_prompts, self.batch_size, self.seed, self.period = num_prompts, batch_size, seed, period
        self._latest: tuple[int, np.ndarray] | None = None  # (epoch, its order): the next batch mostly needs it again

    def at(self, step: int) -> tuple[int, ...]:
        """Prompt indices of step `step` (from 0), in order."""
        first = (step if self.period is None else step % self.period) * self.batch_size
        epoch, offset = divmod(first, self.num_prompts)
        batch = self._order(epoch)[offset : offset + self.batch_size]
        if len(batch) < self.batch_size:
            batch = np.concatenate([batch, self._order(epoch + 1)[: self.batch_size - len(batch)]])
        return tuple(int(index) for index in batch)

    def epoch(self, step: int) -> float:
        """How many times the data set has been gone through before step `step`."""
        return step * self.batch_size / self.num_prompts

    def _order(self, epoch: int) -> np.ndarray:
        """int[num_prompts], the order of one epoch. It depends on the epoch before it, whose tail shares a batch."""
        start, order = (0, None) if self._latest is None or self._latest[0] > epoch else self._latest
        if order is None:
            order = self._shuffled(0)
        for current in range(start + 1, epoch + 1):
            shuffled = self._shuffled(current)
            num_in_shared_batch = current * self.num_prompts % self.batch_size
            if num_in_shared_batch:
                already_in = np.isin(shuffled, order[-num_in_shared_batch:])
                num_missing = self.batch_size - num_in_shared_batch
                head = shuffled[~already_in][:num_missing]
                shuffled = np.concatenate([head, shuffled[~np.isin(shuffled, head)]])
            order = shuffled
        self._latest = (epoch, order)
        return order

    def _shuffled(self, epoch: int) -> np.ndarray:
        # Raw PCG64 words: numpy promises that stream for good, but not what `permutation` makes of it.
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.num_prompts)
        return np.argsort(words, kind="stable")
