"""Compiled programs on disk: read back without tracing, told apart by what they depend on, made again when broken."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from locojax.models import executables
from locojax.models.executables import Executables, Program
from locojax.models.lora import Adapters

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Double:
    """A jitted function that counts how often it is traced."""

    own = 0

    def __init__(self) -> None:
        self.num_traced = 0

    def jitted(self, **options: Any) -> Any:
        def double(adapters: Adapters, x: jax.Array) -> dict[str, Any]:
            self.num_traced += 1
            return {"y": x.astype(jnp.float32) * 2 * adapters.scale, "own": jnp.int32(self.own), "of": adapters}

        return jax.jit(double, **options)


ADAPTERS = Adapters({"q": {"a": np.ones((1, 2), np.float32)}}, np.float32(1))


@pytest.fixture(autouse=True)
def nothing_in_jax_own_cache(monkeypatch):
    """What jax's own cache has is not kept: programs that no run has made before, and that it doesn't take now."""
    monkeypatch.setattr(Double, "own", int.from_bytes(os.urandom(3), "big"))
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, before)


def made(folder: pathlib.Path | None, double: Double, args: tuple[Any, ...] = (ADAPTERS, X), **static: Any) -> Any:
    programs = Executables(folder)
    program = programs.begin("double", partial(double.jitted().lower, *args), args, static)
    programs.wait()
    return program.result()


def test_another_source_that_lowers_to_the_same_is_not_compiled_again(tmp_path, monkeypatch, caplog):
    made(tmp_path, Double())
    monkeypatch.setattr(executables, "_source", lambda: "changed")
    compiled: list[str] = []
    monkeypatch.setattr(executables, "_keep", lambda *args: compiled.append("kept"))
    second, third = Double(), Double()
    np.testing.assert_array_equal(made(tmp_path, second)(ADAPTERS, X)["y"], 2 * X)
    assert (second.num_traced, compiled) == (1, [])
    made(tmp_path, third)  # under its new name from now on
    assert (third.num_traced, compiled) == (0, [])
    other = Double()
    other.own = 1 - other.own  # a constant of the program
    assert made(tmp_path, other, another=1)(ADAPTERS, X)["own"] == other.own
    assert compiled == ["kept"]


def test_what_is_not_urgent_is_read_behind(tmp_path, monkeypatch):
    """And what has yet to be compiled is waited for, urgent or not."""
    made(tmp_path, Double())
    go_on, load = threading.Event(), executables._loaded
    monkeypatch.setattr(executables, "_loaded", lambda entry: go_on.wait(60) and load(entry))
    programs = Executables(tmp_path)
    args = (ADAPTERS, X)
    read = programs.begin("double", partial(Double().jitted().lower, *args), args, {})
    others = Double()
    others.own = -1
    new = programs.begin("double", partial(others.jitted().lower, *args), args, {"another": 1})
    programs.wait(urgent=[])
    assert (read.kept, read.compiled.done(), new.kept, new.compiled.done()) == (True, False, False, True)
    go_on.set()
    np.testing.assert_array_equal(read.compiled.result(60)(*args)["y"], 2 * X)
    urgent = programs.begin("double", partial(Double().jitted().lower, *args), args, {})
    programs.wait(urgent=[urgent])
    assert urgent.compiled.done()


def some_kept(folder: pathlib.Path, num: int) -> tuple[Executables, list[Program]]:
    """Programs that an earlier process kept, begun where there is no leisure."""
    for n in range(num):
        made(folder, Double(), number=n)
    programs, args = Executables(folder), (ADAPTERS, X)
    programs.leisure.clear()
    return programs, [
        programs.begin("double", partial(Double().jitted().lower, *args), args, {"number": n}) for n in range(num)
    ]


def test_a_program_that_is_called_is_read_at_once_and_the_others_at_leisure(tmp_path):
    programs, (first, second, third) = some_kept(tmp_path, 3)
    programs.wait(urgent=[])
    np.testing.assert_array_equal(second.result()(ADAPTERS, X)["y"], 2 * X)
    assert not first.compiled.done() and not third.compiled.done() and programs.num_behind == 2
    programs.leisure.set()
    np.testing.assert_array_equal(third.compiled.result(60)(ADAPTERS, X)["y"], 2 * X)
    assert first.compiled.done()
    assert programs.num_behind == 0


def test_an_entry_that_went_away_before_it_was_read_is_made_again(tmp_path):
    programs, (program,) = some_kept(tmp_path, 1)
    for path in tmp_path.iterdir():
        path.unlink()
    np.testing.assert_array_equal(program.result()(ADAPTERS, X)["y"], 2 * X)
    assert any(tmp_path.iterdir())


def test_what_a_program_was_made_from_is_let_go():
    large = np.zeros(10)
    seen = weakref.ref(large)
    program = Program(None, partial(np.sum, large), kept=False)
    del large
    assert seen() is not None
    assert program.result() == 0.0 and seen() is None


def test_what_is_waited_for_needs_no_leisure(tmp_path):
    programs, (first, second) = some_kept(tmp_path, 2)
    programs.wait()
    assert first.compiled.done() and second.compiled.done()


def test_a_failure_is_told_to_each_caller(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(executables, "_compile", fail)
    programs, args = Executables(None), (ADAPTERS, X)
    program = programs.begin("double", partial(Double().jitted().lower, *args), args, {})
    for ask in (program.result, programs.wait, program.result):
        with pytest.raises(RuntimeError, match="no room"):
            ask()


def test_programs_that_nobody_read_do_not_hold_up_the_exit():
    script = (
        "from locojax.models.executables import Executables, Program\n"
        "import jax, time\n"
        "programs = Executables(None)\n"
        "programs.leisure.clear()\n"
        "programs.begin('add', lambda: jax.jit(lambda x: x + 1).lower(1.0), (), {})\n"
        "print('ends')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


def test_a_second_process_would_trace_nothing(tmp_path):
    first, second = Double(), Double()
    made(tmp_path, first)
    again = made(tmp_path, second)
    assert (first.num_traced, second.num_traced) == (1, 0)
    out = again(ADAPTERS, X)
    np.testing.assert_array_equal(out["y"], 2 * X)
    assert isinstance(out["of"], Adapters)


def test_shapes_are_known_before_the_program_is_there(tmp_path):
    for _ in range(2):
        programs = Executables(tmp_path)
        program = programs.begin("double", partial(Double().jitted().lower, ADAPTERS, X), (ADAPTERS, X), {})
        assert program.out_info["y"] == jax.ShapeDtypeStruct((2, 3), jnp.float32)
        programs.wait()


def test_without_a_folder_nothing_is_kept(tmp_path):
    made(None, Double())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "static"),
    [
        ((ADAPTERS, X[:1]), {}),
        ((ADAPTERS, X.astype(np.int32)), {}),
        ((dataclasses.replace(ADAPTERS, index=np.zeros(2, np.int32)), X), {}),
        ((ADAPTERS, X), {"dtype": "float32"}),
    ],
    ids=["shape", "dtype", "tree", "static"],
)
def test_what_a_program_depends_on_tells_it_apart(tmp_path, args, static):
    made(tmp_path, Double())
    other = Double()
    made(tmp_path, other, args, **static)
    assert other.num_traced == 1


@pytest.mark.parametrize("of", ["_source", "processor"])
def test_new_source_or_another_processor_is_another_program(tmp_path, monkeypatch, of):
    made(tmp_path, Double())
    monkeypatch.setattr(executables, of, lambda: "other")
    other = Double()
    made(tmp_path, other)
    assert other.num_traced == 1


def test_memory_that_a_program_takes_is_taken_by_the_one_from_disk_too(tmp_path):
    def add(x: jax.Array) -> jax.Array:
        return x + 1 + 0 * Double.own

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    for _ in range(2):
        programs = Executables(tmp_path)
        program = programs.begin("add", partial(jax.jit(add, donate_argnums=0).lower, shape), (shape,), {})
        programs.wait()
        x = jnp.zeros(4)
        np.testing.assert_array_equal(program.result()(x), np.ones(4))
        assert x.is_deleted()


@pytest.mark.parametrize("events", [(), (executables.BUILT, executables.FOUND)], ids=["in memory", "on disk"])
def test_what_jax_itself_had_is_not_kept(tmp_path, events):
    class Lowered:
        """As a lowered program that XLA need not compile."""

        out_info = jax.ShapeDtypeStruct((), jnp.float32)
        in_tree = out_tree = None

        def as_text(self) -> str:
            return "module"

        def compile(self) -> str:
            for event in events:
                if event == executables.BUILT:
                    jax.monitoring.record_event_duration_secs(event, 0.1)
                else:
                    jax.monitoring.record_event(event)
            return "compiled"

    programs = Executables(tmp_path)
    program = programs.begin("had", Lowered, (), {})
    programs.wait()
    assert program.result() == "compiled" and not list(tmp_path.iterdir())


def test_what_xla_cannot_write_out_runs_all_the_same(tmp_path, monkeypatch):
    def refuse(compiled: Any) -> None:
        raise ValueError("`LessThan` is not serializable")

    monkeypatch.setattr(executables.serialize_executable, "serialize", refuse)
    np.testing.assert_array_equal(made(tmp_path, Double())(ADAPTERS, X)["y"], 2 * X)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"", b"torn", pickle.dumps([1]), pickle.dumps({"payload": b""}), None],
    ids=["empty", "torn", "a list", "another form's", "another program's bytes"],
)
def test_a_broken_entry_is_said_and_made_again(tmp_path, caplog, content):
    made(tmp_path, Double())
    for path in tmp_path.iterdir():  # under both its names
        if content is None:
            entry = executables._read(path)
            executables._write(path, {**entry, "payload": b"nothing that XLA knows"})
        else:
            path.write_bytes(content)
    again = Double()
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(made(tmp_path, again)(ADAPTERS, X)["y"], 2 * X)
    assert again.num_traced == 1
    assert "made again" in caplog.text
    third = Double()
    made(tmp_path, third)
    assert third.num_traced == 0


def test_a_disk_that_takes_nothing_is_said_and_costs_no_more(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        out = made(tmp_path / "file" / "programs", Double())(ADAPTERS, X)
    np.testing.assert_array_equal(out["y"], 2 * X)
    assert "isn't kept" in caplog.text


def test_what_nobody_used_for_long_goes(tmp_path):
    made(tmp_path, Double())
    old, _ = names = set(tmp_path.iterdir())  # of one file
    made(tmp_path, Double(), (ADAPTERS, X[:1]))
    past = time.time() - 86400 * (executables.MAX_AGE_DAYS + 1)
    os.utime(old, (past, past))
    made(tmp_path, Double(), (ADAPTERS, X[:, :1]))
    left = set(tmp_path.iterdir())
    assert not names & left and len(left) == 4


def test_use_keeps_an_entry_young(tmp_path):
    made(tmp_path, Double())
    path, _ = tmp_path.iterdir()
    os.utime(path, (1e9, 1e9))
    made(tmp_path, Double())
    assert path.stat().st_mtime > 1.5e9


def test_a_setting_that_cannot_be_told_apart_is_refused(tmp_path):
    with pytest.raises(ValueError, match="can't be told from another by its repr"):
        made(tmp_path, Double(), function=object())


def test_a_folder_beside_jax_own_cache(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    try:
        for folder, expected in ((None, None), ("gs://bucket/xla", None), (str(tmp_path), tmp_path / "programs")):
            jax.config.update("jax_compilation_cache_dir", folder)
            assert executables.beside_jax_cache() == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
