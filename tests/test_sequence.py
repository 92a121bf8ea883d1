"""Rows whose tokens are split over devices: the same gradient, in less memory of each."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from test_trainer import LORA, SPEC, close, drawn_params, oracle_gradient, rollouts

from locojax.config import load
from locojax.errors import ConfigError
from locojax.hosts.worker import training_mesh
from locojax.models import attention, kernels, sharding
from locojax.models.lora import Adapters
from locojax.models.sharding import DATA, FSDP, SEQUENCE, MeshSpec, make_mesh
from locojax.training.losses import LOSSES
from locojax.training.programs import ProgramSpec
from locojax.training.settings import TrainerSettings
from locojax.training.shapes import abstract_batch, abstract_state
from locojax.training.sharded import Over, accumulate
from locojax.training.trainer import Trainer
from locojax.types import AdamParams, Datum

ROWS = PartitionSpec(FSDP, SEQUENCE)
CORE = [("full", MeshSpec(1, 1, 4), "layer"), ("lora", MeshSpec(2, 1, 2), "step")]
MORE = [
    (case, MeshSpec(fsdp, tensor, sequence), gather)
    for case in ("full", "lora")
    for fsdp, tensor, sequence in ((1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 4))
    for gather in ("layer", "step")
    if (case, MeshSpec(fsdp, tensor, sequence), gather) not in CORE
]


@pytest.fixture(scope="module")
def params():
    return drawn_params()


def mesh_of(spec):
    return make_mesh(spec, jax.devices()[: spec.fsdp * spec.tensor * spec.sequence])


def make(params, case, mesh, spec=SPEC, **changes):
    settings = TrainerSettings(**{"row_tokens": 48, "compute_dtype": "float32", "tile_tokens": 16, **changes})
    trainer = Trainer(spec, params, settings, lora=LORA if case == "lora" else None, seed=3, mesh=mesh)
    if case == "lora":  # with b zero, a would get no gradient
        rng, state = np.random.default_rng(5), sharding.gathered(trainer.state())
        drawn = jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * 0.1).astype(np.float32), state["trainable"])
        trainer.restore({**state, "trainable": drawn})
    return trainer


def check_gradient(params, case, spec, gather):
    """Packed rows of several prompts and completions, prefixes shared, cut wherever the devices' parts end."""
    trainer, data = make(params, case, mesh_of(spec), gather=gather), rollouts()
    adapters = None
    if case == "lora":
        tree = jax.tree.map(jnp.asarray, sharding.gathered(trainer.trainable))
        adapters = Adapters(tree, jnp.float32(LORA.scale))
    result = trainer.forward_backward(data, "importance_sampling", score="active")
    assert result.metrics["num_computed_tokens:sum"] < result.metrics["num_datum_tokens:sum"]
    close(sharding.gathered(trainer.accumulated_gradient), oracle_gradient(params, data, adapters))


@pytest.mark.parametrize("case, spec, gather", CORE)
def test_the_gradient_is_that_of_the_data_one_by_one(params, case, spec, gather):
    check_gradient(params, case, spec, gather)


@pytest.mark.extended
@pytest.mark.parametrize("case, spec, gather", MORE)
def test_it_is_over_any_other_mesh_too(params, case, spec, gather):
    check_gradient(params, case, spec, gather)


def test_a_loss_of_whole_sequences_sees_them_whole(params):
    """gspo's ratio is a sequence's, and a sequence with a log-prob that isn't finite is left out on every device."""
    data, spec = rollouts(), dataclasses.replace(SPEC, tied_embeddings=False)
    untied = {**params, "head": params["embed"].T.copy()}
    trainers = [make(untied, "full", mesh, spec) for mesh in (mesh_of(MeshSpec(1, 1, 4)), None)]
    split, one = (trainer.forward_backward(data, "gspo", score="active") for trainer in trainers)
    close(*(sharding.gathered(trainer.accumulated_gradient) for trainer in trainers))
    check_outputs(split, one)
    norms = [trainer.optim_step(AdamParams(learning_rate=1e-3)).metrics["grad_norm"] for trainer in trainers]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    tokens = [set(datum.tokens.tolist()) for datum in data]
    rare = next(token for token in range(1, SPEC.vocab_size) if sum(token in own for own in tokens) == 1)
    for trainer in trainers:
        broken = sharding.gathered(trainer.state())
        broken["trainable"]["embed"][rare] = np.nan  # of its row, attention makes NaN everywhere
        trainer.restore(broken)
    split, one = (trainer.forward_backward(data, "gspo", score="active") for trainer in trainers)
    check_outputs(split, one)
    assert len(data) > split.metrics["num_nonfinite:sum"] > 0


def check_outputs(found, expected):
    for own, other in zip(found.outputs, expected.outputs, strict=True):
        for name, values in other.items():
            np.testing.assert_allclose(own[name], values, atol=2e-5, err_msg=name)
    for name in expected.metrics.keys() - {"num_micro_batches:sum", "num_row_tokens:sum", "num_computed_tokens:sum"}:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5), name


