"""The OpenAI dialect over HTTP."""

from __future__ import annotations

import asyncio
import json

from served import MODEL, Session, client_of, make_app, served


def test_completions_in_the_openai_dialect(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            path = (await session.operate("save_weights_for_sampler", path="a"))["path"]
            names = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            assert MODEL in names and path in names
            for model in (MODEL, path):
                asked = {"model": model, "prompt": "ab", "max_tokens": 5, "n": 2, "seed": 1}
                for prefix in ("/v1", "/oai/api/v1"):
                    response = await client.post(f"{prefix}/completions", json=asked)
                    assert response.status_code == 200, response.text
                    assert len(response.json()["choices"]) == 2
                    assert response.json()["usage"]["prompt_tokens"] == 2
            chat = await client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
            )
            assert chat.json()["choices"][0]["message"]["role"] == "assistant"
            missing = await client.post("/v1/completions", json={"model": "nope", "prompt": "a"})
            assert missing.status_code in (400, 404) and "nope" in missing.json()["error"]["message"]
            wrong = await client.post("/v1/completions", json={"prompt": "a"})
            assert wrong.status_code == 422 and "model: Field required" in wrong.json()["error"]["message"]

    asyncio.run(body())


def test_streams_in_the_openai_dialect(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            asked = {"model": MODEL, "prompt": ["ab", "c"], "max_tokens": 5, "seed": 1}
            whole = (await client.post("/v1/completions", json=asked)).json()
            stream = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            response = await client.post("/v1/completions", json=stream)
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
            assert lines.pop() == "[DONE]"
            events = [json.loads(line) for line in lines]
            assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
            assert all(event["usage"] is None for event in events[:-1])
            for choice in whole["choices"]:
                parts = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
                assert "".join(part["text"] for part in parts) == choice["text"]
                assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
            text = (await client.post("/v1/chat/completions", json=chat)).text
            first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            refused = await client.post("/v1/completions", json={**stream, "model": "nope"})
            assert refused.status_code in (400, 404)

    asyncio.run(body())


def test_a_stream_says_what_the_whole_answer_says(tmp_path):
    """With several choices, stops, echo, log-probs and the likeliest tokens."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    asked = [
        ("completions", {"prompt": ["ab", "c"], "n": 2, "logprobs": 0}),
        ("completions", {"prompt": ["ab", "c"], "n": 2, "logprobs": 3}),
        ("completions", {"prompt": [[5, 6, 7]], "echo": True, "logprobs": 1, "max_tokens": 1}),
        ("completions", {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 2}),
        ("completions", {"prompt": "ab", "n": 2, "stop": ["q", "zz"]}),
        ("chat/completions", {**chat, "n": 2}),
        ("chat/completions", {**chat, "n": 2, "top_logprobs": 2}),
    ]

    async def body():
        async with served(tmp_path) as client:
            for path, request in asked:
                body = {"model": MODEL, "max_tokens": 5, "seed": 1, **request}
                whole = (await client.post(f"/v1/{path}", json=body)).json()
                response = await client.post(f"/v1/{path}", json={**body, "stream": True})
                lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
                assert lines.pop() == "[DONE]"
                parts = [json.loads(line)["choices"][0] for line in lines]
                assert len(whole["choices"]) > max(part["index"] for part in parts)
                for choice in whole["choices"]:
                    assert joined([part for part in parts if part["index"] == choice["index"]]) == choice, request

    asyncio.run(body())


def joined(parts):
    """A choice out of its events."""
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    choice = {"index": parts[0]["index"], "finish_reason": parts[-1]["finish_reason"]}
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    if "delta" in parts[0]:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        content = [token for one in logprobs for token in one["content"]]
        text = "".join(part["delta"].get("content", "") for part in parts)
        return {**choice, "message": {"role": "assistant", "content": text}, "logprobs": {"content": content}}
    choice["text"] = "".join(part["text"] for part in parts)
    if not logprobs:
        return {**choice, "logprobs": None}
    merged = {key: [value for one in logprobs for value in one[key] or ()] for key in logprobs[0]}
    merged["top_logprobs"] = merged["top_logprobs"] or None
    return {**choice, "logprobs": merged}


def test_openai_clients_are_told_to_come_again_while_the_model_loads(tmp_path):
    async def body():
        app = make_app(tmp_path)
        async with app.router.lifespan_context(app), client_of(app) as client:
            response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert response.status_code == 503
        assert response.json()["error"]["message"].startswith("The model is not ready yet. Got: waiting for the engine")

    asyncio.run(body())
