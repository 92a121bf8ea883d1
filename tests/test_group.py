"""Who is missing, and who says so: places, signs of life, deadlines and exchanges, with threads for hosts."""

from __future__ import annotations

import collections
import importlib.util
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from memory_board import MemoryBoard

from locojax.config import HostsConfig, load
from locojax.errors import ConfigError, DeadlineError, HostError
from locojax.hosts.colocated import check_same_settings
from locojax.hosts.group import Group
from locojax.hosts.place import Place, find_place, platforms_to_try
from locojax.hosts.watch import Sign, Wait, Watch, Watchdog

ALL = {"LOCOJAX_COORDINATOR": "10.0.0.1:9000", "LOCOJAX_NUM_HOSTS": "4", "LOCOJAX_HOST_ID": "2"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(size: int = 3, rank: int = 0) -> tuple[Watch, Clock]:
    clock = Clock()
    return Watch(rank, size, silence_seconds=30, deadline_seconds=600, clock=clock), clock


def signs(beats: int, **others: Sign) -> dict[int, Sign]:
    """All three hosts alive in the same meeting, but for those given as host1=, host2=."""
    alive = {rank: Sign(beats, 5, "train") for rank in range(3)}
    return alive | {int(name.removeprefix("host")): sign for name, sign in others.items()}


def test_a_host_says_where_it_stands():
    assert find_place(HostsConfig(), {}) is None
    assert find_place(HostsConfig(), ALL) == Place("10.0.0.1:9000", 4, 2)
    assert find_place(HostsConfig(distributed="off"), ALL) is None
    assert find_place(HostsConfig(), {**ALL, "LOCOJAX_NUM_HOSTS": "1", "LOCOJAX_HOST_ID": "0"}) is None
    for cluster in (
        {"SLURM_NTASKS": "2"}, {"TPU_WORKER_HOSTNAMES": "a,b"}, {"JAX_COORDINATOR_ADDRESS": "a:1"}
    ):  # fmt: skip
        assert find_place(HostsConfig(), cluster) == Place()
    assert find_place(HostsConfig(), {"SLURM_NTASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"}) is None
    assert find_place(HostsConfig(distributed="on"), {}) == Place()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"LOCOJAX_HOST_ID": ""}, r"does not say where this host stands.*Got: LOCOJAX_COORDINATOR=10.0.0.1:9000"),
        ({"LOCOJAX_NUM_HOSTS": "two"}, r"Got: .*LOCOJAX_NUM_HOSTS=two.*all three or none"),
        ({"LOCOJAX_HOST_ID": "4"}, r"not one of the run's. Got: LOCOJAX_HOST_ID=4. Expected: 0 to 3"),
    ],
)
def test_a_place_that_makes_no_sense(change, text):
    with pytest.raises(ConfigError, match=text):
        find_place(HostsConfig(), {**ALL, **change})


def test_a_silent_host_is_named_with_the_phase_and_the_time():
    watching, clock = watch()
    watching.saw(signs(1))
    clock.now += 20
    watching.saw(signs(2, host1=Sign(1, 5, "decode")))
    wait = Wait("train", 5, since=clock.now)
    assert watching.verdict("train", wait) is None
    clock.now += 25  # host 1's sign is 25 s old, and has not changed since
    watching.saw(signs(3, host1=Sign(1, 5, "decode")))
    assert watching.verdict("train", wait) is None
    clock.now += 6
    watching.saw(signs(4, host1=Sign(1, 5, "decode")))
    verdict = watching.verdict("train", wait)
    assert isinstance(verdict, DeadlineError)
    assert str(verdict).startswith(
        "Host 1 of 3 is missing: it has given no sign of life for 31 s, and was last seen in phase 'decode'. "
        "This host, 0, waited for it in phase 'train' for 31 s. Look at that host's own output"
    )


def test_a_board_out_of_reach_is_host_0_missing():
    watching, clock = watch(rank=1)
    watching.saw(signs(1))
    clock.now += 31
    assert str(watching.verdict("decode", None)).startswith(
        "Host 0 of 3 is missing: it has given no sign of life for 31 s, and was last seen in phase 'train'. "
        "This host, 1, was in phase 'decode'."
    )


