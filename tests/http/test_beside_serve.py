"""`saccade serve --http-port`: the HTTP server as a process beside the gRPC server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from images import data_url, png
from keys import KEYS, key_file
from running import RunningServer, children
from running_http import RunningHttp, request_of
from served import make_served
from threads import scarce_threads
from waiting import until

import saccade
from benchmarks import machine
from saccade.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from service.commands.server_process import ServerProcess
from service.common.config import ConfigError, ServerOptions
from service.common.http_requests import ACCEPTED, HOLD
from service.servers.http_process import HttpProcess, socket_folder

ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
PRIVATE = f"/tmp/saccade-test-{os.getpid()}.sock"
"""A private socket; the path of `tmp_path` may be too long."""


SMALL = ["--threads", "1", "--log-level", "error", "--image-workers", "1"]
SEVERAL = {"max_tokens": 20, "ignore_eos": True, "echo": True}
ENDLESS: dict[str, Any] = {"max_tokens": 8900, "ignore_eos": True}
"""Until it is cancelled: some seconds."""


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It takes no images, so the image workers of its server import no torch."""
    return make_served(tmp_path_factory.mktemp("text") / "tiny", vision=False).path


def live_requests(server: ServerProcess) -> int:
    """Requests in all frontend processes."""
    servers = httpx.get(f"{server.http_url}/status").json()["servers"]
    return sum(entry["loads"]["live_requests"] for entry in servers)


def complete(server: ServerProcess, stream: bool) -> httpx.Response:
    """More prompts than calls that run at a time, and with `echo` further calls after each."""
    asked = {**SEVERAL, "prompt": "x" if stream else ["x"] * 20, "stream": stream}
    return httpx.post(f"{server.http_url}/v1/completions", json=asked, timeout=100)


def check_refusals(server: ServerProcess) -> None:
    """Waits until the server drains."""
    while (ready := httpx.get(f"{server.http_url}/ready")).status_code == 200:
        pass
    assert ready.status_code == 503
    several: list[dict[str, object]] = [{**SEVERAL, "prompt": prompts} for prompts in ("x", ["x"] * 20)]
    for path, asked in (("chat/completions", ASK), *(("completions", document) for document in several)):
        refused = httpx.post(f"{server.http_url}/v1/{path}", json=asked, timeout=60)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "DRAINING"
        assert int(refused.headers["retry-after"]) >= 1


