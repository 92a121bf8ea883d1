"""Whatever is sent to a JSON endpoint, by its own OpenAPI document or against it: never a 5xx, never a hang."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from served import HEADERS, MODEL, Session, listening, make_app
from test_routes import wait_until_ready

NUM_EXAMPLES = 6  # of each operation, valid and again invalid
LONGEST_SECONDS = 20.0


def check(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url, headers=HEADERS, timeout=LONGEST_SECONDS)
    assert response.status_code < 500, (case.as_curl_command(), response.text)
    if response.status_code >= 400 and not case.path.startswith(("/v1", "/oai")):
        assert response.json()["detail"], case.as_curl_command()


@pytest.mark.extended
def test_no_request_makes_the_server_fail(tmp_path):
    app = make_app(tmp_path, long_poll=0.05)
    engine = FakeEngine(str(tmp_path / "engine.sock"), model_name=MODEL)
    with engine, listening(app) as url:
        wait_until_ready(url)
        asyncio.run(make_something(url))
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=HEADERS)
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) > 50
        for operation in operations:
            fuzz(operation, schemathesis.GenerationMode.POSITIVE, url)
            with contextlib.suppress(Unsatisfiable):  # what takes no parameters has no wrong ones
                fuzz(operation, schemathesis.GenerationMode.NEGATIVE, url)
        assert httpx.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}


def fuzz(operation, mode: schemathesis.GenerationMode, url: str) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        check(case, url)

    run()


async def make_something(url: str) -> None:
    """So that not everything is a 404."""
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        session = await Session(client).open()
        await session.operate("save_weights", path="a")
        await session.operate("save_weights_for_sampler", path="a")
