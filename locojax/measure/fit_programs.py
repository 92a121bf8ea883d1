"""The programs of trainer and engine, traced from shapes alone for devices that needn't be there.

They are the functions that training and rollout run themselves, called with `jax.ShapeDtypeStruct` in place of arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from locojax.models import decoder, lora, sharding
from locojax.models.attention import Kernel
from locojax.models.kernels import LANES, ragged_fits
from locojax.models.logprobs import target_logprobs, target_logprobs_plain
from locojax.models.lora import Adapters, LoraSpec
from locojax.models.sharding import TENSOR, MeshSpec, device_bytes, make_mesh
from locojax.models.spec import ModelSpec, Parameter, parameters
from locojax.rollout import programs as rollout_programs
from locojax.rollout.batch import MIN_STOP_IDS, decode_rows
from locojax.rollout.layouts import Destination
from locojax.rollout.pages import Shape, power_of_two
from locojax.rollout.prefill import MIN_PROMPTS
from locojax.rollout.settings import EngineSettings, memory_and_layout
from locojax.training import losses as training_losses
from locojax.training import publish, shapes, sharded
from locojax.training.programs import Hyper, ProgramSpec
from locojax.training.sharded import Gather, Over

Rollout = Literal["colocated", "separate", "none"]
"""Where completions are generated: on the trainer's own devices, on others of their own, or not at all."""


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """The engine that is to fit. max_slots: samples at once; kv_bytes: of keys and values."""

    where: Rollout = "colocated"
    max_slots: int = 64
    kv_bytes: int = 8 << 30
    page_size: int = 128
    max_prefill_tokens: int = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to fit on a slice.

    Attributes:
      row_tokens: of a row: the longest prompt and completion together. rows: of a micro-batch, for each device of the
        mesh's fsdp axis.
      tensor: devices that a layer is split over. sequence: those that a row's tokens are. The others are the fsdp axis.
      loss: the loss, and inputs: its inputs that the data have.
      kernel: the form attention takes; `tpu` on TPU.
    """

    model: ModelSpec
    lora: LoraSpec | None
    row_tokens: int
    rows: int = 1
    tensor: int = 1
    sequence: int = 1
    remat: str = "full"
    tile_tokens: int = 1024
    compute_dtype: str = "bfloat16"
    gather: Gather = "layer"
    loss: str = "importance_sampling"
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    rollout: RolloutPlan = RolloutPlan()
    kernel: Kernel = "tpu"

    def micro_batch_tokens(self, num_devices: int) -> int:
        """Tokens of a micro-batch over all devices."""
        return self.rows * self.row_tokens * (num_devices // (self.tensor * self.sequence))

    @property
    def device_tokens(self) -> int:
        """Tokens of a micro-batch on each device."""
        return self.rows * self.row_tokens // self.sequence


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that can be compiled.

    Attributes:
      trace: gives a `jax.stages.Traced`.
      beside: what else is in a device's memory while it runs, by name: bytes.
      trips: of the loops whose length is known only when they run: the head's tiles, with every position scored.
      device: the one that it runs on; None: those of a mesh.
    """

    name: str
    trace: Callable[[], Any]
    beside: dict[str, int]
    trips: int = 1
    device: Any = None


