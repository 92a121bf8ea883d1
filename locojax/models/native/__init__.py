"""Kernels in C++ for bf16 on CPUs that multiply it, where XLA packs a product's right side anew every time.

    build      finds a compiler, makes the library once, keeps it, and gives its kernels to jax
    ops        the kernels as functions of jax arrays, each beside its plain twin in `models`
"""