def check_complete(whole: httpx.Response, streamed: httpx.Response) -> None:
    assert whole.status_code == 200, whole.text
    assert [choice["finish_reason"] for choice in whole.json()["choices"]] == ["length"] * 20
    assert whole.json()["usage"]["completion_tokens"] == 20 * 20
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_it_is_replaced_passes_keys_on_and_ends_with_the_server(text_model: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys.toml")
    arguments = [str(text_model), "--http-port", "0", "--api-keys", keys, "--max-seqs", "4", "--max-len", "200"]
    with ServerProcess([*arguments, *SMALL]) as server:
        url = f"{server.http_url}/v1/chat/completions"
        assert httpx.post(url, json=ASK, timeout=60).status_code == 401
        good = {"authorization": f"Bearer {KEYS['one']}"}
        assert httpx.post(url, json=ASK, headers={**good, "host": "a.proxy.example"}, timeout=60).status_code == 200
        assert httpx.get(f"{server.http_url}/status", headers=good).json()["servers"][0]["loads"] is None
        rows = ("file", ("in.jsonl", b"{}\n", "application/jsonl"))
        form = {"files": [rows], "data": {"purpose": "batch"}, "headers": good, "timeout": 60}
        file_id = httpx.post(f"{server.http_url}/v1/files", **form).json()["id"]
        (child,) = children(server.pid, "service.http.process")
        os.kill(child, signal.SIGKILL)
        # The parent owns the listening socket, so this call waits in its queue for the next process.
        assert httpx.post(url, json=ASK, headers=good, timeout=60).status_code == 200
        assert children(server.pid, "service.http.process") != [child]
        assert httpx.get(f"{server.http_url}/v1/files/{file_id}/content", headers=good, timeout=60).content == b"{}\n"
        # The new process also knows the gRPC server's port, which the playground shows.
        assert httpx.get(f"{server.http_url}/status").json()["http"]["grpc_address"] == server.address
        assert server.stop() == 0
    assert not Path(f"/proc/{child}").exists()


def test_new_requests_are_told_of_a_drain_and_the_others_get_all_of_their_answers(model: Path) -> None:
    """Also requests some of whose calls begin only after the drain, and one whose client reads it after the gRPC
    server has ended."""
    arguments = [str(model), "--http-port", "0", "--admin", "--max-seqs", "16", "--max-len", "9000", "--no-warmup"]
    with ServerProcess([*arguments, *SMALL, "--grace", "100"]) as server, ThreadPoolExecutor() as pool:
        (engine,) = children(server.pid, "service.servers.engine_process")
        (child,) = children(server.pid, "service.http.process")
        (fork_server,) = children(server.pid, "service.media.image_worker")
        port = int(server.http_url.rpartition(":")[2])
        with saccade.Client(server.address, max_retries=0) as client, socket.socket() as late:
            with ExitStack() as running:
                for _ in range(16):  # all that the engine runs at a time, so that the other requests wait
                    next(running.enter_context(client.stream("x", **ENDLESS)))
                images = [fork_server, *children(fork_server, "service.media.image_worker")]
                for pid in images:
                    os.kill(pid, signal.SIGSTOP)
                image = {"type": "image_url", "image_url": {"url": data_url(png(3))}}
                asked = {"messages": [{"role": "user", "content": [image]}], "return_token_strs": True}
                tokens = pool.submit(httpx.post, f"{server.http_url}/tokenize", json=asked, timeout=100)
                whole, streamed = (pool.submit(complete, server, stream) for stream in (False, True))
                while live_requests(server) < 16 + 1 + 17:
                    pass
                late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                late.connect(("127.0.0.1", port))
                large = {**ASK, "max_tokens": 500, "ignore_eos": True, "n": 16, "logprobs": True, "top_logprobs": 20}
                late.sendall(request_of(large))
                while live_requests(server) < 16 + 1 + 17 + 1:
                    pass
                os.kill(server.pid, signal.SIGTERM)
                check_refusals(server)
                assert not whole.done() and not tokens.done()
                for pid in images:
                    os.kill(pid, signal.SIGCONT)
                assert tokens.result().status_code == 200, tokens.result().text
                assert len(tokens.result().json()["token_strs"]) == len(tokens.result().json()["tokens"])
            check_complete(whole.result(), streamed.result())
            until(lambda: not (Path(f"/proc/{engine}").exists() and Path(f"/proc/{child}").exists()))
            late.settimeout(60)
            answer = HTTPResponse(late)
            answer.begin()
            assert answer.status == 200 and len(answer.read()) > 2**22
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("path", "document", "part"),
    [
        ("v1/completions", {"prompt": "x", "echo": True, "stream": True}, "data: [DONE]"),
        ("v1/completions", {"prompt": ["x", "y"]}, "choices"),
        ("v1/embeddings", {"input": ["x", "y"]}, "embedding"),
        ("tokenize", {"prompt": "x", "return_token_strs": True}, "token_strs"),
    ],
)
def test_all_calls_of_an_accepted_request_may_begin_after_the_drain(
    model: Path, path: str, document: dict[str, object], part: str
) -> None:
    """Also where one call at a time is allowed on a connection."""
    with RunningServer(str(model), private_socket=PRIVATE, max_connection_streams=1) as running:
        server = running.server

        async def drain_when_one_is_held() -> None:
            while server.http_requests.idle.is_set():
                await asyncio.sleep(0)
            server.drain()

        with RunningHttp([f"unix:{PRIVATE}"]) as http:
            drained = asyncio.run_coroutine_threadsafe(drain_when_one_is_held(), running.loop)
            answer = httpx.post(f"{http.url}/{path}", json=document, timeout=60)
            drained.result()
            assert answer.status_code == 200 and part in answer.text, answer.text
            refused = httpx.post(f"{http.url}/{path}", json=document, timeout=60)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "DRAINING"


async def drain(running: RunningServer) -> None:
    """On the server's loop."""
    running.server.drain()


