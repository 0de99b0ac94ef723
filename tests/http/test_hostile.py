"""Hostile requests and clients, which must not harm the server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fuzz import bad_request, send
from running import RunningServer
from running_http import RunningHttp, request_of
from waiting import until

import saccade
from service.http.upstream import CONCURRENT, all_of

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "what is it?"}], "max_tokens": 4, "temperature": 0}


def post(http: RunningHttp, document: Any, path: str = "/v1/chat/completions", **keywords: Any) -> httpx.Response:
    return httpx.post(http.url + path, json=document, timeout=60, **keywords)


def test_bad_requests_are_4xx_and_leave_nothing(http: RunningHttp, server: RunningServer) -> None:
    """A sample; `python -m benchmarks.soak http` sends ten thousand."""
    rng = random.Random(1)
    told = Counter(send(http.port, bad_request(rng)) for _ in range(400))
    assert not [status for status in told if status and not 400 <= status < 500], told
    http.idle()
    server.drained()
    assert post(http, ASK).status_code == 200


@pytest.mark.parametrize(
    ("path", "document", "place"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content"),
        ("/v1/chat/completions", {**ASK, "stop": ["a", "\udc00"]}, "stop[1]"),
        ("/v1/completions", {"prompt": "\ud83d"}, "prompt"),
        ("/v1/responses", {"input": "\ud83d"}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "\ud83d"}], "max_tokens": 1}, "messages[0].content"),
        ("/v1/embeddings", {"input": ["a", "\ud83d"]}, "input[1]"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
    ],
)
def test_half_a_character_is_an_error_of_the_client(
    http: RunningHttp, path: str, document: dict[str, Any], place: str
) -> None:
    """Programs that cut UTF-16 between the halves of an emoji send it as a JSON escape."""
    headers = {"content-type": "application/json"}
    answer = httpx.post(http.url + path, content=json.dumps(document), headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{place}: half of a surrogate pair")


def test_both_halves_of_a_character_are_text(http: RunningHttp) -> None:
    escaped = json.dumps({"prompt": "\U0001f600"})
    assert "\\ud83d\\ude00" in escaped
    headers = {"content-type": "application/json"}
    answers = [
        httpx.post(f"{http.url}/tokenize", content=body, headers=headers)
        for body in (escaped, '{"prompt": "\U0001f600"}'.encode())
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize(("path", "field"), [("/v1/embeddings", "input"), ("/v1/completions", "prompt")])
def test_the_first_error_of_many_prompts_ends_the_others(
    http: RunningHttp, server: RunningServer, path: str, field: str
) -> None:
    made = server.drained()["decoder"]["output_tokens"]
    extra = {"max_tokens": 1} if field == "prompt" else {}
    answer = post(http, {field: ["", *("abc" * 40 for _ in range(300))], **extra}, path)
    assert answer.status_code == 400 and "empty" in answer.json()["error"]["message"]
    http.idle()
    assert server.drained()["decoder"]["output_tokens"] - made < 100, "no further prompts begin after the error"


def test_a_request_of_many_prompts_has_few_tasks() -> None:
    """A task for each of 60,000 prompts, in 240 KB, and their end stopped all streams for 13 s."""
    most = 0

    async def make(item: int) -> int:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0)
        return -item

    assert asyncio.run(all_of(make, range(1000))) == [-item for item in range(1000)]
    assert most == CONCURRENT + 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", '"input": "?", "max_output_tokens": 1, "metadata": {"a": 1e999}'),
        (
            "/v1/chat/completions",
            '"messages": [{"role": "user", "content": "?"}], "chat_template_kwargs": {"a": 1e999}',
        ),
    ],
)
def test_numbers_that_json_cannot_hold_are_errors_of_the_client(http: RunningHttp, path: str, fields: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(http.url + path, content=f"{{{fields}}}", headers=headers, timeout=60)
    assert answer.status_code == 400 and "1e999" in answer.json()["error"]["message"]


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "\u00b2", "\u0663", "1" * 5000], ids=range(7))
def test_a_page_has_from_1_to_100_batches(http: RunningHttp, limit: str) -> None:
    answer = httpx.get(f"{http.url}/v1/batches", params={"limit": limit}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_limits_on_bodies_and_heads(server: RunningServer) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with RunningHttp([server.address], max_message_bytes=2000, http_max_header_bytes=1024) as http:
        assert post(http, {**ASK, "user": "x" * 3000}).status_code == 413
        many = b"transfer-encoding: chunked\r\n\r\n" + b"3e8\r\n" + b" " * 1000 + b"\r\n"
        assert send(http.port, head.encode() + many + (b"3e8\r\n" + b" " * 1000 + b"\r\n") * 4) == 413
        for end in (b"", b"\r\n\r\n"):
            assert send(http.port, head.encode() + b"x: " + b"y" * 5000 + end) == 431
        assert httpx.get(f"{http.url}/health?{'y' * 5000}").status_code == 431
    # Another server: on a busy machine the requests above may take longer than this one waits.
    with RunningHttp([server.address], receive_timeout=0.3, http_header_timeout=0.3) as http:
        with socket.create_connection(("127.0.0.1", http.port), timeout=30) as slow:
            slow.sendall(head.encode() + b"content-length: 100\r\n\r\n{")
            assert slow.recv(64).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", http.port), timeout=30) as slow:
            slow.sendall(b"POST / HT")
            assert slow.recv(64).startswith(b"HTTP/1.1 408")


def test_refusals_are_whole_answers(server: RunningServer) -> None:
    """Those that the application does not see. Only one that the client may repeat says when."""
    with RunningHttp([server.address], http_max_header_bytes=1024) as http:
        with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 5000)
            long = HTTPResponse(connection)
            long.begin()
            assert long.status == 431 and "1024 bytes" in json.load(long)["error"]["message"]
        assert {name for name, _ in long.getheaders()} == {"content-type", "content-length", "connection"}
    with RunningHttp([server.address], http_max_connections=1) as http:
        with httpx.Client() as busy:
            assert busy.get(f"{http.url}/health").status_code == 200
            crowded = httpx.get(http.url)
        assert crowded.status_code == 503 and "limit of 1 connections" in crowded.json()["error"]["message"]
        assert crowded.headers["retry-after"] == "1"


def test_a_body_that_no_waiting_would_let_in_is_too_large(server: RunningServer) -> None:
    with RunningHttp([server.address], max_inflight_bytes=2000) as http:
        answer = post(http, {**ASK, "user": "x" * 3000})
        assert answer.status_code == 413 and "more than 2000 bytes" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers
        assert post(http, ASK).status_code == 200


def test_content_types_and_codings(http: RunningHttp) -> None:
    plain = httpx.post(
        f"{http.url}/v1/chat/completions", content=json.dumps(ASK), headers={"content-type": "text/plain"}
    )
    coded = post(http, ASK, headers={"content-encoding": "gzip"})
    form = httpx.post(f"{http.url}/v1/files", content="{}", headers={"content-type": "application/json"})
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    for answer in (plain, coded, form):
        assert answer.status_code == 415
        assert f"`{answer.json()['error']['code']}`" in page


def test_white_space_around_a_header_s_value_is_no_part_of_it(http: RunningHttp) -> None:
    with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
        spaced = b"x-request-id: \t mine \t \r\nx-priority:1 \r\nconnection: close\r\nhost:"
        connection.sendall(request_of(ASK).replace(b"host:", spaced, 1))
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 200") and b"\r\nx-request-id: mine\r\n" in answer


@pytest.mark.parametrize(("path", "document"), [("/v1/chat/completions", ASK), ("/v1/completions", {"prompt": "a"})])
def test_a_request_id_may_have_any_printable_character(http: RunningHttp, path: str, document: Any) -> None:
    """Quotation marks and backslashes too, which JSON escapes."""
    request_id = 'a"b\\c{}<>'
    answer = post(http, {**document, "stream": True}, path, headers={"x-request-id": request_id})
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if "[DONE]" not in line and line
    ]
    assert {chunk["id"].partition("-")[2] for chunk in chunks} == {request_id}


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_for_another_protocol_is_answered_as_any_other(
    http: RunningHttp, protocol: str, chunked: bool
) -> None:
    """Java's client asks for HTTP/2 in this way, unless it is told not to."""
    head, body = request_of(ASK).split(b"\r\n\r\n")
    asking = head + b"\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEA\r\nUpgrade: " + protocol.encode()
    if chunked:
        length = b"content-length: %d" % len(body)
        asking = asking.replace(length, b"transfer-encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    whole = asking + b"\r\n\r\n" + body
    plain = request_of(ASK).replace(b"host:", b"connection: close\r\nhost:", 1)
    with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pieces in ([whole], [whole[: len(asking) + 9], whole[len(asking) + 9 :]], [whole[:50], whole[50:]]):
            for piece in pieces:
                connection.sendall(piece)
            answer = HTTPResponse(connection)
            answer.begin()
            assert answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 4
        probe = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        connection.sendall(whole + 1000 * probe + plain)  # the other requests follow at once
        answers = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answers.count(b"HTTP/1.1 200") == 1002


def test_a_stream_has_no_chunks_for_a_client_of_http_1_0(http: RunningHttp) -> None:
    """Its end is that of the connection. nginx asks in this way by default."""
    asking = request_of({**ASK, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    for head in (asking, asking.replace(b"host:", b"connection: keep-alive\r\nhost:", 1)):
        with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
            connection.sendall(head)
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        told, body = answer.split(b"\r\n\r\n", 1)
        assert b"transfer-encoding" not in told.lower() and b"connection: close" in told.lower().split(b"\r\n")
        *events, rest = body.split(b"\n\n")
        assert not rest and events[-1] == b"data: [DONE]" and all(event.startswith(b"data: {") for event in events[:-1])
    with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
        connection.sendall(request_of(ASK).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        whole = HTTPResponse(connection)
        whole.begin()
        assert json.loads(whole.read(int(whole.headers["content-length"])))["usage"]["completion_tokens"] == 4


def test_there_is_no_cors_unless_it_is_asked_for(http: RunningHttp, server: RunningServer) -> None:
    origin = {"origin": "https://elsewhere.example"}
    assert "access-control-allow-origin" not in post(http, ASK, headers=origin).headers
    with RunningHttp([server.address], http_cors_origins=("https://elsewhere.example",)) as open_to_one:
        answer = post(open_to_one, ASK, headers=origin)
        assert answer.headers["access-control-allow-origin"] == origin["origin"]
        readable = set(answer.headers["access-control-expose-headers"].split(", "))
        assert {"x-request-id", "request-id", "retry-after", "content-range", "etag"} <= readable


def test_unreachable_and_draining_servers_are_503_with_a_time(server: RunningServer) -> None:
    with RunningHttp(["127.0.0.1:1"]) as http:
        answer = post(http, ASK)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{http.url}/ready").status_code == 503
        assert httpx.get(f"{http.url}/health").status_code == 200
    with RunningHttp(["127.0.0.1:1", server.address]) as http:  # the other server answers
        assert [post(http, ASK).status_code for _ in range(4)] == [200] * 4
        assert httpx.get(f"{http.url}/ready").status_code == 200


def test_vanishing_and_slow_readers_leave_nothing(http: RunningHttp, server: RunningServer) -> None:
    """A sample; the soak run has five hundred."""
    endless = {**ASK, "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
    gone = []
    for _ in range(24):
        connection = socket.create_connection(("127.0.0.1", http.port), timeout=30)
        connection.sendall(request_of(endless))
        gone.append(connection)
    assert gone[0].recv(20)
    for connection in gone:
        connection.close()
    http.idle()
    assert server.drained()["decoder"]["used_slots"] == 0
    with RunningHttp([server.address], stall_timeout=0.4) as stalling:
        with socket.create_connection(("127.0.0.1", stalling.port), timeout=30) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(request_of({**endless, "n": 16}))
            assert slow.recv(20), "the answer has begun"
            stalling.idle()
    assert server.drained()["decoder"]["used_slots"] == 0


def test_a_reader_that_stops_before_the_end_of_a_stream_holds_nothing(server: RunningServer) -> None:
    """The last part of a body waits for its reader as the others do."""
    with RunningHttp([server.address], stall_timeout=0.2) as http:
        body = json.dumps({**ASK, "stream": True}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        aborted: list[bool] = []

        async def stalled() -> None:
            requests = iter([{"type": "http.request", "body": body}])

            async def receive() -> Any:
                return next(requests, None) or await asyncio.Event().wait()

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    await asyncio.Event().wait()

            scope = {
                "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
                "headers": headers, "abort": lambda: aborted.append(True),
            }  # fmt: skip
            await asyncio.wait_for(http.http.app(scope, receive, send), 30)

        asyncio.run_coroutine_threadsafe(stalled(), http.loop).result(60)
        assert aborted == [True]


def test_whole_answers_that_nobody_reads_are_dropped(server: RunningServer) -> None:
    with RunningHttp([server.address], stall_timeout=0.4, send_buffer=4096) as http:
        with socket.create_connection(("127.0.0.1", http.port), timeout=30) as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            large = {**ASK, "max_tokens": 60, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "n": 16}
            unread.sendall(request_of(large))
            assert unread.recv(20)
            until(lambda: not http.http.server_state.connections)


def test_status_metrics_and_the_document(http: RunningHttp) -> None:
    status = httpx.get(f"{http.url}/status").json()
    assert status["servers"][0]["loads"]["total_blocks"] > 0 and status["http"]["running"] == 1
    assert 'route="GET /status",status="200"' in httpx.get(f"{http.url}/metrics").text
    document = httpx.get(f"{http.url}/openapi.json").json()
    assert "max_tokens" in document["components"]["schemas"]["ChatCompletion"]["properties"]
    assert document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    missing = httpx.get(f"{http.url}/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("POST", "/v1/files/file-x", "DELETE, GET, HEAD"),
        ("GET", "/v1/batches/batch-x/cancel", "POST"),
        ("POST", "/index.html", "GET, HEAD"),
    ],
)
def test_another_method_is_answered_with_those_of_the_path(
    http: RunningHttp, method: str, path: str, allowed: str
) -> None:
    wrong = httpx.request(method, http.url + path)
    assert wrong.status_code == 405 and wrong.json()["error"]
    assert sorted(wrong.headers["allow"].split(", ")) == allowed.split(", ")


def test_tokens_there_and_back(http: RunningHttp) -> None:
    told = post(http, {"prompt": "abé", "return_token_strs": True}, "/tokenize").json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) == 4
    assert post(http, {"tokens": told["tokens"]}, "/detokenize").json()["prompt"] == "abé"
    assert post(http, {"tokens": [2**31]}, "/detokenize").status_code == 400
    chat = post(http, {"messages": ASK["messages"]}, "/tokenize").json()
    assert chat["count"] == post(http, ASK).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "saccade.localhost"}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "rebound.example"}, 403),
        ({"host": "rebound.example:8000", "origin": "http://rebound.example:8000"}, 403),
        ({"host": "127.0.0.1.rebound.example"}, 403),
        ({"host": "["}, 403),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_pages_cannot_call_a_server_without_keys_under_another_name(
    http: RunningHttp, headers: dict[str, str], status: int
) -> None:
    for path in ("/", "/v1/models"):
        answer = httpx.get(http.url + path, headers={**headers, "x-request-id": "r1"})
        assert answer.status_code == status
        if status == 403:
            error = answer.json()["error"]
            assert (error["code"], error["request_id"]) == ("HOST_DENIED", "r1")
            option = "--http-cors-origins" if "host" not in headers else "--http-allowed-hosts"
            assert option in error["message"]


def test_a_proxy_s_name_can_be_allowed(server: RunningServer) -> None:
    with RunningHttp([server.address], http_allowed_hosts=("Ask.example",)) as http:
        told = [
            httpx.get(f"{http.url}/v1/models", headers={"host": host}).status_code
            for host in ("ask.example", "ask.example:443", "localhost", "other.example")
        ]
    assert told == [200, 200, 200, 403]
    with RunningHttp([server.address], http_allowed_hosts=("*",)) as http:
        assert httpx.get(f"{http.url}/v1/models", headers={"host": "other.example"}).status_code == 200


def test_requests_that_no_route_answers_are_counted(server: RunningServer) -> None:
    with RunningHttp([server.address]) as http:
        for path, host in (("/", "localhost"), ("/", "other.example"), ("/v1/nothing", "localhost")):
            httpx.get(http.url + path, headers={"host": host})
        httpx.get(f"{http.url}/v1/messages")
        told = httpx.get(f"{http.url}/metrics").text
        counted = re.findall(r'requests_total\{route="other",status="(\d+)"} (\d+)', told)
    assert counted == [("200", "1"), ("403", "1"), ("404", "1"), ("405", "1")]


def test_unknown_paths_and_methods_have_a_request_id_and_the_form_of_their_api(http: RunningHttp) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("POST", "/chat/completions", 404),  # by a client whose base URL lacks /v1
        ("GET", "/v1/messages", 405),
        ("GET", "/v1/messages/x", 404),
    ):
        answer = httpx.request(method, http.url + path, headers={"x-request-id": "r2"})
        document = answer.json()
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "r2")
        if "messages" in path:
            assert (document["type"], document["request_id"]) == ("error", "r2")
        else:
            assert (document["error"]["code"], document["error"]["request_id"]) == ("HTTP", "r2")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/nothing", None),
        ("/nothing", None),
    ],
)
def test_an_unknown_path_names_the_one_that_a_wrong_base_url_hides(
    http: RunningHttp, path: str, meant: str | None
) -> None:
    told = post(http, ASK, path).json()["error"]["message"]
    assert told.startswith(f"POST {path}: Not Found") and ("base URL" in told) == bool(meant)
    assert meant is None or f"the path is {meant}:" in told


def test_a_grpc_client_is_told_that_this_is_not_its_port(http: RunningHttp) -> None:
    with saccade.Client(f"127.0.0.1:{http.port}", max_retries=0) as client:
        with pytest.raises(saccade.errors.Unavailable, match="that of the HTTP server: this client needs the port for"):
            client.generate("x")


@pytest.mark.parametrize("target", [b"localhost:1", b"/health"])
def test_this_server_is_no_proxy(http: RunningHttp, target: bytes) -> None:
    with socket.create_connection(("127.0.0.1", http.port), timeout=30) as connection:
        connection.sendall(b"CONNECT " + target + b" HTTP/1.1\r\nhost: localhost:1\r\n\r\nGET /health HTTP/1.1\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 400 and answer.headers["connection"] == "close"
