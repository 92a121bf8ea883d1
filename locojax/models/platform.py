"""What "auto" means for the compute dtype on the machine at hand."""

from __future__ import annotations

import pathlib

import jax

CPU_INFO = pathlib.Path("/proc/cpuinfo")

BF16_FLAGS = ("avx512_bf16", "amx_bf16")
"""x86 features with bf16 multiply-add. Without one a CPU converts to fp32 and back: measured on Zen 3, bf16 GEMMs run
at 110 GFLOP/s where fp32 ones run at 180; with AVX-512 BF16 on Zen 4, 370 against 190."""


def auto_dtype(platform: str | None = None, cpu_info: pathlib.Path = CPU_INFO) -> str:
    """"bfloat16" on TPU, GPU and CPUs with bf16 arithmetic, else "float32".

    Args:
      platform: jax's name of it; None: the default backend's.
      cpu_info: where the kernel lists the CPU's features. A CPU it says nothing about is taken to have none.
    """
    if (platform or jax.default_backend()) != "cpu":
        return "bfloat16"
    try:
        words = set(cpu_info.read_text(encoding="utf-8").split())
    except OSError:  # not Linux
        return "float32"
    return "bfloat16" if words.intersection(BF16_FLAGS) else "float32"


def auto_tile(platform: str | None = None) -> int:
    """Positions the head works on at a time: few where an RL batch's active positions would not fill more.

    On CPU a GEMM of 128 rows already runs at 2/3 of the best rate, and a tile's padding is computed like the rest. On
    accelerators every tile reads the whole head again, so it must be large.
    """
    return 128 if (platform or jax.default_backend()) == "cpu" else 1024


def processor() -> str:
    """The CPU's features, as the kernel lists them; "" where it doesn't."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: the device's kind must do
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
