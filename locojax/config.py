"""What a person can set: one frozen tree of dataclasses, checked as a whole before anything is loaded.

`load` reads a TOML file and `key=value` arguments into a `Config`; `resolve` turns its "auto" values into numbers, in a
NEW config, once the model and the platform are known. The run folder keeps the resolved one.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable
from typing import Literal

from locojax import settings
from locojax.errors import ConfigError
from locojax.settings import setting

Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: str = setting(
        "smollm2-135m",
        "A directory in Hugging Face format, a .gguf file, an alias (smollm2-135m), a hub id, or random:CONFIG.JSON "
        "(random weights, for measurements).",
    )
    max_context: int | Auto = setting("auto", "Longest prompt + completion, in tokens. auto: the model's own.", low=2)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where prompts come from and how an answer is graded."""

    source: str = setting(
        "addition",
        "A task (addition, successor, subtraction2, sort3, gsm8k, math, reasoning_gym:NAME), a .jsonl or .parquet "
        "file, or hub:ORG/NAME.",
    )
    held_out: str | None = setting(None, "File or hub:ORG/NAME to evaluate on. none: the task's own, or a share.")
    held_out_share: float = setting(
        0.1, "Share of the prompts kept for evaluation without `held_out`.", low=0, high=0.9
    )
    split: str = setting("train", "Split of a hub data set.")
    template: str | None = setting(None, "Prompt text with the row's fields in braces. none: the task's own.")
    answer_field: str = setting("answer", "The row's field that holds the right answer.")
    chat: bool = setting(True, "Send the prompt through the model's chat template, instead of as plain text.")
    system: str | None = setting(None, "System message of a chat; may name the row's fields.")
    reward: str = setting(
        "task",
        "exact, last_number, gsm8k, math, or your own as path/to/file.py:function or module:function. "
        "task: the task's own.",
    )
    max_prompt_tokens: int | None = setting(None, "Prompts longer than this are handled by `long_prompts`.", low=1)
    long_prompts: Literal["refuse", "drop"] = setting("refuse", "What happens to a prompt that is too long.")
    num_prompts: int | None = setting(None, "Use only this many training prompts (or generate this many).", low=1)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    group_size: int = setting(8, "Completions sampled for each prompt.", low=1)
    max_tokens: int = setting(64, "Longest completion, in tokens.", low=1)
    temperature: float = setting(1.0, "Sampling temperature of training rollouts; evaluation is greedy.", above=0)
    top_k: int = setting(-1, "Sample from the k likeliest tokens. -1: off.", low=-1)
    top_p: float = setting(1.0, "Sample from the smallest set of tokens with this probability.", above=0, high=1)
    min_p: float = setting(0.0, "Drop tokens below this share of the likeliest token's probability.", low=0, high=1)
    stop: tuple[str, ...] | None = setting(None, "Strings that end a completion. none: end-of-sequence tokens only.")
    dtype: Literal["auto", "float32", "bfloat16"] = setting("auto", "Number format of generation. auto: as training.")
    max_slots: int | Auto = setting("auto", "Completions decoded at the same time.", low=1)
    kv_memory_gib: float | Auto = setting("auto", "Memory for the key/value cache, in GiB.", above=0)
    decode_iterations: int | Auto = setting(
        "auto", "Most tokens per slot decoded by one compiled call. auto: 16, or 1 under a single controller.", low=1
    )


