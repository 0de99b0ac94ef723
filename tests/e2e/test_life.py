"""Real processes: clients that disappear, engines that are killed, signals, ports, standard input."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from descriptors import limited_descriptors
from grpc_health.v1 import health_pb2, health_pb2_grpc
from images import png
from raw_http2 import RawClient
from rpc import ask, connect
from running import EngineHere, RunningServer, children
from waiting import until

import saccade
import saccade.errors
from decoder.runner import DecoderRunner
from encoder.runner import EncoderRunner
from service.commands.server_process import ServerProcess
from service.common.config import ServerOptions
from service.encoding.handoff import Handoff
from service.engine import engine_client
from service.engine.engine_client import EngineProcess, SupervisedEngine
from service.servers.exposure import channel_options
from service.servers.health import LIVENESS

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("--dtype", "float32", "--threads", "1", "--log-level", "error", "--image-workers", "1")


@contextlib.contextmanager
def supervised(model: Path, **options: Any) -> Iterator[RunningServer]:
    """A server whose engine is restarted when it dies, as with `saccade serve`."""
    values = {"dtype": "float32", "threads": 1, "max_seqs": 4, "max_len": 600, **options}
    engine = SupervisedEngine(ServerOptions(model=str(model), **values))
    with RunningServer(str(model), engine=engine, **values) as running:
        engine.on_change, engine.on_give_up = running.server.engine_changed, running.server.engine_given_up
        yield running


def test_streams_that_are_closed_at_any_point_free_everything(server: RunningServer, client: saccade.Client) -> None:
    for count in range(12):
        with client.stream("x", max_tokens=550, ignore_eos=True, seed=1) as stream:
            for _ in range(count):
                next(stream, None)
    assert server.drained()["decoder"]["used_slots"] == 0


def test_a_killed_engine_ends_streams_with_what_they_had_and_new_calls_at_once(text_model: Path) -> None:
    running = RunningServer(str(text_model), engine_process=True, max_seqs=4, max_len=100_000)
    try:
        with saccade.Client(running.address, max_retries=0) as client:
            with client.stream("x", max_tokens=99_000, ignore_eos=True) as stream:
                first = next(stream)
                os.kill(running.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                with pytest.raises(saccade.errors.Unavailable) as error:
                    stream.final()
                assert error.value.reason == "ENGINE_DIED"
                assert stream.token_ids[: len(first.token_ids)] == first.token_ids
            with pytest.raises(saccade.errors.Unavailable) as error:
                client.generate("y", max_tokens=1)
            assert error.value.reason == "ENGINE_DIED"
    finally:
        running.close()


def test_a_killed_engine_comes_back_and_health_follows(model: Path) -> None:
    """Streams and calls of a client with default settings continue without intervention. SIGTERM does not wait until a
    new engine has loaded its model."""
    with ServerProcess([str(model), *PLAIN, "--no-warmup"]) as server:
        with saccade.Client(server.address) as client, grpc.insecure_channel(server.address) as channel:
            before = client.generate("x", max_tokens=5, temperature=0)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            states = (response.status for response in watch)
            assert next(states) == health_pb2.HealthCheckResponse.SERVING
            (engine,) = children(server.pid, "service.servers.engine_process")
            assert client.generate("x", images=[png(1)], max_tokens=1).usage.image_tokens
            mapped = Path(f"/proc/{server.pid}/maps").read_text()
            assert "libtorch" not in mapped and "memfd:saccade" not in mapped, "no torch and no pixels are there"
            long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "seed": 1}
            whole = client.generate("y", **long)
            stream = client.stream("y", **long)
            next(stream)
            os.kill(engine, signal.SIGKILL)
            assert client.generate("x", max_tokens=5, temperature=0) == before, "asked while the engine is away"
            resumed = stream.final()
            assert (resumed.text, resumed.token_ids) == (whole.text, whole.token_ids)
            assert next(states) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert next(states) == health_pb2.HealthCheckResponse.SERVING
            assert client.generate("x", max_tokens=5, temperature=0) == before
        (engine,) = children(server.pid, "service.servers.engine_process")
        os.kill(engine, signal.SIGKILL)

        def started() -> set[int]:
            return set(children(server.pid, "service.servers.engine_process")) - {engine}

        until(lambda: bool(started()))
        (loading,) = started()
        os.kill(loading, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGTERM)
        try:
            assert server._process.wait(60) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(loading, signal.SIGKILL)


@pytest.fixture(scope="module")
def restarting(text_model: Path) -> Iterator[RunningServer]:
    with supervised(text_model, max_len=100_000, hang_timeout=300.0) as running:
        yield running


def test_an_engine_that_stands_still_for_a_moment_is_left_alone_and_holds_nobody_up(restarting: RunningServer) -> None:
    """Meanwhile, more bytes are sent to it than the socket's buffer holds."""
    running, count = restarting, 200
    request = ask(max_tokens=1)
    request.sampling.logit_bias.update({token: 1.0 + token for token in range(280)})
    with socket.socket(socket.AF_UNIX) as one:
        assert count * request.ByteSize() > 1.5 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    with connect(running.address) as stubs:
        health, pid = health_pb2_grpc.HealthStub(stubs.channel), running.engine.pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        try:
            calls = [stubs.inference.Generate.future(request) for _ in range(count)]
            while running.server.frontend.live < count:
                assert not any(call.done() for call in calls)
                assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status
        finally:
            os.kill(pid, signal.SIGCONT)
        assert all(call.result(timeout=120).samples for call in calls)
        assert running.engine.pid == pid  # type: ignore[attr-defined]


