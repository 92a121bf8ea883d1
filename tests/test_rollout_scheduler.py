"""Who runs when: order, sharing, preemption, without a device."""

import numpy as np
import pytest

from locojax.rollout.pages import ContiguousMemory, PagedMemory
from locojax.rollout.request import Sample, StopRule
from locojax.rollout.scheduler import Scheduler
from locojax.types import SampleRequest, SamplingParams


def samples(name, prompt, count=1, max_tokens=20, stop=()):
    request = SampleRequest(name, tuple(prompt), SamplingParams(stop=stop), count)
    rule = StopRule.of(stop, ())
    return [Sample(request, i, np.zeros(2, np.uint32), rule, max_tokens, request.prompt) for i in range(count)]


def paged(num_pages=64, slots=4):
    return Scheduler(PagedMemory(num_pages, 4, (slots,), 16), max_iterations=8, max_iterations_watched=2)


def contiguous(max_tokens=4096, slots=4):
    return Scheduler(ContiguousMemory(max_tokens, (1, slots), 16), max_iterations=8, max_iterations_watched=2)


def run(scheduler, num_tokens):
    """Every running sample gains tokens; those that are done leave."""
    for sample in list(scheduler.running):
        sample.tokens += [9] * min(num_tokens, sample.remaining)
        if not sample.remaining:
            scheduler.finish(sample)


def names(found):
    return [(sample.request.request_id, sample.index) for sample in found]


BOTH = pytest.mark.parametrize("make", [paged, contiguous])


@BOTH
def test_first_come_first_served_and_a_group_shares_its_prompt(make):
    scheduler = make()
    for name in "abc":
        scheduler.add(samples(name, [ord(name)] * 5, 3))
    plan = scheduler.schedule()
    assert names(scheduler.running) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert [prompt.tokens[0] for prompt in plan.prompts] == [ord("a"), ord("b")]
    assert len({id(sample.prompt) for sample in scheduler.running}) == 2
    run(scheduler, 20)
    plan = scheduler.schedule()
    assert names(scheduler.running) == [("b", 1), ("b", 2), ("c", 0), ("c", 1)]
    assert [prompt.tokens[0] for prompt in plan.prompts] == [ord("c")], "b's prompt is stored already"


@BOTH
def test_decoding_returns_early_for_who_waits_or_to_shrink(make):
    scheduler = make()
    scheduler.add(samples("a", [1, 2], 6, max_tokens=100))
    assert scheduler.schedule().return_at == 3
    scheduler.remove("a")
    scheduler.add(samples("b", [1, 2], 4, max_tokens=100))
    plan = scheduler.schedule()
    smaller = max((size for size in scheduler.memory.rows.sizes if size < 4), default=0)
    assert (plan.return_at, plan.shrink) == (smaller, True)
    scheduler.remove("b")
    scheduler.add(samples("c", [1, 2], 4, max_tokens=30))
    assert scheduler.schedule().return_at == 0


@BOTH
def test_stop_strings_are_looked_for_often(make):
    scheduler = make()
    scheduler.add(samples("a", [1], stop=("x",)))
    assert scheduler.schedule().num_iterations == 2
    run(scheduler, 20)
    scheduler.add(samples("b", [1]))
    assert scheduler.schedule().num_iterations == 8


def test_the_youngest_is_preempted_and_keeps_its_tokens():
    scheduler = paged(num_pages=11)
    for name in "abc":
        scheduler.add(samples(name, [ord(name)] * 4, max_tokens=20))
    scheduler.schedule()
    assert names(scheduler.running) == [("a", 0), ("b", 0), ("c", 0)]
    (last,) = [sample for sample in scheduler.running if sample.request.request_id == "c"]
    run(scheduler, 9)
    scheduler.schedule()
    assert names(scheduler.running) == [("a", 0), ("b", 0)] and scheduler.num_preemptions == 1
    assert names(scheduler.waiting) == [("c", 0)]
    assert last.tokens == [9] * 9 and last.context == (ord("c"),) * 4 + (9,) * 9
    assert last.slot is None and last.fresh and last.num_stored == 0 and last.remaining == 11
    seen = set()
    for _ in range(20):
        plan = scheduler.schedule()
        seen |= {prompt.tokens for prompt in plan.prompts}
        run(scheduler, plan.num_iterations)
    assert last.context in seen and not scheduler.running and not scheduler.waiting
    scheduler.drop_prefixes()
    assert scheduler.memory.pool.num_free == 11


def test_unused_prompts_are_evicted_before_anyone_is_preempted():
    scheduler = paged(num_pages=8)
    for name in "ab":
        scheduler.add(samples(name, [ord(name)] * 8, max_tokens=4))
        scheduler.schedule()
        run(scheduler, 4)
    assert scheduler.memory.pool.num_free == 4
    scheduler.add(samples("c", [5] * 16, max_tokens=8))
    scheduler.schedule()
    assert names(scheduler.running) == [("c", 0)] and scheduler.num_preemptions == 0
    run(scheduler, 8)
    scheduler.add(samples("b", [ord("b")] * 8, max_tokens=4))
    assert len(scheduler.schedule().prompts) == 1, "b's prompt made way for c's"


@BOTH
def test_removing_a_request_frees_what_it_held(make):
    scheduler = make()
    scheduler.add(samples("a", [1] * 5, 3))
    scheduler.add(samples("b", [2] * 5, 3))
    scheduler.schedule()
    assert len(scheduler.remove("a")) == 3 and scheduler.remove("x") == []
    scheduler.schedule()
    assert names(scheduler.running) == [("b", 0), ("b", 1), ("b", 2)]
    scheduler.remove("b")
    scheduler.drop_prefixes()
    assert not scheduler.memory.rows.blocks and scheduler.memory.open_prompt(1).index == 0


@BOTH
def test_prompts_dropped_while_in_use_are_not_shared_again(make):
    scheduler = make()
    scheduler.add(samples("a", [1] * 5, 1))
    scheduler.schedule()
    scheduler.drop_prefixes()
    scheduler.add(samples("b", [1] * 5, 1))
    assert len(scheduler.schedule().prompts) == 1
    run(scheduler, 20)
    scheduler.drop_prefixes()
    assert scheduler.memory.open_prompt(1).index == 0
