"""How long a killed run takes to its next useful token, cold and warm, and how much of its work is kept.

Starts a run, kills it with SIGKILL amid a step's grading, and starts it again: with empty caches (cold), and
with those that the run before it left (warm), several times in turns. The next useful token is bounded from both
sides: generation of new groups begins at the line "resumed at step ...", and the first new group of completions is
journaled when it is finished.

Also: graded rollouts kept over graded rollouts made (a graded completion that is graded again was lost), groups sampled
again, of completions that were not finished the tokens in the journal and how many of these were sampled again, the
share of the steps' time that went into the journal, and the time to write and to check a checkpoint's sums.
Run it with: python benchmarks/recovery.py [--model smollm2-135m] [--launches 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from locojax.hosts.journal import ledgers, read, recalled, rollout_files
from locojax.hosts.journal_begun import unfinished
from locojax.hosts.journal_files import open_folder
from locojax.hosts.journal_records import Admitted, Decoded, Graded, Piece, Sampled, Trained
from locojax.hosts.runlog import read_metrics
from locojax.models import decoder
from locojax.models.random_model import byte_tokenizer
from locojax.models.spec import ModelSpec
from locojax.models.weights import save_directory

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 256,
}  # fmt: skip
REWARD = """
import os
def score(prompt, completion, answer, meta):
    with open(os.environ["GRADES_LOG"], "a") as file:
        file.write("1\\n")
    return sum(b % 2 for b in completion.encode()) / 64
"""
RESUMED = re.compile(r"resumed at step .*")
POLL_SECONDS = 0.005


@dataclasses.dataclass(frozen=True)
class Recovery:
    """One start after a kill. `to_generation`: until the resumed line; `to_group`: until the first new group.

    `num_begun`: tokens that the journal had of unfinished completions; `num_again`: of these, sampled again.
    """

    to_generation: float
    to_group: float
    line: str
    num_begun: int
    num_again: int


class Victim:
    """A run in a folder of its own.

    Args:
      num_steps: of the run; it is killed in the one before the last.
    """

    def __init__(self, folder: pathlib.Path, model: str, num_steps: int, settings: list[str]):
        self.folder, self.num_steps = folder, num_steps
        (folder / "rewards.py").write_text(REWARD)
        rows = [{"question": f"{i} bottles" + " of beer" * (i % 3), "answer": str(i)} for i in range(64)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._arguments = [
            f"model.name={model}", f"data.source={folder / 'data.jsonl'}", "data.template={question}:",
            f"data.reward={folder / 'rewards.py'}:score", "data.chat=false", f"run.dir={folder}", "run.eval_every=0",
            f"run.num_steps={num_steps}", "run.checkpoint_every=2", "run.checkpoint_at_end=false", *settings,
        ]  # fmt: skip

    def start(self, name: str, cache: pathlib.Path) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "GRADES_LOG": str(self.folder / f"{name}.graded"), "XLA_FLAGS": "",
            "PYTHONPATH": str(pathlib.Path(__file__).parent.parent), "LOCOJAX_CACHE": str(cache),
        }  # fmt: skip
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-m", "locojax", "train", *self._arguments, f"run.name={name}", "--restartable"]
        with (self.folder / f"{name}.out").open("a") as out:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True)

    def records(self, name: str, step: int, kind: type) -> int:
        """How many records of a kind a step has in the journal by now."""
        journal = open_folder(str(self.folder / name / "journal"))
        if kind is Trained:
            return sum(isinstance(r, Trained) and r.step == step for rs in ledgers(journal)[0].values() for r in rs)
        names = rollout_files(journal).get(step, ())
        return sum(isinstance(record, kind) for each in names for record in read(journal, each)[0])

    def kill(self, name: str, cache: pathlib.Path, after_grades: int) -> None:
        """Runs until the last step but one has so many grades, and kills it."""
        process = self.start(name, cache)
        while self.records(name, self.num_steps - 2, Graded) < after_grades:
            if process.poll() is not None:
                raise RuntimeError(f"it ended before it was killed: {(self.folder / f'{name}.out').read_text()}")
            time.sleep(POLL_SECONDS)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def recover(self, name: str, cache: pathlib.Path) -> Recovery:
        """Starts it again and waits for its end."""
        before, begun = self.records(name, self.num_steps - 2, Sampled), self.begun(name)
        start, to_generation, to_group = time.perf_counter(), 0.0, 0.0
        process, out = self.start(name, cache), self.folder / f"{name}.out"
        while process.poll() is None:
            if not to_generation and RESUMED.search(out.read_text()):
                to_generation = time.perf_counter() - start
            if not to_group and self.records(name, self.num_steps - 2, Sampled) > before:
                to_group = time.perf_counter() - start
            time.sleep(POLL_SECONDS)
        found = RESUMED.search(out.read_text())
        if process.returncode != 0 or found is None:
            raise RuntimeError(out.read_text())
        again = 0
        for piece in self.decoded_last(name):
            again += max(begun.get((piece.place, piece.sample), 0) - piece.start, 0)
        return Recovery(to_generation, to_group, found[0], sum(begun.values()), again)

    def begun(self, name: str) -> dict[tuple[int, int], int]:
        """Tokens that the journal has of completions whose groups aren't finished, by place and sample."""
        (records,) = self.rollouts(name)
        whole = recalled(records)
        return {
            (place, sample): len(part.tokens)
            for place, groups in unfinished([records]).items()
            for sample, part in groups[0].samples.items()
            if place not in whole
        }

    def decoded_last(self, name: str) -> list[Piece]:
        """What the last start of the run has decoded of the step, piece by piece."""
        (records,) = self.rollouts(name)
        last = max(n for n, record in enumerate(records) if isinstance(record, Admitted))
        return [piece for record in records[last:] if isinstance(record, Decoded) for piece in record.pieces]

    def rollouts(self, name: str) -> list[list[Any]]:
        """The records of the step in which it is killed, of each host."""
        journal = open_folder(str(self.folder / name / "journal"))
        return [read(journal, each)[0] for each in rollout_files(journal)[self.num_steps - 2]]

    def kept(self, name: str, total: int) -> tuple[int, int]:
        """(graded completions that were made, those that were graded again), of a run of `total` completions."""
        made = len((self.folder / f"{name}.graded").read_text().splitlines())
        return total, made - total

    def sampled_again(self, name: str) -> int:
        journal, again = open_folder(str(self.folder / name / "journal")), 0
        for names in rollout_files(journal).values():
            groups = recalled(record for each in names for record in read(journal, each)[0])
            again += sum(len(each) - 1 for each in groups.values())
        return again

    def journal_share(self, name: str) -> float:
        """Of the steps' wall time after the first, in which programs are compiled."""
        steps = read_metrics(self.folder / name / "metrics.jsonl")[1:]
        return sum(m.extra["journal_seconds"] for m in steps) / sum(m.account.wall for m in steps)


