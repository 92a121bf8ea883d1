"""How fast the Tinker server is, over the official SDK, against the nearest peer's own figures.

It starts `locojax serve` once to fill the caches, and for the line `ready` several times more. Over the SDK, with
an adapter of rank 32, it then times each line once cold and `--repeats` times more:

  sample       16 prompts of 64 tokens x 8 samples x 128 new tokens
  ragged       16 prompts x 8 samples; two of 256 new tokens among fourteen of 8-31
  stream       one sample of 128 tokens; the mean of 4
  staggered    16 requests of 4 x 32 tokens that arrive over 2 s: nothing may be compiled
  pass         forward_backward of 16 x 256 tokens, cross_entropy
  pass_ragged  the same over 16 sequences of 60 to 256 tokens, 2400 in all
  first_token  save_weights_and_get_sampling_client, and one token from the sampler; the mean of 16, as CPU time is
               counted in hundredths of a second and one takes a few
  ..._no_head  `pass`, `pass_ragged` and `first_token` of an adapter that leaves the unembedding alone, for models whose
               vocabulary is most of the work: the peer ignores train_unembed, and its report doesn't tell what its
               adapters then adapt
  ready        from the command to a server that answers, caches warm

Figures are of the server's CPU seconds (all its processes, from /proc), which are fair where other work shares the
machine, and of wall time where the peer's was taken on an idle one. The peer (SkyRL 0.4.0, JAX backend) ran where a
bf16 product of 2048 x 2048 runs at 380 GFLOP/s on two cores; ours are scaled to that by the rate measured in this run,
between the lines, in CPU or wall time likewise. A line's ratio is by CPU time where there is one. The last line printed
is one JSON object; its `ratio` is the worst line's.

    python benchmarks/tinker_server.py [--model smollm2-135m|qwen3-5m] [--repeats 3] [--lines sample pass ...]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import tinker
from tinker import types

from locojax.models import decoder
from locojax.models.spec import ModelSpec, num_parameters
from locojax.models.weights import save_directory

PEER_GFLOPS = 380.0  # of a bf16 product, where the peer's figures were taken
PEER_CORES = 2
KEY = "tml-benchmark"

# A Qwen3 of 5 M parameters, nearly all of them its vocabulary: as the peer's, which is Qwen3's own.
QWEN3_5M = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 32,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "eos_token_id": 256,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Peer:
    """The peer's figures for a line, tokens a second or (`is_rate` False) seconds; `target`: how many times better ours
    is to be. `wall` None: it was only taken under other load."""

    target: float
    cpu: float | None = None
    wall: float | None = None
    is_rate: bool = True


SAMPLE, RAGGED, PASS, SAVE, READY_SECONDS = 3.0, 10.0, 2.0, 5.0, 15.0  # what is asked of each kind of line
PEERS: Mapping[str, Mapping[str, Peer]] = {
    "smollm2-135m": {
        "sample": Peer(SAMPLE, cpu=116.0, wall=202.0),
        "stream": Peer(SAMPLE, cpu=14.5),
        "pass": Peer(PASS, cpu=101.0, wall=190.0),
        "pass_ragged": Peer(PASS, cpu=76.0, wall=92.0),
        "first_token": Peer(SAVE, cpu=2.09, wall=1.6, is_rate=False),
        "ready": Peer(95 / READY_SECONDS, wall=95.0, is_rate=False),
    },
    "qwen3-5m": {
        "sample": Peer(SAMPLE, cpu=1660.0),
        "ragged": Peer(RAGGED, cpu=212.0),
        "stream": Peer(SAMPLE, cpu=366.0),
        "pass": Peer(PASS, cpu=1640.0),
        "pass_ragged": Peer(PASS, cpu=1009.0),
        "first_token": Peer(SAVE, cpu=0.19, is_rate=False),
        "ready": Peer(39 / READY_SECONDS, wall=39.0, is_rate=False),
    },
}
NO_HEAD = "_no_head"
MEAN_OF: Mapping[str, int] = {"first_token": 16, "stream": 4}
LINES = ("sample", "ragged", "stream", "staggered", "pass", "pass_ragged", "first_token", "pass_no_head",
         "pass_ragged_no_head", "first_token_no_head", "ready")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Timing:
    """One run of a line: tokens it was about, seconds of wall and of the server's CPU, programs compiled meanwhile."""

    tokens: int
    wall: float
    cpu: float
    compiled: int


