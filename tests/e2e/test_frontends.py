"""Several frontend processes on one port with one engine: they answer as one, and calls survive the death of one of
them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from faults import check_same, long_requests, open_stream
from images import png
from log_levels import LogLevels
from resident import file_bytes, file_bytes_after_import
from rpc import ask, connect
from running import RunningServer, children
from served import IMAGE_TOKEN
from waiting import until

import saccade
import service.servers.frontends
from saccade import errors
from saccade.v1 import admin_pb2, inference_pb2, types_pb2
from service.commands.server_process import ServerProcess
from service.common.config import ConfigError, ServerOptions
from service.servers.frontends import Hub, reserved_port, share
from service.servers.preflight import check_options

FRONTENDS = 2
ARGUMENTS = [
    "--dtype", "float32", "--threads", "1", "--log-level", "error", "--max-len", "100000", "--no-warmup",
    "--image-workers", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def arguments(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = str(tmp_path_factory.mktemp("media"))
    media = ["--media-dir", folder]
    return [str(model), *ARGUMENTS, "--frontends", str(FRONTENDS), "--admin", "--http-port", "0", *media]


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogLevels]:
    """The log levels of processes of this module's servers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield LogLevels(tmp_path_factory.mktemp("levels"), monkeypatch)


@pytest.fixture(scope="module")
def frontends(arguments: list[str], levels: LogLevels) -> Iterator[ServerProcess]:
    with socket.socket() as free:  # a given port: only these are locked
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ServerProcess(arguments, port=port) as server:
        yield server


def clients(address: str, count: int, **options: Any) -> list[saccade.Client]:
    """Clients with separate connections, so that the kernel distributes them."""
    return [saccade.Client(address, **options) for _ in range(count)]


def owners(pids: list[int], port: int) -> dict[int, int]:
    """Process id -> number of its connections on the port."""
    held = {}
    for pid in pids:
        tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table]
        inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"}
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
        held[pid] = sum(f"socket:[{inode}]" in links for inode in inodes)
    return held


def test_all_frontends_answer_as_one(frontends: ServerProcess, model: Path) -> None:
    port = int(frontends.address.rpartition(":")[2])
    many = clients(frontends.address, 24)
    requests = [request | {"max_tokens": 40} for request in long_requests(24, IMAGE_TOKEN)]
    with ThreadPoolExecutor(24) as pool:
        with RunningServer(str(model), max_seqs=4, max_len=600) as one, saccade.Client(one.address) as single:
            wanted = [open_stream(single, request).final() for request in requests]
        pairs = list(zip(many, requests, strict=True))
        check_same(list(pool.map(lambda pair: open_stream(*pair).final(), pairs)), wanted)
    held = owners(children(frontends.pid, "service.servers.frontend_process"), port)
    assert len(held) == FRONTENDS and all(held.values()), held
    # an image uploaded to one frontend can be used through, and deleted from, all of them
    media = many[0].media.upload(png(3))
    answers = {tuple(c.generate("x", images=[media], max_tokens=5, temperature=0).token_ids) for c in many}
    assert len(answers) == 1
    many[-1].media.delete(hashlib.sha256(png(3)).hexdigest())
    for client in many:
        with pytest.raises(errors.NotFound):
            client.media.get(media.media_id)
    # a request of any frontend can be cancelled through any other
    for client in many[:8]:
        stream = client.stream("x", max_tokens=99_000, ignore_eos=True)
        next(stream)
        with connect(frontends.address) as stubs:
            stubs.inference.CancelGeneration(inference_pb2.CancelGenerationRequest(request_id=stream.request_id))
        assert stream.final().finish_reason == "aborted"
    with connect(frontends.address) as stubs, pytest.raises(Exception, match="NOT_FOUND|no request"):
        stubs.inference.CancelGeneration(inference_pb2.CancelGenerationRequest(request_id="nobody"))
    with pytest.raises(errors.Unimplemented):
        many[0].batches.list()
    for client in many:
        client.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_request_whose_image_is_being_decoded_can_be_cancelled_from_any_connection(frontends: ServerProcess) -> None:
    members = children(frontends.pid, "service.servers.frontend_process")
    servers = [pid for member in members for pid in children(member, "service.media.image_worker")]
    workers = servers + [pid for server in servers for pid in children(server, "service.media.image_worker")]
    cancel = inference_pb2.CancelGenerationRequest(request_id="decoding")
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        with connect(frontends.address) as stubs:
            for number in range(8):  # some of the other connections reach the other frontend
                request = ask(max_tokens=5, images=[{"data": png(90 + number)}], request_id="decoding")
                call = stubs.inference.Generate.future(request)
                while not stubs.admin.GetLoads(admin_pb2.GetLoadsRequest()).live_requests:
                    assert not call.done()
                with connect(frontends.address) as other:
                    other.inference.CancelGeneration(cancel)
                assert call.result(timeout=60).samples[0].finish_reason == types_pb2.FINISH_REASON_ABORTED
                with pytest.raises(grpc.RpcError, match="no request 'decoding' is running"):
                    stubs.inference.CancelGeneration(cancel)
            for worker in workers:
                os.kill(worker, signal.SIGCONT)
            assert stubs.inference.Generate(request).samples[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_engine_does_not_keep_what_only_its_imports_read(frontends: ServerProcess) -> None:
    """Pages of libraries, such as torch's."""
    (engine,) = children(frontends.pid, "service.servers.engine_process")
    assert file_bytes(engine) < 0.6 * file_bytes_after_import("service.engine.build")


def test_a_killed_frontend_is_replaced_and_an_engine_too(frontends: ServerProcess) -> None:
    """Streams of both kinds of clients go on."""
    requests = long_requests(8, IMAGE_TOKEN)
    many = clients(frontends.address, 8, max_retries=60)
    wanted = [open_stream(many[0], request).final() for request in requests]
    for victim in ("service.servers.frontend_process", "service.servers.engine_process"):
        before = children(frontends.pid, victim)
        begun = threading.Barrier(9)

        def read(pair: Any, begun: threading.Barrier = begun) -> saccade.Generation:
            stream = open_stream(*pair)
            next(stream)
            begun.wait(120)
            answer: saccade.Generation = stream.final()
            return answer

        def read_from_asyncio(pair: Any, begun: threading.Barrier = begun) -> saccade.Generation:
            async def main() -> saccade.Generation:
                async with saccade.AsyncClient(frontends.address, max_retries=60) as client:
                    stream = open_stream(client, pair[1])
                    await anext(stream)
                    begun.wait(120)
                    answer: saccade.Generation = await stream.final()
                    return answer

            return asyncio.run(main())

        with ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(read_from_asyncio if number % 2 else read, pair)
                for number, pair in enumerate(zip(many, requests, strict=True))
            ]
            begun.wait(120)
            os.kill(before[0], signal.SIGKILL)
            check_same([future.result(120) for future in futures], wanted)
        while len(after := children(frontends.pid, victim)) < len(before) or after == before:
            assert many[0].generate("x", max_tokens=1).token_ids
        assert set(before[1:]) <= set(after), "the others live on"
    with connect(frontends.address) as stubs:

        def is_idle() -> bool:
            loads = stubs.admin.GetLoads(admin_pb2.GetLoadsRequest())
            return not loads.running and not loads.waiting

        until(is_idle)
    for client in many:
        client.close()


