"""Unmodified recipes of tinker-cookbook against a server, without network.

    cd tests && python -m conformance.recipes PYTHON MODEL [recipe ...] [--steps 2] [--renderer qwen3_instruct]
        [--keep ../docs/recipes.jsonl]

PYTHON has tinker-cookbook and torch; MODEL is what `locojax serve` takes. `datasets.load_dataset("a/b")` and
`from_pretrained("a/b")` both take a local folder of that relative name, so recipes run where such folders stand. Prints
one JSON line a recipe: its command, exit status, seconds, and how its reward (or loss) went. A recipe fails if it
exits with another status than 0, or if it was run to its own number of steps and what it optimizes didn't improve.
With `--keep`, a recipe that didn't fail has its line in that file replaced, and the table in docs/recipes.md remade.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from conformance import sdks
from conformance.client import API_KEY
from conformance.server import serve, tail

from locojax.server.checkpoints import CheckpointFiles, TinkerPath

# sl_loop and rl_loop take no renderer: they need a model name for which the cookbook recommends this one.
ALIASES = {"role_colon": "Qwen/Qwen3-8B-Base", "qwen3_instruct": "Qwen/Qwen3-4B-Instruct-2507"}
MAX_SECONDS = 1800.0
NUM_ROWS = {"train": 256, "test": 8}  # of every data set; recipes score all of a test split, before and after


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe's module, its arguments at a size that two CPU cores train in minutes, and what it optimizes.

    In arguments {model}, {alias} and {renderer} stand for the run's own, {sampler} and {state} for the last sampler
    and training checkpoint of the recipe `after`, which then must run before. `taught_by`: for recipes that take no
    checkpoint, one whose adapter is merged into the base model that they are served. `metric` is a name in the
    recipe's metrics.jsonl.
    """

    module: str
    arguments: tuple[str, ...]
    num_steps: int
    metric: str
    rises: bool = True
    after: str | None = None
    taught_by: str | None = None

    def command(self, python: str, names: Mapping[str, str], log_path: str, steps: int) -> list[str]:
        arguments = [argument.format(**names) for argument in self.arguments]
        module = f"tinker_cookbook.recipes.{self.module}"
        return [python, "-W", "ignore", "-m", module, *arguments, f"log_path={log_path}", f"max_steps={steps}"]

    def improved(self, first: float, last: float) -> bool:
        return last > first if self.rises else last < first


TABLE_HEAD = "| recipe | steps | what it optimizes | first quarter | last quarter | seconds |"
PARITY = "optim/kl_sample_train_v2"
"""Half the mean squared gap between the log-probs of the sampler and of the trainer, where a recipe measures it."""

_MODEL = ("model_name={model}", "renderer_name={renderer}", "behavior_if_log_dir_exists=delete")
_REWARD = "env/all/reward/total"
_ARITHMETIC = (
    *_MODEL, "load_checkpoint_path={state}", "env=arithmetic", "groups_per_batch=8", "group_size=16", "max_tokens=8",
    "learning_rate=2e-4",
)  # fmt: skip
_LOOP = ("model_name={alias}", "lora_rank=32", "learning_rate=5e-4")

