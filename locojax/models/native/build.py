"""Makes the C++ kernels with the machine's own compiler, once, and gives them to jax.

The library is kept beside jax's compiled programs, under a key of what it depends on: the sources, the compiler,
jaxlib, the processor. Without a compiler nothing is lost but speed: `why_not` says why, and XLA does it all.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import jax
import jaxlib

from locojax.errors import ConfigError
from locojax.models.executables import beside_jax_cache, processor
from locojax.models.platform import auto_dtype
from locojax.types import Kernels

FOLDER = "native"
"""Where libraries are kept, beside the compiled programs."""

COMPILERS = ("c++", "g++", "clang++")
"""Looked for in this order, after $CXX."""

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-w")
KERNELS = (
    "locojax_matmul_bf16", "locojax_matmul_f32", "locojax_attend_rows", "locojax_head_masses", "locojax_head_values",
    "locojax_head_block", "locojax_adapted", "locojax_loss_forward", "locojax_loss_backward", "locojax_loss_slope",
    "locojax_attention_forward", "locojax_attention_backward", "locojax_adapted_rows", "locojax_adapted_rows_backward",
    "locojax_gated", "locojax_gated_backward", "locojax_rms_norm",
)  # fmt: skip
COMPILE_SECONDS = 300.0


class NoKernels(Exception):
    """They can't be made here; the text says why, as the end of a sentence."""


class NoCompiler(NoKernels):
    """There is nothing to make them with."""


def why_not(dtype: str) -> str | None:
    """Why the kernels aren't for this machine and dtype; None: they are, and jax has them from now on."""
    if jax.default_backend() != "cpu":
        return "they are for CPUs"
    if dtype != "bfloat16":
        return f"they are for bfloat16, and this is {dtype}"
    if auto_dtype("cpu") != "bfloat16":
        return "this CPU doesn't multiply bfloat16"
    return _given()


def chosen(kernels: Kernels, dtype: str) -> bool:
    """Whether to use them. Raises ConfigError where "native" asks for what can't be."""
    if kernels == "xla":
        return False
    reason = why_not(dtype)
    if reason is not None and kernels == "native":
        raise ConfigError("The C++ kernels can't be used", got=reason, remedy='Set kernels to "auto" or "xla"')
    return reason is None


def told(kernels: Kernels, dtype: str) -> str:
    """What `chosen` chooses, in words. Raises as it does."""
    if chosen(kernels, dtype):
        return "C++ kernels"
    return "XLA alone" if kernels == "xla" else f"XLA alone, without C++ kernels: {why_not(dtype)}"


@functools.cache  # a compiler that fails is not asked again
def _given() -> str | None:
    try:
        fast = give_to_jax()
    except NoKernels as error:
        return str(error)
    return None if fast else f"{_compiler()} makes no AVX-512 BF16 instructions"


@functools.cache  # jax takes a kernel's name once a process
def give_to_jax() -> bool:
    """The kernels become targets of `jax.ffi.ffi_call`, on any CPU. Returns whether they use AVX-512 BF16; without it,
    they are right, and slower than XLA.

    Raises:
      NoKernels: there is no compiler, or it failed.
    """
    library = _library()
    try:
        loaded = ctypes.CDLL(str(library))
        handlers = {name: jax.ffi.pycapsule(getattr(loaded, name)) for name in KERNELS}
    except (OSError, AttributeError) as error:
        raise NoKernels(f"{library} can't be loaded ({error})") from error
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return bool(ctypes.c_int.in_dll(loaded, "locojax_uses_avx512").value)


def _library() -> pathlib.Path:
    compiler = _compiler()
    place = beside_jax_cache()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="locojax-")) if place is None else place.with_name(FOLDER)
    sources = sorted(path for path in pathlib.Path(__file__).parent.iterdir() if path.suffix in (".cc", ".h"))
    told = _run([compiler, "--version"]), jaxlib.__version__, processor(), *FLAGS, *(p.read_text() for p in sources)
    path = folder / f"kernels-{hashlib.sha256(repr(told).encode()).hexdigest()[:40]}.so"
    if path.exists():
        with contextlib.suppress(OSError):
            os.utime(path)
        return path
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, [source for source in sources if source.suffix == ".cc"], part)
        part.replace(path)
    except OSError as error:
        raise NoKernels(f"{path} can't be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return path


def _compile(compiler: str, sources: Sequence[pathlib.Path], library: pathlib.Path) -> None:
    """Sources side by side: one after another they are half a minute's work."""
    with tempfile.TemporaryDirectory(prefix="locojax-") as folder:

        def compiled(source: pathlib.Path) -> str:
            out = str(pathlib.Path(folder, f"{source.stem}.o"))
            # jax's headers count as the system's: their warnings are none of the user's.
            _run([compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), "-c", str(source), "-o", out])
            return out

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, sources))
        _run([compiler, *FLAGS, "-shared", *objects, "-o", str(library)])


def _compiler() -> str:
    named = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)
    if found is None:
        missing = f"$CXX, {named}, isn't there" if named else f"there is no C++ compiler ({', '.join(COMPILERS)})"
        raise NoCompiler(missing)
    return found


def _run(command: list[str]) -> str:
    """What it printed. Raises NoKernels, with the end of what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{command[0]} took more than {COMPILE_SECONDS:g} s") from error
    except OSError as error:
        raise NoKernels(f"{command[0]} can't be run ({error.strerror})") from error
    if done.returncode:
        end = " ".join(done.stderr.split())[-400:]
        raise NoKernels(f"{command[0]} ended with exit code {done.returncode}: {end}")
    return done.stdout
