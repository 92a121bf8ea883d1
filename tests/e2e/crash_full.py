"""kill -9 at every named point of a real run, and at random ones: nothing is lost, nothing is done twice.

Takes half an hour, so pytest collects it only by name: `make crash-test`.
"""

from __future__ import annotations

import random
import signal

import jax
import pytest
from crash import AFTER_IT, BEFORE_A_CHECKPOINT, Crashes


@pytest.fixture(scope="module")
def crashes(tmp_path_factory) -> Crashes:
    made = Crashes.make(tmp_path_factory.mktemp("crash"), str(jax.config.jax_compilation_cache_dir))
    assert made.start("whole", "none") == 0, made.errors("whole")
    return made


CHAINS = {"before a checkpoint": BEFORE_A_CHECKPOINT, "after it": AFTER_IT}


@pytest.mark.parametrize("chain", CHAINS)
def test_one_host(crashes, chain):
    crashes.survives(f"one-{chain}".replace(" ", "-"), *CHAINS[chain].values())


@pytest.mark.parametrize("chain", CHAINS)
def test_two_hosts(crashes, chain):
    """The second host is the one that is killed; the first ends because of it, its checkpoint written."""
    points = [point for name, point in CHAINS[chain].items() if name != "saved, perhaps"]  # not begun a second time
    crashes.survives(f"two-{chain}".replace(" ", "-"), *points, num_hosts=2, crash_host=1)


def test_the_first_of_two_hosts(crashes):
    """It keeps the board, the checkpoints and the run's log."""
    points = [BEFORE_A_CHECKPOINT[name] for name in ("graded", "saving", "saved, perhaps")]
    crashes.survives("two-first", *points, AFTER_IT["training"], num_hosts=2, crash_host=0)


def test_a_host_that_took_a_group_over(crashes):
    """Killed when it has claimed the slow host's group; when it has sampled it; and as it writes it."""
    points = ("after:Drawn@1#2", "after:Sampled@2#2", "torn:Sampled@3#2")
    stealing = ("hosts.steal_groups=true", "rollout.max_slots=2")
    crashes.survives("thief", *points, num_hosts=2, crash_host=1, settings=stealing)


@pytest.mark.parametrize("hosts", [(2, 1), (1, 2)], ids=str)
def test_another_number_of_hosts(crashes, hosts):
    before, after = hosts
    name = f"from-{before}-to-{after}"
    crashes.survives(name, "after:Graded@4", num_hosts=before, resumed_on=after)
    said = crashes.errors(name)
    assert before == 1 or "1 host now, 2 hosts before: prompts are shared out anew, what was graded is kept" in said


@pytest.mark.parametrize(("num_hosts", "num_kills"), [(1, 50), (2, 12)])
def test_random_moments(crashes, num_hosts, num_kills):
    """Killed again and again, in a row, until so many kills have met a run; each run comes to its end."""
    draw, kills, runs = random.Random(num_hosts), 0, 0
    while kills < num_kills:
        name = f"random-{num_hosts}-{runs}"
        while True:
            seconds = draw.uniform(0.0, 8.0)  # beyond the first steps, in which programs are compiled
            code = crashes.start(name, f"seconds:{seconds:.2f}", num_hosts, crash_host=draw.randrange(num_hosts))
            if code == 0:
                break
            assert code == (-signal.SIGKILL if num_hosts == 1 else 1), (code, crashes.errors(name))
            kills += 1
            assert kills < 4 * num_kills, "the run does not get anywhere"
        crashes.check(name)
        runs += 1
