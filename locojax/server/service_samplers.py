"""The samplers that the engine holds for us: opened when needed, again after it was restarted, closed when idle.

Several sampling sessions may use one: all of the base model, all of one checkpoint, all `inflight` ones of a model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable

from locojax.hosts.protocol import CloseSampler, OpenSampler, Sample
from locojax.server.service_engine import RESTARTED, EngineDesk, EngineFailed
from locojax.server.service_errors import ServiceError
from locojax.server.store_tables import FutureRecord

BASE = "base"
IDLE_SECONDS = 300.0
MAX_TRIES = 3
"""To open a sampler, when the engine is restarted each time."""


@dataclasses.dataclass
class _EngineSampler:
    engine_id: str
    directory: str | None
    reopens: bool  # False: made of a model as it was, so only the engine has its weights
    state: str = "closed"  # or opening, or open
    num_tries: int = 0
    last_used: float = dataclasses.field(default_factory=time.time)
    waiting: dict[str, tuple[FutureRecord, Sample]] = dataclasses.field(default_factory=dict)
    waiters: list[asyncio.Future[None]] = dataclasses.field(default_factory=list)


class EngineSamplers:
    """By the engine's sampler id. `refuse` is told (record, category, message) of samples whose sampler won't open."""

    def __init__(self, engine: EngineDesk, refuse: Callable[[FutureRecord, str, str], None]):
        self._engine, self._refuse = engine, refuse
        self._samplers: dict[str, _EngineSampler] = {}

    def add(self, engine_id: str, directory: str | None, *, reopens: bool = True) -> None:
        """Makes a sampler known: of the base model, of a PEFT directory, or (`reopens` False) one that is open."""
        if engine_id not in self._samplers:
            self._samplers[engine_id] = _EngineSampler(engine_id, directory, reopens)
        if not reopens:
            self._samplers[engine_id].state = "open"

    def holds(self, engine_id: str) -> bool:
        return engine_id in self._samplers

    def last_used(self, engine_id: str) -> float:
        """When it was last sampled from, or made."""
        return self._samplers[engine_id].last_used

    def can_open(self, engine_id: str) -> bool:
        """It can be opened, also after a restart of the engine."""
        sampler = self._samplers.get(engine_id)
        return sampler is not None and sampler.reopens

    def open_soon(self, engine_id: str) -> None:
        """Begins to open it, if it isn't open."""
        sampler = self._samplers[engine_id]
        sampler.last_used = time.time()
        if sampler.state == "closed" and sampler.reopens:
            sampler.state = "opening"
            opening = self._engine.call(OpenSampler(engine_id, directory=sampler.directory))
            opening.add_done_callback(lambda done: self._answered(sampler, done))

    async def opened(self, engine_id: str) -> None:
        """Returns when it is open. ServiceError: it can't be opened."""
        self.open_soon(engine_id)
        sampler = self._samplers[engine_id]
        if sampler.state == "opening":
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            sampler.waiters.append(waiter)
            await waiter

    def run(self, record: FutureRecord, sample: Sample) -> None:
        """Hands a sample to the engine, once its sampler is open there."""
        sampler = self._samplers[sample.sampler_id]
        sampler.last_used = time.time()
        if sampler.state == "open":
            self._engine.run(record, sample)
        else:
            sampler.waiting[record.request_id] = (record, sample)
            self.open_soon(sample.sampler_id)

    def withdraw(self, record: FutureRecord) -> bool:
        """Takes back a sample that waits for its sampler."""
        sampler = self._samplers.get(record.detail["engine_id"])
        return sampler is not None and sampler.waiting.pop(record.request_id, None) is not None

    def close(self, engine_id: str) -> None:
        """Forgets a sampler; what it samples is aborted."""
        sampler = self._samplers.pop(engine_id, None)
        if sampler is not None:
            if sampler.state != "closed":
                self._engine.call(CloseSampler(engine_id))
            self._give_up(sampler, "user", "The sampler was closed.")

    def close_idle(self, used: set[str], now: float) -> None:
        """Closes what no sampling session uses and has not been used for a while."""
        for engine_id, sampler in list(self._samplers.items()):
            is_idle = not sampler.waiting and sampler.last_used + IDLE_SECONDS < now
            if sampler.directory is not None and engine_id not in used and is_idle:
                self.close(engine_id)

    def engine_started(self) -> None:
        """A new engine holds none of them."""
        for engine_id, sampler in list(self._samplers.items()):
            if sampler.reopens:
                sampler.state = "closed" if sampler.state == "open" else sampler.state
            else:
                del self._samplers[engine_id]

    def engine_ready(self, open_samplers: Iterable[str], expected: set[str]) -> None:
        """Squares what we know with what the engine holds; `expected`: what it is about to open for a client."""
        for engine_id in open_samplers:
            sampler = self._samplers.get(engine_id)
            if sampler is not None:
                sampler.state = "open" if sampler.state == "closed" else sampler.state
            elif engine_id not in expected:
                self._engine.call(CloseSampler(engine_id))  # of a session that ended while we were away
        for sampler in self._samplers.values():
            if sampler.waiting:
                self.open_soon(sampler.engine_id)

    def _answered(self, sampler: _EngineSampler, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        sampler.state = "open" if error is None else "closed"
        if error is None:
            sampler.num_tries = 0
            waiting, sampler.waiting = sampler.waiting, {}
            for record, sample in waiting.values():
                self._engine.run(record, sample)
            self._wake(sampler, None)
            return
        sampler.num_tries += 1
        category, message = "server", str(error)
        if isinstance(error, EngineFailed):
            category, message = error.category, error.message
        if message == RESTARTED and sampler.num_tries < MAX_TRIES:
            self.open_soon(sampler.engine_id)
        else:
            self._give_up(sampler, category, f"The sampler's weights could not be loaded: {message}")

    def _give_up(self, sampler: _EngineSampler, category: str, message: str) -> None:
        waiting, sampler.waiting, sampler.num_tries = sampler.waiting, {}, 0
        for record, _ in waiting.values():
            self._refuse(record, category, message)
        self._wake(sampler, ServiceError(400 if category == "user" else 500, message))

    @staticmethod
    def _wake(sampler: _EngineSampler, error: ServiceError | None) -> None:
        waiters, sampler.waiters = sampler.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
