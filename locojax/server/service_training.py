"""Trainable models: their creation, their operations in order of seq_id, and what a client may ask about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locojax.hosts.protocol import AdapterConfig
from locojax.server.futures import Promise
from locojax.types import AdamParams


class TrainingDesk:
    """The training endpoints. Each operation is idempotent on (model_id, seq_id), creation on (session_id, model_seq_id):
    the same payload again gives the first promise; another payload is refused (400)."""

    async def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        adapter: AdapterConfig,
        *,
        user_metadata: Mapping[str, Any] | None = None,
        optimizer: str = "adamw",
    ) -> Promise:
        """POST /create_model. Any `optimizer` but adamw is refused."""
        raise NotImplementedError

    async def create_model_from(
        self,
        session_id: str,
        model_seq_id: int,
        path: str,
        *,
        optimizer_state: bool = False,
        base_model: str | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        optimizer: str = "adamw",
    ) -> Promise:
        """POST /load_weights, new form: a model out of a checkpoint, with that checkpoint's adapter settings."""
        raise NotImplementedError

    async def load_weights(self, model_id: str, seq_id: int, path: str, *, optimizer_state: bool = False) -> Promise:
        """POST /load_weights, legacy form: only as the model's first request (seq_id 1), else 400."""
        raise NotImplementedError

    async def get_info(self, model_id: str) -> dict[str, Any]:
        """POST /get_info. Waits for the model's creation if that is on its way."""
        raise NotImplementedError

    async def forward_backward(self, body: Any) -> Promise:
        """POST /forward_backward and /forward; `body` is wire.TrainBody: model_id, seq_id, data, loss, loss_config,
        gradient, spans."""
        raise NotImplementedError

    async def optim_step(
        self, model_id: str, seq_id: int, adam: AdamParams, *, optimizer: str = "adamw"
    ) -> Promise:
        """POST /optim_step."""
        raise NotImplementedError

    async def save_weights(
        self,
        model_id: str,
        seq_id: int,
        path: str,
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Promise:
        """POST /save_weights: a training checkpoint `tinker://<model_id>/weights/<path>`."""
        raise NotImplementedError

    async def save_weights_for_sampler(
        self,
        model_id: str,
        seq_id: int,
        *,
        path: str | None = None,
        sampling_session_seq_id: int | None = None,
        kind: str = "snapshot",
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Promise:
        """POST /save_weights_for_sampler: named (a PEFT directory) or, without `path`, an ephemeral sampling session."""
        raise NotImplementedError

    async def save_weights_external(
        self,
        model_id: str,
        seq_id: int,
        path: str,
        *,
        ttl_seconds: int | None = None,
        age_encryption_recipients: tuple[str, ...] = (),
    ) -> Promise:
        """POST /save_weights_external: a PEFT directory to download."""
        raise NotImplementedError

    async def unload_model(self, model_id: str) -> Promise:
        """POST /unload_model (older SDKs): frees the model once what was submitted has run."""
        raise NotImplementedError
