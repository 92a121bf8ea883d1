"""How much faster hosts are that coordinate themselves than hosts that one head drives, on equal work.

`local` (the colocated mode) and `single` (--controller single: one head admits, schedules and drives all hosts in
lockstep) train the same small model on the same prompts with the same seeds, on N local hosts through
`locojax launch`, several launches each, in turns. `locojax compare` then scores them: the same protocol as the paper's
(arXiv 2611.16301). The model is small on purpose: what is measured is what surrounds the computation.

Also measured, in the same run: each of the optimizations O1-O4 switched off by itself, and `single` with as many decode
iterations a call as `local`; admission and the time of a decode iteration on both sides; and, computed from these, what
16 hosts would give. Run it with: python benchmarks/hosts.py [--hosts 2 4] [--launches 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console

from locojax.config import HostsConfig
from locojax.hosts.group import Group
from locojax.hosts.launch import launch
from locojax.hosts.single_controller import Lockstepping
from locojax.measure import compare_report
from locojax.measure.compare import Comparison, compare
from locojax.measure.timeline import Timeline
from locojax.models import decoder
from locojax.models.random_model import byte_tokenizer
from locojax.models.spec import ModelSpec
from locojax.rollout.engine import Engine
from locojax.rollout.settings import EngineSettings
from locojax.types import SampleRequest, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 256,
}  # fmt: skip
PROMPTS_PER_HOST, GROUP, MAX_TOKENS = 4, 8, 128
REWARD = "def score(prompt, completion, answer, meta):\n    return sum(b % 2 for b in completion.encode()) / 64\n"

CASES: dict[str, tuple[str, ...]] = {
    "local": (),
    "single": ("hosts.controller=single",),
    "single, 16 iterations a call": ("hosts.controller=single", "rollout.decode_iterations=16"),
    "local without O1": ("hosts.metrics_in_barrier=true",),
    "local without O2": ("hosts.freeze_gc=false",),
    "local without O3": ("hosts.balance=false",),
    "local without O4": ("hosts.publish_at_once=false",),
}
SWITCHED = {
    "local without O1": "record", "local without O2": "gc_seconds", "local without O3": "wait",
    "local without O4": "publish",
}  # fmt: skip
"""Where each optimization works: a phase of the step's account, or an item of the step's record. Whole steps of several
launches differ by more than one optimization brings here."""
ITERATIONS = {"local": 16, "single": 1}  # decode iterations of one call
AT = 16  # hosts that the projection is for


class Workload:
    """A folder with the model, the prompts and the reward, and the launches' run folders."""

    def __init__(self, folder: pathlib.Path, num_steps: int):
        self.folder, self.num_steps = folder, num_steps
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "reward.py").write_text(REWARD)
        rows = [{"question": f"{i}" * (4 + 7 * i % 24), "answer": str(i)} for i in range(40 * PROMPTS_PER_HOST)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, case: str, num_hosts: int, number: int) -> pathlib.Path:
        """One launch; returns its run folder."""
        name = f"{num_hosts}-{case.replace(',', '').replace(' ', '-')}-{number}"
        command = [
            sys.executable, "-m", "locojax", "launch", "--hosts", str(num_hosts), "--devices-per-host", "1", "--",
            "train", f"model.name=random:{self.folder / 'config.json'}",
            f"data.source={self.folder / 'prompts.jsonl'}", "data.template={question}:", "data.chat=false",
            f"data.reward={self.folder / 'reward.py'}:score", f"run.dir={self.folder}", f"run.name={name}",
            f"run.cache_dir={self.folder / 'cache'}", f"run.num_steps={self.num_steps}", "run.eval_every=0",
            f"run.prompts_per_step={num_hosts * PROMPTS_PER_HOST}", f"rollout.group_size={GROUP}",
            f"rollout.max_tokens={MAX_TOKENS}", f"rollout.max_slots={PROMPTS_PER_HOST * GROUP}",
            "training.row_tokens=256", "training.rows=24",  # a host's batch in one micro-batch
            "run.checkpoint_every=0", "run.checkpoint_at_end=false", "run.passes=2", *CASES[case],
        ]  # fmt: skip
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"launch {name} failed:\n{ended.stdout}")
        return self.folder / name


