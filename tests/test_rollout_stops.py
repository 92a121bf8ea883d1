"""Where a completion ends: stop strings across token borders and inside multi-byte characters."""

import numpy as np
from rollout_models import Bytes

from locojax.rollout.request import Sample, StopRule, end_of_match
from locojax.types import SampleRequest, SamplingParams

PIECES = [b"", b"a", b"b", b"ab", b"\xe2\x82", b"\xac", b"\xe2", b"\x82\xac!", b"STO", b"P it"]


class Pieces(Bytes):
    eos_ids = (0,)

    def token_bytes(self, id):
        return PIECES[id]


def sample(stop, max_tokens=20):
    request = SampleRequest("r", (1,), SamplingParams(stop=stop))
    return Sample(request, 0, np.zeros(2, np.uint32), StopRule.of(stop, (0,)), max_tokens, request.prompt)


def feed(stop, tokens, cuts=(100,), max_tokens=20):
    """Appends tokens in pieces of these lengths; what was kept, and why it ended."""
    out, start = sample(stop, max_tokens), 0
    for length in [*cuts, 100]:
        piece = tokens[start : start + length]
        out.append(piece, [0.0] * len(piece), Pieces())
        start += length
    return out.tokens, out.stop_reason, out.stopped_by


def test_a_stop_string_across_token_borders_ends_at_the_token_that_completes_it():
    tokens = [1, 8, 9, 2, 2]  # a|STO|P it|b|b
    for cuts in ((1, 1, 1, 1), (2, 2), (3,), (5,)):
        assert feed(("STOP",), tokens, cuts) == ([1, 8, 9], "stop", "STOP")


def test_a_stop_string_of_a_character_that_tokens_split():
    assert feed(("€",), [1, 4, 5, 1]) == ([1, 4, 5], "stop", "€")
    assert feed("€", [6, 7, 1]) == ([6, 7], "stop", "€")
    assert feed(("€",), [6, 1, 5]) == ([6, 1, 5], None, None)


def test_the_earliest_match_counts():
    assert feed(("abb", "ba"), [1, 2, 1, 2, 2]) == ([1, 2, 1], "stop", "ba")
    assert feed(("b", "ab"), [3]) == ([3], "stop", "b")
    assert end_of_match(b"xxab", 2, [b"xa"]) == (3, b"xa")
    assert end_of_match(b"xxab", 3, [b"xa"]) is None, "that match was complete before"


def test_ids_and_lengths():
    assert feed(None, [1, 0, 1]) == ([1, 0], "stop", 0)
    assert feed((), [1, 0, 1], max_tokens=3) == ([1, 0, 1], "length", None)
    assert feed(("zz",), [1, 0, 1]) == ([1, 0], "stop", 0)
    assert feed((2,), [1, 2, 1]) == ([1, 2], "stop", 2)
    assert feed((2,), [1, 0, 1]) == ([1, 0], "stop", 0)
    assert feed(None, [1, 0], max_tokens=2) == ([1, 0], "stop", 0)
    assert feed(("b",), [1, 2], max_tokens=2) == ([1, 2], "stop", "b")


def test_nothing_is_taken_after_the_end():
    ended = sample(None)
    assert ended.append([1, 0, 1], [0.0] * 3, Pieces()) == 2
    assert ended.append([1], [0.0], Pieces()) == 0 and ended.tokens == [1, 0]
