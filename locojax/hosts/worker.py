"""One host: its rollout engine, its shard of the trainer, and the verbs over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from locojax.config import Config
from locojax.hosts.phases import Phase
from locojax.models.hub import LoadedModel
from locojax.models.lora import LoraSpec
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.models.spec import ModelSpec
from locojax.rollout.engine import Engine
from locojax.rollout.request import Begun, Gained, TokenBytes
from locojax.rollout.settings import EXACT_ROWS, EngineSettings
from locojax.training.agreement import Agree
from locojax.training.plan import Plan
from locojax.training.publish import Publisher
from locojax.training.settings import TrainerSettings
from locojax.training.trainer import Trainer
from locojax.types import (
    AdamParams,
    Completion,
    Datum,
    ForwardBackwardResult,
    OptimStepResult,
    SampleRequest,
    SampleResult,
)

GIB = 2**30
DEFAULT_KV_GIB = 4.0

Timed = Callable[[Phase], AbstractContextManager[None]]
More = Callable[[int], Sequence[SampleRequest]]
"""(slots free, as `Engine.num_free_slots` counts them) -> what to admit now."""
BegunOf = Callable[[str], Mapping[int, Begun]]
"""(a request's id) -> what was sampled of it before, by sample."""
Told = Callable[[Sequence[Gained]], None]
"""Takes what unfinished requests have gained."""
MakeEngine = Callable[[ModelSpec, EngineSettings, TokenBytes, Timed], Engine]


def local_engine(spec: ModelSpec, settings: EngineSettings, tokens: TokenBytes, timed: Timed) -> Engine:
    """An engine that asks no other host."""
    return Engine(spec, settings, tokens, phase=timed)


def lora_spec(config: Config) -> LoraSpec | None:
    """The adapter that the settings ask for; None for full fine-tuning."""
    training = config.training
    if training.method == "full":
        return None
    return LoraSpec(
        rank=training.lora_rank,
        alpha=training.lora_alpha,
        attention=training.lora_attention,
        mlp=training.lora_mlp,
        unembed=training.lora_unembed,
        rslora=training.lora_rslora,
    )


def training_mesh(config: Config) -> Mesh | None:
    """The mesh that the resolved settings ask for; None: one device.

    Raises:
      ConfigError: it doesn't fit the devices.
    """
    training = config.training
    spec = MeshSpec(int(training.mesh_fsdp), training.mesh_tensor, training.mesh_sequence)
    size = spec.fsdp * spec.sequence * spec.tensor
    return None if size == 1 else make_mesh(spec, jax.devices()[:size])


class HostWorker:
    """Samples from and trains one model on one host.

    The engine samples the weights that were published last; `publish` hands it the trainer's.

    Args:
      model: the weights both sides start from.
      config: resolved.
      timed: enters a phase of the step's account.
      agree: how several hosts tell each other integers; every host then calls each training verb, and `publish`.
      make_engine: another engine than one that asks no other host.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: Config,
        timed: Timed,
        agree: Agree | None = None,
        make_engine: MakeEngine = local_engine,
    ):
        self._timed = timed
        self.tokenizer = model.tokenizer
        training, rollout = config.training, config.rollout
        self.trainer = Trainer(
            model.spec,
            model.params,
            TrainerSettings(
                row_tokens=int(training.row_tokens),
                rows=int(training.rows),
                compute_dtype=training.compute_dtype,
                remat=training.remat,
                keep_reference=config.loss.kl_coefficient > 0,
                max_programs=training.max_programs,
            ),
            lora=lora_spec(config),
            seed=config.run.seed,
            phase=timed,
            mesh=training_mesh(config),
            agree=agree,
        )
        memory = DEFAULT_KV_GIB if rollout.kv_memory_gib == "auto" else rollout.kv_memory_gib
        settings = EngineSettings(
            max_context=int(config.model.max_context),
            max_slots=int(rollout.max_slots),
            min_rows=EXACT_ROWS if rollout.dtype == "float32" and jax.default_backend() == "cpu" else 1,
            dtype=rollout.dtype,
            max_iterations=int(rollout.decode_iterations),
            kv_bytes=int(memory * GIB),
        )
        self.engine = make_engine(model.spec, settings, model.tokenizer, timed)
        self._publisher = Publisher(self.trainer, dtype=rollout.dtype, at_once=config.hosts.publish_at_once)

    @property
    def adapter(self) -> int:
        """The engine's index of what is trained: 0 is the model itself, 1 the adapter beside it."""
        return 0 if self.trainer.lora is None else 1

    @property
    def policy_version(self) -> int:
        return self.trainer.policy_version

    def warm_up(self, requests: Sequence[SampleRequest], longest_prompt: int) -> int:
        """Compiles what sampling such a batch needs, so that no step does; returns the number of programs."""
        return self.engine.warm_up(requests, longest_prompt)

    def sample(
        self,
        requests: Sequence[SampleRequest],
        more: More | None = None,
        begun: BegunOf = lambda request_id: {},
        told: Told | None = None,
    ) -> Iterator[SampleResult]:
        """Results as they finish; between two of them the caller may do work of its own, or stop.

        Args:
          more: asked before each of the engine's steps; when nothing is left to do, and it gives nothing, that is all.
          begun: what is gone on from.
          told: called after each of the engine's steps.
        """
        self.admit(requests, begun)
        while True:
            if more is not None:
                self.admit(more(self.engine.num_free_slots), begun)
            if not self.engine.num_unfinished:
                return
            with self._timed("decode"):
                results = self.engine.step()
            if told is not None:
                with self._timed("record"):
                    told(self.engine.gained())
            yield from results

    def admit(self, requests: Sequence[SampleRequest], begun: BegunOf) -> None:
        """Queues requests at the engine; `begun`: see `sample`."""
        with self._timed("admit"):
            for request in requests:
                self.engine.add(request, begun=begun(request.request_id))

    def forget_prompts(self) -> None:
        """Ends what is cached of prompts sampled so far."""
        self.engine.forget_prompts()

    def abort(self, requests: Sequence[SampleRequest]) -> None:
        """Gives up requests that `sample` was called with and whose results are no longer wanted."""
        for request in requests:
            self.engine.abort(request.request_id)

    def plan(self, data: Sequence[Datum], loss: str, loss_config: Mapping[str, Any]) -> Plan:
        """This host's part of a `forward_backward`: what it must tell the other hosts first, and the layout."""
        return self.trainer.plan(data, loss, loss_config, score="active")

    def plan_scoring(self, data: Sequence[Datum]) -> Plan:
        """The same for `logprobs` and `reference_logprobs`."""
        return self.trainer.plan(data, "cross_entropy", score="active")

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        loss_config: Mapping[str, Any],
        plan: Plan | None = None,
        told: np.ndarray | None = None,
    ) -> ForwardBackwardResult:
        """Adds the gradient of the summed loss; log-probs are returned where the loss reads them.

        Args:
          plan, told: with several hosts, this host's plan and what all told of theirs; see `Trainer.plan`.
        """
        return self.trainer.forward_backward(data, loss, loss_config, score="active", plan=plan, told=told)

    def logprobs(
        self, data: Sequence[Datum], plan: Plan | None = None, told: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Of each datum's trained tokens, under the trainer's weights as they are; 0 elsewhere."""
        result = self.trainer.forward(data, "cross_entropy", score="active", plan=plan, told=told)
        return [output["logprobs"] for output in result.outputs]

    def reference_logprobs(
        self, data: Sequence[Datum], plan: Plan | None = None, told: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Of each datum's sampled tokens, under the policy that training started from."""
        return self.trainer.reference_logprobs(data, plan=plan, told=told)

    def optim_step(self, adam: AdamParams) -> OptimStepResult:
        """Applies the accumulated gradient."""
        return self.trainer.optim_step(adam)

    def publish(self) -> None:
        """The trainer's weights become the engine's, under the trainer's version."""
        with self._timed("publish"):
            new = self._publisher.publish()
            self.engine.load(new.weights, new.version, new.adapters)

    def completion_text(self, completion: Completion) -> str:
        """What a grader reads: the completion without the token or string that stopped it."""
        if isinstance(completion.stopped_by, str):
            return completion.text[: completion.text.rfind(completion.stopped_by)]
        tokens = completion.tokens[:-1] if completion.stopped_by is not None else completion.tokens
        return self.tokenizer.decode(tokens)
