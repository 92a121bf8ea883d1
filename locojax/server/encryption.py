"""External weights encrypted to their readers' keys with age (age-encryption.org/v1): every file becomes `FILE.age`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pyrage

from locojax.server.service_errors import ServiceError

MAX_RECIPIENTS = 10
SUFFIX = ".age"


def recipients(keys: Sequence[str]) -> list[Any]:
    """The public keys as pyrage's recipients.

    Raises:
      ServiceError: 400: too many of them, or one that is neither an age nor an SSH public key.
    """
    if len(keys) > MAX_RECIPIENTS:
        raise ServiceError(
            400, "Too many age_encryption_recipients", got=str(len(keys)), expected=f"at most {MAX_RECIPIENTS}"
        )
    return [_recipient(place, key) for place, key in enumerate(keys)]


def _recipient(place: int, key: str) -> Any:
    kind = pyrage.ssh if key.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(key)
    except pyrage.RecipientError as error:
        raise ServiceError(
            400,
            f"age_encryption_recipients[{place}] is not a public key ({error})",
            expected="an age public key (age1...) or an SSH one (ssh-ed25519 ..., ssh-rsa ...)",
        ) from error


def encrypt_directory(directory: pathlib.Path, keys: Sequence[str]) -> None:
    """Replaces each file of the directory by an encrypted one. Nothing is left to be read if it fails half-way: files
    that could not be encrypted are removed too."""
    to = recipients(keys)
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        try:
            pyrage.encrypt_file(str(path), str(path) + SUFFIX, to)
        finally:
            path.unlink()
