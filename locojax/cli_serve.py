"""`locojax serve MODEL`: the Tinker server's two processes, and the supervisor over them.

    locojax serve          this terminal: checks the settings, takes the port, keeps both alive (no jax)
      python -m locojax.cli_serve engine    the model and the devices (hosts/serving.py)
      python -m locojax.cli_serve api       HTTP (server/), no jax

The supervisor holds the listening socket, so a request that comes while the API process restarts waits in it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import pathlib
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from locojax.errors import ConfigError, LocoError
from locojax.hosts import folder_lock
from locojax.hosts.interrupt import RESTART
from locojax.hosts.place import with_huge_pages
from locojax.hosts.serving import AUTHKEY_VARIABLE
from locojax.hosts.serving import main as engine_main
from locojax.hosts.serving_settings import ServeSettings
from locojax.server import auth
from locojax.server.supervisor import Child, Supervisor, end_with_parent
from locojax.types import PEFT_FILES

if TYPE_CHECKING:
    from locojax.models.tokenizer import Tokenizer
    from locojax.server.service import Service

_PACKAGES = ("fastapi", "uvicorn", "sqlalchemy", "tinker", "zstandard", "prometheus_client")
_BACKLOG = 2048
_REPORT_SECONDS = 0.2
API_STOP_SECONDS = 25.0
"""Answering what is in flight, then `ServiceSettings.keep_seconds`: a spot machine gives 30 s of notice."""
_ENGINE_OPTIONS = {
    "alpha": "LoRA's alpha of new adapters; their scale is alpha / rank",
    "max_adapters": "models that can be trained at once",
    "max_rank": "the highest rank of an adapter",
    "row_tokens": "the longest sequence to train on, in tokens; auto: the context, at most 1024",
    "rows": "rows of row_tokens in a training micro-batch",
    "compute_dtype": "of training: auto, float32 or bfloat16",
    "sample_dtype": "of sampling: auto, float32 or bfloat16",
    "kernels": "on CPU: native (C++, for bfloat16; compiled at the first start), xla, or auto: the faster one",
    "max_context": "prompt and completion together, in tokens; default: the model's own",
    "kv_bytes": "memory for keys and values of sampling; auto: what all slots can use, at most a sixth of the memory",
    "max_slots": "samples that run at once",
    "min_rows": "fewest samples decoded together, empty places included; 64: log-probs don't depend on how many",
    "turn_seconds": "seconds of decoding, about, before newcomers join the samples that run",
    "max_resident_samplers": "samplers whose adapters are on the device at once",
    "logprobs_of": "a sampled token's log-prob: of the tempered distribution (Tinker's) or the raw one",
    "sampling_share": "of the time, while there is both sampling and training to do",
    "cache_dir": "where compiled programs and converted models are kept",
}
"""Options of `locojax serve` that are settings of the engine process, by their name there."""


@dataclasses.dataclass(frozen=True)
class ApiSettings:
    """What the API process is started with, as JSON on its command line: nothing secret.

    Attributes:
      socket: the file descriptor of the listening socket.
      address: the engine's socket.
      model: as the engine loads it; its tokenizer is read from there.
      model_names, tokenizer_id, data_dir, database: see `server.service.ServiceSettings`.
      keys_file: see `server.auth.load_keys`.
      url: where clients reach the server, for the terminal.
      imports: see `server.service.ServiceSettings`.
    """

    socket: int
    address: str
    model: str
    model_names: tuple[str, ...]
    tokenizer_id: str | None
    data_dir: str
    database: str | None
    keys_file: str | None
    session_timeout: float
    url: str
    imports: tuple[tuple[str, str], ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Fills the subparser of `serve`."""
    parser.epilog = (
        "A client then needs two variables: TINKER_BASE_URL=http://127.0.0.1:8000 and TINKER_API_KEY=tml-local\n"
        f"API keys are read from --keys-file, or ${auth.KEYS_VARIABLE} (with commas between them)."
    )
    option = parser.add_argument
    option("words", metavar="MODEL", nargs="*", help="a model's directory, .gguf file or hub id, or smollm2-135m")
    option("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    option("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    data_dir = pathlib.Path("locojax-server")
    option("--data-dir", type=pathlib.Path, default=data_dir, help="for checkpoints and state (default: ./%(default)s)")
    option("--database", metavar="URL", help="an SQLAlchemy URL (default: SQLite in the data folder)")
    option("--name", help="what clients call the model (default: MODEL)")
    option("--alias", action="append", default=[], metavar="NAME", help="another name for it; repeatable")
    option("--tokenizer", metavar="ID", help="what clients load the tokenizer by, if not by the name")
    option("--keys-file", type=pathlib.Path, metavar="FILE", help="API keys, one a line (tml-...)")
    imported = "make a PEFT adapter a sampler checkpoint of this name; repeatable"
    option("--import-peft", action="append", default=[], metavar="NAME=FOLDER", help=imported)
    timeout = "a client without a heartbeat for so many seconds loses its models (default: %(default)s)"
    option("--session-timeout", type=float, default=300.0, metavar="SECONDS", help=timeout)
    defaults = {field.name: field for field in dataclasses.fields(ServeSettings)}
    for name, text in _ENGINE_OPTIONS.items():
        default = defaults[name].default
        is_count = name in ("row_tokens", "kv_bytes")
        kind = type(default) if isinstance(default, int | float) else _count_or_auto if is_count else str
        option(
            "--" + name.replace("_", "-"),
            type=int if name == "max_context" else kind,
            default=default,
            help=text + ("" if default is None else " (default: %(default)s)"),
        )
    option("--no-warm-up", action="store_true", help="be ready before the programs are compiled")
    option("--debug", action="store_true", help="show where an error was raised")
    parser.set_defaults(command=serve)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def serve(options: argparse.Namespace) -> int:
    """Runs until told to stop. Raises LocoError for what is wrong before anything has started."""
    from locojax.models import hub

    _check_installed()
    if len(options.words) != 1:
        raise ConfigError(
            "locojax serve serves one model", got=" ".join(options.words) or "none", expected="locojax serve MODEL"
        )
    model = options.words[0]
    keys = auth.load_keys(options.keys_file, os.environ)
    auth.check_bind(options.host, keys)
    engine_options = {name: getattr(options, name) for name in _ENGINE_OPTIONS}
    names = tuple(dict.fromkeys([options.name or model, *options.alias]))
    settings = ServeSettings(model, name=names[0], warm_up=not options.no_warm_up, **engine_options)
    source = hub.resolve(model)
    imports = tuple(_peft_import(text) for text in options.import_peft)
    data_dir = _data_dir(options.data_dir)
    listener = _listen(options.host, options.port)
    port = listener.getsockname()[1]
    url = f"http://{_shown_host(options.host)}:{port}"
    # Only a directory has a tokenizer that a client can load by a name; else it is laid out in the data folder.
    tokenizer = options.tokenizer or (str(_tokenizer_dir(data_dir)) if source.kind != "directory" else None)
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)

        def show(line: str) -> None:
            console.print(Text(line, style="bold"), soft_wrap=True)

        # The children inherit the lock: should this process be killed, the next server waits for them to end.
        lock = stack.enter_context(
            folder_lock.hold(data_dir, "server", remedy="Stop it, or pass another --data-dir", say=show)
        )
        # The engine's socket: a path of its own, short enough for AF_UNIX, in a folder that only this user enters.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="locojax-"))
        address = str(pathlib.Path(folder) / "engine.sock")
        environment = {AUTHKEY_VARIABLE: secrets.token_hex(32)}
        api = ApiSettings(
            listener.fileno(), address, model, names, tokenizer, str(data_dir), options.database,
            None if options.keys_file is None else str(options.keys_file.resolve()), options.session_timeout, url,
            imports,
        )  # fmt: skip
        python = (sys.executable, "-m", "locojax.cli_serve")
        children = [
            Child(
                "engine process", (*python, "engine", settings.to_json(), address),
                environment | with_huge_pages(os.environ), (lock,),
            ),  # fmt: skip
            Child(
                "API process", (*python, "api", json.dumps(dataclasses.asdict(api))), environment,
                (listener.fileno(), lock), stop_seconds=API_STOP_SECONDS,
            ),  # fmt: skip
        ]
        for line in _greeting(model, names, url, data_dir, keys):
            console.print(Text(line), soft_wrap=True)
        supervisor = Supervisor(children, say=show)
        code = supervisor.run()
    return RESTART if code == 0 and supervisor.stopped_by == signal.SIGTERM else code