RECIPES: Mapping[str, Recipe] = {
    "math_rl": Recipe("math_rl.train", _ARITHMETIC, 24, _REWARD, after="chat_sl"),
    "math_rl_importance_sampling": Recipe(
        "math_rl.train", (*_ARITHMETIC, "loss_fn=importance_sampling", "compute_post_kl=True", "num_substeps=2"),
        32, _REWARD, after="chat_sl",
    ),
    "math_rl_async": Recipe(
        "math_rl.train", (*_ARITHMETIC, "max_steps_off_policy=2"), 24, _REWARD, after="chat_sl"
    ),
    "chat_sl": Recipe(
        "chat_sl.train",
        (*_MODEL, "dataset=conv.jsonl", "batch_size=8", "learning_rate=5e-4", "save_every=8", "eval_every=8"),
        24, "train_mean_nll", rises=False,
    ),
    "sl_loop": Recipe("sl_loop", (*_LOOP, "batch_size=8", "save_every=4"), 10, "train_mean_nll", rises=False),
    "rl_loop": Recipe(
        "rl_loop", (*_LOOP, "batch_size=8", "group_size=8", "max_tokens=40", "save_every=4"), 12, "reward/total"
    ),
    "guess_form": Recipe(
        "chat_sl.train",
        (*_MODEL, "dataset=guess.jsonl", "batch_size=8", "learning_rate=5e-4", "save_every=0", "eval_every=0"),
        6, "train_mean_nll", rises=False,
    ),
    "guess_number": Recipe(
        "multiplayer_rl.guess_number.train",
        (*_MODEL, "batch_size=2", "group_size=8", "max_tokens=12", "learning_rate=5e-4", "eval_every=0"),
        6, _REWARD, taught_by="guess_form",
    ),
    "dpo": Recipe(
        "preference.dpo.train", (*_MODEL, "dataset=hhh", "batch_size=8", "learning_rate=2e-4"),
        10, "dpo_loss", rises=False,
    ),
    "on_policy_distillation": Recipe(
        "distillation.on_policy_distillation",
        (*_MODEL, "lora_rank=32", "teacher_model={model}", "teacher_checkpoint={sampler}", "dataset=deepmath",
         "groups_per_batch=8", "group_size=4", "max_tokens=12", "learning_rate=5e-4", "eval_every=0"),
        10, "teacher_kl", rises=False, after="chat_sl",
    ),
}  # fmt: skip

QUICK = ("chat_sl", "math_rl", "dpo")
"""What CI runs: supervision, reinforcement from its checkpoint, and a loss that the client makes with torch."""


def in_order(names: Iterable[str]) -> list[str]:
    """Each recipe once, after the one whose checkpoint it takes. Example: in_order(["on_policy_distillation"])"""
    ordered: dict[str, None] = {}
    for name in names:
        before = RECIPES[name].after or RECIPES[name].taught_by
        ordered.update(dict.fromkeys([name] if before is None else [before, name]))
    return list(ordered)


def lay_out(folder: pathlib.Path) -> None:
    """The data that recipes load by name, as small folders of that name: made-up conversations about sums."""
    draw = random.Random(0)
    sums = [(draw.randrange(1, 10), draw.randrange(1, 10)) for _ in range(NUM_ROWS["train"])]
    large = [(draw.randrange(101), draw.randrange(101)) for _ in sums]  # as math_rl's arithmetic asks
    turns = [
        [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
        for a, b in large
    ]
    chats = [{"messages": turn, "prompt": turn[0]["content"], "category": "sums"} for turn in turns]
    write_rows(folder / "conv.jsonl", chats)
    write_rows(folder / "guess.jsonl", [{"messages": game(draw)} for _ in sums])
    asked = "\n\nHuman: What is {} + {}?\n\nAssistant: {}"
    # Right, in the form that rl_loop asks for, has to happen now and then, or there is nothing to learn from.
    small = [(draw.randrange(1, 4), draw.randrange(1, 4)) for _ in sums]
    gsm8k = [
        {"question": f"What is {a} + {b}? Answer like this: \\boxed{{3}}.", "answer": f"It is {a + b}.\n#### {a + b}"}
        for a, b in small
    ]
    preferences = [{"chosen": asked.format(a, b, a + b), "rejected": asked.format(a, b, a + b + 7)} for a, b in sums]
    for split, count in NUM_ROWS.items():
        write_rows(folder / f"HuggingFaceH4/no_robots/{split}.jsonl", chats[:count])
        write_rows(folder / f"openai/gsm8k/main/{split}.jsonl", gsm8k[:count])
        write_rows(folder / f"Anthropic/hh-rlhf/{split}.jsonl", preferences[:count])
    write_rows(folder / "zwhe99/DeepMath-103K/train.jsonl", [{"question": f"What is {a} + {b}?"} for a, b in sums])
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )


