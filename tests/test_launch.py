"""Starting hosts on this machine: what each is told, what is shown of each, and how they end."""

from __future__ import annotations

import io
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from locojax.cli import main
from locojax.hosts.collector import Collector
from locojax.hosts.launch import free_port, launch
from locojax.hosts.place import with_huge_pages
from locojax.hosts.sharing import shares

ROOT = pathlib.Path(__file__).parent.parent


def script(tmp_path: pathlib.Path, text: str) -> list[str]:
    path = tmp_path / "host.py"
    path.write_text("import os, sys, time\nrank = int(os.environ['LOCOJAX_HOST_ID'])\n" + text)
    return [sys.executable, "-S", str(path)]


def test_each_host_is_told_its_place_and_host_0_has_the_terminal(tmp_path, capfd):
    text = (
        "import json\nfolder = os.path.dirname(__file__)\n"
        "json.dump(dict(os.environ), open(f'{folder}/{rank}.json', 'w'))\n"
        "print('out of', rank)\nprint('err of', rank, file=sys.stderr)\nprint('[Gloo] chatter', file=sys.stderr)\n"
    )
    errors = io.StringIO()
    code = launch(
        script(tmp_path, text), 3, devices_per_host=2, environment={"XLA_FLAGS": "--other", "A": "b"}, errors=errors
    )
    assert code == 0
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [(each["LOCOJAX_HOST_ID"], each["LOCOJAX_NUM_HOSTS"]) for each in told] == [(str(i), "3") for i in range(3)]
    assert len({(each["LOCOJAX_COORDINATOR"], each["LOCOJAX_LAUNCHED_AT"], each["A"]) for each in told}) == 1
    assert {each["GLIBC_TUNABLES"] for each in told} == {"glibc.malloc.hugetlb=1"}
    assert told[0]["XLA_FLAGS"] == "--other --xla_force_host_platform_device_count=2"
    out, err = capfd.readouterr()
    assert out == "out of 0\n" and "err of 0" in err
    assert sorted(errors.getvalue().splitlines()) == ["[host 1] err of 1", "[host 2] err of 2"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_huge_pages_are_asked_for_unless_the_user_has_said(before, after):
    told = {"GLIBC_TUNABLES": before} if before else {}
    assert (told | with_huge_pages(told))["GLIBC_TUNABLES"] == after


def test_the_first_failure_is_the_exit_code_and_the_others_are_ended(tmp_path):
    errors = io.StringIO()
    start = time.monotonic()
    text = "sys.exit(3) if rank == 1 else time.sleep(600)\n"
    assert launch(script(tmp_path, text), 2, grace_seconds=0.5, errors=errors) == 3
    assert time.monotonic() - start < 20
    assert errors.getvalue() == "Host 0 did not end within 0.5 s of the first failure, and is ended now\n"


def test_a_killed_host_is_named_and_others_may_have_their_say(tmp_path):
    errors = io.StringIO()
    text = "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(1)\nprint(rank, 'ends', file=sys.stderr)\nsys.exit(1)"
    assert launch(script(tmp_path, text), 3, errors=errors) == 1
    assert sorted(errors.getvalue().splitlines()) == ["Host 1 of 3 was ended by SIGKILL", "[host 2] 2 ends"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_every_host(tmp_path, number):
    text = (
        "import signal\nsignal.signal(int(sys.argv[1]), lambda *_: sys.exit(20 + rank))\n"
        "open(f'{os.path.dirname(__file__)}/{rank}.up', 'w').close()\ntime.sleep(600)\n"
    )
    command = [*script(tmp_path, text), str(int(number))]
    program = f"import sys\nfrom locojax.hosts.launch import launch\nsys.exit(launch({command!r}, 2))"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.up"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) in (20, 21)


def test_ports_are_free():
    assert 1024 <= free_port() <= 65535


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hosts", "2"], "no command to launch. Got: nothing after --. Expected: train, demo or profile after --"),
        (["--hosts", "2", "--", "serve", "model"], "no command to launch. Got: serve model."),
        (["--hosts", "0", "--", "demo"], "--hosts must be at least 1. Got: 0."),
        (["--hosts", "2", "--devices-per-host", "0", "--", "demo"], "--devices-per-host must be at least 1"),
        (["--", "demo"], "The following arguments are required: --hosts"),
        (["--hosts", "2", "--", "train", "run.sed=1"], "Unknown setting 'run.sed'"),
        (["--hosts", "2", "--", "train", "--no-such"], "Unknown option '--no-such'"),
        (["--hosts", "2", "--", "demo", "run.seed=x"], "Setting 'run.seed' has a value of the wrong type"),
    ],
)
def test_a_launch_that_cannot_be(arguments, text, capsys):
    """Refused once, by the launcher, before any host is started."""
    assert main(["launch", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_prompts_are_shared_alike_and_evenly():
    lengths = [9, 1, 2, 8, 3, 3, 30]
    for balance in (True, False):
        for num_hosts in (1, 2, 3, 4, 9):
            taken = shares(lengths, num_hosts, balance=balance)
            assert sorted(index for each in taken for index in each) == list(range(7))
            counts = [len(each) for each in taken]
            assert len(counts) == num_hosts and max(counts) - min(counts) <= 1
            assert all(each == sorted(each) for each in taken)
    assert shares([9, 1, 2, 8], 2, balance=True) == [[0, 1], [2, 3]]
    assert shares([9, 8, 1, 2], 2, balance=False) == [[0, 1], [2, 3]]
    assert shares([9, 8, 1, 2], 2, balance=True) == [[0, 2], [1, 3]]
    assert shares([], 2, balance=True) == [[], []]


def test_garbage_is_collected_between_steps_only():
    import gc

    with Collector(True) as collector:
        assert gc.isenabled() and not collector.is_frozen
        collector.freeze()
        assert not gc.isenabled() and collector.is_frozen and gc.get_freeze_count() > 0
        cycle: list = []
        cycle.append(cycle)
        before = gc.get_stats()[1]["collections"]
        collector.collect()
        assert gc.get_stats()[1]["collections"] == before + 1
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with Collector(False) as collector:
        collector.freeze()
        collector.collect()
        assert gc.isenabled() and collector.is_frozen


def test_what_collections_take_is_counted_whoever_begins_them():
    import gc

    for active in (True, False):
        with Collector(active) as collector:
            gc.collect()
            taken = collector.seconds_since_asked()
            assert taken > 0 and collector.seconds_since_asked() < taken
        assert collector._clock not in gc.callbacks
