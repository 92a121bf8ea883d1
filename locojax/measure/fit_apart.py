"""A generator run in a process of its own, so that a compiler's crash is a result and not the caller's end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from locojax.errors import LocoError

TPU_COMPILER = {
    "JAX_PLATFORMS": "cpu",  # nothing runs but the compiler
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is compiled for a TPU that isn't there can't be read back
    "TPU_SKIP_MDS_QUERY": "1",  # there is no machine's metadata server to ask
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU to be locked
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""What libtpu must find in the environment, before it is loaded, to compile where there is no TPU."""

Begin = Callable[[str, tuple[str, ...]], None]


def run(
    steps: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    take: Callable[[Any], None],
    say: Callable[[str], None],
) -> tuple[str, tuple[str, ...], str] | None:
    """Calls `take` with everything that steps(*arguments, begin) yields in a child process.

    `begin(name, rest)` tells of what comes next. Returns None, or, if the child died, (name, rest) of what it was at,
    and its last words.

    Raises:
      LocoError: what `steps` raised, or the child died before it began anything.
      RuntimeError: `steps` raised anything else; holds the traceback.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as words:
        child = context.Process(target=_serve, args=(theirs, words.name, steps, arguments), daemon=True)
        child.start()
        theirs.close()
        try:
            at = _received(ours, take, say)
        finally:
            ours.close()
            child.join(timeout=1.0)
            if child.is_alive():
                child.kill()
                child.join()
        if at is None:
            return None
        if not at[0]:
            raise LocoError("The process that compiles ended early", got=_last_words(words.read()))
        return (*at, _last_words(words.read()))


def _received(
    pipe: multiprocessing.connection.Connection, take: Callable[[Any], None], say: Callable[[str], None]
) -> tuple[str, tuple[str, ...]] | None:
    """Handles what the child sends. None when it is done; what it was at, if it ends before; ("", ()) if nothing."""
    at: tuple[str, tuple[str, ...]] = ("", ())
    while True:
        try:
            kind, value = pipe.recv()
        except EOFError:
            return at
        if kind == "begin":
            at = value
            say(f"compiling {value[0]}")
        elif kind == "yield":
            take(value)
        elif kind == "raise":
            raise value
        else:
            return None


def _last_words(text: str) -> str:
    """The line that says why: of a failed check if there is one (glog begins it with F), else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F") and "] " in line]
    return (fatal[0].split("] ", 1)[1] if fatal else lines[-1] if lines else "no word why")[:300]


def _serve(
    pipe: multiprocessing.connection.Connection,
    words: str,
    steps: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(TPU_COMPILER)
    # The compiler writes there what nobody asked, and when it dies, why.
    with open(words, "w") as file:
        os.dup2(file.fileno(), 2)

    def begin(name: str, rest: tuple[str, ...]) -> None:
        pipe.send(("begin", (name, rest)))

    try:
        for result in steps(*arguments, begin):
            pipe.send(("yield", result))
    except LocoError as error:
        pipe.send(("raise", error))
    except Exception:  # a bug here: this process has no screen any more, so its trace goes to the one that has
        pipe.send(("raise", RuntimeError(traceback.format_exc())))
    else:
        pipe.send(("done", None))
