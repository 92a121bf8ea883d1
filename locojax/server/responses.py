"""What answers each request, as types of the JSON: `NotRequired` may be left out, and None is written as null.

They are dicts, so that a type checker holds whoever builds an answer to them at no cost when it runs; the tests hold
them to the SDK's own response models. Times are ISO 8601 with an offset. The two large results are in `wire_results`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]
Category = Literal["unknown", "server", "user"]
CheckpointType = Literal["training", "sampler", "external"]


class ClientConfig(TypedDict):
    """POST /client/config: what an SDK may use; each one ignores the flags that it does not know."""

    parallel_fwdbwd_chunks: bool
    proto_compress_fwdbwd: bool
    fwdbwd_max_chunk_len: int
    sample_max_concurrent_requests: int
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool
    use_pyqwest_transport: bool
    custom_loss_server_side: bool
    proto_write_fwdbwd: bool  # 0.18 to 0.24
    fwd_via_fwdbwd: bool  # 0.18 to 0.24
    create_model_via_load_weights: bool  # 0.26 to 0.36


class DynamicConfig(TypedDict):
    """POST /client/dynamic_config."""

    refresh_interval_sec: int
    sample_cancel_enabled: bool
    sample_cancel_max_batch_size: int


class Health(TypedDict):
    """GET /healthz once ready."""

    status: Literal["ok"]


class SupportedModel(TypedDict):
    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Capabilities(TypedDict):
    supported_models: list[SupportedModel]


class CreateSession(TypedDict):
    """The messages are logged by the client and stop nothing."""

    type: Literal["create_session"]
    session_id: str
    info_message: NotRequired[str]
    warning_message: NotRequired[str]
    error_message: NotRequired[str]


class SessionHeartbeat(TypedDict):
    type: Literal["session_heartbeat"]


class UntypedFuture(TypedDict):
    """What a POST that starts an operation returns. asample's has one sequence id for each sample, in their order."""

    request_id: str
    model_id: NotRequired[str]
    sample_sequence_ids: NotRequired[list[str]]


class TryAgain(TypedDict):
    """Status 408: not done yet."""

    type: Literal["try_again"]
    request_id: str
    queue_state: QueueState
    queue_state_reason: NotRequired[str]


class RequestFailed(TypedDict):
    """A future that failed."""

    error: str
    category: Category


class CompleteMetadata(TypedDict):
    """A large result is there: the client makes room for so many bytes and asks again."""

    status: Literal["complete_metadata"]
    request_id: str
    response_payload_size: int


class CreateModel(TypedDict):
    type: Literal["create_model"]
    model_id: str


class UnloadModel(TypedDict):
    type: Literal["unload_model"]
    model_id: str


class OptimStep(TypedDict):
    metrics: dict[str, float]


class SaveWeights(TypedDict):
    type: Literal["save_weights"]
    path: str


class SaveWeightsForSampler(TypedDict):
    """A named checkpoint's path, or an ephemeral sampler's session; never both."""

    type: Literal["save_weights_for_sampler"]
    path: NotRequired[str]
    sampling_session_id: NotRequired[str]


class SaveWeightsExternal(TypedDict):
    type: Literal["save_weights_external"]
    path: str
    size_bytes: int


class LoadWeights(TypedDict):
    type: Literal["load_weights"]
    path: str
    model_id: str


class FutureFinished(TypedDict):
    state: Literal["finished"]
    request_id: str
    response_payload_uncompressed_size: NotRequired[int]


class FutureFailed(TypedDict):
    state: Literal["failed"]
    request_id: str


class Futures(TypedDict):
    """POST /retrieve_futures."""

    completions: list[FutureFinished | FutureFailed]
    cursor: int


class ModelData(TypedDict):
    arch: str
    model_name: str  # clients load the tokenizer by it if there is no tokenizer_id
    tokenizer_id: str | None


class GetInfo(TypedDict):
    type: Literal["get_info"]
    model_id: str
    model_name: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int


class CreateSamplingSession(TypedDict):
    type: Literal["create_sampling_session"]
    sampling_session_id: str


class JoinSamplingSession(TypedDict):
    type: Literal["join_sampling_session"]
    client_counter: int


class Sampler(TypedDict):
    """GET /samplers/{id}."""

    sampler_id: str
    base_model: str
    model_path: NotRequired[str]


class CopyWeights(TypedDict):
    tinker_path: str


class WeightsInfo(TypedDict):
    base_model: str
    is_lora: bool
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


class Cursor(TypedDict):
    offset: int
    limit: int
    total_count: int


class Checkpoint(TypedDict):
    """checkpoint_id: `weights/<name>`, `sampler_weights/<name>` or `external_weights/<name>`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: str
    tinker_path: str
    public: bool
    base_model: str
    size_bytes: NotRequired[int]
    user_metadata: NotRequired[dict[str, str]]
    expires_at: NotRequired[str | None]


class CheckpointList(TypedDict):
    """cursor: null where the list is not cut into pages."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None


class TrainingRun(TypedDict):
    """user_metadata: create_model's, which recipes read back."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool
    last_request_time: str
    lora_rank: NotRequired[int]
    last_checkpoint: NotRequired[Checkpoint | None]
    last_sampler_checkpoint: NotRequired[Checkpoint | None]
    user_metadata: NotRequired[dict[str, str] | None]


class TrainingRuns(TypedDict):
    training_runs: list[TrainingRun]
    cursor: Cursor


class ExternalWeightsUrls(TypedDict):
    """File path -> an URL that needs no key; `expires` is more than five minutes ahead."""

    urls: dict[str, str]
    expires: str


class Sessions(TypedDict):
    sessions: list[str]


class Session(TypedDict):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: NotRequired[dict[str, str] | None]
    display_name: NotRequired[str | None]


class FinishReason(TypedDict):
    type: Literal["success", "errored", "interrupted"]


class StatusActive(TypedDict):
    type: Literal["active"]


class StatusCancelled(TypedDict):
    type: Literal["cancelled"]
    detail: NotRequired[str | None]


class StatusFinished(TypedDict):
    type: Literal["client_finished"]
    reason: FinishReason
    detail: NotRequired[str | None]


SessionStatus: TypeAlias = StatusActive | StatusCancelled | StatusFinished


class SessionSummary(TypedDict):
    session_id: str
    created_at: str
    owner: str
    project_id: str
    checkpoints_count: int
    status: NotRequired[SessionStatus | None]
    display_name: NotRequired[str | None]
    user_metadata: NotRequired[dict[str, str] | None]
    checkpoint_storage_bytes: NotRequired[int]


class SearchCursor(TypedDict):
    last_created_at: str
    last_session_id: str


class SearchSessions(TypedDict):
    """Newest first; next_cursor null: there is no more."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None


class TraceExport(TypedDict):
    """GET /sessions/{id}/trace_export, polled by the client until it is not pending."""

    status: Literal["pending", "ready", "failed"]
    url: NotRequired[str]
    error: NotRequired[str]


class Telemetry(TypedDict):
    status: Literal["accepted"]


class Error(TypedDict):
    """Every status of 400 and up; clients show `detail` as it is."""

    detail: str


def metadata_strings(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """User metadata as the API returns it: strings as they are, all else as JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
