"""One server at a time writes a database that several can reach.

The default, SQLite in the data folder, needs none of this: that folder is locked. A database given by its URL has a
row that says whose it is, with a sign of life every few seconds. A server that finds another's row watches it: signs
that go on coming mean that the other lives. Clocks of different machines are never compared.
"""

from __future__ import annotations

import json
import logging
import pathlib
import socket
import time

from locojax.errors import ConfigError
from locojax.server.store import Store

log = logging.getLogger(__name__)

KEY = "server"  # in the table `meta`
RENEWED_EVERY = 5.0
SILENT_AFTER = 20.0  # seconds without a sign, after which whoever held the database is gone
_POLL_SECONDS = 0.5


class Tenure:
    """This server's claim on its database; `take` it before anything is read or written.

    Args:
      data_dir: with the machine's name it tells servers apart; a server that starts again in its own doesn't wait.
      silent_after: see the constant.
    """

    def __init__(self, store: Store, data_dir: pathlib.Path, *, silent_after: float = SILENT_AFTER):
        self._store, self._silent_after = store, silent_after
        self._name = f"{socket.gethostname()}:{data_dir.resolve()}"
        self._renewed = 0.0

    def take(self) -> None:
        """Waits as long as it takes to know that no other server lives.

        Raises:
          ConfigError: one does.
        """
        watched, end = None, 0.0
        while True:
            seen = self._store.meta(KEY)
            holder = json.loads(seen) if seen is not None else {"name": None, "sign": None}
            is_free = holder["sign"] is None or holder["name"] == self._name
            if not is_free and watched is None:
                watched, end = seen, time.monotonic() + self._silent_after
                log.info("Waiting %g s for a sign of the server that used this database: %s", self._silent_after,
                         holder["name"])  # fmt: skip
            if is_free or (seen == watched and time.monotonic() >= end):
                if self._replace(seen):
                    return
            elif seen != watched:
                raise ConfigError(
                    "Another server uses this database", got=holder["name"], expected="one server at a time",
                    remedy="Stop it, or pass another --database",
                )  # fmt: skip
            else:
                time.sleep(_POLL_SECONDS)

    def _replace(self, seen: str | None) -> bool:
        """Makes the row this server's; False if it isn't as it was seen any more."""
        row = self._row(time.time())
        self._renewed = time.monotonic()
        return self._store.change_meta(KEY, lambda now: row if now == seen else None).result()

    def renew(self) -> None:
        """A sign of life, if one is due; doesn't wait for it to be written."""
        if time.monotonic() - self._renewed >= RENEWED_EVERY:
            self._renewed = time.monotonic()
            self._store.change_meta(KEY, self._again)

    def _again(self, now: str | None) -> str | None:
        name = json.loads(now)["name"] if now is not None else self._name
        if name == self._name:
            return self._row(time.time())
        log.error("Another server, %s, has taken this database over while this one was silent: stop one of them", name)
        return None

    def release(self) -> None:
        """The next server needn't wait."""
        self._store.change_meta(KEY, lambda now: None if self._again(now) is None else self._row(None))

    def _row(self, sign: float | None) -> str:
        return json.dumps({"name": self._name, "sign": sign})