class Server:
    """A started server: its address, and what it has used so far."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: pathlib.Path):
        self.process, self.url, self.log = process, url, log

    def wait_until_ready(self, deadline: float = 600.0) -> None:
        end = time.monotonic() + deadline
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/api/v1/healthz", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.05)
        raise SystemExit(f"the server isn't ready:\n{self.log.read_text()[-3000:]}")

    def cpu_seconds(self) -> float:
        """Of the supervisor and all its children, user and system."""
        parents, ticks = {}, {}
        for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(fields[1])
                ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
        family = {self.process.pid}
        while grown := {child for child, parent in parents.items() if parent in family} - family:
            family |= grown
        return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")

    def num_compilations(self) -> int:
        return self._metric("locojax_engine_events_total", "compilations") or 0

    def wait_until_settled(self, deadline: float = 600.0) -> None:
        """Until the engine has nothing left to compile or read in its spare time."""
        end = time.monotonic() + deadline
        while (behind := self._metric("locojax_engine", "num_programs_behind")) != 0:
            if time.monotonic() > end:
                raise SystemExit(f"{behind} programs are left after {deadline:.0f} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.5)

    def _metric(self, family: str, name: str) -> int | None:
        text = httpx.get(f"{self.url}/metrics", headers={"X-API-Key": KEY}).text
        found = re.search(rf'{family}\{{name="{name}"\}} (\S+)', text)
        return int(float(found[1])) if found else None


@contextlib.contextmanager
def serve(model: str, folder: pathlib.Path) -> Iterator[Server]:
    """Starts a server that stops with the block; it may not be ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(pathlib.Path(__file__).parents[1])
    command = [sys.executable, "-m", "locojax", "serve", model, "--port", str(port), "--data-dir", str(folder / "data")]
    log = folder / "server.log"
    with log.open("ab") as out:
        # A cache of its own: empty at the first start, and filled by nothing else before the second.
        environment = {**os.environ, "PYTHONPATH": root, "LOCOJAX_CACHE": str(folder / "cache")}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Gemm:
    """This machine's bf16 rate now: GFLOP/s in wall time, and in CPU time as if all its cores were ours."""

    def __init__(self) -> None:
        self._x = jax.random.normal(jax.random.key(0), (2048, 2048)).astype(jnp.bfloat16)
        self._multiply = jax.jit(lambda x: x @ x)
        self._multiply(self._x).block_until_ready()
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def measure(self) -> None:
        for _ in range(5):
            wall, cpu = time.perf_counter(), time.process_time()
            self._multiply(self._x).block_until_ready()
            operations = 2 * 2048**3 / 1e9
            self.wall.append(operations / (time.perf_counter() - wall))
            self.cpu.append(operations * PEER_CORES / max(time.process_time() - cpu, 1e-9))

    def scale(self, per: str) -> float:
        """How much faster the peer's machine is."""
        return PEER_GFLOPS / statistics.median(self.wall if per == "wall" else self.cpu)