def turns(cases: Sequence[str], number: int) -> list[str]:
    """The cases in the order of a round: each has other neighbours and another place in each, so that all see the same
    machine. Example: turns("abc", 1) == ["c", "b", "a"]"""
    first = number // 2 % len(cases)
    order = [*cases[first:], *cases[:first]]
    return order[::-1] if number % 2 else order


def phases_ms(folders: Sequence[pathlib.Path], name: str) -> list[float]:
    """Milliseconds that the first host's record of a step has under `name`, over the second half of each launch."""
    found = []
    for folder in folders:
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for step in steps[len(steps) // 2 :]:
            found.append(1e3 * step["extra"].get(name, step["account"]["seconds"].get(name, 0.0)))
    return found


def in_no_phase(folders: Sequence[pathlib.Path]) -> list[float]:
    """The share of each step, in the second half of each launch, that the first host's account doesn't name."""
    found = []
    for folder in folders:
        accounts = [json.loads(line)["account"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found += [account["unaccounted"] / account["wall"] for account in accounts[len(accounts) // 2 :]]
    return found


def phase_ms(folders: Sequence[pathlib.Path], phase: str) -> float:
    """The median of `phases_ms`."""
    return statistics.median(phases_ms(folders, phase))


@dataclasses.dataclass(frozen=True)
class Primitives:
    """What coordination is made of, on this number of hosts; milliseconds. Measured by `measure`.

    Attributes:
      admit: of one request, by the head. admit_local: by a host alone.
      local: of a decode iteration on one host's rows, all included. single: of one of all hosts' rows, as the head sees
        it. books: the head's own work in it, which grows with the hosts; the rest is orders, computation and gather.
      prefill_local, prefill_single: of one batch.
    """

    admit: float
    admit_local: float
    local: float
    single: float
    books: float
    prefill_local: float
    prefill_single: float


def requests(name: str, count: int) -> list[SampleRequest]:
    params = SamplingParams(max_tokens=MAX_TOKENS, stop=(), seed=0)
    return [SampleRequest(f"{name}/{i}", tuple(range(5, 25 + i % 24)), params, GROUP) for i in range(count)]


def timed_batch(engine: Engine, count: int) -> dict[str, float]:
    """Milliseconds of a batch, warm: for each request's admission, each iteration and the prefill; medians of five."""
    found: dict[str, list[float]] = {}
    for run in range(8):
        start = time.perf_counter()
        for request in requests(f"batch {run}", count):
            engine.add(request)
        admitted, before = time.perf_counter(), engine.stats()
        while engine.num_unfinished:
            engine.step()
        after, end = engine.stats(), time.perf_counter()
        prefill = after.prefill_seconds - before.prefill_seconds
        if run >= 3:
            for name, value, of in (
                ("admit", admitted - start, count),
                ("iteration", end - admitted - prefill, after.num_iterations - before.num_iterations),
                ("books", after.host_seconds - before.host_seconds, after.num_iterations - before.num_iterations),
                ("prefill", prefill, 1),
            ):
                found.setdefault(name, []).append(1e3 * value / of)
    return {name: statistics.median(values) for name, values in found.items()}


def measure(out: pathlib.Path) -> None:
    """One host's part of the measurement of `Primitives`; host 0 writes them."""
    spec = ModelSpec.from_hf_config(CONFIG)
    tokens = byte_tokenizer()
    with Group.start(HostsConfig()) as group:
        weights = decoder.unstack(decoder.init_params(spec, jax.random.key(0)), spec, jax.numpy.float32)
        lockstep = Lockstepping(group, 600.0)
        slots = PROMPTS_PER_HOST * GROUP
        settings = {
            name: EngineSettings(max_slots=slots, min_rows=slots, max_iterations=iterations)
            for name, iterations in ITERATIONS.items()
        }
        local = Engine(spec, settings["local"], tokens)
        local.load(weights, version=0)
        alone = timed_batch(local, PROMPTS_PER_HOST)
        timer = Timeline()
        together = lockstep.make_engine(spec, settings["single"], tokens, timer.phase)
        together.load(weights, version=0)
        if group.is_first:
            head = timed_batch(together, group.size * PROMPTS_PER_HOST)
            lockstep.orders.end([()] * group.size)
            found = Primitives(head["admit"], alone["admit"], alone["iteration"], head["iteration"], head["books"],
                               alone["prefill"], head["prefill"])  # fmt: skip
            out.write_text(json.dumps(dataclasses.asdict(found)))
        else:
            lockstep.follow(timer)


def primitives(folder: pathlib.Path, num_hosts: int) -> Primitives:
    out = folder / f"primitives-{num_hosts}.json"
    with (folder / "primitives.txt").open("w") as output:
        code = launch([sys.executable, __file__, "--measure", str(out)], num_hosts, devices_per_host=1, errors=output)
    if code:
        raise SystemExit(f"measuring primitives failed:\n{(folder / 'primitives.txt').read_text()}")
    return Primitives(**json.loads(out.read_text()))


def projected(two: Primitives, rest_ms: float, grading_ms: float) -> float:
    """The ratio at AT hosts, each with as many prompts as here; computed. Only what one process does for all hosts
    grows with their number (admission, books, detokenizing and grading); orders and collectives are taken to cost what
    they do on two hosts, in the baseline's favour.

    Args:
      rest_ms: a step's time outside of generation, alike in both. grading_ms: of grading on the head with two hosts.
    """
    growth = AT / 2
    iteration = two.single + two.books * (growth - 1)
    single = AT * PROMPTS_PER_HOST * two.admit + two.prefill_single + MAX_TOKENS * iteration + grading_ms * growth
    local = PROMPTS_PER_HOST * two.admit_local + two.prefill_local + MAX_TOKENS * two.local + grading_ms / 2
    return (single + rest_ms) / (local + rest_ms)


def report(num_hosts: int, runs: dict[str, list[pathlib.Path]]) -> dict[str, Any]:
    """Prints how the cases compare on so many hosts; returns it."""
    shown: dict[str, Any] = {}
    console = Console(width=110)
    local = runs["local"]
    shown["in_no_phase"] = {case: round(statistics.median(in_no_phase(of)), 4) for case, of in runs.items()}
    print(f"\n{num_hosts} hosts, the share of a step that is in no phase: {shown['in_no_phase']}")
    for case, folders in runs.items():
        if case == "local":
            continue
        # Against the head, the protocol's bootstrap; between modes of one stack, Welch's intervals, if there are any.
        method = "welch" if case.startswith("local") and len(folders) > 1 else "bootstrap"
        comparison: Comparison = compare(local, folders, method=method)  # type: ignore[arg-type]
        console.print(f"\n[bold]{num_hosts} hosts: local (A) against {case} (B)[/bold]")
        console.print(compare_report.table(comparison))
        step, token = comparison.speedup.per_step, comparison.speedup.per_token
        shown[case] = {
            "per_step": [round(x, 3) for x in dataclasses.astuple(step)],
            "per_token": [round(x, 3) for x in dataclasses.astuple(token)],
            "verdict": comparison.verdict,
        }
        if case in SWITCHED:
            name = SWITCHED[case]
            middle = statistics.mean if name == "gc_seconds" else statistics.median  # garbage: not in every step
            on, off = (middle(phases_ms(runs, name)) for runs in (local, folders))
            print(f"{case.removeprefix('local ')}: {name} {off:.2f} ms a step; with it {on:.2f} ms")
            shown[case]["ms_a_step"] = {name: [round(on, 3), round(off, 3)]}
        if case == "single":
            times = [compare_report.times_of(side)["milliseconds_per_token"] for side in (comparison.a, comparison.b)]
            shown["tokens_per_second"] = [round(1e3 / time, 1) for time in times]
    return shown


def report_parts(num_hosts: int, runs: dict[str, list[pathlib.Path]], found: Primitives) -> dict[str, Any]:
    """The same of what coordination is made of, and what 16 hosts would give."""
    local, single, shown = runs["local"], runs["single"], dict[str, Any]()
    print(f"\n{num_hosts} hosts, admission of a step: head {phase_ms(single, 'admit'):.2f} ms for all, a host by itself"
          f" {phase_ms(local, 'admit'):.2f} ms; of one request: {found.admit:.4f} and {found.admit_local:.4f} ms")
    print(f"{num_hosts} hosts, a decode iteration: lockstep {found.single:.2f} ms (of which the head's books"
          f" {found.books:.2f} ms), a host by itself {found.local:.2f} ms")  # fmt: skip
    shown["admit_ms"] = [round(phase_ms(local, "admit"), 3), round(phase_ms(single, "admit"), 3)]
    shown["iteration_ms"] = [round(found.local, 3), round(found.single, 3)]
    if num_hosts == 2:
        rest = sum(phase_ms(local, phase) for phase in ("pack", "train", "publish", "wait", "collect", "record"))
        ratio = projected(found, rest, phase_ms(single, "reward"))
        shown[f"computed for {AT} hosts"] = round(ratio, 2)
        print(f"computed from these, not measured: {AT} hosts, as many prompts each: ratio {ratio:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--launches", type=int, default=3, help="of each mode")
    parser.add_argument("--steps", type=int, default=20, help="two passes over half as many batches")
    parser.add_argument("--modes", choices=("all", "two", "switches"), default="all",
                        help="two: local and single alone; switches: local, and without each optimization")  # fmt: skip
    parser.add_argument("--measure", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure)
        return
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(pathlib.Path(folder), args.steps)
        for num_hosts in args.hosts:
            kinds = {"all": CASES, "two": ITERATIONS, "switches": ("local", *SWITCHED)}
            cases = list(kinds[args.modes if num_hosts == args.hosts[0] or args.modes != "all" else "two"])
            runs: dict[str, list[pathlib.Path]] = {case: [] for case in cases}
            for number in range(args.launches):
                for case in turns(cases, number):
                    runs[case].append(workload.run(case, num_hosts, number))
                    print(f"{num_hosts} hosts, launch {number + 1} of {args.launches}: {case}", flush=True)
            results[num_hosts] = report(num_hosts, runs)
            if "single" in runs:
                results[num_hosts] |= report_parts(num_hosts, runs, primitives(workload.folder, num_hosts))
    if args.modes == "switches":
        print(json.dumps({"name": "hosts, switches", "results": results}))
        return
    first = results[args.hosts[0]]
    print(json.dumps({
        "name": "hosts",
        "ours": first["tokens_per_second"][0],
        "against": "the same system under a single controller: one head admits, schedules and drives all hosts",
        "theirs": first["tokens_per_second"][1],
        "ratio": first["single"]["per_token"][0],
        "unit": "output tokens/s of whole steps",
        "conditions": {
            "hosts": args.hosts[0], "launches": args.launches, "scored_steps": args.steps // 2,
            "model": f"{CONFIG['num_hidden_layers']} layers, hidden {CONFIG['hidden_size']}, random weights",
            "workload": f"{PROMPTS_PER_HOST} prompts a host x {GROUP} samples x {MAX_TOKENS} tokens at most",
            "results": {str(number): result for number, result in results.items()},
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind} a host", "jax": jax.__version__,
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
