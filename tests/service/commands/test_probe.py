"""`saccade probe` in the environment of a container."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from service.commands import probe


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert probe.main([f"127.0.0.1:{port}", "--timeout", "20"]) == 0, capsys.readouterr().err
    finally:
        server.stop(None).wait()