def _check_installed() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The server needs the Python package {missing[0]}, which is not installed",
            remedy="Install what it needs: pip install 'locojax[server]'",
        )


def _greeting(model: str, names: Sequence[str], url: str, data_dir: pathlib.Path, keys: auth.KeyRing) -> list[str]:
    key = "tml-local" if keys.any_key else "<one of the configured keys>"
    return [
        f"Serving {model}" + (f" as {', '.join(names)}" if tuple(names) != (model,) else "") + f" at {url}",
        f"Checkpoints and state: {data_dir}",
        "A Tinker client finds it by:",
        f"  export TINKER_BASE_URL={url}",
        f"  export TINKER_API_KEY={key}",
        f"Web page: {url}/   metrics: {url}/metrics   OpenAI clients: {url}/v1",
    ]


def _peft_import(text: str) -> tuple[str, str]:
    """NAME=FOLDER -> (name, absolute folder)."""
    name, _, folder = text.partition("=")
    path = pathlib.Path(folder).expanduser().resolve()
    if not name or not folder:
        raise ConfigError("--import-peft names an adapter and its folder", got=text, expected="NAME=FOLDER")
    if missing := [file for file in PEFT_FILES if not (path / file).is_file()]:
        raise ConfigError(
            f"There is no PEFT adapter to import in {path}", got=f"no {missing[0]}", expected=" and ".join(PEFT_FILES)
        )
    return name, str(path)


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _data_dir(path: pathlib.Path) -> pathlib.Path:
    path = path.expanduser().resolve()
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"The data folder {path} can't be written", got=error.strerror, remedy="Pass --data-dir FOLDER"
        ) from error
    return path


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise ConfigError("The port is out of range", got=port, expected="0 to 65535")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"There is no address {host!r} to listen on", got=error.strerror) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} of {host} can't be listened on",
            got=error.strerror,
            remedy="Stop what uses it, or pass another --port (0: any free one)",
        ) from error
    return listener


