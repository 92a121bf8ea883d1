"""The bytes of a request's body: decompressed, within a limit, and JSON read from them."""

from __future__ import annotations

import zlib
from typing import Any

import orjson
import zstandard

from locojax.server.wire_counts import check_json_parts
from locojax.server.wire_errors import WireError

MAX_BODY_BYTES = 32 << 20
"""Of a body, compressed or not. A datum of a million tokens has 24 MB; the SDK cuts batches at 5 MB, five times that as
JSON."""

MAX_WINDOW_BYTES = 128 << 20
"""What a zstd frame may ask the decompressor to hold."""

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def media_type(header: str | None) -> str:
    """`application/json` of "Application/JSON; charset=utf-8"; "" of None."""
    return (header or "").partition(";")[0].strip().lower()


def decompressed(body: bytes, content_encoding: str | None, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body as it was before its Content-Encoding (zstd, gzip, or none).

    Raises:
      WireError: 415 for another encoding, 413 if it is longer than `max_bytes` before or after, 400 if it is damaged.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if len(body) > max_bytes:
        raise _too_long(f"{len(body)} bytes", max_bytes)
    if encoding == "identity":
        return body
    if encoding == "zstd":
        plain = _unzstd(body, max_bytes)
    elif encoding in ("gzip", "x-gzip"):
        plain = _gunzip(body, max_bytes)
    else:
        raise WireError(
            "The request's Content-Encoding is not one that is read",
            got=repr(encoding[:40]),
            expected="zstd, gzip or none",
            status=415,
        )
    if len(plain) > max_bytes:
        raise _too_long(f"more than that after {encoding}", max_bytes)
    return plain


def _unzstd(body: bytes, max_bytes: int) -> bytes:
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        size = zstandard.frame_content_size(body)
        if size > max_bytes:
            raise _too_long(f"{size} bytes after zstd", max_bytes)
        if size >= 0:
            return reader.decompress(body, max_output_size=max_bytes, allow_extra_data=False)
        return _unzstd_unsized(reader, body, max_bytes)
    except zstandard.ZstdError as error:
        raise WireError("The request body is not valid zstd", got=error) from None


def _unzstd_unsized(reader: zstandard.ZstdDecompressor, body: bytes, max_bytes: int) -> bytes:
    """A frame that does not say how long it is: 4 bytes may become 128 KiB, so it is fed in small slices."""
    stream = reader.decompressobj()
    parts, size = [], 0
    for start in range(0, len(body), 512):
        part = stream.decompress(body[start : start + 512])
        parts.append(part)
        size += len(part)
        if size > max_bytes or stream.eof:
            break
    if size <= max_bytes and (not stream.eof or stream.unused_data):
        raise WireError("The request body is not valid zstd", got="an incomplete frame, or bytes after it")
    return b"".join(parts)


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    reader = zlib.decompressobj(wbits=31)
    try:
        plain = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise WireError("The request body is not valid gzip", got=error) from None
    if not reader.eof and len(plain) <= max_bytes:
        raise WireError("The request body is not valid gzip", got="an incomplete stream")
    return plain


def _too_long(got: str, max_bytes: int) -> WireError:
    return WireError(
        "The request body is too long",
        got=got,
        expected=f"at most {max_bytes} bytes",
        remedy="Send fewer data in one request",
        status=413,
    )


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises WireError: not JSON (400), no object (422), or one of too many parts (413)."""
    check_json_parts(body)
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WireError("The request body is not JSON", got=error.msg) from None
    if type(found) is not dict:
        raise WireError("The request body is not a JSON object", got=type(found).__name__, status=422)
    return found
