"""Prompts that continue another one, as each turn of a conversation does: only what is new is computed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from rollout_models import SPEC, VOCAB, Bytes, oracle_logprobs, prompts, weights
from test_rollout_rows import BYTES_PER_TOKEN, LORA, SERVER, adapter, server

from locojax.errors import CapacityError
from locojax.models.lora import Adapters
from locojax.rollout.engine import Engine
from locojax.rollout.rows import RowsMemory
from locojax.types import SampleRequest, SamplingParams


def ask(name, prompt, max_tokens=6, **kwargs):
    return SampleRequest(name, tuple(prompt), SamplingParams(max_tokens, stop=(), seed=name), **kwargs)


def computed(made, *requests):
    """The requests' results, and how many prompt tokens were computed for them."""
    before = made.stats().num_prompt_tokens
    results = made.generate(requests)
    return results, made.stats().num_prompt_tokens - before


def told_right(result, prompt, **kwargs):
    for completion in result.completions:
        expected = oracle_logprobs(prompt, completion.tokens, **kwargs)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def stored(made, block):
    """The stored keys and values of a prompt's tokens, by layer."""
    pages = [np.asarray(x)[block.pages] for layer in made._cache["prompts"] for x in layer]
    return [x.swapaxes(1, 2).reshape(-1, *x.shape[1::2])[: block.num_tokens] for x in pages]


def test_each_turn_of_a_conversation_computes_what_is_new():
    made, fresh = server(), server(dataclasses.replace(SERVER, prefix_cache=False))
    (said,) = prompts(1, shortest=65, longest=65, seed=1)
    for turn in range(4):
        request = ask(f"turn {turn}", said, num_samples=3)
        (result,), count = computed(made, request)
        assert count == (len(said) if turn == 0 else 6 + 3)
        assert result.num_cached_prompt_tokens == len(said) - count
        told_right(result, said)
        (again,) = fresh.generate([request])
        assert [c.tokens for c in again.completions] == [c.tokens for c in result.completions]
        said = (*said, *result.completions[turn % 3].tokens, *prompts(1, shortest=3, longest=3, seed=turn)[0])


def test_a_prompt_that_others_continue_is_read_and_never_written():
    made = server(dataclasses.replace(SERVER, max_prefill_tokens=256))
    (stem,) = prompts(1, shortest=70, longest=70, seed=2)
    made.generate([ask("stem", stem)])
    block = made._scheduler._prefixes[0, stem]
    # Told from what would be computed for them again.
    made._cache["prompts"] = jax.tree.map(lambda x: x * (1 + 2**-20), made._cache["prompts"])
    before = [x.copy() for x in stored(made, block)]
    ends = prompts(8, shortest=3, longest=12, seed=3)
    computed(made, ask("alone", stem + ends[0]))
    # So many that computing the beginning once for all of them is less work than a program for each.
    results, _ = computed(made, *(ask(f"many {n}", stem[:-2] + end) for n, end in enumerate(ends)))
    for result, end in zip(results, ends, strict=True):
        told_right(result, stem[:-2] + end)
    assert all(np.array_equal(x, y) for x, y in zip(before, stored(made, block), strict=True))
    (again,) = made.generate([ask("again", stem)])
    assert again.num_cached_prompt_tokens == 70
    told_right(again, stem)


@pytest.mark.parametrize("many", [False, True])
def test_how_prompts_that_continue_one_are_computed(many):
    made = server(dataclasses.replace(SERVER, max_prefill_tokens=256))
    (stem,) = prompts(1, shortest=70, longest=70, seed=2)
    made.generate([ask("stem", stem)])
    before = len(made.compiler.keys("prefill_chunk"))
    made.generate([ask(f"{n}", (*stem, 5 + n)) for n in range(12 if many else 1)])
    assert len(made.compiler.keys("prefill_chunk")) - before == (0 if many else 1)


