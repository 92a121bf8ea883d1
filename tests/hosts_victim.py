"""One host of a run to which something happens: it sends itself a signal in a phase of its second step, or is slow.

    python hosts_victim.py HOST SIGNAL PHASE key=value ... [--resume]
    python hosts_victim.py HOST 0.5s PHASE key=value ...       sleeps whenever it enters the phase in a step
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from locojax.cli import main
from locojax.hosts.phases import Phase
from locojax.measure.timeline import Timeline


class Struck(Timeline):
    """Sends this process the signal when the phase is entered in the second step."""

    number, at = 0, ""

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with super().phase(name):
            if name == self.at and len(self.accounts) == 1 and self._in_step:
                os.kill(os.getpid(), self.number)
            yield


class Slow(Timeline):
    """Sleeps when the phase is entered."""

    seconds, at = 0.0, ""

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with super().phase(name):
            if name == self.at and self._in_step:
                time.sleep(self.seconds)
            yield


if __name__ == "__main__":
    host, what, at, *arguments = sys.argv[1:]
    if os.environ["LOCOJAX_HOST_ID"] == host:
        if what.endswith("s"):
            Slow.seconds, Slow.at = float(what[:-1]), at
            timer: type[Timeline] = Slow
        else:
            Struck.number, Struck.at = int(what), at
            timer = Struck
        sys.modules["locojax.measure.timeline"].Timeline = timer  # type: ignore[attr-defined]
    sys.exit(main(["train", *arguments]))
