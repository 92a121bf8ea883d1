"""Routes of training runs and checkpoints, and the download of their files by signed URLs."""

from __future__ import annotations

import datetime
import email.utils
import os
import pathlib
import queue
import re
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from fastapi import Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from locojax.server import requests
from locojax.server.routes_base import TableRoutes, Workers, answer
from locojax.server.routes_sessions import Limit, Offset
from locojax.server.service import Service

DOWNLOAD_PATH = "/_download"
"""The one route that needs no API key: its URLs are signed."""

_PART_BYTES = 256 << 10
_PARTS_AHEAD = 8

AccessScope = Literal["owned", "accessible"]


class CheckpointRoutes(TableRoutes):
    """`/training_runs`, `/checkpoints`, `/weights_info`, `/copy_weights`. A checkpoint's id contains a slash."""

    def __init__(self, service: Service, workers: Workers):
        self._desk = service.checkpoints
        self._workers = workers

    def table(self) -> Sequence[tuple[str, str, Callable[..., Any], type[requests.Request] | None]]:
        one = "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}"
        return [
            ("POST", "/weights_info", self.weights_info, requests.WeightsInfo),
            ("POST", "/copy_weights", self.copy, requests.CopyWeights),
            ("GET", "/checkpoints", self.all, None),
            ("GET", DOWNLOAD_PATH, self.download, None),
            ("GET", "/training_runs", self.runs, None),
            ("GET", "/training_runs/{run_id}/checkpoints", self.of_run, None),
            ("POST", one + "/publish", self.publish, None),
            ("DELETE", one + "/publish", self.unpublish, None),
            ("PUT", one + "/ttl", self.set_ttl, requests.SetTtl),
            ("GET", one + "/external_weights_urls", self.external_urls, None),
            ("GET", one + "/archive", self.archive, None),
            ("DELETE", one, self.delete, None),
            ("GET", "/training_runs/{run_id}", self.run, None),
        ]

    async def runs(self, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned") -> Response:
        return answer(await self._desk.training_runs(limit=limit, offset=offset))

    async def run(self, run_id: str, access_scope: AccessScope = "owned") -> Response:
        return answer(await self._desk.training_run(run_id))

    async def of_run(self, request: Request, run_id: str) -> Response:
        return answer(_as_known(request, await self._desk.of_run(run_id)))

    async def all(self, request: Request, limit: Limit = 100, offset: Offset = 0) -> Response:
        return answer(_as_known(request, await self._desk.all(limit=limit, offset=offset)))

    async def delete(self, run_id: str, checkpoint_id: str) -> Response:
        await self._desk.delete(run_id, checkpoint_id)
        return answer()

    async def publish(self, run_id: str, checkpoint_id: str) -> Response:
        await self._desk.publish(run_id, checkpoint_id, True)
        return answer()

    async def unpublish(self, run_id: str, checkpoint_id: str) -> Response:
        await self._desk.publish(run_id, checkpoint_id, False)
        return answer()

    async def set_ttl(self, request: Request, run_id: str, checkpoint_id: str) -> Response:
        body = await self._workers.parse(request, requests.SetTtl)
        await self._desk.set_ttl(run_id, checkpoint_id, body.ttl_seconds)
        return answer()

    async def external_urls(self, request: Request, run_id: str, checkpoint_id: str) -> Response:
        return answer(await self._desk.external_urls(run_id, checkpoint_id, _base_url(request)))

    async def archive(self, request: Request, run_id: str, checkpoint_id: str) -> Response:
        """SDKs up to 0.30 read the address from `Location`, and when it ends from `Expires`."""
        url, expires = await self._desk.archive_url(run_id, checkpoint_id, _base_url(request))
        response = answer({"url": url, "expires": expires}, 302)
        moment = datetime.datetime.fromisoformat(expires).astimezone(datetime.UTC)
        response.headers.update({"Location": url, "Expires": email.utils.format_datetime(moment, usegmt=True)})
        return response

    async def download(
        self,
        path: str = Query(max_length=4096),
        expires: str = Query(max_length=64),
        signature: str = Query(max_length=256),
    ) -> Response:
        """A file of a checkpoint, or the whole as a tar, by a URL that the server itself has signed."""
        found = await self._desk.verify_download(path, expires, signature)
        if found.is_dir():
            name = f"{found.parent.name}-{found.name}.tar"
            headers = {"Content-Disposition": f'attachment; filename="{_plain(name)}"'}
            return StreamingResponse(tar_stream(found), media_type="application/x-tar", headers=headers)
        return FileResponse(found, media_type="application/octet-stream", filename=found.name)

    async def weights_info(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.WeightsInfo)
        return answer(await self._desk.weights_info(body.tinker_path))

    async def copy(self, request: Request) -> Response:
        body = await self._workers.parse(request, requests.CopyWeights)
        key = request.headers.get("x-idempotency-key")
        return answer(await self._desk.copy(body.model_dump(mode="json"), idempotency_key=key))


def _as_known(request: Request, listed: dict[str, Any]) -> dict[str, Any]:
    """A list of checkpoints as this client can read it: SDKs before 0.30 reject a whole list for one external entry."""
    version = re.match(r"(\d+)\.(\d+)", request.headers.get("x-stainless-package-version", ""))
    if version is None or (int(version[1]), int(version[2])) >= (0, 30):
        return listed
    return {**listed, "checkpoints": [one for one in listed["checkpoints"] if one["checkpoint_type"] != "external"]}


def _base_url(request: Request) -> str:
    """The server as this client calls it: what a signed URL must begin with to reach it the same way."""
    return str(request.base_url).rstrip("/")


def _plain(name: str) -> str:
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in name)


def tar_stream(directory: pathlib.Path) -> Iterator[bytes]:
    """A tar of the regular files of `directory`, piece by piece: nothing is written to disk, little is held."""
    parts = _Parts()
    writer = threading.Thread(target=_write_tar, args=(directory, parts), name="archive", daemon=True)
    writer.start()
    try:
        yield from parts
    finally:
        parts.close()
        writer.join()


class _Parts:
    """A file that one thread writes and another reads: at most a few parts wait between them."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_PARTS_AHEAD)
        self._closed = threading.Event()

    def write(self, data: bytes) -> int:
        self._put(bytes(data))
        return len(data)

    def finish(self, error: BaseException | None) -> None:
        """The writer has ended."""
        self._put(error)

    def close(self) -> None:
        """The reader wants no more."""
        self._closed.set()

    def __iter__(self) -> Iterator[bytes]:
        while (part := self._queue.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part

    def _put(self, part: bytes | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(part, timeout=0.5)
                return
            except queue.Full:
                continue
        if isinstance(part, bytes):
            raise BrokenPipeError("the reader of the archive has left")


def _write_tar(directory: pathlib.Path, parts: _Parts) -> None:
    error: BaseException | None = None
    try:
        with tarfile.open(fileobj=parts, mode="w|", bufsize=_PART_BYTES) as archive:  # type: ignore[call-overload]
            for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
                if entry.is_file(follow_symlinks=False):  # a link could lead out of the checkpoint
                    archive.add(entry.path, arcname=entry.name, recursive=False)
    except OSError as found:  # the checkpoint may be deleted meanwhile, or the reader may leave
        error = found
    parts.finish(error)
