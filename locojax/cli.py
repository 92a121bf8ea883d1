"""The command line: `locojax train CONFIG.toml key=value...`, `demo`, `serve MODEL`, `compare A B`.

Rooms that import jax are imported only once there is something to run, so that help and refusals come at once.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.resources
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import locojax
from locojax import cli_launch, settings
from locojax.config import Config, cache_folder, load, run_folder
from locojax.errors import ConfigError, LocoError
from locojax.hosts.interrupt import INTERRUPTED, Stopped
from locojax.hosts.place import HOST_ID, LAUNCHED_AT, NUM_HOSTS, platforms_to_try


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (the run failed), 2 (the input is at fault, or Ctrl-C), 75
    (SIGTERM: the machine is taken away, and a launcher may run it again with --resume).

    Args:
      argv: the arguments, sys.argv's if None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    errors = Console(stderr=True)
    debug = "--debug" in arguments
    if platforms := platforms_to_try(os.environ):
        os.environ["JAX_PLATFORMS"] = platforms  # inherited by every process that this one starts
    try:
        options = _parse(arguments)
        return options.command(options)
    except LocoError as error:
        if debug:
            errors.print_exception()
        _show(errors, type(error).__name__, error)
        return error.exit_code
    except Stopped as stop:
        how = "Ctrl-C" if stop.exit_code == INTERRUPTED else f"{stop}, to be restarted with --resume"
        errors.print(f"Stopped by {how}.", style="bold red")
        return stop.exit_code
    except KeyboardInterrupt:
        errors.print("Stopped by Ctrl-C.", style="bold red")
        return INTERRUPTED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    own, launched = list(arguments), list[str]()
    if own[:1] == ["launch"] and "--" in own:
        cut = own.index("--")
        own, launched = own[:cut], own[cut + 1 :]
    # argparse wants positionals together; settings may stand anywhere, so those after an option come back as unknown.
    options, late = _parser(own).parse_known_args(own)
    if unknown := [text for text in late if text.startswith("-")]:
        raise ConfigError(f"Unknown option {unknown[0]!r}", remedy="See `locojax COMMAND --help`")
    options.words += late
    if getattr(options, "controller", None):
        options.words.append(f"hosts.controller={options.controller}")
    options.launched = launched
    return options


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="locojax",
        description="Post-train language models with reinforcement learning, on JAX.",
        epilog="`locojax COMMAND --help` says more about one command.",
    )
    parser.add_argument("--version", action="version", version=f"locojax {locojax.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = _command(commands, "train", "CONFIG.toml", "post-train a model as a configuration file says")
    train.add_argument("--dry-run", action="store_true", help="show settings, parameters and memory; train nothing")
    train.add_argument("--resume", action="store_true", help="go on where the run was stopped or lost")
    train.add_argument("--restartable", action="store_true",
                       help="go on if it has begun, else begin: for launchers that repeat a command")  # fmt: skip
    train.set_defaults(command=_train, config_of=_train_config)
    demo = _command(commands, "demo", "", "watch SmolLM2-135M learn one-digit addition on this machine, in minutes")
    demo.set_defaults(command=_demo, config_of=_demo_config)
    summary = "train, demo or profile on several hosts: one process each, on this machine"
    launch = commands.add_parser("launch", help=summary,
                                 usage="locojax launch --hosts N [options] -- train CONFIG.toml [key=value ...]",
                                 description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    cli_launch.add_options(launch)
    launch.set_defaults(command=_launch, words=[])
    summary = "serve a model to Tinker clients: unmodified SDK and recipes train and sample on this machine"
    serve = commands.add_parser("serve", help=summary, usage="locojax serve MODEL [options]",
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    if "serve" in arguments:  # its options are the engine's settings, which take numpy to import
        importlib.import_module("locojax.cli_serve").add_options(serve)
    summary = "is one way to run faster than another? equal work first, then a speed-up with its uncertainty"
    compare = commands.add_parser("compare", help=summary, usage="locojax compare A B [options]",
                                  formatter_class=argparse.RawDescriptionHelpFormatter,
                                  description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    if "compare" in arguments:
        importlib.import_module("locojax.cli_compare").add_options(compare)
    summary = "what does a step's time go to? compute, network and host orchestration, on every host"
    profile = commands.add_parser("profile", help=summary,
                                  usage="locojax profile CONFIG.toml [key=value ...] [options]",
                                  formatter_class=argparse.RawDescriptionHelpFormatter,
                                  description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    if "profile" in arguments:
        module = importlib.import_module("locojax.cli_profile")
        module.add_options(profile)
        profile.set_defaults(command=functools.partial(module.run, start=_prepare), config_of=module.config_of)
    summary = "does it fit in memory? compiled for a TPU slice by its own compiler, without a TPU and without weights"
    fit = commands.add_parser("fit", help=summary, usage="locojax fit MODEL --topology SLICE --context N [options]",
                              formatter_class=argparse.RawDescriptionHelpFormatter,
                              description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    if "fit" in arguments:
        importlib.import_module("locojax.cli_fit").add_options(fit)
    summary = "what is kept from run to run, where, and how much of it; or remove it"
    cache = commands.add_parser("cache", help=summary, usage="locojax cache ls|clear [NAME ...] [key=value ...]",
                                description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    if "cache" in arguments:
        importlib.import_module("locojax.cli_cache").add_options(cache)
    summary = "was anything lost or done twice? checks what a run left, and says what is wrong"
    doctor = commands.add_parser("doctor", help=summary, usage="locojax doctor RUN [RUN ...] [--no-checkpoints]",
                                 description=summary[0].upper() + summary[1:] + ".")  # fmt: skip
    if "doctor" in arguments:
        importlib.import_module("locojax.cli_doctor").add_options(doctor)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse, with a wrong argument reported as every other error is."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}", remedy=f"See `{self.prog} --help`")


def _command(commands: argparse._SubParsersAction[_Parser], name: str, file: str, summary: str) -> _Parser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=" ".join(["locojax", name, *filter(None, [file]), "[key=value ...] [options]"]),
        epilog=settings_help(),
    )
    about = "settings, over the file's; all are listed below" if file else "settings; all are listed below"
    parser.add_argument("words", metavar="key=value", nargs="*", help=about)
    parser.add_argument("--controller", metavar="local|single",
                        help="who drives rollout: each host its own, or one head all of them (hosts.controller)")
    parser.add_argument("--debug", action="store_true", help="show where an error was raised")
    return parser


def settings_help() -> str:
    """Every setting with its type, range, default and document, by section. Example of a line pair:

    rollout.top_p=1.0               a number: above 0, at most 1
        Sample from the smallest set of tokens with this probability.
    """
    lines: list[str] = []
    section = None
    for leaf in settings.leaves(Config):
        head = leaf.key.partition(".")[0]
        if head != section:
            document = getattr(Config(), head).__doc__
            lines += ["", f"{head}: {document}"]
            section = head
        kind = settings.type_name(leaf.type)
        if limits := settings.range_name(leaf):
            kind += f": {limits}"
        lines += [f"  {leaf.key + '=' + _default(leaf):<36} {kind}", f"      {leaf.doc}"]
    return "settings, each with its default:\n" + "\n".join(lines)


def _default(leaf: settings.Leaf) -> str:
    """The default as it would be written after `key=`."""
    return "none" if leaf.default is None else str(leaf.default).lower() if leaf.type is bool else str(leaf.default)


def _launch(options: argparse.Namespace) -> int:
    cli_launch.check(options, options.launched)
    inner = _parse(options.launched)
    inner.config_of(inner)  # what is wrong is told once, not by every host
    return cli_launch.run(options, options.launched)


def _train(options: argparse.Namespace) -> int:
    config = _train_config(options)
    if options.dry_run:
        return _dry_run(config)
    return _run(config, resume=None if options.restartable and not options.resume else options.resume)


def _train_config(options: argparse.Namespace) -> Config:
    files = [text for text in options.words if "=" not in text]
    if len(files) > 1:
        problem = f"{files[1]!r} is neither a setting nor the configuration file, which is {files[0]!r}"
        raise ConfigError(problem, expected="locojax train CONFIG.toml key=value ...")
    return load(pathlib.Path(files[0]) if files else None, [text for text in options.words if "=" in text])


def _demo(options: argparse.Namespace) -> int:
    return _run(_demo_config(options), resume=False)


def _demo_config(options: argparse.Namespace) -> Config:
    with importlib.resources.as_file(importlib.resources.files("locojax") / "demo.toml") as path:
        config = load(path)
    # Every demo is a run of its own: a second one must not stumble over the first one's folder.
    now = os.environ.get(LAUNCHED_AT) or datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return load(None, [f"run.name=demo-{now}", *options.words], base=config)


def _dry_run(config: Config) -> int:
    colocated = _prepare(config)
    resolved, rows = colocated.describe(config)
    print(settings.to_toml(resolved))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _run(config: Config, *, resume: bool | None) -> int:
    from locojax.measure.timeline import Timeline

    with _resume_hint(config):
        result = _prepare(config).run(config, resume=resume, timer=Timeline())
    print(f"report: {pathlib.Path(result.folder) / 'report.html'}")
    print(result.line())
    return 0


def _prepare(config: Config) -> ModuleType:
    """The loop, with jax set up to keep its compiled programs from run to run."""
    # Set in the environment, before jax is imported, so that grader processes and other hosts' launchers inherit it.
    if config.run.cache_dir is not None or "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder(config) / "xla")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    importlib.import_module("locojax.cli_cache").trim(config)
    return importlib.import_module("locojax.hosts.colocated")


@contextlib.contextmanager
def _resume_hint(config: Config) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = run_folder(config) / "config.toml"
        # Without the file, it was stopped before there was anything to go on from.
        if kept.exists() and os.environ.get(HOST_ID, "0") == "0":
            launched = ["launch", "--hosts", os.environ[NUM_HOSTS], "--"] if LAUNCHED_AT in os.environ else []
            command = shlex.join(["locojax", *launched, "train", str(kept), "--resume"])
            Console(stderr=True).print(Text(f"To go on: {command}"), soft_wrap=True)
        raise


def _show(console: Console, title: str, error: LocoError) -> None:
    parts = [("", error.problem), ("got", error.got), ("expected", error.expected), ("", error.remedy)]
    lines = [f"{label}: {value}" if label else str(value) for label, value in parts if value is not None]
    if not console.is_terminal:  # a log is searched by line, and a frame is noise there
        console.print(Text(f"{title}: {error}"), soft_wrap=True)
        return
    console.print(Panel(Text("\n".join(lines)), title=title, title_align="left", border_style="red", style="red"))