def test_a_coordinator_that_does_not_answer_is_told_from_a_host_that_is_missing():
    watching, clock = watch(rank=0)
    watching.saw(signs(1))
    clock.now += 31
    assert str(watching.verdict("decode", None)).startswith(
        "The coordinator of this run, a process that host 0 keeps, has not answered for 31 s. "
        "This host, 0, was in phase 'decode'."
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_time_in_which_this_process_did_not_run_is_no_silence(rank):
    watching, clock = watch(rank=rank)
    watching.saw(signs(1))
    clock.now += 40
    watching.held_up(39.0)
    assert watching.verdict("decode", None) is None
    clock.now += 28
    assert watching.verdict("decode", None) is None  # 29 s that count
    watching.saw(signs(1))
    clock.now += 2
    assert str(watching.verdict("decode", None)).startswith(f"Host {1 - rank} of 3 is missing: it has given no sign")
    watching.held_up(1000.0)
    watching.saw(signs(2))
    assert watching.verdict("decode", None) is None


STOPPED = """
import itertools, threading, time
from locojax.hosts.watch import Sign, Watch, Watchdog
class Board(dict):
    put = dict.__setitem__
    def read(self, folder):
        return {key.rpartition("/")[2]: value for key, value in self.copy().items()}
board, verdicts = Board(), []
def live():
    for beat in itertools.count():
        board.put("signs/0", Sign(beat, 0, "decode").encode())
        time.sleep(0.02)
threading.Thread(target=live, daemon=True).start()
dog = Watchdog(Watch(1, 2, silence_seconds=0.5, deadline_seconds=600), board, verdicts.append)
print("ready", flush=True)
for _ in iter(input, "end"):
    print(verdicts, flush=True)
"""


def test_a_process_that_was_stopped_hears_the_others_before_it_judges():
    command, pipe, root = [sys.executable, "-c", STOPPED], subprocess.PIPE, pathlib.Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) as child:
        assert child.stdin and child.stdout and child.stdout.readline() == "ready\n"
        for _ in range(4):
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            child.send_signal(signal.SIGCONT)
            time.sleep(0.3)
        child.stdin.write("?\nend\n")
        child.stdin.close()
        assert child.stdout.readline() == "[]\n"


class SlowBoard(MemoryBoard):
    """A beat is under way when `began` is set, and arrives once `go_on` is."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def put(self, key: str, value: str) -> None:
        if Sign.decode(value).ended is None:
            self.began.set()
            assert self.go_on.wait(20)
        super().put(key, value)


def test_a_beat_under_way_does_not_take_back_the_last_sign():
    board = SlowBoard()
    dog = Watchdog(Watch(0, 2, silence_seconds=5, deadline_seconds=600), board, [].append)
    assert board.began.wait(20)
    stopping = threading.Thread(target=dog.stop, args=("HostError: no such thing",))
    stopping.start()
    stopping.join(0.2)  # a last sign that doesn't wait for the beat is on the board by now
    board.go_on.set()
    stopping.join(20)
    for thread in dog._threads:
        thread.join(20)
    assert Sign.decode(board.values["signs/0"]).ended == "HostError: no such thing"


def test_a_host_that_failed_is_quoted_at_once():
    watching, _ = watch()
    watching.saw(signs(1, host2=Sign(9, 4, "reward", "GradingError: no such column.")))
    verdict = watching.verdict("agree", Wait("agree", 5, since=98.0))
    assert isinstance(verdict, HostError)
    assert str(verdict) == (
        "Host 2 of 3 ended: GradingError: no such column. This host, 0, waited for it in phase 'agree' for 2 s."
    )


def test_a_deadline_names_those_who_are_alive_and_elsewhere():
    watching, clock = watch()
    wait = Wait("agree", 6, since=clock.now)
    for beat in range(61):
        watching.saw(signs(beat, host1=Sign(beat, 6, "agree"), host2=Sign(beat, 5, "decode")))
        clock.now += 10
    verdict = watching.verdict("agree", wait)
    assert str(verdict).startswith(
        "Host 0 of 3 waited 610 s in phase 'agree', for host 2 (alive, in phase 'decode'). "
        "Expected: at most 600 s (hosts.deadline_seconds)."
    )


def test_a_host_that_is_done_is_not_missing_but_is_not_waited_for_either():
    watching, clock = watch()
    done = Sign(7, 6, "end", "")
    watching.saw(signs(1, host1=done))
    clock.now += 40
    watching.saw(signs(2, host1=done))
    assert watching.verdict("load", None) is None
    assert "Host 1 of 3 is done, and this one isn't" in str(watching.verdict("agree", Wait("agree", 7, clock.now)))


def hosts(size: int, board: MemoryBoard | None = None) -> list[Group]:
    board = board or MemoryBoard()
    return [Group(rank, size, board, deadline_seconds=5.0) for rank in range(size)]


def each(groups: list[Group], act) -> list:
    """`act(group)` on every host at the same time."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(act, groups))


def test_what_hosts_agree_on_is_the_same_everywhere():
    groups = hosts(3)
    for round_ in range(4):
        for rows in each(groups, lambda group, r=round_: group.agree("rows", [group.rank, r, -(2**62)])):
            np.testing.assert_array_equal(rows, [[rank, round_, -(2**62)] for rank in range(3)])
    assert [group.num_meetings for group in groups] == [4, 4, 4]
    stop(groups)


def test_what_was_agreed_on_is_forgotten():
    board = MemoryBoard()
    groups = hosts(2, board)
    for _ in range(20):
        each(groups, lambda group: group.agree("rows", [1]))
    assert sum(key.startswith("exchange") for key in board.values) <= 2 * 3
    stop(groups)


def stop(groups: list[Group]) -> None:
    for group in groups:
        assert group._watchdog is not None
        group._watchdog.stop("")


