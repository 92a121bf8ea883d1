"""One server for every test here: the tiny model, by a name that is its path where the clients run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import tiny
from conformance.server import MODEL, Server, serve


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where server and clients run, so that clients find the tokenizer under the model's name."""
    folder = tmp_path_factory.mktemp("conformance")
    (folder / "local").mkdir()
    tiny.write_tiny_model(folder / MODEL)
    return folder


@pytest.fixture(scope="session")
def server(folder: pathlib.Path) -> Iterator[Server]:
    # What trainer and sampler say is compared to fp32's rounding; left to the machine, it could be bf16.
    with serve(MODEL, folder, ["--compute-dtype", "float32", "--sample-dtype", "float32"]) as served:
        yield served
