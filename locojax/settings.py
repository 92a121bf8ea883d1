"""Typed settings: a frozen tree of dataclasses, filled from a TOML file and `key=value` arguments.

Nothing here knows LoCoJAX's settings (`config.py` does): it reads any tree whose leaves are made by `setting`. Every
refusal names the key, where it was written, and what would have been right.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import pathlib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

from locojax.errors import ConfigError

T = TypeVar("T")


def setting(
    default: Any, doc: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A leaf of the tree: its default, what it means, and the range a number must lie in.

    Args:
      default: the value when nothing is said.
      doc: one or two sentences, with the unit; `--help` and the written TOML show it.
      low, high: inclusive bounds. above: an exclusive lower bound.
    """
    bounds = {"low": low, "high": high, "above": above}
    # Declared as Any, not Field, so that a type checker takes the class's own annotation for what an instance holds.
    return dataclasses.field(default=default, metadata={"doc": doc, **bounds})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting, found in the tree. Example: Leaf("rollout.top_p", float, 1.0, "...", {"low": None, ...})"""

    key: str
    type: Any
    default: Any
    doc: str
    bounds: dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A value someone wrote for a key. `raw` is a string if `from_argument`, else what TOML made of it.

    Example: Assignment("run.seed", "7", "argument 'run.seed=7'", from_argument=True)
    """

    key: str
    raw: Any
    where: str
    from_argument: bool = False


