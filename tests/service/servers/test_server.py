"""A server's health while its engine starts and dies, with a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import types
from collections.abc import Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import RawClient
from rpc import ask, connect
from running import RunningServer
from served import VOCAB, make_served
from waiting import until

from saccade.v1 import inference_pb2
from service.common.config import ConfigError, ServerOptions
from service.engine.types import EngineRequest
from service.servers.exposure import channel_options
from service.servers.from_options import byte_budget, door_limits
from service.servers.frontends import share
from service.servers.health import LIVENESS

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "saccade.v1.InferenceService", "saccade.v1.BatchService", "inference.GRPCInferenceService")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningServer]:
    model = str(make_served(tmp_path / "model", vision=False).path)
    running = RunningServer(model, engine=FakeEngine(vocabulary=VOCAB))
    yield running
    running.close()


def states(running: RunningServer) -> dict[str, int]:
    async def settled() -> None:  # what was set before has arrived by now
        for _ in range(10):
            await asyncio.sleep(0)

    running.run(settled())
    with grpc.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {n: stub.Check(health_pb2.HealthCheckRequest(service=n)).status for n in (*NAMES, LIVENESS)}


def of(ready: int, live: int) -> dict[str, int]:
    return {**dict.fromkeys(NAMES, ready), LIVENESS: live}


def test_health_follows_the_engine_and_liveness_its_end(running: RunningServer) -> None:
    assert states(running) == of(SERVING, SERVING)
    running.server.engine_changed(False)
    assert states(running) == of(NOT_SERVING, SERVING)
    running.server.engine_changed(True)
    assert states(running) == of(SERVING, SERVING)
    running.server.engine_given_up()
    assert states(running) == of(NOT_SERVING, NOT_SERVING)


def test_an_engine_that_comes_back_does_not_end_a_drain(running: RunningServer) -> None:
    running.loop.call_soon_threadsafe(running.server.drain)
    assert states(running) == of(NOT_SERVING, SERVING)
    running.server.engine_changed(True)
    assert states(running) == of(NOT_SERVING, SERVING)


def test_a_server_whose_engine_has_ended_is_not_serving_when_it_has_started(tmp_path: Path) -> None:
    """As a frontend that replaces another one while the engine loads its model again."""

    class Ended(FakeEngine):
        alive = False

    running = RunningServer(
        str(make_served(tmp_path / "model", vision=False).path), engine=Ended(vocabulary=VOCAB)
    )  # fmt: skip
    assert states(running) == of(NOT_SERVING, SERVING)
    running.server.engine_changed(True)
    assert states(running) == of(SERVING, SERVING)
    running.close()


def test_a_watch_is_told_of_changes_after_another_has_ended(running: RunningServer) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first, second = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(2))
        assert next(first).status == next(second).status == SERVING
        first.cancel()
        for _ in range(10):  # calls after the cancellation on the same connection
            stub.Check(health_pb2.HealthCheckRequest())
        running.server.engine_changed(False)
        assert next(second).status == NOT_SERVING


def test_a_watch_that_is_not_read_delays_no_change(running: RunningServer) -> None:
    with RawClient(running.address, window=0) as raw:
        raw.begin("/grpc.health.v1.Health/Watch", 0)
        raw.until_begun()
        running.server.engine_changed(False)
        assert states(running) == of(NOT_SERVING, SERVING)


class Silent(FakeEngine):
    """An engine that takes requests and never answers them."""

    def submit(self, request: EngineRequest) -> None:
        pass

    def abort(self, request_id: str) -> None:
        pass


@types.coroutine
def cancelled_at(suspension: int, steps: Coroutine[Any, Any, None]) -> Generator[Any, None, None]:
    """Awaits a coroutine and cancels the task where the coroutine waits for this time, counted from 0."""
    with contextlib.suppress(StopIteration):
        waits_for = steps.send(None)
        for number in itertools.count():
            if number == suspension:
                task = asyncio.current_task()
                assert task is not None and task.cancel()
            try:
                yield waits_for
            except asyncio.CancelledError as error:
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(None)


def test_a_stop_can_be_cancelled_at_any_point_and_called_again(tmp_path: Path) -> None:
    """As by a second signal, here while a call runs."""
    model = str(make_served(tmp_path / "model", vision=False).path)

    async def twice(running: RunningServer, suspension: int) -> bool:
        async def first() -> None:
            await cancelled_at(suspension, running.server.stop(grace=0))

        ended = asyncio.ensure_future(first())
        await asyncio.wait({ended})
        await running.server.stop(grace=0)
        return ended.cancelled()

    for suspension in itertools.count():
        running = RunningServer(model, engine=Silent(vocabulary=VOCAB))
        with connect(running.address) as stubs:
            call = stubs.inference.StreamGenerate(inference_pb2.StreamGenerateRequest(request=ask()))
            assert next(call).HasField("started")
            cancelled = running.run(twice(running, suspension))
        running.close()
        if not cancelled:
            break
    assert suspension > 3


def test_a_file_that_cannot_be_deleted_does_not_keep_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder in the place of an upload cannot be unlinked. Afterwards expired uploads are still deleted."""
    model, folder, later = str(make_served(tmp_path / "model", vision=False).path), tmp_path / "media" / "tenant", 2**32
    folder.mkdir(parents=True)
    bad, good = (folder / hashlib.sha256(content).hexdigest() for content in (b"bad", b"good"))
    for path, content in ((bad, b"bad"), (good, b"good")):
        path.write_bytes(content)
        os.utime(path, (later, later))  # both are kept until `renew`
    running = RunningServer(
        model, engine=FakeEngine(vocabulary=VOCAB), media_dir=str(folder.parent), media_ttl=0.2, image_workers=1
    )
    try:
        bad.unlink()
        bad.mkdir()
        running.server.spool.renew("tenant", bad.name)
        until(lambda: "expired uploads cannot be deleted" in caplog.text)
        running.server.spool.renew("tenant", good.name)
        until(lambda: not good.exists())
    finally:
        running.close()


