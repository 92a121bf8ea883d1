"""`locojax fit`: topologies, the compiler's words, counting, the search, and figures held against the CPU's own."""

from __future__ import annotations

import dataclasses
import io
import json

import fit_steps
import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from locojax import cli
from locojax.errors import ConfigError, LocoError, ModelError
from locojax.measure import fit_apart, fit_chips, fit_models, fit_report, fit_search
from locojax.measure.fit import Compiled, Report, largest_buffers, needed_bytes, roofline
from locojax.measure.fit_chips import GIB
from locojax.measure.fit_count import Assumptions, Work, count
from locojax.measure.fit_programs import Plan, RolloutPlan, Trainer, mesh_of
from locojax.models import kernels
from locojax.models.lora import LoraSpec
from locojax.models.remat import POLICIES, kept_bytes
from locojax.models.spec import ModelSpec

TINY = ModelSpec.from_hf_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }
)  # fmt: skip
ON_CPU = Plan(
    TINY, LoraSpec(4), 256, remat="linear", tile_tokens=64, compute_dtype="float32", gather="step", kernel="plain",
    rollout=RolloutPlan("none"),
)  # fmt: skip
CPU = fit_chips.parse("cpu", 24.0)


def variant(**changes):
    return dataclasses.replace(ON_CPU, **changes), ("forward_backward",)


PLANS = {
    "1024": variant(row_tokens=1024),
    "2048": variant(row_tokens=2048),
    "large vocabulary": variant(row_tokens=2048, model=dataclasses.replace(TINY, vocab_size=8192)),
    "none": variant(row_tokens=1024, remat="none"),
    "full": variant(row_tokens=1024, remat="full"),
}
TRAINED = {"trained": (dataclasses.replace(ON_CPU, lora=None), ("forward_backward", "update"))}


def compile_apart(plans):
    """(a key of plans, program) -> what the CPU's compiler says; in a process without the tests' type checks."""
    done = []
    assert fit_apart.run(fit_steps.compile_plans, (plans, CPU), done.append, lambda text: None) is None
    return {(name, program.name): program for name, program in done}


@pytest.fixture(scope="module")
def compiled():
    return compile_apart(PLANS)


def test_a_slice_is_known_by_name():
    slice = fit_chips.parse("tpu7x:2x2x2")
    assert (slice.name, slice.num_chips, slice.num_devices) == ("v7x:2x2x2", 8, 16)
    assert [other.shape for other in fit_chips.parse("v5p:4x4x8").larger()] == ["4x8x8", "8x8x8"]
    assert fit_chips.parse("cpu:4", 8.0).num_devices == 4


@pytest.mark.parametrize(
    "name, words",
    [
        ("v5q:2x2x1", ["Unknown topology 'v5q:2x2x1'", "v5e: 1x1, 2x2", "v7x: 2x2x1", "Did you mean v5p:2x2x1?"]),
        ("v5p:3x3", ["got: the shape '3x3'", "one of v5p:2x2x1, v5p:2x2x2"]),
        ("v6e", ["no shape", "v6e:2x2"]),
        ("cpu:x", ["cpu or cpu:N"]),
    ],
)
def test_an_unknown_topology_is_refused_with_those_there_are(name, words):
    with pytest.raises(ConfigError) as caught:
        fit_chips.parse(name)
    for word in words:
        assert word.lower() in str(caught.value).lower()


def test_a_model_is_known_by_name_or_config(tmp_path):
    assert fit_models.find("qwen3-0.6b").tied_embeddings
    (tmp_path / "config.json").write_text(json.dumps(fit_models.KNOWN["qwen3-8b"]))
    assert fit_models.find(str(tmp_path / "config.json")).num_layers == 36
    with pytest.raises(ModelError, match="Did you mean 'qwen3-0.6b'"):
        fit_models.find("qwen3-0.6")


def test_a_mesh_that_does_not_divide_the_model_is_refused_by_dimension():
    model = dataclasses.replace(TINY, hidden_size=66)
    with pytest.raises(ConfigError) as caught:
        mesh_of(dataclasses.replace(ON_CPU, model=model), jax.devices()[:4])
    assert "hidden_size of 66" in str(caught.value) and "1, 2, 3, 6" in str(caught.value)


def test_the_compilers_refusal_is_read():
    words = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    assert needed_bytes(words + "temporaries (245.93G) exceeds available HBM (95.73G).") == int(245.93 * GIB)
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 43.72G of 31.25G hbm."
    assert needed_bytes(used) == int(43.72 * GIB)
    assert needed_bytes("INVALID_ARGUMENT: no such thing") is None


def test_the_largest_arrays_are_those_that_take_memory():
    text = """
%fused_computation.1 (p: f32[999,999]) -> f32[999,999] {
  ROOT %big = f32[999,999]{1,0} add(%p, %p)
}
ENTRY %main (p0: bf16[64,64]) -> f32[] {
  %p0 = bf16[64,64]{1,0} parameter(0)
  %a = bf16[128,64]{1,0:T(8,128)} copy(%p0), metadata={op_name="jit(f)/shard_map/layers/dot_general"}
  ROOT %b = f32[8]{0} fusion(%a), kind=kLoop
}"""
    assert [(b.num_bytes, b.shape, b.origin) for b in largest_buffers(text)] == [
        (128 * 64 * 2, "bf16[128,64]", "layers/dot_general"), (32, "f32[8]", "b"),
    ]  # fmt: skip


