"""The JSON requests of the Tinker API, as types: what a client may send, and what it means when it sends less.

Unknown fields are ignored (the SDK adds some nearly every release) and whatever the API calls optional may be left out,
so one definition serves every SDK from 0.7 on. The two large requests, forward_backward and asample, are in `wire`.
A value of the wrong type or out of range is a `WireError` of status 422, raised by `parse`; a well-formed request for
something this server does not do (another optimizer, say) is one of status 400.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from locojax.server.wire_errors import WireError, refused_fields, shortened
from locojax.types import AdamParams

MAX_JSON_BYTES = 1 << 20
"""Enough for any request in this file but telemetry."""

MAX_TELEMETRY_BYTES = 16 << 20

Id: TypeAlias = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f]+$")]
"""A session's, model's, sampler's or future's id: at most 512 characters, no control characters."""

Text: TypeAlias = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
"""Free text without NUL, which not every database stores."""

Sequence: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
"""A sequence number. An int64: clones of a sampling client count from a random multiple of 1e9."""

Metadata: TypeAlias = Annotated[dict[Annotated[str, Field(max_length=512)], Any], Field(max_length=1000)]

Seconds: TypeAlias = Annotated[int, Field(ge=3600, le=10 * 366 * 86400, strict=True)]
"""A checkpoint's time to live: from an hour to ten years."""

CheckpointName: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_+=@-][A-Za-z0-9_+=@:. -]*$")
]
"""One segment of a tinker:// path, and a folder's name: no slash, no leading dot."""


def _adam_only(name: str) -> str:
    if name not in ("adamw", "adam"):
        raise WireError(
            "This server has no such optimizer",
            got=shortened(name),
            expected="'adamw'",
            remedy="Leave optimizer_config out, and pass AdamParams to optim_step",
        )
    return name


AdamOnly: TypeAlias = Annotated[str, pydantic.AfterValidator(_adam_only)]


class Request(BaseModel):
    """Base of the requests. A field that is null counts as left out."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        return {name: value for name, value in fields.items() if value is not None} if type(fields) is dict else fields


AnyRequest = TypeVar("AnyRequest", bound=Request)


class ClientConfig(Request):
    """POST /client/config and /client/dynamic_config."""

    sdk_version: Text = ""


class CreateSession(Request):
    tags: list[Text] = []
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Id | None = None
    display_name: Text | None = None


class SessionHeartbeat(Request):
    session_id: Id


class FinishReason(Request):
    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(Request):
    """POST /sessions/{id}/finish."""

    reason: FinishReason = FinishReason()
    detail: Annotated[str, Field(max_length=1 << 20)] | None = None


class SetProject(Request):
    """PUT /sessions/{id}/project."""

    project_id: Id


class LoraConfig(Request):
    """rank: the most is the server's choice, and is checked by the engine. At least one part must be trained."""

    rank: Annotated[int, Field(ge=1, lt=1 << 31, strict=True)] = 32
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, strict=True)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @pydantic.model_validator(mode="after")
    def _trains_something(self) -> LoraConfig:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("train_unembed, train_mlp and train_attn are all false: there is nothing to train")
        return self


class OptimizerConfig(Request):
    type: AdamOnly = "adamw"


class CreateModel(Request):
    """lora_config: left out, the SDK's defaults. A future; answers with `responses.CreateModel`."""

    session_id: Id
    model_seq_id: Sequence
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()


class GetInfo(Request):
    model_id: Id


class UnloadModel(Request):
    """Before SDK 0.30. A future."""

    model_id: Id


class Adam(Request):
    """adam_params of an optim_step; a grad_clip_norm that is not positive is off."""

    type: AdamOnly = "adamw"
    learning_rate: Annotated[float, Field(ge=0)] = AdamParams.learning_rate
    beta1: Annotated[float, Field(ge=0, lt=1)] = AdamParams.beta1
    beta2: Annotated[float, Field(ge=0, lt=1)] = AdamParams.beta2
    eps: Annotated[float, Field(ge=0)] = AdamParams.eps
    weight_decay: Annotated[float, Field(ge=0)] = AdamParams.weight_decay
    grad_clip_norm: float = AdamParams.grad_clip_norm

    def params(self) -> AdamParams:
        """The same as the noun that the trainer takes."""
        return AdamParams(
            self.learning_rate, self.beta1, self.beta2, self.eps, self.weight_decay, max(self.grad_clip_norm, 0.0)
        )


class OptimStep(Request):
    """seq_id, here as in every operation of a model: its order is by it, and a repeated request is known by it."""

    model_id: Id
    seq_id: Sequence
    adam_params: Annotated[
        Adam, Field(validation_alias=pydantic.AliasChoices("adam_params", "optim_params", "optimizer_params"))
    ] = Adam()


class SaveWeights(Request):
    """POST /save_weights; path left out: the checkpoint is named after seq_id (see `name`)."""

    model_id: Id
    seq_id: Sequence
    path: CheckpointName | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None

    @property
    def name(self) -> str:
        return f"{self.seq_id:06d}" if self.path is None else self.path


