"""How many parts a body has, counted before a parser gives each of them memory of its own.

A parser spends some 50 bytes and more on a part of 2, so a large body of nothing but empty parts would take gigabytes
and seconds. A body that is small cannot; one that is large and honest has few parts for its size.
"""

from __future__ import annotations

from locojax.server.wire_errors import WireError

MAX_PARTS = 200_000
"""Fields of a protobuf body (data, their chunks and tensors), or objects and lists of a JSON body."""

SMALL_BYTES = 4 << 20
"""Below, a body is not counted."""

_DATA = 3  # ForwardBackwardRequest.data


def check_proto_parts(body: bytes) -> None:
    """Counts the fields of a ForwardBackwardRequest, two levels deep. Raises WireError: more than `MAX_PARTS`."""
    if len(body) > SMALL_BYTES:
        try:
            _count(body, 0, len(body), 0, descend=True)
        except IndexError:
            pass  # it ends within a field, which the parser is about to say


def _count(body: bytes, position: int, end: int, num_parts: int, *, descend: bool) -> int:
    while position < end:
        tag, position = _varint(body, position)
        kind = tag & 7
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise _too_many_parts()
        if kind == 2:
            length, position = _varint(body, position)
            if descend and tag >> 3 == _DATA:
                num_parts = _count(body, position, min(position + length, end), num_parts, descend=False)
            position += length
        elif kind == 0:
            _, position = _varint(body, position)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            return num_parts  # no field begins so, which the parser is about to say
    return num_parts


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """A base-128 number and the position behind it; IndexError at the body's end."""
    number = body[position] & 127
    shift = 7
    while body[position] & 128 and shift < 70:
        position += 1
        number |= (body[position] & 127) << shift
        shift += 7
    return number, position + 1


def check_json_parts(body: bytes) -> None:
    """Counts the opening brackets of a JSON body. Raises WireError: more than `MAX_PARTS`."""
    if len(body) > SMALL_BYTES and body.count(b"{") + body.count(b"[") > MAX_PARTS:
        raise _too_many_parts()


def _too_many_parts() -> WireError:
    return WireError(
        "The request has too many parts: data, chunks and tensors",
        expected=f"at most {MAX_PARTS} in one request",
        remedy="Join adjacent text chunks, or send fewer data in one request",
        status=413,
    )
