"""Checkpoints: names, kinds, overwriting, expiry, listing, downloading, copying, importing."""

from __future__ import annotations

import json
import pathlib
import time
import urllib.parse

import pyrage
import pytest
from server_under_test import (
    ADAM,
    MODEL,
    failure,
    model_of,
    result,
    run,
    serving,
    session_of,
    with_service,
)

from locojax.hosts import protocol as p
from locojax.server.checkpoints import CheckpointFiles, TinkerPath, UrlSigner, checked_name, checked_ttl
from locojax.server.service_errors import ServiceError


def _refused(status: int, text: str):
    return pytest.raises(ServiceError, match=text, check=lambda error: error.status == status)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\nb", "a\0b", "x" * 129, "/etc/passwd"])
def test_names_that_are_refused(name):
    with _refused(400, "can't have this name"):
        checked_name(name)


@pytest.mark.parametrize("name", ["final", "000020", "step 3", "a.b", "..a", "%2e%2e", "é", "a:b", "#x", ".hidden"])
def test_other_names_are_folders_of_their_own(tmp_path, name):
    files = CheckpointFiles(tmp_path)
    directory = files.directory(TinkerPath("s:train:0", "weights", checked_name(name)))
    assert directory.resolve().parent == (tmp_path / "checkpoints" / "s%3Atrain%3A0" / "weights").resolve()


@pytest.mark.parametrize("run_id", ["..", ".", "../../x", "a/../../b", "é" * 100])
def test_no_run_leads_out_of_the_folder(tmp_path, run_id):
    files = CheckpointFiles(tmp_path)
    try:
        directory = files.directory(TinkerPath(run_id, "weights", "a"))
    except ServiceError as error:
        assert error.status == 400
    else:
        assert directory.resolve().is_relative_to(files.root) and directory.resolve() != files.root


def test_nothing_written_takes_nothing_away(tmp_path):
    files, path = CheckpointFiles(tmp_path), TinkerPath("r", "weights", "a")
    first = files.new_directory()
    first.mkdir()
    (first / "f").write_text("kept")
    assert files.place(first, path) == 4
    with pytest.raises(FileNotFoundError, match="the engine wrote nothing"):
        files.place(files.new_directory(), path)
    assert (files.directory(path) / "f").read_text() == "kept"


@pytest.mark.parametrize("path", ["", "tinker://", "tinker://a/weights", "tinker://a/weights/b/c", "tinker://a/x/b",
                                  "http://a/weights/b", "tinker:///weights/b", "tinker://a/weights/.."])  # fmt: skip
def test_paths_that_are_refused(path):
    with pytest.raises(ServiceError) as refused:
        TinkerPath.parse(path)
    assert refused.value.status == 400


def test_a_time_to_live_is_an_hour_to_ten_years():
    assert [checked_ttl(one) for one in (None, 3600, 315_360_000)] == [None, 3600, 315_360_000]
    for wrong in (0, -1, 3599, 10**10):
        with _refused(400, "ttl_seconds is out of range"):
            checked_ttl(wrong)


@with_service()
async def test_kinds_of_one_name_live_apart_and_names_are_not_reused(service, tmp_path):
    model = await model_of(service, await session_of(service))
    training = service.training
    weights = await result(service, await training.save_weights(model, 1, "a", user_metadata={"epoch": 3}))
    sampler = await result(service, await training.save_weights_for_sampler(model, 2, path="a"))
    external = await result(service, await training.save_weights_external(model, 3, "a"))
    assert external["size_bytes"] > 0
    paths = [one["path"] for one in (weights, sampler, external)]
    assert paths == [
        f"tinker://{model}/{kind}/a" for kind in ("weights", "sampler_weights", "external_weights")
    ]
    listed = (await service.checkpoints.of_run(model))["checkpoints"]
    assert [one["checkpoint_type"] for one in listed] == ["external", "sampler", "training"]
    assert listed[2]["user_metadata"] == {"epoch": "3"} and listed[2]["size_bytes"] > 0
    assert listed[0]["checkpoint_id"] == "external_weights/a" and listed[0]["expires_at"] is None
    run_json = await service.checkpoints.training_run(model)
    assert run_json["last_checkpoint"]["tinker_path"] == paths[0]
    assert run_json["last_sampler_checkpoint"]["tinker_path"] == paths[1]
    with _refused(400, "exists already. Choose another name"):
        await training.save_weights(model, 4, "a")
    again = await result(service, await training.save_weights(model, 5, "a", overwrite=True))
    assert again["path"] == paths[0]
    await service.checkpoints.delete(model, "weights/a")
    with _refused(404, "There is no checkpoint"):
        await service.checkpoints.delete(model, "weights/a")
    with _refused(400, "doesn't say of which kind"):
        await service.checkpoints.delete(model, "a")
    left = [one["checkpoint_id"] for one in (await service.checkpoints.all())["checkpoints"]]
    assert left == ["external_weights/a", "sampler_weights/a"]
    assert not (tmp_path / "checkpoints" / model.replace(":", "%3A") / "weights").exists()


