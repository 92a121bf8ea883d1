"""What hosts tell one another before they train: the one all-gather of integers that a step has.

A `Report` is what one host's share of the step came to; `Agreed` is what follows from all of them, alike everywhere:
denominators, what the trainer runs, whether to stop, and the figures of the step's record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from locojax.hosts.group import Group
from locojax.rl.datums import DatumStats, sum_stats
from locojax.training.aggregation import Totals
from locojax.training.agreement import NUM_COUNTS


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations. Add those of the hosts up (Chan, Golub & LeVeque 1983).

    Example: Moments.of([1.0, 0.0]) is Moments(2, 0.5, 0.5)
    """

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        if not values:
            return cls()
        mean = float(np.mean(values))
        return cls(len(values), mean, float(np.sum((np.asarray(values) - mean) ** 2)))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not self.count or not other.count:
            return other if other.count else self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        deviations = self.deviations + other.deviations + apart**2 * self.count * other.count / count
        return Moments(count, mean, deviations)

    @property
    def std(self) -> float:
        """Of the population; NaN of nothing."""
        return float(np.sqrt(self.deviations / self.count)) if self.count else float("nan")


@dataclasses.dataclass(frozen=True)
class Report:
    """One host's share of a step, before it is trained on. Filled by the loop.

    Attributes:
      stop: the signal that came, 0 if none did: all hosts stop here.
      stats: of its groups. rewards: of its scorable completions.
      generate_seconds: from the first admission to the last completion.
      counts: what the trainer must know of each of its calls that the step makes: `agreement.Counts.ints`.
      num_stolen: of its groups, those that it took over from other hosts.
    """

    stop: int
    stats: DatumStats
    rewards: Moments
    generate_seconds: float
    counts: tuple[tuple[int, ...], ...] = ()
    num_stolen: int = 0

    def encode(self) -> np.ndarray:
        """i64[n]; numbers that aren't whole by their bits."""
        floats = np.array([self.rewards.mean, self.rewards.deviations, self.generate_seconds], np.float64)
        ints = [self.stop, self.num_stolen, self.rewards.count, *dataclasses.astuple(self.stats)]
        counts = [number for row in self.counts for number in row]
        return np.concatenate([np.array(ints, np.int64), floats.view(np.int64), np.array(counts, np.int64)])

    @classmethod
    def decode(cls, row: np.ndarray) -> Report:
        num_stats = len(dataclasses.fields(DatumStats))
        (stop, num_stolen, count), row = row[:3].tolist(), row[3:]
        stats, row = DatumStats(*row[:num_stats].tolist()), row[num_stats:]
        mean, deviations, seconds = np.ascontiguousarray(row[:3]).view(np.float64).tolist()
        counts = tuple(map(tuple, row[3:].reshape(-1, NUM_COUNTS).tolist()))
        return cls(stop, stats, Moments(count, mean, deviations), seconds, counts, num_stolen)


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all hosts know after the meeting. Filled by `meet`.

    Example: Agreed((report_of_host_0, report_of_host_1))
    """

    reports: tuple[Report, ...]  # by rank

    @property
    def told(self) -> tuple[np.ndarray, ...]:
        """Of each call of the trainer, what every host told: i64[hosts, NUM_COUNTS]."""
        return tuple(np.array(rows, np.int64) for rows in zip(*(report.counts for report in self.reports), strict=True))

    @property
    def stop(self) -> int:
        """The signal that stops the run; of several, the one that says that the machine goes."""
        return max(report.stop for report in self.reports)

    @property
    def stats(self) -> DatumStats:
        return sum_stats(report.stats for report in self.reports)

    @property
    def rewards(self) -> Moments:
        return sum((report.rewards for report in self.reports), Moments())

    @property
    def num_stolen(self) -> int:
        return sum(report.num_stolen for report in self.reports)

    @property
    def generate_seconds(self) -> tuple[float, ...]:
        return tuple(report.generate_seconds for report in self.reports)

    @property
    def tokens_per_second(self) -> float:
        """Sampled by all hosts, while the slowest was at it."""
        return self.stats.num_completion_tokens / max(*self.generate_seconds, 1e-9)

    def totals(self, max_tokens: int) -> Totals:
        """The denominators of the whole batch."""
        return batch_totals(self.stats, max_tokens)


def batch_totals(stats: DatumStats, max_tokens: int) -> Totals:
    """The denominators of a batch with these counts."""
    return Totals(stats.num_trained_tokens, stats.num_samples - stats.num_unscorable, max_tokens)


def meet(group: Group, report: Report) -> Agreed:
    """Every host's report to every host."""
    return Agreed(tuple(Report.decode(row) for row in group.agree("agree", report.encode())))
