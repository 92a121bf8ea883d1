"""The single controller: host 0 admits, schedules, drives and grades everything, and all hosts train.

    who        does                                              waits for
    head       admits the global batch, keeps every host's slots  nothing
    head       tells all hosts the next program and its rows      what the last one drew
    all        enter that one program, each for its own slots     the head, and each other in the program's gather
    head       detokenizes, grades, hands each host its groups    the last grade
    all        train and publish, as in the colocated mode        each other

It is what the colocated mode is measured against, so it differs in control alone: the model, the sampler and its seeds,
prefix sharing, packing, losses, publishing are the same code, and so are the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from locojax.hosts.generation import NOTHING, Generated, Generation, Show
from locojax.hosts.group import Group
from locojax.hosts.phases import StepTimer
from locojax.hosts.sharing import shares
from locojax.hosts.single_orders import Orders
from locojax.hosts.worker import Timed
from locojax.models.spec import ModelSpec
from locojax.rl.batches import BatchOrder
from locojax.rollout.lockstep import Lockstep, LockstepEngine
from locojax.rollout.lockstep_programs import LockstepDevices, host_mesh
from locojax.rollout.programs import ProgramSpec
from locojax.rollout.request import TokenBytes
from locojax.rollout.settings import EngineSettings, memory_and_layout
from locojax.types import Group as Graded
from locojax.types import Prompt


class Lockstepping:
    """One host's part in lockstep: its devices, and the orders that it gives or follows.

    Args:
      group: the hosts. deadline_seconds: longest wait for an order.
    """

    def __init__(self, group: Group, deadline_seconds: float):
        self.group, self.orders, self._deadline = group, Orders(group), deadline_seconds
        self._lanes: Lockstep | None = None

    def make_engine(
        self, spec: ModelSpec, settings: EngineSettings, tokens: TokenBytes, phase: Timed
    ) -> LockstepEngine:
        """Every host has one, for its copy of the weights; only the head's is given requests."""
        _, layout = memory_and_layout(spec, settings)
        program = ProgramSpec(spec, layout, settings.dtype, settings.logprobs_of, settings.max_iterations)
        devices = LockstepDevices(program, host_mesh())
        self._lanes = Lockstep(devices, self.orders.order)
        return LockstepEngine(spec, settings, tokens, self._lanes, devices.num_hosts, phase=phase)

    def follow(self, timer: StepTimer) -> Any:
        """Does what the head says until it ends the wave; returns what it hands this host.

        Raises:
          TimeoutError: no order came; the group's watchdog, which names the head, comes first.
        """
        assert self._lanes is not None, "the engine comes first"
        devices = self._lanes.devices
        while True:
            with timer.phase("wait"), self.orders.heard(self._deadline) as (action, arguments):
                if action == "end":
                    break
                with timer.phase("decode"):
                    devices.perform(action, *arguments)
                    devices.block()
        return self.orders.ended(arguments)


@dataclasses.dataclass(eq=False)
class SingleGeneration(Generation):
    """A `Generation` that host 0 does for all; see the module's head. Every host makes each call.

    Attributes:
      lockstep: whose engine is the worker's.
      train, held_out: all of the run's prompts.
      order: which of them a step trains on.
    """

    lockstep: Lockstepping
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    order: BatchOrder

    def warm_up(self, train: Sequence[Prompt], held_out: Sequence[Prompt], batch: int) -> int:
        """On the head, for the batch of all hosts, whatever `batch` is; returns the number of programs, 0 elsewhere."""
        if not self._is_head:
            self.lockstep.follow(self.timer)
            return 0
        count = super().warm_up(self.train, self.held_out if held_out else (), self.order.batch_size)
        self.lockstep.orders.end([()] * self.lockstep.group.size)
        return count

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        step_index: int,
        show: Show,
        take: Callable[[Graded], None] | None = None,
    ) -> Generated:
        """This host's groups of the step, out of those that the head generated. `prompts`: this host's."""
        assert take is None, "the configuration refuses a pipelined step under a single controller"
        batch = [self.train[index] for index in self.order.at(step_index)]
        everywhere = range(len(batch))
        return self._directed(
            batch, lambda: super(SingleGeneration, self).rollouts(batch, everywhere, step_index, show)
        )

    def greedy(self, prompts: Sequence[Prompt], show: Show) -> tuple[Graded, ...]:
        """This host's held-out groups, out of those that the head generated."""

        def all_greedy() -> Generated:
            groups = super(SingleGeneration, self).greedy(self.held_out, show)
            return Generated(groups, 0.0, tuple(range(len(groups))))

        return self._directed(self.held_out, all_greedy).groups

    @property
    def _is_head(self) -> bool:
        return self.lockstep.group.is_first

    def _directed(self, prompts: Sequence[Prompt], generate: Callable[[], Generated]) -> Generated:
        """What the head generates for all prompts, handed out as the hosts share them."""
        group, orders = self.lockstep.group, self.lockstep.orders
        if not self._is_head:
            return self.lockstep.follow(self.timer)
        try:
            generated = generate()
        except KeyboardInterrupt:
            orders.end([NOTHING] * group.size)  # the others come to the next meeting, which tells them
            raise
        lengths = [len(prompt.tokens) for prompt in prompts]
        places = shares(lengths, group.size, balance=self.config.hosts.balance)
        with self.timer.phase("reward"):
            return orders.end([
                Generated(tuple(generated.groups[place] for place in mine), generated.seconds, tuple(mine))
                for mine in places
            ])  # fmt: skip
