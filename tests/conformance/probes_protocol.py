"""Order, repetition and malformed traffic: what the SDK sends on a bad day, and what no SDK should."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import numpy as np
from conformance.client import (
    API_KEY,
    TEXTS,
    Client,
    close_to,
    datum,
    equal,
    fingerprint,
    scored,
    since,
    train,
)
from tinker import types

PROTO = "application/x-protobuf"
ADAM = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def fields(*texts: list[int], loss: str = "cross_entropy") -> dict[str, Any]:
    """A JSON forward_backward_input, as SDK 0.16 sends it."""
    data = []
    for text in texts:
        n = len(text) - 1
        data.append({
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": text[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": text[1:], "dtype": "int64", "shape": [n]},
                "weights": {"data": [1.0] * n, "dtype": "float32", "shape": [n]},
            },
        })  # fmt: skip
    return {"data": data, "loss_fn": loss}


def post_pass(client: Client, model_id: str, seq_id: int, *texts: list[int]) -> httpx.Response:
    return client.post("forward_backward", model_id=model_id, seq_id=seq_id, forward_backward_input=fields(*texts))


def post_step(client: Client, model_id: str, seq_id: int, **adam: float) -> httpx.Response:
    return client.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params={**ADAM, **adam}, type="optim_step")


def state(client: Client, model_id: str, seq_id: int) -> list[list[float]]:
    """Log-probs of the fixed texts, by a JSON forward pass."""
    answer = client.post("forward", model_id=model_id, seq_id=seq_id, forward_input=fields(*TEXTS))
    if answer.status_code != 200:
        answer = client.post("forward", model_id=model_id, seq_id=seq_id, forward_backward_input=fields(*TEXTS))
    result = client.result(answer)
    assert "error" not in result, result
    return [output["logprobs"]["data"] for output in result["loss_fn_outputs"]]


def binary(model_id: str, seq_id: int, *texts: list[int]) -> bytes:
    """The same request as protobuf."""
    from tinker.proto import tinker_public_pb2 as pb

    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for text in texts:
        item = request.data.add()
        item.model_input.add().encoded_text.tokens = np.array(text[:-1], np.int32).tobytes()
        for name, kind, array in (
            ("target_tokens", pb.DTYPE_INT64, np.array(text[1:], np.int64)),
            ("weights", pb.DTYPE_FLOAT32, np.ones(len(text) - 1, np.float32)),
        ):
            tensor = item.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), kind
            tensor.shape.append(len(array))
    return bytes(request.SerializeToString())


def post_binary(client: Client, body: bytes, **headers: str) -> httpx.Response:
    return client.http.post("/api/v1/forward_backward", content=body, headers={"Content-Type": PROTO, **headers})


@since("0.38")
def probe_order_of_arrival(client: Client) -> None:
    """Chunks 3, 2, 1, then the step, against 1, 2, 3, step: the same model to the bit; each POST answers at once."""
    prints = []
    for order in ((1, 2, 3), (3, 2, 1)):
        model_id = client.raw_model()
        answers = {}
        for seq_id in order:
            started = time.perf_counter()
            answers[seq_id] = post_pass(client, model_id, seq_id, TEXTS[seq_id])
            assert time.perf_counter() - started < 3.0, "a POST waited for a gap in the sequence"
        answers[4] = post_step(client, model_id, 4)
        for seq_id in sorted(answers):
            assert "error" not in client.result(answers[seq_id])
        prints.append(state(client, model_id, 5))
    assert prints[0] == prints[1]


@since("0.38")
def probe_repeated_posts(client: Client) -> None:
    """A request whose answer got lost is sent again: the original future, and it is done once."""
    session_id = client.open_session()
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": client.base_model,
              "lora_config": {"rank": 4, "seed": 0}, "type": "create_model"}  # fmt: skip
    answers = [client.post("create_model", **create).json() for _ in range(2)]
    assert answers[0]["request_id"] == answers[1]["request_id"]
    model_id = client.raw_model(session_id)
    once = client.raw_model()
    for name, times in ((model_id, 3), (once, 1)):
        ids = {post_pass(client, name, 1, TEXTS[0]).json()["request_id"] for _ in range(times)}
        ids |= {post_pass(client, name, 1, TEXTS[0]).json()["request_id"]}
        assert len(ids) == 1
        steps = [post_step(client, name, 2) for _ in range(times)]
        assert len({step.json()["request_id"] for step in steps}) == 1
        client.result(steps[0])
        client.result(post_step(client, name, 2))
    assert state(client, model_id, 3) == state(client, once, 3)


@since("0.38")
def probe_same_number_other_request(client: Client) -> None:
    """Another payload under a sequence number that was used: refused in words, and the first one stands."""
    model_id = client.raw_model()
    first = post_step(client, model_id, 1)
    other = post_step(client, model_id, 1, learning_rate=0.5)
    assert other.status_code in (400, 422), other.text
    assert "seq" in other.text.lower(), other.text
    assert "error" not in client.result(first)


@since("0.38")
def probe_repeated_sample(client: Client) -> None:
    session_id = client.open_session()
    request = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": client.base_model}
    ids = [client.post("create_sampling_session", **request).json()["sampling_session_id"] for _ in range(2)]
    assert ids[0] == ids[1]
    body = {
        "sampling_session_id": ids[0], "seq_id": 55868337000000000, "num_samples": 2, "type": "sample",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXTS[0]}]}, "sampling_params": {"max_tokens": 3},
    }  # fmt: skip
    answers = [client.post("asample", **body).json() for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(set(answers[0]["sample_sequence_ids"])) == 2
    other = client.post("asample", **{**body, "num_samples": 3})
    assert other.status_code in (400, 422), other.text


@since("0.38")
def probe_a_save_sees_what_came_before_it(client: Client) -> None:
    """A queue [pass, step, save, pass, step]: what is saved are the weights between, though nothing was waited for."""
    model_id, twin = client.raw_model(), client.raw_model()
    answers = [post_pass(client, model_id, 1, TEXTS[0]), post_step(client, model_id, 2)]
    saved = client.post("save_weights_for_sampler", model_id=model_id, seq_id=3, path="middle")
    answers += [post_pass(client, model_id, 4, TEXTS[0]), post_step(client, model_id, 5)]
    answers += [post_pass(client, twin, 1, TEXTS[0]), post_step(client, twin, 2)]
    for answer in answers:
        assert "error" not in client.result(answer)
    path = client.result(saved)["path"]
    got = scored(client.service().create_sampling_client(model_path=path), TEXTS[0])[1:]
    close_to(got, state(client, twin, 3)[0], 1e-3)


def probe_pipelined_equals_sequential(client: Client) -> None:
    """[pass, step, pass, step] sent at once, or each awaited: the same weights to the bit (SkyRL#1489)."""
    together, apart = client.trainer(), client.trainer()
    train(together, steps=3)
    for _ in range(3):
        apart.forward_backward([datum(text) for text in TEXTS[:2]], "cross_entropy").result()
        apart.optim_step(types.AdamParams(learning_rate=0.02)).result()
    equal(fingerprint(together), fingerprint(apart))


def probe_step_without_gradients(client: Client) -> None:
    """C16: nothing accumulated, so nothing moves: no decay, no step."""
    trainer = client.trainer()
    train(trainer)
    before = fingerprint(trainer)
    trainer.optim_step(types.AdamParams(learning_rate=0.1, weight_decay=0.5)).result()
    equal(fingerprint(trainer), before)


@since("0.38")
def probe_empty_batch(client: Client) -> None:
    model_id = client.raw_model()
    answer = post_pass(client, model_id, 1)
    failed = answer.status_code in (400, 422) or client.result(answer).get("category") == "user"
    assert failed, answer.text


@since("0.38")
def probe_binary_requests(client: Client) -> None:
    """Protobuf, plain and zstd; results as protobuf or JSON as `Accept` says."""
    import zstandard
    from tinker.proto import tinker_public_pb2 as pb

    model_id = client.raw_model()
    plain = post_binary(client, binary(model_id, 1, *TEXTS))
    packed = zstandard.ZstdCompressor().compress(binary(model_id, 2, *TEXTS))
    small = post_binary(client, packed, **{"Content-Encoding": "zstd"})
    outputs = []
    for answer in (plain, small):
        output = pb.ForwardBackwardOutput()
        output.ParseFromString(client.result(answer, accept=PROTO))
        outputs.append(output)
    first = outputs[0].loss_fn_outputs[0].fields["logprobs"].data
    assert first == outputs[1].loss_fn_outputs[0].fields["logprobs"].data
    read = client.result(plain)
    flat = [lp for item in read["loss_fn_outputs"] for lp in item["logprobs"]["data"]]
    equal(np.array(flat, np.float32), np.frombuffer(first, np.float32))


@since("0.38")
def probe_malformed_bodies(client: Client) -> None:
    """Never a 5xx, never a hang: garbage is a 4xx with text."""
    import zstandard

    model_id = client.raw_model()
    good = binary(model_id, 1, TEXTS[0])
    rng = np.random.default_rng(0)
    bodies = [b"", b"\xff" * 100, good[:-3], good[:20], b"{}", rng.bytes(300)]
    for body in bodies:
        answer = post_binary(client, body)
        assert 400 <= answer.status_code < 500 and answer.content, (body[:20], answer.status_code)
    answer = post_binary(client, b"not zstd", **{"Content-Encoding": "zstd"})
    assert 400 <= answer.status_code < 500, answer.status_code
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 31))
    answer = post_binary(client, bomb, **{"Content-Encoding": "zstd"})
    assert answer.status_code in (400, 413), answer.status_code
    for path in ("create_session", "create_model", "asample", "optim_step", "retrieve_future", "save_weights"):
        for text in ("", "{", "[]", "null", '"x"', "{}", '{"model_id": 3}', '{"session_id": ["a"]}'):
            answer = client.http.post(f"/api/v1/{path}", content=text, headers={"Content-Type": "application/json"})
            is_fine = path == "create_session" and answer.status_code == 200
            assert is_fine or 400 <= answer.status_code < 500, (path, text, answer.status_code, answer.text)


