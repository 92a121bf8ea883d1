"""The losses: pure functions of log-probs and typed inputs. Sums, never means.

Legend: N positions of a micro-batch, flat; K targets a position. lp: log-prob under the weights being trained; q:
`logprobs`, the sampler's; A: advantages; r = exp(lp - q); sg: stop_gradient. A log-ratio is bounded before exp (see
`kl.LOG_RATIO_BOUND`). A mean is a sum whose advantages or weights were divided before (see `aggregation`).

A position takes part only if its loss can be other than 0 (`Loss.reads`); every other one contributes exactly 0 and may
hold any value. Names, inputs, defaults and formulas are the Tinker API's, whose clients then work unchanged;
`stable_reinforce` has its name only: the hosted formula is not published, and this one is ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from locojax.errors import RequestError
from locojax.training.kl import LOG_RATIO_BOUND, kl_estimate

Scalar = float | Array
"""A setting: a float from outside, an f32[] argument inside a program, so that changing it compiles nothing."""

LossConfig = Mapping[str, float | int | str]
"""A loss's settings as a request has them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CrossEntropyInputs:
    """weights: f32[N, K], any sign: -d(objective)/d(log-prob) of any objective makes this its gradient."""

    weights: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyInputs:
    """What the policy-gradient losses read; f32[N] each.

    Attributes:
      logprobs: q, of the policy that sampled; 0 on prompts.
      advantages: A, any aggregation weight multiplied in; 0 on prompts.
      old_logprobs: of the trainer's policy before the batch's first optimizer step. Given, r = exp(lp - old), and
        exp(old - q), the sampler's mismatch, is what `tis_cap` and the IcePop band act on.
      ref_logprobs, weights: of the reference, and each token's weight in the KL term of the loss. stable_reinforce:
        each token's weight in its k2 term; not given, 1 where A isn't 0.
      sequence_ratio_mask: gspo: nonzero where a token counts in its sequence's ratio.
    """

    logprobs: Array
    advantages: Array
    old_logprobs: Array | None = None
    ref_logprobs: Array | None = None
    weights: Array | None = None
    sequence_ratio_mask: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOutput:
    """elementwise: f32[N] or [N, K], whose sum is the loss. metrics: f32[] sums, by name."""

    elementwise: Array
    metrics: dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of any loss. temperature: log-probs are of softmax(logits / temperature).

    With sampler log-probs declared "tempered" it must be the sampling temperature; with "raw" ones, 1 (C21).
    """

    temperature: Scalar = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOptions(Options):
    """Settings of every policy-gradient loss.

    Attributes:
      tis_cap: multiply by sg(min(exp(old - q), cap)): truncated importance sampling (Yao et al. 2025).
      icepop_low, icepop_high: multiply by sg(exp(old - q)) inside the band, by 0 outside it (IcePop, Ling Team 2025).
      kl, kl_coefficient: add coefficient x weights x the estimate to the loss; `kl` has each one's real gradient.
    """

    tis_cap: Scalar | None = None
    icepop_low: Scalar | None = None
    icepop_high: Scalar | None = None
    kl_coefficient: Scalar = 0.0
    kl: Literal["none", "k1", "k2", "k3"] = dataclasses.field(default="none", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClipOptions(PolicyOptions):
    """Absolute bounds on the ratio, of ppo and gspo."""

    clip_low_threshold: Scalar = 0.8
    clip_high_threshold: Scalar = 1.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CispoOptions(ClipOptions):
    """cispo's bounds: one-sided by default, as Tinker's."""

    clip_low_threshold: Scalar = 0.0
    clip_high_threshold: Scalar = 4.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DroOptions(PolicyOptions):
    """beta: strength of the quadratic term (Tinker documents no default; its example has 0.05)."""

    beta: Scalar = 0.05


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StableOptions(PolicyOptions):
    """ratio_cap: the largest importance ratio. kl_coeff: of the k2 term that holds the policy to the sampler's."""

    ratio_cap: Scalar = 2.0
    kl_coeff: Scalar = 0.0


