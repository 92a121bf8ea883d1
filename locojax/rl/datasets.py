"""Data sets -> prompts: JSONL and Parquet files, Hugging Face hub data sets, each row through a template."""

from __future__ import annotations

import dataclasses
import importlib
import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from locojax.errors import ConfigError, DataError
from locojax.types import Prompt

HUB_PREFIX = "hub:"
NUM_LISTED = 5


@dataclasses.dataclass(frozen=True)
class Template:
    """How a row becomes a prompt. `text`, `system` and `answer` name the row's fields in braces: "{question}".

    Args:
      text: the prompt; in a chat, the last user message.
      answer_field: the field with the right answer; None if rows have none (the reward then must not need it).
      chat: send messages through the model's chat template, instead of plain text.
      system: system message of a chat.
      examples: (user, assistant) turns before the question: the few shots, the same for every prompt.
    Example: Template("Question: {question}\\nAnswer:", answer_field="answer", chat=False)
    """

    text: str
    answer_field: str | None = "answer"
    chat: bool = True
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError when the template's braces can't be read, or plain text is given chat parts."""
        for text in (self.text, self.system or ""):
            try:
                fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
            except ValueError as error:
                raise ConfigError(
                    "The prompt template can't be read", got=f"{text!r}: {error}", remedy=_BRACES
                ) from None
            if any(not field or field[0].isdigit() for field in fields):
                raise ConfigError(
                    "The prompt template has braces without a field's name", got=repr(text), remedy=_BRACES
                )
        if not self.chat and (self.system is not None or self.examples):
            raise ConfigError(
                "A system message and examples belong to a chat template", remedy="Set chat, or drop them"
            )

    def prompt(self, prompt_id: str, row: Mapping[str, Any], where: str) -> Prompt:
        """Fill the template from one row. `where` names the row in a DataError about a field that it lacks."""
        text = _fill(self.text, row, where)
        answer = None
        if self.answer_field is not None:
            if self.answer_field not in row:
                raise _missing_field(self.answer_field, row, where)
            answer = str(row[self.answer_field])
        messages = None
        if self.chat:
            system = [] if self.system is None else [{"role": "system", "content": _fill(self.system, row, where)}]
            shots = [
                {"role": role, "content": content}
                for example in self.examples
                for role, content in zip(("user", "assistant"), example, strict=True)
            ]
            messages = (*system, *shots, {"role": "user", "content": text})
        return Prompt(prompt_id, text, answer=answer, meta=dict(row), messages=messages)


_BRACES = "Write fields as {name}, and a brace that is meant as one twice: {{ }}"


def load_prompts(
    source: str, template: Template, *, split: str = "train", max_prompts: int | None = None
) -> list[Prompt]:
    """Prompts from a `.jsonl` or `.parquet` file or a hub data set, "hub:ORG/NAME" ("hub:ORG/NAME/CONFIG"), in order.

    A prompt's id is the source's name and the row's number; its meta is the row. `split` is for hub data sets only.
    Raises DataError for a source that can't be read (naming the line), is empty, or whose rows lack a field.
    """
    prompts = []
    name = source.removeprefix(HUB_PREFIX) if source.startswith(HUB_PREFIX) else Path(source).stem
    for number, (where, row) in enumerate(_rows(source, split)):
        if max_prompts is not None and number == max_prompts:
            break
        prompts.append(template.prompt(f"{name}/{number}", row, where))
    if not prompts:
        raise DataError(f"The data set {source} is empty", remedy="Give it at least one row")
    return prompts


def _rows(source: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if source.startswith(HUB_PREFIX):
        return _hub_rows(source.removeprefix(HUB_PREFIX), split)
    readers = {".jsonl": jsonl_rows, ".parquet": _parquet_rows}
    if Path(source).suffix not in readers:
        raise DataError(
            f"The data set {source} is of an unknown kind",
            expected="a .jsonl or .parquet file, or hub:ORG/NAME",
        )
    if not Path(source).is_file():
        raise DataError(f"The data set {source} does not exist", remedy="Check the path")
    return readers[Path(source).suffix](source)


def jsonl_rows(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("file line 3", row) of each line of a JSONL file; blank lines are passed over. DataError names a bad line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))  # Windows editors start a file with a mark
            except ValueError as error:  # bad JSON, or bad UTF-8
                shown = line[:60].decode(errors="replace").strip()
                raise DataError(f"{where} is not readable as JSON", got=f"{error}, in {shown!r}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where} is not an object", got=type(row).__name__, expected='{"field": value, ...}')
            yield where, row


def _parquet_rows(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    parquet = _import_extra("pyarrow.parquet", "pyarrow", f"Reading {path}")
    arrow = _import_extra("pyarrow", "pyarrow", f"Reading {path}")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except arrow.ArrowException as error:
        raise DataError(f"{path} is not readable as Parquet", got=str(error).rstrip(".")) from error


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    hub = _import_extra("datasets", "datasets", f"Loading the hub data set {name}")
    owner, _, rest = name.partition("/")
    repository, _, config = rest.partition("/")
    try:
        rows = hub.load_dataset(f"{owner}/{repository}" if repository else owner, config or None, split=split)
    except (OSError, ValueError) as error:  # not found, no network, no such config or split
        raise DataError(
            f"The hub data set {name} (split {split}) can't be loaded",
            got=str(error).rstrip("."),
            remedy="Check its name, configuration (hub:ORG/NAME/CONFIG), split, and that the hub can be reached",
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{name} split {split} row {number}", row


def _import_extra(module: str, package: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{purpose} needs the package {package}, which is not installed", remedy="pip install 'locojax[data]'"
        ) from error


def _fill(text: str, row: Mapping[str, Any], where: str) -> str:
    try:
        return text.format_map(row)
    except KeyError as error:
        raise _missing_field(str(error.args[0]), row, where) from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:  # {field.attribute}, {field[3]}, {field:spec}
        raise DataError(f"The template {text!r} can't be filled from {where}", got=str(error)) from None


def _missing_field(field: str, row: Mapping[str, Any], where: str) -> DataError:
    return DataError(
        f"There is no field '{field}' in {where}",
        got=f"the fields {', '.join(row) or '(none)'}",
        remedy="Name one of these fields in the template or as the answer field",
    )


def encode_prompts(
    prompts: Sequence[Prompt],
    encode: Callable[[str], Sequence[int]],
    encode_chat: Callable[[Sequence[Mapping[str, str]]], Sequence[int]],
) -> list[Prompt]:
    """The prompts with `tokens` filled: by the chat template's encoder where there are messages, else from the text."""
    return [
        dataclasses.replace(
            each, tokens=tuple(encode(each.text) if each.messages is None else encode_chat(each.messages))
        )
        for each in prompts
    ]


def fit_prompts(
    prompts: Sequence[Prompt], max_prompt_tokens: int, policy: Literal["refuse", "drop"] = "refuse"
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts that fit, prompts dropped). Done once, at load, so that no long prompt turns up within a run.

    Raises DataError listing the too long and the empty ones under "refuse", and under "drop" if none is left.
    """
    fitting = [each for each in prompts if 0 < len(each.tokens) <= max_prompt_tokens]
    rest = [each for each in prompts if not 0 < len(each.tokens) <= max_prompt_tokens]
    if rest and (policy == "refuse" or not fitting):
        listed = ", ".join(f"{each.prompt_id} ({len(each.tokens)} tokens)" for each in rest[:NUM_LISTED])
        more = f" and {len(rest) - NUM_LISTED} more" if len(rest) > NUM_LISTED else ""
        raise DataError(
            f"{len(rest)} of {len(prompts)} prompts don't fit",
            got=listed + more,
            expected=f"1 to {max_prompt_tokens} tokens",
            remedy="Allow longer prompts, or drop those that don't fit" if fitting else "Allow longer prompts",
        )
    return fitting, rest
