"""What an engine process reads and writes, on a thread of its own, so that a slow disk holds up no program. No jax.

The device loop takes the copy that a save writes, hands over the rest as a job and goes on; how a job ended comes back
through the loop's inbox, as `DiskDone`. Of one lane at most one job is under way, and few of all: each save holds a
copy in memory, so a disk that is slower than its users makes their saves wait, and nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from locojax.hosts.protocol import LoadWeights, OpenSampler, Operation, RestoreModel, SaveAdapter, SaveState
from locojax.hosts.serving_lanes import Entry, Lane
from locojax.hosts.serving_link import DiskDone

MAX_JOBS = 4
"""Under way at once, over all lanes."""

CLOSE_SECONDS = 8.0
"""How long `close` waits for what is being written; the supervisor gives an engine 20 s to end."""


class Inbox(Protocol):
    """Where outcomes are put: a queue."""

    def put(self, item: Any) -> None: ...


def uses_disk(operation: Operation) -> bool:
    """Whether a part of the operation is a job of `Disk`."""
    if isinstance(operation, OpenSampler):
        return operation.directory is not None and operation.model_id is None
    return isinstance(operation, (SaveState, SaveAdapter, RestoreModel, LoadWeights))


class Disk:
    """Runs jobs one after the other. All methods are the device loop's; only the jobs run elsewhere.

    Args:
      inbox: is told each outcome.
    """

    def __init__(self, inbox: Inbox):
        self._inbox = inbox
        self._jobs: dict[str, tuple[Operation, Lane]] = {}  # under way, by operation id
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, operation_id: str, operation: Operation, lane: Lane, job: Callable[[], Any]) -> None:
        """Begins a job: what an operation has to read or write."""
        self._jobs[operation_id] = (operation, lane)
        if self._thread is None:
            # A daemon: a disk that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
            self._thread.start()
        self._queue.put((operation_id, job))

    def blocks(self, entry: Entry, lane: Lane) -> bool:
        """Whether the head of a lane has to wait: its own job or the lane's last one is under way, or too many are."""
        if entry.found is not None or not uses_disk(entry.operation):
            return False
        return len(self._jobs) >= MAX_JOBS or any(lane == its_lane for _, its_lane in self._jobs.values())

    def end(self, done: DiskDone) -> Operation:
        """Takes an outcome off the book; returns the operation it is of."""
        return self._jobs.pop(done.operation_id)[0]

    def unfinished(self) -> list[str]:
        """The operations whose jobs are under way, and whose writing nobody but the job itself waits for."""
        return [name for name, (operation, _) in self._jobs.items() if isinstance(operation, (SaveState, SaveAdapter))]

    def close(self) -> None:
        """Waits, but not for ever, until what was begun is done; its outcomes are then in the inbox."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (given := self._queue.get()) is not None:
            operation_id, job = given
            try:
                done = DiskDone(operation_id, job())
            except Exception as error:  # whatever it is, it is the operation's answer and not this thread's end
                done = DiskDone(operation_id, error=error)
            self._inbox.put(done)
