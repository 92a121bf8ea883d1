"""KV memory in rows, for a server: its books, its moves, and that nothing compiles for whatever arrives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_models import SPEC, Bytes, oracle_logprobs, prompts, weights

from locojax.errors import CapacityError, ConfigError
from locojax.models.lora import Adapters, LoraSpec, empty_stack, init_adapter
from locojax.rollout.engine import Engine
from locojax.rollout.pages import Shape
from locojax.rollout.rows import RowsMemory
from locojax.rollout.settings import EngineSettings, sizes_between
from locojax.types import SampleRequest, SamplingParams

BYTES_PER_TOKEN = 2 * SPEC.num_layers * SPEC.kv_size * 4
SERVER = EngineSettings(
    max_slots=32, max_prefill_tokens=64, max_iterations=8, kv_bytes=2048 * BYTES_PER_TOKEN, layout="rows", page_size=4
)
LORA = LoraSpec(rank=2, alpha=4.0, unembed=True)


def test_more_rows_hold_fewer_tokens_each():
    memory = RowsMemory(2048, 4, (1, 8, 32), 64, max_context=100)
    assert memory.capacities == {1: 128, 8: 128, 32: 32}
    assert memory.shapes() == [Shape(64, 0, 1, 128), Shape(64, 0, 8, 128), Shape(64, 0, 32, 32)]
    assert memory.fits_alone(60, 68) and not memory.fits_alone(60, 69)
    assert RowsMemory(16, 16, (1, 8), 2, 100).capacities == {}


def test_a_long_sample_keeps_the_rows_few():
    memory = RowsMemory(2048, 4, (1, 8, 32), 64, max_context=100)
    blocks = [memory.open_prompt(8) for _ in range(9)]
    slots = [memory.open_slot(block) for block in blocks]
    moves = memory.settle(shrink=False, final_capacity=0)
    assert moves.shape == Shape(64, 0, 32, 32) and len(moves.row_copies) == 18
    memory.extend(slots[0], 24)
    with pytest.raises(CapacityError, match="The KV memory is full. Got: 9 samples of up to 33 tokens"):
        memory.extend(slots[0], 25)
    memory.close_slot(slots[8])
    memory.extend(slots[0], 25)
    moves = memory.settle(shrink=False, final_capacity=0)
    assert moves.shape == Shape(64, 0, 8, 128) and moves.source_rows == tuple(range(8))
    with pytest.raises(CapacityError):
        memory.open_slot(blocks[8])


def test_spare_numbers_of_rows_are_used_once_they_may_be():
    memory = RowsMemory(2048, 4, (1, 8, 32), 64, max_context=100, spare_sizes=(16,))
    block = memory.open_prompt(4)
    slots = [memory.open_slot(block) for _ in range(9)]
    assert memory.settle(shrink=True, final_capacity=0).shape == Shape(64, 0, 32, 32)
    assert memory.spare_shapes() == [Shape(64, 0, 16, 64)] and memory.rows.sizes == (1, 8, 32)
    memory.use_spare()
    assert memory.spare_shapes() == [] and memory.shapes()[2] == Shape(64, 0, 16, 64)
    assert memory.settle(shrink=True, final_capacity=0).shape == Shape(64, 0, 16, 64)
    memory.extend(slots[0], 60)


def test_sizes_between():
    assert sizes_between((1, 8, 32, 128)) == (16, 64)
    assert sizes_between((64, 128)) == sizes_between((1, 8)) == ()


def test_a_prompt_is_in_use_only_until_it_has_been_copied():
    memory = RowsMemory(2048, 4, (1, 8, 32), 64, max_context=100)
    block = memory.open_prompt(5)
    slots = [memory.open_slot(block) for _ in range(3)]
    assert block.users == 3
    memory.close_slot(slots.pop())
    with pytest.raises(ValueError, match="prompt 0 still has 2 users"):
        memory.close_prompt(block)
    assert len(memory.settle(shrink=False, final_capacity=0).row_copies) == 2 * 2
    memory.close_prompt(block)
    assert memory.pool.num_free == memory.pool.num_pages
    for slot in slots:
        memory.close_slot(slot)


def adapter(seed):
    tree = init_adapter(SPEC, LORA, seed)
    return jax.tree.map(lambda leaf: 0.3 * jax.random.normal(jax.random.key(seed), leaf.shape), tree)


def server(settings=SERVER, num_adapters=3):
    made = Engine(SPEC, settings, Bytes())
    made.load(weights(), version=0, adapters=empty_stack(SPEC, LORA.rank, num_adapters, jnp.float32))
    return made


def arrivals(rng, count):
    """Anything: long and short, alone and in groups, of any adapter, truncated or not, streamed, scored, with stops."""
    for n in range(count):
        prompt = prompts(1, shortest=1, longest=40, seed=int(rng.integers(1 << 30)))[0]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 80)), temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 5])), seed=n, stop=((), None, ("zz",), (5, 6, 7, 8, 9))[n % 4],
        )  # fmt: skip
        groups = int(rng.choice([1, 1, 3, 8]))
        yield SampleRequest(f"r{n}", prompt, params, groups, adapter=n % 3, prompt_logprobs=n % 5 == 0)


def test_nothing_compiles_for_whatever_arrives():
    made, rng = server(), np.random.default_rng(1)
    assert made.warm_up_server() == made.stats().num_compilations > 0
    assert made.warm_up_server() == 0
    for program in made._spare:
        program.result()
    trees = [adapter(1), adapter(2)]
    jax.block_until_ready(trees)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    asked, done = {}, {}
    try:
        for row, tree in enumerate(trees, start=1):
            made.set_adapter(row, tree, LORA.scale, row)
        for request in arrivals(rng, 40):
            asked[request.request_id] = request
            made.add(request, stream=len(asked) % 7 == 0)
            for _ in range(int(rng.integers(0, 4))):
                done.update({result.request_id: result for result in made.step()})
        while made.num_unfinished:
            done.update({result.request_id: result for result in made.step()})
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    assert made._memory.rows.sizes == (1, 8, 16, 32)
    applied = [None, *(Adapters(tree, jnp.float32(LORA.scale)) for tree in trees)]
    for name, request in asked.items():
        if request.params.temperature == 0.7:
            continue  # raw log-probs all the same, but enough has been checked
        for completion in done[name].completions[:2]:
            expected = oracle_logprobs(request.prompt, completion.tokens, adapters=applied[request.adapter])
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)  # strong adapters amplify rounding
            assert completion.policy_version == request.adapter


def some(name, count):
    return [SampleRequest(f"{name}{n}", (5, 6, n), SamplingParams(4, stop=(), seed=n)) for n in range(count)]


def test_shapes_between_are_made_at_leisure_and_sample_the_same():
    made = server()
    made.compiler.leisure.clear()
    made.warm_up_server()
    before = made.generate(some("a", 10))
    assert made._memory.shape.rows == 32 and not all(program.compiled.done() for program in made._spare)
    made.compiler.leisure.set()
    made._spare[-1].compiled.result(60)
    after = made.generate(some("b", 10))
    assert made._memory.shape.rows == 16 and not made._spare
    for one, other in zip(before, after, strict=True):
        assert one.completions[0].tokens == other.completions[0].tokens
        np.testing.assert_allclose(one.completions[0].logprobs, other.completions[0].logprobs, atol=1e-5)


def test_what_fails_of_the_shapes_between_is_said_and_costs_nothing_else(caplog):
    made = server()
    made.compiler.leisure.clear()
    made.warm_up_server()

    def fail():
        raise RuntimeError("no room")

    made._spare[0]._make = fail
    made.compiler.leisure.set()
    made._spare[-1].compiled.result(60)
    made.generate(some("a", 10))
    assert made._memory.shape.rows == 32 and "samples take the next larger: no room" in caplog.text


def test_a_request_joins_within_eight_iterations_and_a_short_one_does_not_wait_for_a_long_one():
    made = server()
    made.add(SampleRequest("long", (5, 6), SamplingParams(100, stop=(), seed=1)))
    made.step()
    before = made.stats().num_iterations
    made.add(SampleRequest("short", (7, 8), SamplingParams(3, stop=(), seed=1)))
    results = made.step()
    assert [result.request_id for result in results] == ["short"]
    assert made.stats().num_iterations - before <= 8


def test_only_a_server_is_warmed_up_as_one():
    made = Engine(SPEC, dataclasses.replace(SERVER, layout="contiguous"), Bytes())
    made.load(weights(), version=0)
    with pytest.raises(ConfigError) as error:
        made.warm_up_server()
    assert str(error.value) == (
        "An engine can't be warmed up for a server. Got: layout='contiguous'. Expected: layout=\"rows\"."
    )