def test_a_hung_engine_is_killed_and_started_again_and_health_follows(
    restarting: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = restarting
    with grpc.insecure_channel(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=120)
        states = (response.status for response in watch)
        assert next(states) == health_pb2.HealthCheckResponse.SERVING
        with saccade.Client(running.address, max_retries=0) as client:
            before = client.generate("x", max_tokens=5, temperature=0)
            stopped = running.engine.pid  # type: ignore[attr-defined]
            with client.stream("x", max_tokens=99_000, ignore_eos=True) as stream:
                next(stream)
                os.kill(stopped, signal.SIGSTOP)
                # Only now, so that a busy machine does not reach it before, nor with the next engine.
                monkeypatch.setattr(running.engine._engine, "_hang_timeout", 0.1)  # type: ignore[attr-defined]
                with pytest.raises(saccade.errors.Unavailable) as error:
                    stream.final()
                assert error.value.reason == "ENGINE_DIED"
            assert next(states) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert next(states) == health_pb2.HealthCheckResponse.SERVING
            assert client.generate("x", max_tokens=5, temperature=0) == before
            assert running.engine.pid != stopped  # type: ignore[attr-defined]


STOPS_ITSELF = """
import os, signal, sys

if "service.servers.engine_process" in sys.orig_argv:
    with open(f"{os.path.dirname(__file__)}/pid", "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""A module that Python imports when it starts: an engine stops before it can be ready."""


def test_an_engine_that_hangs_while_it_loads_is_killed_with_a_clear_error(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS_ITSELF)
    command = [sys.executable, "-m", "saccade", "serve", str(text_model), "--port", "0", "--load-timeout", "1.5"]
    server = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert server.returncode == 1 and "Traceback" not in server.stderr
    assert "the engine process was not ready after 1.5 seconds (load_timeout) and was killed" in server.stderr
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.parametrize("options", [(), ("--frontends", "2"), ("--http-port", "0")], ids=["one", "frontends", "http"])
def test_a_signal_ends_a_server_that_loads_its_model(model: Path, options: tuple[str, ...]) -> None:
    """And the image workers, which start at the same time if the server has one frontend."""
    command = [sys.executable, "-m", "saccade", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        while not (engines := children(server.pid, "service.servers.engine_process")):
            assert server.poll() is None
        os.kill(engines[0], signal.SIGSTOP)  # it would never become ready
        workers = children(server.pid, "service.media.image_worker")
        assert len(workers) == ("--frontends" not in options)
        server.terminate()
        try:
            said, words = server.communicate(timeout=60)
        finally:
            server.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(engines[0], signal.SIGKILL)
    assert (server.returncode, said) == (0, ""), words
    assert "Traceback" not in words
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*engines, *workers])


