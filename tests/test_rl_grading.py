"""Grades come back whatever a reward does: raise, hang, die, or return nonsense."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from locojax.errors import GradingError
from locojax.rl.grading import Grader, check_unscorable_rate
from locojax.rl.rewards import GradeInput
from locojax.types import Prompt, Reward

REWARDS = '''
import os, re, subprocess, time

def obedient(prompt_text, completion_text, answer, meta):
    """Does what the completion says."""
    match completion_text.split():
        case ["score", value]: return float(value)
        case ["raise"]: raise KeyError("no such thing")
        case ["hang"]: time.sleep(1000)
        case ["regex"]: re.fullmatch(r"(a+)+b", "a" * 40)
        case ["die"]: os.abort()
        case ["exit"]: os._exit(7)
        case ["none"]: return None
        case ["nan"]: return float("nan")
        case ["text"]: return "1.0"
        case ["true"]: return True
        case ["pid"]: return float(os.getpid())
        case ["print"]: print("chatter", flush=True); return 0.5
        case ["child"]:
            child = subprocess.Popen(["sleep", "1000"])
            with open(meta["file"], "w") as file: file.write(str(child.pid))
            child.wait()
        case ["meta"]: return float(meta["level"] + (meta["stop_reason"] == "length") + (meta["prompt_id"] == "p"))

def too_few(prompt_text, completion_text):
    return 0.0

async def asynchronous(prompt_text, completion_text, answer, meta):
    return 0.0

def broken(prompt_text, completion_text, answer, meta):
    return 1 / 0
'''


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "user_rewards.py"
    path.write_text(REWARDS)
    return str(path)


def _inputs(*texts: str) -> list[GradeInput]:
    return [GradeInput(Prompt("p", "do:", answer="1"), text) for text in texts]


def test_values_come_back_in_order_from_several_processes(reward_file: str) -> None:
    with Grader(f"{reward_file}:obedient", num_workers=2) as grader:
        graded = grader.grade(_inputs(*[f"score {i}" for i in range(100)]))
    assert [reward.value for reward in graded] == [float(i) for i in range(100)]


def test_what_cannot_be_scored_is_unscorable_with_its_reason(reward_file: str) -> None:
    with Grader(f"{reward_file}:obedient", max_unscorable_rate=1.0) as grader:
        graded = grader.grade(_inputs("raise", "none", "nan", "text", "true", "print"))
    assert [reward.value for reward in graded] == [None, None, None, None, 1.0, 0.5]
    assert graded[0].error is not None and "KeyError: 'no such thing'" in graded[0].error
    assert "user_rewards.py:8" in graded[0].error
    assert str(graded[1].error).startswith("ValueError: the reward function returned None")
    assert "returned nan" in str(graded[2].error)
    assert "returned text, '1.0', not a number" in str(graded[3].error)


@pytest.mark.parametrize("how", ["hang", "regex"])
def test_a_hanging_grade_is_killed_and_the_others_are_graded(reward_file: str, how: str) -> None:
    with Grader(f"{reward_file}:obedient", deadline_seconds=0.5, max_unscorable_rate=0.5) as grader:
        start = time.monotonic()
        graded = grader.grade(_inputs("score 1", "pid", how, "score 2", "pid"))
        assert time.monotonic() - start < 5
    assert graded[2] == Reward(None, error="the grade ran past its deadline of 0.5 s and was killed")
    assert (graded[0].value, graded[3].value) == (1.0, 2.0)
    assert graded[1].value != graded[4].value  # another process took over
    assert graded[1].value is not None and not _is_running(int(graded[1].value))


def test_a_grade_that_ends_the_process_is_unscorable(reward_file: str) -> None:
    with Grader(f"{reward_file}:obedient", max_unscorable_rate=1.0) as grader:
        graded = grader.grade(_inputs("die", "exit", "score 3"))
    assert graded[0].error == "the grading process died during this grade (signal SIGABRT)"
    assert graded[1].error == "the grading process died during this grade (exit code 7)"
    assert graded[2].value == 3.0


def test_the_grader_sees_meta_and_the_stop_reason(reward_file: str) -> None:
    prompt = Prompt("p", "do:", meta={"level": 3})
    with Grader(f"{reward_file}:obedient") as grader:
        graded = grader.grade([GradeInput(prompt, "meta", "length"), GradeInput(prompt, "meta", "stop")])
    assert [reward.value for reward in graded] == [5.0, 4.0]


def test_meta_that_cannot_be_sent_is_unscorable(reward_file: str) -> None:
    prompt = Prompt("p", "do:", meta={"function": lambda: None})
    with Grader(f"{reward_file}:obedient", max_unscorable_rate=1.0) as grader:
        [reward] = grader.grade([GradeInput(prompt, "score 1")])
    assert reward.value is None and "can't be sent to the grader" in str(reward.error)


@pytest.mark.parametrize("spec", ["exact", "last_number", "gsm8k"])
def test_safe_rewards_are_graded_without_a_process(spec: str) -> None:
    with Grader(spec) as grader:
        [future] = grader.submit([GradeInput(Prompt("p", "1+1=", answer="2"), "2")])
        assert future.done() and future.result() == Reward(1.0)
        assert grader.collect([future]) == [Reward(1.0)]
        [missing] = grader.submit([GradeInput(Prompt("p", "1+1="), "2")])
        assert "no answer to compare with" in str(missing.result().error)


def test_above_the_unscorable_rate_the_run_stops_and_shows_why(reward_file: str) -> None:
    with Grader(f"{reward_file}:broken", max_unscorable_rate=0.1) as grader:
        with pytest.raises(GradingError) as caught:
            grader.grade(_inputs("a", "b", "c"))
    text = str(caught.value)
    assert text.startswith("Too many completions could not be graded: 3 of the last 3.")
    assert text.count("ZeroDivisionError: division by zero") == 1  # the same reason once
    assert "a share of at most 0.1" in text and "Mend the reward function" in text
    assert caught.value.exit_code == 2


def test_a_batch_that_hangs_throughout_is_given_up_early(reward_file: str) -> None:
    with Grader(f"{reward_file}:obedient", deadline_seconds=0.1, max_unscorable_rate=0.01) as grader:
        futures = grader.submit(_inputs(*["hang"] * 20))  # the window allows 2.56
        with pytest.raises(GradingError, match="3 of the last 256"):
            grader.collect(futures)
        with pytest.raises(GradingError, match="3 of the last 256"):
            grader.submit(_inputs("score 1"))


def test_the_rate_is_allowed_up_to_and_including_the_limit() -> None:
    check_unscorable_rate([Reward(1.0)] * 9 + [Reward(None, "x")], 0.1)
    check_unscorable_rate([], 0.0)
    with pytest.raises(GradingError, match="2 of the last 10"):
        check_unscorable_rate([Reward(1.0)] * 8 + [Reward(None, "x")] * 2, 0.1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: f"{path}:absent", "names no function: there is no 'absent'"),
        (lambda path: f"{path}:too_few", "has the wrong signature. Got: too_few(prompt_text, completion_text)."),
        (lambda path: f"{path}:asynchronous", "is async"),
        (lambda path: f"{path}:os", "can't be called. Got: module."),
        (lambda path: "/no/such/file.py:f", "The reward's file /no/such/file.py does not exist."),
        (lambda path: "no_such_module:f", "Loading the reward from no_such_module failed. Got: ModuleNotFoundError"),
        (lambda path: "exakt", "There is no reward 'exakt'."),
        (lambda path: "exakt", "Did you mean 'exact'?."),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_at_once(reward_file: str, make, text: str) -> None:
    with pytest.raises(GradingError) as caught:
        Grader(make(reward_file))
    assert text in str(caught.value) and caught.value.exit_code == 2


def test_a_reward_that_raises_or_exits_while_loading_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("table = {}\ntable['key']\ndef f(a, b, c, d): return 0.0\n")
    with pytest.raises(GradingError, match=r"the reward from .*raises.py failed. Got: KeyError: 'key' \(.*:2\)"):
        Grader(f"{tmp_path}/raises.py:f")
    (tmp_path / "exits.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(GradingError, match=r"ended while it loaded the reward .* \(exit code 3\)"):
        Grader(f"{tmp_path}/exits.py:f")


def test_a_module_on_the_parents_path_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def f(prompt, completion, answer, meta): return 0.25\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Grader("rewards_of_mine:f") as grader:
        assert grader.grade(_inputs("x")) == [Reward(0.25)]


def test_closing_ends_the_processes_and_the_waiting_futures(reward_file: str) -> None:
    grader = Grader(f"{reward_file}:obedient", deadline_seconds=60)
    [pid] = grader.grade(_inputs("pid"))
    futures = grader.submit(_inputs("hang", "score 1"))
    time.sleep(0.2)
    grader.close()
    grader.close()
    for future in futures:
        with pytest.raises(GradingError, match="closed before this was graded"):
            future.result(timeout=5)
    with pytest.raises(GradingError, match="closed"):
        grader.submit(_inputs("score 1"))
    assert pid.value is not None and not _is_running(int(pid.value))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _ends_within(seconds: float, pid: int) -> bool:
    end = time.monotonic() + seconds
    while _is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not _is_running(pid)


@pytest.mark.parametrize(("how", "deadline_seconds"), [("hang", 100), ("regex", 0.6)])
def test_a_killed_parent_takes_its_grading_process_along(reward_file: str, how: str, deadline_seconds: float) -> None:
    # "regex" holds the interpreter's lock, so no thread of the process can end it: the kernel's timer must.
    program = f"""