def test_hosts_that_are_out_of_step_are_told():
    groups = hosts(2)
    phases = ["agree", "evaluate"]
    with pytest.raises(HostError, match=r"out of step. Got: host 0 in 'agree', host 1 in 'evaluate'"):
        each(groups, lambda group: group.agree(phases[group.rank], [1]))
    stop(groups)


def test_hosts_started_with_different_settings_are_told_which():
    groups = hosts(3)

    def start(group: Group) -> str:
        own = [f"run.dir=/host{group.rank}", *(["run.seed=7", "rollout.top_k=3"] if group.rank == 2 else [])]
        with pytest.raises(ConfigError) as caught:
            check_same_settings(load(None, own), group)
        return str(caught.value)

    told = each(groups, start)
    assert told[0].startswith("Hosts 0 and 2 were started with different settings: rollout.top_k, run.seed.")
    assert told[2].startswith("Hosts 2 and 0 were started with different settings: rollout.top_k, run.seed.")
    each(groups, lambda group: check_same_settings(load(None, [f"run.dir=/host{group.rank}"]), group))
    stop(groups)


def test_hosts_whose_reward_files_differ_are_told_so(tmp_path):
    groups = hosts(2)
    for rank in range(2):
        (tmp_path / f"{rank}.py").write_text(f"def score(prompt, completion, answer, meta):\n    return {rank}\n")

    def start(group: Group) -> str:
        with pytest.raises(ConfigError) as caught:
            check_same_settings(load(None, [f"data.reward={tmp_path / str(group.rank)}.py:score"]), group)
        return str(caught.value)

    told = each(groups, start)
    assert told[0].startswith(
        "Hosts 0 and 1 were started with different settings: data.reward, data.reward's text. Start every host"
    )
    stop(groups)


def test_hosts_that_say_different_amounts():
    groups = hosts(2)
    with pytest.raises(HostError, match=r"same number of things in phase 'rows'. Got: host 0: 1, host 1: 2"):
        each(groups, lambda group: group.agree("rows", [7] * (group.rank + 1)))
    stop(groups)


def test_a_meeting_that_nobody_comes_to():
    group = Group(0, 2, MemoryBoard(), deadline_seconds=0.2)
    with pytest.raises(DeadlineError, match="Host 1 of 2 did not come to phase 'rows' in 0.2 s"):
        group.agree("rows", [1])
    stop([group])


def test_a_watchdog_ends_the_process_of_a_host_that_waits_in_vain(monkeypatch, capsys):
    ended: collections.deque[int] = collections.deque()
    monkeypatch.setattr("os._exit", ended.append)
    board = MemoryBoard()
    group = Group(0, 2, board, silence_seconds=0.5)
    board.put("signs/1", Sign(1, 0, "decode").encode())
    with group.waiting("publish"):
        until(lambda: bool(ended))
    text = capsys.readouterr().err
    assert ended[0] == 1
    assert "DeadlineError: Host 1 of 2 is missing" in text and "waited for it in phase 'publish'" in text
    assert Sign.decode(board.values["signs/0"]).ended.startswith("DeadlineError: Host 1 of 2 is missing")


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_broken_collective_is_held_back_until_the_watchdog_spoke(monkeypatch):
    slept = []
    monkeypatch.setattr("locojax.hosts.group.time.sleep", slept.append)
    board = MemoryBoard()
    group = Group(0, 2, board, silence_seconds=30)
    with pytest.raises(ValueError, match="Gloo"), group.waiting("train"):
        raise ValueError("UNKNOWN: Gloo all-reduce failed: connection closed by peer")
    assert slept == [33.0]
    stop([group])


def test_host_0_is_the_last_to_leave():
    """The board goes with it, and jax ends a host that still needs it."""
    first, second = hosts(2)
    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(first.close)
        second.exchange("end", "")
        time.sleep(0.3)
        assert not leaving.done()
        stop([second])
        leaving.result(timeout=10)


def test_one_host_alone_meets_nobody():
    with Group.single() as group:
        np.testing.assert_array_equal(group.agree("rows", [1, 2]), [[1, 2]])
        assert group.exchange("metrics", "line") == ["line"]
        with group.waiting("train"):
            pass
    assert group.num_meetings == 0 and group.is_first


def test_libtpu_without_a_tpu_is_left_alone(tmp_path, monkeypatch):
    there = {"libtpu"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert platforms_to_try({}, tmp_path) == "cpu"
    assert platforms_to_try({"JAX_PLATFORMS": "tpu"}, tmp_path) is None
    assert platforms_to_try({"TPU_ACCELERATOR_TYPE": "v5p-8"}, tmp_path) is None
    vendor = tmp_path / "sys/bus/pci/devices/0000:00:05.0/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1af4\n")
    assert platforms_to_try({}, tmp_path) == "cpu"
    vendor.write_text("0x1ae0\n")
    assert platforms_to_try({}, tmp_path) is None
    vendor.unlink()
    there.add("jax_cuda13_plugin")
    assert platforms_to_try({}, tmp_path) is None
    there.clear()
    assert platforms_to_try({}, tmp_path) is None
    there.add("libtpu")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").touch()
    assert platforms_to_try({}, tmp_path) is None
