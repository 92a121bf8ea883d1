"""What the Tinker server bears: a burst with heartbeats timed beside it, and a soak with memory watched.

    python benchmarks/tinker_load.py burst     512 samples at once and 200 forward_backward bodies of 3 MB
    python benchmarks/tinker_load.py soak [--minutes 30]    mixed tenants, some of them rude, coming and going

Both run a tiny random model, so that the server's own work is what is measured, and go over the official SDK;
heartbeats are timed by a process of their own. A burst passes when no future is lost and 95 % of heartbeats take under
200 ms; a soak, when memory stays flat and no future is left. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import pathlib
import random
import re
import sys
import tempfile
import threading
import time
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

TESTS = pathlib.Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from conformance.server import MODEL, Server, serve  # noqa: E402  (found by the path above)
from tiny import write_tiny_model  # noqa: E402

KEY = "tml-load"
HEARTBEAT_BOUND = 0.2  # seconds, of the 95th percentile
LOST_AFTER = 300.0  # seconds: a future of the soak's, whose work takes a few, that has no result by then never will
MARK_EVERY = 300.0  # seconds between the soak's marks
SESSION_TIMEOUT = 60.0  # seconds


def time_heartbeats(url: str, stop: Any, answers: Any) -> None:
    """A process of its own: a heartbeat each 50 ms until told to stop; puts its waits, in seconds."""
    with httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": KEY}, timeout=60.0) as http:
        session_id = http.post("/create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
        waits = []
        while not stop.is_set():
            started = time.perf_counter()
            http.post("/session_heartbeat", json={"session_id": session_id}).raise_for_status()
            waits.append(time.perf_counter() - started)
            time.sleep(0.05)
    answers.put(waits)


def large_batch(num_bytes: int) -> list[types.Datum]:
    """Data whose protobuf has about so many bytes: many targets a position, as distillation sends them."""
    num_tokens, num_targets = 96, 64
    size = num_tokens * (4 + num_targets * 12)
    generator = np.random.default_rng(0)
    data = []
    for _ in range(num_bytes // size):
        shape = [num_tokens, num_targets]
        inputs = {
            "target_tokens": types.TensorData(
                data=generator.integers(0, 256, shape).astype(np.int64), dtype="int64", shape=shape
            ),
            "weights": types.TensorData(
                data=generator.random(shape, np.float32) / num_targets, dtype="float32", shape=shape
            ),
        }
        tokens = generator.integers(0, 256, num_tokens).tolist()
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs))
    return data


def burst(server: Server, num_samples: int, num_bodies: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    stop, answers = context.Event(), context.Queue()
    beats = context.Process(target=time_heartbeats, args=(server.url, stop, answers))
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    trainers = [service.create_lora_training_client(base_model=MODEL, rank=4, seed=i).result() for i in range(4)]
    sampler = service.create_sampling_client(base_model=MODEL).result()
    batch = large_batch(3_000_000)
    beats.start()
    started = time.perf_counter()
    params = types.SamplingParams(max_tokens=64, stop=[])
    futures: list[Any] = [
        sampler.sample(prompt=types.ModelInput.from_ints([65, i % 256]), num_samples=1, sampling_params=params)
        for i in range(num_samples)
    ]
    futures += [trainers[i % 4].forward_backward(batch, "cross_entropy") for i in range(num_bodies)]
    lost = 0
    for future in futures:
        try:
            future.result(timeout=1800)
        except (tinker.TinkerError, concurrent.futures.TimeoutError) as error:
            print(f"lost: {error}")
            lost += 1
    seconds = time.perf_counter() - started
    stop.set()
    waits = sorted(answers.get(timeout=60))
    beats.join()
    service.close("success").result()
    p95 = waits[int(0.95 * len(waits))]
    print(f"{num_samples} samples and {num_bodies} bodies of 3 MB in {seconds:.0f} s, {lost} futures lost; "
          f"{len(waits)} heartbeats: median {1e3 * waits[len(waits) // 2]:.0f} ms, 95 % within {1e3 * p95:.0f} ms, "
          f"longest {1e3 * waits[-1]:.0f} ms")  # fmt: skip
    return {
        "name": "tinker_burst", "ours": round(p95, 4), "against": "the bound of heartbeats' 95th percentile",
        "theirs": HEARTBEAT_BOUND, "ratio": round(HEARTBEAT_BOUND / p95, 2), "unit": "s",
        "conditions": {"lost": lost, "seconds": round(seconds), "num_samples": num_samples, "num_bodies": num_bodies},
    }  # fmt: skip


def tenant(url: str, number: int, end: float, counts: dict[str, int], lock: threading.Lock) -> None:
    """Clients one after the other, each with a session of its own: trains, samples, saves, errs, and leaves."""
    draw, rest = random.Random(number), tinker.RestClient(base_url=url, api_key=KEY)
    while time.monotonic() < end:
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        try:
            trainer = service.create_lora_training_client(
                base_model=MODEL, rank=draw.choice([1, 4, 8, 32])
            ).result(LOST_AFTER)
            for step in range(draw.randrange(1, 6)):
                one_step(trainer, draw)
                sampler = trainer.save_weights_and_get_sampling_client().result(LOST_AFTER)
                ask(sampler, draw)
                if draw.random() < 0.3:
                    path = trainer.save_state(f"s{step}").result(LOST_AFTER).path
                    rest.delete_checkpoint_from_tinker_path(path).result(LOST_AFTER)
            outcome = "done"
        except concurrent.futures.TimeoutError:
            outcome = "lost"
        except (tinker.TinkerError, ValueError) as error:
            outcome = type(error).__name__
            with lock:
                if outcome not in counts:
                    print(f"first {outcome}: {error}", flush=True)
        if draw.random() < 0.8:
            service.close("success" if outcome == "done" else "errored").result()
        else:
            service.holder.close()  # as if its process had ended: no goodbye, no more heartbeats; its session expires
        with lock:
            counts[outcome] = counts.get(outcome, 0) + 1
        if outcome == "RequestFailedError":
            time.sleep(5)  # e.g. all slots are taken, by those who left without a goodbye


def one_step(trainer: tinker.TrainingClient, draw: random.Random) -> None:
    data = []
    for _ in range(draw.randrange(1, 9)):
        tokens = [draw.randrange(256) for _ in range(draw.randrange(3, 200))]
        if draw.random() < 0.02:
            tokens[-1] = 9999  # out of the vocabulary: refused
        n = len(tokens) - 1
        target = types.TensorData(data=tokens[1:], dtype="int64", shape=[n])
        weights = types.TensorData(data=[draw.choice([1.0, 0.0, -1.0])] * n, dtype="float32", shape=[n])
        inputs = {"target_tokens": target, "weights": weights}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    gradients = trainer.forward_backward(data, "cross_entropy")
    update = trainer.optim_step(types.AdamParams(learning_rate=draw.choice([1e-4, 1e-2, 1e5])))
    gradients.result(LOST_AFTER)
    update.result(LOST_AFTER)


def ask(sampler: tinker.SamplingClient, draw: random.Random) -> None:
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints([draw.randrange(256) for _ in range(draw.randrange(1, 100))]),
            num_samples=draw.randrange(1, 5),
            sampling_params=types.SamplingParams(max_tokens=draw.randrange(1, 100)),
        )
        for _ in range(4)
    ]
    for future in futures:
        future.result(LOST_AFTER)


def megabytes(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def open_futures(url: str) -> dict[str, float]:
    """Futures by state, as /metrics has them."""
    text = httpx.get(f"{url}/metrics", headers={"X-API-Key": KEY}).text
    return {state: float(n) for state, n in re.findall(r'locojax_futures\{state="(\w+)"\} (\S+)', text)}


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a server held at a moment: minutes since the start, MB resident, futures by state."""

    minutes: float
    engine: float
    api: float
    futures: dict[str, float]

    @classmethod
    def take(cls, server: Server, started: float) -> Mark:
        minutes = round((time.monotonic() - started) / 60, 2)
        sizes = [round(megabytes(server.child(role)), 1) for role in ("engine", "api")]
        return cls(minutes, *sizes, open_futures(server.url))


