"""Checkpoints over HTTP: listing, downloads, archives, and paths that lead nowhere else."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import tarfile

import pytest
from served import MODEL, Session, served


def test_checkpoints_by_rest(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await session.operate("save_weights", path="a")
            await session.operate("save_weights_for_sampler", path="a")
            run = f"/api/v1/training_runs/{session.model_id}"
            listed = (await client.get(f"{run}/checkpoints")).json()["checkpoints"]
            assert {one["checkpoint_id"] for one in listed} == {"weights/a", "sampler_weights/a"}
            assert (await client.get(run)).json()["user_metadata"] == {"renderer_name": "role_colon"}
            assert (await client.get("/api/v1/training_runs?limit=5")).json()["cursor"]["total_count"] == 1
            one = f"{run}/checkpoints/weights/a"
            assert (await client.post(f"{one}/publish")).status_code == 200
            assert (await client.get(f"{run}/checkpoints")).json()["checkpoints"][0]["public"] in (True, False)
            assert (await client.delete(f"{one}/publish")).status_code == 200
            assert (await client.put(f"{one}/ttl", json={"ttl_seconds": 7200})).status_code == 200
            assert (await client.put(f"{one}/ttl", json={"ttl_seconds": 1})).status_code == 422
            path = f"tinker://{session.model_id}/weights/a"
            info = (await client.post("/api/v1/weights_info", json={"tinker_path": path})).json()
            assert info["base_model"] == MODEL and info["lora_rank"] == 8
            assert (await client.delete(one)).status_code in (200, 204)
            assert (await client.delete(one)).status_code == 404
            bare = await client.delete(f"{run}/checkpoints/a")
            assert bare.status_code == 400

    asyncio.run(body())


def test_downloads_need_a_signature_and_no_key(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await session.operate("save_weights_external", path="out")
            run = f"/api/v1/training_runs/{session.model_id}"
            found = (await client.get(f"{run}/checkpoints/external_weights/out/external_weights_urls")).json()
            url = found["urls"]["adapter_config.json"]
            del client.headers["X-API-Key"]
            response = await client.get(url)
            assert response.status_code == 200 and isinstance(response.json(), dict)
            assert (await client.get(url[:-1] + ("0" if url[-1] != "0" else "1"))).status_code == 403
            assert (
                await client.get(url.replace("adapter_config.json", "adapter_model.safetensors"))
            ).status_code == 403
            assert (
                await client.get("/api/v1/_download?path=../../etc/passwd&expires=9&signature=x")
            ).status_code == 403

    asyncio.run(body())


def test_an_archive_is_a_tar_of_the_checkpoint(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await session.operate("save_weights_for_sampler", path="a")
            run = f"/api/v1/training_runs/{session.model_id}"
            response = await client.get(f"{run}/checkpoints/sampler_weights/a/archive")
            assert response.status_code == 302
            # As SDKs up to 0.30 parse it.
            expires = datetime.datetime.strptime(response.headers["Expires"], "%a, %d %b %Y %H:%M:%S GMT")
            assert expires > datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
            archive = (await client.get(response.headers["Location"])).content
            query = {"run_id": session.model_id, "checkpoint_id": "sampler_weights/a"}
            again = (await client.get((await client.get("/api/v1/_archive", params=query)).json()["url"])).content
        assert archive == again
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            names = tar.getnames()
            assert "adapter_config.json" in names
            assert json.load(tar.extractfile("adapter_config.json"))  # type: ignore[arg-type]

    asyncio.run(body())


@pytest.mark.parametrize(
    "evil", ["..", "../..", "..%2f..%2f..", "%2e%2e/%2e%2e", "weights/..", "weights/%2e%2e%2f%2e%2e"]
)
def test_path_parameters_cannot_leave_the_folder(tmp_path, evil):
    (tmp_path / "victim").write_text("still here")

    async def body():
        async with served(tmp_path / "data") as client:
            session = await Session(client).open()
            await session.operate("save_weights", path="a")
            for method, suffix in [("DELETE", ""), ("GET", "/archive"), ("GET", "/external_weights_urls")]:
                path = f"/api/v1/training_runs/{session.model_id}/checkpoints/{evil}{suffix}"
                assert (await client.request(method, path)).status_code in (400, 404, 405), path
                path = f"/api/v1/training_runs/{evil}/checkpoints/weights/a{suffix}"
                assert (await client.request(method, path)).status_code in (400, 404, 405), path

    (tmp_path / "data").mkdir()
    asyncio.run(body())
    assert (tmp_path / "victim").read_text() == "still here"
