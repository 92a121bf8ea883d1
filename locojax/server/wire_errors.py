"""The one error of everything that reads a request, with the HTTP status that it is answered by."""

from __future__ import annotations

import pydantic

from locojax.errors import RequestError

MAX_NAMED_FIELDS = 5


class WireError(RequestError):
    """A request that cannot be read or may not be asked for.

    Args:
      status: 400 (malformed, or not possible here), 404, 413 (too large), 415 (not a content type or encoding that is
        read) or 422 (a field is wrong). Never 408, 409, 429 or a 5xx: clients repeat those for minutes.
      others: as of `LocoError`.
    """

    def __init__(
        self,
        problem: str,
        *,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
        status: int = 400,
    ):
        super().__init__(problem, got=got, expected=expected, remedy=remedy)
        self.status = status


def refused_fields(error: pydantic.ValidationError) -> WireError:
    """What pydantic found, in one error: status 400 if the text is not JSON at all, else 422.

    Example: "lora_config.rank: Input should be greater than or equal to 1. Got: 0."
    """
    found = error.errors(include_url=False, include_context=False)
    if any(one["type"] == "json_invalid" for one in found):
        return WireError("The request body is not JSON", got=found[0]["msg"].removeprefix("Invalid JSON: "))
    named = []
    for one in found[:MAX_NAMED_FIELDS]:
        where = ".".join(str(part) for part in one["loc"]) or "The request"
        text = f"{where}: {one['msg'].removeprefix('Value error, ')}"
        if one["type"] != "missing" and not isinstance(one["input"], dict | list):
            text += f" (got {shortened(one['input'])})"
        named.append(text)
    more = len(found) - len(named)
    return WireError("; ".join(named) + (f"; and {more} more" if more else ""), status=422)


def shortened(value: object, max_characters: int = 80) -> str:
    """repr, cut: what was sent may be very long."""
    text = repr(value[: max_characters * 4] if isinstance(value, str | bytes) else value)
    return text if len(text) <= max_characters else text[:max_characters] + "..."