@since("0.38")
def probe_mutated_binary_bodies(client: Client) -> None:
    """A real body with bytes flipped is refused, fails as the user's fault, or works; the server goes on."""
    model_id = client.raw_model()
    rng = np.random.default_rng(1)
    seq_id = 1
    for _ in range(60):
        body = bytearray(binary(model_id, seq_id, TEXTS[0]))
        for at in rng.integers(len(model_id) + 4, len(body), 3):
            body[at] = int(rng.integers(256))
        answer = post_binary(client, bytes(body))
        assert answer.status_code < 500, answer.text
    fresh = client.raw_model()
    assert "error" not in client.result(post_pass(client, fresh, 1, TEXTS[0]))


@since("0.38")
def probe_unknown_things(client: Client) -> None:
    """Futures, models, sessions, samplers and paths that don't exist: 404 or 400 in JSON."""
    unknown = [
        client.post("retrieve_future", request_id="no:such:1"),
        client.post("get_info", model_id="no:train:0"),
        post_step(client, "no:train:0", 1),
        client.post("session_heartbeat", session_id="no", type="session_heartbeat"),
        client.post("create_model", session_id="no", model_seq_id=0, base_model=client.base_model),
        client.post("an_endpoint_of_next_year", x=1),
        client.http.get("/api/v1/samplers/no"),
        client.http.get("/api/v1/sessions/no"),
        client.http.get("/api/v1/training_runs/no:train:0"),
        client.http.get("/api/v1/training_runs/../../etc/passwd"),
        client.http.delete("/api/v1/training_runs/no:train:0/checkpoints/weights/..%2f..%2fx"),
        client.post("weights_info", tinker_path="tinker://no/weights/x"),
        client.post("weights_info", tinker_path="file:///etc/passwd"),
    ]
    for answer in unknown:
        assert answer.status_code in (400, 404, 405, 422), (answer.request.url, answer.status_code, answer.text)
        assert answer.json()["detail"]


