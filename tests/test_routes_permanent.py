"""What repeating a request can't mend is never answered with a status that clients repeat: 408, 409, 429 and 5xx."""

from __future__ import annotations

import asyncio
import dataclasses

from requests_by_id import Ids, requests_about
from served import MODEL, Session, make_app, served
from starlette.routing import Route

from locojax.hosts.protocol import ForwardBackward, OptimStep, SaveState

PERMANENT = {400, 401, 403, 404, 405, 410, 413, 415, 422}

UNKNOWN = Ids(
    "no-session", "no-session:train:0", "no-session:sample:0", "no-session:train:0:1", "no-session:train:0",
    "tinker://no-session:train:0/weights/a", "tinker://no-session:train:0/sampler_weights/a", "no-session",
)  # fmt: skip


async def _answers(client, ids, headers=None):
    """(name, status, text) of each request."""
    found = []
    for ask in requests_about(ids):
        async with asyncio.timeout(10):
            response = await client.request(ask.method, ask.path, json=ask.body, headers=headers)
        found.append((ask.name, response.status_code, response.text))
    return found


def _repeated(answers):
    return [one for one in answers if one[1] not in PERMANENT]


def test_every_endpoint_with_an_id_is_in_the_table(tmp_path):
    asked = {(ask.method, ask.path.partition("?")[0]) for ask in requests_about(UNKNOWN)}
    routes = [route for route in make_app(tmp_path).routes if isinstance(route, Route)]
    takes_ids = {"create_custom_loss", "telemetry", "client/config", "client/dynamic_config", "create_session",
                 "sessions/search", "auth/token", "healthz", "_download"}  # fmt: skip
    for route in routes:
        method = sorted((route.methods or {"GET"}) - {"HEAD"})[0]
        plain = route.path.removeprefix("/api/v1/")
        if ("{" not in route.path and method == "GET") or plain in takes_ids or "apikey" in plain or "page/" in plain:
            continue
        assert any(m == method and route.path_regex.match(path) for m, path in asked), f"{method} {route.path}"


def test_what_is_not_there(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            own = (await client.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
            answers = await _answers(client, dataclasses.replace(UNKNOWN, own_session=own))
            assert _repeated(answers) == []
            assert {name: status for name, status, _ in answers if status != 404} == {}
            no_key = await _answers(client, UNKNOWN, headers={"X-API-Key": "sk-wrong"})
            # On loopback a person's page needs no key, and may ask for an archive.
            assert {status for name, status, _ in no_key if "_archive" not in name} == {401}

    asyncio.run(body())


def test_what_was_there(tmp_path):
    """A finished session, an unloaded model, deleted checkpoints, a request whose result was dropped."""

    async def body():
        async with served(tmp_path, delivered_retention=0.05, undelivered_retention=0.05, tick=0.02) as client:
            session = await Session(client).open()
            weights = (await session.operate("save_weights", path="a"))["path"]
            sampler_weights = (await session.operate("save_weights_for_sampler", path="a"))["path"]
            saved = await session.operate("save_weights_for_sampler", sampling_session_seq_id=0)
            run = f"/api/v1/training_runs/{session.model_id}/checkpoints"
            for kind in ("weights", "sampler_weights"):
                assert (await client.delete(f"{run}/{kind}/a")).status_code == 200
            async with asyncio.timeout(20):
                while (await client.post("/api/v1/retrieve_future", json={"request_id": f"{session.model_id}:1"})
                       ).status_code == 200:
                    await asyncio.sleep(0.05)  # fmt: skip
            await session.post(f"sessions/{session.session_id}/finish", reason={"type": "success"}, detail=None)
            sampler = saved["sampling_session_id"]
            request, own = f"{session.model_id}:1", session.session_id
            ids = Ids(own, session.model_id, sampler, request, session.model_id, weights, sampler_weights, own)
            answers = [one for one in await _answers(client, ids) if one[1] != 200]
            assert _repeated(answers) == []
            assert len(answers) > 25, "what is over can be looked at, and no more"

    asyncio.run(body())


def test_what_cannot_be_done(tmp_path):
    """The wrong kind of checkpoint, a name that is taken, another payload, a rank too high: none is repeated."""

    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await session.operate("save_weights", path="a")
            path, model = f"tinker://{session.model_id}/weights/a", {"model_id": session.model_id}
            new = {"session_id": session.session_id, "model_seq_id": 9}
            run = f"training_runs/{session.model_id}/checkpoints"
            refused = [
                ("save_weights", {**model, "seq_id": 2, "path": "a"}),
                ("save_weights", {**model, "seq_id": 3, "path": "../a"}),
                ("save_weights", {**model, "seq_id": 1, "path": "other"}),
                ("save_weights", {**model, "seq_id": 4, "path": "b", "ttl_seconds": 1}),
                ("optim_step", {**model, "seq_id": 10**12, "adam_params": {}}),
                ("load_weights", {**model, "seq_id": 5, "path": path, "optimizer": False}),
                ("load_weights", {**new, "path": "nonsense", "optimizer": False}),
                ("create_model", {**new, "base_model": "other/model", "lora_config": {"rank": 8}}),
                ("create_model", {**new, "base_model": MODEL, "optimizer_config": {"type": "dimuon", "version": 1}}),
                ("create_sampling_session", {"session_id": session.session_id, "sampling_session_seq_id": 1,
                                             "model_path": path}),
                ("create_sampling_session", {"session_id": session.session_id, "sampling_session_seq_id": 1}),
                ("create_custom_loss", {"session_id": session.session_id, "custom_loss_seq_id": 0, "name": "x",
                                        "inputs": [], "graph": {"format": 1, "nodes": []}}),
                ("copy_weights", {"source_path": "nonsense"}),
                ("weights_info", {"tinker_path": "nonsense"}),
                (f"{run}/a/publish", {}),
                ("auth/token", {}),
            ]  # fmt: skip
            for path, asked in refused:
                response = await client.post(f"/api/v1/{path}", json=asked)
                assert response.status_code in PERMANENT, (path, response.status_code, response.text)
                assert response.json()["detail"]

    asyncio.run(body())


def test_what_is_so_already_stays_so(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await session.operate("save_weights", path="a")
            one = f"/api/v1/training_runs/{session.model_id}/checkpoints/weights/a"
            for method, public in (("DELETE", False), ("POST", True), ("POST", True), ("DELETE", False)):
                assert (await client.request(method, f"{one}/publish")).status_code == 200
                listed = (await client.get(one.removesuffix("/weights/a"))).json()["checkpoints"]
                assert [checkpoint["public"] for checkpoint in listed] == [public]

    asyncio.run(body())


def test_what_fails_in_the_engine_is_the_futures_answer(tmp_path):
    failures = {OptimStep: "boom", SaveState: "boom", ForwardBackward: "boom"}

    async def body():
        async with served(tmp_path, failures=failures) as client:
            session = await Session(client).open()
            for path, asked in (("optim_step", {"adam_params": {}}), ("save_weights", {"path": "a"})):
                answered = await session.operate(path, **asked)
                assert "boom" in answered["error"] and answered["category"] in ("user", "server")

    asyncio.run(body())
