"""Bodies of callers whose key no server knows, and what follows answers that come before the end of a body."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn
from keys import KEYS, key_file
from running import RunningServer
from running_http import RunningHttp
from uvicorn.server import ServerState
from waiting import until

from service.common.config import HttpFrontOptions
from service.common.http_requests import CHECK_KEY, SERVICE
from service.http import protocol, upstream
from service.http.call import MAX_KNOWN_KEYS, STRANGER_BYTES, KnownKeys

LARGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "user": "x" * (STRANGER_BYTES + 1)
}  # fmt: skip
SMALL = {**LARGE, "user": "x"}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def locked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = Path(key_file(tmp_path_factory.mktemp("keys") / "keys.toml"))
    keys.write_text(keys.read_text().replace("admin", "batch").replace('"inference", ', ""))  # the key "boss"
    with RunningServer(str(model), max_seqs=4, max_len=600, api_keys=str(keys)) as running:
        yield running


@pytest.fixture
def front(locked: RunningServer) -> Iterator[RunningHttp]:
    with RunningHttp([locked.address]) as running:
        yield running


def post(http: RunningHttp, document: Any, key: str | None, timeout: float = 60) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {KEYS.get(key, key)}"}
    return httpx.post(f"{http.url}/v1/chat/completions", json=document, headers=headers, timeout=timeout)


@contextlib.contextmanager
def sent(http: RunningHttp, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", http.port), timeout=60) as connection:
        connection.sendall(data)
        yield connection


def answer_of(connection: socket.socket) -> HTTPResponse:
    answer = HTTPResponse(connection)
    answer.begin()
    return answer


@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: %d\r\n\r\n" % (STRANGER_BYTES + 1),
        b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % (STRANGER_BYTES + 1),
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b" % (2 * STRANGER_BYTES, b" " * (STRANGER_BYTES + 1)),
    ],
    ids=["length", "expect", "chunks"],
)
@pytest.mark.parametrize("key", [b"", b"authorization: Bearer sk-wrong\r\n"], ids=["none", "wrong"])
def test_a_large_body_of_a_stranger_is_not_read(front: RunningHttp, rest: bytes, key: bytes) -> None:
    with sent(front, HEAD + key + rest) as connection:
        answer = answer_of(connection)
        assert answer.status == 401 and answer.headers["connection"] == "close"
        assert json.load(answer)["error"]["code"] == "UNAUTHENTICATED"
        assert front.front.budget.used == 0
        assert connection.recv(1) == b""
    until(lambda: not front.http.server_state.connections)
    assert front.front.calls == {("POST /v1/chat/completions", 401): 1}


def test_a_key_is_asked_for_once_and_only_for_large_bodies(front: RunningHttp) -> None:
    """The key may make three requests a minute, and the question is none."""
    assert [post(front, LARGE, "metered").status_code for _ in range(4)] == [200, 200, 200, 429]
    assert [post(front, LARGE, "two").status_code for _ in range(9)] == [200] * 9
    assert post(front, SMALL, None).status_code == 401
    assert len(front.front.known_keys._until) == 2, "small bodies ask no server"


@pytest.mark.parametrize("older", [False, True])
def test_a_key_that_may_not_make_the_call_is_known(
    locked: RunningServer, front: RunningHttp, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of an older release has no method for the question."""
    if older:
        monkeypatch.setattr(upstream, "CHECK_KEY", "/saccade.private.HttpRequests/New")
    while post(front, SMALL, "slow").status_code != 429:
        pass
    for key, status in (("slow", 429), ("boss", 403), ("two", 200), ("wrong", 401)):
        assert post(front, LARGE, key).status_code == status
    assert len(front.front.known_keys._until) == 3


