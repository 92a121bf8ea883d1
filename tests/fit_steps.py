"""What test_fit runs in a child process, without the test's own imports."""

from __future__ import annotations

import os

from locojax.errors import ConfigError


def die(begin):
    begin("first", ("second",))
    os.write(2, b"F1130 01:02:03.4 17 fusion.cc:1] Check failed: x == 0\n*** SIGABRT ***\n")
    os._exit(3)
    yield


def refuse(begin):
    raise ConfigError("This can't be")
    yield


def two(begin):
    begin("first", ("second",))
    yield 1
    begin("second", ())
    yield 2


def compile_plans(plans, slice, begin):
    """Name, program -> what the compiler says; of several plans in one process, whose start takes longest."""
    from locojax.measure.fit import compile_each

    for name, (plan, programs) in plans.items():
        for done in compile_each(plan, slice, programs, (), False, begin):
            yield name, done
