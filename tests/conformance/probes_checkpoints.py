"""Checkpoints: what is saved, restored, listed, shared, downloaded and deleted, over the SDK and its command line."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import tinker
from conformance import sdks
from conformance.client import (
    API_KEY,
    TEXTS,
    Client,
    close_to,
    datum,
    equal,
    fingerprint,
    forward,
    refused,
    sample,
    scored,
    session_of,
    since,
    snapshot,
    spelled,
    train,
    until,
    version_of,
)


def continued(trainer: tinker.TrainingClient) -> np.ndarray:
    """The model after two steps more."""
    train(trainer, TEXTS[2:], steps=2)
    return fingerprint(trainer)


def probe_restore_with_and_without_optimizer(client: Client) -> None:
    """With Adam's state a resumed run is the uninterrupted one to the bit; without, it starts Adam anew."""
    trainer = client.trainer()
    train(trainer)
    path = trainer.save_state("middle").result().path
    saved, uninterrupted = fingerprint(trainer), continued(trainer)
    service = client.service()
    warm = client.note(service.create_training_client_from_state_with_optimizer(path))
    cold = client.note(service.create_training_client_from_state(path))
    equal(fingerprint(warm), saved)
    equal(fingerprint(cold), saved)
    equal(continued(warm), uninterrupted)
    assert np.max(np.abs(continued(cold) - uninterrupted)) > 1e-6


def probe_load_state(client: Client) -> None:
    """The older form: into a model that exists, as its first request only."""
    trainer = client.trainer(seed=1)
    train(trainer)
    path = trainer.save_state("x").result().path
    saved, uninterrupted = fingerprint(trainer), continued(trainer)
    other = client.trainer(seed=2)
    other.load_state_with_optimizer(path).result()
    equal(fingerprint(other), saved)
    equal(continued(other), uninterrupted)
    late = client.trainer(seed=3)
    train(late, steps=1)
    with refused("LoadWeights is not permitted with seq_id"):
        late.load_state(path).result()


def probe_checkpoint_names_are_apart_by_kind(client: Client) -> None:
    """weights/x and sampler_weights/x live side by side."""
    trainer = client.trainer()
    train(trainer)
    state = trainer.save_state("x").result().path
    first = fingerprint(trainer)
    train(trainer)
    sampler = trainer.save_weights_for_sampler("x").result().path
    model_id = trainer.model_id
    assert state == f"tinker://{model_id}/weights/x" and sampler == f"tinker://{model_id}/sampler_weights/x"
    resumed = client.note(client.service().create_training_client_from_state(state))
    equal(fingerprint(resumed), first)
    served = scored(client.service().create_sampling_client(model_path=sampler), TEXTS[0])[1:]
    close_to(served, forward(trainer, [datum(TEXTS[0])])[0], 1e-3)


def probe_a_taken_name(client: Client) -> None:
    """Another save under a taken name is refused unless it overwrites; never a status that the SDK repeats."""
    trainer = client.trainer()
    trainer.save_state("x").result()
    with refused("x"):
        trainer.save_state("x").result()


@since("0.36")
def probe_overwrite(client: Client) -> None:
    trainer = client.trainer()
    trainer.save_state("x").result()
    train(trainer)
    path = trainer.save_state("x", overwrite=True).result().path
    equal(fingerprint(client.note(client.service().create_training_client_from_state(path))), fingerprint(trainer))


def probe_bad_names(client: Client) -> None:
    """No name leaves the checkpoint folder."""
    for name in ("a/b", "..", ".", "", "a\x00b", "x" * 5000, "../../etc/passwd"):
        trainer = client.trainer()
        with refused():
            trainer.save_state(name).result()
        client.finish(session_of(trainer))


def probe_paths_of_the_wrong_kind(client: Client) -> None:
    """A training checkpoint is no sampler, a sampler restores no optimizer: the refusal names the right kind."""
    trainer = client.trainer()
    train(trainer, steps=1)
    state = trainer.save_state("s").result().path
    sampler = trainer.save_weights_for_sampler("w").result().path
    with refused("sampler_weights"):
        sample(client.service().create_sampling_client(model_path=state), TEXTS[0]).result()
    with refused("weights/"):
        client.note(client.service().create_training_client_from_state_with_optimizer(sampler))
    missing = state.replace("/weights/s", "/weights/nowhere")
    with refused("nowhere"):
        client.note(client.service().create_training_client_from_state(missing))
    with refused():
        sample(client.service().create_sampling_client(model_path="tinker://nonsense"), TEXTS[0]).result()


