"""What a person looks at: the web page, the state that it shows, and Prometheus metrics."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Mapping

from fastapi import APIRouter, Query, Request, Response

import locojax
from locojax.server.metrics import Metrics
from locojax.server.routes_base import Routes, answer
from locojax.server.service import Service
from locojax.server.service_errors import ServiceError

_FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageRoutes(Routes):
    """`/`, `/page/...`, `/metrics`, `/api/v1/_status` and `/api/v1/_archive`."""

    def __init__(self, service: Service, metrics: Metrics):
        self._service, self._metrics = service, metrics
        self._started = time.time()
        folder = importlib.resources.files("locojax.server") / "page"
        self._files = {name: (folder / name).read_bytes() for name in _FILES}

    def router(self) -> APIRouter:
        router = APIRouter()
        for path, function in (
            ("/", self.index),
            ("/page/{name}", self.file),
            ("/metrics", self.metrics),
            (self.prefix + "/_status", self.status),
            (self.prefix + "/_archive", self.archive),
        ):
            router.add_api_route(path, function, methods=["GET"], response_class=Response)
        return router

    async def index(self) -> Response:
        return self._file("index.html")

    async def file(self, name: str) -> Response:
        if name not in self._files:
            raise ServiceError(404, f"The page has no file {name!r}")
        return self._file(name)

    def _file(self, name: str) -> Response:
        return Response(self._files[name], media_type=_FILES[name], headers=dict(_HEADERS))

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._metrics.render(request.headers.get("accept"))
        return Response(body, headers={"Content-Type": content_type})

    async def status(self) -> Response:
        """All that the page shows but the checkpoints; `now` is the server's clock."""
        server = {"version": locojax.__version__, "started": self._started, "now": time.time()}
        response = answer({"server": server, **self._service.status()})
        response.headers["Cache-Control"] = "no-store"
        return response

    async def archive(
        self, request: Request, run_id: str = Query(max_length=512), checkpoint_id: str = Query(max_length=512)
    ) -> Response:
        """The address from which a browser can download a checkpoint as a tar: signed, because it sends no header."""
        base = str(request.base_url).rstrip("/")
        url, expires = await self._service.checkpoints.archive_url(run_id, checkpoint_id, base)
        return answer({"url": url, "expires": expires})