class Bench:
    """The lines, over one client of the server."""

    def __init__(self, server: Server, model: str):
        self.server = server
        self.service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        self.vocabulary = 49152 if model == "smollm2-135m" else QWEN3_5M["vocab_size"]
        served = tinker.RestClient(base_url=server.url, api_key=KEY).get_server_capabilities().result()
        create = partial(
            self.service.create_lora_training_client, base_model=served.supported_models[0].model_name, rank=32, seed=0
        )
        self.trainer, self._no_head = create().result(), create(train_unembed=False).result()
        self.sampler = self.trainer.save_weights_and_get_sampling_client().result()
        self._random = np.random.default_rng(0)

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(2, self.vocabulary, count)]

    def ask(self, num_new: int, num_samples: int, num_prompt: int = 64) -> Any:
        """Sends one request of a new prompt; EOS ends nothing, so lengths are as said."""
        params = types.SamplingParams(max_tokens=num_new, stop=[])
        prompt = types.ModelInput.from_ints(self.tokens(num_prompt))
        return self.sampler.sample(prompt=prompt, num_samples=num_samples, sampling_params=params)

    def count(self, futures: list[Any]) -> int:
        return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)

    def sample(self) -> int:
        return self.count([self.ask(128, 8) for _ in range(16)])

    def ragged(self) -> int:
        lengths = np.random.default_rng(0).integers(8, 32, 16)
        return self.count([self.ask(256 if i in (3, 11) else int(n), 8) for i, n in enumerate(lengths)])

    def stream(self) -> int:
        return self.count([self.ask(128, 1)])

    def staggered(self) -> int:
        futures = []
        for _ in range(16):
            futures.append(self.ask(32, 4))
            time.sleep(2 / 16)
        return self.count(futures)

    def forward_backward(self, lengths: list[int], trainer: Any) -> int:
        data = []
        for length in lengths:
            tokens = self.tokens(length + 1)
            inputs = {
                "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[length]),
                "weights": types.TensorData(data=[1.0] * length, dtype="float32", shape=[length]),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        trainer.forward_backward(data, "cross_entropy").result()
        return sum(lengths)

    def pass_(self, trainer: Any) -> int:
        return self.forward_backward([256] * 16, trainer)

    def pass_ragged(self, trainer: Any) -> int:
        lengths = np.random.default_rng(0).integers(60, 257, 16)
        lengths = np.maximum(1, (lengths * 2400 / lengths.sum()).astype(int)).clip(max=256)
        return self.forward_backward(lengths.tolist(), trainer)

    def first_token(self, trainer: Any) -> int:
        self.sampler = trainer.save_weights_and_get_sampling_client().result()
        return self.count([self.ask(1, 1, num_prompt=8)])

    def work(self, line: str) -> int:
        base = line.removesuffix(NO_HEAD)
        trains = {"pass": self.pass_, "pass_ragged": self.pass_ragged, "first_token": self.first_token}
        if base in trains:
            return trains[base](self._no_head if line.endswith(NO_HEAD) else self.trainer)
        return int(getattr(self, line)())

    def run(self, line: str, times: int = 1) -> Timing:
        """The mean of so many."""
        compiled, cpu, wall = self.server.num_compilations(), self.server.cpu_seconds(), time.perf_counter()
        tokens = sum(self.work(line) for _ in range(times))
        wall, cpu = time.perf_counter() - wall, self.server.cpu_seconds() - cpu
        return Timing(tokens // times, wall / times, cpu / times, self.server.num_compilations() - compiled)


def write_model(folder: pathlib.Path) -> str:
    """The 5 M Qwen3, random, under a byte tokenizer; its path in `folder`."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
    from tiny import tiny_tokenizer

    spec = ModelSpec.from_hf_config(QWEN3_5M)
    params = jax.tree.map(np.asarray, decoder.init_params(spec, jax.random.key(0)))
    save_directory(folder / "local" / "qwen3-5m", params, spec, QWEN3_5M)
    tiny_tokenizer().save(folder / "local" / "qwen3-5m")
    print(f"qwen3-5m: {num_parameters(spec) / 1e6:.1f} M parameters")
    return "local/qwen3-5m"


def ratios(peer: Peer, timing: Timing, gemm: Gemm) -> dict[str, float]:
    """How many times better than the peer, by "cpu" and "wall" as far as there are figures."""
    found = {}
    for per in ("cpu", "wall"):
        theirs, seconds = getattr(peer, per), getattr(timing, per)
        if theirs is not None:
            scaled = max(seconds, 0.01) / gemm.scale(per)
            found[per] = timing.tokens / scaled / theirs if peer.is_rate else theirs / scaled
    return found


def report(model: str, timings: Mapping[str, Timing], gemm: Gemm) -> dict[str, Any]:
    """Prints a table; returns its lines."""
    rate = f"{statistics.median(gemm.wall):.0f} GFLOP/s by wall, {statistics.median(gemm.cpu):.0f} by CPU time"
    print(f"{model}: bf16 GEMM {rate}; the peer had {PEER_GFLOPS:.0f}")
    print(f"{'line':12} {'wall s':>8} {'CPU s':>8} {'tok/s':>8} {'tok/CPU-s':>10}  scaled to the peer's machine")
    lines: dict[str, Any] = {}
    for name, timing in timings.items():
        rates = timing.tokens / timing.wall, timing.tokens / max(timing.cpu, 0.01)
        text = f"{name:12} {timing.wall:8.2f} {timing.cpu:8.2f} {rates[0]:8.0f} {rates[1]:10.0f}  "
        lines[name] = line = dataclasses.asdict(timing)
        if peer := PEERS[model].get(name.removesuffix(NO_HEAD)):
            found = ratios(peer, timing, gemm)
            line["ratio"] = found.get("cpu", found.get("wall"))
            text += ", ".join(f"{ratio:.2f} x the peer by {per}" for per, ratio in found.items())
            text += f"; asked {peer.target:.1f}: {'met' if line['ratio'] >= peer.target else 'MISSED'}"
            line |= {"ratios": found, "asked": peer.target, "peer": dataclasses.asdict(peer)}
        print(text + (f"  COMPILED {timing.compiled}" if timing.compiled else ""), flush=True)
    return lines


def median(timings: list[Timing]) -> Timing:
    """Each figure's median; any compilation counts."""
    figures = [statistics.median(getattr(timing, name) for timing in timings) for name in ("wall", "cpu")]
    return Timing(timings[0].tokens, figures[0], figures[1], sum(timing.compiled for timing in timings))


def measure(model: str, lines: list[str], repeats: int, folder: pathlib.Path, gemm: Gemm) -> dict[str, Timing]:
    served = write_model(folder) if model == "qwen3-5m" else model
    timings: dict[str, Timing] = {}
    with serve(served, folder) as server:  # fills the caches
        started = time.perf_counter()
        server.wait_until_ready()
        print(f"{model}: first start {time.perf_counter() - started:.1f} s", flush=True)
        server.wait_until_settled()
        print(f"  all programs, those made in spare time too: {time.perf_counter() - started:.1f} s", flush=True)
    if "ready" in lines:
        timings["ready"] = median([start(served, folder, gemm) for _ in range(max(2, repeats))])
    if lines == ["ready"]:
        return timings
    with serve(served, folder) as server:
        server.wait_until_ready()
        server.wait_until_settled()
        bench = Bench(server, model)
        for line in lines:
            if line == "ready":
                continue
            cold = bench.run(line)
            runs, times = [], MEAN_OF.get(line.removesuffix(NO_HEAD), 1)
            for _ in range(repeats):
                gemm.measure()
                runs.append(bench.run(line, times))
                gemm.measure()
            timings[line] = median(runs)
            print(f"  {line}: first {cold.wall:.2f} s ({cold.compiled} compiled), then "
                  + ", ".join(f"{run.wall:.2f}" for run in runs), flush=True)  # fmt: skip
        bench.service.close("success").result()
    return timings


def start(served: str, folder: pathlib.Path, gemm: Gemm) -> Timing:
    """From the command to a server that answers, with what the last one left in the caches."""
    gemm.measure()
    started = time.perf_counter()
    with serve(served, folder) as server:
        server.wait_until_ready()
        timing = Timing(0, time.perf_counter() - started, server.cpu_seconds(), 0)
    gemm.measure()
    print(f"  ready: {timing.wall:.2f} s", flush=True)
    return timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    args = parser.parse_args()
    gemm = Gemm()
    results = {}
    for model in args.model:
        with tempfile.TemporaryDirectory() as temporary:
            timings = measure(model, args.lines, args.repeats, pathlib.Path(temporary), gemm)
        results[model] = report(model, timings, gemm)
    compared = [
        (line["ratio"], f"{model} {name}")
        for model, lines in results.items()
        for name, line in lines.items()
        if "ratio" in line
    ]
    worst_ratio, worst_name = min(compared)
    print(json.dumps({
        "name": "tinker_server",
        "ours": round(worst_ratio, 3),
        "against": f"SkyRL 0.4.0 (JAX, CPU) on the line where we are least ahead: {worst_name}",
        "theirs": 1.0,
        "ratio": round(worst_ratio, 3),
        "unit": "times the peer's speed",
        "conditions": {
            "lines": results, "gemm_gflops": round(statistics.median(gemm.wall)), "peer_gflops": PEER_GFLOPS,
            "sdk": tinker.__version__, "jax": jax.__version__,
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
