"""A tiny model behind gRPC and HTTP, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from running import RunningServer
from running_http import RunningHttp
from served import make_served

import saccade


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module", autouse=True)
def trusted_authorities(authority: Authority) -> Iterator[None]:
    """Each HTTP client loads the certificates of the authorities that it trusts, although it asks none: 24 ms for those
    of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority.certificate))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served(tmp_path_factory.mktemp("model") / "tiny").path


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), max_seqs=40, max_len=600, admin=True) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[RunningHttp]:
    with RunningHttp([server.address], stall_timeout=5.0) as running:
        yield running


@pytest.fixture
def grpc_client(server: RunningServer) -> Iterator[saccade.Client]:
    with saccade.Client(server.address) as client:
        yield client
