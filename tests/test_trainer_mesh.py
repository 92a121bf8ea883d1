"""The trainer over a mesh: no way of splitting rows and weights over devices changes the gradient or the step."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import pickle
import socket
import subprocess
import sys

import jax
import jaxtyping
import numpy as np
import pytest
from test_trainer import LORA, SPEC, close, drawn_params, rollouts

from locojax.errors import ConfigError, RequestError
from locojax.models import sharding
from locojax.models.lora import Adapters
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.training.agreement import INPUTS, Counts, agreed
from locojax.training.inputs import check_data
from locojax.training.losses import find_loss, read_options
from locojax.training.microbatch import micro_batches
from locojax.training.plan import planned
from locojax.training.programs import Hyper
from locojax.training.publish import Publisher
from locojax.training.settings import TrainerSettings
from locojax.training.shapes import abstract_batch, abstract_state
from locojax.training.sharded import Over, accumulate, update
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

ADAM = AdamParams(learning_rate=1e-3)
SETTINGS = TrainerSettings(row_tokens=24, rows=1, compute_dtype="float32", tile_tokens=16)
LOSS = {"full": "gspo", "lora": "ppo"}  # one each, so that tests share compiled programs
CORE = [
    ("full", 2, 1, "step"),
    ("full", 2, 2, "layer"),
    ("lora", 4, 1, "layer"),
    ("lora", 1, 4, "step"),  # more tensor devices than kv heads
]
MORE = [
    (case, fsdp, tensor, gather)
    for case in ("full", "lora")
    for fsdp, tensor in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4))
    for gather in ("step", "layer")
    if (case, fsdp, tensor, gather) not in CORE
]
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def params():
    return drawn_params()


def mesh_of(fsdp, tensor=1):
    return make_mesh(MeshSpec(fsdp, tensor), jax.devices()[: fsdp * tensor])


def make_split(spec, params, lora, mesh, agree=None, **changes):
    return Trainer(
        spec, params, dataclasses.replace(SETTINGS, **changes), lora=lora, seed=3, mesh=mesh, agree=agree
    )


def start_adapter(trainer):
    """With b zero, a would get no gradient."""
    rng = np.random.default_rng(5)
    state = sharding.gathered(trainer.state())
    drawn = jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * 0.1).astype(np.float32), state["trainable"])
    trainer.restore({**state, "trainable": drawn})


def first_share(rank, size):
    """The hosts' parts of the data are not of one size."""
    return slice(0, 9) if rank == 0 else slice(9, None)


def make(params, case, mesh, agree=None, **changes):
    trainer = make_split(SPEC, params, LORA if case == "lora" else None, mesh, agree, **changes)
    if case == "lora":
        start_adapter(trainer)
    return trainer


def run(trainer, data, loss, steps=2):
    """(the first gradient, its result, the state after the steps)."""
    first = None
    for _ in range(steps):
        result = trainer.forward_backward(data, loss, score="active")
        if first is None:
            first = sharding.gathered(trainer.accumulated_gradient), result
        assert trainer.optim_step(ADAM).applied
    return *first, sharding.gathered(trainer.state())


@pytest.fixture(scope="module")
def alone(params):
    """What one device makes of each case, computed once."""
    found = {}

    def get(case):
        if case not in found:
            found[case] = run(make(params, case, None), rollouts(), LOSS[case])
        return found[case]

    return get


def check_same(found, expected, num_shards):
    gradient, result, state = found
    expected_gradient, expected_result, expected_state = expected
    close(gradient, expected_gradient)
    for own, other in zip(*(jax.tree.leaves(s["trainable"]) for s in (state, expected_state)), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-6)
    close(state["optimizer"], expected_state["optimizer"])
    for own, other in zip(result.outputs, expected_result.outputs, strict=True):
        for name, values in other.items():
            np.testing.assert_allclose(own[name], values, atol=2e-5, err_msg=name)
    assert result.metrics.keys() == expected_result.metrics.keys()
    depends_on_packing = {"num_micro_batches:sum", "num_row_tokens:sum", "num_computed_tokens:sum"}
    for name in result.metrics.keys() - depends_on_packing:
        assert result.metrics[name] == pytest.approx(expected_result.metrics[name], rel=1e-5), name
    rows = result.metrics["num_row_tokens:sum"] / SETTINGS.row_tokens
    assert rows == result.metrics["num_micro_batches:sum"] * num_shards


@pytest.mark.parametrize("case, fsdp, tensor, gather", CORE)
def test_no_mesh_changes_the_gradient_or_the_step(params, alone, case, fsdp, tensor, gather):
    trainer = make(params, case, mesh_of(fsdp, tensor), gather=gather)
    found = run(trainer, rollouts(), LOSS[case])
    assert found[1].metrics["num_micro_batches:sum"] > 1
    check_same(found, alone(case), fsdp)