def test_products_are_counted_as_often_as_loops_run_them():
    def f(x, w):
        def step(carry, _):
            return jnp.tanh(carry @ w), None

        y, _ = jax.lax.scan(step, x, None, length=5)
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: c @ w, y)

    like = jax.ShapeDtypeStruct
    work = count(jax.jit(f).trace(like((8, 16), jnp.float32), like((16, 16), jnp.float32)), Assumptions(trips=3))
    assert work.flops == (5 + 3) * 2 * 8 * 16 * 16
    assert work.memory_bytes == (5 + 3) * 4 * (8 * 16 + 16 * 16 + 8 * 16)


def test_a_step_is_counted_as_its_model_says():
    """Forward 2 flops a weight and token, as many again for what is fed back (no gradient of a frozen base)."""
    trainer = Trainer.of(dataclasses.replace(ON_CPU, remat="none"), jax.devices()[:1])
    step = trainer.programs()[0]
    work = count(step.trace(), Assumptions(step.trips))
    D, F, L, Q, KV, N = 64, 96, 2, 64, 32, 256
    weights = L * (D * Q + 2 * D * KV + Q * D + 3 * D * F)
    adapters = L * 4 * (D + Q + 2 * (D + KV) + Q + D + 2 * (D + F) + F + D)
    scores = L * sum(128 * keys * Q for keys in (128, 256))  # blocks of queries, each over the keys before its end
    head = 2 * N * D * 512
    # Attention: two products and a sum by a third (16 columns, as wide as this model's heads), then five.
    least = 2 * N * (2 * weights + 3 * adapters) + 2 * scores * 8 + 2 * head
    assert least <= work.flops <= least + 1.1 * head  # each of the head's loops is taken to see every position


def fake(limit_gib, needs):
    """A `fit` that says of each plan what `needs(plan, slice)` GiB does."""
    asked = []

    def fit(plan, slice, *, only=(), done=(), say=print):
        asked.append((plan, slice, only))
        program = Compiled("forward_backward", int(needs(plan, slice) * GIB), {}, Work())
        chip = dataclasses.replace(slice.chip, hbm_gib=limit_gib)
        return Report(plan, dataclasses.replace(slice, chip=chip), (program,))

    return fit, asked


def needs(plan, slice):
    kept = {"none": 8, "linear": 4, "dots": 3, "attention": 2, "full": 1, "offload": 0.5}[plan.remat]
    return 10 + plan.rows * kept * 8 / slice.num_devices / plan.tensor / plan.sequence


def test_the_search_finds_the_least_change_of_each_setting():
    plan = dataclasses.replace(ON_CPU, rows=8, remat="linear", kernel="tpu")
    slice = fit_chips.parse("v5p:2x2x1")
    fit, asked = fake(30.0, needs)
    ways = fit_search.nearest(fit(plan, slice), say=lambda text: None, fit=fit)
    assert [(found.change, found.report is not None) for found in ways] == [
        ("--micro-batch-tokens 2048", True),  # 2 rows of 256 tokens on each of 4 devices
        ("tile", False), ("--remat full", True),
        ("sharding", False),  # more rows on each of fewer fsdp devices
        ("--topology v5p:2x2x2", True),
    ]  # fmt: skip
    assert {only for _, _, only in asked[1:]} == {("forward_backward",)}


def test_the_search_splits_a_row_that_is_too_long_by_itself():
    plan = dataclasses.replace(ON_CPU, row_tokens=512, remat="offload", kernel="tpu")
    fit, asked = fake(12.0, lambda plan, slice: 10 + plan.device_tokens / 100)
    ways = fit_search.nearest(fit(plan, fit_chips.parse("v5p:2x2x1")), say=lambda text: None, fit=fit)
    found = [(way.change, way.report is not None) for way in ways]
    assert ("--sequence-parallel 4 --micro-batch-tokens 512", True) in found  # one row on the four devices
    assert [plan.sequence for plan, _, _ in asked if plan.sequence > 1] == [2, 4]


def test_a_row_that_the_devices_do_not_divide_is_refused():
    plan = dataclasses.replace(ON_CPU, row_tokens=1000, sequence=4, kernel="tpu")
    with pytest.raises(ConfigError, match="Rows of 1000 tokens can't be split .* axis of 4.*Make rows of 1024 tokens"):
        mesh_of(plan, jax.devices()[:4])


def test_a_part_of_a_row_is_counted_as_its_device_computes_it():
    """All but attention is a fourth of the row's; of a causal kernel the last device has the most blocks."""
    whole, split = (dataclasses.replace(ON_CPU, row_tokens=1024, sequence=n, gather="layer") for n in (1, 4))
    tokens = [plan.micro_batch_tokens(4) for plan in (whole, split)]
    assert tokens == [4096, 1024] and split.device_tokens == 256
    steps = [Trainer.of(plan, jax.devices()[:4]).programs()[0] for plan in (whole, split)]
    works = [count(step.trace(), Assumptions(step.trips)) for step in steps]
    assert 0.2 < works[1].flops / works[0].flops < 0.3
    kernel = count(_kernel_trace(), Assumptions()).flops
    assert count(_kernel_trace(), Assumptions(sequence=4)).flops == pytest.approx(kernel / 0.5 * 0.875)