def leaves(tree: type, prefix: str = "") -> Iterator[Leaf]:
    """Every setting of a dataclass tree, in the order of declaration."""
    hints = typing.get_type_hints(tree)
    for field in dataclasses.fields(tree):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from leaves(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            meta = dict(field.metadata)
            yield Leaf(f"{prefix}{field.name}", kind, field.default, meta.pop("doc"), meta)


def get(config: Any, key: str) -> Any:
    """The value at a dotted key. Example: get(config, "rollout.top_p")"""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def replace(config: T, values: dict[str, Any]) -> T:
    """A new tree with the values at these dotted keys; nothing is checked. Example: replace(c, {"run.seed": 1})"""
    here: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, _, rest = key.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            here[head] = value
    for head, inner in below.items():
        here[head] = replace(getattr(config, head), inner)
    return dataclasses.replace(config, **here)  # type: ignore[type-var]


def assign(config: T, assignments: Iterable[Assignment]) -> T:
    """A new tree with every assignment applied, the last one of a key winning.

    Raises:
      ConfigError: an unknown key, a value of the wrong type or out of range.
    """
    known = {leaf.key: leaf for leaf in leaves(type(config))}
    values = {}
    for item in assignments:
        leaf = known.get(item.key)
        if leaf is None:
            raise _unknown(item, list(known))
        values[item.key] = _convert(leaf, item)
    return replace(config, values)


def _unknown(item: Assignment, keys: list[str]) -> ConfigError:
    inside = [key for key in keys if key.startswith(item.key + ".")]
    if inside:
        names = ", ".join(key.removeprefix(item.key + ".") for key in inside)
        problem = f"{item.key!r} is a section, not a setting ({item.where})"
        return ConfigError(problem, expected=f"one of its settings: {names}")
    near = difflib.get_close_matches(item.key, keys, n=1, cutoff=0.6)
    if not near:  # the right name in the wrong section, or with no section
        full = {key.rpartition(".")[2]: key for key in keys}
        near = [full[n] for n in difflib.get_close_matches(item.key.rpartition(".")[2], list(full), n=1, cutoff=0.6)]
    remedy = f"The nearest is {near[0]!r}" if near else "`locojax train --help` lists every setting"
    return ConfigError(f"Unknown setting {item.key!r} ({item.where})", remedy=remedy)


def _convert(leaf: Leaf, item: Assignment) -> Any:
    try:
        value = _parse(leaf.type, item.raw, from_text=item.from_argument)
    except ValueError:
        problem = f"Setting {leaf.key!r} has a value of the wrong type ({item.where})"
        near = difflib.get_close_matches(str(item.raw), _words(leaf.type), n=1)
        remedy = f"The nearest is {near[0]!r}" if near else None
        raise ConfigError(problem, got=repr(item.raw), expected=type_name(leaf.type), remedy=remedy) from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high, above = leaf.bounds["low"], leaf.bounds["high"], leaf.bounds["above"]
        wrong = (low is not None and value < low) or (high is not None and value > high)
        if wrong or (above is not None and value <= above) or not math.isfinite(value):
            problem = f"Setting {leaf.key!r} is out of range ({item.where})"
            raise ConfigError(problem, got=value, expected=range_name(leaf) or "a finite number")
    return value


def _options(kind: Any) -> tuple[Any, ...]:
    """The members of a union, else the type itself."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _words(kind: Any) -> list[str]:
    """The words that a type allows by name."""
    literals = [option for option in _options(kind) if typing.get_origin(option) is Literal]
    return [word for literal in literals for word in typing.get_args(literal)]


def _parse(kind: Any, raw: Any, *, from_text: bool) -> Any:
    """`raw` as `kind`. Raises ValueError if it isn't one. Words (None, Literal) are tried before open types."""
    if from_text and isinstance(raw, str) and raw[:1] in ('"', "["):  # quoted, or an array: written as TOML
        try:
            raw, from_text = tomllib.loads(f"value = {raw}")["value"], False
        except tomllib.TOMLDecodeError as error:
            raise ValueError(str(error)) from error
    for option in sorted(_options(kind), key=_is_open):
        try:
            return _parse_one(option, raw, from_text)
        except ValueError:
            continue
    raise ValueError(raw)


def _is_open(option: Any) -> bool:
    return option is not type(None) and typing.get_origin(option) is not Literal


def _parse_one(kind: Any, raw: Any, from_text: bool) -> Any:
    if kind is type(None) and from_text and raw == "none":
        return None
    if typing.get_origin(kind) is Literal and raw in typing.get_args(kind):
        return raw
    if typing.get_origin(kind) is tuple:
        items = raw.split(",") if from_text else raw
        if isinstance(items, list):
            return tuple(_parse_one(typing.get_args(kind)[0], item, from_text) for item in items)
    if kind is bool:
        if from_text and raw in ("true", "false"):
            return raw == "true"
        if isinstance(raw, bool):
            return raw
    if kind in (int, float) and not isinstance(raw, bool):
        if from_text:
            return kind(raw)
        if isinstance(raw, int) or (kind is float and isinstance(raw, float)):
            return kind(raw)
    if kind is str and isinstance(raw, str):
        return raw
    raise ValueError(raw)


def type_name(kind: Any) -> str:
    """A type in a reader's words. Example: "an integer or 'auto'"."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "none"}
    said = []
    for option in _options(kind):
        if typing.get_origin(option) is Literal:
            said += [repr(word) for word in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            said.append("an array of strings" if typing.get_args(option)[0] is str else "an array of integers")
        else:
            said.append(names[option])
    return said[0] if len(said) == 1 else ", ".join(said[:-1]) + " or " + said[-1]


def range_name(leaf: Leaf) -> str:
    """A range in a reader's words, "" if there is none. Example: "above 0, at most 1"."""
    words = {"low": "at least", "above": "above", "high": "at most"}
    return ", ".join(f"{word} {leaf.bounds[name]:g}" for name, word in words.items() if leaf.bounds[name] is not None)


def read_toml(path: pathlib.Path) -> list[Assignment]:
    """The settings a TOML file writes, with the line of each.

    Raises:
      ConfigError: no such file, or not TOML (with the line that TOML's parser names).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no configuration file {str(path)!r}", remedy="Check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration file {str(path)!r} can't be read: {error}") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", remedy="Strings need quotes in TOML") from None
    lines = _line_numbers(text)
    return [Assignment(key, raw, f"{path}, line {lines.get(key, '?')}") for key, raw in _flatten(tables)]


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _line_numbers(text: str) -> dict[str, int]:
    """Where each dotted key is written. TOML's parser doesn't say; bare keys under plain headers are all we need."""
    section, found = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = header[1] + "."
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            found.setdefault(section + key[1], number)
    return found


def read_argument(argument: str) -> Assignment:
    """One `key=value` of the command line. Raises ConfigError if there is no `=`."""
    key, equals, raw = argument.partition("=")
    if not equals or not key:
        remedy = "Example: rollout.group_size=8"
        raise ConfigError(f"Argument {argument!r} is not a setting", expected="key=value", remedy=remedy)
    return Assignment(key.strip(), raw, f"argument {argument!r}", from_argument=True)


def to_toml(config: Any) -> str:
    """The tree as TOML that `read_toml` reads back to an equal tree; None is left out (TOML has no such value)."""
    lines: list[str] = []
    section = None
    for leaf in leaves(type(config)):
        head, _, name = leaf.key.rpartition(".")
        if head != section:
            lines += ["", f"[{head}]"] if lines else [f"[{head}]"]
            section = head
        value = get(config, leaf.key)
        if value is not None:
            lines.append(f"{name} = {_toml_value(value)}")
        elif leaf.default is not None:
            # Left out, it would come back as the default.
            raise ConfigError(f"Setting {leaf.key!r} can't be written as TOML", got="none")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):  # a JSON string is a TOML basic string, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)  # ints, floats and booleans are written alike