@with_service()
async def test_an_overwritten_checkpoint_is_the_new_one_and_two_writers_of_one_name_are_told(service, engine, tmp_path):
    model = await model_of(service, await session_of(service))
    engine.held.add(p.SaveState)
    first = await service.training.save_weights(model, 1, "a")
    with _refused(400, "exists already"):
        await service.training.save_weights(model, 2, "a")
    engine.release()
    await result(service, first)
    steps = tmp_path / "checkpoints" / model.replace(":", "%3A") / "weights" / "a" / "fake.json"
    assert json.loads(steps.read_text())["steps"] == 0
    await result(service, await service.training.optim_step(model, 3, ADAM))
    engine.models[model].steps = 5
    await result(service, await service.training.save_weights(model, 4, "a", overwrite=True))
    assert json.loads(steps.read_text())["steps"] == 5
    engine.failures[p.SaveState] = "No space left on device"
    failed = await service.training.save_weights(model, 5, "b")
    assert await failure(service, failed) == ("server", "No space left on device")
    engine.failures.clear()
    await result(service, await service.training.save_weights(model, 6, "b"))


@with_service()
async def test_create_from_a_checkpoint_takes_its_settings(service, engine):
    session = await session_of(service)
    adapter = p.AdapterConfig(4, 7, attention=True, mlp=False, unembed=False)
    promise = await service.training.create_model(session, 0, MODEL, adapter)
    await result(service, promise)
    model = promise.model_id
    weights = (await result(service, await service.training.save_weights(model, 1, "w")))["path"]
    sampler = (await result(service, await service.training.save_weights_for_sampler(model, 2, path="s")))[
        "path"
    ]
    info = await service.checkpoints.weights_info(weights)
    assert info["lora_rank"] == 4 and info["base_model"] == MODEL and info["is_lora"] is True
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, False, False)
    await result(service, await service.training.create_model_from(session, 1, weights, optimizer_state=True))
    await result(service, await service.training.create_model_from(session, 2, sampler))
    restored = engine.ran_of(p.RestoreModel)
    assert [one.optimizer for one in restored] == [True, False]
    assert (await service.training.get_info(f"{session}:train:1"))["lora_rank"] == 4
    with _refused(400, "is a sampler checkpoint"):
        await service.training.create_model_from(session, 3, sampler, optimizer_state=True)
    # The older form: a model's first request, and no other.
    fresh = await model_of(service, session, 4)
    await result(service, await service.training.load_weights(fresh, 1, weights))
    assert engine.ran_of(p.LoadWeights)[0].optimizer is False


@with_service()
async def test_checkpoints_expire_and_are_published(service, tmp_path):
    model = await model_of(service, await session_of(service))
    desk = service.checkpoints
    path = (await result(service, await service.training.save_weights(model, 1, "a", ttl_seconds=3600)))["path"]
    listed = (await desk.of_run(model))["checkpoints"][0]
    assert listed["expires_at"] > listed["time"] and listed["public"] is False
    with _refused(400, "ttl_seconds is out of range"):
        await service.training.save_weights(model, 2, "b", ttl_seconds=5)
    await desk.publish(model, "weights/a", True)
    await desk.publish(model, "weights/a", True)  # what is so already stays so
    assert (await desk.of_run(model))["checkpoints"][0]["public"] is True
    await desk.publish(model, "weights/a", False)
    await desk.set_ttl(model, "weights/a", None)
    await desk.expire(time.time() + 4000)
    assert (await desk.weights_info(path))["lora_rank"] == 8
    await desk.set_ttl(model, "weights/a", 3600)
    await desk.expire(time.time() + 4000)
    with _refused(404, "its ttl has run out"):
        await desk.weights_info(path)
    assert not list((tmp_path / "checkpoints").rglob("*.json"))


def test_external_weights_are_encrypted_to_their_readers(tmp_path):
    async def test():
        identity = pyrage.x25519.Identity.generate()
        async with serving(tmp_path) as (service, _):
            model, desk = await model_of(service, await session_of(service)), service.checkpoints
            training = service.training
            for seq_id, keys, text in (
                (1, ["age1nothing"], r"age_encryption_recipients\[0\] is not a public key"),
                (2, [str(identity.to_public())] * 11, "Too many age_encryption_recipients. Got: 11. Expected: at most"),
            ):
                with _refused(400, text):
                    await training.save_weights_external(model, seq_id, "secret", age_encryption_recipients=tuple(keys))
            keys = (str(identity.to_public()),)
            await result(
                service, await training.save_weights_external(model, 3, "secret", age_encryption_recipients=keys)
            )
            urls = (await desk.external_urls(model, "external_weights/secret", "http://host:1"))["urls"]
            assert {"adapter_config.json.age", "adapter_model.safetensors.age"} <= urls.keys()
            assert all(name.endswith(".age") for name in urls)
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(urls["adapter_config.json.age"]).query))
            secret = (await desk.verify_download(**query)).read_bytes()
            assert b"lora_alpha" not in secret and json.loads(pyrage.decrypt(secret, [identity]))["r"] == 8

    run(test())


