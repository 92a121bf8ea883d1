"""The JSON requests and responses, held to the SDK's own models and to what a real client sent."""

from __future__ import annotations

import inspect
import json
import pathlib
import types
import typing
from typing import Any

import pydantic
import pytest
import typing_extensions
from google.protobuf import json_format
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as pb
from tinker.types import (
    client_config_request,
    client_config_response,
    client_dynamic_config_response,
    copy_weights_request,
    create_custom_loss_request,
    create_session_request,
    external_weights_urls_response,
    future_completion,
    futures_retrieve_request,
    futures_retrieve_response,
    get_session_response,
    join_sampling_session_request,
    join_sampling_session_response,
    list_sessions_response,
    session_search_request,
    session_search_response,
    telemetry_send_request,
    try_again_response,
    unload_model_request,
    unload_model_response,
)
from tinker.types._pydantic_types.save_weights_external_response import SaveWeightsExternalResponseInternal
from tinker.types._pydantic_types.save_weights_for_sampler_response import SaveWeightsForSamplerResponseInternal

from locojax.server import requests, responses, wire
from locojax.types import AdamParams

TRAFFIC = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "golden" / "tinker_traffic.jsonl").read_text().splitlines()
]
"""The requests of a whole life of a client of SDK 0.38, and what a stand-in server answered."""

SMALL = {
    "/client/config": requests.ClientConfig,
    "/client/dynamic_config": requests.ClientConfig,
    "/create_session": requests.CreateSession,
    "/session_heartbeat": requests.SessionHeartbeat,
    "/sessions/sess-0001/finish": requests.FinishSession,
    "/create_model": requests.CreateModel,
    "/get_info": requests.GetInfo,
    "/optim_step": requests.OptimStep,
    "/retrieve_future": requests.RetrieveFuture,
    "/save_weights": requests.SaveWeights,
    "/save_weights_for_sampler": requests.SaveWeightsForSampler,
    "/load_weights": requests.LoadWeights,
    "/create_sampling_session": requests.CreateSamplingSession,
    "/telemetry": requests.Telemetry,
}


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize("line", TRAFFIC, ids=lambda line: line["path"])
def test_every_request_of_a_real_client_is_read(line):
    path = line["path"].removeprefix("/api/v1")
    if line["method"] == "GET":
        assert "body" not in line
    elif path == "/forward_backward":
        sent = json_format.ParseDict(line["body_proto"], pb.ForwardBackwardRequest())
        body = wire.decode_train(sent.SerializeToString())
        assert (body.model_id, body.seq_id, body.loss) == (sent.model_id, sent.seq_id, sent.loss_fn)
        assert body.gradient is not sent.forward_only
        assert len(body.data) == 1
    elif path == "/asample":
        body = wire.decode_sample(encoded(line["body"]))
        assert list(body.sample.prompt) == line["body"]["prompt"]["chunks"][0]["tokens"]
        assert body.seq_id == line["body"]["seq_id"]
    else:
        read = requests.parse(SMALL[path], encoded(line["body"])).model_dump(by_alias=True, exclude_unset=True)
        assert read == {name: value for name, value in line["body"].items() if name != "type" and value is not None}


REQUESTS = [
    (requests.ClientConfig, client_config_request.ClientConfigRequest),
    (requests.CreateSession, create_session_request.CreateSessionRequest),
    (requests.SessionHeartbeat, sdk.SessionHeartbeatRequest),
    (requests.CreateModel, sdk.CreateModelRequest),
    (requests.LoraConfig, sdk.LoraConfig),
    (requests.GetInfo, sdk.GetInfoRequest),
    (requests.UnloadModel, unload_model_request.UnloadModelRequest),
    (requests.Adam, sdk.AdamParams),
    (requests.SaveWeights, sdk.SaveWeightsRequest),
    (requests.SaveWeightsForSampler, sdk.SaveWeightsForSamplerRequest),
    (requests.SaveWeightsExternal, sdk.SaveWeightsExternalRequest),
    (requests.LoadWeights, sdk.LoadWeightsRequest),
    (requests.CreateSamplingSession, sdk.CreateSamplingSessionRequest),
    (requests.JoinSamplingSession, join_sampling_session_request.JoinSamplingSessionRequest),
    (requests.RetrieveFuture, sdk.FutureRetrieveRequest),
    (requests.RetrieveFutures, futures_retrieve_request.FuturesRetrieveRequest),
    (requests.FuturesTarget, futures_retrieve_request.SamplingSessionFuturesTarget),
    (requests.CreateCustomLoss, create_custom_loss_request.CreateCustomLossRequest),
    (requests.CopyWeights, copy_weights_request.CopyWeightsRequest),
    (requests.SearchSessions, session_search_request.SessionSearchRequest),
    (requests.Telemetry, telemetry_send_request.TelemetrySendRequest),
]


