"""Sampling sessions, samples and their streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from locojax.hosts import protocol
from locojax.server.futures import Promise


class SamplingDesk:
    """The sampling endpoints. asample is idempotent on (sampling_session_id, seq_id)."""

    async def create_session(
        self,
        session_id: str,
        sampling_session_seq_id: int,
        *,
        base_model: str | None = None,
        model_path: str | None = None,
    ) -> dict[str, Any]:
        """POST /create_sampling_session -> {"type": "create_sampling_session", "sampling_session_id"}."""
        raise NotImplementedError

    async def join_session(self, sampling_session_id: str) -> dict[str, Any]:
        """POST /join_sampling_session -> {"type": "join_sampling_session", "client_counter"}."""
        raise NotImplementedError

    async def sampler(self, sampling_session_id: str) -> dict[str, Any]:
        """GET /samplers/{id} -> {"sampler_id", "base_model", "model_path"?}."""
        raise NotImplementedError

    async def asample(self, body: Any) -> Promise:
        """POST /asample; `body` is wire.SampleBody: sampling_session_id | base_model | model_path, seq_id, sample,
        record_stability_info."""
        raise NotImplementedError

    def stream(
        self, sample: protocol.Sample, *, base_model: str | None = None, model_path: str | None = None
    ) -> AsyncIterator[protocol.Tokens | protocol.Sampled]:
        """For the OpenAI endpoints: tokens as they come (when `sample.stream`), at last the whole result.

        `sample.sampler_id` is filled in here. Closing the iterator cancels the sample. Raises ServiceError at once for
        a name that isn't served, and for a failure (status 400: the request's fault, 500: the engine's).
        """
        raise NotImplementedError

    def names(self) -> list[str]:
        """What /v1/models lists: the base model's names and each sampler checkpoint's path."""
        raise NotImplementedError