@pytest.mark.parametrize("chunked", [False, True])
def test_the_question_for_a_key_has_a_time_limit(chunked: bool) -> None:
    """The client is not the one that is slow. gRPC would give up its connection after 20 s."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        with RunningHttp([f"127.0.0.1:{hung.getsockname()[1]}"], receive_timeout=0.5) as http:
            rest = b"content-length: %d\r\n\r\n" % 2**20
            if chunked:
                rest = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b" % (2**20, b" " * 2**17)
            with sent(http, HEAD + rest) as connection:
                connection.settimeout(15)
                answer = answer_of(connection)
                assert answer.status == 503
                assert "within 0.5 s (receive_timeout)" in json.load(answer)["error"]["message"]


def test_a_body_has_its_time_without_that_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, known = threading.Event(), threading.Event()

    def check_key(request: bytes, context: Any) -> bytes:
        asked.set()
        known.wait(60)
        return request

    methods = {CHECK_KEY.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(check_key)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    body = b"1" + b" " * 2**17
    with RunningHttp([f"127.0.0.1:{port}"], receive_timeout=100.0) as http:
        with sent(http, HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b" % (len(body), body)) as connection:
            assert asked.wait(60)
            for later, know in ((60, True), (120, False)):
                monkeypatch.setattr(http.loop, "time", lambda later=later: time.monotonic() + later)
                if know:
                    known.set()
                    until(lambda: bool(http.front.known_keys._until))
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), http.loop).result(60)  # its timers have run
            connection.sendall(b"\r\n0\r\n\r\n")
            assert answer_of(connection).status == 400, "the body is no object"
    server.stop(None).wait()


def test_another_server_is_asked_if_one_does_not_answer(locked: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        silent = f"127.0.0.1:{hung.getsockname()[1]}"
        for other in ("127.0.0.1:1", silent):
            with RunningHttp([other, locked.address]) as http:
                http.front.upstream._turn = itertools.count()  # the other one is asked first
                assert post(http, LARGE, None, timeout=15).status_code == 401  # gRPC gives up after 20 s
    with RunningHttp(["127.0.0.1:1", locked.address]) as http:
        assert post(http, LARGE, "one").status_code == 200
    with RunningHttp(["127.0.0.1:1"]) as http:
        assert post(http, LARGE, "one").status_code == 503


def test_known_keys_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known, now = KnownKeys(), 0.0
    monkeypatch.setattr("service.http.call.time.monotonic", lambda: now)
    for number in range(MAX_KNOWN_KEYS + 1):
        known.add(b"%d" % number)
    assert b"0" not in known and b"1" in known and len(known._until) == MAX_KNOWN_KEYS
    now = 301.0
    assert b"1" not in known


@pytest.mark.parametrize("document", [b"POST /v1/nothing", b"POST /v1/chat/completions"])
def test_the_rest_of_a_body_after_the_answer_is_dropped_for_a_time(
    front: RunningHttp, monkeypatch: pytest.MonkeyPatch, document: bytes
) -> None:
    """Without a limit on it, a connection stays open as long as a byte of the body is to come."""
    head = HEAD.replace(b"POST /v1/chat/completions", document) + b"content-length: %d\r\n\r\n" % 2**23
    with sent(front, head + bytes(2**23)) as whole:  # by a client that reads nothing before it has sent all
        assert answer_of(whole).status in (401, 404)
        assert _closed(whole)
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.3)
    with sent(front, head) as slow:
        answer = answer_of(slow)
        assert answer.headers["connection"] == "close" and answer.read()
        slow.sendall(b" ")
        until(lambda: not front.http.server_state.connections)


def _closed(connection: socket.socket) -> bool:
    return not b"".join(iter(lambda: connection.recv(2**16), b"")).startswith(b"HTTP")


def test_a_stop_hardly_waits_for_the_rest_of_a_body_whose_answer_it_has_seen(locked: RunningServer) -> None:
    with RunningHttp([locked.address], receive_timeout=0.5, grace=20.0) as http:
        with sent(http, HEAD + b"content-length: 10\r\n\r\n") as connection:
            until(lambda: http.front.running == 1)
            began = time.monotonic()
            http.close()
            assert time.monotonic() - began < 15
            answer = answer_of(connection)
            assert answer.status == 408 and answer.read() and connection.recv(1) == b""


def test_a_stop_does_not_reset_a_connection_whose_client_still_sends(front: RunningHttp) -> None:
    with sent(front, HEAD.replace(b"chat", b"no") + b"content-length: 10\r\n\r\n") as connection:
        assert answer_of(connection).status == 404
        (lingering,) = front.http.server_state.connections

        async def stop() -> None:
            lingering.shutdown()  # as uvicorn's server does for each connection
            for _ in range(3):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(stop(), front.loop).result(60)
        connection.sendall(b" " * 9)
        connection.sendall(b" ")
        assert _closed(connection)


@pytest.mark.parametrize("finish", [lambda c: c.sendall(b" " * 10), lambda c: c.close()], ids=["end", "leave"])
def test_a_connection_ends_with_the_body(front: RunningHttp, finish: Callable[[socket.socket], None]) -> None:
    with sent(front, HEAD.replace(b"chat", b"no") + b"content-length: 10\r\n\r\n") as connection:
        assert answer_of(connection).status == 404
        finish(connection)
        until(lambda: not front.http.server_state.connections)


def test_requests_that_wait_for_an_answer_are_few(front: RunningHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection took 16 MiB for the requests in the 256 KiB that are read at once."""
    most = 0
    plain = protocol.LimitedProtocol.on_message_complete

    def counted(self: protocol.LimitedProtocol) -> None:
        nonlocal most
        plain(self)
        most = max(most, len(self.pipeline))

    monkeypatch.setattr(protocol.LimitedProtocol, "on_message_complete", counted)
    probe = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = probe.replace(b"host:", b"connection: close\r\nhost:")
    with sent(front, probe * 9999 + last) as connection:
        answers = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answers.count(b"HTTP/1.1 200") == 10_000
    assert most <= protocol.PIPELINED + protocol.SLICE // len(probe)


