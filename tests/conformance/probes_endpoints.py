"""Endpoints beside the training protocol: small ones, the OpenAI dialect, the page, sessions."""

from __future__ import annotations

import json

import tinker
from conformance.client import (
    API_KEY,
    Client,
    session_of,
    since,
    train,
    version_of,
)


@since("0.38")
def probe_small_endpoints(client: Client) -> None:
    """What every client calls on the side."""
    assert client.http.get("/api/v1/healthz").json()["status"] == "ok"
    models = client.http.get("/api/v1/get_server_capabilities").json()["supported_models"]
    assert client.base_model in [model["model_name"] for model in models]
    assert client.post("client/dynamic_config", sdk_version="0.38.0").status_code in (200, 404)
    session_id = client.open_session()
    assert client.post("session_heartbeat", session_id=session_id, type="session_heartbeat").status_code == 200
    telemetry = client.post(
        "telemetry", events=[], platform="x", sdk_version="0.38.0", session_id=session_id, process_uuid="u"
    )
    assert telemetry.json() == {"status": "accepted"}
    for path in (f"sessions/{session_id}/trace_export", "audit", "billing/usage/events"):
        assert client.http.get(f"/api/v1/{path}").status_code in (200, 400, 403, 404, 501)
    found = client.post("sessions/search", session_id=session_id, limit=5).json()
    assert [one["session_id"] for one in found["sessions"]] == [session_id]
    client.finish(session_id)
    gone = client.post("session_heartbeat", session_id=session_id, type="session_heartbeat")
    assert gone.status_code == 410, gone.text


@since("0.38")
def probe_openai_endpoints(client: Client) -> None:
    """Completions and chat over the base model and over a checkpoint; streamed text adds up to the whole."""
    trainer = client.trainer()
    train(trainer)
    path = trainer.save_weights_for_sampler("eval").result().path
    headers = {"Authorization": f"Bearer {API_KEY}"}
    for model in (client.base_model, path):
        request = {"model": model, "prompt": "the quick", "max_tokens": 6, "temperature": 0.0, "seed": 1}
        whole = client.http.post("/v1/completions", json=request, headers=headers)
        assert whole.status_code == 200, whole.text
        body = whole.json()
        assert body["object"] == "text_completion" and body["usage"]["prompt_tokens"] == len("the quick")
        text = ""
        with client.http.stream("POST", "/v1/completions", json={**request, "stream": True}, headers=headers) as lines:
            events = [line[6:] for line in lines.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            choices = json.loads(event)["choices"]
            text += choices[0]["text"] if choices else ""
        assert text == body["choices"][0]["text"]
        chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        answer = client.http.post("/v1/chat/completions", json=chat, headers=headers)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["role"] == "assistant"
    bad = client.http.post("/v1/completions", json={"model": "nope", "prompt": "x"}, headers=headers)
    assert bad.status_code in (400, 404), bad.text


@since("0.38")
def probe_page_and_metrics(client: Client) -> None:
    page = client.http.get("/")
    assert page.status_code == 200 and "<html" in page.text.lower()
    assert "https://" not in page.text.replace("https://www.w3.org", ""), "the page needs the network"
    metrics = client.http.get("/metrics")
    assert metrics.status_code == 200 and "# TYPE" in metrics.text


def probe_unload_model(client: Client) -> None:
    """What SDKs before 0.30 call to free a model."""
    trainer = client.trainer()
    answer = client.post("unload_model", model_id=trainer.model_id, type="unload_model")
    result = client.result(answer)
    assert result["model_id"] == trainer.model_id and "error" not in result


def probe_capabilities_over_the_sdk(client: Client) -> None:
    answer = client.service().get_server_capabilities()
    assert client.base_model in [model.model_name for model in answer.supported_models]


@since("0.36")
def probe_close_finishes_the_session(client: Client) -> None:
    with client.service() as service:
        trainer = client.trainer(service)
    session_id = session_of(trainer)
    gone = client.post("session_heartbeat", session_id=session_id, type="session_heartbeat")
    assert gone.status_code == 410, gone.text


@since("0.36")
def probe_search_sessions(client: Client) -> None:
    service = client.service(user_metadata={"recipe_name": "conformance"})
    trainer = client.trainer(service)
    found = client.post("sessions/search", user_metadata={"recipe_name": "conformance"}, limit=50).json()
    assert session_of(trainer) in [one["session_id"] for one in found["sessions"]]
    assert version_of(tinker.__version__) >= (0, 36)
