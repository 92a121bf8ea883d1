"""The forward pass: one block, used for packed rows (training, prefill) and for cached decoding alike.

The block is given the attention to use as a function, which is all in which the callers differ; so sampler and trainer
agree to rounding. Shape letters: R rows, T tokens of a row, D hidden, H heads, K kv heads, h head dim, F ffn, V vocab,
L layers, S tokens of a whole row, where T are its part. Decoding is R slots of T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from locojax.models import attention, sharding
from locojax.models.dense import along_last, dense, gated, head_product, native_rms_norm, rms_norm
from locojax.models.lora import Adapters, OfLayer, adapted_product, add_deltas
from locojax.models.native.ops import Packed, gates, norms, pack, packs
from locojax.models.remat import LAYER_INPUT, LINEAR, POLICIES
from locojax.models.spec import INIT_STD, ModelSpec, Parameter, RopeSpec, parameters

Params = Mapping[str, Any]
Rope = tuple[Array, Array]
"""See `rope_tables`."""

Attend = Callable[[Array, Array, Array, Rope], tuple[Array, Any]]
"""(q [R,T,H,h], k [R,T,K,h], v [R,T,K,h], what is to rotate q and k) -> (attended [R,T,H,h], whatever the caller wants
kept of this layer)."""


def rope_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """f32[h/2] inverse frequencies after scaling; computed once, on the host, in float64.

    Sources: linear: Chen et al. 2023; llama3: Llama 3.1's bands; yarn: Peng et al. 2023 (NTK by parts).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        base = base / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low = rope.original_max_positions / rope.low_freq_factor
        high = rope.original_max_positions / rope.high_freq_factor
        smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - smooth) * base / rope.factor + smooth * base
        base = np.where(wavelength > low, base / rope.factor, np.where(wavelength < high, base, mixed))
    elif rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (
                2 * math.log(rope.theta)
            )

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        base = base / rope.factor * ramp + base * (1 - ramp)
    return base.astype(np.float32)


def rope_tables(rope: RopeSpec, head_dim: int, positions: Array) -> Rope:
    """cos, sin f32[R, T, 1, h] for i32[R, T] positions, ready to multiply [R, T, heads, h]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope_frequencies(rope, head_dim)).reshape(1, 1, -1)
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates halves, as Hugging Face lays rotary dimensions out. x [R,T,heads,h]."""
    half = x.shape[-1] // 2
    x32 = x.astype(jnp.float32)
    rotated = jnp.concatenate([-x32[..., half:], x32[..., :half]], axis=-1)
    return (x32 * cos + rotated * sin).astype(x.dtype)


def rotated(q: Array, k: Array, rope: Rope) -> tuple[Array, Array]:
    return apply_rope(q, *rope), apply_rope(k, *rope)


GATE_UP = "gate_up"
JOINED: Mapping[tuple[str, ...], str] = {("q", "k", "v"): "qkv", ("gate", "up"): GATE_UP}
"""Weights that read the same input, and the name under which `unstack` stores them side by side."""

UNEMBED = "unembed"
"""In `unstack`'s tree, a head that isn't the embedding: [V, D]."""


