"""One tiny served model for the end-to-end tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import RunningServer
from served import make_served
from tiny_checkpoint import TinyCheckpoint

import saccade

LIMITS = {"max_seqs": 40, "max_len": 600}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_served(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def model(tiny: TinyCheckpoint) -> Path:
    return tiny.path


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It takes no images, so the image workers of its server import no torch, which takes over a second each."""
    return make_served(tmp_path_factory.mktemp("text") / "tiny", vision=False).path


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), image_workers=2, engine_process=True, **LIMITS) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[saccade.Client]:
    """A client of the server; after each test the server must hold no resources."""
    with saccade.Client(server.address) as client:
        yield client
    server.drained()


@pytest.fixture(scope="session")
def local(model: Path) -> Iterator[saccade.LocalClient]:
    with saccade.LocalClient(model, dtype="float32", threads=1, **LIMITS) as client:
        yield client
