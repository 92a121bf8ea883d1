"""The device loop of an engine process, and its policy.

A turn of the loop is:

    take      all messages that have come; with nothing to do, wait for one
    run       one step of sampling (a few decode iterations of every sample that runs), or one piece of training: a
              micro-batch, or one operation such as an optim_step or the copy that a save writes
    report    EngineStatus, about once a second

- **Sampling and training** share the device by time: while there is both, whichever has had less of it, by
  `sampling_share`, goes next. Neither saves up: time that one had to itself is not held against it.
- **A model's operations** run strictly in the order of their submission, an OpenSampler of the model among them.
  Consecutive forward_backwards may share micro-batches; anything else waits until all before it are done.
- **The disk** is a thread of its own. A save is over for its model once its copy is taken: what comes next runs while
  the copy is written, but for the model's next save or load, which waits. A load begins once its file has been read.
- **Models** are independent: the one served longest ago goes first, and its micro-batch is filled up with the next
  ones' rows. An operation that fails fails alone; a micro-batch that fails takes the forward_backwards in it along.
- **Samples** join the running batch at the next step. They see the weights of their sampler, which are a copy: a sample
  submitted before an optim_step is not affected by it.
- **RemoveModel** overtakes: what is queued for the model fails at once. **Cancel** ends what has not begun; a Sample
  finishes with what it has. **Shutdown** lets the piece that runs finish, and what is being written for a few seconds;
  all that is left fails, and says why.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from locojax.hosts.protocol import (
    Cancel,
    CloseSampler,
    EngineInfo,
    Finished,
    ForwardBackward,
    OpenSampler,
    Operation,
    OptimStep,
    RemoveModel,
    Sample,
    SaveAdapter,
    SaveState,
    Shutdown,
    Submit,
)
from locojax.hosts.serving_answers import SAVES, Answers, unexpected
from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_compilations import ReadAhead
from locojax.hosts.serving_disk import Disk
from locojax.hosts.serving_lanes import Entry, HeldSamples, Lane, Lanes, Work, lane_of
from locojax.hosts.serving_link import DiskDone, Link
from locojax.hosts.serving_memory import Freed
from locojax.hosts.serving_operations import Operations, Sampling, Tenants
from locojax.hosts.serving_share import Share
from locojax.hosts.serving_status import Totals, engine_status
from locojax.types import OptimStepResult

log = logging.getLogger(__name__)

_PHASES = {OptimStep: "optim", SaveState: "save", SaveAdapter: "save", OpenSampler: "publish"}


class Loop:
    """Runs what front ends submit until one of them says Shutdown. One thread, which owns the devices.

    Args:
      info: what is served; its open models and samplers are kept up to date and published.
      num_compilations: how many programs this process has compiled.
      read_ahead: is told when there is work.
      sampling_share, status_seconds: see `ServeSettings`.
    """

    def __init__(
        self,
        link: Link,
        trainer: Tenants,
        samplers: Sampling,
        operations: Operations,
        clock: PhaseClock,
        info: EngineInfo,
        *,
        num_compilations: Callable[[], int],
        read_ahead: ReadAhead,
        sampling_share: float = 0.5,
        status_seconds: float = 1.0,
    ):
        self._link, self._trainer, self._samplers, self._operations = link, trainer, samplers, operations
        self._clock, self._info = clock, info
        self._num_compilations, self._status_seconds = num_compilations, status_seconds
        self._read_ahead = read_ahead
        self._share = Share(sampling_share)
        self._lanes = Lanes()
        self._numbers = itertools.count()
        self._sampling: dict[str, None] = {}  # operations in `samplers`
        self._held = HeldSamples()
        self._disk = Disk(link.inbox)
        self._freed = Freed()
        self._totals = Totals()
        self._answers = Answers(link, self._totals)
        self._stopping = False
        self._lost: Exception | None = None  # what showed that the trainer can't go on
        self._next_status = 0.0

    def run(self) -> None:
        """Returns after Shutdown, every operation answered.

        Raises:
          RuntimeError: a failure took the adapters along; every operation has been answered.
        """
        self._publish()
        while not self._stopping:
            self._take()
            self._turn()
            self._report()
        self._fail_the_rest()
        if self._lost is not None:
            raise RuntimeError("the trainer's state was lost") from self._lost

    # Taking messages.

    def _take(self) -> None:
        inbox, idle = self._link.inbox, not (self._samplers.num_unfinished or self._ready())
        try:
            if idle:
                self._freed.idle()
                self._read_ahead.idle()
                with self._clock.phase("idle"):
                    message = inbox.get(timeout=max(self._next_status - time.monotonic(), 0.001))
            else:
                message = inbox.get_nowait()
            self._receive(message)
            while not self._stopping:
                self._receive(inbox.get_nowait())
        except queue.Empty:
            return

    def _receive(self, message: Submit | Cancel | Shutdown | DiskDone) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(operation_id):
                self._cancel(operation_id)
            case Shutdown():
                self._stopping = True
            case DiskDone():
                self._off_the_disk(message)

    def _submit(self, message: Submit) -> None:
        operation = message.operation
        self._totals.operations += 1
        if isinstance(operation, Sample):
            self._sample(message)
            return
        lane = lane_of(operation)
        if isinstance(operation, RemoveModel):
            self._empty(lane)
        elif isinstance(operation, (OpenSampler, CloseSampler)) and lane[0] == "sampler":
            # What is said of a sampler that a model's queue is yet to open comes after that.
            lane = self._lanes.opening(operation.sampler_id) or lane
        self._lanes.add(Entry(message.operation_id, operation, next(self._numbers)), lane)

    def _empty(self, lane: Lane) -> None:
        """Fails what is queued for a model that is to go, and leaves what isn't the model's own business."""
        for entry in self._lanes.forget(lane):
            if isinstance(entry.operation, RemoveModel) or lane_of(entry.operation) != lane:
                self._lanes.add(entry, lane)
                continue
            self._answers.fail(entry.operation_id, "user", f"Model {lane[1]!r} was removed before this ran.")
            self._release(entry.operation)

    def _sample(self, message: Submit) -> None:
        operation = message.operation
        assert isinstance(operation, Sample)
        if operation.sampler_id not in self._samplers.ids and self._lanes.opening(operation.sampler_id):
            self._held.add(message, operation.sampler_id)
            return
        try:
            self._samplers.add(message.operation_id, operation)
        except Exception as error:  # every tenant's work runs in this loop: one request's bug is answered, not raised
            self._failed(message.operation_id, operation, error)
        else:
            self._sampling[message.operation_id] = None

    def _release(self, operation: Operation) -> None:
        """Lets samples go on that waited for an OpenSampler, which has now run or failed."""
        if isinstance(operation, OpenSampler) and not self._lanes.opening(operation.sampler_id):
            for message in self._held.release(operation.sampler_id):
                self._sample(message)

    def _cancel(self, operation_id: str) -> None:
        if operation_id in self._sampling:
            self._samplers.abort(operation_id)
            return
        if self._held.withdraw(operation_id):
            self._answers.fail(operation_id, "user", "The request was cancelled before it ran.")
            return
        found = self._lanes.find(operation_id)
        if found is not None and not found[0].started:
            self._lanes.remove(*found)
            self._answers.fail(operation_id, "user", "The request was cancelled before it ran.")
            self._release(found[0].operation)

    # Running.

    def _ready(self) -> list[Lane]:
        """The lanes that can go on, in turn."""
        return [lane for lane in self._lanes.in_turn() if not self._disk.blocks(self._lanes.head(lane), lane)]

    def _turn(self) -> None:
        ready = self._ready()
        side = self._share.next(sampling=self._samplers.num_unfinished > 0, training=len(ready) > 0)
        if side is None or self._stopping:
            return
        start = time.monotonic()
        self._read_ahead.worked()
        if side == "sampling":
            self._step()
        else:
            lane = ready[0]
            if isinstance(self._lanes.head(lane).operation, ForwardBackward):
                self._micro_batch()
            else:
                self._whole(lane)
        self._freed.worked()
        self._read_ahead.worked()
        self._share.spent(side, time.monotonic() - start)

    def _step(self) -> None:
        """One step of sampling."""
        try:
            finished = self._samplers.step()
        except Exception as error:  # a failed device or a bug ends the samples that run; training goes on
            self._lose_samples(error)
            return
        for tokens in self._samplers.drain():
            self._link.tell(tokens)
        for operation_id, sampled in finished:
            if operation_id in self._sampling:
                del self._sampling[operation_id]
                self._link.answer(Finished(operation_id, sampled))

    def _lose_samples(self, error: Exception) -> None:
        log.error("Sampling failed", exc_info=error)
        for operation_id in list(self._sampling):
            del self._sampling[operation_id]
            self._samplers.abort(operation_id)
            self._answers.fail(operation_id, "server", unexpected("sampling", error))

    def _whole(self, lane: Lane) -> None:
        """One operation that is run in one go, once what it reads has been read; of a save, the copying."""
        entry = self._lanes.head(lane)
        operation = entry.operation
        self._lanes.served(lane)
        try:
            with self._clock.phase(_PHASES.get(type(operation), "other")):
                job = self._operations.on_disk(operation) if entry.found is None else None
                if job is not None:
                    self._to_the_disk(entry, lane, job)
                    return
                result = self._operations.run(operation, entry.found)
        except Exception as error:  # disk, XLA or a bug: its own future says so, other tenants' operations go on
            self._lanes.remove(entry, lane)
            self._failed(entry.operation_id, operation, error)
        else:
            self._lanes.remove(entry, lane)
            if isinstance(operation, RemoveModel):
                self._lanes.retire(lane)
            if isinstance(result, OptimStepResult):
                self._totals.optimizer_steps += result.applied
            self._publish()
            self._answers.finished(entry.operation_id, result)
        self._release(operation)

    def _to_the_disk(self, entry: Entry, lane: Lane, job: Callable[[], Any]) -> None:
        self._disk.submit(entry.operation_id, entry.operation, lane, job)
        entry.started = True
        if isinstance(entry.operation, SAVES):
            self._lanes.remove(entry, lane)  # a load keeps its place until what it asks for is here

    def _off_the_disk(self, done: DiskDone) -> None:
        operation = self._disk.end(done)
        if isinstance(operation, SAVES):
            if done.error is None:
                self._answers.finished(done.operation_id, done.value)
            else:
                self._failed(done.operation_id, operation, done.error)
            return
        queued = self._lanes.find(done.operation_id)
        if queued is None:
            return  # its model was removed meanwhile, and it has been answered
        queued[0].found = done.value
        if done.error is not None:
            self._lanes.remove(*queued)
            self._failed(done.operation_id, operation, done.error)
            self._release(operation)

    def _micro_batch(self) -> None:
        """One micro-batch, of rows of the models in turn."""
        chosen: list[tuple[Entry, Lane]] = []
        works: list[Work] = []
        num_rows = 0
        for lane in self._lanes.in_turn():
            for entry in self._lanes.forward_backwards(lane):
                if (works and num_rows >= works[0].program.num_rows) or (work := self._begin(entry, lane)) is None:
                    continue
                if works and work.program != works[0].program:
                    break  # its turn comes; what is behind it in the lane must not overtake it
                chosen.append((entry, lane))
                works.append(work)
                num_rows += work.num_rows_left
        before = [work.num_rows_left for work in works]
        try:
            with self._clock.phase("train"):
                if num_rows:
                    self._trainer.advance(works)
                results = [work.result() if work.done else None for work in works]
        except Exception as error:  # a failed device or a bug ends the calls that were in it; other models go on
            self._lose_gradients(chosen, error)
            return
        for (entry, lane), work, rows, result in zip(chosen, works, before, results, strict=True):
            if work.num_rows_left < rows:
                entry.started = True
                self._lanes.served(lane)
            if result is not None:
                self._totals.trained_tokens += int(result.metrics.get("num_datum_tokens:sum", 0))
                self._lanes.remove(entry, lane)
                self._answers.finished(entry.operation_id, result)

    def _begin(self, entry: Entry, lane: Lane) -> Work | None:
        """A forward_backward, checked and packed, if need be now; None if it is at fault, and has been answered."""
        if entry.work is not None:
            return entry.work
        operation = entry.operation
        assert isinstance(operation, ForwardBackward)
        try:
            with self._clock.phase("pack"):
                entry.work = self._trainer.begin(
                    operation.model_id, operation.data, operation.loss, operation.loss_config,
                    gradient=operation.gradient,
                )  # fmt: skip
        except Exception as error:  # every tenant's work runs in this loop: one request's bug is answered, not raised
            self._lanes.served(lane)
            self._lanes.remove(entry, lane)
            self._failed(entry.operation_id, operation, error)
            return None
        return entry.work

    def _lose_gradients(self, chosen: list[tuple[Entry, Lane]], error: Exception) -> None:
        """A micro-batch failed: part of its works' gradient may be in the accumulators, and part is not."""
        log.error("A micro-batch failed", exc_info=error)
        text = unexpected("forward_backward", error)
        for lane in dict.fromkeys(lane for _, lane in chosen):
            if self._is_whole(lane[1], drop_gradient=True):
                text += f" What model {lane[1]!r} had accumulated since its last optim_step was dropped."
        for entry, lane in chosen:
            self._lanes.served(lane)
            self._lanes.remove(entry, lane)
            self._answers.fail(entry.operation_id, "server", text)

    def _is_whole(self, model_id: str, *, drop_gradient: bool = False) -> bool:
        """Whether a model outlived a failure. A program that fails may have taken the arrays along that it was given.

        If not, nothing can be trained any more: the process is to end, and to be started again.
        """
        if model_id not in self._trainer.model_ids:
            return True
        try:
            if drop_gradient:
                self._trainer.discard(model_id)
            self._trainer.state(model_id)
        except Exception as error:  # a probe: deleted buffers raise XLA's own errors; any means that the state is gone
            log.error("Model %s is lost", model_id, exc_info=error)
            self._lost, self._stopping = error, True
            return False
        return True

    # Answering.

    def _failed(self, operation_id: str, operation: Operation, error: Exception) -> None:
        """Tells an error; one that nobody raised on purpose may have taken its model along."""
        on_purpose = self._answers.failed(operation_id, operation, error)
        lane = None if isinstance(operation, Sample) else lane_of(operation)
        if not on_purpose and lane is not None and lane[0] == "model":
            self._is_whole(lane[1])

    def _fail_the_rest(self) -> None:
        self._disk.close()
        late: list[str] = []
        while True:
            try:
                message = self._link.inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, Submit):
                late.append(message.operation_id)
            elif isinstance(message, DiskDone):
                self._off_the_disk(message)
        left = [*self._sampling, *(entry.operation_id for entry in self._lanes.entries())]
        for operation_id in [*left, *self._held.operation_ids(), *self._disk.unfinished(), *late]:
            self._answers.fail(operation_id, "server", "The engine was stopped before this was done. Send it again.")

    def _publish(self) -> None:
        """Tells the link what is open now."""
        self._info = dataclasses.replace(
            self._info, open_models=tuple(self._trainer.model_ids), open_samplers=tuple(self._samplers.ids)
        )
        self._link.publish(self._info)

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + self._status_seconds
        self._link.tell(
            engine_status(
                self._trainer,
                self._samplers,
                self._lanes,
                self._clock,
                self._totals,
                num_held=len(self._held),
                num_disk_jobs=len(self._disk),
                num_compilations=self._num_compilations(),
                num_programs_behind=self._read_ahead.num_behind(),
                num_unacknowledged=self._link.num_unacknowledged,
            )  # fmt: skip
        )

