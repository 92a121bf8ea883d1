"""One trainable model's operations, put into the order of their seq_id, and the slots that models live in."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from locojax.hosts.protocol import Operation
from locojax.server.service_errors import ServiceError
from locojax.server.store_tables import FutureRecord, Model

MAX_AHEAD = 10_000
"""A seq_id may be so much above the next that is awaited."""


@dataclasses.dataclass
class Line:
    """A model and what has arrived for it.

    Attributes:
      held: by seq_id, what has arrived and waits for a lower one; None: it was refused, and is passed over.
      unfinished: by seq_id, the requests that have no result yet.
      admitted: its creation has been handed to the engine, so its operations may follow.
      closing: the request to unload it, which waits for what is unfinished.
      stepped, saved: the seq_ids of the last optimizer step, and of the last training checkpoint.
    """

    model: Model
    held: dict[int, tuple[FutureRecord, Operation] | None] = dataclasses.field(default_factory=dict)
    unfinished: dict[int, FutureRecord] = dataclasses.field(default_factory=dict)
    admitted: bool = False
    closing: FutureRecord | None = None
    stepped: int = 0
    saved: int = 0

    @property
    def unsaved(self) -> bool:
        """Whether it has learnt something that no training checkpoint has."""
        return self.stepped > self.saved

    def check(self, seq_id: int) -> None:
        """ServiceError 400: no operation may have this seq_id now."""
        model = self.model
        if seq_id < 0 or (seq_id == 0 and model.next_seq != 1):
            raise ServiceError(
                400, f"No operation of {model.model_id} may have the seq_id {seq_id}", expected="1 and up"
            )
        if 0 < seq_id < model.next_seq:
            raise ServiceError(
                400,
                f"The seq_id {seq_id} of {model.model_id} was used before, and its result is no longer kept",
                expected=f"{model.next_seq} or above",
            )
        if seq_id > model.next_seq + MAX_AHEAD:
            raise ServiceError(
                400,
                f"The seq_id {seq_id} of {model.model_id} is too far ahead",
                expected=f"{model.next_seq}, which is awaited, to {model.next_seq + MAX_AHEAD}",
            )

    def pass_over(self, seq_id: int) -> None:
        """A refused request must not leave a gap that holds up those behind it."""
        if self.model.next_seq <= seq_id <= self.model.next_seq + MAX_AHEAD:
            self.held.setdefault(seq_id, None)

    def advance(self, run: Callable[[FutureRecord, Operation], None]) -> bool:
        """Runs what is next in order, as far as it has arrived; True if anything was."""
        before = self.model.next_seq
        if not self.admitted:
            return False
        if (first := self.held.pop(0, None)) is not None:  # of a client that counts from 0
            run(*first)
        while self.model.next_seq in self.held:
            entry = self.held.pop(self.model.next_seq)
            self.model.next_seq += 1
            if entry is not None and entry[0].state == "pending":
                run(*entry)
        return self.model.next_seq != before

    def explain(self, record: FutureRecord) -> tuple[str, str | None]:
        """Why a request of this model isn't done yet."""
        model = self.model
        if not self.admitted:
            return "paused_capacity", f"the model {model.model_id} waits for an adapter slot or for the engine"
        if record.operation_id is None and record.seq >= model.next_seq:
            return "active", f"waiting for seq_id {model.next_seq} of model {model.model_id}"
        ahead = sum(1 for seq in self.unfinished if seq < record.seq)
        return "active", f"{ahead} operations of model {model.model_id} ahead"

    def describe(self, now: float, owner: str | None) -> str:
        """For an error that tells who holds a slot. `owner`: the reader's, who isn't shown others' ids."""
        name = self.model.model_id if self.model.owner in (None, owner) else "another owner's model"
        return f"{name} (last used {max(now - self.model.last_request, 0):.0f} s ago)"


class Slots:
    """Which models hold the engine's adapter slots.

    A slot is held from the moment that a creation is handed over until the engine has said that the model is removed.
    """

    def __init__(self) -> None:
        self.held: dict[str, Line | None] = {}  # None: of a session that ended while this process was away
        self.leaving: set[str] = set()

    def taken(self, max_adapters: int, owner: str | None) -> str:
        """The error of a creation for which there is no room, to be read by this owner."""
        now = time.time()
        holders = ", ".join(line.describe(now, owner) for line in self.held.values() if line is not None)
        return (
            f"All {max_adapters} adapter slots of this server are taken. Held by: {holders}. "
            "Close a client that is no longer needed (its session then ends and its models are freed), wait for a dead "
            "one's session to expire, or start the server with a higher --max-adapters."
        )
