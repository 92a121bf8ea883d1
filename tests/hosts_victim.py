"""One host of a run to which something happens: it sends itself a signal in a phase of its second step.

    python hosts_victim.py HOST SIGNAL PHASE key=value ... [--resume]
"""

from __future__ import annotations

import contextlib
import os
import sys
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


if __name__ == "__main__":
    host, number, at, *arguments = sys.argv[1:]
    if os.environ["LOCOJAX_HOST_ID"] == host:
        Struck.number, Struck.at = int(number), at
        sys.modules["locojax.measure.timeline"].Timeline = Struck  # type: ignore[attr-defined]
    sys.exit(main(["train", *arguments]))
