"""Compiled programs kept on disk, found by what they are made of: a later process neither traces nor lowers them.

jax's own persistent cache spares a process XLA's part of the work. What is left, tracing and lowering in Python, takes
0.5 to 4 s a program, and a server needs about twenty before it can answer. An entry here is a whole executable under a
key of everything that it depends on: its arguments' shapes, the static settings, this package's source, jax, the
machine. A change of any of them is another key. An entry has a second name, by what was lowered: a source that has
changed elsewhere lowers to the same, which is then not compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import pickle
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from locojax.models.platform import processor

log = logging.getLogger(__name__)

FOLDER = "programs"
MAX_AGE_DAYS = 30.0
"""Entries that no process has used for so long are removed when one is added."""

BUILT, FOUND = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
"""jax's events: of a program that it didn't have in memory, and, besides, of one that its own cache had."""

UNREADABLE = (
    pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, MemoryError, OSError,
    TypeError, ValueError, jax.errors.JaxRuntimeError,
)  # fmt: skip
"""What reading a torn or foreign file raises: the errors that pickle's documentation names, and XLA's."""

Lower = Callable[[], Any]
"""Makes a jax.stages.Lowered."""


class Program:
    """A program that is being compiled or read, or has been.

    Attributes:
      out_info: the shapes of what it returns.
      kept: an earlier process kept it, so that it is only to be read.
      compiled: done when it is there.
    """

    def __init__(self, out_info: Any, make: Callable[[], Any], *, kept: bool):
        self.out_info, self.kept = out_info, kept
        self.compiled: Future[Any] = Future()
        self._make: Callable[[], Any] | None = make
        self._lock = threading.Lock()

    def make(self) -> None:
        """Returns when it is there, or its failure is: made here, if no other thread has begun to."""
        with self._lock:
            if self._make is None:
                return
            try:
                self.compiled.set_result(self._make())
            # As executors do: tracing runs any code, nobody hears what the thread raises, and `result` raises it again.
            except Exception as error:
                self.compiled.set_exception(error)
            self._make = None  # what it was made from takes megabytes

    def result(self) -> Any:
        """The executable, at once if need be: those begun before it aren't waited for. Raises what went wrong."""
        self.make()
        return self.compiled.result()


class Executables:
    """Compiles programs of one device, or reads them from `folder`, in a background thread.

    Args:
      folder: None: nothing is kept.

    Attributes:
      leisure: while it is cleared, the thread begins with no other program. Reading one takes up to 6 s of a core, of
        which XLA looks for each of a thousand fusions among all instructions; whoever has work to do clears it.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder
        self.leisure = threading.Event()
        self.leisure.set()
        self._lock = threading.Lock()
        self._queue: deque[Program] = deque()
        self._works = False
        self._making: Program | None = None  # the last that the thread took
        self._started: list[Program] = []
        self._here: tuple[str, ...] | None = None  # what every key has in it, and the source's digest: made when first
        self._source = ""  # asked for

    def begin(self, name: str, lower: Lower, args: tuple[Any, ...], static: Mapping[str, Any]) -> Program:
        """Begins to make a program for these arguments, which may be shapes alone.

        Args:
          lower: traces and lowers it for `args`; called if it isn't on disk.
          static: everything that it depends on besides the arguments' shapes and this package's source, by name; values
            whose repr tells them apart.
        """
        path = self._path(name, args, static)
        entry = None if path is None else _read(path)
        if path is not None and entry is not None:
            out_info = entry["out_info"]
            program = Program(out_info, partial(self._load, path, lower, out_info), kept=True)
        else:
            lowered = lower()
            out_info = jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype), lowered.out_info)
            names = self._names(path, lowered)
            program = Program(out_info, partial(_compile, lowered, out_info, names), kept=False)
        self._started.append(program)
        self._enqueue(program)
        return program

    @property
    def num_behind(self) -> int:
        """Programs that are yet to be compiled or read."""
        with self._lock:
            left = [*self._queue, self._making]
        return sum(program is not None and not program.compiled.done() for program in left)

    def later(self, make: Callable[[], Any]) -> Program:
        """Has the thread call `make` too, after what has been begun; `wait` doesn't wait for it."""
        program = Program(None, make, kept=False)
        self._enqueue(program)
        return program

    def _enqueue(self, program: Program) -> None:
        with self._lock:
            self._queue.append(program)
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="compile").start()

    def wait(self, urgent: Collection[Program] | None = None, spare: Collection[Program] = ()) -> None:
        """Returns when everything begun is there, but for `spare`; raises what went wrong. The calling thread takes
        its share of it.

        With `urgent`, what is only to be read from disk isn't waited for unless it is among these: it goes on behind,
        in the order in which it was begun, and whoever calls a program doesn't wait for the others.
        """
        started, self._started = [program for program in self._started if program not in spare], []
        wanted = [program for program in started if urgent is None or not program.kept or program in urgent]
        while (program := self._take(wanted)) is not None:
            program.make()
        for program in wanted:
            program.result()

    def _take(self, among: Collection[Program]) -> Program | None:
        """The first of these that nobody has taken."""
        with self._lock:
            found = next((program for program in self._queue if program in among), None)
            if found is not None:
                self._queue.remove(found)
            return found

    def _work(self) -> None:
        """The thread: ends when nothing is left to do, or with the process."""
        while True:
            with self._lock:
                if not self._queue or not threading.main_thread().is_alive():
                    self._works = False
                    return
            if not self.leisure.wait(0.2):
                continue
            with self._lock:
                program = self._making = self._queue.popleft() if self._queue else None
            if program is not None:
                program.make()

    def _path(self, name: str, args: tuple[Any, ...], static: Mapping[str, Any]) -> pathlib.Path | None:
        if self._folder is None:
            return None
        leaves, tree = jax.tree.flatten(args)
        shapes = [(tuple(leaf.shape), str(leaf.dtype), bool(getattr(leaf, "weak_type", False))) for leaf in leaves]
        told = repr(sorted(static.items()))
        if " at 0x" in told:
            raise ValueError(f"A static setting of program {name!r} can't be told from another by its repr: {told}")
        self._here = self._here or _machine()
        self._source = self._source or _source()
        return self._folder / f"{name}-{_digest(self._here, self._source, name, told, str(tree), shapes)}"

    def _names(self, path: pathlib.Path | None, lowered: Any) -> tuple[pathlib.Path, pathlib.Path] | None:
        """An entry's path, and its second name: by what the compiler is given, constants and all, but not the places
        in the source that it came from."""
        if path is None:
            return None
        same = _digest(self._here, lowered.as_text(), str(lowered.in_tree), str(lowered.out_tree))
        return path, path.with_name(f"{path.name.rpartition('-')[0]}-{same}")

    def _load(self, path: pathlib.Path, lower: Lower, out_info: Any) -> Any:
        entry = _read(path)  # again: until it is needed, only its place is kept in memory
        try:
            loaded = None if entry is None else _loaded(entry)
        except UNREADABLE as error:
            log.warning("the compiled program %s can't be loaded and is made again: %s", path.name, error)
            loaded = None
        if loaded is None:
            lowered = lower()
            return _compile(lowered, out_info, self._names(path, lowered))
        with contextlib.suppress(OSError):
            os.utime(path)
        return loaded


