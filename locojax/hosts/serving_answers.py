"""How the device loop answers: a result, or a failure and whose fault it is. No jax."""

from __future__ import annotations

import logging
from typing import Protocol

from locojax.errors import CheckpointError, DeadlineError, LocoError
from locojax.hosts.protocol import Category, Failed, Finished, Operation, Result, SaveAdapter, SaveState
from locojax.hosts.serving_status import Totals

log = logging.getLogger(__name__)

SAVES = (SaveState, SaveAdapter)


class Answering(Protocol):
    """What takes answers: `serving_link.Link`."""

    def answer(self, message: Finished | Failed) -> None: ...


class Answers:
    """Answers operations, each once, and counts the failures.

    Args:
      link: takes the answers. totals: its `failures` are counted here.
    """

    def __init__(self, link: Answering, totals: Totals):
        self._link, self._totals = link, totals

    def finished(self, operation_id: str, result: Result) -> None:
        """The operation has its result."""
        self._link.answer(Finished(operation_id, result))

    def fail(self, operation_id: str, category: Category, text: str) -> None:
        """The operation ends without one."""
        self._totals.failures += 1
        self._link.answer(Failed(operation_id, category, text))

    def failed(self, operation_id: str, operation: Operation, error: Exception) -> bool:
        """Tells an error. One that was raised on purpose is the request's fault, unless it was ours to write a file.

        Returns:
          whether it was raised on purpose.
        """
        if isinstance(error, LocoError) and not isinstance(error, DeadlineError):
            is_ours = isinstance(operation, SAVES) and isinstance(error, CheckpointError)
            self.fail(operation_id, "server" if is_ours else "user", str(error))
            return True
        log.error("%s failed", type(operation).__name__, exc_info=error)
        self.fail(operation_id, "server", unexpected(type(operation).__name__, error))
        return False


def unexpected(what: str, error: Exception) -> str:
    """The text for an error that nobody raised on purpose."""
    lines = str(error).strip().splitlines() or ["no text"]
    return f"The server failed at {what} ({type(error).__name__}: {lines[0][:500]}). Its log says more."
