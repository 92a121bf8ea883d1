"""The serving loop for tests, on a trainer and samplers without jax that note what is done to them, in order."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time

import numpy as np

from locojax.errors import CapacityError, RequestError
from locojax.hosts.protocol import (
    AdapterConfig,
    CreateModel,
    EngineInfo,
    EngineStatus,
    ForwardBackward,
    OptimStep,
    Sample,
    Sampled,
    Shutdown,
    Submit,
)
from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_compilations import ReadAhead
from locojax.hosts.serving_loop import Loop
from locojax.hosts.serving_operations import Operations
from locojax.rollout.stats import EngineStats
from locojax.training.tenant_work import RowProgram
from locojax.types import AdamParams, Completion, Datum, ForwardBackwardResult, OptimStepResult, SamplingParams

ROWS = 4
INFO = EngineInfo("inc1", "tiny", "llama", 257, 256, 64, 4, 8, (256,), (), (), ())


@dataclasses.dataclass(eq=False)
class FakeWork:
    model_id: str
    num_rows_left: int
    losing: bool = False
    program: RowProgram = RowProgram(1, 8, 1, True)

    @property
    def done(self):
        return self.num_rows_left == 0

    def result(self):
        return ForwardBackwardResult((), {"loss:sum": 1.0, "num_datum_tokens:sum": 7.0})


class FakeTenants:
    """One datum is one row. The loss "bad" is refused; a micro-batch with the loss "boom" in it blows up."""

    def __init__(self, rows, log, max_adapters=4):
        self.rows, self.log, self.max_adapters = rows, log, max_adapters
        self.models = {}
        self.is_lost = False

    @property
    def model_ids(self):
        return tuple(self.models)

    def create(self, model_id, lora, seed):
        if len(self.models) == self.max_adapters:
            raise CapacityError("All 4 slots are taken")
        self.models[model_id] = [lora, 0]
        self.log.append(("create", model_id))

    def remove(self, model_id):
        del self.models[model_id]
        self.log.append(("remove", model_id))

    def begin(self, model_id, data, loss, loss_config, *, gradient=True):
        if model_id not in self.models:
            raise RequestError(f"There is no model {model_id!r}")
        if loss == "bad":
            raise RequestError("Unknown loss 'bad'")
        return FakeWork(model_id, len(data), loss == "boom", RowProgram(self.rows, 8, 1, gradient))

    def advance(self, works):
        assert works
        room, taken = self.rows, []
        for work in works:
            n = min(work.num_rows_left, room)
            work.num_rows_left -= n
            room -= n
            taken.append((work.model_id, n))
        self.log.append(("micro", tuple(taken)))
        if any(work.losing for work in works):
            raise ValueError("something blew up\nwith a long tail")

    def optim_step(self, model_id, adam):
        self.models[model_id][1] += 1
        self.log.append(("optim", model_id))
        return OptimStepResult(True, self.models[model_id][1], {}, None)

    def discard(self, model_id):
        self.log.append(("discard", model_id))

    def state(self, model_id):
        if self.is_lost:
            raise ValueError("Array has been deleted")
        self.log.append(("copy", model_id))
        return {"version": self.models[model_id][1]}

    def restore(self, model_id, state, *, optimizer):
        self.log.append(("restore", model_id))

    def adapter(self, model_id):
        self.log.append(("copy adapter", model_id))
        return {"version": self.models[model_id][1]}

    snapshot = adapter

    def lora(self, model_id):
        return self.models[model_id][0]

    def policy_version(self, model_id):
        return self.models[model_id][1]


class FakeSamplers:
    """A sample takes `max_tokens` steps; its completion holds the version of the sampler when it began."""

    def __init__(self, log):
        self.log = log
        self.opened, self.running, self.aborted = {}, {}, []
        self.stats, self.num_waiting = EngineStats(), 0
        self.broken = False

    @property
    def ids(self):
        return tuple(self.opened)

    @property
    def num_unfinished(self):
        return len(self.running) + len(self.aborted)

    def open(self, sampler_id, adapter, lora, version):
        self.opened[sampler_id] = version
        self.log.append(("open", sampler_id, version))

    def close(self, sampler_id):
        self.log.append(("close", sampler_id))
        return self.opened.pop(sampler_id, None) is not None

    def add(self, operation_id, sample):
        if sample.sampler_id not in self.opened:
            raise RequestError(f"There is no sampler {sample.sampler_id!r}")
        self.running[operation_id] = [sample.params.max_tokens, self.opened[sample.sampler_id]]

    def abort(self, operation_id):
        self.aborted.append((operation_id, self.running.pop(operation_id)[1]))
        return True

    def step(self):
        self.log.append(("step",))
        if self.broken:
            raise ValueError("the device is gone")
        finished, self.aborted = self.aborted, []
        for operation_id, mine in list(self.running.items()):
            mine[0] -= 1
            if mine[0] == 0:
                finished.append((operation_id, self.running.pop(operation_id)[1]))
        return [(operation_id, _sampled(version)) for operation_id, version in finished]

    def drain(self):
        return []


def _sampled(version):
    return Sampled((Completion(0, (5,), np.zeros(1, np.float32), "x", "length", None, version),))


class FakeLink:
    """Collects answers. `then` maps an operation to what the front end sends once it is answered.

    Once all of `awaited` are answered it stops the loop.
    """

    def __init__(self):
        self.inbox = queue.SimpleQueue()
        self.answers, self.statuses, self.then, self.awaited = {}, [], {}, set()
        self.num_unacknowledged = 0
        self.info = None

    def publish(self, info):
        self.info = info

    def tell(self, message):
        if isinstance(message, EngineStatus):
            self.statuses.append(message)

    def answer(self, message):
        assert message.operation_id not in self.answers, "answered twice"
        self.answers[message.operation_id] = message
        for more in self.then.pop(message.operation_id, ()):
            self.inbox.put(more)
        if self.awaited:
            self.awaited.discard(message.operation_id)
            if not self.awaited:
                self.inbox.put(Shutdown())


class Run:
    """A loop that is fed a list of messages and runs until all that was submitted is answered."""

    def __init__(self, *, rows=ROWS, share=0.5):
        self.log, self.link = [], FakeLink()
        self.trainer, self.samplers = FakeTenants(rows, self.log), FakeSamplers(self.log)
        operations = Operations(self.trainer, self.samplers, None, alpha=32.0, max_rank=8)
        self.loop = Loop(
            self.link, self.trainer, self.samplers, operations, PhaseClock(), INFO,
            num_compilations=lambda: 3, read_ahead=ReadAhead(threading.Event(), lambda: 2),
            sampling_share=share, status_seconds=0.001,
        )  # fmt: skip

    def __call__(self, *messages, until=None):
        """`until`: what must be answered before the loop is stopped, one or several; else the last one submitted."""
        submitted = [m.operation_id for m in messages if isinstance(m, Submit)]
        for message in messages:
            self.link.inbox.put(message)
        self.link.awaited = {until or submitted[-1]} if until is None or isinstance(until, str) else set(until)
        self.loop.run()
        return self.link.answers

    def did(self, *names):
        return [entry for entry in self.log if entry[0] in names]


def create(model_id, op=None):
    return Submit(op or f"{model_id}:create", CreateModel(model_id, AdapterConfig(4)))


def fb(op, model_id, num_rows=1, loss="cross_entropy"):
    data = (Datum(np.zeros(2, np.int32), {}),) * num_rows
    return Submit(op, ForwardBackward(model_id, data, loss))


def optim(op, model_id):
    return Submit(op, OptimStep(model_id, AdamParams()))


def sample(op, sampler_id, max_tokens=1):
    return Submit(op, Sample(sampler_id, (1, 2), SamplingParams(max_tokens=max_tokens)))


def slowly(target, name):
    """Makes a method take 3 ms."""
    method = getattr(target, name)

    def slow(*args):
        time.sleep(0.003)
        return method(*args)

    setattr(target, name, slow)
