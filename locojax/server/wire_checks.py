"""What only the engine's facts can say about a request: it fits the vocabulary, the context, the rows, the losses.

The engine checks what it computes with once more; these checks answer the client at once, by the API's field names.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence

import numpy as np

from locojax.hosts.protocol import EngineInfo
from locojax.server.wire_errors import WireError, shortened
from locojax.server.wire_sample import SampleBody
from locojax.server.wire_tensors import joined
from locojax.server.wire_train import TrainBody
from locojax.types import Datum

MULTI_TARGET_LOSS = "cross_entropy"
"""The one loss that takes target_tokens of shape [N, K]."""

PROVENANCE_LOSS = "stable_reinforce"
"""The one loss that reads where a datum's tokens were sampled."""

FLOAT_INPUTS = ("weights", "advantages", "logprobs", "sequence_ratio_mask", "old_logprobs", "ref_logprobs")
"""Inputs that are numbers, one for each target; clients may send others, which no loss reads."""


def validate_train(body: TrainBody, info: EngineInfo) -> TrainBody:
    """The body, if the engine can train on it.

    Raises:
      WireError: no data, an empty or too long datum, an id outside the vocabulary, an input that is missing, of another
        length or not finite, a loss that is not served.
    """
    _check_loss(body.loss, info)
    if not body.data:
        raise WireError("There is nothing to train on", got="no data", remedy="Skip the call when a batch is empty")
    for i, datum in enumerate(body.data):
        _check_shapes(i, datum, body.loss, info)
    if body.loss == PROVENANCE_LOSS and None in body.provenance:
        raise WireError(
            f"data[{body.provenance.index(None)}] lacks provenance spans, which {PROVENANCE_LOSS} needs",
            remedy="Use Datum.with_provenance, or the loss importance_sampling",
        )
    targets = "target_tokens"
    _check_ids(lambda datum: datum.tokens, body.data, "model_input", info.vocab_size)
    _check_ids(lambda datum: datum.inputs[targets], body.data, f"loss_fn_inputs[{targets!r}]", info.vocab_size)
    for name in FLOAT_INPUTS:
        _check_finite(name, body.data)
    for name, value in body.loss_config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise WireError(f"loss_fn_config[{shortened(name)}] is not a finite number", got=value)
    return body


def _check_loss(loss: str, info: EngineInfo) -> None:
    if loss == "custom":
        raise WireError(
            "The loss 'custom' runs on the client with this server",
            remedy="Use forward_backward_custom with a Python function",
        )
    if info.losses and loss not in info.losses:
        near = difflib.get_close_matches(loss[:64], info.losses, n=1)
        raise WireError(
            f"Unknown loss {shortened(loss)}",
            expected="one of " + ", ".join(info.losses),
            remedy=f"The nearest is {near[0]!r}" if near else None,
        )


def _check_shapes(i: int, datum: Datum, loss: str, info: EngineInfo) -> None:
    num_tokens = len(datum.tokens)
    if not num_tokens:
        raise WireError(f"data[{i}].model_input is empty", expected="at least one token")
    if num_tokens > info.max_row_tokens:
        raise WireError(
            f"data[{i}].model_input is too long",
            got=f"{num_tokens} tokens",
            expected=f"at most {info.max_row_tokens}",
            remedy="Truncate it, or start the server with longer rows",
        )
    targets = datum.inputs.get("target_tokens")
    if targets is None:
        raise WireError(f"data[{i}].loss_fn_inputs lacks 'target_tokens'", got=shortened(sorted(datum.inputs)))
    if not np.issubdtype(targets.dtype, np.integer):
        raise WireError(f"data[{i}].loss_fn_inputs['target_tokens'] does not hold integers", got=targets.dtype)
    multi = loss == MULTI_TARGET_LOSS
    if targets.ndim > 1 + multi or len(targets) != num_tokens or not targets.size:
        raise WireError(
            f"data[{i}].loss_fn_inputs['target_tokens'] does not match its model_input of {num_tokens} tokens",
            got=f"shape {list(targets.shape)}",
            expected=f"shape [{num_tokens}]" + (f" or [{num_tokens}, K]" if multi else ""),
        )
    for name in FLOAT_INPUTS:
        if name in datum.inputs and datum.inputs[name].shape != targets.shape:
            raise WireError(
                f"data[{i}].loss_fn_inputs[{name!r}] does not match target_tokens",
                got=f"shape {list(datum.inputs[name].shape)}",
                expected=f"shape {list(targets.shape)}",
            )


