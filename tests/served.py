"""The whole HTTP application over the fake engine: in this event loop, or behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx
from fake_engine import AUTHKEY, FakeEngine
from fastapi import FastAPI
from tiny import tiny_tokenizer

from locojax.server.app import Server, create_app
from locojax.server.auth import KeyRing
from locojax.server.service import Service, ServiceSettings

HEADERS = {"X-API-Key": "tml-test-key"}
MODEL = "test/tiny-model"


def make_app(
    folder: pathlib.Path, keys: Sequence[str] | None = None, ring: KeyRing | None = None, **settings: Any
) -> FastAPI:
    service = Service(ServiceSettings(data_dir=folder, **settings), str(folder / "engine.sock"), AUTHKEY)
    return create_app(service, keys=ring or KeyRing(keys), load_tokenizer=tiny_tokenizer)


@contextlib.asynccontextmanager
async def served(
    folder: pathlib.Path,
    keys: Sequence[str] | None = None,
    failures: Mapping[type, str] | None = None,
    headers: Mapping[str, str] = HEADERS,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose engine is ready. `failures`: see `FakeEngine`; `headers`: the client's."""
    app = make_app(folder, keys, **settings)
    engine = FakeEngine(str(folder / "engine.sock"), model_name=MODEL)
    engine.failures.update(failures or {})
    with engine:
        async with app.router.lifespan_context(app), client_of(app, headers=dict(headers)) as client:
            while (await client.get("/api/v1/healthz")).status_code != 200:
                await asyncio.sleep(0.01)
            yield client


def client_of(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    """Errors of the application are answers, as they are behind a socket."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    settings = {"base_url": "http://127.0.0.1", "headers": HEADERS, "timeout": 60, **options}
    return httpx.AsyncClient(transport=transport, **settings)


def as_another(client: httpx.AsyncClient, key: str) -> httpx.AsyncClient:
    """A client of the same application that has another API key."""
    transport = client._transport
    return httpx.AsyncClient(transport=transport, base_url=client.base_url, headers={"X-API-Key": key}, timeout=60)


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serves in a thread; the URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(app, timeout_graceful_shutdown=5)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


class Session:
    """A client's session and its one model: the requests that most tests begin with."""

    def __init__(self, client: httpx.AsyncClient):
        self.client = client
        self.session_id = ""
        self.model_id = ""
        self.seq_id = 0

    async def open(self, rank: int = 8) -> Session:
        self.session_id = (await self.post("create_session", tags=["t"], sdk_version="0.38.0"))["session_id"]
        promise = await self.post(
            "create_model", session_id=self.session_id, model_seq_id=0, base_model=MODEL,
            lora_config={"rank": rank, "seed": 1}, user_metadata={"renderer_name": "role_colon"},
        )  # fmt: skip
        self.model_id = (await self.result(promise))["model_id"]
        return self

    async def post(self, path: str, /, status: int = 200, **body: Any) -> Any:
        response = await self.client.post(f"/api/v1/{path}", json=body)
        assert response.status_code == status, (path, response.status_code, response.text)
        return response.json()

    async def operate(self, path: str, /, **body: Any) -> Any:
        """The result of a model's next operation."""
        self.seq_id += 1
        return await self.result(await self.post(path, model_id=self.model_id, seq_id=self.seq_id, **body))

    async def result(self, promise: dict[str, Any], accept: str = "application/json") -> Any:
        body = {"request_id": promise["request_id"], "allow_metadata_only": True}
        response = await self.client.post("/api/v1/retrieve_future", json=body, headers={"Accept": accept})
        assert response.status_code == 200, response.text
        return response.json() if accept == "application/json" else response.content