def test_nothing_is_read_while_pipelined_requests_wait_unparsed() -> None:
    """With each answer, what had arrived meanwhile was copied, and more was read."""
    probe = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    most = 0

    async def flood() -> None:
        async with answering(app) as (made, address):
            nonlocal most
            reader, writer = await asyncio.open_connection(*address)
            writer.write(probe * 2**17)
            for _ in range(3 * protocol.PIPELINED):
                await reader.readuntil(b"ok")
                most = max(most, len(made[0]._unparsed))
            assert not made[0].transport.is_reading()
            writer.transport.abort()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()  # with which uvicorn reads on
        for _ in range(3):
            await asyncio.sleep(0)  # the loop reads what there is
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    asyncio.run(asyncio.wait_for(flood(), 60))
    assert 0 < most <= 256 * 1024


@contextlib.asynccontextmanager
async def answering(app: Any) -> AsyncIterator[tuple[list[protocol.LimitedProtocol], tuple[str, int]]]:
    """Serves an application in this loop. Gives the connections and the address."""
    config = uvicorn.Config(app, ws="none", loop="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    made: list[protocol.LimitedProtocol] = []
    kind = protocol.protocol_class(HttpFrontOptions(servers=("127.0.0.1:1",)))

    def make() -> protocol.LimitedProtocol:
        made.append(kind(config, ServerState(), {}))  # type: ignore[arg-type]
        return made[-1]

    async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0) as server:
        yield made, server.sockets[0].getsockname()


def test_no_request_follows_the_last_answer() -> None:
    """The answer to the first request begins before its body ends, and ends after the next request has begun."""
    ran: list[str] = []

    async def exchange() -> bytes:
        begun, end = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            ran.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            begun.set()
            await end.wait()
            await send({"type": "http.response.body", "body": b"ok"})

        async with answering(app) as (made, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST /first HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nab")
            await begun.wait()
            writer.write(b"cdPOST /second HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nxx")
            while not made[0].pipeline:
                await asyncio.sleep(0)
            end.set()
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return answer

    assert asyncio.run(exchange()).endswith(b"ok") and ran == ["/first"]
