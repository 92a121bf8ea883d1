"""jax's coordination service in a process of its own, started by host 0: this file is run as a script.

Inside host 0, where jax puts it, it would die with that host, and every other host would be ended by jax at once, with
a message that names nobody. Out here it outlives host 0 for long enough that the others can tell what happened.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

_DONE = "done"
_PARTING_SECONDS = 15.0  # jax ends a host for which the service is gone before it has left


class CoordinatorProcess:
    """What host 0 holds in place of the service. Takes the arguments of jax's own.

    Args:
      linger_seconds: how long it goes on after host 0 ended without a word.
    """

    def __init__(self, address: str, num_hosts: int, *, linger_seconds: float, **options: Any):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C is not meant for it
        )
        asked = {"address": address, "num_hosts": num_hosts, "options": options, "linger_seconds": linger_seconds}
        self._tell(json.dumps(asked))

    def shutdown(self) -> None:
        """All hosts are leaving: it ends by itself, once the slowest has."""
        self._tell(_DONE)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def main() -> None:
    """Serves until host 0 says that all is done, or has ended, and for a while more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax  # after the signals: it takes a moment

    asked = json.loads(sys.stdin.readline())
    service = _jax.get_distributed_runtime_service(asked["address"], asked["num_hosts"], **asked["options"])
    done = sys.stdin.readline().strip() == _DONE
    time.sleep(_PARTING_SECONDS if done else asked["linger_seconds"])
    service.shutdown()


if __name__ == "__main__":
    main()
