"""Times on the wire: ISO 8601 in UTC, microseconds. Inside they are seconds since 1970."""

from __future__ import annotations

import datetime


def iso_time(seconds: float) -> str:
    """Example: iso_time(0.5) == "1970-01-01T00:00:00.500000Z"."""
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def seconds_of(text: str) -> float:
    """The inverse; ValueError for what is no time with an offset."""
    when = datetime.datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"no offset from UTC in {text!r}")
    return when.timestamp()
