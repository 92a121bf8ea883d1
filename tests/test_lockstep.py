"""Hosts in lockstep against an engine alone. The hosts are devices of this process; two processes are in
test_single_controller."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
import rollout_models
from rollout_models import Bytes
from test_rollout_engine import SMALL, assert_same, batch, request, tokens_of

from locojax.errors import ConfigError, RequestError
from locojax.models import decoder
from locojax.models.lora import Adapters, LoraSpec, init_adapter
from locojax.rollout.engine import Engine
from locojax.rollout.lockstep import Lockstep, LockstepEngine
from locojax.rollout.lockstep_memory import HostMemory, Hosts, common_shape
from locojax.rollout.lockstep_programs import AXIS, LockstepDevices, host_mesh, pack_words, unpack_words
from locojax.rollout.pages import Shape
from locojax.rollout.prefill import pack_alike
from locojax.rollout.programs import Compiler, ProgramSpec
from locojax.rollout.settings import memory_and_layout
from locojax.types import SampleRequest

SPEC = dataclasses.replace(rollout_models.SPEC, num_layers=1)  # compiling is most of what these tests cost
ONE = dataclasses.replace(SMALL, max_iterations=1)


@functools.cache
def weights(seed=0):
    tree = rollout_models.params(seed)
    first = {name: leaf[:1] for name, leaf in tree["layers"].items()}
    return decoder.unstack({**tree, "layers": first}, SPEC, jax.numpy.float32)


@functools.cache
def compiler(spec):
    return Compiler(spec)


def engine(seed=0, share=True):
    """An engine alone."""
    made = Engine(SPEC, SMALL, Bytes())
    if share:
        made = Engine(SPEC, SMALL, Bytes(), compiler=compiler(made.compiler.spec))
    made.load(weights(seed), version=seed)
    return made


class Told:
    """Stands for the other hosts: writes down what they are told."""

    def __init__(self):
        self.orders = []

    def __call__(self, *order):
        self.orders.append(order)
        return contextlib.nullcontext()


@functools.cache
def devices(num_hosts, max_iterations=1):
    """Tests share programs, as the engines of one run do."""
    settings = dataclasses.replace(SMALL, max_iterations=max_iterations)
    _, layout = memory_and_layout(SPEC, settings)
    spec = ProgramSpec(SPEC, layout, settings.dtype, settings.logprobs_of, max_iterations)
    return LockstepDevices(spec, jax.sharding.Mesh(np.array(jax.devices()[:num_hosts]), (AXIS,)))


def lockstep(settings=ONE, num_hosts=2, told=None, seed=0):
    lanes = Lockstep(devices(num_hosts, settings.max_iterations), told or Told())
    made = LockstepEngine(SPEC, settings, Bytes(), lanes, num_hosts)
    made.load(weights(seed), version=seed)
    return made


def test_tokens_are_those_of_an_engine_alone():
    requests = batch(temperature=0.8)
    assert_same(lockstep().generate(requests), engine().generate(requests))


def test_several_iterations_a_call_change_nothing():
    requests = batch()
    assert_same(lockstep(SMALL).generate(requests), engine().generate(requests))


def test_rows_that_are_kept_are_those_that_would_be_made(monkeypatch):
    """In every iteration in which nobody came or went."""
    made, kept = lockstep(SMALL), []
    plain = made._rows

    def both(hosts):
        found, before = plain(hosts), made._kept
        if before is not None and found is before.rows:
            made._kept = None
            for rows, expected in zip(found, plain(hosts), strict=True):
                live = expected.alive
                for ours, theirs in zip(jax.tree.leaves(rows), jax.tree.leaves(expected), strict=True):
                    assert ours.dtype == theirs.dtype
                    of_rows = ours.shape[:1] == live.shape
                    np.testing.assert_array_equal(ours[live] if of_rows else ours, theirs[live] if of_rows else theirs)
            kept.append(len(hosts))
        return found

    monkeypatch.setattr(made, "_rows", both)
    made.generate(batch(stop=(), max_tokens=20))
    assert kept


def test_more_samples_than_slots():
    settings = dataclasses.replace(ONE, max_slots=4)
    requests = batch()
    made = lockstep(settings)
    assert_same(made.generate(requests), engine().generate(requests))
    assert made.stats().occupancy > 0.5


@pytest.mark.extended
def test_a_prompt_longer_than_a_chunk_while_the_other_host_has_nothing():
    long = tuple(np.random.default_rng(3).integers(2, 90, 100).tolist())
    requests = [request("long", long, 3)]
    assert_same(lockstep().generate(requests), engine().generate(requests))


@pytest.mark.extended
def test_an_adapter():
    spec = LoraSpec(rank=4)
    tree = init_adapter(SPEC, spec, 0)
    tree = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape) * 0.3, tree)
    adapters = Adapters(tree, jax.numpy.float32(0.7))
    requests = [dataclasses.replace(asked, adapter=i % 2) for i, asked in enumerate(batch())]
    alone, together = engine(share=False), lockstep()
    for made in (alone, together):
        made.load(weights(), 3, adapters)
    results = together.generate(requests)
    assert_same(results, alone.generate(requests))
    assert results[0].completions[0].policy_version == 3


def test_waves_and_new_weights():
    made = lockstep()
    made.generate(batch(temperature=0.5))
    made.load(weights(1), version=1)
    requests = batch()
    assert_same(made.generate(requests), engine(seed=1).generate(requests))


@pytest.mark.extended
def test_a_warm_up_compiles_all_that_growing_and_shrinking_rows_need():
    made = lockstep(dataclasses.replace(ONE, max_slots=8))
    requests = batch(max_tokens=40)
    made.warm_up(requests)
    before = len(made._lanes.keys())
    assert_same(made.generate(requests), engine().generate(requests))
    assert len(made._lanes.keys()) == before


def test_a_prompt_of_a_group_is_computed_once():
    made = lockstep()
    made.generate(batch())
    assert made.stats().num_prompt_tokens == sum(len(asked.prompt) for asked in batch())


def test_every_iteration_is_an_order_to_the_hosts():
    told = Told()
    made = lockstep(told=told)
    made.generate(batch(stop=(), max_tokens=6))
    runs = [key for action, key, *_ in told.orders if action == "run"]
    assert [key.name for key in runs].count("decode") == 5  # the first token of six comes with the second


def test_another_process_that_does_what_it_is_told_holds_the_same():
    """The orders, sent as they are on the wire, drive a second set of devices to the same caches."""
    told = Told()
    made = lockstep(told=told)
    made.generate(batch())
    follower = LockstepDevices(made._lanes.devices.spec, made._lanes.devices.mesh)
    follower.load(made._policy.loaded)
    for order in told.orders:
        follower.perform(*order)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), follower._cache, made._lanes.devices._cache)
    assert jax.tree.all(same)


def test_prompt_scores_are_refused():
    asked = SampleRequest("scored", (5, 6), request("", (5,)).params, prompt_logprobs=True)
    with pytest.raises(RequestError, match="Request 'scored' asks for more than samples.*hosts.controller=local"):
        lockstep().add(asked)


def test_other_layouts_are_refused():
    with pytest.raises(ConfigError, match="Hosts in lockstep keep contiguous rows. Got: layout='paged'"):
        lockstep(dataclasses.replace(ONE, layout="paged"))


@pytest.mark.extended
def test_a_failed_program_loses_the_caches_and_nothing_else(monkeypatch):
    made = lockstep()
    for asked in batch():
        made.add(asked)
    made.step()
    monkeypatch.setattr(made._lanes, "decode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        made.step()
    monkeypatch.undo()
    results = []
    while made.num_unfinished:
        results += made.step()
    expected = engine().generate(batch())
    assert sorted(tokens_of(results)) == sorted(tokens_of(expected))


def test_the_mesh_has_one_device_of_this_host():
    mesh = host_mesh()
    assert mesh.axis_names == (AXIS,) and mesh.devices.tolist() == [jax.devices()[0]]


def test_words_carry_any_arguments():
    tree = {"a": np.array([[1, -2]], np.int32), "b": np.array([True, False]), "c": np.float32(0.5),
            "d": np.zeros((2, 0), np.int32), "e": np.array([7], np.uint32)}  # fmt: skip
    words = pack_words(tree)
    assert words.dtype == np.uint32 and words.shape == (6,)
    for found in (unpack_words(words, tree), unpack_words(jax.numpy.asarray(words), tree)):
        for name, expected in tree.items():
            assert np.array_equal(found[name], expected) and found[name].dtype == expected.dtype


def test_prompts_of_all_hosts_are_packed_into_one_shape():
    parts = [[(1, 2, 3), (1, 2, 9, 9)], [], [(5,) * 30]]
    packed = pack_alike(parts)
    assert len({one.shape for one in packed}) == 1
    for prompts_of_host, one in zip(parts, packed, strict=True):
        assert len(one.source) == len(prompts_of_host)
        for prompt, where in zip(prompts_of_host, one.source, strict=True):
            assert tuple(one.tokens.ravel()[where]) == prompt
            assert tuple(one.positions.ravel()[where]) == tuple(range(len(prompt)))


def test_requests_go_where_there_is_least_to_do():
    made = lockstep(num_hosts=2)
    for asked in [request("long", (3,), 1, max_tokens=30), request("a", (4,), 1), request("b", (5,), 1)]:
        made.add(asked)
    assert [[s.request.request_id for s in one.waiting] for one in made._hosts.schedulers] == [["long"], ["a", "b"]]
    made.abort("long")
    made.add(request("c", (6,), 1))
    assert [s.request.request_id for s in made._hosts.schedulers[0].waiting] == ["c"]


def test_one_shape_holds_what_every_host_wants():
    memories = [HostMemory(10_000, (2, 8), 16) for _ in range(3)]
    small, large = memories[0].open_prompt(5), memories[1].open_prompt(50)
    for _ in range(3):
        memories[0].extend(memories[0].open_slot(small), 10)
    memories[1].extend(memories[1].open_slot(large), 70)
    shape = common_shape(memories, Shape(), shrink=False, final_capacity=100)
    assert shape == Shape(entries=1, prompt_capacity=64, rows=8, capacity=128)
    assert [memory.take(shape) for memory in memories] == [None, None, None]
    assert [memory.rows.num_rows for memory in memories] == [8, 8, 0]


def test_an_idle_queue_plans_nothing():
    hosts = Hosts([lockstep()._hosts.schedulers[0]])
    assert hosts.schedule().prompts == () and not hosts.running