def _tokenizer_dir(data_dir: pathlib.Path) -> pathlib.Path:
    return data_dir / "tokenizer"


def served_tokenizer(model: str, data_dir: pathlib.Path) -> Tokenizer:
    """The model's tokenizer; kept in the data folder, where reading it takes a tenth of what a GGUF file takes."""
    from locojax.models import hub
    from locojax.models.tokenizer import Tokenizer
    from locojax.models.weights import atomic_directory

    source = hub.resolve(model)
    if source.kind == "directory":
        return Tokenizer.from_directory(source.path)
    folder = _tokenizer_dir(data_dir)
    facts = source.path.stat()
    made_from = hashlib.sha256(repr((source.path.name, facts.st_size, facts.st_mtime_ns)).encode()).hexdigest()
    with contextlib.suppress(OSError):
        if (folder / "made_from").read_text() == made_from:
            return Tokenizer.from_directory(folder)
    tokenizer = hub.load_tokenizer(model)
    shutil.rmtree(folder, ignore_errors=True)
    with atomic_directory(folder) as fresh:
        tokenizer.save(fresh)
        (fresh / "made_from").write_text(made_from)
    return tokenizer


def _run_api(settings_json: str) -> int:
    from locojax.server.app import Server, create_app
    from locojax.server.service import Service, ServiceSettings

    logging.basicConfig(level=logging.INFO, format="API: %(message)s", stream=sys.stderr)
    for chatty in ("uvicorn.error", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    values = json.loads(settings_json)
    imports = tuple((name, folder) for name, folder in values["imports"])
    settings = ApiSettings(**{**values, "model_names": tuple(values["model_names"]), "imports": imports})
    # Thousands of polls wait at once, each on a connection of its own.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    data_dir = pathlib.Path(settings.data_dir)
    service = Service(
        ServiceSettings(
            data_dir=data_dir,
            database=settings.database,
            model_names=settings.model_names,
            tokenizer_id=settings.tokenizer_id,
            session_timeout=settings.session_timeout,
            imports=settings.imports,
        ),
        settings.address,
        bytes.fromhex(os.environ[AUTHKEY_VARIABLE]),
    )
    keys = auth.load_keys(None if settings.keys_file is None else pathlib.Path(settings.keys_file), os.environ)
    tokenizer = _Once(lambda: served_tokenizer(settings.model, data_dir))
    app = create_app(service, keys=keys, load_tokenizer=tokenizer)
    # Clients may ask for a GGUF file's tokenizer before anyone samples by text.
    threading.Thread(target=tokenizer.quietly, name="tokenizer", daemon=True).start()
    threading.Thread(target=_report, args=(service, settings.url), name="report", daemon=True).start()
    Server(app, timeout_graceful_shutdown=5, timeout_keep_alive=75).run(sockets=[socket.socket(fileno=settings.socket)])
    return 0


def _report(service: Service, url: str) -> None:
    """Tells the terminal when the server is ready, and when it no longer is; the engine process says what it does."""
    was_ready = False
    while True:
        ready, body = service.health()
        if ready != was_ready:
            was_ready = ready
            print(
                f"Ready: {url}" if ready else f"Not ready: {body.get('doing', 'starting')}", file=sys.stderr, flush=True
            )
        time.sleep(_REPORT_SECONDS)


class _Once:
    """A function that is called once, by whichever thread comes first; a failure is not kept."""

    def __init__(self, make: Callable[[], Tokenizer]):
        self._make = make
        self._lock = threading.Lock()
        self._made: Tokenizer | None = None

    def __call__(self) -> Tokenizer:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def quietly(self) -> None:
        """Ahead of time: what is wrong is told to whoever needs it."""
        with contextlib.suppress(LocoError, OSError):
            self()


def main(arguments: Sequence[str]) -> int:
    """A child of the supervisor: `engine SETTINGS ADDRESS` or `api SETTINGS`."""
    end_with_parent()
    role, *rest = arguments
    try:
        return engine_main(*rest) if role == "engine" else _run_api(*rest)
    except LocoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
