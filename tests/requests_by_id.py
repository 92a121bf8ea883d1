"""A request of every endpoint that is asked about something by its id, for tests that ask for what isn't there."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ids:
    """What a client may name. `path`s are of a training and of a sampler checkpoint."""

    session: str
    model: str
    sampler: str
    request: str
    run: str
    weights: str
    sampler_weights: str
    own_session: str  # of the asker: for requests that make something out of something


@dataclasses.dataclass(frozen=True)
class Ask:
    method: str
    path: str
    body: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.method} {self.path} {sorted(self.body or ())}"


def requests_about(ids: Ids) -> list[Ask]:
    """Each endpoint with an id in it, and with every kind of id that it takes. Nothing changes if it isn't there."""
    tokens = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    target = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
    data = {"data": [{"model_input": tokens, "loss_fn_inputs": {"target_tokens": target}}], "loss_fn": "cross_entropy"}
    operation = {"model_id": ids.model, "seq_id": 1}
    sample = {"prompt": tokens, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
    one = f"/api/v1/training_runs/{ids.run}/checkpoints/weights/{ids.weights.rpartition('/')[2]}"
    v1, new = "/api/v1", {"session_id": ids.own_session, "model_seq_id": 77}
    target_session = {"type": "sampling_session", "sampling_session_id": ids.sampler}
    return [
        Ask("POST", f"{v1}/session_heartbeat", {"session_id": ids.session}),
        Ask("GET", f"{v1}/sessions/{ids.session}"),
        Ask("GET", f"{v1}/sessions/{ids.session}/trace_export"),
        Ask("PUT", f"{v1}/sessions/{ids.session}/project", {"project_id": "p"}),
        Ask("POST", f"{v1}/create_model", {"session_id": ids.session, "model_seq_id": 0,
                                            "base_model": "test/tiny-model", "lora_config": {"rank": 8, "seed": 1}}),
        Ask("POST", f"{v1}/get_info", {"model_id": ids.model}),
        Ask("POST", f"{v1}/forward_backward", {**operation, "forward_backward_input": data}),
        Ask("POST", f"{v1}/forward", {**operation, "forward_input": data}),
        Ask("POST", f"{v1}/optim_step", {**operation, "adam_params": {"learning_rate": 1e-4}}),
        Ask("POST", f"{v1}/save_weights", {**operation, "path": "a"}),
        Ask("POST", f"{v1}/save_weights_for_sampler", {**operation, "path": "a"}),
        Ask("POST", f"{v1}/save_weights_external", {**operation, "path": "a"}),
        Ask("POST", f"{v1}/load_weights", {**operation, "path": ids.weights, "optimizer": False}),
        Ask("POST", f"{v1}/load_weights", {**new, "path": ids.weights, "optimizer": True}),
        Ask("POST", f"{v1}/load_weights", {**new, "path": ids.sampler_weights, "optimizer": False}),
        Ask("POST", f"{v1}/unload_model", {"model_id": ids.model}),
        Ask("POST", f"{v1}/create_sampling_session", {"session_id": ids.session, "sampling_session_seq_id": 5,
                                                       "base_model": "test/tiny-model"}),
        Ask("POST", f"{v1}/create_sampling_session", {"session_id": ids.own_session, "sampling_session_seq_id": 5,
                                                       "model_path": ids.sampler_weights}),
        Ask("POST", f"{v1}/join_sampling_session", {"sampling_session_id": ids.sampler}),
        Ask("GET", f"{v1}/samplers/{ids.sampler}"),
        Ask("POST", f"{v1}/asample", {**sample, "sampling_session_id": ids.sampler, "seq_id": 0}),
        Ask("POST", f"{v1}/asample", {**sample, "model_path": ids.sampler_weights}),
        Ask("POST", f"{v1}/retrieve_future", {"request_id": ids.request}),
        Ask("POST", f"{v1}/retrieve_futures", {"target": target_session, "timeout": 0}),
        Ask("POST", f"{v1}/cancel_future", {"request_id": ids.request}),
        Ask("POST", f"{v1}/copy_weights", {"source_path": ids.weights, "destination_project_id": "p"}),
        Ask("POST", f"{v1}/weights_info", {"tinker_path": ids.weights}),
        Ask("POST", f"{v1}/weights_info", {"tinker_path": ids.sampler_weights}),
        Ask("GET", f"{v1}/training_runs/{ids.run}"),
        Ask("GET", f"{v1}/training_runs/{ids.run}/checkpoints"),
        Ask("POST", f"{one}/publish"),
        Ask("DELETE", f"{one}/publish"),
        Ask("PUT", f"{one}/ttl", {"ttl_seconds": 7200}),
        Ask("GET", f"{one}/external_weights_urls"),
        Ask("GET", f"{one}/archive"),
        Ask("GET", f"{v1}/_archive?run_id={ids.run}&checkpoint_id=weights/a"),
        Ask("DELETE", one),
        Ask("POST", "/v1/completions", {"model": ids.sampler_weights, "prompt": "ab", "max_tokens": 2}),
        Ask("POST", "/v1/completions", {"model": ids.sampler_weights, "prompt": "ab", "max_tokens": 2, "stream": True}),
        Ask("POST", "/oai/api/v1/chat/completions", {"model": ids.sampler_weights,
                                                     "messages": [{"role": "user", "content": "hi"}]}),
        Ask("POST", f"{v1}/sessions/{ids.session}/finish", {"reason": {"type": "success"}, "detail": None}),
    ]  # fmt: skip
