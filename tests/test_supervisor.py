"""The supervisor over real, small child processes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from locojax.server.supervisor import Child, RestartPolicy, Supervisor

ROOT = pathlib.Path(__file__).parent.parent
QUICK = RestartPolicy(first_wait=0.05, longest_wait=0.2, steady_after=60.0, max_deaths=4)

# Notes its start and its end in a file; ends on SIGTERM.
LIVES = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "a").write(f"{sys.argv[2]} ended\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "a").write(f"{sys.argv[2]} started\\n")
while True:
    time.sleep(0.05)
"""
STUBBORN = LIVES.replace("    sys.exit(0)\n", "")


def child(name: str, code: str, log: pathlib.Path, stop_seconds: float = 20.0) -> Child:
    return Child(name, (sys.executable, "-c", code, str(log), name), stop_seconds=stop_seconds)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def lines(log: pathlib.Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def run_in_thread(supervisor: Supervisor) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()))
    thread.start()
    return thread, codes


def test_children_start_in_order_and_stop_in_reverse(tmp_path):
    log = tmp_path / "log"
    supervisor = Supervisor([child("engine", LIVES, log), child("api", LIVES, log)], say=lambda _: None)
    thread, codes = run_in_thread(supervisor)
    wait_for(lambda: len(lines(log)) == 2)
    supervisor.stop()
    thread.join(20)
    assert codes == [0]
    assert lines(log)[2:] == ["api ended", "engine ended"]
    assert supervisor.processes() == {}


def test_a_dead_child_is_started_again_and_the_other_is_left_alone(tmp_path):
    log, said = tmp_path / "log", []
    supervisor = Supervisor([child("engine", LIVES, log), child("api", LIVES, log)], said.append, QUICK)
    thread, _ = run_in_thread(supervisor)
    wait_for(lambda: len(lines(log)) == 2)
    before = supervisor.processes()
    os.kill(before["engine"], signal.SIGKILL)
    wait_for(lambda: len(lines(log)) == 3)
    after = supervisor.processes()
    supervisor.stop()
    thread.join(20)
    assert after["engine"] != before["engine"] and after["api"] == before["api"]
    assert said[0].startswith("The engine was ended by SIGKILL after ")
    assert said[0].endswith(" Starting it again in 0.05 s.")


def test_waits_double_and_too_many_deaths_end_it(tmp_path):
    said: list[str] = []
    code = Supervisor([child("engine", "import sys; sys.exit(3)", tmp_path / "log")], said.append, QUICK).run()
    assert code == 1
    assert [line.rpartition("again in ")[2] for line in said[:-1]] == ["0.05 s.", "0.1 s.", "0.2 s."]
    assert said[-1] == "The engine ended with exit code 3. It has done so 4 times in a row: giving up."


def test_bad_input_is_not_tried_again(tmp_path):
    log, said = tmp_path / "log", []
    failing = child("engine", "import sys, time; time.sleep(0.3); sys.exit(2)", log)
    code = Supervisor([child("api", LIVES, log), failing], said.append, QUICK).run()
    assert code == 2
    assert said == ["The engine ended with exit code 2: starting it again would not help."]


def test_a_child_that_does_not_end_is_killed(tmp_path):
    log = tmp_path / "log"
    supervisor = Supervisor([child("engine", STUBBORN, log, stop_seconds=0.3)], say=lambda _: None)
    thread, codes = run_in_thread(supervisor)
    wait_for(lambda: bool(lines(log)))
    supervisor.stop()
    thread.join(20)
    assert codes == [0] and supervisor.processes() == {}


MAIN = """
import sys
from locojax.server.supervisor import Child, Supervisor
child = Child("engine", (sys.executable, "-c", sys.argv[2], sys.argv[1], "engine"))
sys.exit(Supervisor([child], say=lambda line: print(line, flush=True)).run())
"""
ORPHAN = "from locojax.server.supervisor import end_with_parent\nend_with_parent()\n" + LIVES


def start_main(log: pathlib.Path, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, str(log), code], stdout=subprocess.PIPE, text=True, env=os.environ, cwd=ROOT
    )


def test_sigterm_stops_the_children(tmp_path):
    log = tmp_path / "log"
    process = start_main(log, LIVES)
    wait_for(lambda: bool(lines(log)))
    process.terminate()
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert lines(log) == ["engine started", "engine ended"]
    assert out == "Stopping: requests in flight are answered and models saved first. Ctrl-C again stops at once.\n"


def test_children_end_when_the_supervisor_was_killed(tmp_path):
    log = tmp_path / "log"
    process = start_main(log, ORPHAN)
    wait_for(lambda: bool(lines(log)))
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: lines(log) == ["engine started", "engine ended"])
