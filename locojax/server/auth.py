"""Who may use the server: API keys, compared in constant time and never shown.

Without configured keys the server answers to any key of Tinker's form (`tml-...`), but only on this machine: it binds
to loopback alone, and a request must name a loopback host, so that a web page of another site whose name was made to
resolve to 127.0.0.1 gets nothing. With configured keys every request needs one of them, the web page's too; a key may
have its owner's name before it, and different owners don't see one another's things (see `callers`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from locojax.errors import ConfigError
from locojax.server.callers import Caller

KEY_PREFIX = "tml-"
KEYS_VARIABLE = "LOCOJAX_API_KEYS"
PAGE_HEADER = "x-requested-with"
PAGE_VALUE = "locojax-page"
"""What the web page's own requests carry: no other site can make a browser send it without being allowed to first."""

_SHORTEST = 12
_HOST = re.compile(r"(\[[^\]]+\]|[^:\[\]]+|[0-9a-fA-F:]+)(?::\d+)?")


class KeyRing:
    """The keys that are accepted. Its text form tells how many there are, never what they are.

    Args:
      keys: the configured keys, or None: any key that starts with `tml-`.
      owners: the name of each key's owner; "": the key is an owner of its own, known by its hash.
    """

    def __init__(self, keys: Iterable[str] | None, owners: Sequence[str] | None = None):
        self._keys = None if keys is None else tuple(key.encode() for key in keys)
        names = owners or [""] * len(self._keys or ())
        self._owners = tuple(name or _fingerprint(key) for name, key in zip(names, self._keys or (), strict=True))

    def __repr__(self) -> str:
        return "KeyRing(any tml- key)" if self._keys is None else f"KeyRing({len(self._keys)} keys)"

    @property
    def any_key(self) -> bool:
        """No keys are configured."""
        return self._keys is None

    def accepts(self, key: str | None) -> bool:
        """Whether `key` opens the door. How long the answer takes doesn't tell how much of the key was right."""
        if not key:
            return False
        if self._keys is None:
            return key.startswith(KEY_PREFIX)
        given = key.encode("utf-8", errors="surrogateescape")
        right = False
        for known in self._keys:  # all of them, whichever fits
            right |= hmac.compare_digest(known, given)
        return right

    def caller(self, key: str | None) -> Caller:
        """Whose an accepted key is."""
        if not key or self._keys is None:
            return Caller()
        given = key.encode("utf-8", errors="surrogateescape")
        owner = None
        for known, its_owner in zip(self._keys, self._owners, strict=True):
            owner = its_owner if hmac.compare_digest(known, given) else owner
        return Caller(owner, is_apart=owner is not None and len(set(self._owners)) > 1)

    def refusal(self, key: str | None) -> str:
        """The text of a 401. It doesn't repeat the key."""
        if not key:
            return "There is no API key in this request. Send it as the header X-API-Key (set TINKER_API_KEY)."
        if self._keys is None:
            return f"This is no API key. Expected: any text that starts with {KEY_PREFIX} (set TINKER_API_KEY)."
        return "This API key is not one of this server's. Set TINKER_API_KEY to a key that `locojax serve` was given."


def load_keys(file: pathlib.Path | None, environment: Mapping[str, str]) -> KeyRing:
    """The keys of a file (one a line, # begins a comment), else of $LOCOJAX_API_KEYS (commas), else any.

    A key may have its owner's name before it: `ann tml-...`. Keys of one name are one owner's.

    Raises ConfigError for a file that can't be read or holds no keys, and for a key that clients would not send.
    """
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The file of API keys {file} can't be read",
                got=error.strerror if isinstance(error, OSError) else "no UTF-8 text",
                expected="a text file with one key a line",
            ) from error
        where, words = str(file), [line.split("#")[0].strip() for line in lines]
    elif KEYS_VARIABLE in environment:
        where, words = f"${KEYS_VARIABLE}", [word.strip() for word in environment[KEYS_VARIABLE].split(",")]
    else:
        return KeyRing(None)
    named = [_named(word) for word in words if word]
    owners, keys = [name for name, _ in named], [key for _, key in named]
    if not keys:
        raise ConfigError(f"{where} holds no API key", expected=f"keys of at least {_SHORTEST} characters")
    for position, key in enumerate(keys, start=1):
        # Said by position: an error text ends up in logs, and a key must not.
        if not key.startswith(KEY_PREFIX):
            raise ConfigError(
                f"API key {position} of {where} does not start with {KEY_PREFIX!r}",
                remedy=f"The Tinker client sends only keys that do: put {KEY_PREFIX} before it",
            )
        if len(key) < _SHORTEST or not key.isascii() or any(letter.isspace() for letter in key):
            raise ConfigError(
                f"API key {position} of {where} can't be used",
                got=f"{len(key)} characters",
                expected=f"at least {_SHORTEST}, ASCII, no spaces",
                remedy="Make one: echo tml-$(openssl rand -hex 24)",
            )
    return KeyRing(keys, owners)


def _named(line: str) -> tuple[str, str]:
    """The owner's name ("": none is given) and the key."""
    parts = line.split()
    if len(parts) == 2 and parts[1].startswith(KEY_PREFIX) and not parts[0].startswith(KEY_PREFIX):
        return parts[0], parts[1]
    return "", line


def _fingerprint(key: bytes) -> str:
    """What the database knows the owner of a key without a name by; it tells nothing of the key."""
    return "key-" + hashlib.sha256(b"locojax owner " + key).hexdigest()[:16]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address. Example: "localhost", "127.0.0.1", "::1" """
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_bind(host: str, keys: KeyRing) -> None:
    """Raises ConfigError when other machines could reach a server that any key opens."""
    if keys.any_key and not is_loopback(host):
        raise ConfigError(
            f"Listening on {host} would let everyone on the network train and sample here",
            got="no API keys",
            expected="keys, or a loopback address such as 127.0.0.1",
            remedy=f"Write keys into a file, one a line, and pass --keys-file FILE (or set {KEYS_VARIABLE}); "
            "make one with: echo tml-$(openssl rand -hex 24)",
        )


def names_loopback(host_header: str | None) -> bool:
    """Whether a request's Host header names this machine only. Example: "localhost:8000", "[::1]:8000" """
    match = _HOST.fullmatch((host_header or "").strip())
    return match is not None and is_loopback(match[1])


def bearer_key(headers: Mapping[str, str]) -> str | None:
    """The key of `X-API-Key`, or of `Authorization: Bearer` (OpenAI clients). `headers` has lower-case names."""
    if key := headers.get("x-api-key"):
        return key.strip()
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else None


def page_key(headers: Mapping[str, str]) -> str | None:
    """The key of HTTP Basic authentication (its password, under any user name), which browsers ask a person for."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None


def sent_by_page(headers: Mapping[str, str]) -> bool:
    """Whether the web page's own script sent this, which is what allows it to change something."""
    return headers.get(PAGE_HEADER) == PAGE_VALUE
