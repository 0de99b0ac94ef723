"""A scripted server for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_server import Script, serve

import saccade


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serve(script) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[saccade.Client]:
    with saccade.Client(address, timeout=20) as client:
        yield client