def block(
    x: Array,
    layer: Params,
    spec: ModelSpec,
    rope: Rope,
    attend: Attend,
    lora: Params,
    adapters: Adapters | None,
) -> tuple[Array, Any]:
    """One transformer layer on x [R, T, D]; returns x and what `attend` kept."""
    R, T, _ = x.shape
    native = _of_kernels(layer)

    def norm(inputs: Array, name: str) -> Array:
        suits = native and norms(inputs.shape[-1]) and inputs.dtype == layer[name].dtype == jnp.bfloat16
        return (native_rms_norm if suits else rms_norm)(inputs, layer[name], spec.norm_eps)

    def biased(out: Array, name: str) -> Array:
        if f"{name}_bias" not in layer:
            return out
        return out + along_last(layer[f"{name}_bias"].astype(out.dtype), out)

    def multiply(inputs: Array, name: str) -> Array:
        return biased(dense(inputs, layer[name], layer.get(name + TRANSPOSED), train=adapters is None), name)

    def linears(inputs: Array, names: tuple[str, ...], sizes: tuple[int, ...]) -> list[Array]:
        """Projections of one input, adapted; in one array, side by side, where one kernel or GEMM makes all of it."""
        joined = JOINED.get(names, names[0])
        adapted = [] if adapters is None else [i for i, name in enumerate(names) if name in lora]
        if adapters is not None and adapted and joined in layer:
            w, w_t = layer[joined], layer.get(joined + TRANSPOSED)
            out = adapted_product(inputs, w, [lora.get(name) for name in names], adapters, w_t)
            if out is not None:
                return [checkpoint_name(biased(out, joined), LINEAR)]
        outs = [multiply(inputs, name) for name in ([joined] if joined in layer else names)]
        if adapters is not None and adapted:
            outs = apart(outs, sizes)
            more = add_deltas([outs[i] for i in adapted], inputs, [lora[names[i]] for i in adapted], adapters)
            for i, out in zip(adapted, more, strict=True):
                outs[i] = out
        return [checkpoint_name(out, LINEAR) for out in outs]

    def apart(outs: list[Array], sizes: tuple[int, ...]) -> list[Array]:
        return outs if len(outs) == len(sizes) else jnp.split(outs[0], np.cumsum(sizes)[:-1], axis=-1)

    def linear(inputs: Array, name: str) -> Array:
        return linears(inputs, (name,), (-1,))[0]

    normed = norm(x, "attn_norm")
    heads = spec.q_size, spec.kv_size, spec.kv_size
    q, k, v = apart(linears(normed, ("q", "k", "v"), heads), heads)
    q = q.reshape(R, T, spec.num_heads, spec.head_dim)
    k = k.reshape(R, T, spec.num_kv_heads, spec.head_dim)
    v = v.reshape(R, T, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        q = norm(q, "q_norm")
        k = norm(k, "k_norm")
    attended, kept = attend(q, k, v, rope)
    x = x + linear(attended.reshape(R, T, spec.q_size), "o")

    normed = norm(x, "mlp_norm")
    halves = spec.intermediate_size, spec.intermediate_size
    outs = linears(normed, ("gate", "up"), halves)
    if len(outs) == 1 and native and gates(spec.intermediate_size):
        return x + linear(gated(outs[0]), "down"), kept
    gate, up = apart(outs, halves)
    return x + linear(jax.nn.silu(gate) * up, "down"), kept


TRANSPOSED = "_t"
"""Suffix of a weight's transpose [L, F, D] in a tree's `layers`: see `dense` and `transposes`."""


def transposes(params: Params) -> dict[str, Array]:
    """The layers' matrices transposed, as arrays of their own, under the names that `block` looks for."""
    return {name + TRANSPOSED: leaf.swapaxes(1, 2) for name, leaf in params["layers"].items() if leaf.ndim == 3}


def forward(
    params: Params,
    spec: ModelSpec,
    tokens: Array,
    positions: Array,
    until: Array,
    *,
    adapters: Adapters | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    keep_kv: bool = False,
    whole: Callable[[Params], Params] | None = None,
    kernel: attention.PackedKernel = "plain",
    parts: int = 1,
) -> tuple[Array, tuple[Array, Array] | None]:
    """Packed rows -> final hidden states (after the last norm) [R, T, D] in `dtype`.

    Args:
      params: the tree of `spec.parameters`, any float dtype; cast to `dtype` where used.
      tokens, positions: i32[R, T]. until: i32[R, S], of whole rows; see `attention`.
      remat: a key of `remat.POLICIES`.
      keep_kv: also return (k, v), each [L, R, T, K, h] after rope: what prefill stores.
      whole: makes a layer's weights whole where each device holds a part; again in the backward pass, with remat.
      kernel: the form attention takes.
      parts: devices that rows are split over, T = S / parts tokens of each on this one. Above 1, in a program that is
        manual over the mesh's sequence axis.
    """
    def attend(q: Array, k: Array, v: Array, rope: Rope) -> tuple[Array, Any]:
        q, k = rotated(q, k, rope)
        kept = (k, v) if keep_kv else None
        if parts == 1:
            return attention.packed(q, k, v, until, kernel=kernel), kept
        # In one message; see `sharding.whole_rows`.
        k, v = jnp.split(sharding.whole_rows(jnp.concatenate([k, v], axis=-1)), 2, axis=-1)
        return attention.packed(q, k, v, until, first=sharding.first_token(q), kernel=kernel), kept

    return run_layers(params, spec, tokens, positions, attend, adapters=adapters, dtype=dtype, remat=remat, whole=whole)


def run_layers(
    params: Params,
    spec: ModelSpec,
    tokens: Array,
    positions: Array,
    attend: Attend,
    *,
    adapters: Adapters | None,
    dtype: DTypeLike,
    remat: str = "none",
    whole: Callable[[Params], Params] | None = None,
) -> tuple[Array, Any]:
    """Embeds, scans the stacked layers with `attend`, and applies the final norm. `kept` is stacked over layers."""
    x = embed(params, tokens, dtype)
    rope = rope_tables(spec.rope, spec.head_dim, positions)
    lora = {} if adapters is None else adapters.split()[0]

    def step(x: Array, layer_and_lora: tuple[Params, Params]) -> tuple[Array, Any]:
        layer, layer_lora = layer_and_lora
        x = checkpoint_name(x, LAYER_INPUT)
        layer = layer if whole is None else whole(layer)
        return block(x, layer, spec, rope, attend, layer_lora, adapters)

    if remat != "none":
        step = jax.checkpoint(step, policy=POLICIES[remat].saveable, prevent_cse=False)
    x, kept = jax.lax.scan(step, x, (params["layers"], lora))
    return rms_norm(x, params["final_norm"], spec.norm_eps), kept


CachedAttend = Callable[[Any, Array, Array, Array, Rope], tuple[Array, Any]]
"""As Attend, given a layer's cache first; what it keeps is the layer's new cache."""


def run_layers_unrolled(
    params: Params,
    spec: ModelSpec,
    tokens: Array,
    positions: Array,
    attend: CachedAttend,
    caches: Sequence[Any],
    *,
    adapters: Adapters | None,
    dtype: DTypeLike,
) -> tuple[Array, list[Any]]:
    """As `run_layers`, for a tree whose `layers` is a sequence of L unstacked layers, each with its own cache.

    Decoding uses it: a scan would copy each layer's weights and cache out of the stack on every token.
    """
    x = embed(params, tokens, dtype)
    rope = rope_tables(spec.rope, spec.head_dim, positions)
    lora = {} if adapters is None else adapters.split()[0]

    @jax.jit  # traced and lowered once instead of L times; XLA inlines the calls
    def step(x: Array, layer: Params, layer_lora: Params, cache: Any) -> tuple[Array, Any]:
        return block(x, layer, spec, rope, partial(attend, cache), layer_lora, adapters)

    def lora_of(i: int) -> Any:
        if adapters is not None and adapters.present is not None:
            return jax.tree.map(lambda leaf: OfLayer(leaf, jnp.int32(i)), lora)
        return jax.tree.map(lambda leaf: leaf[i], lora)

    kept = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        x, keep = step(x, layer, lora_of(i), cache)
        kept.append(keep)
    return rms_norm(x, params["final_norm"], spec.norm_eps), kept


def embed(params: Params, tokens: Array, dtype: DTypeLike) -> Array:
    """i32[R, T] -> [R, T, D]."""
    return params["embed"][tokens].astype(dtype)


def head_weight(params: Params) -> Array:
    """The unembedding [D, V] of a stacked tree: its own array, or the embedding transposed when tied."""
    return params["head"] if "head" in params else params["embed"].T


def unembedding(params: Params) -> Array | Packed:
    """The unembedding as decoding reads it, [V, D]: of `unstack`'s tree its own array or the tied embedding. Packed, it
    is [D, V]."""
    if UNEMBED in params:
        return params[UNEMBED]
    return params["head"].T if "head" in params else params["embed"]


def _of_kernels(layer: Params) -> bool:
    return any(isinstance(leaf, Packed) for leaf in layer.values())


def is_packed(params: Params) -> bool:
    """Whether `unstack` made this tree for the C++ kernels."""
    return _of_kernels(params["layers"][0])


def logits(params: Params, hidden: Array, adapters: Adapters | None = None) -> Array:
    """Final hidden states [R, T, D] -> fp32 logits [R, T, V]. Sampling and tests; training uses `logprobs`."""
    out = head_product(hidden, unembedding(params))
    head = None if adapters is None else adapters.split()[1]
    if adapters is not None and head is not None:
        (out,) = add_deltas([out], hidden, [head], adapters)
    return out


def join(layer: Params) -> dict[str, Array]:
    """One layer's weights, or all layers' stacked, those that read the same input side by side (see JOINED)."""
    layer = dict(layer)
    for names, joined in JOINED.items():
        for suffix in ("", "_bias"):
            parts = [layer.pop(name + suffix) for name in names if name + suffix in layer]
            if parts:
                layer[joined + suffix] = jnp.concatenate(parts, axis=-1)
    return layer


def unstack(params: Params, spec: ModelSpec, dtype: DTypeLike, *, packed: bool = False) -> dict[str, Any]:
    """The tree decoding wants: layers as a list, cast once, and a head that isn't tied as `UNEMBED`, [V, D].

    With `packed`, matrices as the C++ kernels read them, and the head is one of its own though it be tied.

    Weights that read the same input are joined along their outputs: at decoding's few rows, one wide GEMM runs at up to
    twice the rate of the narrow ones it replaces.
    """

    def one(i: int) -> dict[str, Any]:
        layer = join({name: leaf[i].astype(dtype) for name, leaf in params["layers"].items()})
        return {name: pack(leaf) if packed and packs(leaf.shape) else leaf for name, leaf in layer.items()}

    tree = {
        "embed": params["embed"].astype(dtype),
        "layers": [one(i) for i in range(spec.num_layers)],
        "final_norm": params["final_norm"].astype(dtype),
    }
    if packed and packs(head_weight(params).shape):
        return tree | {UNEMBED: pack(head_weight(params).astype(dtype))}
    return tree | ({UNEMBED: params["head"].T.astype(dtype)} if "head" in params else {})


@partial(jax.jit, static_argnames=("spec", "dtype"))
def init_params(spec: ModelSpec, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Random weights (normal, std INIT_STD; norms one; biases zero), for tests."""
    declared, treedef = jax.tree.flatten(parameters(spec), is_leaf=lambda leaf: isinstance(leaf, Parameter))
    keys = jax.random.split(key, len(declared))

    def draw(parameter: Parameter, key: Array) -> Array:
        if parameter.init == "normal":
            return (INIT_STD * jax.random.normal(key, parameter.shape, jnp.float32)).astype(dtype)
        return jnp.full(parameter.shape, 1.0 if parameter.init == "ones" else 0.0, dtype)

    return jax.tree.unflatten(treedef, [draw(p, k) for p, k in zip(declared, keys, strict=True)])
