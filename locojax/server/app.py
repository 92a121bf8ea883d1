"""The HTTP application: all routes over one service, behind one gate that knows keys, counts and catches.

    uvicorn -> Gate (key? count, time, last resort) -> route -> Service

What a client did wrong is a 4xx whose text says so; a 5xx is a bug of ours, logged under an id that the client is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pydantic.json_schema
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import locojax
from locojax.errors import LocoError, RequestError
from locojax.server import auth, callers, openai, openai_requests, requests
from locojax.server.metrics import Metrics
from locojax.server.openai_requests import ChatTokenizer
from locojax.server.routes_base import Routes, Workers, answer
from locojax.server.routes_checkpoints import DOWNLOAD_PATH, CheckpointRoutes
from locojax.server.routes_openai import OpenAIRoutes
from locojax.server.routes_page import PageRoutes
from locojax.server.routes_sampling import SamplingRoutes
from locojax.server.routes_sessions import SessionRoutes
from locojax.server.routes_training import TrainingRoutes
from locojax.server.service import Service
from locojax.server.service_errors import ServiceError
from locojax.server.wire_errors import WireError

_log = logging.getLogger(__name__)

_API = Routes.prefix
_KEYLESS = (_API + "/healthz", _API + DOWNLOAD_PATH)  # health tells nothing secret; download URLs are signed
_PERSONS = ("/", "/metrics", _API + "/_status", _API + "/_archive")
_OPENAI = ("/v1/", "/oai/")


def create_app(service: Service, *, keys: auth.KeyRing, load_tokenizer: Callable[[], ChatTokenizer]) -> FastAPI:
    """The application; its lifespan starts and stops `service`.

    Args:
      keys: who may come in.
      load_tokenizer: for the OpenAI endpoints; called in a thread, at their first request.
    """
    workers = Workers()
    metrics = Metrics(service.status)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.keep_models()
            await service.stop()
            workers.close()

    # No /docs: those pages load their scripts from the internet.
    app = FastAPI(
        title="LoCoJAX, a Tinker server", version=locojax.__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    sampling = SamplingRoutes(service, workers)
    for routes in (
        SessionRoutes(service, workers),
        TrainingRoutes(service, workers),
        sampling,
        CheckpointRoutes(service, workers),
        PageRoutes(service, metrics),
        OpenAIRoutes(service, workers, load_tokenizer),
    ):
        app.include_router(routes.router())
    app.add_exception_handler(LocoError, _refused)
    app.add_exception_handler(RequestValidationError, _refused_parameters)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(Gate, keys=keys, metrics=metrics)
    app.state.drain = sampling.drain
    app.openapi = _Schema(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    return app


class Server(uvicorn.Server):
    """uvicorn, which would wait for every long poll when it is told to stop."""

    def __init__(self, app: FastAPI, **settings: Any):
        """`settings`: of `uvicorn.Config`."""
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, ws="none", **settings))
        self._drain = app.state.drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain()
        await super().shutdown(sockets)


class Gate:
    """The outermost layer: lets in who has a key, counts and times what is answered, and catches what nobody did."""

    def __init__(self, app: ASGIApp, keys: auth.KeyRing, metrics: Metrics):
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        watched = _Watched(send)
        try:
            refusal = self._refusal(scope)
            with callers.calling(self._caller(scope)):
                await (refusal or self._app)(scope, receive, watched)
        except ClientDisconnect:
            pass  # nobody is left to be answered
        except asyncio.CancelledError:
            # The server stops, and this has taken longer than it waits. Nothing outside could make use of the error.
            if watched.status is None:
                text = "The server is being stopped or restarted. Send the request again."
                await _error(scope["path"], text, 503)(scope, receive, watched)
        except Exception:  # the last resort: a bug must reach the log with its trace, and the client as an id
            name = secrets.token_hex(6)
            _log.exception("error %s: %s %s", name, scope["method"], scope["path"])
            if watched.status is None:
                text = f"The server has failed (error {name}); its log says how."
                await answer({"detail": text}, 500)(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            status = watched.status or 499  # nginx's number for a client that left
            self._metrics.count(route, scope["method"], status, time.perf_counter() - began)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not pass; None: it may."""
        path, headers = scope["path"], _headers(scope)
        if self._keys.any_key and not auth.names_loopback(headers.get("host")):
            text = (
                "A server without API keys answers only to localhost, 127.0.0.1 and ::1. "
                f"Got: {headers.get('host')!r}. Start it with --keys-file to use it under another name."
            )
            return _error(path, text, 403)
        if path in _KEYLESS or self._opens(path, scope["method"], headers):
            return None
        refusal = _error(path, self._keys.refusal(auth.bearer_key(headers)), 401)
        if path in _PERSONS or path.startswith("/page/"):
            refusal.headers["WWW-Authenticate"] = 'Basic realm="LoCoJAX: any name, and an API key as the password"'
        return refusal

    def _caller(self, scope: Scope) -> callers.Caller:
        """Whose request it is. One that needs no key is nobody's: its signature says what it may have."""
        headers = _headers(scope)
        key = auth.bearer_key(headers)
        return self._keys.caller(key if self._keys.accepts(key) else auth.page_key(headers))

    def _opens(self, path: str, method: str, headers: dict[str, str]) -> bool:
        if self._keys.accepts(auth.bearer_key(headers)):
            return True
        # A browser adds Basic credentials to requests that other sites make it send: those may at most read.
        harmless = method in ("GET", "HEAD") or auth.sent_by_page(headers)
        if self._keys.any_key:
            return path in _PERSONS or path.startswith("/page/") or auth.sent_by_page(headers)
        return harmless and self._keys.accepts(auth.page_key(headers))


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


class _Watched:
    """A `send` that remembers the status."""

    def __init__(self, send: Send):
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _error(path: str, text: str, status: int) -> Response:
    """An error in the form that the clients of that path read."""
    return answer(openai.error_body(text, status) if path.startswith(_OPENAI) else {"detail": text}, status)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, WireError | ServiceError):
        status = error.status
    elif isinstance(error, RequestError):
        status = 400
    else:
        # Something of this server's own is missing or broken; repeating the request won't mend it, so it is no 5xx.
        _log.error("%s %s: %s", request.method, request.url.path, error)
        status = 400
    return _error(request.url.path, str(error), status)


async def _refused_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return _error(request.url.path, "; ".join(found) + ".", 422)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code in (404, 405):
        text = f"This server has no {request.method} {request.url.path}."
    response = _error(request.url.path, text, error.status_code)
    response.headers.update(error.headers or {})
    return response


class _Schema:
    """The OpenAPI document, with the types of the bodies that routes read by themselves."""

    def __init__(self, app: FastAPI):
        self._app = app
        self._made: dict[str, Any] | None = None

    def __call__(self) -> dict[str, Any]:
        if self._made is None:
            made = get_openapi(title=self._app.title, version=self._app.version, routes=self._app.routes)
            _, definitions = pydantic.json_schema.models_json_schema(
                [(kind, "validation") for kind in _bodies()], ref_template="#/components/schemas/{model}"
            )
            made.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            self._made = made
        return self._made


def _bodies() -> list[type[pydantic.BaseModel]]:
    found = [*vars(requests).values(), *vars(openai_requests).values()]
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, requests.Request)]
    return list(dict.fromkeys(kinds))
