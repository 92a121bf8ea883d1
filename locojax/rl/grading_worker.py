"""The process that runs a reward function, one grade after the other; started and killed by `grading`.

It loads neither jax nor the program's main module. Messages, pickled, over one connection:
in: (reward spec, CPU seconds a grade may take), then lists of pickled argument tuples; an empty message ends it.
out: None or the text of what went wrong while loading; then, for each grade, a value or the text of an error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from locojax.errors import LocoError
from locojax.rl.rewards import RewardFunction, as_reward_value, describe_exception, load_reward


def main(file_descriptor: int) -> None:
    """Serve grades on an inherited connection until it closes."""
    connection = Connection(file_descriptor)
    # What a reward prints must not mix with the parent's own output, which may be parsed.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    spec, max_cpu_seconds = connection.recv()
    try:
        reward = load_reward(spec)
    except LocoError as error:
        connection.send(str(error))
        return
    connection.send(None)
    try:
        while arguments := connection.recv():
            for pickled in arguments:
                # Backstop for an orphan: the kernel ends a grade that spins inside C code, where nothing else can.
                signal.setitimer(signal.ITIMER_VIRTUAL, max_cpu_seconds)
                result = grade_one(reward, pickled)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                connection.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone or does not want more


def grade_one(reward: RewardFunction, pickled: bytes) -> float | str:
    """One grade: the value, or what went wrong as text."""
    try:
        return as_reward_value(reward(*pickle.loads(pickled)))
    except Exception as error:  # whatever a reward raises makes this one grade unscorable; it is shown, not hidden
        return describe_exception(error)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