@pytest.mark.extended
@pytest.mark.parametrize("case, fsdp, tensor, gather", MORE)
def test_no_other_mesh_does_either(params, alone, case, fsdp, tensor, gather):
    trainer = make(params, case, mesh_of(fsdp, tensor), gather=gather)
    check_same(run(trainer, rollouts(), LOSS[case]), alone(case), fsdp)


@pytest.mark.extended
@pytest.mark.parametrize("gather", ["step", "layer"])
@pytest.mark.parametrize("case", ["full", "lora"])
def test_sums_over_devices_are_fp32_where_products_are_bf16(params, alone, case, gather):
    """What bf16 products lose to fp32 ones is no more over devices than on one; masters and gradients stay fp32."""
    exact, lost = alone(case)[0], []
    for mesh in (mesh_of(2), None):
        trainer = make(params, case, mesh, gather=gather, compute_dtype="bfloat16")
        trainer.forward_backward(rollouts(), LOSS[case], score="active")
        gradient = sharding.gathered(trainer.accumulated_gradient)
        assert {leaf.dtype for leaf in jax.tree.leaves((gradient, trainer.trainable))} == {np.dtype(np.float32)}
        errors = jax.tree.map(lambda own, other: np.linalg.norm(own - other) / np.linalg.norm(other), gradient, exact)
        lost.append(np.array(jax.tree.leaves(errors)))
    assert (lost[0] < 1.5 * lost[1]).all(), lost  # the orders of sums differ: up to 1.22 was seen


def test_each_device_holds_its_part_of_the_state(params):
    trainer = make(params, "full", mesh_of(2))
    trainer.forward_backward(rollouts(), "gspo", score="active")
    trainer.optim_step(ADAM)
    trainer.forward_backward(rollouts(), "gspo", score="active")
    state = trainer.state()
    held = jax.tree.leaves((state["trainable"], state["optimizer"], trainer.accumulated_gradient))
    split = [leaf for leaf in held if leaf.size > SPEC.hidden_size * SPEC.num_layers]
    assert len(split) == 4 * 8  # the matrices, their gradient, and Adam's two moments
    for leaf in split:
        assert [shard.data.size for shard in leaf.addressable_shards] == [leaf.size // 2] * 2
    on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in held)
    assert on_one < 0.51 * sum(leaf.nbytes for leaf in held)  # norms are whole everywhere


def test_a_state_moves_between_meshes(params):
    data, first = rollouts(), make(params, "lora", mesh_of(4), gather="layer")
    first.forward_backward(data, "ppo", score="active")
    first.optim_step(ADAM)
    saved = sharding.gathered(first.state())
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(saved))
    for mesh in (None, mesh_of(1, 4)):
        other = make(params, "lora", mesh)
        other.restore(saved)
        assert other.policy_version == 1
        close(sharding.gathered(other.state()), saved, rtol=0)