WAITS = """
import os, sys

if "service.servers.engine_process" in sys.orig_argv:
    for name in ("first", "second"):
        if os.path.exists(pipe := f"{os.path.dirname(__file__)}/{name}"):
            open(pipe).read()  # until the other side closes it
            os.unlink(pipe)
            if name == "first":
                os._exit(3)
            break
"""
"""A module that Python imports when it starts: if there are named pipes, an engine waits for the end of one, and the
first one ends then, before it is ready."""


def test_liveness_ends_with_the_last_attempt_to_start_an_engine(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not before: the server must not be killed while it is restarting its engine. Of two attempts, the first one
    ends, and the second one finds no model."""
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(engine_client, "MAX_RESTARTS", 2)
    (tmp_path / "sitecustomize.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    copy, pipes = tmp_path / "model", [tmp_path / "first", tmp_path / "second"]
    shutil.copytree(text_model, copy)
    with supervised(copy) as running, grpc.insecure_channel(running.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def states(service: str) -> Iterator[int]:
            watch = health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=120)
            return (response.status for response in watch)

        live, ready = states(LIVENESS), states("")
        assert next(live) == next(ready) == health_pb2.HealthCheckResponse.SERVING
        shutil.rmtree(copy)
        for pipe in pipes:
            os.mkfifo(pipe)
        os.kill(running.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert next(ready) == health_pb2.HealthCheckResponse.NOT_SERVING
        for pipe in pipes:
            end = opened(pipe)
            status = health.Check(health_pb2.HealthCheckRequest(service=LIVENESS)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            os.close(end)
        assert next(live) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert running.engine.given_up  # type: ignore[attr-defined]


def opened(pipe: Path) -> int:
    """The descriptor of a named pipe's end for writing, as soon as another process has opened the other one."""
    found: list[int] = []

    def is_open() -> bool:
        with contextlib.suppress(OSError):
            found.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(found)

    until(is_open)
    return found[0]


def test_connections_have_an_age_and_running_calls_outlive_it(text_model: Path) -> None:
    """Otherwise clients of a headless service would never use servers that are added later."""
    with RunningServer(str(text_model), max_seqs=4, max_len=100_000, max_connection_age=0.4) as running:
        with RawClient(running.address) as idle, saccade.Client(running.address) as client:
            with client.stream("x", max_tokens=99_000, ignore_eos=True) as stream:
                idle.until_closed()
                seen = len(stream.token_ids)
                for _ in range(20):
                    next(stream)
                assert len(stream.token_ids) > seen
            assert client.generate("x", max_tokens=1).token_ids
    assert ("grpc.max_connection_age_ms", 1500) in channel_options(ServerOptions(max_connection_age=1.5))
    assert not any("max_connection_age" in name for name, _ in channel_options(ServerOptions()))


def test_a_second_sigterm_stops_now_and_further_signals_do_not_change_the_exit_code(text_model: Path) -> None:
    with limited_descriptors(400):
        server = ServerProcess([str(text_model), *PLAIN, "--no-warmup", "--max-len", "100000", "--grace", "300"])
    with server:
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert soft > 400 or hard == 400, "a server allows itself more descriptors"

        def send_signals() -> None:
            while server._process.poll() is None:
                os.kill(server.pid, signal.SIGTERM)
                os.kill(server.pid, signal.SIGINT)
                time.sleep(0.001)

        with saccade.Client(server.address, max_retries=0) as client:
            with client.stream("x", max_tokens=99_000, ignore_eos=True) as stream:
                next(stream)
                os.kill(server.pid, signal.SIGTERM)
                with pytest.raises(saccade.errors.Overloaded) as error:
                    while True:  # until the signal has arrived
                        client.generate("y", max_tokens=1)
                assert error.value.reason == "DRAINING" and error.value.retryable
                with ThreadPoolExecutor(1) as pool:
                    sent = pool.submit(send_signals)
                    with pytest.raises(saccade.errors.SaccadeError):
                        stream.final()
                    sent.result()
        assert server.stop() == 0


def test_a_stop_does_not_wait_for_the_sizes_of_an_engine_that_hangs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.servers.server.SIZES_SECONDS", 0.2)
    running = RunningServer(str(model), max_seqs=2, max_len=300, sizes_file=str(tmp_path / "sizes.json"))
    hangs, goes_on, here = threading.Event(), threading.Event(), threading.current_thread()

    def hang(answered: Future[dict[str, Any]]) -> None:
        if threading.current_thread() is not here:  # but the engine's, unless it was faster than this one
            hangs.set()
            goes_on.wait(60)

    while not hangs.is_set():
        running.engine.query("stats").add_done_callback(hang)
    try:
        stopping = asyncio.run_coroutine_threadsafe(running.server.stop(grace=0), running.loop)
        until(lambda: "is not written: the engine has not answered within 0.2 s" in caplog.text)
        assert not stopping.done()
    finally:
        goes_on.set()
        stopping.result(60)
        running.close()


def test_an_engine_that_two_threads_close_is_closed_once(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second one would close whatever has the descriptor's number by then."""
    engine = EngineProcess(ServerOptions(model=str(text_model), max_seqs=2, max_len=600))
    engine.start(lambda events: None)
    connection, both, closes = engine._connection, threading.Barrier(2), []

    def close() -> None:
        closes.append(connection.fileno())
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # time for the other thread to reach the same point

    monkeypatch.setattr(connection, "_close", close)
    descriptor = connection.fileno()
    with ThreadPoolExecutor(2) as pool:
        for closed in [pool.submit(engine.close) for _ in range(2)]:
            closed.result(60)
    os.close(descriptor)
    assert closes == [descriptor]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--max-seqs", "0"], "minimum of 1"),
        (["--memory-bytes", "1000"], "memory"),  # which the engine reports
        (["/nonexistent"], "nor a folder, nor a hub id"),
    ],
)
def test_configurations_that_cannot_work_are_errors_with_a_way_out(
    text_model: Path, arguments: list[str], message: str
) -> None:
    where = [] if arguments[0].startswith("/") else [str(text_model)]
    command = [sys.executable, "-m", "service", "serve", *where, *arguments, "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [({"handoff_bytes": 16}, "at least"), ({"memory_bytes": 1000}, "memory"), ({"token_budgets": (4096,)}, "4096")],
    ids=str,
)
def test_what_no_engine_can_work_with_is_refused(model: Path, options: dict[str, Any], message: str) -> None:
    """By a ValueError, whose message an engine process passes on."""
    with pytest.raises(ValueError, match=message):
        EngineHere(ServerOptions(model=str(model), threads=1, **options))


