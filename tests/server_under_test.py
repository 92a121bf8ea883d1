"""A service over a fake engine, and the requests that its tests send: helpers of tests/test_service*.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import pathlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import fake_engine
import numpy as np
from databases import database_for

from locojax.hosts.protocol import AdapterConfig, Sample
from locojax.server.futures import FutureAnswer, Promise
from locojax.server.service import Service, ServiceSettings
from locojax.server.wire import Provenance, SampleBody, TrainBody
from locojax.types import AdamParams, Datum, SamplingParams

T = TypeVar("T")

MODEL = "test/tiny-model"
ADAM = AdamParams(learning_rate=1e-3)
ADAPTER = AdapterConfig(8, 0)


def run(test: Awaitable[T], seconds: float = 60.0) -> T:
    """Runs a coroutine in an event loop of its own, with a deadline."""

    async def main() -> T:
        async with asyncio.timeout(seconds):
            return await test

    return asyncio.run(main())


def socket_path() -> str:
    """A short path: sockets' paths are limited to about 100 bytes, pytest's folders are long."""
    return str(pathlib.Path(tempfile.mkdtemp(prefix="loco-")) / "engine.sock")


@contextlib.asynccontextmanager
async def serving(
    tmp_path: pathlib.Path, engine: fake_engine.FakeEngine | None = None, *, wait: bool = True, **settings: Any
) -> AsyncIterator[tuple[Service, fake_engine.FakeEngine]]:
    """A started service and its engine; both are stopped at the end, but an engine that was given isn't."""
    own = fake_engine.FakeEngine(socket_path()).start() if engine is None else engine
    service = service_at(tmp_path, own.address, **settings)
    try:
        await service.start()
        if wait:
            await until(lambda: service.health()[0])
        yield service, own
    finally:
        await service.stop()
        if engine is None:
            await asyncio.to_thread(own.stop)


def with_service(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Makes a coroutine a test: it is given a started `service` and, if it asks for it, its `engine`.

    What else it asks for are pytest's fixtures and parameters. `settings`: the service's.
    """

    def made(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        asked = dict(inspect.signature(test).parameters)

        @functools.wraps(test)
        def wrapped(tmp_path: pathlib.Path, **others: Any) -> None:
            async def body() -> None:
                async with serving(tmp_path, **settings) as (service, engine):
                    given = {"service": service, "engine": engine, "tmp_path": tmp_path, **others}
                    await test(**{name: given[name] for name in asked})

            run(body())

        # pytest reads off the signature what to provide.
        fixtures = ["tmp_path", *(name for name in asked if name not in ("service", "engine", "tmp_path"))]
        kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in fixtures]
        wrapped.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        return wrapped

    return made


def service_at(tmp_path: pathlib.Path, address: str, **settings: Any) -> Service:
    defaults: dict[str, Any] = {
        "model_names": (MODEL,), "tick": 0.05, "long_poll": 5.0, "database": database_for(tmp_path)
    }  # fmt: skip
    return Service(ServiceSettings(tmp_path, **(defaults | settings)), address, fake_engine.AUTHKEY)


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for a condition; fails if it doesn't come."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def session_of(service: Service) -> str:
    return (await service.sessions.create(tags=[], sdk_version="0.38.0"))["session_id"]


async def model_of(service: Service, session_id: str, number: int = 0, **kwargs: Any) -> str:
    """A model that has been created."""
    promise = await service.training.create_model(session_id, number, MODEL, ADAPTER, **kwargs)
    await result(service, promise)
    assert promise.model_id is not None
    return promise.model_id


def datum(tokens: Sequence[int] = (5, 6, 7), **inputs: Sequence[float]) -> Datum:
    arrays: dict[str, np.ndarray] = {"target_tokens": np.asarray([*tokens[1:], 9], np.int64)}
    arrays |= {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    return Datum(np.asarray(tokens, np.int32), arrays)


def digest_of(*content: Any) -> str:
    """As long as a real one: databases hold the columns to their lengths, all but SQLite."""
    return hashlib.sha256(repr(content).encode()).hexdigest()


def train_body(
    model_id: str, seq_id: int | None, *, tokens: Sequence[int] = (5, 6, 7), gradient: bool = True,
    loss: str = "cross_entropy", data: tuple[Datum, ...] | None = None,
    provenance: tuple[Provenance | None, ...] | None = None,
) -> TrainBody:  # fmt: skip
    data = (datum(tokens),) if data is None else data
    digest = digest_of([(one.tokens.tolist(), {k: v.tolist() for k, v in one.inputs.items()}) for one in data], loss)
    provenance = (None,) * len(data) if provenance is None else provenance
    return TrainBody(model_id, seq_id, data, loss, {}, gradient, provenance, digest)


def sample_body(
    sampler_id: str | None, seq_id: int | None, *, prompt: tuple[int, ...] = (5, 6, 7), num_samples: int = 1,
    max_tokens: int = 4, seed: int | None = 1, record: bool = False, temperature: float = 1.0, **kwargs: Any,
) -> SampleBody:  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
    sample = Sample("", prompt, params, num_samples)
    body = SampleBody(sampler_id, None, None, seq_id, sample, record, None, digest_of(sample))
    return dataclasses.replace(body, **kwargs)


async def answer(service: Service, promise: Promise | str, timeout: float = 5.0) -> FutureAnswer:
    request_id = promise if isinstance(promise, str) else promise.request_id
    return await service.futures.retrieve(request_id, timeout=timeout)


async def result(service: Service, promise: Promise | str) -> Any:
    """The result of a future that must succeed."""
    found = await answer(service, promise)
    assert found.state == "done", (found.state, found.error, found.queue_state_reason)
    service.futures.delivered(found.request_id)
    return found.result


async def failure(service: Service, promise: Promise | str) -> tuple[str, str]:
    """Category and text of a future that must fail."""
    found = await answer(service, promise)
    assert found.state == "failed", found
    assert found.category is not None and found.error is not None
    return found.category, found.error
