"""What test_fit runs in a child process, without the test's own imports."""

from __future__ import annotations

import os

from locojax.errors import ConfigError


def die(begin):
    begin("first", ("second",))
    os.write(2, b"F1130 01:02:03.4 17 fusion.cc:1] Check failed: x == 0\n*** SIGABRT ***\n")
    os._exit(3)
    yield


def refuse(begin):
    raise ConfigError("This can't be")
    yield


def two(begin):
    begin("first", ("second",))
    yield 1
    begin("second", ())
    yield 2


def compile_plans(plans, slice, begin):
    """Name, program -> what the compiler says; of several plans in one process, whose start takes longest."""
    from locojax.measure.fit import compile_each

    for name, (plan, programs) in plans.items():
        for done in compile_each(plan, slice, programs, (), False, begin):
            yield name, done


def compile_kernels(begin):
    """Name -> the compiled text of a kernel; remat policy -> temporaries on the device and the host. For v5p."""
    import dataclasses
    from functools import partial

    import jax
    import jax.numpy as jnp

    from locojax.measure import fit_chips, fit_models
    from locojax.measure.fit import devices_of
    from locojax.measure.fit_programs import target
    from locojax.models import attention, decoder

    device = devices_of(fit_chips.parse("v5p:2x2x1"))[0]
    bf16, i32 = jnp.bfloat16, jnp.int32

    def compiled(function, *given):
        place = jax.sharding.SingleDeviceSharding(device)
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), given)
        with target(device):
            return jax.jit(function).trace(*given).lower().compile()

    def total(form, *given):
        return jnp.sum(form(*given).astype(jnp.float32))

    like = jax.ShapeDtypeStruct
    begin("splash", ())
    splash = jax.grad(partial(total, partial(attention.packed, kernel="tpu")), (0, 1, 2))
    row = like((1, 4096, 8, 128), bf16)
    yield "splash", compiled(splash, like((1, 4096, 16, 128), bf16), row, row, like((1, 4096), i32)).as_text()
    begin("ragged", ())
    ragged = partial(attention.decode_paged, kernel="tpu")
    pages, table = like((512, 128, 16, 128), bf16), like((64, 64), i32)
    yield "ragged", compiled(ragged, like((64, 64, 128), bf16), pages, table, like((64,), i32)).as_text()
    spec = dataclasses.replace(
        fit_models.find("qwen3-0.6b"), num_layers=4, hidden_size=256, intermediate_size=512, vocab_size=1024
    )
    params = jax.eval_shape(lambda: decoder.init_params(spec, jax.random.key(0), bf16))
    tokens = like((1, 4096), i32)
    for remat in ("full", "offload"):
        begin(remat, ())

        def hidden(params, tokens, remat=remat):
            form = partial(decoder.forward, dtype=bf16, remat=remat, kernel="tpu")
            return form(params, spec, tokens, tokens, tokens)[0]

        memory = compiled(jax.grad(partial(total, hidden)), params, tokens).memory_analysis()
        yield remat, (memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)