@pytest.mark.parametrize(("ours", "theirs"), REQUESTS, ids=lambda model: model.__name__)
def test_no_field_of_the_sdk_is_missed_and_none_of_its_optional_ones_is_required(ours, theirs):
    unread = {"type"} | ({"inputs", "graph"} if ours is requests.CreateCustomLoss else set())
    assert set(theirs.model_fields) - set(ours.model_fields) <= unread
    for name, field in ours.model_fields.items():
        # Without seq_id neither the order of a model's operations nor a repeated one is known; every SDK sends it.
        if field.is_required() and name != "seq_id":
            assert theirs.model_fields[name].is_required(), name
    for name in ("rank", "train_mlp", "learning_rate", "beta1", "beta2", "eps", "kind", "overwrite", "limit"):
        if name in theirs.model_fields and not theirs.model_fields[name].is_required():
            assert ours.model_fields[name].default == theirs.model_fields[name].default


def test_optim_step_by_each_of_its_names():
    body = sdk.OptimStepRequest(optim_params=sdk.AdamParams(learning_rate=0.5, beta2=0.999), model_id="m", seq_id=3)
    asked = requests.parse(requests.OptimStep, body.model_dump_json().encode())
    assert asked.adam_params.params() == AdamParams(learning_rate=0.5, beta2=0.999)
    same = {"model_id": "m", "seq_id": 3}
    for name in ("optim_params", "optimizer_params"):
        params = {name: {"type": "adamw", "learning_rate": 0.5, "beta2": 0.999}}
        assert requests.parse(requests.OptimStep, encoded(same | params)).adam_params == asked.adam_params
    assert requests.parse(requests.OptimStep, encoded(same)).adam_params.params() == AdamParams()
    negative = requests.parse(requests.OptimStep, encoded(same | {"adam_params": {"grad_clip_norm": -1}}))
    assert negative.adam_params.params().grad_clip_norm == 0


def test_a_checkpoint_without_a_name_is_named_after_its_place():
    asked = requests.parse(requests.SaveWeights, encoded({"model_id": "m", "seq_id": 20}))
    assert asked.name == "000020"
    assert requests.parse(requests.SaveWeights, encoded({"model_id": "m", "seq_id": 1, "path": "a.b"})).name == "a.b"


def test_unknown_fields_are_ignored_and_nulls_count_as_left_out():
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": None, "of_next_year": [1]}
    asked = requests.parse(requests.CreateModel, encoded(body))
    assert asked.lora_config == requests.LoraConfig(rank=32)
    assert requests.parse(requests.Empty, b"") == requests.Empty()


SEARCH = {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "s"}}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}
STEP = {"model_id": "m", "seq_id": 1}


