"""Groups that change hands between hosts before they are begun: each is done once, whoever is slow, late or stopped."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from memory_board import MemoryBoard, host

from locojax.config import load
from locojax.errors import ConfigError
from locojax.hosts.generation import Generated
from locojax.hosts.journal import Journal, rollout_files
from locojax.hosts.journal_files import NoFolder, open_folder
from locojax.hosts.journal_records import Started
from locojax.hosts.stealing import Claims, StealingGeneration
from locojax.measure.timeline import Timeline
from locojax.rl.batches import BatchOrder
from locojax.types import Completion, Prompt, Reward, SampleRequest, SampleResult

SLOTS, GROUP, NUM_PROMPTS = 4, 2, 12
CONFIG = load(None, [f"rollout.max_slots={SLOTS}", f"rollout.group_size={GROUP}", "rollout.max_tokens=8",
                     f"run.prompts_per_step={NUM_PROMPTS}", "hosts.silence_seconds=2.1"])  # fmt: skip
TRAIN = tuple(Prompt(f"p{i}", f"prompt {i}", tokens=(1 + i,)) for i in range(NUM_PROMPTS))
ORDER = BatchOrder(NUM_PROMPTS, NUM_PROMPTS, seed=0)
FIRST_HALF, SECOND_HALF = range(NUM_PROMPTS // 2), range(NUM_PROMPTS // 2, NUM_PROMPTS)


class Worker:
    """A worker whose engine has SLOTS slots and pauses for whatever is in them. `asked`: requests begun."""

    adapter, policy_version = 0, 0

    def __init__(self, pause: Callable[[], object] = lambda: None):
        self.pause = pause
        self.asked: list[str] = []
        self.aborted: list[str] = []

    def sample(
        self,
        requests: Sequence[SampleRequest],
        more: Callable[[int], Sequence[SampleRequest]],
        **of_the_journal: object,
    ) -> Iterator[SampleResult]:
        waiting = collections.deque[SampleRequest](requests)
        while True:
            new = more(SLOTS - GROUP * len(waiting))
            waiting += new
            self.asked += [request.request_id for request in new]
            if not waiting:
                return
            self.pause()
            for request in [waiting.popleft() for _ in range(min(SLOTS // GROUP, len(waiting)))]:
                yield SampleResult(request.request_id, tuple(completion(request, i) for i in range(GROUP)), None, None)

    def abort(self, requests: Sequence[SampleRequest]) -> None:
        self.aborted += [request.request_id for request in requests]

    def completion_text(self, of: Completion) -> str:
        return of.text


def completion(request: SampleRequest, index: int) -> Completion:
    tokens = (request.prompt[0], index, request.params.seed % 97)
    return Completion(index, tokens, np.zeros(3, np.float32), f"{tokens}", "length", None, 0)


class AtOnce:
    """A grader."""

    def submit(self, inputs) -> list[Future[Reward]]:
        futures = [Future[Reward]() for _ in inputs]
        for future, graded in zip(futures, inputs, strict=True):
            future.set_result(Reward(float(len(graded.completion_text))))
        return futures

    def collect(self, futures: Sequence[Future[Reward]]) -> list[Reward]:
        return [future.result() for future in futures]


@dataclasses.dataclass
class Host:
    """One host of a step; `run` is called in a thread of its own."""

    rank: int
    worker: Worker
    board: MemoryBoard
    size: int = 2
    check: Callable[[], None] = lambda: None
    folder: pathlib.Path | None = None
    run_number: int = 1

    def run(self, places: Sequence[int], step: int = 0, late: float = 0.0) -> Generated:
        time.sleep(late)
        started = Started(self.run_number, self.rank, self.size, 0, NUM_PROMPTS, NUM_PROMPTS, None, {})
        folder = NoFolder() if self.folder is None else open_folder(str(self.folder))
        with Journal(folder, started, recalls=self.run_number > 1) as journal:
            self.timer = Timeline()
            claims = Claims(host(self.rank, self.size, self.board))
            generation = StealingGeneration(self.worker, AtOnce(), CONFIG, self.timer, self.check, journal, claims,
                                            TRAIN, ORDER)  # type: ignore[arg-type]  # fmt: skip
            batch = [TRAIN[index] for index in ORDER.at(step)]
            with self.timer.step(step):
                return generation.rollouts([batch[place] for place in places], places, step, lambda *_: None)


def together(*jobs: Callable[[], Generated]) -> list[Generated]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(30) for future in [pool.submit(job) for job in jobs]]


def slow_and_quick(slow: Callable[[Worker], Host], quick: Host) -> tuple[Worker, list[Generated]]:
    """Two hosts, of which one has decoded nothing when the other is done. Returns the slow one's worker, and both's."""
    is_done = threading.Event()
    worker = Worker(lambda: is_done.wait(20))

    def run_quick() -> Generated:
        try:
            return quick.run(SECOND_HALF)
        finally:
            is_done.set()

    return worker, together(lambda: slow(worker).run(FIRST_HALF), run_quick)


def check_each_once(generated: Sequence[Generated], batch: Sequence[int] = range(NUM_PROMPTS)) -> None:
    assert sorted(place for each in generated for place in each.places) == list(batch)
    for each in generated:
        assert list(each.places) == sorted(each.places)
        for place, graded in zip(each.places, each.groups, strict=True):
            assert graded.prompt == TRAIN[ORDER.at(0)[place]]
            assert [r.completion.tokens[:2] for r in graded.rollouts] == [(graded.prompt.tokens[0], i) for i in (0, 1)]
            assert all(r.reward.value == len(r.completion.text) for r in graded.rollouts)


def test_a_host_that_is_done_takes_what_a_slow_one_has_not_begun():
    board = MemoryBoard()
    quick = Host(1, Worker(), board)
    slow, (first, second) = slow_and_quick(lambda worker: Host(0, worker, board), quick)
    check_each_once([first, second])
    # Three groups are begun before anybody can be asked: two that have slots, and one that waits for them.
    assert set(first.places) == {0, 1, 2} and first.num_stolen == 0 and second.num_stolen == 3
    assert slow.asked == [f"step 0/{TRAIN[ORDER.at(0)[place]].prompt_id}" for place in range(3)]
    assert sorted(slow.asked + quick.worker.asked) == sorted(f"step 0/{p.prompt_id}" for p in TRAIN)
    assert not slow.aborted and not quick.worker.aborted


def test_hosts_that_come_and_go_do_every_group_once():
    shares = [range(0, 1), range(1, 10), range(10, 12), range(12, 12)]
    for seed in range(20):
        board, random = MemoryBoard(), np.random.default_rng(seed)
        pauses, lates = random.uniform(0, 0.01, 4), random.uniform(0, 0.03, 4)
        hosts = [Host(rank, Worker(partial(time.sleep, seconds)), board, 4) for rank, seconds in enumerate(pauses)]
        generated = together(*(partial(each.run, shares[each.rank], late=lates[each.rank]) for each in hosts))
        check_each_once(generated)
        asked = collections.Counter(name for each in hosts for name in each.worker.asked)
        assert set(asked.values()) == {1} and len(asked) == NUM_PROMPTS


def test_one_of_many_wins_a_claim():
    board, wins = MemoryBoard(), collections.Counter[int]()
    claims = [Claims(host(rank, 8, board)) for rank in range(8)]
    for each in claims:
        each.begin(0, ())
    barrier = threading.Barrier(8)

    def contend(rank: int) -> None:
        for place in range(50):
            barrier.wait(10)
            wins[place] += claims[rank].claim(place)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(contend, range(8)))
    assert set(wins.values()) == {1} and len(wins) == 50


def test_the_last_group_of_the_host_with_most_left_goes_first():
    board = MemoryBoard()
    thief, first, second = (Claims(host(rank, 3, board)) for rank in range(3))
    first.begin(7, [1, 4])
    thief.begin(7, ())
    assert thief.steal() == 4 and not thief.is_over
    second.begin(7, [2, 3, 5])
    assert second.claim(2) and not first.claim(4)
    assert [thief.steal() for _ in range(4)] == [5, 1, 3, None] and thief.is_over
    assert first.steal() is None and second.steal() is None


def test_the_next_step_knows_nothing_of_the_last_one():
    board = MemoryBoard()
    first, second = (Claims(host(rank, 2, board)) for rank in range(2))
    for step in range(3):
        first.begin(step, [0])
        second.begin(step, ())
        assert second.steal() == 0 and second.steal() is None and second.is_over
    assert {key.split("/")[2] for key in board.values} == {"2"}


def test_nobody_does_the_rest_of_a_host_that_stops():
    board = MemoryBoard()
    calls = []

    def stop() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    stopped, other = Host(0, Worker(), board, check=stop), Host(1, Worker(), board)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(FIRST_HALF)
    assert set(other.run(SECOND_HALF).places) == set(SECOND_HALF) and calls
    assert len(stopped.worker.asked) == 3 and len(stopped.worker.aborted) == 5  # one group was there


def test_a_host_that_does_not_come_is_not_waited_for_in_generation():
    """The meeting that follows has a deadline, and names it."""
    alone = Host(1, Worker(), MemoryBoard())
    start = time.monotonic()
    generated = alone.run(SECOND_HALF)
    assert 2.1 <= time.monotonic() - start and set(generated.places) == set(SECOND_HALF)
    assert generated.seconds < 1, "waiting is no generating"
    assert alone.timer.last().seconds["wait"] > 2


def test_a_resume_finds_a_stolen_group_and_does_nothing_again(tmp_path):
    board = MemoryBoard()
    quick = Host(1, Worker(), board, folder=tmp_path)
    _, before = slow_and_quick(lambda worker: Host(0, worker, board, folder=tmp_path), quick)
    assert before[1].num_stolen == 3
    (names,) = rollout_files(open_folder(str(tmp_path))).values()
    assert len(names) == 2
    board = MemoryBoard()
    again = [Host(rank, Worker(), board, folder=tmp_path, run_number=2) for rank in range(2)]
    after = together(lambda: again[0].run(FIRST_HALF), lambda: again[1].run(SECOND_HALF))
    check_each_once(after)
    assert [each.num_stolen for each in after] == [0, 0] and not again[0].worker.asked + again[1].worker.asked


def test_a_thief_whose_own_journal_holds_the_group_does_not_sample_it_again(tmp_path):
    """Each host keeps its journal to itself, and the owner can't know."""
    board = MemoryBoard()
    quick = Host(1, Worker(), board, folder=tmp_path / "1")
    slow_and_quick(lambda worker: Host(0, worker, board, folder=tmp_path / "0"), quick)
    for name in (tmp_path / "0").glob("rollouts/*"):  # its host begins anew
        name.unlink()
    board = MemoryBoard()
    quick = Host(1, Worker(), board, folder=tmp_path / "1", run_number=2)
    slow, (first, second) = slow_and_quick(
        lambda worker: Host(0, worker, board, folder=tmp_path / "0", run_number=2), quick
    )
    check_each_once([first, second])
    assert second.num_stolen == 3 and not quick.worker.asked and len(slow.asked) == 3


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("hosts.controller=single", "hosts.controller is 'single': one head schedules all hosts, and none has groups"),
        ("run.pipelined=true", "run.pipelined is true, which is for one host alone"),
    ],
)
def test_stealing_is_refused_where_it_can_not_be(other, told):
    with pytest.raises(ConfigError, match="Settings contradict each other: hosts.steal_groups is true and ") as caught:
        load(None, ["hosts.steal_groups=true", other])
    assert told in str(caught.value)