def probe_training_runs(client: Client) -> None:
    """A run is listed with its settings, and the client's own metadata comes back."""
    trainer = client.trainer(rank=3, user_metadata={"renderer_name": "role_colon"})
    path = trainer.save_state("final").result().path
    rest = client.rest()
    runs = (
        rest.get_training_run(trainer.model_id).result(),
        rest.get_training_run_by_tinker_path(path).result(),
        next(
            run
            for run in rest.list_training_runs(limit=100).result().training_runs
            if run.training_run_id == trainer.model_id
        ),
    )
    for run in runs:
        assert run.base_model == client.base_model and run.is_lora and run.lora_rank == 3 and not run.corrupted
        assert run.user_metadata == {"renderer_name": "role_colon"}
        assert run.last_checkpoint.tinker_path == path
    page = rest.list_training_runs(limit=1).result()
    assert len(page.training_runs) == 1 and page.cursor.total_count >= 1
    with refused("nobody"):
        rest.get_training_run("nobody:train:0").result()


def probe_runs_outlive_their_session(client: Client) -> None:
    trainer = client.trainer()
    train(trainer)
    path = trainer.save_state("kept").result().path
    saved = fingerprint(trainer)
    client.finish(session_of(trainer))
    resumed = client.note(client.service().create_training_client_from_state(path))
    equal(fingerprint(resumed), saved)


