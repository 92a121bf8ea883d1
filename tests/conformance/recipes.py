"""Unmodified recipes of tinker-cookbook against a server, without network.

    cd tests && python -m conformance.recipes PYTHON MODEL [recipe ...] [--steps 2] [--renderer role_colon]

PYTHON has tinker-cookbook and torch; MODEL is what `locojax serve` takes. `datasets.load_dataset("a/b")` and
`from_pretrained("a/b")` both take a local folder of that relative name, so recipes run where such folders stand. Prints
one JSON line a recipe: exit status, seconds, and its rewards or losses by step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping

from conformance import sdks
from conformance.client import API_KEY
from conformance.server import serve, tail

ALIAS = "Qwen/Qwen3-8B-Base"  # sl_loop and rl_loop take no renderer: they need a model name that the cookbook knows
MAX_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe's module and its arguments, where {model} and {renderer} stand for the run's own."""

    module: str
    arguments: tuple[str, ...]

    def command(self, python: str, model: str, renderer: str, log_path: pathlib.Path, steps: int) -> list[str]:
        arguments = [argument.format(model=model, renderer=renderer) for argument in self.arguments]
        module = f"tinker_cookbook.recipes.{self.module}"
        return [python, "-W", "ignore", "-m", module, *arguments, f"log_path={log_path}", f"max_steps={steps}"]


_MODEL = ("model_name={model}", "renderer_name={renderer}", "behavior_if_log_dir_exists=delete")
_ARITHMETIC = (
    *_MODEL, "env=arithmetic", "groups_per_batch=4", "group_size=4", "max_tokens=5", "learning_rate=1e-3",
)  # fmt: skip
_LOOP = (f"model_name={ALIAS}", "lora_rank=32")

RECIPES: Mapping[str, Recipe] = {
    "math_rl": Recipe("math_rl.train", _ARITHMETIC),
    "chat_sl": Recipe("chat_sl.train", (*_MODEL, "dataset=conv.jsonl", "batch_size=8", "save_every=1", "eval_every=1")),
    "math_rl_importance_sampling": Recipe(
        "math_rl.train", (*_ARITHMETIC, "loss_fn=importance_sampling", "compute_post_kl=True", "num_substeps=2")
    ),
    "math_rl_async": Recipe("math_rl.train", (*_ARITHMETIC, "max_steps_off_policy=2")),
    "sl_loop": Recipe("sl_loop", (*_LOOP, "batch_size=8", "save_every=2")),
    "rl_loop": Recipe("rl_loop", (*_LOOP, "batch_size=2", "group_size=4", "max_tokens=16", "save_every=1")),
    "guess_number": Recipe(
        "multiplayer_rl.guess_number.train", (*_MODEL, "batch_size=2", "group_size=2", "max_tokens=6", "eval_every=0")
    ),
    "dpo": Recipe("preference.dpo.train", (*_MODEL, "dataset=hhh", "batch_size=4")),
    "on_policy_distillation": Recipe(
        "distillation.on_policy_distillation",
        (*_MODEL, "lora_rank=32", "teacher_model={model}", "dataset=deepmath", "groups_per_batch=2", "group_size=2",
         "max_tokens=6", "eval_every=0"),
    ),
}  # fmt: skip

QUICK = ("math_rl", "chat_sl")
"""What CI runs."""


def lay_out(folder: pathlib.Path) -> None:
    """The data that recipes load by name, as small folders of that name: made-up conversations and sums."""
    draw = random.Random(0)
    sums = [(draw.randrange(100), draw.randrange(100)) for _ in range(64)]
    turns = [
        [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a, b in sums
    ]
    chats = [{"messages": turn, "prompt": turn[0]["content"], "category": "sums"} for turn in turns]
    write_rows(folder / "conv.jsonl", chats)
    for split in ("train", "test"):
        write_rows(folder / f"HuggingFaceH4/no_robots/{split}.jsonl", chats)
        gsm8k = [{"question": f"What is {a} + {b}?", "answer": f"It is {a + b}.\n#### {a + b}"} for a, b in sums]
        write_rows(folder / f"openai/gsm8k/main/{split}.jsonl", gsm8k)
        asked = "\n\nHuman: What is {} + {}?\n\nAssistant: {}"
        preferences = [
            {"chosen": asked.format(a, b, a + b), "rejected": asked.format(a, b, a + b + 7)} for a, b in sums
        ]
        write_rows(folder / f"Anthropic/hh-rlhf/{split}.jsonl", preferences)
    write_rows(folder / "zwhe99/DeepMath-103K/train.jsonl", [{"question": f"What is {a} + {b}?"} for a, b in sums])
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )


def write_rows(path: pathlib.Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_recipe(
    name: str, python: str, url: str, model: str, folder: pathlib.Path, steps: int, renderer: str
) -> dict[str, object]:
    """Runs one where `lay_out` was done and the tokenizer lies; what came of it."""
    recipe, log_path = RECIPES[name], folder / "runs" / name
    environment = {
        **sdks.environment(), "TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY, "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
    }  # fmt: skip
    command = recipe.command(python, model, renderer, log_path, steps)
    started = time.perf_counter()
    output = folder / f"{name}.log"
    with output.open("wb") as out:
        try:
            status = subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=MAX_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    result: dict[str, object] = {
        "recipe": name, "status": status, "seconds": round(time.perf_counter() - started, 1), **metrics(log_path)
    }  # fmt: skip
    if status:
        result["error"] = tail(output, 60)
    return result


def metrics(log_path: pathlib.Path) -> dict[str, object]:
    """Rewards and losses by step, from the recipe's own log."""
    path = log_path / "metrics.jsonl"
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("env/all/reward/total", "reward/total", "train_mean_nll", "dpo_loss", "teacher_kl", "num_loss_tokens")
    return {
        name: [round(row[name], 4) for row in rows if name in row] for name in names if any(name in r for r in rows)
    }


def lay_out_tokenizer(model: str, folder: pathlib.Path) -> str:
    """Makes the tokenizer loadable by the model's name and by `ALIAS`; the name that clients use."""
    from locojax.models.hub import load_tokenizer

    source = pathlib.Path(model)
    name = f"local/{source.name}" if source.is_dir() else f"local/{model}"
    for target in (name, ALIAS):
        (folder / target).mkdir(parents=True)
        load_tokenizer(model).save(folder / target)
        if source.is_dir():
            shutil.copy(source / "config.json", folder / target)
    return name


def run_all(python: str, model: str, names: Iterable[str], steps: int, renderer: str) -> Iterator[dict[str, object]]:
    """Each recipe's result, against one server of `model`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        clients, server = folder / "clients", folder / "server"
        clients.mkdir()
        server.mkdir()
        lay_out(clients)
        name = lay_out_tokenizer(model, clients)
        model = str(pathlib.Path(model).resolve()) if pathlib.Path(model).exists() else model
        with serve(model, server, ["--name", name, "--alias", ALIAS]) as served:
            for one in names:
                result = run_recipe(one, python, served.url, name, clients, steps, renderer)
                if result["status"]:
                    result["server"] = tail(server / "server.log")
                yield result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("model")
    parser.add_argument("recipes", nargs="*", metavar="recipe", help=", ".join(RECIPES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--renderer", default="role_colon")
    options = parser.parse_args()
    failures = 0
    names = options.recipes or RECIPES
    for result in run_all(options.python, options.model, names, options.steps, options.renderer):
        failures += result["status"] != 0
        print(json.dumps(result), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
