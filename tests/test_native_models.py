"""Engine and tenants with the C++ kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import kernels  # noqa: F401  (a fixture)
from rollout_models import Bytes, prompts

from locojax.models import decoder
from locojax.models.lora import Adapters, LoraSpec, empty_stack, init_adapter
from locojax.models.native import build
from locojax.models.spec import ModelSpec, RopeSpec
from locojax.rollout.engine import Engine
from locojax.rollout.settings import EngineSettings
from locojax.training.tenants import TenantSettings, TenantTrainer
from locojax.types import AdamParams, Datum, SampleRequest, SamplingParams

MODEL = ModelSpec(
    family="qwen2", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, norm_eps=1e-6, rope=RopeSpec(10000.0), max_context=128, qkv_bias=True,
)  # fmt: skip
LORA = LoraSpec(rank=4, alpha=8.0, unembed=True)


@pytest.fixture(scope="module")
def engine():
    """Rows of any number, in bf16, with an adapter of numbers that matter in row 1."""
    settings = EngineSettings(
        max_slots=8, max_prefill_tokens=64, max_iterations=8, kv_bytes=1 << 22, layout="rows", page_size=4,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "why_not", lambda dtype: None)  # the machine may have no bf16 units
        engine = Engine(MODEL, settings, Bytes())
    assert engine.compiler.spec.layout.native
    params = random_params()
    stack = empty_stack(MODEL, LORA.rank, 3, jnp.bfloat16)
    engine.load(decoder.unstack(params, MODEL, jnp.bfloat16, packed=True), 0, stack)
    engine.set_adapter(1, random_adapter(), scale=LORA.scale, version=0)
    return engine


def random_params():
    tree = decoder.init_params(MODEL, jax.random.key(0))
    scaled = {name: leaf * (1 if name.endswith("norm") else 6) for name, leaf in tree["layers"].items()}
    key = jax.random.key(7)
    biases = {name: 0.3 * jax.random.normal(key, scaled[name].shape) for name in ("q_bias", "k_bias", "v_bias")}
    return {**tree, "layers": {**scaled, **biases}, "head": tree["head"] * 15}


def random_adapter():
    def random(leaf):
        return jnp.asarray(0.1 * np.random.default_rng(leaf.size).normal(size=leaf.shape), jnp.float32)

    return jax.tree.map(random, init_adapter(MODEL, LORA, 0))


@pytest.mark.parametrize("adapter", [0, 1])
@pytest.mark.parametrize("count", [1, 5])
def test_an_engine_s_log_probs_are_the_model_s(engine, adapter, count):
    requests = [
        SampleRequest(f"{i}", prompt, SamplingParams(max_tokens=12, stop=(), seed=i), 1, adapter=adapter)
        for i, prompt in enumerate(prompts(count, seed=adapter))
    ]
    params = random_params()
    for request, result in zip(requests, engine.generate(requests), strict=True):
        (completion,) = result.completions
        sequence = jnp.asarray([*request.prompt, *completion.tokens], jnp.int32)[None]
        lora = Adapters(random_adapter(), jnp.float32(LORA.scale)) if adapter else None
        hidden, _ = decoder.forward(params, MODEL, sequence, jnp.arange(sequence.shape[1], dtype=jnp.int32)[None],
                                    jnp.full(sequence.shape, sequence.shape[1], jnp.int32), adapters=lora)  # fmt: skip
        table = jax.nn.log_softmax(decoder.logits(params, hidden, lora)[0])
        at = np.arange(len(request.prompt) - 1, sequence.shape[1] - 1)
        np.testing.assert_allclose(completion.logprobs, table[at, sequence[0, at + 1]], atol=0.15)


def test_tenants_train_alike_by_both():
    """The same gradient from the kernels as from XLA: what a step of Adam reads, up to bf16."""
    data = [Datum(np.arange(9, dtype=np.int32) + i, {"target_tokens": np.arange(9) + i + 1, "weights": np.ones(9, "f")})
            for i in range(3)]  # fmt: skip
    norms = {}
    for choice in ("native", "xla"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "why_not", lambda dtype: None)
            settings = TenantSettings(32, max_rank=4, max_adapters=2, compute_dtype="bfloat16", kernels=choice)
            trainer = TenantTrainer(MODEL, random_params(), settings)
        trainer.create("m", LORA, 0)
        norms[choice] = []
        for _ in range(3):
            work = trainer.begin("m", data, "cross_entropy")
            while not work.done:
                trainer.advance([work])
            loss = work.result().metrics["loss:sum"]
            norms[choice].append((loss, trainer.optim_step("m", AdamParams(1e-2)).metrics["grad_norm"]))
    np.testing.assert_allclose(norms["native"], norms["xla"], rtol=0.03)
    assert norms["native"][2][0] < norms["native"][0][0]