def write_model(folder: pathlib.Path) -> str:
    spec = ModelSpec.from_hf_config(CONFIG)
    save_directory(folder, decoder.init_params(spec, jax.random.key(0)), spec, CONFIG)
    byte_tokenizer().save(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as model.name; else 2 layers with random weights")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("settings", nargs="*", help="key=value, as for `locojax train`")
    args = parser.parse_args()
    prompts, group = 8, 8
    settings = [f"run.prompts_per_step={prompts}", f"rollout.group_size={group}", "rollout.max_tokens=64",
                "training.compute_dtype=float32", "rollout.max_slots=16", *args.settings]  # fmt: skip
    total = args.steps * prompts * group
    found: dict[str, list[Recovery]] = {"cold": [], "warm": []}
    made = lost = again = 0
    shares = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        victim = Victim(folder, args.model or write_model(folder / "model"), args.steps, settings)
        warm = folder / "warm"
        for number in range(args.launches):
            for kind in found:
                run = f"{kind}-{number}"
                victim.kill(run, warm, after_grades=3 * group + 1)  # three groups, and one completion of the fourth
                cache = warm
                if kind == "cold":
                    cache = folder / "cold"
                    shutil.rmtree(cache, ignore_errors=True)
                recovery = victim.recover(run, cache)
                found[kind].append(recovery)
                of_run, lost_of_run = victim.kept(run, total)
                made, lost, again = made + of_run, lost + lost_of_run, again + victim.sampled_again(run)
                shares.append(victim.journal_share(run))
                print(f"{kind}: first new group after {recovery.to_group:.2f} s; {recovery.line}", flush=True)

    def middle(kind: str, field: str) -> float:
        return round(statistics.median(getattr(each, field) for each in found[kind]), 2)

    ours, theirs = middle("warm", "to_group"), middle("cold", "to_group")
    conditions: dict[str, Any] = {
        "to_generation_seconds": {kind: middle(kind, "to_generation") for kind in found},
        "graded_rollouts_kept": round((made - lost) / made, 4), "graded_again": lost, "groups_sampled_again": again,
        "unfinished_tokens": sum(each.num_begun for kind in found.values() for each in kind),
        "unfinished_tokens_sampled_again": sum(each.num_again for kind in found.values() for each in kind),
        "journal_share_of_steps": round(statistics.median(shares), 5), "launches": args.launches,
        "model": args.model or f"{CONFIG['num_hidden_layers']} layers, hidden {CONFIG['hidden_size']}, random weights",
        "workload": f"{prompts} prompts x {group} samples x 64 tokens at most, killed in step {args.steps - 1}",
        "device": jax.devices()[0].device_kind, "num_cpus": os.cpu_count(), "jax": jax.__version__,
    }  # fmt: skip
    print(json.dumps({
        "name": "recovery", "ours": ours, "against": "the same restart with empty caches", "theirs": theirs,
        "ratio": round(theirs / ours, 2), "unit": "s from the start to the first new group of completions",
        "conditions": conditions,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
