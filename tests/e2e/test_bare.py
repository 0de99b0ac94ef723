"""A machine with the required packages only: the server starts, logs what is missing, and answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from saccade import Client

CHECKOUT = Path(__file__).parents[2]
ABSENT = (
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "grpc_tools",
    "google.rpc",
    "google.api",
    "prometheus_client",
    "opentelemetry",
    "av",
    "httpx",
    "msgspec",
    "zmq",
    "tritonclient",
    "transformers",
    "triton",
    "torchvision",
    "sklearn",
    "rich",
)
BLOCK = f"""
import importlib.abc, importlib.util, sys

def absent(name):
    return any(name == one or name.startswith(one + ".") for one in {ABSENT!r})

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if absent(name) else find(name, package)

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if absent(name):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which every Python process, including child processes, lacks the optional modules."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}


def test_the_core_serves_without_what_it_does_not_need(bare: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = ["--threads", "1", "--image-workers", "1", "--graphs", "off"]
    command = [sys.executable, "-m", "service", "serve", "demo", "--port", "0", *small]
    with log.open("w") as errors:
        server = subprocess.Popen(command, env=bare, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("saccade ready on "), log.read_text()
        with Client(line.split()[-1]) as client:
            answer = client.generate("What is here?", images=[CHECKOUT / "demo/pictures/number.png"], max_tokens=4)
        assert answer.usage.completion_tokens and answer.text
    finally:
        server.terminate()
        assert server.wait(60) == 0
    said = log.read_text()
    for missing in (
        "grpcio-health-checking", "grpcio-reflection", "prometheus-client", "googleapis-common-protos", "av",
    ):  # fmt: skip
        assert f"{missing} is not installed" in said


def test_an_endpoint_that_cannot_be_is_refused(bare: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service", "serve", "demo", "--port", "0", "--metrics-port", "0"]
    ran = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0 and "metrics_port: 0 needs prometheus-client" in ran.stderr
