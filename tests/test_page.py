"""The web page: served whole and offline, and alive in a real browser where there is one."""

from __future__ import annotations

import asyncio
import pathlib
import re
import time
from typing import Any

import httpx
import pytest
from browser import Browser, find_chromium
from fake_engine import FakeEngine
from served import HEADERS, MODEL, Session, listening, make_app, served

from locojax.hosts.protocol import OptimStep
from locojax.server.routes_page import _FILES

FOLDER = pathlib.Path(__file__).parent.parent / "locojax" / "server" / "page"


def test_every_file_is_served_and_nothing_else(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            assert set(_FILES) == {path.name for path in FOLDER.iterdir()}
            for name, media_type in _FILES.items():
                response = await client.get(f"/page/{name}")
                assert response.content == (FOLDER / name).read_bytes()
                assert response.headers["content-type"] == media_type
            assert (await client.get("/")).content == (FOLDER / "index.html").read_bytes()
            for name in ("nothing.js", "..%2f__init__.py", "%2e%2e/app.py"):
                assert (await client.get(f"/page/{name}")).status_code == 404

    asyncio.run(body())


def test_the_page_works_offline_and_runs_no_foreign_script(tmp_path):
    for path in FOLDER.iterdir():
        assert not re.findall(r"""(?:src|href|url\(|fetch\()\s*=?\s*["'(]?https?:""", path.read_text()), path.name
    # Names come from clients: they are put in as text only.
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", (FOLDER / "page.js").read_text()
    )

    async def body():
        async with served(tmp_path) as client:
            policy = (await client.get("/")).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ") and "frame-ancestors 'none'" in policy

    asyncio.run(body())


def test_the_state_has_what_the_page_reads(tmp_path):
    async def body():
        async with served(tmp_path) as client:
            session = await Session(client).open()
            await session.operate("optim_step", adam_params={})
            return session, (await client.get("/api/v1/_status")).json()

    session, status = asyncio.run(body())
    assert set(status["server"]) == {"version", "started", "now"}
    assert {"state", "info", "gauges", "totals", "seconds", "queues", "num_restarts"} <= set(status["engine"])
    assert status["engine"]["state"] == "ready" and status["engine"]["info"]["model_name"] == MODEL
    (one,) = status["sessions"]
    assert one["session_id"] == session.session_id
    assert {"display_name", "seconds_since_heartbeat", "sdk_version", "created_at"} <= set(one)
    (model,) = status["models"]
    assert (model["model_id"], model["session_id"], model["rank"]) == (session.model_id, session.session_id, 8)
    assert {"state", "next_seq", "num_unfinished", "num_waiting", "last_request"} <= set(model)
    assert "pending" in status["futures"] and {"samplers", "errors"} <= set(status)


async def prepare(url: str) -> Session:
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        while (await client.get("/api/v1/healthz")).status_code != 200:
            await asyncio.sleep(0.05)
        session = Session(client)
        await session.open()
        await session.post("create_session", display_name="<img src=x onerror=alert(1)>")
        await session.operate("save_weights", path="final")
        await session.operate("save_weights_for_sampler", path="final")
        failed = await session.operate("optim_step", adam_params={})
        assert failed["category"] == "user"
    return session


# Defined where there is a browser to run it in, as there is in CI; the tests above need none.
if find_chromium() is not None:

    @pytest.mark.extended
    def test_the_page_in_a_browser(tmp_path):
        app = make_app(tmp_path)
        engine = FakeEngine(str(tmp_path / "engine.sock"), model_name=MODEL)
        engine.failures[OptimStep] = "user: out of luck"
        with engine, listening(app) as url, Browser(tmp_path / "browser") as page:
            session = asyncio.run(prepare(url))
            page.open(f"{url}/")
            page.wait("document.getElementById('state').dataset.state === 'ready'")
            rows = page.wait("[...document.querySelectorAll('#checkpoints tbody tr')].map(row => row.textContent)")
            assert len(rows) == 2 and all(f"tinker://{session.model_id}/" in row for row in rows)
            assert session.model_id in text(page, "models")
            assert session.session_id in text(page, "sessions")
            # A name is shown as it is, not run.
            assert "<img src=x onerror=alert(1)>" in text(page, "sessions")
            assert page.evaluate("document.images.length") == 0
            assert "out of luck" in text(page, "errors")
            assert MODEL in page.evaluate("document.querySelector('h1').textContent")
            assert page.evaluate("document.querySelectorAll('#figures div').length") == 8
            page.wait("document.querySelectorAll('#phases i').length > 0")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            delete_one(page, f"tinker://{session.model_id}/weights/final")
            directory = tmp_path / "checkpoints"
            assert [path for path in directory.rglob("*") if path.name == "final"]
            downloads(page, f"tinker://{session.model_id}/sampler_weights/final", tmp_path / "downloads")
            engine.stop()
            page.wait("document.getElementById('state').dataset.state !== 'ready'")
            assert page.complaints == []


def text(page: Browser, id: str) -> str:
    return page.evaluate(f"document.getElementById('{id}').textContent")


def click(page: Browser, path: str, label: str) -> None:
    wanted = f"b => b.dataset.path === '{path}' && b.textContent === '{label}'"
    page.evaluate(f"[...document.querySelectorAll('button')].find({wanted}).click()")


def delete_one(page: Browser, path: str) -> None:
    click(page, path, "Delete")
    page.wait("document.getElementById('confirm').open")
    assert path in text(page, "confirm-text")
    page.evaluate("document.querySelector('#confirm button[value=cancel]').click()")
    assert path in text(page, "checkpoints")
    click(page, path, "Delete")
    page.wait("document.getElementById('confirm').open")
    page.evaluate("document.getElementById('confirm-delete').click()")
    page.wait(f"!document.getElementById('checkpoints').textContent.includes('{path}')")


def downloads(page: Browser, path: str, folder: pathlib.Path) -> Any:
    folder.mkdir()
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    click(page, path, "Download")
    deadline = time.monotonic() + 30
    while not (found := [file for file in folder.iterdir() if file.suffix == ".tar"]):
        assert time.monotonic() < deadline, "nothing was downloaded"
        time.sleep(0.05)
    assert found[0].stat().st_size > 0