@pytest.mark.extended
def test_scores_and_likeliest_tokens_come_back_in_order(params):
    split, one = (make(params, "full", mesh, rows=2) for mesh in (mesh_of(MeshSpec(2, 1, 2)), None))
    rng = np.random.default_rng(0)
    data = [Datum(t, {"target_tokens": t}) for t in (rng.integers(0, SPEC.vocab_size, n) for n in (48, 9, 31, 20))]
    for (ids, logprobs), (others, expected) in zip(split.likeliest(data, 3), one.likeliest(data, 3), strict=True):
        np.testing.assert_array_equal(ids, others)
        np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    for own, other in zip(*(t.forward(data, "cross_entropy").outputs for t in (split, one)), strict=True):
        np.testing.assert_allclose(own["logprobs"], other["logprobs"], atol=2e-5)


def over_parts(mesh, form):
    """form(q, k, v, until, first) on each device's queries, and the keys of whole rows."""

    def part(q, k, v, until):
        k, v = (sharding.whole_rows(x) for x in (k, v))
        return form(q, k, v, until, first=sharding.first_token(q))

    in_specs = (ROWS, ROWS, ROWS, PartitionSpec(FSDP))
    return jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=ROWS, axis_names=set(DATA), check_vma=False)


SPLASH = partial(kernels.splash, name=attention.ATTENDED, interpret=True)


@pytest.mark.parametrize(
    "form, spec, num_tokens, head, window",
    [
        (attention.packed, MeshSpec(1, 1, 4), 600, 8, None),  # 150 queries each, in blocks of 128
        (attention.packed, MeshSpec(2, 1, 2), 48, 8, 11),
        (SPLASH, MeshSpec(1, 1, 2), 256, 128, None),
        pytest.param(SPLASH, MeshSpec(1, 2, 2), 512, 128, 150, marks=pytest.mark.extended),
    ],
    ids=["plain", "plain, window", "splash", "splash, window"],
)
def test_attention_of_a_rows_parts_is_that_of_the_row(form, spec, num_tokens, head, window):
    """Segments that devices' parts cut, padding, groups of query heads: values, and gradients of keys seen by all."""
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=(2, num_tokens, n, head)), jnp.float32) for n in (4, 2, 2)]
    weights = jnp.asarray(rng.normal(size=operands[0].shape), jnp.float32)
    until = np.full((2, num_tokens), num_tokens * 3 // 4, np.int32)
    until[0, : num_tokens // 3] = num_tokens // 3
    until[:, num_tokens * 3 // 4 :] = np.arange(num_tokens * 3 // 4, num_tokens) + 1  # padding
    until = jnp.asarray(until)

    def outcome(form):
        def total(operands):
            out = form(*operands)
            return jnp.sum(out * weights), out

        (_, out), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(operands)
        return [out, *gradients]

    split = over_parts(mesh_of(spec), partial(form, window=window))
    found = outcome(lambda q, k, v: split(q, k, v, until))
    for ours, whole in zip(
        found, outcome(lambda q, k, v: attention.packed(q, k, v, until, window=window)), strict=True
    ):
        np.testing.assert_allclose(ours, whole, atol=5e-5)


def temporaries(sequence):
    """Bytes of a device, of a step on one row of 4096 tokens."""
    over = Over(mesh_of(MeshSpec(1, 1, sequence)), "layer")
    spec = ProgramSpec(SPEC, LORA, "float32", "linear", 64, False, sequence=sequence)
    state = abstract_state(spec, over, keep_transposes=False)
    batch = abstract_batch(
        over, rows=1, row_tokens=4096, loss_name="importance_sampling", inputs=("logprobs", "advantages")
    )
    options = LOSSES["importance_sampling"].options()
    jaxtyping.config.update("jaxtyping_disable", True)  # jax puts descriptions in arrays' places
    try:
        lowered = accumulate.lower(
            state.working, state.accumulators, state.fixed, batch, options,
            spec=spec, loss_name="importance_sampling", over=over,
        )  # fmt: skip
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_a_device_needs_memory_for_its_part_of_a_row():
    assert temporaries(4) < 0.35 * temporaries(1)  # 0.26 was seen, and 0.51 on two


def test_rows_that_cannot_be_split_are_refused(params):
    with pytest.raises(ConfigError, match="Rows of 50 tokens can't be split over the mesh's sequence axis of 4.*"
                                          "a multiple of 4 tokens. Make rows of 52 tokens"):  # fmt: skip
        make(params, "full", mesh_of(MeshSpec(1, 1, 4)), row_tokens=50)
    with pytest.raises(ConfigError, match="in multiples of 128 as the attention kernel.*Make rows of 512 tokens"):
        make(params, "full", mesh_of(MeshSpec(1, 1, 4)), row_tokens=300, attention="tpu")


def test_the_settings_make_the_mesh():
    config = load(None, ["training.mesh_fsdp=1", "training.mesh_sequence=2", "training.mesh_tensor=2"])
    assert dict(training_mesh(config).shape) == {"fsdp": 1, "sequence": 2, "tensor": 2}
