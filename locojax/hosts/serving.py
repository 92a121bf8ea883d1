"""An engine process: one base model, its tenants' adapters and their samplers, behind `hosts.protocol`.

    main         a process's entry: settings as JSON, the connection's key from the environment
    run_engine   listens, loads, compiles, then runs the loop of `serving_loop` until Shutdown or SIGTERM

A front end may connect as soon as the process runs: it is told of the progress, and of `EngineInfo` once there is a
model to ask. Nothing here imports jax before `run_engine` is called, so that `main` can set it up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping

from locojax.config import cache_folder
from locojax.errors import ConfigError, LocoError
from locojax.hosts.protocol import Progress, Shutdown
from locojax.hosts.serving_clock import PhaseClock
from locojax.hosts.serving_link import Link
from locojax.hosts.serving_settings import ServeSettings

log = logging.getLogger(__name__)

AUTHKEY_VARIABLE = "LOCOJAX_ENGINE_AUTHKEY"
"""The environment variable with the connection's key, in hexadecimal digits."""


def main(settings_json: str, address: str) -> int:
    """Runs an engine process; returns its exit code: 0 after Shutdown or SIGTERM, 2 when the input is at fault, else 1.

    Args:
      settings_json: of `ServeSettings.to_json`.
      address: a path for the Unix socket, at most about 100 bytes long.
    """
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    for chatty in ("jax", "absl", "orbax"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        settings = ServeSettings.from_json(settings_json)
        authkey = _authkey(os.environ)
        cache = cache_folder() if settings.cache_dir is None else pathlib.Path(settings.cache_dir)
        # Read by jax when it is first imported: a restart then finds its programs compiled.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "xla"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        run_engine(settings, address, authkey)
    except LocoError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    except RuntimeError:
        log.exception("the engine can't go on")
        return 1
    return 0


def run_engine(settings: ServeSettings, address: str, authkey: bytes) -> None:
    """Serves until Shutdown, or SIGTERM or SIGINT where this is the main thread; by then every operation is answered.

    Raises:
      ConfigError, ModelError: it can't start with these settings.
      RuntimeError: the devices failed in a way that only a new process can mend.
    """
    clock = PhaseClock()
    link = Link(address, authkey)
    with _signals(link), contextlib.closing(link):

        def progress(doing: str) -> None:
            log.info("%s", doing)
            link.tell(Progress(doing, clock.elapsed))

        progress("starting jax")
        from locojax.hosts.serving_compilations import CompilationCounter  # these import jax
        from locojax.hosts.serving_start import start

        with CompilationCounter() as counter:
            loop = start(settings, link, clock, counter, progress)
            log.info("ready after %.1f s", clock.elapsed)
            loop.run()


def _authkey(environment: Mapping[str, str]) -> bytes:
    text = environment.get(AUTHKEY_VARIABLE, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not key:
        raise ConfigError(
            "The engine has no key for its connection",
            got=f"{AUTHKEY_VARIABLE} {'is not hexadecimal' if text else 'is not set'}",
            remedy="Start it with `locojax serve`, which makes one",
        )
    return key


@contextlib.contextmanager
def _signals(link: Link) -> Iterator[None]:
    """SIGTERM and SIGINT become Shutdown; before there is a loop to take it, they end the process at once.

    A thread of its own hears of them. The main thread is XLA's for minutes, in which no handler runs, and what a
    handler raises there is lost if it happens to run inside a callback, such as jax's at each garbage collection.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    hears, told = socket.socketpair()
    told.setblocking(False)
    taken = (signal.SIGTERM, signal.SIGINT)

    def hear() -> None:
        while number := hears.recv(1):  # what Python writes for a signal, in whichever thread: its number
            if number[0] not in taken:
                continue
            if not link.is_ready:
                link.close()
                os._exit(0)
            link.inbox.put(Shutdown())

    before = {number: signal.signal(number, lambda *_: None) for number in taken}
    descriptor = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=hear, name="signals", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        told.close()
        listener.join()
        hears.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
