"""How many decode iterations go into one program run, where whoever waits for its end must not wait long. No jax."""

from __future__ import annotations

UNKNOWN = 2
"""Iterations of the first run with so many rows: what they take isn't known then."""


class Pace:
    """What an iteration with each number of rows took in the last run that had so many.

    Args:
      seconds: what a run may take, about; None: as long as it likes.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._took: dict[int, float] = {}

    def fit(self, num_rows: int, most: int) -> int:
        """How many iterations to run, at least 1."""
        if self._seconds is None:
            return most
        if num_rows not in self._took:
            return min(UNKNOWN, most)
        return max(1, min(most, int(self._seconds / max(self._took[num_rows], 1e-9))))

    def took(self, num_rows: int, num_iterations: int, seconds: float) -> None:
        """Tells what a run took; one without iterations, which only drew first tokens, says nothing."""
        if num_iterations:
            self._took[num_rows] = seconds / num_iterations