def test_probes_during_the_start_do_not_delay_the_connection_after_it() -> None:
    """gRPC waits longer after each failed attempt to connect, up to seconds: twelve would take half a minute."""
    with socket.socket(socket.AF_UNIX) as listener, RunningHttp([f"unix:{PRIVATE}"]) as http:
        listener.bind(PRIVATE)
        listener.listen()
        listener.settimeout(10.0)
        attempts = 0
        began = time.monotonic()

        def accept() -> None:
            nonlocal attempts
            while attempts < 12:
                listener.accept()[0].close()
                attempts += 1

        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(accept)
            while not accepted.done():
                assert httpx.get(f"{http.url}/ready").status_code == 503
            accepted.result()
        assert time.monotonic() - began < 8.0
    os.unlink(PRIVATE)


def test_callers_of_the_public_port_can_neither_hold_requests_open_nor_say_that_theirs_are_accepted(
    model: Path,
) -> None:
    with RunningServer(str(model), private_socket=PRIVATE) as running:
        running.run(drain(running))
        with grpc.insecure_channel(running.address) as channel:
            with pytest.raises(grpc.RpcError) as denied:
                next(channel.unary_stream(HOLD)(b""))
            assert denied.value.code() == grpc.StatusCode.PERMISSION_DENIED
            asked = inference_pb2.TokenizeRequest(prompt=inference_pb2.PromptInput(text="x"))
            with pytest.raises(grpc.RpcError) as denied:
                inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(asked, metadata=((ACCEPTED, "1"),))
            assert "shutting down" in denied.value.details()


def test_a_request_of_several_calls_has_no_more_time_than_others(text_model: Path) -> None:
    with (
        RunningServer(str(text_model), private_socket=PRIVATE, max_seqs=1, max_len=9000) as running,
        RunningHttp([f"unix:{PRIVATE}"]) as http,
        ThreadPoolExecutor() as pool,
    ):
        asked = {"prompt": ["x"] * 20, **ENDLESS}
        answer = pool.submit(httpx.post, f"{http.url}/v1/completions", json=asked, timeout=100)
        until(lambda: running.server.frontend.live == 16)
        running.run(running.server.stop(grace=0.5))
        assert answer.result().status_code == 503


def test_clients_are_not_told_the_paths_of_private_sockets(text_model: Path) -> None:
    with (
        RunningServer(str(text_model), max_seqs=1, max_len=100, private_socket=PRIVATE),
        RunningHttp([f"unix:{PRIVATE}", f"unix:{PRIVATE}.none"]) as http,
    ):
        listed, ready = (httpx.get(f"{http.url}{path}", timeout=60) for path in ("/v1/models", "/ready"))
    assert listed.json()["data"] and listed.headers["x-saccade-missing-servers"] == "frontend 1"
    assert ready.json()["servers"] == {"frontend 0": "serving", "frontend 1": "unreachable"}


def test_two_frontends_leave_signals_to_the_first_process_and_drain_as_one(model: Path) -> None:
    """systemd sends SIGTERM to each process of a service, and `timeout` to each of its group: helpers must not end or
    drain by themselves, nor take their parent's word for the second signal, which stops at once."""
    arguments = [str(model), "--http-port", "0", "--admin", "--frontends", "2", "--max-seqs", "1", "--max-len", "9000"]
    with ServerProcess([*arguments, *SMALL, "--grace", "100"]) as server, ThreadPoolExecutor() as pool:
        _, *helpers = machine.family(server.pid)
        for helper in helpers:
            os.kill(helper, signal.SIGTERM)
        for _ in range(20):  # of both frontends
            with saccade.Client(server.address, max_retries=0) as client:
                assert client.generate("x", max_tokens=1, images=[png(3)]).usage.image_tokens
        assert httpx.post(f"{server.http_url}/v1/chat/completions", json=ASK, timeout=60).status_code == 200
        assert set(machine.family(server.pid)) == {server.pid, *helpers}

        with saccade.Client(server.address, max_retries=0) as client, client.stream("x", **ENDLESS) as running:
            next(running)
            whole, streamed = (pool.submit(complete, server, stream) for stream in (False, True))
            while live_requests(server) < 1 + 17:
                pass
            with grpc.insecure_channel(server.address) as channel:
                admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
            check_refusals(server)
            assert not whole.done()
        check_complete(whole.result(), streamed.result())
        assert server.stop() == 0


