"""How prompts lie in packed rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from locojax.rollout.prefill import PrefillShape, batches, common_header, pack, row_size

PROMPTS = st.tuples(
    st.lists(st.integers(0, 3), max_size=30), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1,
    max_size=20),
).map(lambda drawn: [tuple(drawn[0] + tail) for tail in drawn[1]])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(PROMPTS)
def test_every_token_sees_its_own_prompt_and_nothing_else(prompts):
    packed = pack(prompts)
    tokens, positions, until = (x.reshape(-1) for x in (packed.tokens, packed.positions, packed.until))
    T = packed.shape.tokens
    for prompt, where in zip(prompts, packed.source, strict=True):
        assert tokens[where].tolist() == list(prompt)
        assert positions[where].tolist() == list(range(len(prompt)))
        for i, at in enumerate(where):
            row = at // T
            j = np.arange(row * T, at + 1)
            assert j[until[j] > at % T].tolist() == where[: i + 1].tolist()
    assert packed.shape.prompts >= len(prompts)


def test_a_common_header_is_computed_once():
    prompts = [tuple(range(100)) + (200 + i, 300 + i) for i in range(16)]
    packed = pack(prompts)
    assert common_header(prompts) == 100
    assert (packed.shape.rows, packed.shape.tokens) == (1, 192)
    assert pack([p[::-1] for p in prompts]).shape.rows == 16


def test_a_header_leaves_each_prompt_a_token_of_its_own():
    assert common_header([(1, 2, 3), (1, 2, 3)]) == 2
    assert common_header([(1,), (1, 2)]) == 0
    assert common_header([(1, 2)]) == 0


def test_known_shapes_are_preferred_when_not_much_larger():
    known = [PrefillShape(8, 96, 8), PrefillShape(64, 512, 64)]
    assert pack([(1,) * 60] * 5, known).shape.tokens == 96 or common_header([(1,) * 60] * 5)
    different = [tuple([n] * 60) for n in range(5)]
    assert pack(different, known).shape == known[0]
    assert pack([(1, 2)], known).shape == PrefillShape(1, 16, 8)


def test_row_sizes_and_batches():
    assert [row_size(n) for n in (1, 16, 17, 24, 25, 33, 49, 65, 100, 1000)] == [
        16, 16, 24, 24, 32, 48, 64, 96, 128, 1024,
    ]  # fmt: skip
    assert batches([3, 4, 5, 20, 1, 1], 8) == [[0, 1], [2], [3], [4, 5]]
