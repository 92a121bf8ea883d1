"""Kills a process of a server under load, as a client sees it: `python -m conformance.crashes ROLE URL PID LOG`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import time

import tinker
from conformance.client import TEXTS, Client, datum, equal, fingerprint, refused, sample, settled, train
from conformance.server import MODEL, Server
from tinker import types


def kill(server: Server, role: str) -> None:
    pid = server.child(role)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(LookupError):
            if server.child(role) != pid:
                return
        time.sleep(0.1)
    raise AssertionError(f"the {role} process wasn't started again")


def wait_until_healthy(client: Client, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):  # any failure means: not yet
            if client.http.get("/api/v1/healthz").status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError("the server isn't healthy again")


def the_engine_dies(fragile: Server, client: Client) -> None:
    """Operations in flight fail with words that say so; the checkpoint brings the model back to the bit."""
    trainer = client.trainer()
    train(trainer)
    path = trainer.save_state("before").result().path
    named = trainer.save_weights_for_sampler("named").result().path
    saved, sampler = fingerprint(trainer), client.base_sampler()
    flying = [sample(sampler, text, num_samples=8, max_tokens=200) for text in TEXTS]
    flying += [trainer.forward_backward([datum(TEXTS[0])] * 64, "cross_entropy") for _ in range(4)]
    kill(fragile, "engine")
    failures = []
    for future in flying:
        try:
            future.result(timeout=120)
        except tinker.TinkerError as error:
            failures.append(str(error))
    assert failures and all("restarted" in text for text in failures), failures
    wait_until_healthy(client)
    with refused("restart"):
        trainer.forward([datum(TEXTS[0])], "cross_entropy").result(timeout=60)
    resumed = client.note(client.service().create_training_client_from_state_with_optimizer(path))
    equal(fingerprint(resumed), saved)
    reopened = settled(client.service().create_sampling_client(model_path=named))
    assert len(sample(reopened, TEXTS[0]).result(timeout=60).sequences) == 1
    assert len(sample(sampler, TEXTS[0]).result(timeout=60).sequences) == 1  # of the base model: still good


def the_api_dies(fragile: Server, client: Client) -> None:
    """The engine works on; the SDK's polls find their results after the restart; sessions and models live."""
    trainer = client.trainer()
    train(trainer)
    before = fingerprint(trainer)
    sampler = client.base_sampler()
    flying = [sample(sampler, text, num_samples=4, max_tokens=150) for text in TEXTS]
    step = trainer.forward_backward([datum(TEXTS[0])], "cross_entropy")
    time.sleep(0.5)
    kill(fragile, "api")
    for future in flying:
        assert len(future.result(timeout=120).sequences) == 4
    step.result(timeout=120)
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=60)
    equal(fingerprint(trainer), before)
    assert client.rest().get_training_run(trainer.model_id).result().lora_rank == 4


def main(role: str, url: str, pid: int, log: str) -> None:
    client = Client(url, MODEL)
    server = Server(url, pid, pathlib.Path(log))
    {"engine": the_engine_dies, "api": the_api_dies}[role](server, client)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