def test_signals_until_the_end_do_not_change_the_exit_code_of_the_http_server_alone() -> None:
    command = [sys.executable, "-m", "service", "http", "--servers", "127.0.0.1:1", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline().startswith("saccade http ready on ")
        while server.poll() is None:
            server.send_signal(signal.SIGTERM)
            time.sleep(0.001)
    assert server.returncode == 0


def test_a_full_disk_behind_standard_output_ends_no_server() -> None:
    command = [sys.executable, "-m", "service", "http", "--servers", "127.0.0.1:1", "--http-port", "0"]
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True) as server,
    ):
        assert server.stderr is not None
        _, told, url = server.stderr.readline().partition("No space left on device: saccade http ready on ")
        assert told and httpx.get(f"{url.strip()}/health").status_code == 200
        server.terminate()
        assert server.stderr.read() == ""
    assert server.returncode == 0


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    http = HttpProcess(ServerOptions(http_port=0))
    http.start()
    try:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/none")
            assert http._process is not None
            http._process.kill()
            until(lambda: "No such file" in caplog.text)
        until(lambda: http._process is not None and http._process.poll() is None)
        assert httpx.get(f"{http.url}/health", timeout=60).status_code == 200
    finally:
        http.join()


def test_a_process_that_cannot_be_watched_is_an_error_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    http = HttpProcess(ServerOptions(http_port=0))
    with scarce_threads(monkeypatch, "saccade-http-watch", 1), pytest.raises(ConfigError, match="start new thread"):
        http.start()
    http.join()
    assert http._process is not None and http._process.returncode is not None
    assert not Path(http.socket_of(0)).parent.exists()


def test_a_process_that_hangs_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    http = HttpProcess(ServerOptions(http_port=0, hang_timeout=0.2))
    http.start()
    try:
        assert http._process is not None
        hanging = http._process.pid
        os.kill(hanging, signal.SIGSTOP)
        assert httpx.get(f"{http.url}/health", timeout=60).status_code == 200
        assert http._process.pid != hanging and "has not answered for 0.2 s (hang_timeout)" in caplog.text
    finally:
        http.join()


def test_a_long_tmpdir_does_not_make_the_socket_s_path_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    http = HttpProcess(ServerOptions(http_port=0))
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(http.socket_of(0))
        assert Path(http.socket_of(0)).parent.stat().st_mode & 0o777 == 0o700
    finally:
        http.join()
    assert not list(long.iterdir())


def test_a_folder_for_the_socket_is_needed(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    with pytest.raises(ConfigError, match=r"path would have \d{3} bytes, and Linux allows 107; /none: No such file"):
        socket_folder([str(long), "/none"], "0.sock")


def test_the_demo_opens_the_playground_and_its_status(tmp_path: Path) -> None:
    """With the addresses that the image's environment sets: the demo is for this machine alone, also there."""
    opened = tmp_path / "opened"
    os.mkfifo(opened)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{opened}\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "service", "demo", "--open"]
    image = {"SACCADE_HOST": "0.0.0.0", "SACCADE_HTTP_HOST": "0.0.0.0", "SACCADE_IMAGE_WORKERS": "1"}
    with subprocess.Popen(
        command, env={**os.environ, **image, "BROWSER": f"{browser} %s"},
        stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if tests run in the background
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        page, grpc = (demo.stdout.readline().split()[-1] for _ in range(2))
        assert "Ctrl-C" in demo.stdout.readline()
        assert opened.read_text().strip() == page and page.startswith("http://127.0.0.1:")
        assert grpc.startswith("127.0.0.1:")
        assert "<title>Saccade playground</title>" in httpx.get(page).text
        assert httpx.get(f"{page}/status").json()["servers"][0]["loads"]["max_requests"] > 0
        with saccade.Client(grpc) as client:
            assert [model.name for model in client.models()] == ["demo"]
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(page)
