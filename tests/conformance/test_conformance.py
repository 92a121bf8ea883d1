"""The official SDK, in every version at hand, against a real server: one test a probe and version."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Mapping

import pytest
from conformance import sdks
from conformance.client import applies, version_of
from conformance.run import find_probes
from conformance.server import MODEL, Server, tail

pytestmark = pytest.mark.extended

CASES = [
    (sdk, name)
    for sdk in sdks.at_hand()
    for name, probe in find_probes().items()
    if applies(probe, version_of(sdk.version), sdk.torch)
]


@pytest.fixture(scope="module")
def results(server: Server, folder: pathlib.Path, request: pytest.FixtureRequest) -> Mapping[tuple[str, str], dict]:
    """Every selected probe's result; each SDK runs its own in one process."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    found: dict[tuple[str, str], dict] = {}
    for sdk in dict.fromkeys(sdk for sdk, _ in wanted):
        names = [name for one, name in wanted if one == sdk]
        command = [sdk.python, "-W", "ignore", "-m", "conformance.run", server.url, MODEL, *names]
        with (folder / f"{sdk.name}.log").open("wb") as log:
            done = subprocess.run(command, cwd=folder, env=sdks.environment(), stdout=subprocess.PIPE, stderr=log)
        for line in done.stdout.decode().splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                found[sdk.name, result["probe"]] = result
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def test_probe(results: Mapping[tuple[str, str], dict], case: tuple[sdks.Sdk, str], folder: pathlib.Path) -> None:
    sdk, name = case
    assert (sdk.name, name) in results, f"the probes ended early:\n{tail(folder / f'{sdk.name}.log')}"
    result = results[sdk.name, name]
    assert result["passed"], f"{result['error']}\nserver:\n{tail(folder / 'server.log')}"
