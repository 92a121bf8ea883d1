"""How the C++ kernels are made and who uses them, without making them."""

import pathlib

import pytest

from locojax.errors import ConfigError
from locojax.models.native import build


def compiler(folder, script):
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "beside_jax_cache", lambda: tmp_path / "xla" / "programs")
    return tmp_path / "xla" / build.FOLDER


def test_a_library_is_compiled_once_for_each_compiler(tmp_path, monkeypatch, cache):
    script = 'echo "$@" >> "$0.calls"; for last; do :; done; test "$1" = --version && echo {} || touch "$last"'
    monkeypatch.setenv("CXX", compiler(tmp_path, script.format("one")))
    first = build._library()
    assert first.parent == cache and build._library() == first and list(cache.iterdir()) == [first]
    calls = pathlib.Path(tmp_path / "compiler.calls").read_text().splitlines()
    sources = len(list(pathlib.Path(build.__file__).parent.glob("*.cc")))
    kinds = [next((kind for kind in ("--version", "-shared") if kind in call), "-c") for call in calls]
    assert kinds == ["--version", *["-c"] * sources, "-shared", "--version"]
    compiler(tmp_path, script.format("another"))
    assert build._library() != first


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ('test "$1" = --version || { echo "no such instruction" >&2; exit 3; }', "exit code 3: no such instruction"),
        ("exit 1", "ended with exit code 1"),
    ],
)
def test_a_compiler_that_fails_says_so(tmp_path, monkeypatch, cache, script, text):
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(build.NoKernels, match=text):
        build._library()
    assert not cache.exists() or not list(cache.iterdir())


def test_no_compiler(monkeypatch, cache):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoKernels, match=r"\$CXX, no-such-compiler, isn't there"):
        build._library()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(build.NoKernels, match="there is no C.. compiler .no-such-compiler."):
        build._library()


def test_a_folder_that_can_t_be_written(tmp_path, monkeypatch):
    (tmp_path / "xla").write_text("a file")
    monkeypatch.setattr(build, "beside_jax_cache", lambda: tmp_path / "xla" / "programs")
    with pytest.raises(build.NoKernels, match="can't be written"):
        build._library()


def test_who_uses_them(monkeypatch):
    assert build.why_not("float32") == "they are for bfloat16, and this is float32"
    assert not build.chosen("xla", "bfloat16") and not build.chosen("auto", "float32")
    with pytest.raises(ConfigError, match="The C.. kernels can't be used. Got: they are for bfloat16, and this is "):
        build.chosen("native", "float32")
    assert build.told("xla", "bfloat16") == "XLA alone"
    assert build.told("auto", "float32") == "XLA alone, without C++ kernels: they are for bfloat16, and this is float32"
    monkeypatch.setattr(build, "auto_dtype", lambda platform: "float32")
    assert build.why_not("bfloat16") == "this CPU doesn't multiply bfloat16"
    monkeypatch.setattr(build, "auto_dtype", lambda platform: "bfloat16")
    monkeypatch.setattr(build, "give_to_jax", lambda: False)
    monkeypatch.setattr(build, "_compiler", lambda: "old-c++")
    build._given.cache_clear()
    assert build.why_not("bfloat16") == "old-c++ makes no AVX-512 BF16 instructions"
    build._given.cache_clear()
    monkeypatch.setattr(build, "why_not", lambda dtype: None)
    assert build.chosen("auto", "bfloat16") and build.told("native", "bfloat16") == "C++ kernels"
