"""C29: a next turn's prompt starts with the sampled ids, whatever their text would encode to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from locojax.errors import DataError
from locojax.rl.conversation import Conversation
from locojax.types import Completion

VOCABULARY = ["<u>", "<a>", "</s>", "\n", "hello", "he", "llo", "hi", "and?"]


def _encode(text: str) -> list[int]:
    """Greedy longest match, so that "hello" is one token although "he", "llo" exist."""
    ids = []
    while text:
        piece = next(piece for piece in sorted(VOCABULARY, key=len, reverse=True) if text.startswith(piece))
        ids.append(VOCABULARY.index(piece))
        text = text.removeprefix(piece)
    return ids


def _render(messages: Sequence[Mapping[str, str]]) -> str:
    turns = [f"{'<a>' if each['role'] == 'assistant' else '<u>'}{each['content']}</s>\n" for each in messages]
    return "".join(turns) + "<a>"


def _decode(ids: Sequence[int]) -> str:
    return "".join(VOCABULARY[each] for each in ids)


def _completion(*pieces: str) -> Completion:
    ids = tuple(VOCABULARY.index(piece) for piece in pieces)
    return Completion(0, ids, -np.arange(1.0, len(ids) + 1, dtype=np.float32), "".join(pieces), "stop", None, 0)


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_c29_the_next_prompt_starts_with_the_sampled_ids() -> None:
    start = Conversation.start(_user("hi"), _render, _encode)
    completion = _completion("he", "llo", "</s>")
    assert _encode(completion.text) != list(completion.tokens)
    turn2 = start.sampled(completion, stop_text="</s>").reply(_user("and?"), _render, _encode)
    assert turn2.tokens[: len(start.tokens) + 3] == start.tokens + completion.tokens
    assert _decode(turn2.tokens) == "<u>hi</s>\n<a>hello</s>\n<u>and?</s>\n<a>"  # the stop marker once
    assert turn2.messages[1] == {"role": "assistant", "content": "hello"}


def test_a_truncated_turn_is_closed_by_the_template() -> None:
    turn = Conversation.start(_user("hi"), _render, _encode).sampled(_completion("he"))
    assert _decode(turn.reply(_user("and?"), _render, _encode).tokens) == "<u>hi</s>\n<a>he</s>\n<u>and?</s>\n<a>"


def test_only_sampled_tokens_of_any_turn_are_trained_on() -> None:
    turn = Conversation.start(_user("hi"), _render, _encode).sampled(_completion("he", "llo", "</s>"), "</s>")
    turn = turn.reply(_user("and?"), _render, _encode).sampled(_completion("hello", "</s>"), "</s>")
    datum = turn.datum(0.5)
    trained = datum.inputs["weights"] == 1
    assert _decode(datum.inputs["target_tokens"][trained].tolist()) == "hello</s>hello</s>"
    np.testing.assert_array_equal(datum.inputs["logprobs"][trained], [-1, -2, -3, -1, -2])
    assert set(datum.inputs["advantages"][~trained].tolist()) == {0.0}


def test_misuse_is_refused() -> None:
    start = Conversation.start(_user("hi"), _render, _encode)
    with pytest.raises(DataError, match="A reply needs a sampled turn to reply to"):
        start.reply(_user("and?"), _render, _encode)
    with pytest.raises(DataError, match="leaves out what the assistant said"):
        start.sampled(_completion("he")).reply(_user("and?"), lambda messages: "<u>", _encode)