class SaveWeightsForSampler(Request):
    """Named (`path`), or ephemeral: then `sampling_session_seq_id` numbers the sampling session that it opens."""

    model_id: Id
    seq_id: Sequence
    path: CheckpointName | None = None
    sampling_session_seq_id: Sequence | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Seconds | None = None
    user_metadata: Metadata | None = None

    @pydantic.model_validator(mode="after")
    def _is_one_of_two(self) -> SaveWeightsForSampler:
        if self.path is None and self.sampling_session_seq_id is None:
            raise ValueError("give path (a named checkpoint) or sampling_session_seq_id (a sampler that is not kept)")
        return self


class SaveWeightsExternal(Request):
    """age_encryption_recipients: encrypt every file to these (age1... or SSH public keys)."""

    model_id: Id
    path: CheckpointName
    seq_id: Sequence
    ttl_seconds: Seconds | None = None
    age_encryption_recipients: Annotated[list[Text], Field(max_length=10)] | None = None


class LoadWeights(Request):
    """Into a new model (`session_id` and `model_seq_id`), or, the older form, into `model_id`."""

    path: Text
    optimizer: bool = False
    model_id: Id | None = None
    seq_id: Sequence | None = None
    session_id: Id | None = None
    model_seq_id: Sequence | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Text | None = None

    @pydantic.model_validator(mode="after")
    def _is_one_of_two(self) -> LoadWeights:
        new = self.session_id is not None and self.model_seq_id is not None
        existing = self.model_id is not None and self.seq_id is not None
        if new == existing:
            raise ValueError("give session_id and model_seq_id (a new model), or model_id and seq_id (an existing one)")
        return self


class CreateSamplingSession(Request):
    session_id: Id
    sampling_session_seq_id: Sequence
    base_model: Text | None = None
    model_path: Text | None = None

    @pydantic.model_validator(mode="after")
    def _names_weights(self) -> CreateSamplingSession:
        if self.base_model is None and self.model_path is None:
            raise ValueError("give base_model or model_path (tinker://<model>/sampler_weights/<name>)")
        return self


class JoinSamplingSession(Request):
    sampling_session_id: Id


class RetrieveFuture(Request):
    request_id: Id
    allow_metadata_only: bool = False


class FuturesTarget(Request):
    """cloned_sampler_id: the seq_id of the samples, floor-divided by 1e9."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Sequence = 0


class RetrieveFutures(Request):
    """timeout: seconds; 0 answers at once, None waits as long as the server likes."""

    target: FuturesTarget
    prev_cursor: Sequence = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = []


class CancelFuture(Request):
    request_id: Id


class CreateCustomLoss(Request):
    """Only for a server that runs them; ours says that the client can."""

    session_id: Id
    custom_loss_seq_id: Sequence
    name: Text


class CopyWeights(Request):
    """Copied into a session's model slot (`session_id` and `model_seq_id`) or into a project."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Sequence | None = None
    destination_project_id: Id | None = None
    ttl_seconds: Seconds | None = None
    weights_access_token: Text | None = None

    @pydantic.model_validator(mode="after")
    def _names_a_destination(self) -> CopyWeights:
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("session_id and model_seq_id go together: which model slot shall own the copy?")
        if self.session_id is None and self.destination_project_id is None:
            raise ValueError("give session_id and model_seq_id, or destination_project_id")
        return self


class WeightsInfo(Request):
    tinker_path: Text


class SetTtl(Request):
    """PUT .../ttl; None: never expires."""

    ttl_seconds: Seconds | None = None


class SearchOwner(Request):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=10)] = []


class SearchStatus(Request):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None


class SearchCursor(Request):
    last_created_at: pydantic.AwareDatetime
    last_session_id: Id


class SearchSessions(Request):
    """session_id or display_name: either one matches; all the rest must hold."""

    session_id: Id | None = None
    project_ids: list[Id] | None = None
    user_metadata: dict[str, Text] = {}
    display_name: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    owner: SearchOwner = SearchOwner()
    statuses: Annotated[list[SearchStatus], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200, strict=True)] = 50
    cursor: SearchCursor | None = None


class Telemetry(Request):
    """Events of the client's own; their tracebacks are of its code."""

    events: list[dict[str, Any]] = []
    platform: Text = ""
    sdk_version: Text = ""
    session_id: Annotated[str, Field(max_length=512)] = ""
    process_uuid: Annotated[str, Field(max_length=512)] = ""


class Empty(Request):
    """A request whose body says nothing, such as POST /auth/token."""


def parse(request: type[AnyRequest], body: bytes, max_bytes: int = MAX_JSON_BYTES) -> AnyRequest:
    """Reads a JSON body as `request`; an empty body counts as {}.

    Raises:
      WireError: of status 413 if it is longer than `max_bytes`, 400 if it is not JSON, 422 if a field is wrong; the
        text names each such field.
    """
    if len(body) > max_bytes:
        raise WireError(
            "The request body is too long", got=f"{len(body)} bytes", expected=f"at most {max_bytes}", status=413
        )
    try:
        return request.model_validate_json(body or b"{}")
    except pydantic.ValidationError as error:
        raise refused_fields(error) from None
