"""Every error a person can meet: one base, a class per category.

An error says what was got, what was expected and what to do about it, because its text is what the user reads.
`exit_code` is what the command line ends with: 2 when the input is at fault, 1 when the run is.
"""

from __future__ import annotations


class LocoError(Exception):
    """Base of all errors raised on purpose.

    Args:
      problem: one sentence: what is wrong, naming the thing it is wrong with.
      got: what was found, when it is not already in `problem`.
      expected: what would have been right.
      remedy: what the reader can do now.
    """

    exit_code = 1

    def __init__(self, problem: str, *, got: object = None, expected: object = None, remedy: str | None = None):
        self.problem, self.got, self.expected, self.remedy = problem, got, expected, remedy
        parts = [problem.rstrip(".") + "."]
        if got is not None:
            parts.append(f"Got: {got}.")
        if expected is not None:
            parts.append(f"Expected: {expected}.")
        if remedy is not None:
            parts.append(remedy.rstrip(".") + ".")
        super().__init__(" ".join(parts))


class ConfigError(LocoError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""

    exit_code = 2


class ModelError(LocoError):
    """A model can't be found, isn't implemented, or its files don't hold what its config promises."""

    exit_code = 2


class DataError(LocoError):
    """A data set is empty, unreadable, or holds a row that can't be used."""

    exit_code = 2


class RequestError(LocoError):
    """One sampling or training request is malformed; others are not affected."""

    exit_code = 2


class GradingError(LocoError):
    """A reward function or grader is broken, or failed too often to go on."""

    exit_code = 2


class CapacityError(LocoError):
    """Something doesn't fit: a row in the token budget, a request in the KV memory."""


class NumericsError(LocoError):
    """Sampler and trainer disagree, or values are not finite, beyond what may be trained on."""


class CheckpointError(LocoError):
    """A checkpoint can't be written (a full disk, a folder without permission), read, or doesn't belong to this run."""

    exit_code = 2


class ComparisonError(LocoError):
    """Runs can't be compared: they did not do equal work, or hold too little to be scored."""

    exit_code = 2


class DeadlineError(LocoError):
    """A wait ran past its deadline; the text names what was waited for."""


class HostError(LocoError):
    """Another host of the run ended, or does something else than this one; the text names it."""