def game(draw: random.Random) -> list[dict[str, str]]:
    """A number guessed without thought, in the form that guess_number asks for: left to itself, a model of 135 M
    parameters never writes it, and all rewards are one number."""
    rules = "Guess an integer between 0 and 1024. Output it as Guess: <guess> and say nothing else."
    turns = [{"role": "system", "content": rules}]
    for _ in range(3):
        turns.append({"role": "assistant", "content": f"Guess: {draw.randrange(1025)}"})
        turns.append({"role": "user", "content": draw.choice(("Too low", "Too high"))})
    return turns[:-1]


def write_rows(path: pathlib.Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_recipe(
    name: str, python: str, url: str, names: Mapping[str, str], folder: pathlib.Path, steps: int | None = None
) -> dict[str, object]:
    """Runs one where `lay_out` was done and the tokenizer lies; what came of it.

    `names` says what {model}, {alias} and {renderer} stand for; `steps` defaults to the recipe's own.
    """
    recipe, log_path = RECIPES[name], f"runs/{name}"
    if recipe.after is not None:
        names = {**names, **last_checkpoints(folder / f"runs/{recipe.after}")}
    environment = {
        **sdks.environment(), "TINKER_BASE_URL": url, "TINKER_API_KEY": API_KEY, "HF_DATASETS_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # the environment was installed without: the first import writes it
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
    }  # fmt: skip
    command = recipe.command(python, names, log_path, steps or recipe.num_steps)
    started = time.perf_counter()
    output = folder / f"{name}.log"
    with output.open("wb") as out:
        try:
            status = subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=MAX_SECONDS
            ).returncode
            status = sdks.exit_status(status, tail(output, 60))
        except subprocess.TimeoutExpired:
            status = -1
    values = curve(folder / log_path, recipe.metric)
    result: dict[str, object] = {
        "recipe": name, "status": status, "seconds": round(time.perf_counter() - started, 1),
        "command": shlex.join(["python", *command[3:]]), "metric": recipe.metric,
        "curve": [round(value, 4) for value in values],
    }  # fmt: skip
    if values:
        first, last = ends(values)
        result |= {"first": first, "last": last, "improved": recipe.improved(first, last)}
    if gaps := curve(folder / log_path, PARITY):
        result["max_kl_sample_train"] = float(f"{max(gaps):.2g}")
    if status:
        result["error"] = tail(output, 60)
    return result


def curve(log_path: pathlib.Path, metric: str) -> list[float]:
    """A metric by step, from the recipe's own log; empty where it has none."""
    path = log_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [float(row[metric]) for row in rows if metric in row]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last quarter of the steps. Example: ends([1, 2, 3, 4]) == (1, 4)"""
    count = max(1, len(values) // 4)
    return round(statistics.fmean(values[:count]), 4), round(statistics.fmean(values[-count:]), 4)


def last_checkpoints(log_path: pathlib.Path) -> dict[str, str]:
    """The tinker:// paths of the last checkpoints that a recipe noted, as the `sampler` and `state` of the next one."""
    rows = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    return {
        kind: str([row[f"{kind}_path"] for row in rows if row.get(f"{kind}_path")][-1]) for kind in ("sampler", "state")
    }


def keep(result: Mapping[str, object], path: pathlib.Path) -> None:
    """Puts a run's line into a file of such lines, in the place of the same recipe's, and the table into its page.

    The lines are in RECIPES' order. The page has the same name but for .md, and a table to be replaced.
    """
    lines = {line["recipe"]: line for line in kept(path)} if path.exists() else {}
    lines[str(result["recipe"])] = dict(result)
    path.write_text("".join(json.dumps(lines[name]) + "\n" for name in RECIPES if name in lines))
    page = path.with_suffix(".md")
    if page.exists():
        before, _, rest = page.read_text().partition(TABLE_HEAD)
        page.write_text(before + table(kept(path)) + "\n" + rest.partition("\n\n")[2])


