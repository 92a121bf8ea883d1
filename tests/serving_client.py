"""A front end for tests: submits operations over the real connection and waits for their answers."""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Client

import numpy as np

from locojax.hosts.protocol import (
    Acknowledge,
    AdapterConfig,
    CreateModel,
    EngineInfo,
    Failed,
    Finished,
    ForwardBackward,
    OpenSampler,
    OptimStep,
    Progress,
    Sample,
    Shutdown,
    Submit,
)
from locojax.types import AdamParams, Datum, SamplingParams

KEY = b"a key"
SECONDS = 240  # a first call compiles
_ids = itertools.count()


class FrontEnd:
    """Connects, retrying until the engine listens, and reads up to `EngineInfo`. `news` keeps what is no answer."""

    def __init__(self, address):
        self.answers, self.news = {}, []
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                self.connection = Client(address, family="AF_UNIX", authkey=KEY)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, "nobody listens"
                time.sleep(0.02)
        self.info = None
        while self.info is None:
            self._receive()

    def _receive(self):
        assert self.connection.poll(SECONDS), "nothing came"
        message = self.connection.recv()
        if isinstance(message, EngineInfo):
            self.info = message
        elif isinstance(message, (Finished, Failed)):
            assert message.operation_id not in self.answers, "answered twice"
            self.answers[message.operation_id] = message
        else:
            assert isinstance(message, Progress) or self.info is not None
            self.news.append(message)

    def submit(self, operation, op=None):
        op = op or f"op{next(_ids)}"
        self.connection.send(Submit(op, operation))
        return op

    def wait(self, *ops, acknowledge=True):
        """The answers to these, in order."""
        while not all(op in self.answers for op in ops):
            self._receive()
        if acknowledge:
            self.connection.send(Acknowledge(ops))
        return [self.answers[op] for op in ops]

    def do(self, *operations):
        """Submits all at once; their results, in order. Fails the test when one of them failed."""
        answers = self.wait(*(self.submit(operation) for operation in operations))
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        assert not failed, failed
        results = [answer.result for answer in answers]
        return results[0] if len(results) == 1 else results

    def fails(self, operation):
        """The failure of an operation that can't be done."""
        (answer,) = self.wait(self.submit(operation))
        assert isinstance(answer, Failed), answer
        return answer

    def shut_down(self):
        self.connection.send(Shutdown())
        try:
            while True:
                self._receive()
        except (EOFError, OSError):
            self.connection.close()


def create(model_id, rank=4, seed=0, **flags):
    return CreateModel(model_id, AdapterConfig(rank, seed, **flags))


def data(seed=0, count=3, length=12):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, 256, length + 1)
        weights = np.ones(length, np.float32)
        found.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
    return tuple(found)


def fb(model_id, seed=0, count=3, *, gradient=True):
    return ForwardBackward(model_id, data(seed, count), "cross_entropy", {}, gradient)


def optim(model_id, learning_rate=1e-2):
    return OptimStep(model_id, AdamParams(learning_rate=learning_rate))


def sampler(sampler_id, model_id=None, directory=None):
    return OpenSampler(sampler_id, model_id, None if directory is None else str(directory))


def sample(sampler_id, max_tokens=4, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=7, stop=())
    return Sample(sampler_id, (10, 20, 30), params, **fields)
