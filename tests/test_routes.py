"""The HTTP routes over the service and a fake engine: one test for each thing that HTTP adds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable

import httpx
import numpy as np
import pytest
import zstandard
from fake_engine import FakeEngine
from served import HEADERS, MODEL, Session, client_of, listening, make_app, served
from tinker.proto import tinker_public_pb2 as pb

from locojax.hosts.protocol import OptimStep

PROTOBUF = "application/x-protobuf"


def train_body(model_id: str, seq_id: int, num_data: int = 2) -> bytes:
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for first in range(num_data):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(first, first + 5, dtype="<i4").tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.arange(first + 1, first + 6, dtype="<i8").tobytes(), pb.DTYPE_INT64
        target.shape.append(5)
    return request.SerializeToString()


async def post_train(client: httpx.AsyncClient, body: bytes, **headers: str) -> httpx.Response:
    return await client.post("/api/v1/forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers})


def test_a_client_is_configured(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            config = (await client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"})).json()
            dynamic = (await client.post("/api/v1/client/dynamic_config", json={"sdk_version": "9.9"})).json()
            capable = (await client.get("/api/v1/get_server_capabilities")).json()
        assert config["pjwt_auth_enabled"] is False and config["sample_use_retrieve_futures"] is True
        assert config["create_model_via_load_weights"] is True
        assert dynamic["refresh_interval_sec"] >= 10 and dynamic["sample_cancel_enabled"] is True
        assert [model["model_name"] for model in capable["supported_models"]] == [MODEL]

    asyncio.run(body())


def test_health_tells_starting_from_ready(tmp_path):
    async def body():
        app = make_app(tmp_path)
        async with app.router.lifespan_context(app), client_of(app) as client:
            starting = await client.get("/api/v1/healthz")
            assert starting.status_code == 503 and starting.json()["status"] == "starting"
            with FakeEngine(str(tmp_path / "engine.sock"), model_name=MODEL):
                async with asyncio.timeout(20):
                    while (ready := await client.get("/api/v1/healthz")).status_code != 200:
                        await asyncio.sleep(0.05)
                assert ready.json() == {"status": "ok"}

    asyncio.run(body())


def test_a_session_trains_saves_and_samples(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            info = await session.post("get_info", model_id=session.model_id)
            assert info["model_data"]["model_name"] == MODEL and info["lora_rank"] == 8
            session.seq_id = 1
            promise = (await post_train(client, train_body(session.model_id, 1))).json()
            output = pb.ForwardBackwardOutput.FromString(await session.result(promise, PROTOBUF))
            assert sum(record.num_datums for record in output.loss_fn_outputs) == 2
            assert "loss:sum" in output.metrics
            step = await session.operate("optim_step", adam_params={"learning_rate": 1e-4})
            assert isinstance(step["metrics"], dict)
            saved = await session.operate("save_weights", path="final")
            assert saved["path"] == f"tinker://{session.model_id}/weights/final"
            sampler = await session.operate("save_weights_for_sampler", sampling_session_seq_id=0)
            promise = await session.post(
                "asample",
                sampling_session_id=sampler["sampling_session_id"],
                seq_id=0,
                num_samples=2,
                prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
                sampling_params={"max_tokens": 4, "seed": 3},
            )
            assert len(set(promise["sample_sequence_ids"])) == 2
            sampled = pb.SampleResponse.FromString(await session.result(promise, PROTOBUF))
            assert len(sampled.sequences) == 2
            assert len(sampled.sequences[0].logprobs) == len(sampled.sequences[0].tokens) > 0

    asyncio.run(body())


def test_older_clients_get_json(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            tokens = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
            target = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
            data = {"data": [{"model_input": tokens, "loss_fn_inputs": {"target_tokens": target}}]}
            promise = await session.post(
                "forward",
                model_id=session.model_id,
                seq_id=1,
                forward_input={**data, "loss_fn": "cross_entropy"},
            )
            forward = await session.result(promise)
            assert len(forward["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
            unload = await session.result(await session.post("unload_model", model_id=session.model_id))
            assert unload == {"model_id": session.model_id, "type": "unload_model"}

    asyncio.run(body())


def test_compressed_bodies(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            squeezed = zstandard.compress(train_body(session.model_id, 1))
            promise = await post_train(client, squeezed, **{"Content-Encoding": "zstd"})
            assert promise.status_code == 200, promise.text
            heartbeat = zstandard.compress(json.dumps({"session_id": session.session_id}).encode())
            response = await client.post(
                "/api/v1/session_heartbeat", content=heartbeat, headers={"Content-Encoding": "zstd"}
            )
            assert response.json() == {"type": "session_heartbeat"}
            broken = await post_train(client, squeezed[:-4], **{"Content-Encoding": "zstd"})
            assert broken.status_code == 400 and "not valid zstd" in broken.json()["detail"]

    asyncio.run(body())


def test_a_poll_that_waits_is_answered_408_with_a_reason(tmp_path):
    async def body():
        async with served(tmp_path, long_poll=0.2) as client:
            session = await Session(client).open()
            # Operation 2 waits for operation 1, which has not come.
            promise = await session.post("optim_step", model_id=session.model_id, seq_id=2, adam_params={})
            began = time.monotonic()
            response = await client.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
            assert time.monotonic() - began > 0.15
            assert response.status_code == 408
            assert response.json()["type"] == "try_again" and "1" in response.json()["queue_state_reason"]
            assert (await post_train(client, train_body(session.model_id, 1))).status_code == 200
            await session.result(promise)

    asyncio.run(body())


def test_a_failed_future_is_an_answer_not_a_status(tmp_path):
    async def body():
        async with served(tmp_path, failures={OptimStep: "user: out of luck"}) as client:
            session = await Session(client).open()
            failed = await session.operate("optim_step", adam_params={})
            assert failed["category"] == "user" and "out of luck" in failed["error"]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api/v1/nothing"), ("POST", "/api/v2/create_session"), ("DELETE", "/api/v1/create_session")],
)
def test_unknown_paths_are_404_in_json(tmp_path, method, path):
    async def body():
        async with served(tmp_path) as client:
            response = await client.request(method, path)
            assert response.status_code in (404, 405)
            assert response.json() == {"detail": f"This server has no {method} {path}."}

    asyncio.run(body())


@pytest.mark.parametrize(
    ("path", "content", "status", "says"),
    [
        ("create_session", b"{", 400, "The request body is not JSON"),
        ("session_heartbeat", b"[]", 422, "The request: "),
        ("session_heartbeat", b"{}", 422, "session_id: Field required"),
        ("session_heartbeat", b'{"session_id": "nobody"}', 404, "nobody"),
        ("create_session", b" " * (2 << 20), 413, "The request body is too long. Got: 2,097,152 bytes or more"),
        ("retrieve_future", b'{"request_id": "nobody"}', 404, "nobody"),
        ("forward_backward", b"\xff\xff", 415, "Content-Type"),
        ("asample", b"{}", 422, "prompt"),
        ("save_weights", b'{"model_id": "m", "path": "x"}', 422, "seq_id: Field required"),
        ("load_weights", b'{"path": "tinker://a/weights/b"}', 422, "give session_id and model_seq_id"),
        (
            "create_custom_loss",
            b'{"session_id": "s", "custom_loss_seq_id": 0, "name": "n"}',
            400,
            "computes the loss in",
        ),
        ("auth/token", b"{}", 404, "gives out no tokens"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(tmp_path, path, content, status, says):
    async def body():
        async with served(tmp_path) as client:
            response = await client.post(f"/api/v1/{path}", content=content, headers={"Content-Type": "text/plain"})
            assert response.status_code == status, response.text
            assert says in response.json()["detail"]

    asyncio.run(body())


def test_an_endless_body_is_refused_early(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            sent = 0

            async def endless():
                nonlocal sent
                while True:
                    sent += 1 << 20
                    yield b" " * (1 << 20)

            response = await client.post("/api/v1/create_session", content=endless())
            assert response.status_code == 413 and sent < 8 << 20

    asyncio.run(body())


def test_a_bug_is_answered_with_an_id_that_the_log_has(tmp_path, caplog):
    async def body():
        app = make_app(tmp_path)
        async with app.router.lifespan_context(app), client_of(app) as client:
            app.add_api_route("/api/v1/broken", broken)
            return await client.get("/api/v1/broken")

    with caplog.at_level(logging.ERROR):
        response = asyncio.run(body())
    assert response.status_code == 500
    name = response.json()["detail"].removeprefix("The server has failed (error ").removesuffix("); its log says how.")
    (record,) = [record for record in caplog.records if name in record.getMessage()]
    assert record.exc_info is not None and "secret of the server" not in response.text


async def broken():
    raise ValueError("secret of the server")


def test_what_only_the_hosted_service_has_answers_softly(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            trace = (await client.get(f"/api/v1/sessions/{session.session_id}/trace_export")).json()
            assert trace == {"status": "failed", "error": "This server records no traces of sessions."}
            for path in ("audit", "billing/usage/events", "billing/usage/checkpoints/current"):
                assert (await client.get(f"/api/v1/{path}")).status_code == 404

    asyncio.run(body())


def test_sessions_by_rest(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            assert (await client.get("/api/v1/sessions")).json() == {"sessions": [session.session_id]}
            got = (await client.get(f"/api/v1/sessions/{session.session_id}")).json()
            assert got["training_run_ids"] == [session.model_id]
            found = await session.post("sessions/search", limit=10)
            assert [one["session_id"] for one in found["sessions"]] == [session.session_id]
            put = await client.put(f"/api/v1/sessions/{session.session_id}/project", json={"project_id": "p"})
            assert put.status_code == 200
            await session.post("telemetry", events=[{"event": "GENERIC_EVENT"}], platform="x", session_id="s")
            await session.post(f"sessions/{session.session_id}/finish", reason={"type": "success"}, detail=None)
            await session.post("session_heartbeat", status=410, session_id=session.session_id)

    asyncio.run(body())


def test_metrics_count_requests_by_route_template(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await client.get(f"/api/v1/sessions/{session.session_id}")
            await client.get("/api/v1/nothing")
            response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        lines = response.text.splitlines()
        route = 'method="GET",route="/api/v1/sessions/{session_id}",status="200"'
        assert any(line.startswith("locojax_requests_total{" + route) and line.endswith(" 1.0") for line in lines)
        assert 'locojax_requests_total{method="GET",route="other",status="404"} 1.0' in lines
        assert "locojax_engine_ready 1.0" in lines and "locojax_engine_restarts_total 0.0" in lines
        assert session.session_id not in response.text

    asyncio.run(body())


def test_keys_open_the_door(tmp_path):
    key = "tml-0123456789abcdef"

    async def body():
        async with served(tmp_path, keys=[key]) as client:
            for headers, status in [
                ({"X-API-Key": key}, 200),
                ({"X-API-Key": "tml-wrong-wrong"}, 401),
                ({"X-API-Key": ""}, 401),
            ]:
                response = await client.get("/api/v1/sessions", headers=headers)
                assert response.status_code == status, headers
            assert "www-authenticate" not in response.headers
            del client.headers["X-API-Key"]
            assert (await client.get("/api/v1/healthz")).status_code == 200
            assert (await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code == 200
            refused = await client.get("/v1/models")
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
            for path in ("/", "/metrics", "/page/page.js", "/api/v1/_status"):
                asks = await client.get(path)
                assert asks.status_code == 401 and asks.headers["www-authenticate"].startswith("Basic ")
                assert (await client.get(path, auth=("me", key))).status_code == 200
            # A browser would send Basic credentials for another site, too: they change nothing by themselves.
            path = "/api/v1/training_runs/r/checkpoints/weights/a"
            assert (await client.delete(path, auth=("me", key))).status_code == 401
            ours = {"X-Requested-With": "locojax-page"}
            assert (await client.delete(path, auth=("me", key), headers=ours)).status_code == 404
            assert (await client.delete(path, headers=ours)).status_code == 401

    asyncio.run(body())


def test_without_keys_only_this_machine_is_answered(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            refused = await client.get("/api/v1/sessions", headers={"Host": "evil.example:8000"})
            assert refused.status_code == 403
            assert refused.json()["detail"].startswith("A server without API keys answers only to localhost")
            assert (await client.get("/", headers={"Host": "evil.example"})).status_code == 403
            del client.headers["X-API-Key"]
            assert (await client.get("/")).status_code == 200
            assert (await client.get("/api/v1/sessions")).status_code == 401
            assert (await client.get("/api/v1/sessions", headers={"X-API-Key": "sk-1"})).status_code == 401

    asyncio.run(body())


def test_keys_are_never_logged(tmp_path, caplog):
    async def body():
        async with served(tmp_path, keys=["tml-0123456789abcdef"]) as client:
            await client.get("/api/v1/sessions", headers={"X-API-Key": "tml-guess-guess"})
            await client.get("/api/v1/sessions", headers={"X-API-Key": "tml-0123456789abcdef"})

    with caplog.at_level(logging.DEBUG):
        asyncio.run(body())
    assert "0123456789abcdef" not in caplog.text and "guess-guess" not in caplog.text


def test_heartbeats_wait_for_neither_polls_nor_large_bodies(tmp_path):
    """300 polls wait and 3 MB bodies are decoded: heartbeats are answered meanwhile."""

    async def body(url: str) -> int:
        limits = httpx.Limits(max_connections=400)
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, limits=limits, timeout=60) as client:
            session = await Session(client).open()
            late = await session.post("optim_step", model_id=session.model_id, seq_id=50, adam_params={})
            polls = [asyncio.create_task(poll(client, late["request_id"])) for _ in range(300)]
            await asyncio.sleep(0.5)
            large = train_body(session.model_id, 60, num_data=20_000)
            sends = [asyncio.create_task(post_train(client, large)) for _ in range(2)]
            answered = 0
            while not any(send.done() for send in sends):
                await session.post("session_heartbeat", session_id=session.session_id)
                answered += 1
                await asyncio.sleep(0.01)
            for send in sends:
                assert (await send).status_code == 200
            for task in polls:
                task.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
            return answered

    async def poll(client: httpx.AsyncClient, request_id: str) -> int:
        return (await client.post("/api/v1/retrieve_future", json={"request_id": request_id})).status_code

    app = make_app(tmp_path)
    with FakeEngine(str(tmp_path / "engine.sock"), model_name=MODEL), listening(app) as url:
        wait_until_ready(url)
        answered = asyncio.run(body(url))
    assert answered >= 2  # none, if they waited for the bodies


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(f"{url}/api/v1/healthz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_polls_are_answered_when_the_server_stops(tmp_path):
    async def body(url: str, stopping: asyncio.Event):
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
            session = await Session(client).open()
            promise = await session.post("optim_step", model_id=session.model_id, seq_id=2, adam_params={})
            ask = {"request_id": promise["request_id"]}
            polls = [asyncio.create_task(client.post("/api/v1/retrieve_future", json=ask)) for _ in range(20)]
            await asyncio.sleep(0.5)
            stopping.set()
            return [(answer.status_code, answer.json()["type"]) for answer in await asyncio.gather(*polls)]

    async def run() -> list[tuple[int, str]]:
        # The server in a thread, its client here, so that it can be stopped while polls wait.
        stopping, stopped = asyncio.Event(), asyncio.Event()

        async def stop(leave: Callable[[], None]) -> None:
            await stopping.wait()
            await asyncio.to_thread(leave)
            stopped.set()

        with contextlib.ExitStack() as stack:
            url = stack.enter_context(listening(make_app(tmp_path)))
            await asyncio.to_thread(wait_until_ready, url)
            task = asyncio.create_task(stop(stack.close))
            began = time.monotonic()
            found = await body(url, stopping)
            await task
            assert stopped.is_set() and time.monotonic() - began < 10
            return found

    with FakeEngine(str(tmp_path / "engine.sock"), model_name=MODEL):
        assert set(asyncio.run(run())) == {(408, "try_again")}
