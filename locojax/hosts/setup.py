"""From settings to what a run starts with: model, prompts, reward, and a config without "auto"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax

from locojax import config as config_module
from locojax.config import Config
from locojax.hosts.worker import lora_spec, training_mesh
from locojax.models.hub import LoadedModel, load_model
from locojax.models.lora import adapter_parameters
from locojax.models.platform import auto_dtype
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.models.spec import ModelSpec, num_parameters
from locojax.models.spec import count as count_parameters
from locojax.resolving import resolve
from locojax.rl.datasets import Template, encode_prompts, fit_prompts
from locojax.rl.sources import load_source
from locojax.training.over_mesh import auto_gather
from locojax.training.programs import ProgramSpec
from locojax.training.shapes import abstract_state
from locojax.training.sharded import Gather, Over
from locojax.types import Prompt

BYTES_OF = {"float32": 4, "bfloat16": 2}
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run starts with. Filled by `prepare`.

    Attributes:
      config: resolved.
      train, held_out: prompts with tokens, all of which fit. dropped: prompts left out as too long.
      reward: what the grader loads.
    """

    config: Config
    model: LoadedModel
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    dropped: tuple[Prompt, ...]
    reward: str


def prepare(config: Config, begin: Callable[[str, str], None]) -> Prepared:
    """Reads the data, then the model; every setting and every prompt is checked before the first step.

    Args:
      begin: told what is being done now, e.g. begin("load", "smollm2-135m").

    Raises:
      ConfigError, DataError, ModelError: as the parts do.
    """
    data = config.data
    begin("load", f"prompts of {data.source}")
    task = load_source(
        data.source,
        seed=config.run.seed,
        template=_template(config),
        reward=None if data.reward == "task" else data.reward,
        split=data.split,
        held_out=data.held_out,
        held_out_share=data.held_out_share,
        num_train=data.num_prompts,
    )
    begin("load", f"model {config.model.name}")
    model = load_model(config.model.name, cache_in=config_module.cache_folder(config))
    context = model.spec.max_context if config.model.max_context == "auto" else int(config.model.max_context)
    room = max(context - config.rollout.max_tokens, 1)
    longest = room if data.max_prompt_tokens is None else min(room, data.max_prompt_tokens)
    encode, chat = model.tokenizer.encode, model.tokenizer.chat
    train, dropped = fit_prompts(encode_prompts(task.train, encode, chat), longest, data.long_prompts)
    held_out = list(task.held_out[: config.run.eval_prompts])
    if held_out:
        held_out, more = fit_prompts(encode_prompts(held_out, encode, chat), longest, data.long_prompts)
        dropped += more
    resolved = resolve(
        config,
        platform=jax.default_backend(),
        model_context=model.spec.max_context,
        longest_prompt=max(len(prompt.tokens) for prompt in [*train, *held_out]),
        auto_dtype=auto_dtype(),
        num_hosts=jax.process_count(),
        num_devices=jax.device_count(),
    )
    return Prepared(resolved, model, tuple(train), tuple(held_out), tuple(dropped), task.reward)


def _template(config: Config) -> Template | None:
    data = config.data
    if data.template is None:
        return None
    return Template(data.template, answer_field=data.answer_field, chat=data.chat, system=data.system)


def describe(config: Config) -> tuple[Config, list[tuple[str, str]]]:
    """(resolved config, rows of name and value): what `--dry-run` shows. Loads everything, computes nothing."""
    prepared = prepare(config, lambda *_: None)
    resolved, spec = prepared.config, prepared.model.spec
    lora = lora_spec(resolved)
    total = num_parameters(spec)
    trained = total if lora is None else count_parameters(adapter_parameters(spec, lora))
    rows = [
        ("model", f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}, vocab {spec.vocab_size:,}"),
        ("parameters", f"{total:,}"),
        ("trained", f"{trained:,} ({100 * trained / total:.2f} %)"),
        ("training prompts", f"{len(prepared.train):,}, dropped {len(prepared.dropped):,}"),
        ("held-out prompts", f"{len(prepared.held_out):,}"),
        ("longest prompt", f"{max(len(prompt.tokens) for prompt in prepared.train)} tokens"),
        ("reward", prepared.reward),
    ]
    return resolved, rows + [(name, f"{size / GIB:.2f} GiB") for name, size in memory(spec, resolved).items()]


def memory(spec: ModelSpec, config: Config, gather: Gather | Literal["auto"] = "auto") -> dict[str, float]:
    """Bytes by purpose, of one device: an estimate from shapes, before anything is compiled.

    Activations are of one micro-batch.

    Args:
      gather: over a mesh, when the trainer makes weights whole; auto: as it does by itself.
    """
    training = config.training
    compute, rollout = BYTES_OF[training.compute_dtype], BYTES_OF[config.rollout.dtype]
    total = num_parameters(spec)
    tokens = int(training.rows) * int(training.row_tokens) // training.mesh_sequence
    # Per token and layer: norms, q, k, v, attention's output and the residual sums; gate, up, their product.
    width = 6 * spec.hidden_size + 2 * spec.q_size + 2 * spec.kv_size + 4 * spec.intermediate_size
    layers = spec.num_layers if training.remat == "none" else 1
    activations = tokens * (layers * width + spec.num_layers * spec.hidden_size) * compute
    scores = tokens * min(int(training.row_tokens), 512) * spec.num_heads * 4 * layers
    slots = int(config.rollout.max_slots)
    kv = slots * config.rollout.max_tokens * spec.num_layers * 2 * spec.kv_size * rollout
    found = {
        "memory: weights and optimizer": float(sum(_trainer_bytes(spec, config, gather).values())),
        "memory: sampler's weights": float(rollout * (total + spec.vocab_size * spec.hidden_size)),
        "memory: activations of a micro-batch": float(activations + scores),
        "memory: keys and values": float(kv),
    }
    return {**found, "memory: sum": sum(found.values())}


def _trainer_bytes(spec: ModelSpec, config: Config, gather: Gather | Literal["auto"]) -> dict[str, int]:
    mesh, training = training_mesh(config), config.training
    if mesh is None:  # one device reads the masters themselves, as where a layer is made whole at a time
        mesh, gather = make_mesh(MeshSpec(), jax.devices()[:1]), "layer"
    over = Over(mesh, auto_gather(mesh) if gather == "auto" else gather)
    program = ProgramSpec(spec, lora_spec(config), training.compute_dtype, training.remat, 1, True)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return abstract_state(program, over, keep_transposes=on_cpu).held(over)
