"""The memory for keys and values when nobody says how much."""

from __future__ import annotations

import ctypes
import json

import pytest
from tiny import CONFIG

from locojax.errors import ConfigError
from locojax.hosts import serving_memory
from locojax.hosts.serving_memory import GIB, GIVE_BACK_EVERY, Freed, auto_kv_bytes, device_memory, give_back
from locojax.hosts.serving_settings import ServeSettings
from locojax.models.spec import ModelSpec

SPEC = ModelSpec.from_hf_config(CONFIG)
PER_TOKEN = 2 * SPEC.num_layers * SPEC.num_kv_heads * SPEC.head_dim * 4


def kv(memory, *, slots=128, context=256, dtype="float32"):
    return auto_kv_bytes(SPEC, dtype, max_slots=slots, max_context=context, memory=memory)


def test_a_small_model_gets_what_its_slots_can_use():
    assert kv(24 * GIB) == 2 * 128 * 256 * PER_TOKEN
    assert kv(24 * GIB, slots=1, context=16, dtype="bfloat16") == 2 * 16 * PER_TOKEN // 2


def test_a_large_one_a_share_of_the_memory():
    for memory, expected in ((24 * GIB, 4 * GIB), (int(23.4 * GIB), 4 * GIB), (80 * GIB, 13 * GIB), (GIB, GIB // 6)):
        assert kv(memory, slots=10**6, context=10**6) == expected


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(serving_memory, "_CGROUP_LIMIT", limit)
    machine = device_memory()
    assert machine > GIB
    for text, expected in (("max\n", machine), (f"{GIB}\n", GIB), (str(10**18), machine)):
        limit.write_text(text)
        assert device_memory() == expected


def test_settings_take_a_number_or_auto():
    settings = ServeSettings("m")
    assert settings.kv_bytes == settings.row_tokens == "auto"
    assert ServeSettings.from_json(settings.to_json()) == settings
    assert ServeSettings.from_json(json.dumps({"model": "m", "kv_bytes": 5})).kv_bytes == 5
    with pytest.raises(ConfigError, match="kv_bytes is out of range. Got: 0. Expected: 1 or more"):
        ServeSettings("m", kv_bytes=0)
    with pytest.raises(ConfigError, match="row_tokens is out of range. Got: 0"):
        ServeSettings("m", row_tokens=0)


def test_what_was_freed_is_given_back_where_the_c_library_can(monkeypatch):
    asked = []
    for library in (type("Glibc", (), {"malloc_trim": staticmethod(asked.append)}), type("Musl", (), {})):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
        give_back()
    assert asked == [0]


def test_memory_is_given_back_when_idle_after_work_and_not_often(monkeypatch):
    given, now = [], [0.0]
    monkeypatch.setattr(serving_memory, "give_back", lambda: given.append(now[0]))
    freed = Freed(clock=lambda: now[0])
    every = GIVE_BACK_EVERY
    for seconds, work in ((1, True), (every, False), (every + 1, True), (3 * every, False)):
        now[0] = float(seconds)
        if work:
            freed.worked()
        freed.idle()
    assert given == [every, 3 * every], "not before its time, not without work since"