def _check_ids(read: Callable[[Datum], np.ndarray], data: Sequence[Datum], field: str, vocab_size: int) -> None:
    ids = joined(map(read, data))
    if ids.min() >= 0 and ids.max() < vocab_size:
        return
    for i, datum in enumerate(data):
        wrong = np.argwhere((read(datum) < 0) | (read(datum) >= vocab_size))
        if wrong.size:
            raise WireError(
                f"data[{i}].{field} holds a token id outside the vocabulary",
                got=f"{read(datum)[tuple(wrong[0])]} at position {wrong[0][0]}",
                expected=f"0 to {vocab_size - 1}",
            )


def _check_finite(name: str, data: Sequence[Datum]) -> None:
    having = [(i, datum.inputs[name]) for i, datum in enumerate(data) if name in datum.inputs]
    if np.isfinite(joined(array for _, array in having)).all():
        return
    for i, array in having:
        wrong = np.argwhere(~np.isfinite(array))
        if wrong.size:
            raise WireError(
                f"data[{i}].loss_fn_inputs[{name!r}] holds a value that is not finite",
                got=f"{array[tuple(wrong[0])]} at position {wrong[0][0]}",
            )


def validate_sample(body: SampleBody, info: EngineInfo) -> SampleBody:
    """The body, if the engine can sample it, with max_tokens cut to what the context has room for.

    Raises:
      WireError: a prompt that fills the context, an id outside the vocabulary (prompt, stop or target), more
        alternatives than there are tokens.
    """
    sample = body.sample
    num_prompt = len(sample.prompt)
    if num_prompt >= info.max_context:
        raise WireError(
            "The prompt is too long: no token can follow it",
            got=f"{num_prompt} tokens",
            expected=f"at most {info.max_context - 1}",
            remedy="Truncate it, or start the server with a longer context",
        )
    prompt = np.array(sample.prompt)
    _check_sample_ids("prompt", prompt, info.vocab_size)
    stop = sample.params.stop
    if isinstance(stop, tuple):
        _check_sample_ids(
            "sampling_params.stop", np.array([one for one in stop if isinstance(one, int)], object), info.vocab_size
        )
    if sample.target_prompt_logprobs is not None:
        _check_sample_ids("target_prompt_logprobs", sample.target_prompt_logprobs.reshape(-1), info.vocab_size, low=-1)
    most = max(sample.topk_prompt_logprobs, sample.topk_sample_logprobs)
    if most > info.vocab_size:
        raise WireError(
            "More likeliest tokens are asked for than there are", got=most, expected=f"at most {info.vocab_size}"
        )
    room = info.max_context - num_prompt
    params = sample.params
    if params.max_tokens is not None and params.max_tokens > room:
        params = dataclasses.replace(params, max_tokens=room)
        return dataclasses.replace(body, sample=dataclasses.replace(sample, params=params))
    return body


def _check_sample_ids(field: str, ids: np.ndarray, vocab_size: int, low: int = 0) -> None:
    wrong = np.flatnonzero((ids < low) | (ids >= vocab_size))
    if wrong.size:
        raise WireError(
            f"{field} holds a token id outside the vocabulary",
            got=f"{ids[wrong[0]]} at position {wrong[0]}",
            expected=f"{low} to {vocab_size - 1}",
        )
