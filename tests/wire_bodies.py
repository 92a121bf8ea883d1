"""Requests as the SDK itself builds them, for the tests of the wire; and the facts that they are checked by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from locojax.hosts.protocol import EngineInfo

VOCAB_SIZE = 1000

INFO = EngineInfo(
    incarnation="1",
    model_name="tiny",
    family="llama",
    vocab_size=VOCAB_SIZE,
    max_context=64,
    max_row_tokens=32,
    max_adapters=8,
    max_rank=64,
    eos_ids=(2,),
    open_models=(),
    open_samplers=(),
    running=(),
    losses=("cross_entropy", "importance_sampling", "ppo", "stable_reinforce"),
)


def dense_tensor(array: np.ndarray) -> sdk.TensorData:
    return sdk.TensorData.from_numpy(array)


def csr_tensor(array: np.ndarray) -> sdk.TensorData:
    """What `TensorData.from_torch_sparse` makes of a 2-D array, without torch: every entry that is not 0 is listed."""
    rows, columns = np.nonzero(array)
    crow = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))])
    return sdk.TensorData(
        data=array[rows, columns],
        dtype="int64" if array.dtype.kind == "i" else "float32",
        shape=list(array.shape),
        sparse_crow_indices=crow.tolist(),
        sparse_col_indices=columns.tolist(),
    )


def model_input(tokens: Sequence[int], cuts: Sequence[int] = ()) -> sdk.ModelInput:
    """The tokens in several text chunks, cut at `cuts`."""
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(tokens)), len(tokens)]
    return sdk.ModelInput(
        chunks=[sdk.EncodedTextChunk(tokens=list(tokens[a:b])) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    )


def policy_datum(num_tokens: int = 4, **replaced: sdk.TensorData) -> sdk.Datum:
    """Of importance_sampling and ppo."""
    ones = np.ones(num_tokens, np.float32)
    inputs = {
        "target_tokens": dense_tensor(np.arange(1, num_tokens + 1)),
        "logprobs": dense_tensor(-ones),
        "advantages": dense_tensor(ones),
    }
    return sdk.Datum(model_input=model_input(range(num_tokens)), loss_fn_inputs=inputs | replaced)


def train_request(
    data: Sequence[sdk.Datum],
    loss: Any = "importance_sampling",
    config: Mapping[str, float | str] | None = None,
    seq_id: int = 1,
) -> ForwardBackwardRequest:
    given = ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=dict(config) if config else None)
    return ForwardBackwardRequest(forward_backward_input=given, model_id="s1:train:0", seq_id=seq_id)


def as_proto(request: ForwardBackwardRequest) -> bytes:
    return forward_backward_request_to_proto(request).SerializeToString()


def as_json(request: ForwardBackwardRequest) -> dict[str, Any]:
    """The body that SDK 0.16 posts to /forward_backward."""

    def tensor(data: sdk.TensorData) -> dict[str, Any]:
        fields = {
            "data": data.data,
            "dtype": data.dtype,
            "shape": data.shape,
            "sparse_crow_indices": data.sparse_crow_indices,
            "sparse_col_indices": data.sparse_col_indices,
        }
        return {name: value for name, value in fields.items() if value is not None}

    given = request.forward_backward_input
    data = [
        {
            "model_input": {
                "chunks": [{"type": "encoded_text", "tokens": list(c.tokens)} for c in datum.model_input.chunks]
            },
            "loss_fn_inputs": {name: tensor(value) for name, value in datum.loss_fn_inputs.items()},
        }
        for datum in given.data
    ]
    body: dict[str, Any] = {"data": data, "loss_fn": given.loss_fn}
    if given.loss_fn_config is not None:
        body["loss_fn_config"] = dict(given.loss_fn_config)
    return {"model_id": request.model_id, "seq_id": request.seq_id, "forward_backward_input": body}


def json_bytes(body: Any) -> bytes:
    return json.dumps(body).encode()


def sample_body(**replaced: Any) -> dict[str, Any]:
    """An asample as SDK 0.38 posts it; a field set to None is left out."""
    body = {
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1, "stop": ["\n"]},
        "sampling_session_id": "s1:sample:0",
        "seq_id": 0,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    } | replaced
    return {name: value for name, value in body.items() if value is not None}


@st.composite
def data(draw: st.DrawFn) -> sdk.Datum:
    """Any datum: several chunks, targets [N] or [N, K], dense or sparse, with float inputs of the same shape."""
    num_tokens = draw(st.integers(0, 7))
    shape = (num_tokens,) if draw(st.booleans()) else (num_tokens, draw(st.integers(1, 4)))
    tokens = draw(st.lists(st.integers(-5, 2**31 - 1), min_size=num_tokens, max_size=num_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    targets = rng.integers(-(2**40), 2**40, shape) * rng.integers(0, 2, shape)
    weights = (rng.normal(size=shape) * rng.integers(0, 2, shape)).astype(np.float32)
    tensor = csr_tensor if len(shape) == 2 and draw(st.booleans()) else dense_tensor
    return sdk.Datum(
        model_input=model_input(tokens, draw(st.lists(st.integers(0, 7), max_size=3))),
        loss_fn_inputs={"target_tokens": tensor(targets), "weights": tensor(weights)},
    )
