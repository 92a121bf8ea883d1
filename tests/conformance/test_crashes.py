"""Either process of a server killed under load: clients get clear errors, it restarts, and what was saved is there."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conformance import sdks
from conformance.server import MODEL, Server, serve, tail

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory, folder: pathlib.Path) -> Iterator[Server]:
    """A server of its own, to be killed."""
    home = tmp_path_factory.mktemp("fragile")
    (home / "local").symlink_to(folder / "local")
    with serve(MODEL, home, ["--no-warm-up"]) as server:  # so that a restart is quick
        yield server


@pytest.mark.parametrize("role", ["engine", "api"])
def test_killed(fragile: Server, role: str) -> None:
    """See `crashes`: a process of its own, for the SDK leaves connections that were cut to the garbage collector."""
    arguments = [role, fragile.url, str(fragile.pid), str(fragile.log)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "conformance.crashes", *arguments],
        cwd=fragile.log.parent, env=sdks.environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nserver:\n{tail(fragile.log)}"
