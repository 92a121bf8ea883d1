"""Settings that say "auto" become what suits the platform, the model and the data."""

from __future__ import annotations

from typing import Any, TypeVar

from locojax import settings
from locojax.config import Config, TrainingConfig
from locojax.errors import ConfigError

T = TypeVar("T")

LEFT_OPEN = ("rollout.kv_memory_gib", "loss.clip_low", "loss.clip_high", "run.journal", "hosts.distributed")
"""Settings whose "auto" `resolve` keeps: the engine sees what memory the weights leave, the loss has its own bounds,
the run folder may be moved, and a resumed run may have other hosts."""


def resolve(
    config: Config,
    *,
    platform: str,
    model_context: int,
    longest_prompt: int,
    auto_dtype: str | None = None,
    num_hosts: int = 1,
    num_devices: int = 1,
) -> Config:
    """A new config without "auto", but for those of `LEFT_OPEN`.

    Args:
      platform: jax's name of it: "cpu", "gpu" or "tpu".
      model_context: the longest sequence the model was made for, in tokens.
      longest_prompt: of this run's training and held-out prompts, in tokens.
      auto_dtype: the number format that is fastest here, None if unknown: float32 on CPU, else bfloat16.
      num_devices: of all hosts.

    Raises:
      ConfigError: a set context is longer than the model's, prompt and completion don't fit in a row, or the mesh
        doesn't fit the devices or divide a row.
    """
    rollout, training = config.rollout, config.training
    context = _unless_set(config.model.max_context, model_context)
    if context > model_context:
        problem = "Setting 'model.max_context' is longer than the model's own context"
        raise ConfigError(problem, got=context, expected=f"at most {model_context}")
    longest = min(longest_prompt + rollout.max_tokens, context)
    on_cpu = platform == "cpu"
    dtype = _unless_set(training.compute_dtype, auto_dtype or ("float32" if on_cpu else "bfloat16"))
    # Attention in a row costs the square of its length where no kernel skips other segments, so on CPU rows are short;
    # but sequences share what they have in common only within a row, so it holds a few of them.
    parts = training.mesh_sequence
    short = _round_up(max(longest, min(4 * longest, 512)), 64 * parts)
    long = _round_up(max(4096, longest), 128 * parts)
    row_tokens = _unless_set(training.row_tokens, short if on_cpu else long)
    if row_tokens < longest:
        problem = "Setting 'training.row_tokens' is too small for the longest prompt and completion"
        raise ConfigError(problem, got=row_tokens, expected=f"at least {longest}")
    if row_tokens % parts:
        raise ConfigError(
            f"Setting 'training.row_tokens' can't be divided by training.mesh_sequence {parts}",
            got=row_tokens,
            expected=f"a multiple of {parts}, as {_round_up(row_tokens, parts)}",
        )
    budget = 1024 if on_cpu else 16384
    iterations = 1 if config.hosts.controller == "single" else 16
    prompts = -(-config.run.prompts_per_step // num_hosts)
    slots = min(_power_of_two(prompts * rollout.group_size), 128 if on_cpu else 512)
    values: dict[str, Any] = {
        "model.max_context": context,
        "rollout.dtype": _unless_set(rollout.dtype, dtype),
        "rollout.max_slots": _unless_set(rollout.max_slots, slots),
        "rollout.decode_iterations": _unless_set(rollout.decode_iterations, iterations),
        "training.compute_dtype": dtype,
        "training.row_tokens": row_tokens,
        "training.rows": _unless_set(training.rows, max(1, budget // row_tokens)),
        "training.remat": _unless_set(training.remat, "linear" if on_cpu else "full"),
        "training.mesh_fsdp": _mesh_fsdp(training, num_hosts, num_devices, on_cpu),
    }
    return settings.replace(config, values)


def _mesh_fsdp(training: TrainingConfig, num_hosts: int, num_devices: int, on_cpu: bool) -> int:
    tensor, sequence = training.mesh_tensor, training.mesh_sequence
    of_row = tensor * sequence
    alone = num_hosts == 1 and on_cpu and of_row == 1  # a CPU's devices share its cores: no use by themselves
    fsdp = _unless_set(training.mesh_fsdp, 1 if alone else max(num_devices // of_row, 1))
    used = fsdp * of_row
    if used > num_devices or (num_hosts > 1 and used != num_devices):
        middle, choose = "", "a mesh_tensor that divides"
        if sequence > 1:
            middle, choose = f" x training.mesh_sequence {sequence}", "a mesh_tensor x mesh_sequence that divides"
        raise ConfigError(
            f"A mesh of training.mesh_fsdp {fsdp}{middle} x training.mesh_tensor {tensor} does not fit the devices",
            got=f"{num_devices} devices on {num_hosts} host{'s' if num_hosts > 1 else ''}",
            expected=f"{used} devices" if num_hosts > 1 else f"at least {used}",
            remedy=f"Leave training.mesh_fsdp at auto, and choose {choose} a host's devices",
        )
    return fsdp


def _unless_set(value: Any, automatic: T) -> T:
    """`automatic` in place of "auto". Any, because no type checker tells "auto" from the other strings of a setting."""
    return automatic if value == "auto" else value


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
