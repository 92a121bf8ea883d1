"""A reward for measurements with random weights, which solve nothing: without a signal nothing would be trained."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

COIN = "locojax.measure.coin:coin"
"""Its name as `data.reward` takes it."""


def coin(prompt_text: str, completion_text: str, answer: str | None, meta: Mapping[str, Any]) -> float:
    """0 or 1, as the completion's bytes have it: the same completion always gets the same."""
    return float(zlib.crc32(completion_text.encode("utf-8")) & 1)