def test_the_reference_and_scores_over_a_mesh(params):
    data = [Datum(d.tokens, {"target_tokens": d.inputs["target_tokens"]}) for d in rollouts()]
    split, one = (make(params, "full", mesh, keep_reference=True) for mesh in (mesh_of(2), None))
    for a, b in zip(split.reference_logprobs(data), one.reference_logprobs(data), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    several = Datum(np.arange(5), {"target_tokens": np.arange(10).reshape(5, 2), "weights": np.ones((5, 2))})
    scored = [trainer.forward([several, data[0]], "cross_entropy").outputs for trainer in (split, one)]
    assert [out["logprobs"].shape for out in scored[0]] == [(5, 2), data[0].tokens.shape]
    close(*([out["logprobs"] for out in outputs] for outputs in scored))


def test_a_sequence_that_is_not_finite_is_left_out_on_its_device_alone(params):
    data = rollouts()
    broken = jax.tree.map(np.array, params)
    broken["embed"][data[3].tokens[-1]] = np.nan
    results = [make(broken, "full", mesh).forward(data, "ppo", score="active") for mesh in (mesh_of(2), None)]
    assert results[0].metrics["num_nonfinite:sum"] == results[1].metrics["num_nonfinite:sum"] > 0
    assert results[0].metrics["num_tokens:sum"] == results[1].metrics["num_tokens:sum"]


@pytest.mark.parametrize("case, at_once", [("full", True), ("full", False), ("lora", True)])
def test_what_is_published_from_a_mesh_is_what_one_device_publishes(params, case, at_once):
    trainer = make(params, case, mesh_of(2, 2) if case == "full" else mesh_of(4), gather="layer")
    published = Publisher(trainer, at_once=at_once).publish()
    expected = Publisher(make(params, case, None)).publish()
    assert jax.tree.structure(published.weights) == jax.tree.structure(expected.weights)
    assert isinstance(published.adapters, Adapters) == (case == "lora")
    both = [jax.tree.leaves((one.weights, one.adapters)) for one in (published, expected)]
    for own, other in zip(*both, strict=True):
        np.testing.assert_array_equal(own, other)
        assert own.devices() == {jax.local_devices()[0]}
    before = jax.tree.map(np.array, both[0])
    trainer.forward_backward(rollouts(), LOSS[case], score="active")
    trainer.optim_step(ADAM)  # donates what it had
    close(both[0], before, rtol=0)


def test_a_lora_merged_over_a_mesh(params):
    merged = [Publisher(make(params, "lora", mesh), merge=True).publish().weights for mesh in (mesh_of(4), None)]
    close(*merged, rtol=1e-6)


@pytest.mark.parametrize("tensor, gather", [(1, "step"), (2, "layer")])
def test_the_programs_are_compiled_from_shapes_alone(params, tensor, gather):
    mesh = mesh_of(2, tensor)
    trainer, over = make(params, "full", mesh, gather=gather), Over(mesh, gather)
    trainer.forward_backward(rollouts(), "gspo", score="active")
    state = abstract_state(trainer.program, over, keep_transposes=True)
    held = [trainer.trainable, trainer.state()["optimizer"]]
    said = [state.trainable, state.optimizer._asdict()]
    if gather == "layer":
        held, said = [*held, trainer.accumulated_gradient], [*said, state.accumulators]
    for own, shape in zip(jax.tree.leaves(held), jax.tree.leaves(said), strict=True):
        assert (own.shape, own.dtype) == (shape.shape, shape.dtype)
        assert own.sharding.is_equivalent_to(shape.sharding, own.ndim)
    inputs = ("logprobs", "advantages")
    batch = abstract_batch(over, rows=1, row_tokens=24, loss_name="gspo", inputs=inputs)
    options = read_options(find_loss("gspo"), None)
    hyper = Hyper(*(np.float32(0) for _ in Hyper._fields))
    jaxtyping.config.update("jaxtyping_disable", True)  # jax puts descriptions in arrays' places
    try:
        lowered = accumulate.lower(
            state.working, state.accumulators, state.fixed, batch, options,
            spec=trainer.program, loss_name="gspo", over=over,
        )  # fmt: skip
        update.lower(state.trainable, state.optimizer, state.accumulators, hyper, spec=trainer.program, over=over)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    taken = lowered.compile().memory_analysis().argument_size_in_bytes
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.trainable))
    # Weights, accumulators and transposes: whole ones, or halves of which the tensor axis takes a half of most.
    assert taken < {"layer": 0.9, "step": 3}[gather] * whole


def test_each_device_numbers_its_own_sequences():
    """A device sums over sequences in as many places as it has positions: a number from another's would have none."""
    short = [Datum(np.arange(2), {"target_tokens": np.arange(2), "weights": np.ones(2)}) for _ in range(20)]
    checked = check_data(short, find_loss("cross_entropy"), read_options(find_loss("cross_entropy"), None), 67)
    plan = planned(checked, "active", row_tokens=4, rows=4, share_prefixes=False)
    batches = micro_batches(plan.packed.padded(4), plan.checked, "active", num_shards=4)
    assert len(batches) == 4 and batches[0].segments.tolist() == [[0, 0, 1, 1]] * 4
    assert batches[2].segments.tolist() == [[0, 0, 1, 1]] * 2 + [[4] * 4] * 2
    assert batches[3].segments.tolist() == [[4] * 4] * 4 and not batches[3].reads.any()
    assert (batches[3].until == np.arange(1, 5)).all()  # sees itself


def test_hosts_that_cannot_agree_are_refused(params, monkeypatch):
    monkeypatch.setattr(sharding, "spans_processes", lambda mesh: True)
    with pytest.raises(ConfigError, match="over several processes needs a way for them to agree. Give it agree="):
        make(params, "full", mesh_of(2))


def told_by_both(ints):
    """As if another host had said the same."""
    return np.stack([np.asarray(ints, np.int64)] * 2)


