"""Futures: a request that was accepted, and later its answer. Thousands may be polled at once; a poll is one task."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

FutureState = Literal["pending", "done", "failed"]


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a POST that starts an operation returns."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """The UntypedAPIFuture of the contract, without what is None."""
        body: dict[str, Any] = {"request_id": self.request_id}
        if self.model_id is not None:
            body["model_id"] = self.model_id
        if self.sample_sequence_ids is not None:
            body["sample_sequence_ids"] = list(self.sample_sequence_ids)
        return body


@dataclasses.dataclass(frozen=True)
class FutureAnswer:
    """What a poll found.

    Attributes:
      state: `pending`: answer 408 with `try_again()`. `failed`: answer 200 with `error_body()`. `done`: `result`.
      kind: the operation: create_model, forward_backward, forward, optim_step, save_weights, load_weights,
        save_weights_for_sampler, save_weights_external, unload_model, sample.
      result: for `forward_backward` and `forward` a `types.ForwardBackwardResult`, for `sample` a `protocol.Sampled`
        (encode either by Accept); for all others the JSON body as a dict.
    """

    request_id: str
    state: FutureState
    kind: str
    result: Any = None
    error: str | None = None
    category: Literal["user", "server", "unknown"] | None = None
    queue_state: str = "active"
    queue_state_reason: str | None = None

    def try_again(self) -> dict[str, Any]:
        """The 408 body of a future that isn't done."""
        body = {"type": "try_again", "request_id": self.request_id, "queue_state": self.queue_state}
        if self.queue_state_reason is not None:
            body["queue_state_reason"] = self.queue_state_reason
        return body

    def error_body(self) -> dict[str, Any]:
        """The 200 body of a future that failed."""
        return {"error": self.error, "category": self.category}


class Futures:
    """The future endpoints."""

    async def retrieve(self, request_id: str, *, timeout: float | None = None) -> FutureAnswer:
        """POST /retrieve_future: waits until done, at most `timeout` (None: the setting). 404: unknown. 410: expired.

        Call `delivered` once the answer has been written out.
        """
        raise NotImplementedError

    def delivered(self, request_id: str) -> None:
        """The client has the answer: from now on the short retention counts."""
        raise NotImplementedError

    async def retrieve_many(
        self,
        sampling_session_id: str,
        *,
        cloned_sampler_id: int = 0,
        prev_cursor: int = 0,
        timeout: float | None = None,
        retrieved_request_ids: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """POST /retrieve_futures -> {"completions": [{"state", "request_id", ...}], "cursor"}; long-polls."""
        raise NotImplementedError

    async def cancel(self, request_id: str) -> dict[str, Any]:
        """POST /cancel_future: a sample ends with what it has; what waits fails; what is done stays. 404: unknown."""
        raise NotImplementedError
