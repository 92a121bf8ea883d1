"""Ctrl-C and SIGTERM, taken only where the run can be stopped with nothing lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupts:
    """While open, the first SIGINT or SIGTERM is kept until `check`; a second SIGINT acts at once.

    An update cut in half could not be resumed from, so the loop asks between its parts instead of being torn out.
    Outside the main thread, where Python delivers no signals, it does nothing.

    Example:
      with Interrupts(say=print) as interrupts:
          interrupts.check()  # raises KeyboardInterrupt if one came
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._came: int | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def came(self) -> bool:
        """Whether a signal came."""
        return self._came is not None

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal came since."""
        if self._came is not None:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._came = number
        self._say("Stopping: what is being computed is finished first. Ctrl-C again stops at once.")
