"""Ctrl-C between the parts of a step, and twice at once."""

from __future__ import annotations

import os
import signal

import pytest

from locojax.hosts.interrupt import Interrupts


def test_a_signal_waits_for_check_and_says_so():
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        interrupts.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert said and "Stopping" in said[0]
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_a_second_ctrl_c_acts_at_once():
    with Interrupts(lambda text: None):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two bytecodes
                pass


def test_the_handlers_before_come_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda text: None):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