@pytest.mark.parametrize(
    ("request_type", "body", "status", "text"),
    [
        (requests.GetInfo, b'{"model_id', 400, "The request body is not JSON. Got: EOF while parsing a string"),
        (requests.GetInfo, b"\xff", 400, "The request body is not JSON"),
        (requests.GetInfo, b'{"model_id": "\\ud800"}', 400, "The request body is not JSON"),
        (requests.GetInfo, b"[]", 422, "The request: Input should be an object."),
        (requests.GetInfo, b"{}", 422, "model_id: Field required."),
        (requests.GetInfo, {"model_id": None}, 422, "model_id: Field required."),
        (requests.GetInfo, {"model_id": 7}, 422, "model_id: Input should be a valid string (got 7)."),
        (requests.GetInfo, {"model_id": "a\u0000b"}, 422, "model_id: String should match pattern"),
        (requests.GetInfo, {"model_id": "x" * 513}, 422, "model_id: String should have at most 512 characters"),
        (requests.GetInfo, b'{"model_id": "' + b"x" * (1 << 20) + b'"}', 413, "The request body is too long."),
        (requests.CreateModel, MODEL | {"model_seq_id": 1.5}, 422, "model_seq_id: Input should be a valid integer"),
        (requests.CreateModel, MODEL | {"model_seq_id": 2**63}, 422, "model_seq_id: "),
        (requests.CreateModel, MODEL | {"lora_config": {"rank": 0}}, 422, "lora_config.rank: Input should be greater"),
        (
            requests.CreateModel,
            MODEL | {"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}},
            422,
            "lora_config: train_unembed, train_mlp and train_attn are all false: there is nothing to train.",
        ),
        (
            requests.CreateModel,
            MODEL | {"optimizer_config": {"type": "dimuon", "version": 1}},
            400,
            "This server has no such optimizer. Got: 'dimuon'. Expected: 'adamw'.",
        ),
        (requests.OptimStep, STEP | {"optimizer_params": {"type": "dimuon"}}, 400, "This server has no such optimizer"),
        (requests.OptimStep, STEP | {"adam_params": {"learning_rate": float("nan")}}, 422, "adam_params.learning_rate"),
        (requests.OptimStep, STEP | {"adam_params": {"learning_rate": float("inf")}}, 422, "adam_params.learning_rate"),
        (requests.OptimStep, STEP | {"adam_params": {"learning_rate": -1}}, 422, "adam_params.learning_rate: "),
        (requests.OptimStep, STEP | {"adam_params": {"beta2": 1}}, 422, "adam_params.beta2: Input should be less"),
        (requests.SaveWeights, STEP | {"path": "../etc"}, 422, "path: String should match pattern"),
        (requests.SaveWeights, STEP | {"path": ".."}, 422, "path: String should match pattern"),
        (requests.SaveWeights, STEP | {"path": "a/b"}, 422, "path: String should match pattern"),
        (requests.SaveWeights, STEP | {"path": "a\\b"}, 422, "path: String should match pattern"),
        (requests.SaveWeights, STEP | {"path": "a\n"}, 422, "path: String should match pattern"),
        (requests.SaveWeights, STEP | {"path": ""}, 422, "path: String should have at least 1 character"),
        (requests.SaveWeights, STEP | {"path": "x" * 101}, 422, "path: String should have at most 100 characters"),
        (requests.SaveWeights, STEP | {"ttl_seconds": 3599}, 422, "ttl_seconds: Input should be greater than"),
        (requests.SaveWeightsForSampler, STEP, 422, "give path (a named checkpoint) or sampling_session_seq_id"),
        (requests.LoadWeights, {"path": "tinker://x"}, 422, "give session_id and model_seq_id (a new model), or"),
        (
            requests.LoadWeights,
            {"path": "tinker://x", "session_id": "s", "model_seq_id": 0} | STEP,
            422,
            "give session_id and model_seq_id (a new model), or",
        ),
        (requests.CreateSamplingSession, {"session_id": "s", "sampling_session_seq_id": 0}, 422, "give base_model or"),
        (requests.CopyWeights, {"source_path": "x", "session_id": "s"}, 422, "session_id and model_seq_id go together"),
        (requests.CopyWeights, {"source_path": "x"}, 422, "or destination_project_id"),
        (requests.SearchSessions, SEARCH, 422, "cursor.last_created_at: Input should have timezone info"),
        (requests.RetrieveFutures, {"target": {"type": "x", "sampling_session_id": "s"}}, 422, "target.type: "),
        (requests.CreateSession, {"tags": ["\u0000", 1, 2, 3, 4, 5, 6]}, 422, "; and 2 more."),
    ],
)  # fmt: skip
def test_refusals_name_the_field(request_type, body, status, text):
    with pytest.raises(wire.WireError) as caught:
        requests.parse(request_type, body if isinstance(body, bytes) else encoded(body))
    assert text in str(caught.value)
    assert caught.value.status == status


RESPONSES = [
    (responses.ClientConfig, client_config_response.ClientConfigResponse),
    (responses.DynamicConfig, client_dynamic_config_response.ClientDynamicConfigResponse),
    (responses.Health, sdk.HealthResponse),
    (responses.Capabilities, sdk.GetServerCapabilitiesResponse),
    (responses.CreateSession, sdk.CreateSessionResponse),
    (responses.SessionHeartbeat, sdk.SessionHeartbeatResponse),
    (responses.TryAgain, try_again_response.TryAgainResponse),
    (responses.RequestFailed, sdk.RequestFailedResponse),
    (responses.CreateModel, sdk.CreateModelResponse),
    (responses.UnloadModel, unload_model_response.UnloadModelResponse),
    (responses.OptimStep, sdk.OptimStepResponse),
    (responses.SaveWeights, sdk.SaveWeightsResponse),
    (responses.SaveWeightsForSampler, SaveWeightsForSamplerResponseInternal),
    (responses.SaveWeightsExternal, SaveWeightsExternalResponseInternal),
    (responses.LoadWeights, sdk.LoadWeightsResponse),
    (responses.FutureFinished, future_completion.FutureFinished),
    (responses.FutureFailed, future_completion.FutureFailed),
    (responses.Futures, futures_retrieve_response.FuturesRetrieveResponse),
    (responses.GetInfo, sdk.GetInfoResponse),
    (responses.CreateSamplingSession, sdk.CreateSamplingSessionResponse),
    (responses.JoinSamplingSession, join_sampling_session_response.JoinSamplingSessionResponse),
    (responses.Sampler, sdk.GetSamplerResponse),
    (responses.WeightsInfo, sdk.WeightsInfoResponse),
    (responses.Checkpoint, sdk.Checkpoint),
    (responses.CheckpointList, sdk.CheckpointsListResponse),
    (responses.TrainingRun, sdk.TrainingRun),
    (responses.TrainingRuns, sdk.TrainingRunsResponse),
    (responses.ExternalWeightsUrls, external_weights_urls_response.ExternalWeightsUrlsResponse),
    (responses.Sessions, list_sessions_response.ListSessionsResponse),
    (responses.Session, get_session_response.GetSessionResponse),
    (responses.SearchSessions, session_search_response.SessionSearchResponse),
    (responses.Telemetry, sdk.TelemetryResponse),
]


def example(annotation: Any, full: bool, name: str = "") -> Any:
    """A value of the type: with `full`, whatever may be left out is there and nothing is None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if typing_extensions.is_typeddict(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return {key: example(hint, full, key) for key, hint in hints.items() if full or not may_be_left_out(hint)}
    if origin is typing.NotRequired:
        return example(arguments[0], full, name)
    if origin is typing.Literal:
        return arguments[0]
    if origin is list:
        return [example(arguments[0], full, name)]
    if origin is dict:
        return {"k": example(arguments[1], full, name)}
    if origin in (typing.Union, types.UnionType):
        return example(arguments[0], full, name) if full or type(None) not in arguments else None
    if annotation is str:
        is_time = name in ("time", "expires", "expires_at", "last_request_time", "created_at", "last_created_at")
        return "2026-01-01T00:00:00+00:00" if is_time else "x"
    return {int: 1, bool: True, float: 1.5}[annotation]


def may_be_left_out(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.NotRequired


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), RESPONSES, ids=lambda model: getattr(model, "__name__", ""))
def test_the_sdk_accepts_every_response(ours, theirs, full):
    value = json.loads(json.dumps(example(ours, full)))
    pydantic.TypeAdapter(theirs).validate_python(value)
    pydantic.TypeAdapter(ours).validate_python(value)


def test_every_response_is_held_to_the_sdk():
    """But those that have no model of their own there, and the parts of others."""
    ours = {item for _, item in inspect.getmembers(responses, typing_extensions.is_typeddict)}
    parts = {hint for response in ours for hint in flat(typing.get_type_hints(response).values())}
    without = {"UntypedFuture", "CompleteMetadata", "CopyWeights", "TraceExport", "Error"}
    assert {item.__name__ for item in ours - parts - {pair[0] for pair in RESPONSES}} == without


def flat(hints: Any) -> typing.Iterator[Any]:
    for hint in hints:
        yield hint
        yield from flat(typing.get_args(hint))


def test_metadata_comes_back_as_strings():
    assert responses.metadata_strings({"a": "b", "n": 3, "x": None}) == {"a": "b", "n": "3", "x": "null"}
    assert responses.metadata_strings(None) is None