def _bounded(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _proximal(inputs: PolicyInputs) -> Array:
    """What the ratio is taken to: the policy before the batch's first step; the sampler's log-probs if not given."""
    return inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs


def correction_weights(inputs: PolicyInputs, options: PolicyOptions) -> Array:
    """f32[N] without gradient: what a configured TIS cap or IcePop band makes of exp(old - q); 1 if none is (C13)."""
    weight = jnp.ones_like(inputs.logprobs)
    if inputs.old_logprobs is None:
        return weight
    ratio = jnp.exp(_bounded(inputs.old_logprobs - inputs.logprobs))
    if options.tis_cap is not None:
        weight = jnp.minimum(ratio, options.tis_cap)
    if options.icepop_low is not None and options.icepop_high is not None:
        inside = (ratio >= options.icepop_low) & (ratio <= options.icepop_high)
        weight = jnp.where(inside, ratio if options.tis_cap is None else weight, 0.0)
    return jax.lax.stop_gradient(weight)


def _finish(
    per_token: Array, on: Array, lp: Array, inputs: PolicyInputs, options: PolicyOptions, metrics: dict[str, Array]
) -> LossOutput:
    """Applies the correction, adds the KL term, and selects the positions that take part."""
    per_token = jnp.where(inputs.advantages == 0, 0.0, correction_weights(inputs, options) * per_token)
    if options.kl != "none" and inputs.ref_logprobs is not None and inputs.weights is not None:
        term = jnp.where(on, inputs.weights * kl_estimate(lp, inputs.ref_logprobs, options.kl, jnp), 0.0)
        per_token = per_token + options.kl_coefficient * term
        metrics = {**metrics, "kl": jnp.sum(term)}
    return LossOutput(jnp.where(on, per_token, 0.0), metrics)


def _clipped_objective(ratio: Array, advantages: Array, options: ClipOptions) -> tuple[Array, Array]:
    """min(r A, clip(r) A), and where the clip is what was taken: there the gradient is 0 (C09)."""
    bounded = jnp.clip(jax.lax.stop_gradient(ratio), options.clip_low_threshold, options.clip_high_threshold)
    is_clipped = bounded * advantages < ratio * advantages
    return jnp.where(is_clipped, bounded * advantages, ratio * advantages), is_clipped


def cross_entropy(
    lp: Float[Array, "N K"],
    on: Bool[Array, " N"],
    inputs: CrossEntropyInputs,
    segments: Int[Array, " N"],
    options: Options,
) -> LossOutput:
    """-sum weights x lp, over K targets a position."""
    return LossOutput(jnp.where(on[:, None], -inputs.weights * lp, 0.0), {})


def importance_sampling(
    lp: Float[Array, " N"],
    on: Bool[Array, " N"],
    inputs: PolicyInputs,
    segments: Int[Array, " N"],
    options: PolicyOptions,
) -> LossOutput:
    """-sum r A."""
    ratio = jnp.exp(_bounded(lp - _proximal(inputs)))
    return _finish(-ratio * inputs.advantages, on, lp, inputs, options, _ratio_metrics(ratio, on))


def ppo(
    lp: Float[Array, " N"],
    on: Bool[Array, " N"],
    inputs: PolicyInputs,
    segments: Int[Array, " N"],
    options: ClipOptions,
) -> LossOutput:
    """-sum min(r A, clip(r, low, high) A) (Schulman et al. 2017, eq. 7); bounds are absolute."""
    ratio = jnp.exp(_bounded(lp - _proximal(inputs)))
    objective, is_clipped = _clipped_objective(ratio, inputs.advantages, options)
    return _finish(-objective, on, lp, inputs, options, _ratio_metrics(ratio, on, is_clipped))


def cispo(
    lp: Float[Array, " N"],
    on: Bool[Array, " N"],
    inputs: PolicyInputs,
    segments: Int[Array, " N"],
    options: CispoOptions,
) -> LossOutput:
    """-sum sg(clip(r, low, high)) lp A (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    ratio = jax.lax.stop_gradient(jnp.exp(_bounded(lp - _proximal(inputs))))
    bounded = jnp.clip(ratio, options.clip_low_threshold, options.clip_high_threshold)
    return _finish(
        -bounded * lp * inputs.advantages, on, lp, inputs, options, _ratio_metrics(ratio, on, bounded != ratio)
    )


def dro(
    lp: Float[Array, " N"],
    on: Bool[Array, " N"],
    inputs: PolicyInputs,
    segments: Int[Array, " N"],
    options: DroOptions,
) -> LossOutput:
    """-sum (lp A - beta/2 (lp - q)^2) (Richemond et al. 2024)."""
    gap = lp - _proximal(inputs)
    per_token = -(lp * inputs.advantages - 0.5 * options.beta * gap * gap)
    return _finish(per_token, on, lp, inputs, options, _ratio_metrics(jnp.exp(_bounded(gap)), on))


def gspo(
    lp: Float[Array, " N"],
    on: Bool[Array, " N"],
    inputs: PolicyInputs,
    segments: Int[Array, " N"],
    options: ClipOptions,
) -> LossOutput:
    """PPO's objective with the sequence's ratio (Zheng et al. 2025, GSPO-token): the geometric mean over its tokens.

    s = exp(mean over sequence_ratio_mask of (sg(lp) - q)); a token's ratio is s exp(lp - sg(lp)), so its value is s and
    its gradient its own. A mean, not a sum, of log-ratios: a sum would grow with length (C14).
    """
    counts = on if inputs.sequence_ratio_mask is None else on & (inputs.sequence_ratio_mask != 0)
    gap = jnp.where(counts, jax.lax.stop_gradient(lp) - _proximal(inputs), 0.0)
    N = lp.shape[0]
    total = jax.ops.segment_sum(gap, segments, num_segments=N)
    number = jax.ops.segment_sum(counts.astype(jnp.float32), segments, num_segments=N)
    log_s = (total / jnp.maximum(number, 1.0))[jnp.minimum(segments, N - 1)]
    ratio = jnp.exp(_bounded(log_s) + lp - jax.lax.stop_gradient(lp))
    objective, is_clipped = _clipped_objective(ratio, inputs.advantages, options)
    return _finish(-objective, on, lp, inputs, options, _ratio_metrics(ratio, on, is_clipped))


def stable_reinforce(
    lp: Float[Array, " N"],
    on: Bool[Array, " N"],
    inputs: PolicyInputs,
    segments: Int[Array, " N"],
    options: StableOptions,
) -> LossOutput:
    """-sum sg(min(r, cap)) lp A + kl_coeff sum weights x (lp - q)^2 / 2: REINFORCE with a truncated ratio. Ours.

    The truncation bounds how far one token can pull the weights and keeps its gradient (as cispo does; Ionides 2008);
    the second term is k2 to the policy that sampled, whose expected gradient is that of KL(policy || sampler) (`kl`).
    """
    ratio = jax.lax.stop_gradient(jnp.exp(_bounded(lp - _proximal(inputs))))
    bounded = jnp.minimum(ratio, options.ratio_cap)
    metrics = _ratio_metrics(ratio, on, bounded != ratio)
    result = _finish(-bounded * lp * inputs.advantages, on, lp, inputs, options, metrics)
    weights = (inputs.advantages != 0).astype(jnp.float32) if inputs.weights is None else inputs.weights
    term = jnp.where(on, weights * kl_estimate(lp, inputs.logprobs, "k2", jnp), 0.0)
    return LossOutput(result.elementwise + options.kl_coeff * term, {**result.metrics, "k2": jnp.sum(term)})


def _ratio_metrics(ratio: Array, on: Array, is_clipped: Array | None = None) -> dict[str, Array]:
    metrics = {"ratio": jnp.sum(jnp.where(on, jax.lax.stop_gradient(ratio), 0.0))}
    if is_clipped is not None:
        metrics["num_clipped"] = jnp.sum(on & is_clipped, dtype=jnp.int32).astype(jnp.float32)
    return metrics


@dataclasses.dataclass(frozen=True)
class Loss:
    """One entry of the registry.

    Attributes:
      function: (lp, on, inputs, segments, options) -> LossOutput. `on` bool[N]: positions that take part; `segments`
        i32[N]: a number below N for each sequence, N at padding.
      options: its dataclass of settings; a field's default is the setting's.
      required, optional: names of a datum's inputs, besides target_tokens. Some settings require more (see
        `needed_inputs`); whatever else a datum has is ignored.
      multi_target: takes lp [N, K]; else lp [N].
    """

    name: str
    function: Callable[..., LossOutput]
    options: type[Options]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    multi_target: bool = False

    def reads(self, inputs: Mapping[str, np.ndarray], options: Options) -> np.ndarray:
        """bool[N] of one datum: where its log-prob can matter to the loss. `inputs` are validated ones."""
        if self.multi_target:
            return (inputs["weights"] != 0).any(axis=-1)
        on = inputs["advantages"] != 0
        if isinstance(options, PolicyOptions) and options.kl != "none" and options.kl_coefficient != 0:
            on = on | (inputs["weights"] != 0)
        if isinstance(options, StableOptions) and options.kl_coeff != 0 and "weights" in inputs:
            on = on | (inputs["weights"] != 0)
        if self.name == "gspo" and "sequence_ratio_mask" in inputs and on.any():
            on = on | (inputs["sequence_ratio_mask"] != 0)
        return on

    def inputs(self, arrays: Mapping[str, Any]) -> CrossEntropyInputs | PolicyInputs:
        """The typed inputs from flat arrays by name."""
        return CrossEntropyInputs(**arrays) if self.multi_target else PolicyInputs(**arrays)


def _policy(function: Callable[..., LossOutput], options: type[PolicyOptions], *extra: str) -> Loss:
    return Loss(function.__name__, function, options, ("logprobs", "advantages"), ("old_logprobs", *extra))


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            Loss("cross_entropy", cross_entropy, Options, (), ("weights",), multi_target=True),
            _policy(importance_sampling, PolicyOptions),
            _policy(ppo, ClipOptions),
            _policy(cispo, CispoOptions),
            _policy(dro, DroOptions),
            _policy(gspo, ClipOptions, "sequence_ratio_mask"),
            _policy(stable_reinforce, StableOptions, "weights"),
        )
    }
)


def find_loss(name: str) -> Loss:
    """The loss of this name. Raises RequestError naming the nearest one."""
    if name not in LOSSES:
        raise RequestError(f"Unknown loss {name!r}", expected="one of " + ", ".join(LOSSES), remedy=_near(name, LOSSES))
    return LOSSES[name]


def read_options(loss: Loss, config: LossConfig | None) -> Options:
    """The loss's settings from a request's mapping.

    Raises:
      RequestError: an unknown key (with the nearest one), a value of the wrong type or out of range.
    """
    config = dict(config or {})
    fields = {field.name: field for field in dataclasses.fields(loss.options)}
    for key, value in config.items():
        if key not in fields:
            raise RequestError(
                f"The loss {loss.name} has no setting {key!r}",
                expected="one of " + ", ".join(fields),
                remedy=_near(key, fields),
            )
        if key == "kl":
            if value not in ("none", "k1", "k2", "k3"):
                raise RequestError(f"Unknown KL estimator {value!r} (kl)", expected="none, k1, k2 or k3")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestError(f"The setting {key!r} of {loss.name} is not a finite number", got=repr(value))
        else:
            config[key] = float(value)
    options = loss.options(**config)  # type: ignore[arg-type]
    if options.temperature <= 0:
        raise RequestError("The setting 'temperature' is not positive", got=options.temperature)
    if isinstance(options, StableOptions) and (options.ratio_cap <= 0 or options.kl_coeff < 0):
        raise RequestError(
            "A setting of stable_reinforce is out of range",
            got=f"ratio_cap {options.ratio_cap:g}, kl_coeff {options.kl_coeff:g}",
            expected="a ratio_cap above 0 and a kl_coeff of at least 0",
        )
    for names in (("clip_low_threshold", "clip_high_threshold"), ("icepop_low", "icepop_high")):
        low, high = (getattr(options, name, None) for name in names)
        if (low is None) != (high is None):
            raise RequestError(f"{names[0]} and {names[1]} are set together or not at all", got=f"{low} and {high}")
        if low is not None and high is not None and low > high:
            raise RequestError(f"{names[0]} is above {names[1]}", got=f"{low:g} and {high:g}")
    return options


def needed_inputs(loss: Loss, options: Options) -> dict[str, str]:
    """Input name -> why it must be there: those the loss always has, and those a configured correction needs."""
    needed = dict.fromkeys(loss.required, f"the loss {loss.name}")
    if isinstance(options, PolicyOptions):
        if options.tis_cap is not None or options.icepop_low is not None:
            needed["old_logprobs"] = "the setting tis_cap or icepop_low / icepop_high"
        if options.kl != "none":
            needed["ref_logprobs"] = needed["weights"] = f"the setting kl = {options.kl}"
    return needed


def _near(name: str, names: Mapping[str, Any]) -> str | None:
    near = [other for other in names if other.startswith(name)] or difflib.get_close_matches(name, list(names), n=1)
    return f"Did you mean {near[0]!r}?" if near else None