@since("0.38")
def probe_unknown_fields_are_ignored(client: Client) -> None:
    """Next year's SDK adds fields; it is served."""
    answer = client.post("create_session", tags=[], sdk_version="9.9.9", type="create_session", mood="fine")
    assert answer.status_code == 200
    config = client.post("client/config", sdk_version="9.9.9", novelty=True)
    assert config.status_code == 200 and isinstance(config.json(), dict)


@since("0.38")
def probe_keys(client: Client) -> None:
    """No key, or none of ours: 401, and the key isn't repeated."""
    for headers in ({}, {"X-API-Key": "sk-secret-value"}):
        answer = httpx.get(f"{client.url}/api/v1/get_server_capabilities", headers=headers)
        assert answer.status_code == 401 and "secret-value" not in answer.text, answer.text


@since("0.38")
def probe_retrieve_many_futures(client: Client) -> None:
    """One poll for all of a sampling session's samples."""
    session_id = client.open_session()
    sampler = client.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=client.base_model
    ).json()["sampling_session_id"]
    waiting = set()
    for i in range(3):
        answer = client.post(
            "asample", sampling_session_id=sampler, seq_id=i, num_samples=1, sampling_params={"max_tokens": 4},
            prompt={"chunks": [{"type": "encoded_text", "tokens": TEXTS[0]}]},
        )  # fmt: skip
        waiting.add(answer.json()["request_id"])
    cursor = 0
    deadline = time.monotonic() + 60
    while waiting and time.monotonic() < deadline:
        answer = client.post(
            "retrieve_futures", prev_cursor=cursor, retrieved_request_ids=[],
            target={"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0},
        )  # fmt: skip
        assert answer.status_code in (200, 408), answer.text
        body = answer.json()
        for event in body.get("completions", []):
            assert event["state"] == "finished", event
            waiting.discard(event["request_id"])
        cursor = body.get("cursor", cursor)
    assert not waiting


@since("0.38")
def probe_waiting_future_says_why(client: Client) -> None:
    """A poll of a request whose predecessor never came ends within 40 s by a try-again that says what's missing."""
    model_id = client.raw_model()
    answer = post_step(client, model_id, 2)
    started = time.monotonic()
    polled = client.http.post("/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]})
    waited = time.monotonic() - started
    assert 1.0 < waited < 40.0, f"polled for {waited:.1f} s"
    body = polled.json()
    assert polled.status_code == 408 and body["type"] == "try_again", polled.text
    assert body["queue_state"] in ("active", "paused_capacity", "paused_rate_limit")
    assert "1" in body.get("queue_state_reason", ""), body


@since("0.38")
def probe_heartbeats_under_load(client: Client) -> None:
    """Large bodies are read off the event loop: heartbeats stay quick meanwhile."""
    session_id = client.open_session()
    body = post_body_of_size(3_000_000)
    stop = threading.Event()
    statuses: list[int] = []

    def push() -> None:
        with httpx.Client(base_url=client.url, headers={"X-API-Key": API_KEY}, timeout=60.0) as http:
            while not stop.is_set():
                answer = http.post("/api/v1/forward_backward", content=body, headers={"Content-Type": PROTO})
                statuses.append(answer.status_code)

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    waits = []
    for _ in range(40):
        started = time.perf_counter()
        answer = client.post("session_heartbeat", session_id=session_id, type="session_heartbeat")
        waits.append(time.perf_counter() - started)
        assert answer.status_code == 200
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert statuses and all(400 <= status < 500 for status in statuses), set(statuses)
    p95 = sorted(waits)[int(0.95 * len(waits))]
    assert p95 < 0.5, f"p95 {p95:.3f} s"


def post_body_of_size(num_bytes: int) -> bytes:
    """A well-formed request for a model that doesn't exist."""
    text = [65] * 2000
    return binary("no:train:0", 1, *[text] * (num_bytes // (2000 * 16)))
