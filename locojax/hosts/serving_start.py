"""From settings to a loop that can serve: the model is loaded, the trainer and the samplers made, programs compiled."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from locojax.hosts import tenant_checkpoints
from locojax.hosts.protocol import EngineInfo
from locojax.hosts.samplers import Samplers
from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_compilations import CompilationCounter, ReadAhead
from locojax.hosts.serving_link import Link
from locojax.hosts.serving_loop import Loop
from locojax.hosts.serving_memory import auto_kv_bytes, device_memory, give_back
from locojax.hosts.serving_operations import Operations
from locojax.hosts.serving_settings import Dtype, ServeSettings
from locojax.models import decoder
from locojax.models.hub import LoadedModel, load_model
from locojax.models.lora import empty_stack
from locojax.models.native import build as native
from locojax.models.platform import auto_dtype
from locojax.models.spec import ModelSpec
from locojax.rollout.engine import Engine
from locojax.rollout.settings import EngineSettings
from locojax.training.losses import LOSSES
from locojax.training.programs import Tree
from locojax.training.tenants import TenantSettings, TenantTrainer

log = logging.getLogger(__name__)

AUTO_ROW_TOKENS = 1024

PAGE_TOKENS = 128
"""Of the computed prompts' pages: smaller ones mean more arrays in the programs, and longer compilations."""

SHORT_ROW = 4
"""Data that fit into this part of a row are computed in rows of that length, twice as many at a time."""


def start(
    settings: ServeSettings,
    link: Link,
    clock: PhaseClock,
    counter: CompilationCounter,
    progress: Callable[[str], None],
) -> Loop:
    """A loop that is ready to run.

    Args:
      counter: what it has counted is told with the status.
      progress: told what is being done now.

    Raises:
      ModelError: the model can't be loaded. ConfigError: the settings don't fit it.
    """
    with clock.phase("load"):
        progress(f"loading {settings.model}")
        cache = None if settings.cache_dir is None else Path(settings.cache_dir)
        model = load_model(settings.model, cache_in=cache)
        base = tenant_checkpoints.identify(settings.name or settings.model, model.spec, model.params)
        progress("moving the weights to the devices")
        model = _shared(settings, model)
        if settings.kernels != "xla":
            progress("looking for the C++ kernels, or compiling them")
        log.info("computing with %s", native.told(settings.kernels, _dtype(settings.sample_dtype)))
        trainer = _trainer(settings, model, clock)
        engine = _engine(settings, model, clock)
    samplers = Samplers(engine, max_resident=settings.max_resident_samplers)
    if settings.warm_up:
        with clock.phase("warm_up"):
            progress("compiling the programs for training")
            trainer.warm_up()
            progress("compiling the programs for sampling")
            engine.warm_up_server()
            give_back()
    info = EngineInfo(
        incarnation=uuid.uuid4().hex,
        model_name=base.name,
        family=model.spec.family,
        vocab_size=model.spec.vocab_size,
        max_context=_max_context(settings, model.spec),
        max_row_tokens=_row_tokens(settings, model.spec),
        max_adapters=settings.max_adapters,
        max_rank=settings.max_rank,
        eos_ids=tuple(model.tokenizer.eos_ids),
        open_models=(),
        open_samplers=(),
        running=(),
        losses=tuple(LOSSES),
    )
    operations = Operations(trainer, samplers, base, alpha=settings.alpha, max_rank=settings.max_rank)
    return Loop(
        link,
        trainer,
        samplers,
        operations,
        clock,
        info,
        sampling_share=settings.sampling_share,
        status_seconds=settings.status_seconds,
        num_compilations=lambda: counter.num_compilations,
        read_ahead=ReadAhead(engine.compiler.leisure, lambda: engine.compiler.num_behind),
    )


def _max_context(settings: ServeSettings, spec: ModelSpec) -> int:
    return min(settings.max_context or spec.max_context, spec.max_context)


def _row_tokens(settings: ServeSettings, spec: ModelSpec) -> int:
    if settings.row_tokens == "auto":
        return min(_max_context(settings, spec), AUTO_ROW_TOKENS)
    return int(settings.row_tokens)


def _kv_bytes(settings: ServeSettings, spec: ModelSpec, dtype: str) -> int:
    if settings.kv_bytes != "auto":
        return int(settings.kv_bytes)
    context = _max_context(settings, spec)
    return auto_kv_bytes(spec, dtype, max_slots=settings.max_slots, max_context=context, memory=device_memory())


def _dtype(setting: Dtype) -> str:
    return auto_dtype() if setting == "auto" else setting


def _shared(settings: ServeSettings, model: LoadedModel) -> LoadedModel:
    """The model with its weights on the device once for the trainer and the engine, if both want the same dtype."""
    dtype = _dtype(settings.compute_dtype)
    if dtype != _dtype(settings.sample_dtype):
        return model
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.dtype(dtype)), model.params)
    return dataclasses.replace(model, params=params)


def _trainer(settings: ServeSettings, model: LoadedModel, clock: PhaseClock) -> TenantTrainer:
    row_tokens = _row_tokens(settings, model.spec)
    return TenantTrainer(
        model.spec,
        model.params,
        TenantSettings(
            row_tokens=row_tokens,
            rows=settings.rows,
            short_row_tokens=short if (short := row_tokens // SHORT_ROW) else None,
            short_rows=2 * settings.rows,
            max_adapters=settings.max_adapters,
            max_rank=settings.max_rank,
            compute_dtype=settings.compute_dtype,
            remat=settings.remat,
            kernels=settings.kernels,
            snapshot_dtype="bfloat16" if _dtype(settings.sample_dtype) == "bfloat16" else "float32",
        ),
        phase=clock.phase,
    )


def _engine(settings: ServeSettings, model: LoadedModel, clock: PhaseClock) -> Engine:
    """An engine with the base model loaded, and room for the samplers' adapters beside it."""
    dtype = _dtype(settings.sample_dtype)
    engine = Engine(
        model.spec,
        EngineSettings(
            max_slots=settings.max_slots,
            min_rows=settings.min_rows,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_iterations=settings.max_iterations,
            turn_seconds=settings.turn_seconds,
            kv_bytes=_kv_bytes(settings, model.spec, dtype),
            layout="rows",
            page_size=PAGE_TOKENS,
            seed=uuid.uuid4().int % 2**31,  # or a restarted engine would repeat the samples that named no seed
            max_context=settings.max_context,
            logprobs_of=settings.logprobs_of,
            dtype=dtype,
            kernels=settings.kernels,
        ),
        model.tokenizer,
        phase=clock.phase,
    )
    stack = empty_stack(model.spec, settings.max_rank, settings.max_resident_samplers + 1, jnp.dtype(dtype))
    # The table is the largest array that both sides have in one form: no copy if it is of this dtype already.
    embed = jnp.asarray(model.params["embed"], jnp.dtype(dtype))
    packed = native.chosen(settings.kernels, dtype)
    engine.load({**_all_but_the_table(model.params, model.spec, dtype, packed), "embed": embed}, 0, stack)
    return engine


@partial(jax.jit, static_argnames=("spec", "dtype", "packed"))
def _all_but_the_table(params: Tree, spec: ModelSpec, dtype: str, packed: bool) -> Tree:
    tree = decoder.unstack(params, spec, jnp.dtype(dtype), packed=packed)
    return {name: leaf for name, leaf in tree.items() if name != "embed"}
