"""What a host other than the first writes of a run: metrics.host1.jsonl and samples/step_00012.host1.jsonl.

A thread writes, so that no step waits for a disk; the other hosts would wait with it. No jax.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence

from locojax.config import Config, run_folder
from locojax.hosts.metrics import StepMetrics
from locojax.hosts.runlog import read_metrics, replace_file, sample_row, sample_rows, writing
from locojax.types import Group


class HostLog:
    """Has the methods of `RunLog`, for the host `rank`.

    Args:
      resume_at: first step that this process does anew; None: a new run.

    Attributes:
      kept: steps that have their line already.

    Raises:
      CheckpointError: the folder can't be written; told by the next call.
    """

    def __init__(self, config: Config, rank: int, *, resume_at: int | None = None):
        self.folder = run_folder(config)
        self.rank = rank
        self.history: tuple[StepMetrics, ...] = ()  # alarms and report are host 0's
        path = self.folder / f"metrics.host{rank}.jsonl"
        with writing(self.folder):
            (self.folder / "samples").mkdir(parents=True, exist_ok=True)
            kept = [] if resume_at is None else [m for m in read_metrics(path) if m.step < resume_at]
            self.kept = frozenset(metrics.step for metrics in kept)
            replace_file(path, "".join(metrics.to_json() + "\n" for metrics in kept))
            self._file = path.open("a", encoding="utf-8")
        self._error: Exception | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="locojax-hostlog", daemon=True)
        self._thread.start()

    def __enter__(self) -> HostLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def samples(
        self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]], places: Sequence[int]
    ) -> None:
        """This host's completions of a step. `advantages[i][j]` belongs to `groups[i].rollouts[j]`; `places` are the
        groups' in the batch of all hosts."""
        self._submit(lambda: self._write_samples(f"step_{step:05d}", sample_rows(groups, advantages, places)))

    def held_out(self, policy_version: int, groups: Sequence[Group]) -> None:
        """This host's completions of an evaluation."""
        name, rows = f"held_out_{policy_version:05d}", [sample_row(group, 0, None) for group in groups]
        self._submit(lambda: self._write_samples(name, rows))

    def step(self, metrics: StepMetrics) -> None:
        """This host's part of a step: its own groups, its own account."""
        self._submit(lambda: self._write_step(metrics))

    def close(self) -> None:
        """Waits until everything is written; raises what could not be."""
        self._jobs.put(None)
        self._thread.join()
        self._file.close()
        self._tell()

    def _submit(self, job: Callable[[], None]) -> None:
        self._tell()
        self._jobs.put(job)

    def _tell(self) -> None:
        if (error := self._error) is not None:
            self._error = None  # told once
            raise error

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with writing(self.folder):
                    job()
            except Exception as error:  # raised by the next call: a thread has nobody to raise it to
                self._error = error

    def _write_step(self, metrics: StepMetrics) -> None:
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def _write_samples(self, name: str, rows: Sequence[dict[str, object]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        replace_file(self.folder / "samples" / f"{name}.host{self.rank}.jsonl", text)
