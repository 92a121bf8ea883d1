"""A run that is killed at a named point, without a chance to say goodbye.

    python crash_victim.py POINT REPORT key=value ... [--resume]

POINT: `none`; `phase:decode@2`, as the phase is entered in step 2 (from 0) for the first time; `before:Trained@2`,
`after:Trained@2` or `torn:Trained@2`, at the step's first such record in the journal, or in the middle of it, and
`after:Drawn@2#2` at its second; `seconds:0.7`, so long after the first prompts are drawn. An engine's requests are
appended to REPORT.RANK, a line each, and a line for each sample that is gone on with. Under several hosts, only host
CRASH_HOST (0) is killed; host SLOW_HOST, if there is one, sleeps a quarter of a second at each entry of decoding, two
to a call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from hosts_victim import Slow

from locojax.cli import main
from locojax.hosts import journal_files
from locojax.hosts.phases import Phase
from locojax.hosts.worker import BegunOf, HostWorker
from locojax.measure.timeline import Timeline
from locojax.types import SampleRequest


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Struck(Timeline):
    """Dies as a phase is entered in a step."""

    name, at = "", -1

    @contextlib.contextmanager
    def step(self, index: int) -> Iterator[None]:
        self.index = index
        with super().step(index):
            yield

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with super().phase(name):
            if name == self.name and self._in_step and self.index == self.at:
                die()
            yield


def strike_record(when: str, kind: str, at: int, number: int) -> None:
    """Dies at a record of the journal: the step's `number`th of this kind, from 1."""
    append = journal_files.LocalAppender.append
    before = itertools.count(1)

    def struck(self: journal_files.LocalAppender, payload: bytes) -> None:
        fields = json.loads(payload.partition(b"\n")[0])
        step = fields.get("step", fields.get("version", fields.get("next_step", 0) - 1))
        if fields["kind"] != kind or step != at or next(before) < number:
            append(self, payload)
            return
        if when == "after":
            append(self, payload)
        elif when == "torn":
            whole = journal_files.frame(payload)
            os.write(self._file, whole[: len(whole) // 2])
        die()

    journal_files.LocalAppender.append = struck  # type: ignore[method-assign]


def strike_in(seconds: float) -> None:
    """Dies so long after the journal's first `Drawn`, wherever the run is then."""
    append = journal_files.LocalAppender.append
    timer = threading.Timer(seconds, die)
    timer.daemon = True

    def started(self: journal_files.LocalAppender, payload: bytes) -> None:
        if b'"Drawn"' in payload and not timer.is_alive():
            timer.start()
        append(self, payload)

    journal_files.LocalAppender.append = started  # type: ignore[method-assign]


def log_requests(path: str) -> None:
    admit = HostWorker.admit

    def logged(self: HostWorker, requests: Sequence[SampleRequest], begun: BegunOf) -> None:
        with open(path, "a") as file:
            for request in requests:
                file.write(request.request_id + "\n")
                for sample, part in begun(request.request_id).items():
                    file.write(f"begun {request.request_id}/{sample} {len(part.tokens)}\n")
        admit(self, requests, begun)

    HostWorker.admit = logged  # type: ignore[method-assign]


if __name__ == "__main__":
    point, report, *arguments = sys.argv[1:]
    this_host = os.environ.get("LOCOJAX_HOST_ID", "0")
    if this_host == os.environ.get("SLOW_HOST"):
        Slow.seconds, Slow.at = 0.25, "decode"
        sys.modules["locojax.measure.timeline"].Timeline = Slow  # type: ignore[attr-defined]
    if point != "none" and this_host == os.environ.get("CRASH_HOST", "0"):
        when, _, rest = point.partition(":")
        what, _, step = rest.partition("@")
        if when == "phase":
            Struck.name, Struck.at = what, int(step)
            sys.modules["locojax.measure.timeline"].Timeline = Struck  # type: ignore[attr-defined]
        elif when == "seconds":
            strike_in(float(what))
        else:
            at, _, number = step.partition("#")
            strike_record(when, what, int(at), int(number or 1))
    log_requests(f"{report}.{this_host}")
    sys.exit(main(["train", *arguments]))