def test_a_taken_port_is_an_error_and_not_shared(server: RunningServer, model: Path) -> None:
    port = server.address.rpartition(":")[2]
    command = [sys.executable, "-m", "service", "serve", str(model), "--threads", "1", "--port", port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "port" in done.stderr and "Traceback" not in done.stderr


LOCAL = (
    "import saccade; c = saccade.LocalClient({model!r}, threads=1); "
    "print(c.generate('a', max_tokens=3).usage); c.close()"
)


def test_local_client_needs_no_main_module(text_model: Path) -> None:
    """As in an interactive session, or a program that is read from standard input."""
    code = LOCAL.format(model=str(text_model)) + "\n"
    done = subprocess.run(
        [sys.executable, "-i"], input=code, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "completion_tokens=3" in done.stdout, done.stderr


def test_the_server_starts_from_another_folder_and_tells_an_address_for_clients(
    text_model: Path, tmp_path: Path
) -> None:
    """Helper processes find the checkout by themselves. An IPv6 address has colons of its own."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            host = "[::1]"
    except OSError:  # this machine has no IPv6
        host = "127.0.0.1"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport saccade\n"
    code += "from service.commands.server_process import ServerProcess\n"
    code += f"options = [{str(text_model)!r}, '--threads', '1', '--no-warmup', '--host', {host!r}]\n"
    code += "with ServerProcess(options) as s:\n"
    code += "    with saccade.Client(s.address) as c: print(s.address, c.generate('a', max_tokens=2).usage)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "completion_tokens=2" in done.stdout, done.stderr
    assert done.stdout.startswith(f"{host}:")


def test_a_client_that_is_dropped_without_being_closed_ends_its_engine(text_model: Path) -> None:
    """As in a notebook whose cell is run again. An object that still uses the engine keeps it alive."""
    client = saccade.LocalClient(text_model, dtype="float32", threads=1, max_len=100)
    service = client._service
    stream = client.with_options(timeout=60).stream("a", max_tokens=5, ignore_eos=True)
    next(stream)
    del client
    gc.collect()
    assert len(stream.final().token_ids) == 5 and service.alive
    del stream
    gc.collect()
    service._thread.join(60)
    assert not service._thread.is_alive() and not service.alive


def test_closing_a_client_ends_calls_between_two_attempts(text_model: Path) -> None:
    """At once and as Cancelled, as over gRPC (tests/saccade/test_client.py)."""
    client = saccade.LocalClient(text_model, dtype="float32", threads=1, max_len=100)
    exchange = client._exchange()
    closer = threading.Timer(0.01, client.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(saccade.errors.Cancelled):
        exchange.wait(30)
    closer.join()
    assert time.monotonic() - began < 20


def test_a_client_that_is_closed_while_a_call_begins(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = saccade.LocalClient(text_model, dtype="float32", threads=1, max_len=8192)
    closing, begin = threading.Thread(target=client.close), asyncio.run_coroutine_threadsafe

    def begin_late(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Any:
        monkeypatch.undo()
        closing.start()
        closing.join(0.2)  # ends before, unless it waits for the call's begin
        return begin(coroutine, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", begin_late)
    with pytest.raises(saccade.errors.Cancelled):
        client.generate("a", max_tokens=8000, ignore_eos=True)  # seconds: closing is noticed before its end
    closing.join(60)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("images", "options", "parts"),
    [
        (False, {}, [DecoderRunner]),
        (True, {}, [DecoderRunner, EncoderRunner, Handoff]),
        (True, {"encoder_process": True}, [DecoderRunner, Handoff]),
    ],
)
def test_a_closed_client_holds_no_model(
    images: bool, options: dict[str, Any], parts: list[type], model: Path, text_model: Path
) -> None:
    """Reference counts alone must free it: the collector does not know how large tensors are. Of a client that has been
    used and of two that have not."""
    gc.collect()
    gc.disable()
    try:
        before = engine_parts()
        path = str(model if images else text_model)
        client = saccade.LocalClient(path, dtype="float32", max_seqs=2, max_len=300, threads=1, **options)
        if images and not options:
            client.generate("what is this", images=[png(3)], max_tokens=2)
        assert len(engine_parts() - before) == len(parts)
        client.close()
        assert engine_parts() <= before
    finally:
        gc.enable()


def engine_parts() -> set[int]:
    return {id(found) for found in gc.get_objects() if type(found) in (DecoderRunner, EncoderRunner, Handoff)}