def test_batches_leave_live_calls_a_place(tmp_path: Path) -> None:
    model = str(make_served(tmp_path / "model", vision=False).path)
    with pytest.raises(ConfigError, match="at most 1 would work"):
        RunningServer(model, engine=FakeEngine(vocabulary=VOCAB), max_queue=2, batch_concurrency=2)
    running = RunningServer(model, engine=FakeEngine(vocabulary=VOCAB), max_queue=2, batch_concurrency=1)
    running.close()


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({}, 2**28),
        ({"max_inflight_bytes": 100_000, "max_message_bytes": 10_000}, 50_000),
        ({"max_inflight_bytes": 100_000, "max_message_bytes": 80_000}, 80_000),
    ],
)
def test_a_share_is_half_or_a_message(values: dict[str, Any], share: int) -> None:
    options = ServerOptions(**values)
    assert byte_budget(options).limit == options.max_inflight_bytes and byte_budget(options).share == share
    limits = door_limits(options)
    assert (limits.stall_timeout, limits.receive_timeout) == (60.0, 120.0)
    assert (limits.max_message_bytes, limits.max_tenant_calls) == (options.max_message_bytes, 1024)


def test_what_grpc_is_told() -> None:
    told = dict(channel_options(ServerOptions(max_message_bytes=5000, max_connection_streams=7)))
    assert told["grpc.max_receive_message_length"] == told["grpc.max_send_message_length"] == 5000
    assert told["grpc.max_concurrent_streams"] == 7 and told["grpc.so_reuseport"] == 0
    assert told["grpc.http2.max_ping_strikes"] == 0 and told["grpc.keepalive_permit_without_calls"] == 1
    assert dict(channel_options(ServerOptions(frontends=2)))["grpc.so_reuseport"] == 1


def test_limits_are_divided_among_frontends_and_each_gets_at_least_one() -> None:
    bounds = {
        "max_queue": 2, "max_tenant_calls": 9, "max_tenant_requests": 7, "max_inflight_bytes": 6000, "media_bytes": 30,
        "media_tenant_bytes": 8, "image_workers": 4, "preprocess_bytes": 10, "metrics_port": 9100,
    }  # fmt: skip
    part = share(ServerOptions(frontends=3, **bounds), 1, 77)
    assert {name: getattr(part, name) for name in bounds} == {
        "max_queue": 1, "max_tenant_calls": 3, "max_tenant_requests": 2, "max_inflight_bytes": 2000, "media_bytes": 30,
        "media_tenant_bytes": 8, "image_workers": 1, "preprocess_bytes": 3, "metrics_port": 9101,
    }  # fmt: skip
    assert part.port == 77
    unset = share(ServerOptions(frontends=3), 2, 77)
    assert unset.max_tenant_requests is unset.media_tenant_bytes is unset.metrics_port is None
    assert share(ServerOptions(frontends=3, metrics_port=0), 2, 77).metrics_port == 0
