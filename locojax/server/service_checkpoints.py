"""Training runs and checkpoints: what the REST client and the `tinker` command line ask."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any


class CheckpointDesk:
    """`checkpoint_id` is `weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`; a bare name is a 400."""

    async def training_runs(self, *, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        """GET /training_runs -> {"training_runs", "cursor"}, newest first."""
        raise NotImplementedError

    async def training_run(self, run_id: str) -> dict[str, Any]:
        """GET /training_runs/{id}. 404: unknown."""
        raise NotImplementedError

    async def of_run(self, run_id: str) -> dict[str, Any]:
        """GET /training_runs/{id}/checkpoints -> {"checkpoints", "cursor": null}."""
        raise NotImplementedError

    async def all(self, *, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        """GET /checkpoints -> {"checkpoints", "cursor"}, newest first."""
        raise NotImplementedError

    async def delete(self, run_id: str, checkpoint_id: str) -> None:
        """DELETE .../checkpoints/{ckpt}: the files too. 404: unknown."""
        raise NotImplementedError

    async def publish(self, run_id: str, checkpoint_id: str, public: bool) -> None:
        """POST / DELETE .../publish. ServiceError 409 when it is so already."""
        raise NotImplementedError

    async def set_ttl(self, run_id: str, checkpoint_id: str, ttl_seconds: int | None) -> None:
        """PUT .../ttl; None: for ever. Allowed: 3600 s to 10 years."""
        raise NotImplementedError

    async def external_urls(self, run_id: str, checkpoint_id: str, base_url: str) -> dict[str, Any]:
        """GET .../external_weights_urls -> {"urls": {file: signed URL}, "expires"}.

        A URL is `<base_url>/api/v1/_download?path=...&expires=...&signature=...`; see `verify_download`.
        """
        raise NotImplementedError

    async def archive_url(self, run_id: str, checkpoint_id: str, base_url: str) -> tuple[str, str]:
        """GET .../archive (older SDKs): the signed URL of a tar of the checkpoint, and when it expires (ISO 8601)."""
        raise NotImplementedError

    async def verify_download(self, path: str, expires: str, signature: str) -> pathlib.Path:
        """The file (or, for an archive, the directory) that a signed URL names. 403: forged or expired. 404: deleted."""
        raise NotImplementedError

    async def weights_info(self, tinker_path: str) -> dict[str, Any]:
        """POST /weights_info."""
        raise NotImplementedError

    async def copy(self, request: Mapping[str, Any], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """POST /copy_weights: `request` is its JSON -> {"tinker_path"}."""
        raise NotImplementedError

    async def import_peft(self, directory: str, name: str, *, base_model: str | None = None) -> dict[str, Any]:
        """A PEFT directory on the server's disk becomes a sampler checkpoint -> {"tinker_path"}."""
        raise NotImplementedError
