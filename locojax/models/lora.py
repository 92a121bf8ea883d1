"""Low-rank adapters (Hu et al. 2021) as a pytree of their own, beside a frozen base.

An adapter is `{module: {"a": [L, in, r], "b": [L, r, out]}}` for the modules of the layers, and `"head": {"a": [D, r],
"b": [r, V]}`. Many adapters are the same tree with one more axis, N, *after* the layer axis (`[L, N, in, r]`; in the
head it comes first, `[N, D, r]`), so that a scan over layers slices the leading one; a row's index picks its adapter.
The scale is applied to `x @ a`, never folded into the weights, so that a rank or alpha can't be lost on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from locojax.errors import ConfigError
from locojax.models.dense import adapted_rows, low_rank_deltas, matmul
from locojax.models.native import ops
from locojax.models.native.ops import PANEL, Packed
from locojax.models.spec import ModelSpec, Parameter, parameters

ATTENTION_MODULES = ("q", "k", "v", "o")
MLP_MODULES = ("gate", "up", "down")
HEAD = "head"


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Which modules are adapted, and how strongly.

    scale = alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023).
    """

    rank: int
    alpha: float = 32.0
    attention: bool = True
    mlp: bool = True
    unembed: bool = False
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError("A LoRA rank must be at least 1", got=self.rank)
        if not (self.attention or self.mlp or self.unembed):
            raise ConfigError(
                "A LoRA adapter must train something", expected="attention, mlp or unembed switched on"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def modules(self) -> tuple[str, ...]:
        return (ATTENTION_MODULES if self.attention else ()) + (MLP_MODULES if self.mlp else ())


def adapter_parameters(spec: ModelSpec, lora: LoraSpec) -> dict[str, Any]:
    """The adapter's parameters, declared from the base's own: same axes, the rank between them."""
    base, r = parameters(spec), lora.rank
    tree: dict[str, Any] = {}
    for name in lora.modules:
        (layers, n_in, n_out), (_, in_axis, out_axis) = base["layers"][name].shape, base["layers"][name].axes
        tree[name] = {
            "a": Parameter((layers, n_in, r), ("layers", in_axis, "rank")),
            "b": Parameter((layers, r, n_out), ("layers", "rank", out_axis), "zeros"),
        }
    if lora.unembed:
        D, V = spec.hidden_size, spec.vocab_size
        tree[HEAD] = {
            "a": Parameter((D, r), ("embed", "rank")),
            "b": Parameter((r, V), ("rank", "vocab"), "zeros"),
        }
    return tree


def init_adapter(spec: ModelSpec, lora: LoraSpec, seed: int) -> dict[str, Any]:
    """A fresh fp32 adapter: `a` uniform as PEFT's kaiming_uniform(sqrt 5) draws it (bound 1/sqrt(in)), `b` zero.

    With `b` zero the adapted model equals its base bit for bit. The numbers are numpy's: the same on every platform,
    and a rank that is new compiles nothing.
    """
    declared, treedef = jax.tree.flatten(
        adapter_parameters(spec, lora), is_leaf=lambda leaf: isinstance(leaf, Parameter)
    )

    def draw(parameter: Parameter, place: int) -> np.ndarray:
        if parameter.init == "zeros":
            return np.zeros(parameter.shape, np.float32)
        generator = np.random.default_rng([seed % 2**64, place])
        bound = np.float32(1.0 / math.sqrt(parameter.shape[-2]))
        return (generator.random(parameter.shape, np.float32) * 2 - 1) * bound

    drawn = jax.tree.unflatten(treedef, [draw(parameter, place) for place, parameter in enumerate(declared)])
    return jax.device_put(drawn, may_alias=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """What the decoder needs to apply adapters: one for all rows (`index` None), or stacked ones and a row index.

    Attributes:
      tree: one adapter, or N stacked (see the module's head).
      scale: f32[] or, stacked, f32[N]. Unstacked it may also be f32[rows]: 0 leaves a row unadapted.
      index: i32[rows]: which adapter each row uses; None when there is one for all, or one for each: stacked, N = rows,
        in the rows' own order. The latter is for training: a row's gradient then comes out apart from the others'.
      present: (ids i32[N], how many i32[]) from `present_in`: inference goes through the adapters that its rows use,
        one by one; index 0 is then no adapter. None: rows gather theirs, which has a gradient and moves more memory.
      lengths: i32[rows]: tokens of each row that anybody asks about, from its beginning; None: all. Kernels may return
        0 for the others.
    """

    tree: Mapping[str, Any]
    scale: Any  # an Array, or what jax puts in an array's place while it handles the tree
    index: Any = None
    present: Any = None
    lengths: Any = None

    def split(self) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        """(the layers' part, the head's part or None)."""
        return {k: v for k, v in self.tree.items() if k != HEAD}, self.tree.get(HEAD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfLayer:
    """One layer's part [N, ...] of stacked adapters [L, N, ...], of which only what is indexed is ever read.

    Cut out as an array, the part of all N adapters would be copied on every token that is decoded.
    """

    stack: Any
    layer: Any  # i32[]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    def __getitem__(self, n: Array) -> Array:
        return self.stack[self.layer, n]


def empty_stack(spec: ModelSpec, rank: int, num_adapters: int, dtype: Any) -> Adapters:
    """Room for adapters of up to `rank` on every module: zeros, [.., num_adapters, ..], of which 0 stays no adapter."""
    lora = LoraSpec(rank, attention=True, mlp=True, unembed=True)
    declared = adapter_parameters(spec, lora)
    tree = {}
    for module, parts in declared.items():
        axis = stack_axis(module)
        tree[module] = {
            name: jnp.zeros((*part.shape[:axis], num_adapters, *part.shape[axis:]), dtype)
            for name, part in parts.items()
        }
    return Adapters(tree, jnp.zeros(num_adapters, jnp.float32))


def packed(adapters: Adapters) -> Adapters:
    """Adapters as the C++ kernels read them: stacked, and the factors of each module `Packed` if both can be.

    A single adapter becomes the second of two, as `SampleRequest.adapter` counts them.
    """
    tree, scale = adapters.tree, adapters.scale
    if not scale.ndim:

        def second_of_two(leaf: Array, axis: int = 0) -> Array:
            return jnp.stack([jnp.zeros_like(leaf), leaf], axis)

        tree = {
            module: {name: second_of_two(leaf, stack_axis(module)) for name, leaf in parts.items()}
            for module, parts in tree.items()
        }
        scale = second_of_two(scale)

    def pair(a: Array, b: Array) -> dict[str, Array | Packed]:
        fit = a.dtype == b.dtype == jnp.bfloat16 and ops.packs(a.shape) and ops.packs(b.shape)
        if not fit or b.shape[-1] % PANEL:
            return {"a": a, "b": b}
        return {"a": ops.pack(a, ops.narrow(a.shape[-1])), "b": ops.pack(b)}

    return Adapters({module: pair(**parts) for module, parts in tree.items()}, scale)


def _own(stack: Any, n: Array) -> Array:
    """One adapter's factor, of a stack that may be packed."""
    return ops.unpack(Packed(stack.panels[n], stack.num_columns)) if isinstance(stack, Packed) else stack[n]


def stack_axis(module: str) -> int:
    """Where N is in a stack's leaves of this module."""
    return 0 if module == HEAD else 1


def present_in(index: Array, num_adapters: int) -> tuple[Array, Array]:
    """(the distinct adapters i32[N] that index i32[rows] names, 0 left out; how many), for `Adapters.present`."""
    seen = jnp.zeros(num_adapters, bool).at[index].set(True).at[0].set(False)
    (ids,) = jnp.nonzero(seen, size=num_adapters, fill_value=0)
    return ids.astype(jnp.int32), jnp.sum(seen.astype(jnp.int32))


def add_deltas(
    outs: Sequence[Array], x: Array, parts: Sequence[Mapping[str, Any]], adapters: Adapters
) -> list[Array]:
    """outs[i] [rows, T, out_i] plus what the adapters of module i add, all of which read the same x [rows, T, in].

    parts: of each module, "a" and "b": arrays, or `OfLayer` where the adapters that are present are gone through.
    """
    if adapters.present is None:
        more = deltas(x, parts, adapters.scale, adapters.index)
        return [out + part.astype(out.dtype) for out, part in zip(outs, more, strict=True)]
    ids, count = adapters.present

    def apply(i: Array | int, outs: list[Array]) -> list[Array]:
        n = ids[i]
        mine = ((adapters.index == n) & (n > 0))[:, None, None]
        a = jnp.concatenate([_own(part["a"], n).astype(x.dtype) for part in parts], axis=-1)
        inner = matmul(x, a) * adapters.scale[n].astype(x.dtype)
        inners = jnp.split(inner, np.cumsum([part["a"].shape[-1] for part in parts])[:-1], axis=-1)
        added = [
            out + matmul(low, _own(part["b"], n).astype(x.dtype)).astype(out.dtype)
            for out, low, part in zip(outs, inners, parts, strict=True)
        ]
        # Selected, not multiplied by a mask: 0 times one adapter's NaN would reach the others' rows.
        return [jnp.where(mine, new, out) for new, out in zip(added, outs, strict=True)]

    # A row sees products of the same shape whatever its batch mates use, so its bits don't depend on them. The first
    # adapter stands before the loop, which carries copies of `outs`: mostly there is one, and the loop does nothing.
    return jax.lax.fori_loop(1, count, apply, apply(0, list(outs)))


def adapted_product(
    x: Array,
    w: Array | Packed,
    parts: Sequence[Mapping[str, Any] | None],
    adapters: Adapters,
    w_t: Array | Packed | None = None,
) -> Array | None:
    """x [rows, T, in] @ w and what adapters of its modules add, by one kernel; None where it takes `add_deltas`.

    parts: of each module whose columns w has, in order, "a" and "b": `OfLayer`s of `packed` adapters where those that
    are present are gone through, arrays where each row has its own. The latter has a gradient, where there is `w_t`.
    """
    if not isinstance(w, Packed):
        return None
    pairs = [(part["a"], part["b"]) for part in parts if part is not None]
    if len(pairs) < len(parts) or len({a.shape[-1] for a, _ in pairs}) > 1:
        return None
    if adapters.present is None:
        if pairs[0][0].shape[-1] % 2 or any(b.shape[-1] % PANEL for _, b in pairs):
            return None
        if adapters.index is not None or not adapters.scale.ndim or pairs[0][0].ndim != 3:
            return None
        assert not isinstance(w_t, Array)
        lengths = adapters.lengths
        if lengths is None:
            lengths = jnp.full(x.shape[0], x.shape[1], jnp.int32)
        return adapted_rows(x, w, w_t, pairs, adapters.scale, lengths)
    if not all(isinstance(factor, Packed) for pair in pairs for factor in pair):
        return None
    rows, T, K = x.shape
    which = jnp.repeat(jnp.where(adapters.index > 0, adapters.index, -1), T)
    stacks = [(a.panels.stack, b.panels.stack) for a, b in pairs]
    scale = adapters.scale.astype(jnp.float32)
    return ops.adapted(x.reshape(-1, K), w, which, scale, pairs[0][0].panels.layer, stacks).reshape(rows, T, -1)


def low_rank(x: Array, a: Array, scale: Array, index: Array | None) -> Array:
    """scale * (x @ a): the adapter's inner activation, [..., r], in x's dtype.

    x is [rows, T, in]. Unstacked: a [in, r]. Stacked: a [N, in, r] and index i32[rows].
    """
    if index is None:
        per_row = scale if scale.ndim == 0 else scale[:, None, None]
        return matmul(x, a.astype(x.dtype)) * per_row.astype(x.dtype)
    inner = jnp.einsum("rti,rik->rtk", x, a[index].astype(x.dtype))
    return inner * scale[index].astype(x.dtype)[:, None, None]


def deltas(x: Array, parts: Sequence[Mapping[str, Array]], scale: Array, index: Array | None) -> list[Array]:
    """What adapters of several modules add, where all the modules read the same x [rows, T, in]; see `delta`."""
    if index is None and scale.ndim == 0:
        a, b = (tuple(part[name].astype(x.dtype) for part in parts) for name in ("a", "b"))
        return list(low_rank_deltas(x, a, b, scale.astype(x.dtype)))
    if index is None and parts[0]["a"].ndim == 3:
        a, b = (tuple(part[name].astype(x.dtype) for part in parts) for name in ("a", "b"))
        return list(jax.vmap(low_rank_deltas)(x, a, b, scale.astype(x.dtype)))
    return [delta(x, part, scale, index) for part in parts]


def delta(x: Array, weights: Mapping[str, Array], scale: Array, index: Array | None) -> Array:
    """What the adapter adds to `x @ w`: scale * (x @ a) @ b. x [rows, T, in] -> [rows, T, out]."""
    if index is None and (scale.ndim == 0 or weights["a"].ndim == 3):
        return deltas(x, [weights], scale, index)[0]
    inner = low_rank(x, weights["a"], scale, index)
    b = weights["b"].astype(x.dtype)
    out = matmul(inner, b) if index is None else jnp.einsum("rtk,rko->rto", inner, b[index])
    if not scale.ndim:
        return out
    # Zero times a broken adapter's NaN would be NaN: rows without an adapter are left alone outright.
    per_row = scale if index is None else scale[index]
    return jnp.where(per_row[:, None, None] == 0, jnp.zeros_like(out), out)
