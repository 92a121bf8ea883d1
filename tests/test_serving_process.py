"""The engine as a process of its own: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from serving_client import KEY, FrontEnd, create, fb
from tiny import write_tiny_model

from locojax.errors import ConfigError
from locojax.hosts.protocol import Failed, Finished
from locojax.hosts.serving import AUTHKEY_VARIABLE, main
from locojax.hosts.serving_settings import ServeSettings

ROOT = pathlib.Path(__file__).parent.parent


def start(settings, address, program=("-m", "locojax.hosts.serving"), **environment):
    return subprocess.Popen(
        [sys.executable, *program, settings.to_json(), str(address)],
        env={**os.environ, AUTHKEY_VARIABLE: KEY.hex(), "JAX_PLATFORMS": "cpu", **environment}, cwd=ROOT,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def read_until(process, text):
    """Reads what the process writes, up to the line with this."""
    for line in process.stderr:
        if text in line:
            return


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return ServeSettings(str(model), row_tokens=16, max_rank=4, max_adapters=2, kv_bytes=1 << 22, max_slots=4,
                         max_resident_samplers=2, warm_up=False)  # fmt: skip


def test_sigterm_answers_what_is_queued_and_ends_with_0(settings, tmp_path):
    process = start(settings, tmp_path / "e.sock")
    try:
        client = FrontEnd(str(tmp_path / "e.sock"))
        client.do(create("A"))
        ops = [client.submit(fb("A", count=4)) for _ in range(60)]
        client.wait(ops[0])
        process.send_signal(signal.SIGTERM)
        answers = client.wait(*ops, acknowledge=False)
        assert isinstance(answers[0], Finished)
        stopped = [answer for answer in answers if isinstance(answer, Failed)]
        assert stopped and {answer.message for answer in stopped} == {
            "The engine was stopped before this was done. Send it again."
        }
        assert process.wait(30) == 0
        assert not (tmp_path / "e.sock").exists()
        client.connection.close()
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "ready after" in errors and "Traceback" not in errors


def test_a_signal_while_it_loads_ends_it_at_once(settings, tmp_path):
    process = start(settings, tmp_path / "e.sock")
    try:
        read_until(process, "starting jax")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors


LOADS_IN_A_CALLBACK = """
import gc, sys, time
import locojax.hosts.serving_start as serving_start
from locojax.hosts.serving import main

def start(settings, link, clock, counter, progress):
    gc.callbacks.append(lambda *_: time.sleep(0.2))
    progress("loading in a callback")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        gc.collect()
    raise RuntimeError("the signal was lost")

serving_start.start = start
sys.exit(main(sys.argv[1], sys.argv[2]))
"""


def test_a_signal_is_not_lost_in_a_callback_that_swallows_what_a_handler_raises(settings, tmp_path):
    process = start(settings, tmp_path / "e.sock", program=("-c", LOADS_IN_A_CALLBACK))
    try:
        read_until(process, "loading in a callback")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not (tmp_path / "e.sock").exists()
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "Traceback" not in errors


def test_a_model_that_is_not_there(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(AUTHKEY_VARIABLE, KEY.hex())
    for variable in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(variable, os.environ.get(variable, "0"))  # which main would set for good
    settings = ServeSettings("smolm2-135m", cache_dir=str(tmp_path))
    assert main(settings.to_json(), str(tmp_path / "e.sock")) == 2
    assert "There is no model 'smolm2-135m'" in caplog.text and "smollm2-135m" in caplog.text


@pytest.mark.parametrize(("key", "text"), [(None, "is not set"), ("zz", "is not hexadecimal"), ("", "is not set")])
def test_a_key_that_is_missing_or_malformed(tmp_path, monkeypatch, caplog, key, text):
    if key is None:
        monkeypatch.delenv(AUTHKEY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(AUTHKEY_VARIABLE, key)
    assert main(ServeSettings("x").to_json(), str(tmp_path / "e.sock")) == 2
    assert f"The engine has no key for its connection. Got: {AUTHKEY_VARIABLE} {text}" in caplog.text


def test_settings_travel_as_json():
    settings = ServeSettings("m", alpha=16.0, row_tokens=64, max_context=None)
    assert ServeSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "are not JSON"),
        ("[]", "name no model"),
        (json.dumps({"model": "m", "alhpa": 3}), "Unknown server setting 'alhpa'. Expected: one of model, name, alpha"),
        (json.dumps({"model": "m", "rows": 0}), "The server's rows is out of range. Got: 0. Expected: 1 or more"),
        (json.dumps({"model": "m", "sampling_share": 1.0}), "sampling_share is out of range. Got: 1.0"),
        (json.dumps({"model": "m", "alpha": -1}), "The server's alpha must be above 0. Got: -1"),
        (json.dumps({"model": "m", "turn_seconds": 0}), "The server's turn_seconds must be above 0. Got: 0"),
        (json.dumps({"model": "m", "compute_dtype": "int8"}), "Unknown compute_dtype 'int8'"),
        (json.dumps({"model": "m", "logprobs_of": "x"}), "Unknown logprobs_of 'x'. Expected: raw or tempered"),
    ],
)
def test_settings_that_can_t_be(text, message):
    with pytest.raises(ConfigError) as refusal:
        ServeSettings.from_json(text)
    assert message in str(refusal.value)


def test_nothing_imports_jax_before_it_is_set_up():
    code = "import sys, locojax.hosts.serving; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
