"""With several API keys each owner sees its own things only: another's are answered as if they weren't there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import httpx
from requests_by_id import Ids, requests_about
from served import HEADERS, Session, as_another, served

from locojax.server import auth
from locojax.server.callers import NOBODY, Caller

ANN, BOB = HEADERS["X-API-Key"] + "-of-ann", HEADERS["X-API-Key"] + "-of-bob"


@contextlib.asynccontextmanager
async def two_owners(folder, keys=(ANN, BOB), **settings):
    async with served(folder, keys=keys, headers={"X-API-Key": ANN}, **settings) as ann:
        async with as_another(ann, BOB) as bob:
            yield ann, bob


async def full_session(client: httpx.AsyncClient) -> Ids:
    """A session with a model, two checkpoints and a sampler; its first request is still to be fetched."""
    session = await Session(client).open()
    weights = (await session.operate("save_weights", path="a"))["path"]
    sampler_weights = (await session.operate("save_weights_for_sampler", path="a"))["path"]
    sampler = (await session.operate("save_weights_for_sampler", sampling_session_seq_id=0))["sampling_session_id"]
    model = session.model_id
    return Ids(session.session_id, model, sampler, f"{model}:1", model, weights, sampler_weights, session.session_id)


def unlike(ids: Ids) -> Ids:
    """Ids of the same form that nothing has."""
    nobody = "0" * 8 + "-0000-4000-8000-" + "0" * 12
    values = {name: value.replace(ids.session, nobody) for name, value in dataclasses.asdict(ids).items()}
    return Ids(**values)


def test_what_is_anothers_is_answered_as_if_it_were_not_there(tmp_path):
    async def body():
        async with two_owners(tmp_path) as (ann, bob):
            hers, own = await full_session(ann), await full_session(bob)
            hers = dataclasses.replace(hers, own_session=own.session)
            nothing = dataclasses.replace(unlike(hers), own_session=own.session)
            for ask, empty in zip(requests_about(hers), requests_about(nothing), strict=True):
                found = await bob.request(ask.method, ask.path, json=ask.body)
                missing = await bob.request(empty.method, empty.path, json=empty.body)
                text = found.text.replace(hers.session, nothing.session)
                assert (found.status_code, text) == (missing.status_code, missing.text) and found.status_code == 404
            for ask in requests_about(hers):  # and none of it did anything
                if ask.method == "GET" or "get_info" in ask.path or "retrieve" in ask.path:
                    status = (await ann.request(ask.method, ask.path, json=ask.body)).status_code
                    assert status in (200, 302, 400), ask.name  # 400: the URLs of what isn't external

    asyncio.run(body())


def test_lists_and_searches_have_ones_own_things(tmp_path):
    async def body():
        async with two_owners(tmp_path) as (ann, bob):
            hers, his = await full_session(ann), await full_session(bob)
            for client, mine, other in ((ann, hers, his), (bob, his, hers)):
                for path in ("sessions", "training_runs", "checkpoints", "_status"):
                    text = (await client.get(f"/api/v1/{path}")).text
                    assert other.session not in text, path
                    assert mine.session in text, path
                runs = (await client.get("/api/v1/training_runs")).json()
                assert runs["cursor"]["total_count"] == 1
                text = (await client.post("/api/v1/sessions/search", json={})).text
                assert mine.session in text and other.session not in text
                text = (await client.get("/v1/models")).text
                assert mine.sampler_weights in text and other.session not in text
                assert other.session not in (await client.get("/metrics")).text

    asyncio.run(body())


def test_a_public_checkpoint_can_be_read_by_others_and_changed_by_none(tmp_path):
    async def body():
        async with two_owners(tmp_path) as (ann, bob):
            hers = await full_session(ann)
            one = f"/api/v1/training_runs/{hers.run}/checkpoints/weights/a"
            assert (await ann.post(f"{one}/publish")).status_code == 200
            assert (await bob.post("/api/v1/weights_info", json={"tinker_path": hers.weights})).status_code == 200
            run = (await bob.get(f"/api/v1/training_runs/{hers.run}")).json()
            assert run["last_checkpoint"]["tinker_path"] == hers.weights and run["last_sampler_checkpoint"] is None
            listed = (await bob.get(f"/api/v1/training_runs/{hers.run}/checkpoints")).json()["checkpoints"]
            assert [checkpoint["tinker_path"] for checkpoint in listed] == [hers.weights]
            assert hers.session not in (await bob.get("/api/v1/checkpoints")).text, "a list is of one's own"
            own = (await bob.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
            new = {"session_id": own, "model_seq_id": 0, "path": hers.weights, "optimizer": True}
            promise = await bob.post("/api/v1/load_weights", json=new)
            assert (await Session(bob).result(promise.json()))["model_id"] == f"{own}:train:0"
            for method, path in (("DELETE", f"{one}/publish"), ("PUT", f"{one}/ttl"), ("DELETE", one)):
                body = {"ttl_seconds": 7200} if path.endswith("ttl") else None
                assert (await bob.request(method, path, json=body)).status_code == 404
            copied = await bob.post(
                "/api/v1/copy_weights", json={"source_path": hers.weights, "destination_project_id": "p"}
            )
            path = copied.json()["tinker_path"]
            assert (await bob.post("/api/v1/weights_info", json={"tinker_path": path})).status_code == 200
            assert (await ann.post("/api/v1/weights_info", json={"tinker_path": path})).status_code == 404
            assert (await ann.delete(f"{one}/publish")).status_code == 200
            assert (await bob.post("/api/v1/weights_info", json={"tinker_path": hers.weights})).status_code == 404

    asyncio.run(body())


def test_who_holds_the_slots_is_told_without_anothers_ids(tmp_path):
    async def body():
        async with two_owners(tmp_path) as (ann, bob):
            sessions = [await Session(ann).open() for _ in range(8)]
            own = (await bob.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
            new = {"session_id": own, "model_seq_id": 0, "base_model": "test/tiny-model", "lora_config": {"rank": 8}}
            promise = (await bob.post("/api/v1/create_model", json=new)).json()
            failed = await Session(bob).result(promise)
            assert "Held by: another owner's model (last used" in failed["error"]
            assert not any(session.session_id in failed["error"] for session in sessions)
            assert failed["error"] not in (await ann.get("/api/v1/_status")).text

    asyncio.run(body())


def test_owners_outlive_a_restart_and_keys_of_one_name_are_one_owners(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"ann {ANN}\nbob {BOB}\nann {ANN}-new\n")
    ring = auth.load_keys(file, {})
    assert ring.caller(ANN) == ring.caller(f"{ANN}-new") == Caller("ann", is_apart=True)
    assert ring.caller(BOB) == Caller("bob", is_apart=True) and ring.caller("tml-unknown-key") == NOBODY

    async def body():
        async with served(tmp_path / "a", ring=ring, headers={"X-API-Key": ANN}) as ann:
            hers = await full_session(ann)
        async with served(tmp_path / "a", ring=ring, headers={"X-API-Key": f"{ANN}-new"}) as ann:
            async with as_another(ann, BOB) as bob:
                for client, status in ((ann, 200), (bob, 404)):
                    asked = {"tinker_path": hers.weights}
                    assert (await client.post("/api/v1/weights_info", json=asked)).status_code == status
                    assert (await client.get(f"/api/v1/sessions/{hers.session}")).status_code == status
                assert (await bob.get("/api/v1/auth/apikey/me")).json()["name"] == "bob"

    asyncio.run(body())


def test_one_key_or_none_is_everybodys(tmp_path):
    one = auth.KeyRing([ANN])
    assert one.caller(ANN).owner == auth.KeyRing([ANN, BOB]).caller(ANN).owner is not None
    assert not one.caller(ANN).is_apart and auth.KeyRing([ANN, BOB]).caller(ANN).is_apart
    assert auth.KeyRing(None).caller("tml-any") == NOBODY
    assert ANN not in repr(one.caller(ANN)) and len(one.caller(ANN).owner) == 20

    async def body():
        async with served(tmp_path, headers={"X-API-Key": ANN}) as ann, as_another(ann, BOB) as bob:
            hers = await full_session(ann)
            assert (await bob.get(f"/api/v1/sessions/{hers.session}")).status_code == 200
        async with two_owners(tmp_path) as (ann, bob):  # what was everybody's before there were keys stays so
            assert (await bob.post("/api/v1/weights_info", json={"tinker_path": hers.weights})).status_code == 200
            assert hers.session in (await bob.get("/api/v1/sessions")).text

    asyncio.run(body())
