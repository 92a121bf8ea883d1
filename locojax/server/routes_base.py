"""What every route does: read a body within its limit, parse it, answer JSON. Errors become `{"detail": text}`."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from fastapi import APIRouter, Request, Response

from locojax.server import requests
from locojax.server.wire_content import decompressed
from locojax.server.wire_errors import WireError

P = ParamSpec("P")
T = TypeVar("T")

_INLINE_BYTES = 64 << 10  # a longer body is parsed by a thread, so that heartbeats don't wait for it


class Workers:
    """A few threads for what takes milliseconds of CPU: decoding bodies, encoding results, packing archives."""

    def __init__(self, num_threads: int = 4):
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="wire")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    async def parse(
        self, request: Request, kind: type[requests.AnyRequest], max_bytes: int = requests.MAX_JSON_BYTES
    ) -> requests.AnyRequest:
        """The JSON body of `request` as `kind`. Raises WireError."""
        body = await read_body(request, max_bytes)
        if encoding := request.headers.get("content-encoding"):
            body = await self.run(decompressed, body, encoding, max_bytes)
        if len(body) > _INLINE_BYTES:
            return await self.run(requests.parse, kind, body, max_bytes)
        return requests.parse(kind, body, max_bytes)

    def close(self) -> None:
        """Waits for what is being computed."""
        self._pool.shutdown(cancel_futures=True)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; WireError (413) as soon as it is known to be too long. ClientDisconnect: the client left."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_long(int(announced), max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_long(size, max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_long(size: int, max_bytes: int) -> WireError:
    return WireError(
        "The request body is too long",
        got=f"{size:,} bytes or more",
        expected=f"at most {max_bytes:,}",
        remedy="Send the data in several requests",
        status=413,
    )


def answer(body: Mapping[str, Any] | Sequence[Any] | None = None, status: int = 200) -> Response:
    """A JSON response; nothing to say is `{}`, because clients parse every body."""
    return Response(to_json({} if body is None else body), status, media_type="application/json")


def to_json(value: Any) -> bytes:
    """JSON in UTF-8. What JSON has no number for (NaN, infinities) is left out of mappings, and null in lists."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")  # a lone surrogate can't be sent


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items() if not _is_strange(inner)}
    if isinstance(value, list | tuple):
        return [None if _is_strange(inner) else _finite(inner) for inner in value]
    return value


def _is_strange(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def describe_body(kind: type[requests.Request], media_type: str = "application/json") -> dict[str, Any]:
    """For `openapi_extra`: the body that a route reads by itself. `app` puts the types into the components."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


class Routes(abc.ABC):
    """A group of routes."""

    prefix = "/api/v1"

    @abc.abstractmethod
    def router(self) -> APIRouter:
        """The group's routes, most specific first."""


class TableRoutes(Routes):
    """Routes that are listed in a table.

    Entries: method, path (without the prefix), the function, and the type of its JSON body, None if it has none.
    """

    @abc.abstractmethod
    def table(self) -> Sequence[tuple[str, str, Callable[..., Any], type[requests.Request] | None]]:
        """The entries, most specific first."""

    def router(self) -> APIRouter:
        """The routes in the table's order."""
        router = APIRouter(prefix=self.prefix)
        for method, path, function, body in self.table():
            router.add_api_route(
                path,
                function,
                methods=[method],
                response_class=Response,
                openapi_extra=None if body is None else describe_body(body),
            )
        return router