def mesh_of(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """The trainer's mesh. Raises ConfigError, naming the dimension, if it doesn't divide the model, or a row."""
    mesh = make_mesh(MeshSpec(-1, plan.tensor, plan.sequence), devices)
    sharding.check_divides(plan.model, mesh)
    sharding.check_rows(plan.row_tokens, plan.sequence, LANES if plan.kernel == "tpu" else 1)
    return mesh


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What a trainer holds, in shapes."""

    plan: Plan
    over: Over
    spec: ProgramSpec
    state: shapes.AbstractState

    @classmethod
    def of(cls, plan: Plan, devices: Sequence[Any]) -> Trainer:
        over = Over(mesh_of(plan, devices), plan.gather)
        spec = ProgramSpec(
            plan.model, plan.lora, plan.compute_dtype, plan.remat, plan.tile_tokens, True, plan.kernel, plan.sequence
        )
        keep = over.mesh.devices.flat[0].platform == "cpu"
        return cls(plan, over, spec, shapes.abstract_state(spec, over, keep_transposes=keep))

    @property
    def num_parts(self) -> int:
        return self.over.mesh.shape[TENSOR]

    def held(self) -> dict[str, int]:
        """Bytes of each part of the trainer's state on a device."""
        return self.state.held(self.over)

    def programs(self) -> list[Program]:
        """Accumulating a gradient, scoring, and the update."""
        plan, state, over, spec = self.plan, self.state, self.over, self.spec
        batch = shapes.abstract_batch(
            over, rows=plan.rows, row_tokens=plan.row_tokens, loss_name=plan.loss, inputs=plan.inputs
        )
        held, options = self.held(), training_losses.LOSSES[plan.loss].options()
        static: dict[str, Any] = {"spec": spec, "loss_name": plan.loss, "over": over}
        trips = -(-plan.device_tokens // spec.tile_tokens)
        hyper = Hyper(*(np.float32(0.0) for _ in Hyper._fields))
        masters = {"masters": held["masters"]} if plan.gather == "step" else {}
        optimizer = {"optimizer": held["optimizer"]}
        rest = {name: size for name, size in held.items() if name in ("base", "working")}
        without_transposes = state.fixed._replace(transposes={})
        return [
            Program(
                "forward_backward",
                partial(
                    sharded.accumulate.trace, state.working, state.accumulators, state.fixed, batch, options, **static
                ),
                {**optimizer, **masters},
                trips,
            ),
            Program("update", partial(sharded.update.trace, state.trainable, state.optimizer, state.accumulators, hyper,
                                      spec=spec, over=over), rest),
            Program(
                "score",
                partial(sharded.score.trace, state.working, without_transposes, batch, options, **static),
                {**optimizer, **masters, "accumulators": held["accumulators"]},
                trips,
            ),
        ]  # fmt: skip

    def publish(self) -> list[Program]:
        """New weights to the engines."""
        plan, state = self.plan, self.state
        found = publish.tracers(state.trainable, state.fixed.base, plan.model, plan.compute_dtype, self.over.mesh)
        held = {name: size for name, size in self.held().items() if name != "accumulators"}
        reads = {"publish": "masters", "publish_base": "base"}
        return [
            Program(name, trace, {part: size for part, size in held.items() if part != reads[name]})
            for name, trace in found.items()
        ]


@dataclasses.dataclass(frozen=True)
class Engine:
    """What one engine holds, in shapes; it runs on one device."""

    plan: Plan
    device: Any
    spec: rollout_programs.ProgramSpec
    weights: Any
    adapters: Adapters | None
    cache: Any
    shape: Shape

    @classmethod
    def of(cls, plan: Plan, device: Any) -> Engine:
        rollout, model, dtype = plan.rollout, plan.model, jnp.dtype(plan.compute_dtype)
        settings = EngineSettings(
            max_slots=rollout.max_slots, max_prefill_tokens=rollout.max_prefill_tokens, kv_bytes=rollout.kv_bytes,
            layout="paged", page_size=rollout.page_size, max_context=plan.row_tokens, dtype=dtype,
            attention=plan.kernel if ragged_fits(model.num_kv_heads, model.head_dim, dtype) else "plain",
        )  # fmt: skip
        _, layout = memory_and_layout(model, settings)
        spec = rollout_programs.ProgramSpec(model, layout, dtype, "raw", settings.max_iterations)
        shape = Shape(rows=rollout.max_slots, entries=2 * rollout.max_slots)

        def like(declared: Any, kind: Any) -> Any:
            return jax.tree.map(
                lambda part: jax.ShapeDtypeStruct(part.shape, kind),
                declared,
                is_leaf=lambda leaf: isinstance(leaf, Parameter),
            )

        weights = jax.eval_shape(partial(decoder.unstack, spec=model, dtype=dtype), like(parameters(model), dtype))
        adapters = None
        if plan.lora is not None:
            tree = like(lora.adapter_parameters(model, plan.lora), jnp.float32)
            adapters = Adapters(tree, jax.ShapeDtypeStruct((), jnp.float32))
        cache = jax.eval_shape(partial(layout.new_cache, model, shape, dtype))
        weights, adapters, cache = _on(device, (weights, adapters, cache))
        return cls(plan, device, spec, weights, adapters, cache, shape)

    def held(self) -> dict[str, int]:
        """Bytes of each part of the engine's state."""
        return {
            "engine's weights": device_bytes(self.weights) + device_bytes(self.adapters),
            "KV cache": device_bytes(self.cache),
        }

    def programs(self) -> list[Program]:
        """Decoding with every slot taken, packed prefill, and the last chunk of the longest prompt."""
        plan, spec, rollout = self.plan, self.spec, self.plan.rollout
        pages = power_of_two(-(-plan.row_tokens // rollout.page_size))
        B, T = rollout.max_slots, rollout.max_prefill_tokens
        tables = spec.layout.tables([], B, self.shape, pages)
        rows = decode_rows([], B, MIN_STOP_IDS, tables)
        count = np.zeros((), np.int32)
        packed = tuple(np.zeros((1, T), np.int32) for _ in range(3))
        capacity = spec.layout.prompt_capacity(T, self.shape)
        num_prompts = MIN_PROMPTS
        width = capacity // rollout.page_size
        to = Destination(np.zeros(num_prompts, np.int32), np.zeros((num_prompts, width), np.int32))
        long = Destination(np.zeros(1, np.int32), np.zeros((1, pages), np.int32))
        adapter = np.zeros(1, np.int32)
        source, last = np.zeros((num_prompts, capacity), np.int32), np.zeros(num_prompts, np.int32)
        arguments: dict[str, tuple[Any, ...]] = {
            "decode": (rows, count, count),
            "prefill": (packed, source, last, to, adapter),
            "prefill_chunk": (packed[0], count, count, long, adapter),
        }
        static: dict[str, dict[str, Any]] = {"decode": {"truncates": False, "num_top": 0}}
        return [
            Program(name, partial(self._trace, name, given, static.get(name, {})), {}, device=self.device)
            for name, given in arguments.items()
        ]

    def _trace(self, name: str, given: tuple[Any, ...], static: dict[str, Any]) -> Any:
        program, spec = rollout_programs.PROGRAMS[name], self.spec

        def bound(*args: Any) -> Any:
            return program(spec, *args, **static)

        bound.__name__ = name
        jitted = jax.jit(bound, donate_argnums=rollout_programs.DONATED[name])
        return jitted.trace(self.weights, self.adapters, self.cache, *_on(self.device, given))


LOSSES = ("loss, fused", "loss, plain log-softmax")
"""Names of what `heads` gives."""


def heads(plan: Plan, device: Any) -> list[Program]:
    """The loss alone, forward and backward, on all positions of a device's rows: fused, as training has it, and by a
    plain log-softmax."""
    model, N = plan.model, plan.device_tokens
    tied = model.tied_embeddings
    head = (model.vocab_size, model.hidden_size) if tied else (model.hidden_size, model.vocab_size)
    dtype = jnp.dtype(plan.compute_dtype)
    like = jax.ShapeDtypeStruct
    given = _on(device, (like((N, model.hidden_size), dtype), like(head, dtype), like((N, 1), jnp.int32),
                         like((N,), jnp.bool_)))  # fmt: skip
    train = plan.lora is None

    def fused(hidden: Any, head: Any, targets: Any, active: Any) -> Any:
        return jnp.sum(
            target_logprobs(
                hidden, head, targets, active, tile=plan.tile_tokens, train_head=train, vocab_first=tied
            )[0]
        )

    def plain(hidden: Any, head: Any, targets: Any, active: Any) -> Any:
        return jnp.sum(target_logprobs_plain(hidden, head, targets, active, vocab_first=tied)[0])

    wanted, trips = (0, 1) if train else (0,), -(-N // plan.tile_tokens)
    return [
        Program(name, partial(jax.jit(jax.grad(form, wanted)).trace, *given), {}, trips)
        for name, form in zip(LOSSES, (fused, plain), strict=True)
    ]


def target(device: Any) -> contextlib.AbstractContextManager[Any]:
    """While a program of one device is traced and lowered: a kernel asks which it is, and would find this machine's."""
    if device is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("device",)).abstract_mesh)


def _on(device: Any, tree: Any) -> Any:
    """Shapes, of arrays or of shapes, on one device."""
    place = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)
