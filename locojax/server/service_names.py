"""What clients may call the base model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from locojax.hosts.protocol import EngineInfo
from locojax.server.service_errors import ServiceError


class ModelNames:
    """The names of the one base model that is served.

    Args:
      names: the configured ones; (): the engine's.
      info: what the engine is, None before it has answered.
    """

    def __init__(self, names: tuple[str, ...], info: Callable[[], EngineInfo | None]):
        self._names, self._info = names, info

    def all(self) -> tuple[str, ...]:
        """() while neither a name is configured nor an engine has answered."""
        info = self._info()
        return self._names or (() if info is None else (info.model_name,))

    def checked(self, name: str) -> str:
        """The name as it was given, if it is of the base model, with or without `:suffix`. ServiceError 400."""
        names = self.all()
        if names and name not in names and name.split(":")[0] not in names:
            raise ServiceError(
                400,
                f"This server doesn't serve the model {name[:200]!r}",
                expected=" or ".join(repr(one) for one in names),
                remedy="Another name for the model is given to the server when it starts: --alias NAME",
            )
        return name


def digest_of(*values: Any) -> str:
    """The same for equal plain values (JSON's, tuples)."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