STOPS_ITSELF = """
import os, signal, sys

if "service.servers.frontend_process" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""A module that Python imports when it starts: a frontend stops before it can be ready."""


def test_a_frontend_that_does_not_get_ready_is_killed(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS_ITSELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(service.servers.frontends, "BEAT_SECONDS", 0.1)
    options = ServerOptions(model=str(text_model), port=0, max_seqs=2, max_len=600, frontends=1)
    with reserved_port(options) as port:
        hub = Hub(options, port)
        hub._options = replace(options, load_timeout=0.2)  # the engine has had the default
        try:
            with pytest.raises(ConfigError, match="frontend 0 ended with code -9 while starting"):
                hub.start()
        finally:
            asyncio.run(hub.stop())


def test_frontends_that_hang_are_replaced_also_during_a_drain_and_killed_at_the_end(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end also by the second of two calls, while the thread of the first one, which was cancelled, still waits
    for them. One that cannot be started is tried again."""
    monkeypatch.setattr(service.servers.frontends, "END_SECONDS", 0.5)
    monkeypatch.setattr(service.servers.frontends, "BEAT_SECONDS", 0.1)
    options = ServerOptions(
        model=str(text_model), port=0, max_seqs=2, max_len=600, frontends=2, admin=True, warmup=False,
        image_workers=1, log_level="error",
    )  # fmt: skip

    async def stop_twice(hub: Hub) -> None:
        first = asyncio.create_task(hub.stop(grace=600.0))
        while not hub._stopping.is_set():
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        async with asyncio.timeout(60):
            await hub.stop(grace=0.0)

    def others_of(gone: list[Any]) -> list[Any]:
        """The frontends, which serve, once none of `gone` is among them."""
        until(lambda: not set(hub._frontends.values()) & set(gone))
        for frontend in (now := list(hub._frontends.values())):
            frontend.serving.result(60)
        return now

    with reserved_port(options) as port:
        hub = Hub(options, port)
        try:
            hub.start()
            first, second = hub._frontends.values()
            hub._options = replace(options, hang_timeout=4.0)  # the engine has had the default
            os.kill(first.process.pid, signal.SIGSTOP)
            before = others_of([first])
            assert first.process.returncode == -signal.SIGKILL
            assert second in before and second.process.poll() is None, "it had always answered"
            hub._options = options
            with monkeypatch.context() as broken:
                broken.setattr(sys, "executable", "/none")
                second.process.kill()
                until(lambda: "No such file" in caplog.text)
            before = others_of([first, second])
            with connect(f"127.0.0.1:{port}") as stubs:
                stubs.admin.Drain(admin_pb2.DrainRequest())
            for frontend in before:
                frontend.process.kill()
            others_of(before)
            for client in clients(f"127.0.0.1:{port}", 8, max_retries=0):
                with client, pytest.raises(errors.Overloaded) as refused:
                    client.generate("x", max_tokens=1)
                assert refused.value.reason == "DRAINING"
            for frontend in hub._frontends.values():
                os.kill(frontend.process.pid, signal.SIGSTOP)
            asyncio.run(stop_twice(hub))
            assert [frontend.process.returncode for frontend in hub._frontends.values()] == [-signal.SIGKILL] * 2
        finally:
            for frontend in hub._frontends.values():
                frontend.process.kill()
            asyncio.run(hub.stop())


def check_log_levels(server: ServerProcess, levels: LogLevels, count: int, replaced: str) -> None:
    """A log level reaches all `count` processes of a server, also those that are replaced later. An encoder process
    gets that of its engine: test_encoder_process.py."""
    names = ("service.servers.engine_process", "service.servers.frontend_process", "service.http.process")

    def processes() -> list[int]:
        return [server.pid, *(pid for name in names for pid in children(server.pid, name))]

    def wait_for(level: int) -> None:
        until(lambda: len(pids := processes()) == count and {levels.of(pid) for pid in pids} == {level})

    wait_for(logging.ERROR)
    with connect(server.address) as stubs:
        answer = stubs.admin.UpdateLogLevel(admin_pb2.UpdateLogLevelRequest(level="info"))
    assert answer.previous_level == "error"
    wait_for(logging.INFO)
    killed = children(server.pid, replaced)[0]
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in processes())
    wait_for(logging.INFO)


def test_a_log_level_reaches_all_processes(text_model: Path, levels: LogLevels) -> None:
    with ServerProcess([str(text_model), *ARGUMENTS, "--admin", "--http-port", "0"]) as server:
        check_log_levels(server, levels, 3, "service.http.process")


def test_a_log_level_reaches_all_frontends(frontends: ServerProcess, levels: LogLevels) -> None:
    check_log_levels(frontends, levels, 5, "service.servers.frontend_process")
    with connect(frontends.address) as stubs:
        stubs.admin.UpdateLogLevel(admin_pb2.UpdateLogLevelRequest(level="error"))


def test_a_second_instance_is_told(frontends: ServerProcess, arguments: list[str]) -> None:
    port, folder = int(frontends.address.rpartition(":")[2]), arguments[-1]
    options = ServerOptions(model=arguments[0], frontends=FRONTENDS, port=port)
    check_options(options)
    with pytest.raises(ConfigError, match="port: another server's frontends listen on"), reserved_port(options):
        pass
    with pytest.raises(ConfigError, match=f"media_dir: another process uses {folder}"):
        check_options(replace(options, port=0, media_dir=folder))


def test_a_lock_file_that_is_a_symbolic_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / f"saccade-{os.getuid()}-127.0.0.1-50077.lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match="lock file .* cannot be opened"), reserved_port(ServerOptions(port=50077)):
        pass
    assert (tmp_path / "theirs").read_text() == "precious"


def test_options_that_several_frontends_cannot_implement(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\nrequests_per_minute = 5\n')
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batch_dir": str(tmp_path)}, "batch_dir"),
        ({"max_queue": 1}, "max_queue: 1 cannot be divided among 2 frontends; use at least 2, or at most 1"),
        (
            {"frontends": 4, "max_queue": 3, "max_tenant_calls": 2},
            "max_queue, max_tenant_calls: 3, 2 cannot be divided among 4 frontends; use at least 4, or at most 2 front",
        ),
        ({"max_tenant_requests": 1}, "max_tenant_requests: 1 cannot be"),
        ({"api_keys": str(keys)}, "'a' has a rate"),
        ({"tls_cert": str(tmp_path / "no.pem"), "tls_key": str(tmp_path / "no.key")}, "cannot read"),
    ]
    for values, words in cases:
        with pytest.raises(ConfigError, match=words):
            check_options(ServerOptions(model=str(model), **{"frontends": 2, **values}))
    parts = [share(ServerOptions(model=str(model), frontends=3, metrics_port=9100), member, 1) for member in range(3)]
    assert [part.metrics_port for part in parts] == [9100, 9101, 9102]
    assert 3 * parts[0].max_queue <= ServerOptions().max_queue


def test_the_end_is_that_of_all(frontends: ServerProcess) -> None:
    """If one frontend drains, all reject calls; SIGTERM leaves no process."""
    engines, workers = (children(frontends.pid, f"service.servers.{name}_process") for name in ("engine", "frontend"))
    with connect(frontends.address) as stubs:
        stubs.admin.Drain(admin_pb2.DrainRequest())
    for client in clients(frontends.address, 8, max_retries=0):
        with pytest.raises(errors.Overloaded) as refused:
            while True:  # until all frontends have been told
                client.generate("x", max_tokens=1)
        assert refused.value.reason == "DRAINING"
        client.close()
    assert frontends.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in (*engines, *workers))
