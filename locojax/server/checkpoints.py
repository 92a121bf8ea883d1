"""Checkpoints on disk, their names, and the URLs by which their files may be fetched without an API key.

    <data dir>/checkpoints/<run>/<kind>/<name>/      every part quoted as in a URL, so that none can leave the folder
    <data dir>/incoming/<random>/                     what is being written, and what is being deleted

A checkpoint is written under `incoming` and renamed into its place, so a name always has a whole directory or none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import pathlib
import shutil
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any

from locojax.server.service_errors import ServiceError
from locojax.types import PEFT_FILES

KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The segment of a tinker:// path -> `checkpoint_type`."""

MAX_NAME = 128
MAX_FILE_NAME = 255  # bytes; of common file systems

MIN_TTL, MAX_TTL = 3600, 10 * 366 * 86400


@dataclasses.dataclass(frozen=True)
class TinkerPath:
    """Example: str(TinkerPath("s1:train:0", "weights", "final")) == "tinker://s1:train:0/weights/final"."""

    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """ServiceError 400: it isn't a path of three parts."""
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS or not parts[0]:
            raise ServiceError(
                400,
                "This is no path of a checkpoint",
                got=repr(text[:200]),
                expected="tinker://<model id>/<weights, sampler_weights or external_weights>/<name>",
            )
        return cls(parts[0], parts[1], checked_name(parts[2]))

    @classmethod
    def of(cls, run_id: str, checkpoint_id: str) -> TinkerPath:
        """Of a run and `<kind>/<name>`. ServiceError 400: the kind is missing."""
        kind, slash, name = checkpoint_id.partition("/")
        if not slash or kind not in KINDS:
            raise ServiceError(
                400,
                f"The checkpoint id {checkpoint_id[:200]!r} doesn't say of which kind it is",
                expected="weights/<name>, sampler_weights/<name> or external_weights/<name>",
            )
        return cls(run_id, kind, checked_name(name))

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """The name, if a checkpoint may have it. ServiceError 400."""
    if not name or len(name) > MAX_NAME or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ServiceError(
            400,
            "A checkpoint can't have this name",
            got=repr(name[:200]),
            expected=f"1 to {MAX_NAME} printable characters, no slash or backslash, not '.' or '..'",
        )
    return name


def checked_ttl(ttl_seconds: int | None) -> int | None:
    """The time to live, if it is allowed. ServiceError 400."""
    if ttl_seconds is not None and not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise ServiceError(
            400, "ttl_seconds is out of range", got=ttl_seconds, expected=f"{MIN_TTL} to {MAX_TTL}, or null for ever"
        )
    return ttl_seconds


class CheckpointFiles:
    """The folders. Its methods block: call them in a thread."""

    def __init__(self, data_dir: pathlib.Path):
        self.root = (data_dir / "checkpoints").resolve()
        self._incoming = (data_dir / "incoming").resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self._incoming.mkdir(parents=True, exist_ok=True)

    def directory(self, path: TinkerPath) -> pathlib.Path:
        """Where a checkpoint is or would be. ServiceError 400: its name is too long for a folder."""
        parts = [_quoted(part) for part in (path.run_id, path.kind, path.name)]
        return self.root.joinpath(*parts)

    def new_directory(self) -> pathlib.Path:
        """Where to write a checkpoint; it doesn't exist yet."""
        return self._incoming / uuid.uuid4().hex

    def place(self, written: pathlib.Path, path: TinkerPath) -> int:
        """Puts what was written in its place, instead of what is there; returns its size in bytes."""
        final = self.directory(path)
        if not written.is_dir():  # before what is there is taken away
            raise FileNotFoundError(f"the engine wrote nothing at {written}")
        size = size_of(written)
        doomed = self._take_away(final)
        while True:
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                written.rename(final)
                break
            except FileNotFoundError:
                # Somebody who deleted the last other checkpoint has removed the folder in between.
                if final.parent.is_dir() or not written.exists():
                    raise
        if doomed is not None:
            shutil.rmtree(doomed)
        return size

    def remove(self, path: TinkerPath) -> None:
        """Deletes a checkpoint's directory, if it is there; it is gone from its place before its files go."""
        final = self.directory(path)
        doomed = self._take_away(final)
        if doomed is None:
            return
        shutil.rmtree(doomed)
        for parent in (final.parent, final.parent.parent):
            try:
                parent.rmdir()
            except OSError:
                return  # others are in it

    def _take_away(self, final: pathlib.Path) -> pathlib.Path | None:
        doomed = self.new_directory()
        try:
            return final.rename(doomed)
        except FileNotFoundError:
            return None

    def copy(self, source: TinkerPath, target: TinkerPath) -> int:
        """Copies a checkpoint; returns its size."""
        written = self.new_directory()
        shutil.copytree(self.directory(source), written)
        return self.place(written, target)

    def clean(self, keep: set[str]) -> None:
        """Deletes what was being written or deleted when the server last ended, except these directories."""
        kept = {pathlib.Path(one).name for one in keep}
        for left in self._incoming.iterdir():
            # The engine, which may have lived on, writes `.<name>.<random>.unfinished` and renames it at last.
            if left.name.lstrip(".").partition(".")[0] not in kept:
                shutil.rmtree(left, ignore_errors=True)


def read_peft(directory: pathlib.Path) -> dict[str, Any]:
    """What a PEFT directory says of its adapter: `r`, `target_modules`, and `digest` of its files. ServiceError 400."""
    digest = hashlib.sha256()
    try:
        for file in PEFT_FILES:
            digest.update((directory / file).read_bytes())
        found = json.loads((directory / PEFT_FILES[0]).read_text(encoding="utf-8"))
        rank, modules = int(found["r"]), found["target_modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            400,
            f"{directory} holds no PEFT adapter: {error}",
            expected=f"{PEFT_FILES[0]} with r and target_modules, and {PEFT_FILES[1]} beside it",
        ) from error
    modules = [modules] if isinstance(modules, str) else list(modules)
    return {"r": rank, "target_modules": modules, "digest": digest.hexdigest()[:32]}


def size_of(directory: pathlib.Path) -> int:
    """Bytes of all files below."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _quoted(part: str) -> str:
    quoted = urllib.parse.quote(part, safe="")
    if quoted in ("", ".", "..") or len(quoted) > MAX_FILE_NAME:
        raise ServiceError(400, "This can't be part of a checkpoint's path", got=repr(part[:200]))
    return quoted


class UrlSigner:
    """Makes and verifies signed URLs: HMAC-SHA256 (RFC 2104) of the path and of when it expires."""

    def __init__(self, key: bytes):
        self._key = key

    def sign(self, path: str, expires: int) -> str:
        """The signature, in hexadecimal digits."""
        return hmac.new(self._key, f"{expires}\n{path}".encode(), hashlib.sha256).hexdigest()

    def url(self, base_url: str, path: str, expires: int) -> str:
        query = {"path": path, "expires": str(expires), "signature": self.sign(path, expires)}
        return f"{base_url.rstrip('/')}/api/v1/_download?{urllib.parse.urlencode(query)}"

    def verify(self, path: str, expires: str, signature: str, now: float) -> None:
        """ServiceError 403: forged, or expired."""
        until = int(expires) if expires.isascii() and expires.isdecimal() else 0
        # As bytes: compare_digest refuses text that isn't ASCII.
        if not hmac.compare_digest(self.sign(path, until).encode(), signature.encode()):
            raise ServiceError(403, "The download URL's signature is wrong", remedy="Ask for new URLs")
        if until < now:
            raise ServiceError(403, "The download URL has expired", remedy="Ask for new URLs")
