"""Work stealing: a host that has begun all of its groups takes over those that another has not begun.

    who     does                                                                       the board's key
    owner   keeps back the groups that its engine has no slots for, and says which     offer-RANK
    owner   begins the next of them as slots get free, if it can claim it              claim-PLACE
    thief   with nothing kept back and slots free, claims the last group of the host   claim-PLACE
            that has most left

A claim is a key that one host alone can write, so a group is begun once. Whoever begins it also grades, journals and
trains it: the work of training moves with the tokens, nothing is handed back, and nobody waits for anybody. Tokens
follow from (run, step, prompt, sample) and denominators are of all hosts' groups, so the update is the same but for the
order of sums. All of this lies before the step's first meeting. A host that dies ends the run, whatever it claimed;
what it journaled is found by a resume.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from locojax.hosts.generation import Batch, Generated, Generation, Grading, Show
from locojax.hosts.group import Group
from locojax.rl.batches import BatchOrder
from locojax.types import Group as Graded
from locojax.types import Prompt, SampleRequest, SampleResult

_FOLDER, _OFFER, _CLAIM = "steal", "offer-", "claim-"
_PHASE = "steal"
_POLL_SECONDS = 0.05


class Claims:
    """One host's view of who begins which groups of a step. Groups are named by their place in the step's batch.

    Args:
      group: the hosts, several.

    Raises:
      RuntimeError: by any method: the board is gone.
    """

    def __init__(self, group: Group):
        assert group.board is not None, "one host alone has nobody to take from"
        self._group, self._board = group, group.board
        # What an earlier run of these hosts left has another number; all hosts count alike.
        self._root = f"{_FOLDER}/{group.num_meetings}"
        self._folder = ""
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether every host has said what it keeps back, and all of it has been begun."""
        return self._is_over

    def begin(self, step_index: int, kept_back: Sequence[int]) -> None:
        """A step begins, in which this host would do these groups later, in this order."""
        before, self._folder, self._is_over = self._folder, f"{self._root}/{step_index}", False
        with self._group.reaching(_PHASE):
            if before and self._group.is_first:  # all hosts have met since, and none looks at it any more
                self._board.forget(before)
            self._offer(kept_back)

    def withdraw(self, step_index: int) -> None:
        """This host stops: what it kept back in the step is nobody's."""
        self._folder = f"{self._root}/{step_index}"
        with self._group.reaching(_PHASE):
            self._offer(())

    def claim(self, place: int) -> bool:
        """Whether this host, and no other, is to do the group."""
        with self._group.reaching(_PHASE):
            return self._board.claim(f"{self._folder}/{_CLAIM}{place}", str(self._group.rank))

    def steal(self) -> int | None:
        """Claims a group that another host has not begun, of the host that has most of them; None: there is none."""
        while not self._is_over:
            with self._group.reaching(_PHASE):
                left = self._left(self._board.read(self._folder))
            most = max(left, key=lambda rank: (len(left[rank]), -rank), default=None)
            if most is None:
                return None
            if self.claim(left[most][-1]):
                return left[most][-1]
        return None

    def _offer(self, places: Sequence[int]) -> None:
        self._board.put(f"{self._folder}/{_OFFER}{self._group.rank}", " ".join(map(str, places)))

    def _left(self, told: Mapping[str, str]) -> dict[int, list[int]]:
        """By rank of the others, the groups that nobody has claimed, where there are any."""
        claimed = {int(name.removeprefix(_CLAIM)) for name in told if name.startswith(_CLAIM)}
        offers = {
            int(name.removeprefix(_OFFER)): [place for place in map(int, text.split()) if place not in claimed]
            for name, text in told.items()
            if name.startswith(_OFFER)
        }
        self._is_over = len(offers) == self._group.size and not any(offers.values())
        return {rank: places for rank, places in offers.items() if places and rank != self._group.rank}


@dataclasses.dataclass(eq=False)
class StealingGeneration(Generation):
    """A `Generation` of which other hosts may take groups, and which may take theirs.

    Attributes:
      claims: who begins what.
      train: all of the run's prompts. order: which of them a step trains on.
    """

    claims: Claims
    train: Sequence[Prompt]
    order: BatchOrder

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        step_index: int,
        show: Show,
        take: Callable[[Graded], None] | None = None,
    ) -> Generated:
        """This host's groups of the step; `prompts`, `places`: those that it begins with."""
        try:
            return super().rollouts(prompts, places, step_index, show, take)
        except KeyboardInterrupt:
            self.claims.withdraw(step_index)
            raise

    def _sample(self, batch: Batch, grading: Grading) -> Iterator[SampleResult]:
        if batch.step is None:  # an evaluation, which each host does for its own share
            return super()._sample(batch, grading)
        admission = _Admission(self, batch, batch.step, grading)
        return self.worker.sample((), admission.more, begun=batch.begun, told=batch.gained)

    def take_over(self, batch: Batch, step_index: int, place: int) -> int:
        """Makes another host's group one of the batch; returns its index."""
        prompt = self.train[self.order.at(step_index)[place]]
        return batch.add(prompt, self._training_requests([prompt], step_index)[0], place)


class _Admission:
    """Hands a step's groups to the engine, no more of them than keep it busy."""

    def __init__(self, host: StealingGeneration, batch: Batch, step_index: int, grading: Grading):
        self._host, self._batch, self._step_index, self._grading = host, batch, step_index, grading
        self._kept_back = collections.deque(grading.not_sampled)
        rollout, self._patience = host.config.rollout, host.config.hosts.silence_seconds
        self._group_size, self._num_slots = rollout.group_size, int(rollout.max_slots)
        self._has_begun = False

    def more(self, num_free_slots: int) -> list[SampleRequest]:
        """What is to be admitted now; with all slots free and nothing to admit, it waits for what others keep back."""
        due, free, claims = list[int](), num_free_slots, self._host.claims
        # One group waits in the engine, which else would not return as soon as some slots are free.
        while self._kept_back and free >= 0:
            index = self._kept_back.popleft()
            if self._has_begun and not claims.claim(self._batch.places[index]):
                self._batch.gone.add(index)
                continue
            due.append(index)
            free -= self._group_size
        if not self._has_begun:
            claims.begin(self._step_index, [self._batch.places[index] for index in self._kept_back])
            self._has_begun = True
        while not self._kept_back and free >= min(self._group_size, self._num_slots):
            place = claims.steal()
            if place is None:
                break
            due += (taken := self._taken_over(place))
            free -= self._group_size * len(taken)
        if not due and num_free_slots == self._num_slots:
            due = self._waited_for()
        return [self._batch.requests[index] for index in due]

    def _taken_over(self, place: int) -> list[int]:
        """The group's index; nothing if the journal held it."""
        index = self._host.take_over(self._batch, self._step_index, place)
        return [] if self._grading.submit_known(index) else [index]

    def _waited_for(self) -> list[int]:
        """A group of a host that is late to say what it keeps back. Not for ever: the meeting that comes names it."""
        claims, until = self._host.claims, time.monotonic() + self._patience
        with self._host.timer.phase("wait"):
            while not claims.is_over and time.monotonic() < until:
                self._host.check()
                place = claims.steal()
                if place is not None and (taken := self._taken_over(place)):
                    return taken
                time.sleep(_POLL_SECONDS)
        return []