def _kernel_trace():
    like = jax.ShapeDtypeStruct
    rows, until = like((1, 128, 2, 128), jnp.float32), like((1, 128), jnp.int32)
    return jax.jit(lambda q, until: kernels.splash(q, q, q, until, name="x")).trace(rows, until)


def test_the_smallest_slice_is_found():
    plan = dataclasses.replace(ON_CPU, rows=8, remat="none", kernel="tpu")
    fit, _ = fake(30.0, needs)
    report = fit_search.smallest(plan, fit_chips.slices_of("v5p"), say=lambda text: None, fit=fit)
    assert report is not None and report.slice.name == "v5p:2x2x4" and report.plan.rows == 2
    fit, _ = fake(5.0, needs)
    assert fit_search.smallest(plan, fit_chips.slices_of("v5p"), say=lambda text: None, fit=fit) is None


def test_a_crash_of_the_compiler_is_a_result():
    said, taken = [], []
    assert fit_apart.run(fit_steps.die, (), taken.append, said.append) == ("first", ("second",), "Check failed: x == 0")
    assert fit_apart.run(fit_steps.two, (), taken.append, said.append) is None
    assert taken == [1, 2] and said == ["compiling first", "compiling first", "compiling second"]
    with pytest.raises(LocoError, match="This can't be"):
        fit_apart.run(fit_steps.refuse, (), taken.append, said.append)


@pytest.mark.extended
def test_temporaries_follow_the_token_budget_and_not_the_vocabulary(compiled):
    small, large, many = (compiled[name, "forward_backward"].temporaries for name in list(PLANS)[:3])
    assert 1.7 < large / small < 2.3
    tile = ON_CPU.tile_tokens * 8192 * 4
    embedding = 8192 * TINY.hidden_size * 4
    # What the vocabulary adds is a few tiles and the head, not [tokens, vocabulary], which would be 32 tiles.
    assert many - large < 8 * tile + 2 * embedding < 2048 * 8192 * 4


def test_more_is_kept_under_dearer_policies():
    kept = [kept_bytes(name, TINY, 2) for name in list(POLICIES)[1:]]
    assert kept == sorted(kept, reverse=True) and kept_bytes("none", TINY, 2) != kept_bytes("none", TINY, 2)


@pytest.mark.extended
def test_what_is_made_again_takes_no_memory(compiled):
    assert compiled["full", "forward_backward"].temporaries < 0.8 * compiled["none", "forward_backward"].temporaries


def test_the_optimizer_is_counted_beside_the_step_and_the_verdict_follows():
    plan, names = TRAINED["trained"]
    compiled = compile_apart(TRAINED)
    done = [compiled["trained", name] for name in names]
    masters = sum(leaf.size * 4 for leaf in jax.tree.leaves(Trainer.of(plan, jax.devices()[:1]).state.trainable))
    assert done[0].beside["optimizer"] == 2 * masters + 4
    report = Report(plan, CPU, tuple(done))
    assert report.fits and report.peak == max(c.peak + sum(c.beside.values()) for c in done)
    chip = dataclasses.replace(CPU.chip, hbm_gib=report.peak / GIB * 0.99)
    tight = dataclasses.replace(report, slice=dataclasses.replace(CPU, chip=chip))
    assert not tight.fits and tight.failing()
    shown = console_text(fit_report.show(tight))
    assert "Does not fit: forward_backward" in shown and "linear *" in shown


def console_text(shown):
    console = Console(width=160, file=io.StringIO())
    console.print(shown)
    return console.file.getvalue()


def test_the_roofline_is_the_slowest_of_three():
    program = Compiled("p", 0, {}, Work(459e12, 2765e9 * 2, 600e9 * 3), arguments=0, outputs=0)
    roof = roofline(program, fit_chips.CHIPS["v5p"])
    assert (roof.compute, roof.memory, roof.network) == pytest.approx((1, 2, 3))
    assert roof.bound == "network" and roofline(program, CPU.chip) is None


@pytest.mark.extended
def test_the_command_says_whether_it_fits(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**fit_models.KNOWN["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 96,
                                  "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                                  "head_dim": 16, "vocab_size": 512}))  # fmt: skip
    words = ["fit", str(config), "--topology", "cpu", "--context", "256", "--lora-rank", "4", "--kv-gib", "0.01"]
    assert cli.main([*words, "--json", "-", "--max-slots", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and 0 < found["peak_gib"] < 1
    assert set(found["programs"]) == {
        "forward_backward", "update", "score", "publish", "publish_base", "decode", "prefill", "prefill_chunk",
    }  # fmt: skip
    assert all(program["flops"] > 0 for name, program in found["programs"].items() if name in ("score", "decode"))