import os, time
from locojax.rl.grading import Grader
from locojax.rl.rewards import GradeInput
from locojax.types import Prompt
grader = Grader({reward_file + ":obedient"!r}, deadline_seconds={deadline_seconds})
[pid] = grader.grade([GradeInput(Prompt("p", ""), "pid")])
grader.submit([GradeInput(Prompt("p", ""), {how!r})])
time.sleep(0.3)
print(int(pid.value), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert _ends_within(20, int(done.stdout))


def test_killing_a_grade_kills_what_it_started(reward_file: str, tmp_path: Path) -> None:
    prompt = Prompt("p", "do:", meta={"file": str(tmp_path / "pid")})
    with Grader(f"{reward_file}:obedient", deadline_seconds=1.0, max_unscorable_rate=1.0) as grader:
        [reward] = grader.grade([GradeInput(prompt, "child")])
    assert reward.value is None
    assert _ends_within(5, int((tmp_path / "pid").read_text()))


def test_what_a_reward_prints_stays_out_of_standard_output(reward_file: str) -> None:
    program = f"""
from locojax.rl.grading import Grader
from locojax.rl.rewards import GradeInput
from locojax.types import Prompt
with Grader({reward_file + ":obedient"!r}) as grader:
    print(grader.grade([GradeInput(Prompt("p", ""), "print")])[0].value)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0.5\n" and done.stderr == "chatter\n"


def test_overhead_of_a_trivial_reward_is_small(reward_file: str) -> None:
    with Grader(f"{reward_file}:obedient") as grader:
        inputs = _inputs(*["score 1"] * 128)
        grader.grade(inputs)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            grader.grade(inputs)
            seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05, f"128 grades took {1e3 * min(seconds):.0f} ms"


def test_a_grading_process_loads_no_jax(tmp_path: Path) -> None:
    (tmp_path / "sees.py").write_text(
        "import sys\ndef f(p, c, a, m): return float('jax' in sys.modules or 'numpy' not in sys.modules)\n"
    )
    with Grader(f"{tmp_path}/sees.py:f") as grader:
        assert grader.grade(_inputs("x")) == [Reward(0.0)]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(GradingError, match="Got: num_workers 0, deadline_seconds 10, max_unscorable_rate 0.1"):
        Grader("exact", num_workers=0)
