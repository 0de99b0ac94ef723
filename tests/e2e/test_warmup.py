"""A server that is warming up listens, reports this, and rejects calls."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from running import EngineHere, images_here
from served import make_served

import saccade
import saccade.errors
from service.common.config import ConfigError, ServerOptions
from service.engine.engine_client import EngineProcess
from service.engine.types import EngineHandle
from service.servers.from_options import load_assets
from service.servers.server import Server


class SlowToStart(EngineHere):
    """Accepts requests only when the test allows it."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.asked, self.let = threading.Event(), threading.Event()

    def submit(self, request: Any) -> None:
        self.asked.set()
        threading.Thread(target=self._later, args=(request,)).start()

    def _later(self, request: Any) -> None:
        self.let.wait(60)
        super().submit(request)


class KilledWhenAsked(EngineProcess):
    """An engine that is killed before its first request."""

    def submit(self, request: Any) -> None:
        self._process.kill()
        self._process.wait()
        super().submit(request)


class Running:
    """A server in a thread, observed from its start."""

    def __init__(self, options: ServerOptions, engine: EngineHandle) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server: Server = self.run(self._make(options, engine)).result(60)
        self.started = self.run(self.server.start())

    @staticmethod
    async def _make(options: ServerOptions, engine: EngineHandle) -> Server:
        assets = load_assets(options)
        return Server(options, engine, assets, image_pool=images_here(options, engine, assets))

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        self.run(self.server.stop()).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.mark.parametrize("vision", [True, False], ids=["images", "text"])
def test_health_follows_the_warm_up(model: Path, tmp_path: Path, vision: bool) -> None:
    path = model if vision else make_served(tmp_path / "text", vision=False).path
    options = ServerOptions(model=str(path), dtype="float32", threads=1, max_len=600, port=0, grace=0)
    engine = SlowToStart(options)
    running = Running(options, engine)
    assert engine.asked.wait(60)
    address = f"127.0.0.1:{running.server.port}"
    with grpc.insecure_channel(address) as channel, saccade.Client(address, max_retries=0) as client:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "saccade.v1.InferenceService", "inference.GRPCInferenceService"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert client.get_model().vocab_size > 0
        for call in (client.generate, client.embed):
            with pytest.raises(saccade.errors.Overloaded) as refused:
                call("x")
            assert refused.value.reason == "WARMING" and refused.value.retry_after
        ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        assert ready(b"") == b""
        engine.let.set()
        running.started.result(60)
        for response in health.Watch(health_pb2.HealthCheckRequest()):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        assert client.generate("x", max_tokens=2).usage.completion_tokens == 2
        assert ready(b"") != b""
        assert engine.query("stats").result(60)["decoder"]["output_tokens"] == 2 + 2
    running.stop()


def test_a_model_that_cannot_answer_is_not_served(model: Path) -> None:
    options = ServerOptions(model=str(model), dtype="float32", threads=1, max_len=600, port=0, grace=0)
    running = Running(options, KilledWhenAsked(options))
    with pytest.raises(ConfigError, match="the warm-up request failed"):
        running.started.result(60)
    running.stop()