@with_service()
async def test_external_weights_are_fetched_by_signed_urls(service):
    model = await model_of(service, await session_of(service))
    desk = service.checkpoints
    await result(service, await service.training.save_weights_external(model, 1, "x#1"))
    await result(service, await service.training.save_weights(model, 2, "w"))
    found = await desk.external_urls(model, "external_weights/x#1", "http://host:1/prefix/")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= found["urls"].keys()
    assert found["expires"].endswith("Z")
    url = urllib.parse.urlsplit(found["urls"]["adapter_config.json"])
    assert url.path == "/prefix/api/v1/_download" and url.netloc == "host:1"
    query = dict(urllib.parse.parse_qsl(url.query))
    file = await desk.verify_download(**query)
    assert json.loads(file.read_text())["r"] == 8
    for changed in (
        {"path": query["path"].replace("adapter_config", "fake")},
        {"expires": str(int(query["expires"]) + 1)},
        {"signature": "0" * 64}, {"signature": "é"}, {"expires": "²"},
    ):  # fmt: skip
        with _refused(403, "signature is wrong"):
            await desk.verify_download(**{**query, **changed})
    with _refused(400, "has no files to download"):
        await desk.external_urls(model, "weights/w", "http://h")
    archive, _ = await desk.archive_url(model, "weights/w", "http://h")
    directory = await desk.verify_download(**dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(archive).query)))
    assert (directory / "fake.json").exists()
    await desk.delete(model, "external_weights/x#1")
    with _refused(404, "There is no checkpoint"):
        await desk.verify_download(**query)


def test_a_signature_ends_and_belongs_to_one_key():
    signer = UrlSigner(b"k" * 32)
    signature = signer.sign("p", 100)
    signer.verify("p", "100", signature, 99.0)
    with _refused(403, "has expired"):
        signer.verify("p", "100", signature, 101.0)
    with _refused(403, "signature is wrong"):
        UrlSigner(b"j" * 32).verify("p", "100", signature, 99.0)


@with_service()
async def test_a_signed_url_cannot_name_a_file_outside(service):
    model = await model_of(service, await session_of(service))
    await result(service, await service.training.save_weights_external(model, 1, "x"))
    path = f"tinker://{model}/external_weights/x#../../../../locojax.sqlite"
    expires = str(int(time.time()) + 60)
    signature = service.checkpoints._signer.sign(path, int(expires))
    with _refused(404, "There is no file"):
        await service.checkpoints.verify_download(path, expires, signature)


@with_service()
async def test_copies(service):
    session = await session_of(service)
    model = await model_of(service, session)
    path = (await result(service, await service.training.save_weights(model, 1, "a")))["path"]
    request = {"source_path": path, "session_id": session, "model_seq_id": 5, "ttl_seconds": None}
    copies = [await service.checkpoints.copy(request, idempotency_key="k") for _ in range(2)]
    assert copies == [{"tinker_path": f"tinker://{session}:train:5/weights/a"}] * 2
    with _refused(400, "with another request"):
        await service.checkpoints.copy({**request, "ttl_seconds": 3600}, idempotency_key="k")
    await service.checkpoints.delete(model, "weights/a")
    assert (await service.checkpoints.weights_info(copies[0]["tinker_path"]))["lora_rank"] == 8
    promise = await service.training.create_model_from(session, 6, copies[0]["tinker_path"])
    await result(service, promise)
    assert (await service.checkpoints.training_run(f"{session}:train:5"))["training_run_id"].endswith(":5")
    assert (await service.checkpoints.training_runs())["cursor"]["total_count"] == 3
    with _refused(404, "There is no checkpoint"):
        await service.checkpoints.copy({"source_path": path, "destination_project_id": "p"})


def test_a_peft_adapter_is_imported(tmp_path):
    async def test():
        async with serving(tmp_path / "data") as (service, _):
            source = pathlib.Path(tmp_path, "adapter")
            source.mkdir()
            config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
            (source / "adapter_config.json").write_text(json.dumps(config))
            (source / "adapter_model.safetensors").write_bytes(b"weights")
            path = (await service.checkpoints.import_peft(str(source), "mine"))["tinker_path"]
            assert (await service.checkpoints.import_peft(str(source), "mine"))["tinker_path"] == path
            info = await service.checkpoints.weights_info(path)
            assert (info["lora_rank"], info["train_attn"], info["train_mlp"], info["train_unembed"]) == (
                4,
                True,
                False,
                True,
            )
            session = await session_of(service)
            opened = await service.sampling.create_session(session, 0, model_path=path)
            assert opened["type"] == "create_sampling_session"
            with _refused(400, "holds no PEFT adapter"):
                await service.checkpoints.import_peft(str(tmp_path), "other")

    run(test())


@with_service()
async def test_training_runs_are_paged(service):
    session = await session_of(service)
    models = [await model_of(service, session, n, user_metadata={"n": str(n)}) for n in range(4)]
    page = await service.checkpoints.training_runs(limit=2, offset=1)
    assert [one["training_run_id"] for one in page["training_runs"]] == [models[2], models[1]]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 4}
    assert page["training_runs"][0]["user_metadata"] == {"n": "2"}
    with _refused(404, "There is no training run 'x'"):
        await service.checkpoints.training_run("x")
