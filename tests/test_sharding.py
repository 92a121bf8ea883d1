"""Meshes, and which dimension of a parameter goes over which of their axes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from locojax.errors import ConfigError
from locojax.models import sharding
from locojax.models.lora import LoraSpec, adapter_parameters
from locojax.models.sharding import MeshSpec, make_mesh
from locojax.models.spec import ModelSpec, RopeSpec, parameters

SPEC = ModelSpec(
    family="qwen2",
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0),
    max_context=128,
    tied_embeddings=False,
    qkv_bias=True,
)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of a host, where there is one host only."""

    id: int
    process_index: int
    platform: str = "cpu"


def hosts_of(num_hosts, per_host):
    return [FakeDevice(i, i % num_hosts) for i in range(num_hosts * per_host)]


DATA = ("fsdp", "sequence")


def mesh_of(fsdp, tensor=1, sequence=1):
    return make_mesh(MeshSpec(fsdp, tensor, sequence), jax.devices()[: fsdp * tensor * sequence])


def test_all_devices_are_taken():
    mesh = make_mesh(MeshSpec(tensor=2), jax.devices())
    assert mesh.axis_names == ("fsdp", "sequence", "tensor") and mesh.devices.shape == (len(jax.devices()) // 2, 1, 2)
    assert sharding.num_local_shards(mesh) == mesh.devices.shape[0] and not sharding.spans_processes(mesh)


@pytest.mark.parametrize(
    "spec, devices, text",
    [
        (MeshSpec(tensor=3), 4, "a multiple of 3"),
        (MeshSpec(fsdp=2, tensor=1), 4, "Got: 4 devices. Expected: 2."),
        (MeshSpec(sequence=3), 4, "fsdp all x sequence 3 x tensor 1 does not fit .* a multiple of 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(spec, devices, text):
    with pytest.raises(ConfigError, match=text):
        make_mesh(spec, hosts_of(1, devices))


@pytest.mark.parametrize(
    "spec, axes",
    [
        (MeshSpec(tensor=2), "tensor axis of 2"),
        (MeshSpec(sequence=2), "sequence axis of 2"),
        (MeshSpec(tensor=3, sequence=2), "sequence axis of 2 x tensor axis of 3"),
    ],
)
def test_a_row_stays_on_one_host(spec, axes):
    with pytest.raises(ConfigError, match=f"The mesh's {axes} would span hosts of 3 devices. Expected: a row on 1, 3"):
        make_mesh(spec, hosts_of(2, 3))


@pytest.mark.parametrize("axis, value", [("fsdp", 0), ("fsdp", -2), ("tensor", 0), ("sequence", 0)])
def test_sizes_of_axes_are_checked(axis, value):
    with pytest.raises(ConfigError, match=f"mesh's {axis} axis must be at least 1"):
        MeshSpec(**{axis: value})


def test_each_parameter_goes_where_the_table_says():
    of = sharding.partitions(parameters(SPEC), SPEC, mesh_of(2, 2))
    assert of["embed"] == P(None, DATA)  # 67 tokens can't be halved
    assert of["head"] == P(DATA, None)
    layers = of["layers"]
    assert layers["q"] == layers["k"] == layers["gate"] == P(None, DATA, "tensor")
    assert layers["o"] == layers["down"] == P(None, "tensor", DATA)
    assert of["final_norm"] == layers["attn_norm"] == layers["q_bias"] == P()


def test_kv_heads_that_the_tensor_axis_does_not_divide_are_replicated_over_it():
    layers = sharding.partitions(parameters(SPEC), SPEC, mesh_of(1, 4))["layers"]
    assert layers["q"] == P(None, DATA, "tensor") and layers["k"] == layers["v"] == P(None, DATA, None)


def test_adapters_are_split_wherever_the_mesh_divides_them():
    adapter = sharding.partitions(adapter_parameters(SPEC, LoraSpec(4, unembed=True)), SPEC, mesh_of(2, 2))
    assert adapter["q"] == {"a": P(None, DATA, None), "b": P(None, None, (*DATA, "tensor"))}
    assert adapter["down"] == {"a": P(None, (*DATA, "tensor"), None), "b": P(None, None, DATA)}
    assert adapter["head"] == {"a": P(DATA, None), "b": P(DATA, None)}
    uneven = sharding.partitions(adapter_parameters(SPEC, LoraSpec(3, unembed=True)), SPEC, mesh_of(2, 2))
    assert uneven["head"]["b"] == P(None, None)


@pytest.mark.parametrize(
    "fsdp, tensor, text",
    [
        (3, 1, "hidden_size of 32 can't be divided over the mesh's fsdp axis. Got: fsdp = 3. Expected: one of 1, 2, 4"),
        (1, 3, "num_heads of 4 can't be divided over the mesh's tensor axis. Got: tensor = 3. Expected: one of 1, 2"),
    ],
)
def test_a_model_that_the_mesh_does_not_divide_is_refused_by_dimension(fsdp, tensor, text):
    with pytest.raises(ConfigError, match=text):
        sharding.check_divides(SPEC, mesh_of(fsdp, tensor))


def test_weights_are_split_over_the_devices_of_a_row_too():
    mesh = mesh_of(2, 1, 2)
    placed = sharding.placed(np.zeros((2, 32, 8)), NamedSharding(mesh, P(None, DATA, "tensor")), jnp.float32)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 8, 8)}
    with pytest.raises(ConfigError, match="hidden_size of 30 .* over the mesh's fsdp and sequence axes. Got: their "
                                          "product = 4. Expected: one of 1, 2, 3, 5"):  # fmt: skip
        sharding.check_divides(dataclasses.replace(SPEC, hidden_size=30), mesh)


def test_parts_of_partitions():
    both = P(None, (*DATA, "tensor"), DATA)
    assert sharding.without_data(both) == P(None, "tensor", None)
    assert sharding.only_data(both) == P(None, DATA, DATA)
    assert sharding.data_dimension(P(None, "tensor")) == -1 and sharding.data_dimension(P("tensor", DATA)) == 1


def test_arrays_are_placed_copied_and_gathered():
    mesh, whole = mesh_of(4), np.arange(24, dtype=np.float64).reshape(3, 8)
    placed = sharding.placed(whole, NamedSharding(mesh, P(None, DATA)), jnp.float32)
    whole[:] = 0  # the caller's, to do with as it likes
    assert placed.dtype == jnp.float32 and {shard.data.shape for shard in placed.addressable_shards} == {(3, 2)}
    copy = sharding.copied_to(placed, NamedSharding(mesh, P()), jnp.dtype(jnp.bfloat16))
    own = sharding.own_copy(copy)
    assert own.dtype == jnp.bfloat16 and own.devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(sharding.gathered({"a": placed})["a"], np.arange(24).reshape(3, 8))


def test_whole_weights_and_the_gradient_of_a_part():
    """Each device's gradient is its part of the sum over devices of what each makes of the whole."""
    mesh, rng = mesh_of(2, 1, 2), np.random.default_rng(0)
    w, x = rng.normal(size=(3, 8)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)

    def part(shard, row):
        return jax.grad(lambda w: jnp.sum((row @ sharding.whole(w, 1, jnp.float32)) ** 2))(shard)

    found = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(P(None, DATA), P(DATA)),
            out_specs=P(None, DATA),
            axis_names=set(DATA),
            check_vma=False,
        )
    )(w, x)
    np.testing.assert_allclose(found, 2 * x.T @ (x @ w), rtol=1e-5)
