"""Every kind of source gives prompts; every kind of bad source is named: file, line, field."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from locojax.errors import ConfigError, DataError
from locojax.rl.datasets import Template, encode_prompts, fit_prompts, load_prompts
from locojax.rl.sources import load_source, split_held_out
from locojax.types import Prompt

ROWS = [{"question": "1+1?", "answer": 2, "level": "easy"}, {"question": "{2}+2?", "answer": 4, "level": "hard"}]
TEMPLATE = Template("Q: {question}\nA:", chat=False)


def _jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_prompts(tmp_path: Path) -> None:
    first, second = load_prompts(_jsonl(tmp_path / "sums.jsonl", ROWS), TEMPLATE)
    assert first == Prompt("sums/0", "Q: 1+1?\nA:", answer="2", meta=ROWS[0])
    assert second.text == "Q: {2}+2?\nA:"  # braces in a row are text
    assert len(load_prompts(str(tmp_path / "sums.jsonl"), TEMPLATE, max_prompts=1)) == 1


def test_a_chat_template_makes_messages(tmp_path: Path) -> None:
    template = Template("{question}", system="Be {level}.", examples=(("0+1?", "1"),))
    prompt = load_prompts(_jsonl(tmp_path / "sums.jsonl", ROWS), template)[0]
    assert prompt.messages == (
        {"role": "system", "content": "Be easy."},
        {"role": "user", "content": "0+1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "1+1?"},
    )
    assert prompt.text == "1+1?"


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": 1}\r\n\r\n{"question": oops}\n')
    with pytest.raises(DataError) as caught:
        load_prompts(str(path), TEMPLATE)
    assert str(caught.value).startswith(f"{path} line 3 is not readable as JSON. Got: Expecting value")
    assert """in '{"question": oops}'.""" in str(caught.value) and caught.value.exit_code == 2
    path.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match="bad.jsonl line 1 is not readable as JSON. Got: .*codec can't decode"):
        load_prompts(str(path), TEMPLATE)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="bad.jsonl line 1 is not an object. Got: list. Expected: {"):
        load_prompts(str(path), TEMPLATE)


def test_a_missing_field_is_named_with_the_fields_there_are(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "sums.jsonl", [*ROWS, {"question": "3+3?"}])
    expected = "There is no field 'answer' in .*sums.jsonl line 3. Got: the fields question."
    with pytest.raises(DataError, match=expected):
        load_prompts(path, TEMPLATE)
    with pytest.raises(
        DataError, match="There is no field 'problem' in .* line 1. Got: the fields question, answer, level"
    ):
        load_prompts(path, Template("{problem}"))
    assert load_prompts(path, Template("{question}", answer_field=None))[2].answer is None
    with pytest.raises(DataError, match="can't be filled from .* line 1. Got: .*no attribute 'x'"):
        load_prompts(path, Template("{question.x}"))


@pytest.mark.parametrize(
    ("text", "expected"), [("{", "can't be read"), ("{}", "without a field's name"), ("{0}", "without")]
)
def test_a_template_that_cannot_be_read_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        Template(text)
    assert "Write fields as {name}" in str(caught.value)


def test_plain_text_takes_no_chat_parts() -> None:
    with pytest.raises(ConfigError, match="belong to a chat template"):
        Template("{q}", chat=False, system="Be brief.")


def test_empty_absent_and_unknown_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for source, text in [
        (str(tmp_path / "empty.jsonl"), "empty.jsonl is empty"),
        (str(tmp_path / "absent.jsonl"), "absent.jsonl does not exist"),
        ("table.csv", "table.csv is of an unknown kind. Expected: a .jsonl or .parquet file, or hub:ORG/NAME"),
    ]:
        with pytest.raises(DataError, match=text):
            load_prompts(source, TEMPLATE)


@pytest.mark.extended
def test_parquet_rows_become_prompts(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "sums.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert [prompt.answer for prompt in load_prompts(str(path), TEMPLATE)] == ["2", "4"]
    with pytest.raises(DataError, match="There is no field 'gold' in .*sums.parquet row 1"):
        load_prompts(str(path), Template("{question}", answer_field="gold"))
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="sums.parquet is not readable as Parquet. Got: "):
        load_prompts(str(path), TEMPLATE)


@pytest.mark.parametrize(
    ("source", "module", "package"),
    [("hub:org/sums", "datasets", "datasets"), ("x.parquet", "pyarrow.parquet", "pyarrow")],
)
def test_a_missing_package_names_its_extra(
    source: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"needs the package {package}, which .* pip install 'locojax\[data\]'"):
        load_prompts(source, TEMPLATE)


def test_hub_data_sets_are_loaded_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict]:
        calls.append((name, config, split))
        if name == "org/absent":
            raise FileNotFoundError("Dataset 'org/absent' doesn't exist on the Hub.")
        return ROWS

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert load_prompts("hub:org/sums", TEMPLATE)[1].prompt_id == "org/sums/1"
    load_prompts("hub:org/sums/main", TEMPLATE, split="test")
    load_prompts("hub:squad", TEMPLATE)
    assert calls == [("org/sums", None, "train"), ("org/sums", "main", "test"), ("squad", None, "train")]
    with pytest.raises(DataError, match="org/absent .split train. can't be loaded. Got: Dataset 'org/absent'"):
        load_prompts("hub:org/absent", TEMPLATE)


def test_prompts_are_encoded_by_text_or_by_messages() -> None:
    chat = Prompt("b", "hi", messages=({"role": "user", "content": "hi"},))
    encoded = encode_prompts([Prompt("a", "abc"), chat], lambda text: [len(text)], lambda messages: [7] * len(messages))
    assert [prompt.tokens for prompt in encoded] == [(3,), (7,)]


def test_long_prompts_are_listed_or_dropped_at_load() -> None:
    prompts = [Prompt(f"p{n}", "", tokens=(1,) * n) for n in (0, 15, 16, 17)]
    fitting, dropped = fit_prompts(prompts, 16, "drop")
    assert [each.prompt_id for each in fitting] == ["p15", "p16"]
    assert [each.prompt_id for each in dropped] == ["p0", "p17"]
    with pytest.raises(DataError) as caught:
        fit_prompts(prompts, 16)
    assert str(caught.value) == (
        "2 of 4 prompts don't fit. Got: p0 (0 tokens), p17 (17 tokens). Expected: 1 to 16 tokens. "
        "Allow longer prompts, or drop those that don't fit."
    )
    with pytest.raises(DataError, match="and 2 more. Expected: 1 to 1 tokens. Allow longer prompts"):
        fit_prompts([Prompt(f"p{n}", "", tokens=(1, 2)) for n in range(7)], 1, "drop")


def test_a_source_needs_template_and_reward_only_where_nothing_else_says_them(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "sums.jsonl", [{"question": f"{n}?", "answer": n} for n in range(20)])
    with pytest.raises(ConfigError, match="sums.jsonl needs a template"):
        load_source(path, reward="exact")
    with pytest.raises(ConfigError, match="sums.jsonl needs a reward"):
        load_source(path, template=TEMPLATE)
    task = load_source(path, template=TEMPLATE, reward="exact", held_out_share=0.25, num_train=4)
    assert len(task.train) == 4 and len(task.held_out) == 5 and task.reward == "exact"
    assert load_source(path, template=TEMPLATE, reward="exact", held_out_share=0.25, num_train=4) == task
    apart = load_source(path, template=TEMPLATE, reward="exact", held_out=path, num_held_out=3)
    assert len(apart.train) == 20
    assert [each.prompt_id for each in apart.held_out] == [f"held_out/sums/{n}" for n in range(3)]
    built_in = load_source("addition", num_held_out=3, reward="last_number")
    assert len(built_in.held_out) == 3 and built_in.reward == "last_number"
    with pytest.raises(ConfigError, match="sums.jsonl needs a template"):
        load_source("addition", held_out=path)


def test_prompts_with_one_text_stay_on_one_side() -> None:
    prompts = [Prompt(f"{n}", f"text {n % 7}") for n in range(21)]
    train, held_out = split_held_out(prompts, 0.3, seed=1)
    assert len(held_out) == 6 and len(train) == 15
    assert not {each.text for each in train} & {each.text for each in held_out}
    assert split_held_out(prompts, 0.0, seed=1) == (prompts, [])
    with pytest.raises(DataError, match="Nothing is left to train on"):
        split_held_out(prompts[:1], 0.1, seed=1)