def probe_checkpoint_lists(client: Client) -> None:
    trainer = client.trainer()
    trainer.save_state("one").result()
    trainer.save_weights_for_sampler("two").result()
    # A kind that older SDKs don't know must not spoil their lists.
    assert "path" in client.result(
        client.post("save_weights_external", model_id=trainer.model_id, seq_id=3, path="three", ttl_seconds=3600)
    )
    rest = client.rest()
    mine = {c.checkpoint_id: c for c in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    is_new = version_of(tinker.__version__) >= (0, 30)
    assert set(mine) == {"weights/one", "sampler_weights/two"} | ({"external_weights/three"} if is_new else set())
    assert mine["weights/one"].checkpoint_type == "training"
    assert mine["sampler_weights/two"].checkpoint_type == "sampler"
    assert mine["weights/one"].size_bytes > 1000 and not mine["weights/one"].public
    everyone = rest.list_user_checkpoints(limit=100).result().checkpoints
    times = [c.time for c in everyone]
    assert times == sorted(times, reverse=True), "newest first"
    assert {c.tinker_path for c in mine.values()} <= {c.tinker_path for c in everyone}


def probe_delete(client: Client) -> None:
    trainer = client.trainer()
    path = trainer.save_state("doomed").result().path
    rest = client.rest()
    rest.delete_checkpoint(trainer.model_id, "weights/doomed").result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    with refused("doomed"):
        client.note(client.service().create_training_client_from_state(path))
    with refused():
        rest.delete_checkpoint(trainer.model_id, "weights/doomed").result()
    sampler = trainer.save_weights_for_sampler("too").result().path
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    with refused("too"):
        sample(client.service().create_sampling_client(model_path=sampler), TEXTS[0]).result()
    trainer.save_state("doomed").result()  # the name is free again


def probe_publish(client: Client) -> None:
    trainer = client.trainer()
    path = trainer.save_state("p").result().path
    rest = client.rest()
    for is_public, change in (
        (True, rest.publish_checkpoint_from_tinker_path),
        (False, rest.unpublish_checkpoint_from_tinker_path),
    ):
        began = time.monotonic()
        for _ in range(2):  # the second time it is so already, and its client must not wait for it to be otherwise
            change(path).result()
        assert time.monotonic() - began < 20
        assert rest.list_checkpoints(trainer.model_id).result().checkpoints[0].public is is_public


def probe_time_to_live(client: Client) -> None:
    trainer = client.trainer()
    path = trainer.save_state("t", ttl_seconds=7200).result().path
    rest = client.rest()

    def expires_at() -> Any:
        return rest.list_checkpoints(trainer.model_id).result().checkpoints[0].expires_at

    assert abs(expires_at().timestamp() - time.time() - 7200) < 120
    rest.set_checkpoint_ttl_from_tinker_path(path, 36000).result()
    assert abs(expires_at().timestamp() - time.time() - 36000) < 120
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert expires_at() is None


def probe_weights_info(client: Client) -> None:
    trainer = client.trainer(rank=2, train_unembed=False)
    path = trainer.save_state("w").result().path
    info = client.rest().get_weights_info_by_tinker_path(path).result()
    assert info.base_model == client.base_model and info.is_lora and info.lora_rank == 2
    assert (info.train_unembed, info.train_mlp, info.train_attn) == (False, True, True)


def probe_get_info(client: Client) -> None:
    trainer = client.trainer(rank=2)
    info = trainer.get_info()
    assert info.model_data.model_name == client.base_model and info.lora_rank == 2 and info.is_lora
    assert info.model_id == trainer.model_id
    assert trainer.get_tokenizer().decode(TEXTS[0]) == spelled(TEXTS[0])


@since("0.36")
def probe_external_weights(client: Client) -> None:
    """A PEFT directory behind signed URLs that need no key, expire, and serve nothing else."""
    trainer = client.trainer(rank=2)
    train(trainer)
    path = trainer.save_weights_external("out", ttl_seconds=3600).result().path
    answer = client.rest().get_external_weights_urls(path).result()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(answer.urls)
    assert answer.expires.timestamp() > time.time() + 300
    for name, url in answer.urls.items():
        with urllib.request.urlopen(url) as file:
            content = file.read()
        if name == "adapter_config.json":
            config = json.loads(content)
            assert config["r"] == 2 and config["peft_type"] == "LORA"
    forged = url[:-4] + ("0000" if url[-4:] != "0000" else "1111")
    try:
        urllib.request.urlopen(forged)
    except urllib.error.HTTPError as error:
        assert error.code in (400, 401, 403, 404), error.code
    else:
        raise AssertionError("a forged URL was served")
    assert path == f"tinker://{trainer.model_id}/external_weights/out"


@until("0.30")
def probe_archive_url(client: Client) -> None:
    """Older SDKs' download: a redirect to an archive, readable without a key."""
    trainer = client.trainer(rank=2)
    path = trainer.save_weights_for_sampler("arch").result().path
    answer = client.rest().get_checkpoint_archive_url_from_tinker_path(path).result()
    with urllib.request.urlopen(answer.url) as file:
        assert len(file.read()) > 1000


@since("0.38")
def probe_copy_weights(client: Client) -> None:
    trainer = client.trainer()
    train(trainer)
    path = trainer.save_state("source").result().path
    copy = client.rest().copy_weights(path, destination_project_id="default").result()
    copied = copy if isinstance(copy, str) else copy.tinker_path
    assert copied != path
    client.rest().delete_checkpoint_from_tinker_path(path).result()
    resumed = client.note(client.service().create_training_client_from_state(copied))
    equal(fingerprint(resumed), fingerprint(trainer))


def probe_sessions(client: Client) -> None:
    trainer = client.trainer()
    sample(snapshot(trainer), TEXTS[0]).result()
    session_id, rest = session_of(trainer), client.rest()
    assert session_id in rest.list_sessions(limit=100).result().sessions
    session = rest.get_session(session_id).result()
    assert session.training_run_ids == [trainer.model_id]
    assert len(session.sampler_ids) == 1
    assert rest.get_sampler(session.sampler_ids[0]).result().base_model == client.base_model


@since("0.36")
def probe_optimizers_other_than_adam(client: Client) -> None:
    """An optimizer that isn't here is refused by name; it never silently becomes Adam."""
    session = client.open_session()
    answer = client.post(
        "create_model", session_id=session, model_seq_id=0, base_model=client.base_model,
        lora_config={"rank": 4}, optimizer_config={"type": "dimuon", "version": 1}, type="create_model",
    )  # fmt: skip
    assert answer.status_code in (400, 422) and "dimuon" in answer.text, answer.text


def command_line(client: Client, *arguments: str) -> str:
    """Runs `tinker ...` against the server; its output."""
    environment = {
        **sdks.environment(), "TINKER_BASE_URL": client.url, "TINKER_API_KEY": API_KEY, "COLUMNS": "250",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tinker.cli", *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    status = sdks.exit_status(done.returncode, done.stderr)
    assert status == 0, f"tinker {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def probe_command_line(client: Client) -> None:
    """Lists, shows, publishes, expires and deletes."""
    trainer = client.trainer()
    path = trainer.save_state("cli").result().path
    run_id = trainer.model_id
    assert run_id in command_line(client, "-f", "json", "run", "list")
    assert run_id in command_line(client, "-f", "json", "run", "info", run_id)
    assert path in command_line(client, "-f", "json", "checkpoint", "list")
    assert path in command_line(client, "-f", "json", "checkpoint", "list", "--run-id", run_id)
    assert "training" in command_line(client, "-f", "json", "checkpoint", "info", path)
    command_line(client, "checkpoint", "publish", path)
    command_line(client, "checkpoint", "unpublish", path)
    if version_of(tinker.__version__) < (0, 25):
        return  # 0.16's own `delete` loses its arguments under newer versions of click
    command_line(client, "checkpoint", "delete", "-y", path)
    assert client.rest().list_checkpoints(run_id).result().checkpoints == []


@since("0.36")
def probe_command_line_of_today(client: Client) -> None:
    """`checkpoint download` fetches the adapter; models are listed and a checkpoint's life is set."""
    trainer = client.trainer(rank=2)
    train(trainer)
    path = trainer.save_state("cli").result().path
    assert client.base_model in command_line(client, "-f", "json", "model", "list")
    command_line(client, "checkpoint", "set-ttl", path, "--ttl", "7200")
    with tempfile.TemporaryDirectory() as folder:
        command_line(client, "checkpoint", "download", path, "--output", folder)
        found = {file.name for file in pathlib.Path(folder).rglob("*")}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= found, found
    command_line(client, "checkpoint", "delete", "-y", path)