def beside_jax_cache() -> pathlib.Path | None:
    """Where programs are kept: in jax's persistent cache, if it has a local one and this is a run of one process."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or jax.process_count() > 1:
        return None
    return pathlib.Path(folder) / FOLDER


def _compile(lowered: Any, out_info: Any, names: tuple[pathlib.Path, pathlib.Path] | None) -> Any:
    """The executable; `names`: those that its entry has, or is given."""
    if names is not None and (entry := _read(names[1])) is not None:
        with contextlib.suppress(*UNREADABLE):  # then it is compiled
            compiled = _loaded(entry)
            _link(names[1], names[0])
            return compiled
    events: set[str] = set()
    here = threading.get_ident()

    def happened(event: str, *_: Any, **__: Any) -> None:
        if threading.get_ident() == here:
            events.add(event)

    jax.monitoring.register_event_listener(happened)
    jax.monitoring.register_event_duration_secs_listener(happened)
    try:
        compiled = lowered.compile()
    finally:
        jax.monitoring.unregister_event_listener(happened)
        jax.monitoring.unregister_event_duration_listener(happened)
    # Only what XLA has just compiled can be kept: on CPU, it writes one that it was given without its code.
    if names is not None and BUILT in events and FOUND not in events:
        _keep(compiled, out_info, names)
    return compiled


def _keep(compiled: Any, out_info: Any, names: tuple[pathlib.Path, pathlib.Path]) -> None:
    try:
        payload, in_tree, out_tree = serialize_executable.serialize(compiled)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # on CPU, XLA can't write out a sort of plain numbers
        log.info("the compiled program %s isn't kept: %s", names[0].name, error)
        return
    entry = {"out_info": out_info, "payload": payload, "in_tree": in_tree, "out_tree": out_tree}
    if _write(names[1], entry):
        _link(names[1], names[0])


def _link(path: pathlib.Path, name: pathlib.Path) -> None:
    """A second name of an entry, or where there are no hard links a copy; none of them is worth more than a line."""
    part = name.with_name(f"{name.name}.{os.getpid()}.part")
    try:
        try:
            os.link(path, part)
        except OSError:
            shutil.copyfile(path, part)
        part.replace(name)
    except OSError as error:
        log.warning("the compiled program %s isn't kept: %s", name.name, error)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _loaded(entry: Mapping[str, Any]) -> Any:
    return serialize_executable.deserialize_and_load(
        entry["payload"], entry["in_tree"], entry["out_tree"], execution_devices=jax.devices()[:1]
    )


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            entry = pickle.load(file)
        return {name: entry[name] for name in ("out_info", "payload", "in_tree", "out_tree")}
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        log.warning("the compiled program %s can't be read and is made again: %s", path.name, error)
        return None


def _write(path: pathlib.Path, entry: Mapping[str, Any]) -> bool:
    """Whether it could. Atomic; a full or read-only disk costs the next process its time, this one a line of log."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            pickle.dump(entry, file)
        part.replace(path)
        _remove_old(path.parent)
        return True
    except OSError as error:
        log.warning("the compiled program %s isn't kept: %s", path.name, error)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return False


def _remove_old(folder: pathlib.Path) -> None:
    oldest = time.time() - MAX_AGE_DAYS * 86400
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _machine() -> tuple[str, ...]:
    """What every program of this process depends on."""
    device = jax.devices()[0]
    config = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, jax.config.jax_debug_nans)
    return (
        jax.__version__, jaxlib.__version__, device.platform, device.device_kind, str(jax.device_count()),
        str(config), os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", ""), processor(),
    )  # fmt: skip


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


def _source() -> str:
    """A digest of this package's Python files."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