def test_a_plan_is_agreed_on_outside_and_takes_the_losss_inputs_later(params):
    def no_agreeing_here(phase, ints):
        raise AssertionError("the caller agrees")

    data, trainer = rollouts(), make(params, "full", mesh_of(2), no_agreeing_here)
    scaled = [Datum(d.tokens, {**d.inputs, "advantages": d.inputs["advantages"] / 7}) for d in data]
    plan = trainer.plan(data, "gspo", score="active")
    result = trainer.forward_backward(scaled, "gspo", score="active", plan=plan, told=told_by_both(plan.counts.ints))
    assert result.metrics["num_datum_tokens:sum"] == 2 * sum(len(d.tokens) for d in data)
    other = make(params, "full", mesh_of(2))
    other.forward_backward(scaled, "gspo", score="active")
    close(sharding.gathered(trainer.accumulated_gradient), sharding.gathered(other.accumulated_gradient), rtol=0)
    for wrong, text in (
        (data[1:], "The data are not those of the plan. Got: 11 data"),
        ([data[1], *data[1:]], "Datum 0 has other tokens or targets than the plan's"),
        ([Datum(data[0].tokens, {**data[0].inputs, "advantages": data[0].inputs["advantages"] * 0 + 1}), *data[1:]],
         "Datum 0 has a loss where the plan's had none"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=text):
            trainer.forward(wrong, "gspo", score="active", plan=plan, told=told_by_both(plan.counts.ints))


def told(**changes):
    fields = {"num_data": 3, "num_micro_batches": 2, "num_targets": 1, "inputs": 0, "num_datum_tokens": 30,
              "num_computed_tokens": 20, **changes}  # fmt: skip
    return Counts(**fields).ints


def test_what_hosts_agree_on():
    inputs = {name: 1 << INPUTS.index(name) for name in ("logprobs", "advantages", "old_logprobs")}
    policy = inputs["logprobs"] + inputs["advantages"]
    nothing = Counts(0, 0, 1, 0, 0, 0).ints
    counts = agreed(np.array([nothing, told(inputs=policy), told(num_micro_batches=5, inputs=policy)]))
    assert (counts.num_micro_batches, counts.num_data, counts.num_datum_tokens) == (5, 6, 60)
    assert counts.widths(find_loss("ppo")).inputs == {"logprobs": (), "advantages": ()}
    wide = agreed(np.array([told(num_targets=3, inputs=1), told(inputs=1)]))
    assert wide.widths(find_loss("cross_entropy")).inputs == {"weights": (3,)} and INPUTS[0] == "weights"
    with pytest.raises(RequestError, match="Host 1 refused its training data. Its own error says which"):
        agreed(np.array([told(), Counts.refusal().ints]))
    with pytest.raises(RequestError, match="data of host 2 have the input 'old_logprobs', those of host 1 have not"):
        agreed(np.array([nothing, told(inputs=policy), told(inputs=policy + inputs["old_logprobs"])]))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def two_hosts(case, folder):
    """What each of two processes of two devices found; see `hosts_trainer`."""
    port, outs = free_port(), [folder / f"host{rank}.pickle" for rank in range(2)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    children = [
        subprocess.Popen(
            [sys.executable, str(HERE / "hosts_trainer.py"), str(rank), "2", str(port), str(out), case],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        errors = [child.communicate(timeout=240)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)
    return [pickle.loads(out.read_bytes()) for out in outs]


@pytest.mark.parametrize("case", ["full", pytest.param("lora", marks=pytest.mark.extended)])
def test_two_hosts_train_as_one(params, case, tmp_path):
    hosts = two_hosts(case, tmp_path)
    data, one = rollouts(), make(params, case, None)
    own = [first_share(rank, 2) for rank in range(2)]
    for name, taught in (("both", data), ("first", data[own[0]])):
        result = one.forward_backward(taught, LOSS[case], score="active")
        for rank, host in enumerate(hosts):
            gradient, theirs, applied = host[name]
            assert applied
            close(gradient, one.accumulated_gradient)
            assert theirs.metrics["loss:sum"] == pytest.approx(result.metrics["loss:sum"], rel=1e-5)
            assert theirs.metrics["num_tokens:sum"] == result.metrics["num_tokens:sum"]
            assert theirs.metrics["num_datum_tokens:sum"] == result.metrics["num_datum_tokens:sum"]
            mine = result.outputs[own[rank]]
            assert len(theirs.outputs) == len(mine)
            for a, b in zip(theirs.outputs, mine, strict=True):
                np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=2e-5)
        one.optim_step(ADAM)
    for host in hosts:
        assert host["none"][1].metrics["num_tokens:sum"] == 0 and not host["none"][2]
        assert host["state"]["policy_version"] == 2
        for a, b in zip(*(jax.tree.leaves(s["trainable"]) for s in (host["state"], one.state())), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
        close(host["restored"], host["state"], rtol=0)
        close(host["published"][0], hosts[0]["published"][0], rtol=0)
        assert len(host["devices"]) == 1 and min(host["share"]) == 0.25
    expected = Publisher(one).publish()
    for a, b in zip(jax.tree.leaves(hosts[1]["published"]), jax.tree.leaves(
        (expected.weights, expected.adapters)), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert hosts[0]["refused"].startswith("RequestError: Unknown loss 'no such loss'")
    assert hosts[1]["refused"].startswith("RequestError: Host 0 refused its training data")
    scored = one.forward(data, "cross_entropy").outputs
    for rank, host in enumerate(hosts):
        for a, b in zip(host["scored"], scored[own[rank]], strict=True):
            np.testing.assert_allclose(a, b["logprobs"], atol=2e-5)
