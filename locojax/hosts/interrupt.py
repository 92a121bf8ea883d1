"""Ctrl-C and SIGTERM, taken only where the run can be stopped with nothing lost. No jax."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

INTERRUPTED = 2  # exit code: ended by its user, not by a failure of its own, which is 1
RESTART = 75  # exit code: EX_TEMPFAIL of sysexits.h: the machine is taken away; the same command goes on elsewhere


class Stopped(KeyboardInterrupt):
    """A signal stopped the run. `number`: which. `exit_code`: what the process ends with."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return RESTART if self.number == signal.SIGTERM else INTERRUPTED


class Interrupts:
    """While open, the first SIGINT or SIGTERM is kept until `check`; a second SIGINT acts at once.

    An update cut in half could not be resumed from, so the loop asks between its parts instead of being torn out.
    Outside the main thread, where Python delivers no signals, it does nothing.

    Example:
      with Interrupts(say=print) as interrupts:
          interrupts.check()  # raises Stopped if one came
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._came, self._at = 0, 0.0
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
    def came(self) -> int:
        """The signal that came first; 0: none."""
        return self._came

    @property
    def seconds(self) -> float:
        """Since it came; 0 if none has."""
        return self._clock() - self._at if self._came else 0.0

    def check(self) -> None:
        """Raises Stopped, a KeyboardInterrupt, if a signal came since."""
        if self._came:
            raise Stopped(self._came)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._came and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._came:  # SIGTERM again, or after Ctrl-C: it is stopping already
            return
        self._came, self._at = number, self._clock()
        again = " Ctrl-C again stops at once." if number == signal.SIGINT else ""
        self._say(f"Stopping: what is being computed is finished first.{again}")