def soak(server: Server, minutes: float) -> dict[str, Any]:
    started, counts, lock = time.monotonic(), dict[str, int](), threading.Lock()
    end = started + 60 * minutes
    rows: list[Mark] = []
    marks: list[Mark] = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        tenants = [pool.submit(tenant, server.url, i, end, counts, lock) for i in range(4)]
        while not all(one.done() for one in tenants):
            time.sleep(5)
            rows.append(Mark.take(server, started))
            if rows[-1].minutes * 60 >= MARK_EVERY * (len(marks) + 1):
                marks.append(rows[-1])
                print(f"{marks[-1]}, {counts}", flush=True)
        for one in tenants:
            one.result()
    left = wait_for_none(server.url)
    late = rows[len(rows) // 2 :]
    slopes = [
        float(np.polyfit([row.minutes for row in late], [getattr(row, role) for row in late], 1)[0])
        for role in ("engine", "api")
    ]
    print(f"{sum(counts.values())} clients: {counts}; in the second half the engine grew {slopes[0]:.2f} MB a minute, "
          f"the API {slopes[1]:.2f}; futures without a result: {left:.0f}")  # fmt: skip
    grew = max(*slopes, 1e-3)
    return {
        "name": "tinker_soak", "ours": round(grew, 3), "against": "1 MB a minute", "theirs": 1.0,
        "ratio": round(1.0 / grew, 2), "unit": "MB a minute, second half, the process that grew more",
        "conditions": {
            "minutes": minutes, "clients": counts, "lost": counts.get("lost", 0), "live_futures": left,
            "mb_a_minute": {"engine": round(slopes[0], 3), "api": round(slopes[1], 3)},
            "marks": [dataclasses.asdict(mark) for mark in marks],
        },
    }  # fmt: skip


def wait_for_none(url: str) -> float:
    """Futures without a result once all clients are gone, and the sessions of those that just left have expired."""
    deadline = time.monotonic() + 3 * SESSION_TIMEOUT
    while (left := open_futures(url).get("pending", 0.0)) and time.monotonic() < deadline:
        time.sleep(1)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("burst", "soak"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--bodies", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "local").mkdir()
        write_tiny_model(folder / MODEL)
        with serve(MODEL, folder, ["--session-timeout", f"{SESSION_TIMEOUT:.0f}"]) as server:
            result = burst(server, args.samples, args.bodies) if args.what == "burst" else soak(server, args.minutes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
