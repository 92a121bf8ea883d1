"""The import graph: which room may import which, and what may be imported by whom at all."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "locojax"

# A room -> the rooms it may import besides itself. BASE is open to all.
BASE = frozenset({"types", "settings", "config", "resolving", "errors"})
# Parts of the command line, imported by it alone.
COMMANDS = {"cli_launch", "cli_serve", "cli_compare", "cli_profile", "cli_doctor", "cli_cache", "cli_fit"}
ROOMS = {
    "models": set(),
    "rollout": {"models"},
    "training": {"models"},
    "rl": set(),
    "hosts": {"models", "rollout", "training", "rl"},
    "server": {"hosts"},
    "measure": {"models", "rollout", "training", "rl", "hosts", "server"},
    "cli": {"models", "rollout", "training", "rl", "hosts", "server", "measure", *COMMANDS},
    "cli_serve": {"models", "hosts", "server"},
    "cli_launch": {"hosts"},
    "cli_compare": {"measure"},
    "cli_profile": {"models", "hosts", "measure"},
    "cli_fit": {"models", "training", "measure"},
    "cli_doctor": {"hosts"},
    "cli_cache": {"models"},
    "__main__": {"cli"},
}

# Parts of rooms with a rule of their own: no jax, so that they run and are tested anywhere.
WITHOUT_JAX = (
    "rl",
    "server",
    "types",
    "settings",
    "config",
    "resolving",
    "errors",
    "rollout.request",
    "rollout.pages",
    "rollout.scheduler",
    "training.packing",
    "hosts.phases",
    "hosts.protocol",
    "hosts.metrics",
    "hosts.alarms",
    "hosts.mismatch",
    "hosts.runlog",
    "hosts.report",
    "hosts.progress",
    "hosts.writers",
    "hosts.journal",
    "hosts.startup",
    "hosts.interrupt",
    "measure.timeline",
    "measure.speedup",
    "measure.launches",
    "measure.compare",
    "measure.compare_report",
    "measure.division",
    "measure.coin",
    "measure.fit_apart",
    "measure.fit_chips",
    "cli_compare",
)
ARRAYS = {"jax", "jaxlib", "flax", "optax", "orbax"}

# A package -> the only modules that may name it.
ONLY_IN = {
    "ray": {"hosts.disaggregated", "server.launcher"},
    "torch": set(),
    "tensorflow": set(),
}


@functools.cache
def modules() -> list[str]:
    """Every module of the package, dotted, without "locojax." in front."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts))
    return found


def source(module: str) -> pathlib.Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(text: str, package: str = "locojax") -> Iterator[str]:
    """Every name that a module imports, anywhere in it, dotted and absolute; `from a import b` gives "a.b"."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def imported(module: str) -> set[str]:
    path = source(module)
    package = ".".join(["locojax", *path.relative_to(ROOT).parts[:-1]])
    return set(imports(path.read_text(encoding="utf-8"), package))


def room_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("locojax.") else ""


def test_the_reader_sees_every_kind_of_import():
    text = "import a.b\nfrom c import d\ndef f():\n    from . import e\n    from ..g import h\n    from .. import i\n"
    assert set(imports(text, "locojax.hosts")) == {"a.b", "c.d", "locojax.hosts.e", "locojax.g.h", "locojax.i"}


def test_every_room_has_a_rule():
    assert {module.split(".")[0] for module in modules()} - BASE - {"__init__"} <= set(ROOMS)


@pytest.mark.parametrize("module", modules())
def test_rooms_import_only_what_lies_below_them(module):
    room = module.split(".")[0]
    allowed = BASE | ROOMS.get(room, set()) | {room, "__version__"}
    wrong = {name for name in imported(module) if name.startswith("locojax.") and room_of(name) not in allowed}
    assert not wrong, f"locojax.{module} may not import {sorted(wrong)}"


def test_only_the_command_line_imports_measure():
    users = {module for module in modules() if any(room_of(name) == "measure" for name in imported(module))}
    assert {module.split(".")[0] for module in users} <= {"cli", "measure", *COMMANDS}


def test_rl_imports_neither_config_nor_settings():
    users = [module for module in modules() if module.split(".")[0] == "rl"]
    assert not [m for m in users if imported(m) & {"locojax.config", "locojax.settings"}]


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith(WITHOUT_JAX)])
def test_no_jax_directly_or_through_another_module(module):
    seen, todo = set(), [module]
    while todo:
        current = todo.pop()
        seen.add(current)
        names = imported(current)
        assert not {name.split(".")[0] for name in names} & ARRAYS, f"locojax.{module} gets jax through {current}"
        for name in names:
            inner = name.removeprefix("locojax.")
            for known in (inner, inner.rpartition(".")[0]):
                # A worker protocol of `hosts` may be named by `server`; what the server runs on is handed to it.
                if name.startswith("locojax.") and known in modules() and known not in seen:
                    todo.append(known)


@pytest.mark.parametrize("module", modules())
def test_packages_kept_to_one_place(module):
    tops = {name.split(".")[0] for name in imported(module)}
    for package, homes in ONLY_IN.items():
        assert package not in tops or module in homes, f"locojax.{module} may not import {package}"


def test_every_package_imported_is_declared():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in lines}
    named = {"orbax": "orbax_checkpoint", "google": "protobuf"}  # import name -> distribution, where they differ
    used = {name.split(".")[0] for module in modules() for name in imported(module)}
    third_party = used - sys.stdlib_module_names - {"locojax", "__future__"}
    missing = {name for name in third_party if named.get(name, name).lower() not in declared}
    assert not missing, f"pyproject.toml declares none of {sorted(missing)}"


def test_base_imports_no_room():
    for module in BASE:
        wrong = {name for name in imported(module) if name.startswith("locojax.") and room_of(name) not in BASE}
        assert not wrong, f"locojax.{module} may not import {sorted(wrong)}"
