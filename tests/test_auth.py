"""API keys: which are accepted, what is refused at start, and that no text ever shows one."""

from __future__ import annotations

import base64

import pytest

from locojax.errors import ConfigError
from locojax.server import auth

KEY = "tml-0123456789abcdef"


def test_without_configured_keys_any_tinker_key_is_accepted():
    ring = auth.KeyRing(None)
    assert ring.accepts("tml-x")
    assert not ring.accepts("sk-something") and not ring.accepts("") and not ring.accepts(None)


def test_configured_keys_are_the_only_ones():
    ring = auth.KeyRing([KEY, "tml-another-key"])
    assert ring.accepts(KEY) and ring.accepts("tml-another-key")
    assert not ring.accepts("tml-x") and not ring.accepts(KEY + "0") and not ring.accepts(KEY[:-1])
    assert not ring.accepts("tml-\udcff\xff")


def test_every_key_is_compared_whichever_fits(monkeypatch):
    compared = []
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(a) or a == b)
    assert auth.KeyRing([KEY, "tml-another-key", "tml-a-third-key"]).accepts(KEY)
    assert len(compared) == 3


def test_no_text_shows_a_key():
    ring = auth.KeyRing([KEY])
    assert KEY not in repr(ring) and KEY not in str(vars(ring).keys())
    assert KEY not in ring.refusal(KEY) and "tml-wrong" not in ring.refusal("tml-wrong")
    assert ring.refusal(None) == (
        "There is no API key in this request. Send it as the header X-API-Key (set TINKER_API_KEY)."
    )


def test_keys_of_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\ntml-another-key  # Ann's\n")
    ring = auth.load_keys(file, {auth.KEYS_VARIABLE: "tml-of-the-environment"})
    assert ring.accepts(KEY) and ring.accepts("tml-another-key") and not ring.accepts("tml-of-the-environment")


def test_keys_of_the_environment():
    ring = auth.load_keys(None, {auth.KEYS_VARIABLE: f"{KEY}, tml-another-key"})
    assert ring.accepts(KEY) and ring.accepts("tml-another-key") and not ring.any_key
    assert auth.load_keys(None, {}).any_key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no API key"),
        ("tml-0123456789abcdef\nsk-0123456789abcdef", "API key 2 of .* does not start with 'tml-'"),
        ("tml-short", "API key 1 of .* can't be used. Got: 9 characters. Expected: at least 12"),
        ("tml-0123456 789abcdef", "can't be used"),
    ],
)
def test_unusable_keys_are_refused_without_showing_them(tmp_path, text, says):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        auth.load_keys(file, {})
    assert "0123456" not in str(caught.value)


def test_a_missing_file_of_keys_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="can't be read. Got: No such file or directory"):
        auth.load_keys(tmp_path / "none", {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]", "LOCALHOST.", "a.localhost"])
def test_loopback_needs_no_keys(host):
    auth.check_bind(host, auth.KeyRing(None))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", "localhost.example.com"])
def test_other_addresses_need_keys(host):
    auth.check_bind(host, auth.KeyRing([KEY]))
    with pytest.raises(ConfigError, match="would let everyone on the network train and sample here") as caught:
        auth.check_bind(host, auth.KeyRing(None))
    assert "--keys-file" in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::1]:8000", True),
        ("::1", True),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost:8000@evil.example", False),
        ("", False),
        (None, False),
    ],
)
def test_whether_a_host_header_names_this_machine(header, ours):
    assert auth.names_loopback(header) == ours


def test_where_a_key_is_read_from():
    basic = base64.b64encode(b"ann:tml-basic").decode()
    assert auth.bearer_key({"x-api-key": " tml-a "}) == "tml-a"
    assert auth.bearer_key({"authorization": "Bearer tml-b"}) == "tml-b"
    assert auth.bearer_key({"authorization": f"Basic {basic}"}) is None and auth.bearer_key({}) is None
    assert auth.page_key({"authorization": f"Basic {basic}"}) == "tml-basic"
    assert auth.page_key({"authorization": "Basic ???"}) is None
    assert auth.page_key({"authorization": "Basic " + base64.b64encode(b"\xff\xfe").decode()}) is None