def test_what_is_no_stem():
    made = server()
    trees = [adapter(1), adapter(2)]
    for row, tree in enumerate(trees, start=1):
        made.set_adapter(row, tree, LORA.scale, row)
    (stem,) = prompts(1, shortest=70, longest=70, seed=4)
    longer = (*stem, 9, 8, 7)
    made.generate([ask("stem", stem, adapter=1)])
    for name, prompt, kwargs, new in (
        ("another adapter", longer, {"adapter": 2}, 73),
        ("asks about its prompt", longer, {"adapter": 1, "prompt_logprobs": True}, 73),
        ("more than half is new", stem[:55] + stem[:57], {"adapter": 1}, 112),
        ("half is new", stem + stem[:40], {"adapter": 1}, 40),
    ):
        (result,), found = computed(made, ask(name, prompt, max_tokens=4, **kwargs))
        assert found == new, name
        told_right(result, prompt, adapters=Adapters(trees[kwargs["adapter"] - 1], jax.numpy.float32(LORA.scale)))
    made.set_adapter(1, trees[1], LORA.scale, 3)
    (result,), found = computed(made, ask("new weights", longer, adapter=1))
    assert found == 73
    told_right(result, longer, adapters=Adapters(trees[1], jax.numpy.float32(LORA.scale)))


def test_conversations_in_a_memory_too_small_for_them_all():
    """Stems go while others continue them, samples make way: every log-prob is right and every page comes back."""
    made = Engine(SPEC, dataclasses.replace(SERVER, kv_bytes=700 * BYTES_PER_TOKEN), Bytes())
    made.load(weights(), version=0)
    rng = np.random.default_rng(5)
    talks = [prompts(1, shortest=64, longest=80, seed=n)[0] for n in range(9)]
    for turn in range(3):
        chosen = rng.permutation(9)[:6]
        requests = [ask(f"{turn}/{n}", talks[n], 8, num_samples=1 + int(n) % 2) for n in chosen]
        for n, result in zip(chosen, made.generate(requests), strict=True):
            told_right(result, talks[n])
            talks[n] = (*talks[n], *result.completions[0].tokens, int(rng.integers(2, VOCAB)))[:110]
    assert made.stats().num_prompt_tokens < sum(map(len, talks)) * 2
    made.forget_prompts()
    pool = made._memory.pool
    assert pool.num_free == pool.num_pages


def test_the_books_of_a_page_that_two_prompts_begin_alike():
    memory = RowsMemory(2048, 4, (1, 8), 64, max_context=100)
    stem = memory.open_prompt(10)
    block = memory.continue_prompt(stem, 6, 12)
    assert block.pages[0] == stem.pages[0] and not set(block.pages[1:]) & set(stem.pages)
    assert (block.num_tokens, block.num_stem, len(block.pages)) == (12, 6, 3)
    begun = stem.pages[1]
    memory.close_prompt(stem)
    assert memory.pool.users(begun) == 1  # the copy is still to be made
    slot = memory.open_slot(block)
    assert memory.settle(shrink=False, final_capacity=0).stem_copies == ((begun, block.pages[1]),)
    assert memory.pool.users(begun) == 0 and memory.pool.users(block.pages[0]) == 1
    whole = memory.continue_prompt(block, 8, 9)
    assert memory.settle(shrink=False, final_capacity=0) is None and whole.pages[:2] == block.pages[:2]
    never = memory.continue_prompt(block, 7, 9)
    memory.close_prompt(never)
    assert memory.settle(shrink=False, final_capacity=0) is None
    memory.close_slot(slot)
    memory.close_prompt(block)
    memory.close_prompt(whole)
    assert memory.pool.num_free == memory.pool.num_pages
    tight = RowsMemory(2 * 4 * 4, 4, (1,), 64, max_context=100)
    stem = tight.open_prompt(16)
    with pytest.raises(CapacityError, match="Got: 0 free pages. Expected: 1 pages"):
        tight.continue_prompt(stem, 14, 15)
    assert tight.pool.users(stem.pages[0]) == 1