@dataclasses.dataclass(frozen=True)
class GradingConfig:
    """How rewards are computed."""

    num_workers: int = setting(1, "Grader processes.", low=1)
    deadline_seconds: float = setting(5.0, "A grade that takes longer is given up, and is unscorable.", above=0)
    max_unscorable_rate: float = setting(
        0.1, "Share of recent grades that may fail; above, the run ends.", low=0, high=1
    )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Which weights are trained, and how a batch is cut."""

    method: Literal["full", "lora"] = setting("full", "full: every weight. lora: low-rank adapters only.")
    lora_rank: int = setting(32, "Rank of the adapters.", low=0)
    lora_alpha: float = setting(32.0, "Adapters are scaled by alpha / rank (rsLoRA: alpha / sqrt(rank)).", above=0)
    lora_attention: bool = setting(True, "Adapters on the attention projections.")
    lora_mlp: bool = setting(True, "Adapters on the MLP projections.")
    lora_unembed: bool = setting(False, "An adapter on the unembedding.")
    lora_rslora: bool = setting(False, "Scale adapters by alpha / sqrt(rank).")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Number format of matrix products; weights and sums stay float32. auto: float32 on CPU, else bfloat16."
    )
    row_tokens: int | Auto = setting("auto", "Length of a packed row, in tokens.", low=2)
    rows: int | Auto = setting("auto", "Packed rows per micro-batch: rows x row_tokens is the token budget.", low=1)
    remat: Literal["auto", "none", "linear", "dots", "full"] = setting(
        "auto",
        "What the backward pass recomputes. none: nothing. linear: what is cheap. dots: all but weight products. "
        "full: all but each layer's input.",
    )
    advantage: Literal["mean", "std", "rloo"] = setting(
        "mean",
        "mean: reward minus the group's mean (Dr. GRPO). std: also over its standard deviation. rloo: leave-one-out.",
    )
    mask_truncated: bool = setting(False, "Don't train on completions cut off by max_tokens.")
    substeps: int = setting(1, "Optimizer steps per batch of rollouts.", low=1)
    mesh_fsdp: int | Auto = setting(
        "auto",
        "Devices, of all hosts, that weights and rows are sharded over. auto: all that mesh_tensor and mesh_sequence "
        "leave, and on one host's CPU a single one.",
        low=1,
    )
    mesh_tensor: int = setting(1, "Devices that a row's heads and widths are sharded over: tensor parallelism.", low=1)
    mesh_sequence: int = setting(
        1, "Devices that a row's tokens are sharded over, where a row is too long for one: sequence parallelism.", low=1
    )
    max_programs: int = setting(
        16,
        "Programs of the trainer that data may ask for, one for each loss, its inputs and number of targets; more are "
        "refused.",
        low=1,
    )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The policy loss and its optional KL term."""

    name: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"] = setting(
        "importance_sampling", "The policy-gradient loss."
    )
    clip_low: float | Auto = setting(
        "auto", "Lower bound on the ratio (ppo, cispo, gspo). auto: the loss's own.", low=0, high=1
    )
    clip_high: float | Auto = setting(
        "auto", "Upper bound on the ratio (ppo, cispo, gspo). auto: the loss's own.", low=1
    )
    dro_beta: float = setting(0.05, "Strength of dro's quadratic term.", low=0)
    normalise: Literal["tokens", "completions", "constant"] = setting(
        "constant",
        "Mean over the batch's trained tokens (tokens); of each completion's mean (completions); or the sum over "
        "completions x max_tokens (constant).",
    )
    tis_cap: float | None = setting(
        None, "Truncated importance sampling: cap on the trainer/sampler ratio. Takes one more forward pass.", above=0
    )
    icepop_low: float | None = setting(
        None, "IcePop: tokens whose trainer/sampler ratio is below are left out. One more forward pass.", above=0
    )
    icepop_high: float | None = setting(None, "IcePop: tokens whose ratio is above are left out.", above=0)
    kl: Literal["none", "k1", "k2", "k3"] = setting("none", "Estimator of the KL to the starting policy.")
    kl_coefficient: float = setting(0.0, "Weight of the KL term.", low=0)
    kl_in: Literal["reward", "loss"] = setting("loss", "Where the KL term goes: off the reward, or onto the loss.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    learning_rate: float = setting(2e-5, "Peak learning rate.", low=0)
    schedule: Literal["constant", "linear", "cosine"] = setting("constant", "Decay after warm-up.")
    warmup_steps: int = setting(0, "Optimizer steps of linear warm-up.", low=0)
    final_share: float = setting(0.1, "Learning rate at the end, as a share of the peak.", low=0, high=1)
    beta1: float = setting(0.9, "Decay of the gradient's mean.", low=0, high=0.999999)
    beta2: float = setting(0.95, "Decay of the gradient's mean square.", low=0, high=0.999999)
    eps: float = setting(1e-8, "Added to the root mean square.", above=0)
    weight_decay: float = setting(0.0, "Decoupled weight decay.", low=0)
    grad_clip_norm: float = setting(1.0, "Largest global gradient norm. 0: no clipping.", low=0)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    name: str = setting("run", "The run folder's name.")
    dir: str = setting("runs", "Where run folders are kept.")
    seed: int = setting(0, "Everything drawn at random follows from it.", low=0, high=2**31 - 1)
    num_steps: int = setting(20, "Training steps.", low=0)
    passes: int = setting(
        1, "How often the run's batches are gone through; 2 makes runs that `locojax compare` can score.", low=1
    )
    prompts_per_step: int = setting(16, "Prompts drawn for each step.", low=1)
    eval_every: int = setting(5, "Steps between evaluations on held-out prompts. 0: never.", low=0)
    eval_prompts: int = setting(64, "Held-out prompts per evaluation.", low=1)
    checkpoint_every: int = setting(10, "Steps between checkpoints. 0: none on the way.", low=0)
    checkpoint_at_end: bool = setting(True, "Write a checkpoint after the last step too.")
    keep_last: int = setting(2, "Checkpoints kept.", low=1)
    keep_best: bool = setting(True, "Keep the checkpoint with the best held-out accuracy too.")
    max_gap: float = setting(
        1.0,
        "Refuse to train if sampler and trainer log-probs differ by more at the first step: mean, in nats.",
        above=0,
    )
    max_idle_steps: int = setting(20, "Steps in a row that teach nothing before the run ends.", low=1)
    pipelined: bool = setting(
        False, "Train on groups that are finished while later ones are decoded or graded; on one host, same gradient."
    )
    journal: str = setting(
        "auto",
        "Where what was sampled, graded and trained is written down, for --resume: auto (in the run folder), off, or a "
        "folder of any kind that fsspec knows (gs://...).",
    )
    grace_seconds: float = setting(
        30.0, "After SIGTERM, a checkpoint is written only if it can be whole within this time.", above=0
    )
    cache_dir: str | None = setting(None, "Compiled programs and converted models. none: the user's cache folder.")
    cache_max_gib: float = setting(
        30.0, "Bound of compiled programs, and of converted models; what was not used for longest goes first.", above=0
    )


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """How several hosts work together; nothing of it changes what is sampled or trained."""

    controller: Literal["local", "single"] = setting(
        "local",
        "local: every host generates and grades its own prompts. single: host 0 schedules all hosts' generation, in "
        "lockstep (the baseline that `local` is measured against).",
    )
    distributed: Literal["auto", "on", "off"] = setting(
        "auto",
        "auto: join the hosts that `locojax launch`, LOCOJAX_COORDINATOR or the cluster's environment names. on: jax "
        "must find them (TPU pods). off: this host alone.",
    )
    balance: bool = setting(True, "Even out the hosts' prompt tokens; else consecutive prompts go to one host.")
    steal_groups: bool = setting(
        False,
        "A host that is done takes over whole groups that another has not begun. There are some where a host has more "
        "completions to do than rollout.max_slots.",
    )
    metrics_in_barrier: bool = setting(
        False,
        "Gather all hosts' metrics on host 0 in each step; else each host writes its own, off the critical path.",
    )
    freeze_gc: bool = setting(True, "Run Python's garbage collector between steps only.")
    publish_at_once: bool = setting(True, "Publish all weights in one compiled call; else leaf by leaf.")
    deadline_seconds: float = setting(600.0, "Longest wait for the other hosts, compiling included.", above=0)
    silence_seconds: float = setting(30.0, "A host that gives no sign of life for this long is dead.", above=2)


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What a run shows."""

    redraw_seconds: float = setting(30.0, "Shortest time between two drawings of the report.", low=0)
    tensorboard: bool = setting(False, "Also write TensorBoard events (needs the `tensorboard` extra).")
    wandb: bool = setting(False, "Also log to Weights & Biases (needs the `wandb` extra).")
    wandb_project: str = setting("locojax", "Project at Weights & Biases.")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run is told. Example: load(pathlib.Path("gsm8k.toml"), ["run.seed=1"])"""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    grading: GradingConfig = GradingConfig()
    training: TrainingConfig = TrainingConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    hosts: HostsConfig = HostsConfig()
    report: ReportConfig = ReportConfig()


def load(path: pathlib.Path | None, arguments: Iterable[str] = (), *, base: Config | None = None) -> Config:
    """A checked config: the defaults (or `base`), then the file, then the arguments.

    Raises:
      ConfigError: the file can't be read; a key is unknown, its value is of the wrong type, out of range, or
        contradicts another.
    """
    written = settings.read_toml(path) if path is not None else []
    config = settings.assign(base or Config(), written + [settings.read_argument(text) for text in arguments])
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError for the first pair of settings that contradict each other."""
    group, training, loss = config.rollout.group_size, config.training, config.loss
    if group == 1:
        _contradiction(
            f"rollout.group_size is 1 and training.advantage is {training.advantage!r}: one completion has nothing to "
            "be compared with",
            "Sample at least 2 completions a prompt",
        )
    if training.method == "lora":
        if training.lora_rank == 0:
            _contradiction("training.method is 'lora' and training.lora_rank is 0", "Use a rank of at least 1")
        if not (training.lora_attention or training.lora_mlp or training.lora_unembed):
            _contradiction(
                "training.method is 'lora' and lora_attention, lora_mlp and lora_unembed are all false",
                "Switch at least one on: nothing would be trained",
            )
    if loss.kl == "none" and loss.kl_coefficient > 0:
        _contradiction(f"loss.kl_coefficient is {loss.kl_coefficient:g} and loss.kl is 'none'", "Choose k1, k2 or k3")
    if loss.name == "dro" and loss.normalise == "completions":
        _contradiction(
            "loss.name is 'dro' and loss.normalise is 'completions', but dro's quadratic term has one strength for all "
            "completions",
            "Choose loss.normalise 'tokens' or 'constant'",
        )
    if (loss.icepop_low is None) != (loss.icepop_high is None):
        _contradiction(
            f"loss.icepop_low is {loss.icepop_low} and loss.icepop_high is {loss.icepop_high}", "Set both, or neither"
        )
    if loss.icepop_low is not None and loss.icepop_high is not None and loss.icepop_low > loss.icepop_high:
        _contradiction(
            f"loss.icepop_low ({loss.icepop_low:g}) is above loss.icepop_high ({loss.icepop_high:g})", "Swap them"
        )
    if config.run.num_steps % config.run.passes:
        _contradiction(
            f"run.num_steps is {config.run.num_steps} and run.passes is {config.run.passes}: the passes are not of the "
            "same batches",
            "Make run.num_steps a multiple of run.passes",
        )
    if config.run.pipelined:
        _check_pipelined(config)
    if config.hosts.steal_groups:
        _check_stealing(config)
    if config.run.prompts_per_step < training.substeps:
        _contradiction(
            f"training.substeps is {training.substeps} and run.prompts_per_step is {config.run.prompts_per_step}",
            "A sub-step needs at least one prompt",
        )
    if config.data.reward == "task" and _is_file(config.data.source):
        _contradiction(
            f"data.source is the file or data set {config.data.source!r} and data.reward is 'task', but only a task "
            "has a reward of its own",
            "Set data.reward, for example to 'last_number'",
        )
    context = config.model.max_context
    if context != "auto" and config.rollout.max_tokens >= context:
        _contradiction(
            f"rollout.max_tokens is {config.rollout.max_tokens} and model.max_context is {context}, which leaves no "
            "room for a prompt",
            "Lower rollout.max_tokens",
        )


def _check_pipelined(config: Config) -> None:
    if config.loss.normalise == "tokens":
        _contradiction(
            "run.pipelined is true and loss.normalise is 'tokens': the batch's tokens are not known before the last is "
            "sampled",
            "Choose loss.normalise 'constant' or 'completions'",
        )
    if config.training.substeps > 1:
        _contradiction(
            f"run.pipelined is true and training.substeps is {config.training.substeps}: which prompts a sub-step has "
            "is not a matter of which are finished first",
            "Use training.substeps 1",
        )
    if config.hosts.controller == "single":
        _contradiction("run.pipelined is true and hosts.controller is 'single'", "Use hosts.controller 'local'")


def _check_stealing(config: Config) -> None:
    if config.hosts.controller == "single":
        _contradiction(
            "hosts.steal_groups is true and hosts.controller is 'single': one head schedules all hosts, and none has "
            "groups of its own",
            "Use hosts.controller 'local'",
        )
    if config.run.pipelined:
        _contradiction(
            "hosts.steal_groups is true and run.pipelined is true, which is for one host alone",
            "Set one of them to false",
        )


def _contradiction(problem: str, remedy: str) -> None:
    raise ConfigError(f"Settings contradict each other: {problem}", remedy=remedy)


def _is_file(source: str) -> bool:
    return source.startswith("hub:") or source.endswith((".jsonl", ".parquet"))


def run_folder(config: Config) -> pathlib.Path:
    """Where this run keeps its config, metrics, samples, report and checkpoints."""
    return pathlib.Path(config.run.dir) / config.run.name


def cache_folder(config: Config | None = None) -> pathlib.Path:
    """Where compiled programs and converted models are kept: `run.cache_dir`, $LOCOJAX_CACHE, or the user's cache."""
    if config is not None and config.run.cache_dir is not None:
        return pathlib.Path(config.run.cache_dir)
    if "LOCOJAX_CACHE" in os.environ:
        return pathlib.Path(os.environ["LOCOJAX_CACHE"])
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "locojax"