def kept(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Kept lines as a table in Markdown."""
    rows = [TABLE_HEAD, "|---" * 6 + "|"]
    rows += [
        f"| `{line['recipe']}` | {len(line['curve'])} | {line['metric'].removeprefix('env/all/')} "
        f"| {line['first']:.3f} | {line['last']:.3f} | {line['seconds']:.0f} |"
        for line in lines
    ]
    return "\n".join(rows) + "\n"


def lay_out_tokenizer(model: str, folder: pathlib.Path, alias: str) -> str:
    """Makes the tokenizer loadable by the model's name and by `alias`; the name that clients use."""
    from locojax.models.hub import load_tokenizer

    source = pathlib.Path(model)
    name = f"local/{source.name}" if source.is_dir() else f"local/{model}"
    for target in (name, alias):
        (folder / target).mkdir(parents=True)
        load_tokenizer(model).save(folder / target)
        if source.is_dir():
            shutil.copy(source / "config.json", folder / target)
    return name


def lay_out_taught(model: str, adapter: pathlib.Path, folder: pathlib.Path) -> str:
    """A model folder: the base model with the adapter merged in. The unembedding stays as it was, and tied."""
    from locojax.models.hub import load_model
    from locojax.models.peft import load_adapter
    from locojax.models.weights import save_directory

    base = load_model(model)
    lora, tree = load_adapter(adapter, base.spec)
    layers = {
        name: leaf + lora.scale * tree[name]["a"] @ tree[name]["b"] if name in tree else leaf
        for name, leaf in base.params["layers"].items()
    }
    save_directory(folder, {**base.params, "layers": layers}, base.spec, base.config)
    base.tokenizer.save(folder)
    return str(folder)


def run_all(
    python: str, model: str, recipes: Iterable[str], renderer: str, steps: int | None = None
) -> Iterator[dict[str, object]]:
    """Each recipe's result: all against one server of `model`, but for those that ask for a taught one."""
    alias = ALIASES[renderer]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        clients = folder / "clients"
        clients.mkdir()
        lay_out(clients)
        names = {"model": lay_out_tokenizer(model, clients, alias), "alias": alias, "renderer": renderer}
        model = str(pathlib.Path(model).resolve()) if pathlib.Path(model).exists() else model

        def run_against(base: str, some: Sequence[str], server: pathlib.Path) -> Iterator[dict[str, object]]:
            server.mkdir()
            with serve(base, server, ["--name", names["model"], "--alias", alias]) as served:
                for one in some:
                    result = run_recipe(one, python, served.url, names, clients, steps)
                    if result["status"]:
                        result["server"] = tail(server / "server.log")
                    yield result

        ordered = in_order(recipes)
        yield from run_against(model, [one for one in ordered if RECIPES[one].taught_by is None], folder / "server")
        for one in ordered:
            if (teacher := RECIPES[one].taught_by) is not None:
                path = TinkerPath.parse(last_checkpoints(clients / f"runs/{teacher}")["sampler"])
                adapter = CheckpointFiles(folder / "server" / "data").directory(path)
                taught = lay_out_taught(model, adapter, folder / f"taught-{one}")
                yield from run_against(taught, [one], folder / f"server-{one}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("model")
    parser.add_argument("recipes", nargs="*", metavar="recipe", help=", ".join(RECIPES))
    parser.add_argument("--steps", type=int, help="default: each recipe's own, and then it must improve")
    parser.add_argument("--renderer", default="role_colon", choices=ALIASES)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE", help="of JSON lines, one a recipe")
    options = parser.parse_intermixed_args()
    failures = 0
    for result in run_all(options.python, options.model, options.recipes or RECIPES, options.renderer, options.steps):
        good = result["status"] == 0 and (options.steps is not None or bool(result.get("improved")))
        failures += not good
        if good and options.steps is None and options.keep is not None:
            keep(result, options.keep)
        print(json.dumps(result), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
