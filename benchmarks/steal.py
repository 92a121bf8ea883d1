"""What work stealing gains where one host is slower: step times with `hosts.steal_groups` and without, in turns.

Two hosts on this machine train a small model; after each call of decoding, host 0 sleeps so long that it is `--slow`
times slower at it. Tokens and updates are the same with stealing and without, which the rewards are checked for. With
generation alone, and groups as fine as sand, the gain would be (slow + 1) / 2.
Run it with: python benchmarks/steal.py [--slow 3] [--launches 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from hosts import CONFIG, REWARD

from locojax.config import load
from locojax.hosts import colocated
from locojax.hosts.launch import launch
from locojax.hosts.phases import Phase
from locojax.hosts.place import HOST_ID
from locojax.measure.timeline import Timeline

NUM_HOSTS = 2
CASES = {"without": "hosts.steal_groups=false", "with": "hosts.steal_groups=true"}


class Slowed(Timeline):
    """Takes `factor` times as long for whatever is decoded."""

    def __init__(self, factor: float):
        super().__init__()
        self._factor, self._is_decoding = factor, False

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        with super().phase(name):
            if name != "decode" or self._is_decoding:
                yield
                return
            start, self._is_decoding = time.perf_counter(), True
            try:
                yield
            finally:
                self._is_decoding = False
            time.sleep((self._factor - 1) * (time.perf_counter() - start))


def be_host(slow: float, arguments: Sequence[str]) -> None:
    """One host of a run; host 0 is the slow one."""
    config = load(None, arguments)
    jax.config.update("jax_compilation_cache_dir", config.run.cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    colocated.run(config, resume=False, timer=Slowed(slow) if os.environ[HOST_ID] == "0" else Timeline())


def run(folder: pathlib.Path, case: str, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One launch; returns the records of its steps, those of all hosts."""
    name = f"{case}-{number}"
    command = [
        sys.executable, __file__, "--slow", str(args.slow), "--host",
        f"model.name=random:{folder / 'config.json'}", f"data.source={folder / 'prompts.jsonl'}",
        "data.template={question}:", "data.chat=false", f"data.reward={folder / 'reward.py'}:score",
        f"run.dir={folder}", f"run.name={name}", f"run.cache_dir={folder / 'cache'}", f"run.num_steps={args.steps}",
        "run.eval_every=0", f"run.prompts_per_step={NUM_HOSTS * args.prompts}", f"rollout.group_size={args.group}",
        f"rollout.max_tokens={args.tokens}", f"rollout.max_slots={args.group}", "run.checkpoint_every=0",
        "run.checkpoint_at_end=false", "run.journal=off", CASES[case],
    ]  # fmt: skip
    with (folder / f"{name}.txt").open("w") as errors:
        code = launch(command, NUM_HOSTS, devices_per_host=1, errors=errors)
    if code:
        raise SystemExit(f"launch {name} failed:\n{(folder / f'{name}.txt').read_text()}")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=3.0, help="times that host 0 is slower at decoding")
    parser.add_argument("--launches", type=int, default=3, help="of each case")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8, help="a host")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt, and slots of a host")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion, at most")
    parser.add_argument("--host", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host is not None:
        be_host(args.slow, args.host)
        return
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "reward.py").write_text(REWARD)
        rows = [{"question": f"{i}" * (4 + 7 * i % 24), "answer": str(i)} for i in range(8 * NUM_HOSTS * args.prompts)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for number in range(args.launches):
            rewards = {}
            for case in CASES:  # in turns, so that both see the same machine
                steps = run(folder, case, number, args)
                rewards[case] = [round(step["reward_mean"], 4) for step in steps]
                found[case] += steps[len(steps) // 2 :]
                print(f"launch {number + 1} of {args.launches}, {case}: "
                      f"{[round(step['account']['wall'], 3) for step in steps]} s", flush=True)  # fmt: skip
            # Sums of other groups on each host: after some steps the rounding may turn a token over.
            if not np.allclose(rewards["with"], rewards["without"], rtol=0.02):
                raise SystemExit(f"the runs are not of the same work: {rewards}")
    seconds = {case: statistics.median(step["account"]["wall"] for step in steps) for case, steps in found.items()}
    generating = {case: statistics.median(max(step["generate_seconds"]) for step in steps)
                  for case, steps in found.items()}  # fmt: skip
    stolen = statistics.mean(step["extra"]["num_stolen_groups"] for step in found["with"])
    print(json.dumps({
        "name": "steal",
        "ours": round(seconds["with"], 4),
        "against": "the same two hosts, of which one is slow at decoding, each keeping its own groups",
        "theirs": round(seconds["without"], 4),
        "ratio": round(seconds["without"] / seconds["with"], 3),
        "unit": "s a step, median",
        "conditions": {
            "slow": args.slow, "bound": (args.slow + 1) / 2, "launches": args.launches,
            "steps": len(found["with"]), "groups_stolen_a_step": round(stolen, 2),
            "slowest_host_generating_s": {case: round(value, 4) for case, value in generating.items()},
            "workload": f"{args.prompts} prompts a host x {args.group} samples x {args.tokens} tokens at most, "
                        f"{args.group} slots a host",
            "model": f"{CONFIG['num_hidden_layers']} layers, hidden {CONFIG['hidden_size']}, random weights",
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind} a host", "jax": jax.__version__,
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()
