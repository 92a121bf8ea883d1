"""Whose request is being answered, and what of the server's it may know of.

With several configured API keys each owner of keys has sessions, models and checkpoints of its own; what is another
owner's is answered as if it weren't there. With one key, or none, all is everybody's.

Who asks is a context variable, set by the gate: a request's checks then need no argument that one could forget to pass
on, and what the server does on its own account (no caller) sees everything.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who asks. `owner`: what its sessions are marked with. `is_apart`: it sees its own and nobody's things only."""

    owner: str | None = None
    is_apart: bool = False


NOBODY = Caller()
"""What works on the server's own account, or needs no key: it sees everything."""

_caller = contextvars.ContextVar("caller", default=NOBODY)


@contextlib.contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """The block works for this caller."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def owner() -> str | None:
    """What a thing that is made now is to be marked with; None: it is everybody's."""
    return _caller.get().owner


def only_of() -> str | None:
    """The one owner whose things the caller may see beside nobody's; None: it may see everyone's."""
    caller = _caller.get()
    return caller.owner if caller.is_apart else None


def may_see(owner: str | None) -> bool:
    """Whether the caller may know of something of this owner."""
    only = only_of()
    return only is None or owner is None or owner == only
