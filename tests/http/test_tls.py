"""HTTPS: renewed certificates, and certificates of clients."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import Authority
from running import RunningServer
from running_http import RunningHttp
from waiting import until

from saccade._transport.aio import AsyncConnection
from service.common.config import ConfigError, HttpFrontOptions, HttpOptions
from service.http.call import STRANGER_BYTES
from service.http.listen import SPARE, bind, url_of
from service.http.run import run
from service.http.tls import servers_tls, tls_context


def subject(port: int, authority: Authority, name: str | None) -> str:
    """The name in the certificate that the server shows; `name`: the server name that the client sends."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.check_hostname = False
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return str(dict(pair[0] for pair in found["subject"])["commonName"])  # type: ignore[misc, arg-type]


def test_renewed_files_are_used_from_the_next_handshake_on(server: RunningServer, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    files = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(name: str) -> None:
        for made, used in zip(authority.issue(name), files, strict=True):
            shutil.copy(made, used.with_suffix(".new"))
            used.with_suffix(".new").replace(used)

    install("first")
    with RunningHttp([server.address], tls_cert=str(files[0]), tls_key=str(files[1])) as http:
        assert [subject(http.port, authority, name) for name in ("localhost", None)] == ["first", "first"]
        install("second")
        assert [subject(http.port, authority, name) for name in ("localhost", None)] == ["second", "second"]
        files[1].write_text("not a key")
        assert subject(http.port, authority, "localhost") == "second", "the last valid one stays"


def test_clients_need_a_certificate_of_the_authority(server: RunningServer, tmp_path: Path) -> None:
    authority, other = Authority.create(tmp_path / "ca"), Authority.create(tmp_path / "other")
    certificate, key = authority.issue("server")
    options = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(authority.certificate)}
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    with RunningHttp([server.address], **options) as http:
        url = f"https://127.0.0.1:{http.port}/health"
        for issuer in (None, other):
            if issuer is not None:
                trusted.load_cert_chain(*issuer.issue("stranger"))
            with pytest.raises(httpx.TransportError):
                httpx.get(url, verify=trusted, timeout=10)
        trusted.load_cert_chain(*authority.issue("friend"))
        assert httpx.get(url, verify=trusted, timeout=10).status_code == 200


def test_a_large_body_for_servers_that_know_certificates_and_no_keys(
    model: Path, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = map(str, authority.issue("server"))
    options = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": str(authority.certificate)}
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "user": "x" * 2 * STRANGER_BYTES}
    to_servers: dict[str, Any] = {"servers_ca": str(authority.certificate)}
    with RunningServer(str(model), max_seqs=2, max_len=300, **options) as server:
        for owner, status in ((authority, 200), (Authority.create(tmp_path / "other"), 503)):
            mine = dict(zip(("servers_cert", "servers_cert_key"), map(str, owner.issue("front")), strict=True))
            with RunningHttp([server.address], **to_servers, **mine) as http:
                answer = httpx.post(f"{http.url}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == status, answer.text


def test_renewed_files_are_used_for_the_next_calls_to_servers(
    model: Path, authority: Authority, tmp_path: Path
) -> None:
    """Calls that are running keep their connection."""
    certificate, key = map(str, authority.issue("server"))
    options = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": str(authority.certificate)}
    names = "servers_ca", "servers_cert", "servers_cert_key"
    files = {name: tmp_path / name for name in names}

    def install(owner: Authority, *parts: str) -> None:
        for name, made in zip(names, (owner.certificate, *owner.issue("front")), strict=True):
            if name in (parts or names):
                shutil.copy(made, files[name].with_suffix(".new"))
                files[name].with_suffix(".new").replace(files[name])

    install(Authority.create(tmp_path / "other"))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "ignore_eos": True}
    with (
        RunningServer(str(model), max_seqs=2, max_len=2500, **options) as server,
        RunningHttp([server.address], send_buffer=4096, **{name: str(file) for name, file in files.items()}) as http,
        httpx.Client(timeout=60) as client,
    ):
        url = f"{http.url}/v1/chat/completions"
        assert client.post(url, json={**body, "max_tokens": 1}).status_code == 503
        install(authority)
        assert client.post(url, json={**body, "max_tokens": 1}).status_code == 200
        # It does not end before it is read.
        long = {"max_tokens": 2000, "stream": True, "logprobs": True, "top_logprobs": 20}
        with client.stream("POST", url, json={**body, **long}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(3):
                install(authority)
                assert client.post(url, json={**body, "max_tokens": 1}).status_code == 200
            (connection,) = http.front.upstream.connections
            assert isinstance(connection, AsyncConnection)
            assert len(connection._left) == 2, "that of the stream, and the last one"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        install(Authority.create(tmp_path / "third"), "servers_cert")
        assert client.post(url, json={**body, "max_tokens": 1}).status_code == 200, "not the key of this certificate"


def test_handshakes_count_as_connections_and_have_a_time_limit(server: RunningServer, tmp_path: Path) -> None:
    certificate, key = map(str, Authority.create(tmp_path / "ca").issue("server"))
    begun = bytes.fromhex("1603010200010001fc0303")  # the first bytes of a ClientHello
    with RunningHttp([server.address], tls_cert=certificate, tls_key=key, http_max_connections=2) as http:
        with contextlib.ExitStack() as open_ones:
            for number in range(SPARE + 9):
                connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", http.port), 60))
                connection.sendall(begun)
                if number >= SPARE + 2:
                    assert closed(connection)
        until(lambda: is_healthy(http.url))
    with RunningHttp([server.address], tls_cert=certificate, tls_key=key, http_header_timeout=0.3) as http:
        with socket.create_connection(("127.0.0.1", http.port), 60) as slow:
            slow.sendall(begun)
            assert closed(slow)


@pytest.mark.parametrize("unread", [False, True])
def test_a_stop_waits_for_no_client_to_end_tls_and_for_those_that_read(
    server: RunningServer, unread: bool, tmp_path: Path
) -> None:
    """asyncio waits 30 s for a client's `close_notify`. One keeps an idle connection, another has an answer before the
    end of its request's body, and the third may not have read its answer yet."""
    certificate, key = map(str, Authority.create(tmp_path / "ca").issue("server"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 200, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "logprobs": True, "top_logprobs": 20}).encode()
    kind = b"content-type: application/json\r\n"
    requests = (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /no HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n%b"
        % (kind, len(body), body),
    )
    with (
        RunningHttp([server.address], tls_cert=certificate, tls_key=key, grace=25.0, send_buffer=4096) as http,
        contextlib.ExitStack() as open_ones,
    ):
        for request in requests:
            plain = open_ones.enter_context(socket.socket())
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(60)
            plain.connect(("127.0.0.1", http.port))
            connection = open_ones.enter_context(context.wrap_socket(plain))
            connection.sendall(request)
            answer = HTTPResponse(connection)
            answer.begin()
            if not unread or request is not requests[-1]:
                answer.read()
        http.idle()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(http.close)
            if unread:
                until(lambda: http.http.server_state.connections and not http.http.servers[0].is_serving())
                text = answer.read()
                assert text.endswith(b"data: [DONE]\n\n") and len(text) > 2**17
            stopped.result()
        assert time.monotonic() - began < 15


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", verify=False, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def closed(connection: socket.socket) -> bool:
    """Whether the server closes a connection, once it has."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_of_a_pair_is_refused(tmp_path: Path) -> None:
    certificate, key = Authority.create(tmp_path / "ca").issue("server")
    for given, missing in (({"tls_cert": str(certificate)}, "tls_key"), ({"tls_key": str(key)}, "tls_cert")):
        with pytest.raises(ConfigError, match=f"^{missing}: "):
            tls_context(HttpFrontOptions(servers=("127.0.0.1:1",), **given))
    with pytest.raises(ConfigError, match="tls_cert, tls_key"):
        tls_context(HttpFrontOptions(servers=("127.0.0.1:1",), tls_cert=str(key), tls_key=str(certificate)))


def test_options_with_which_no_grpc_server_could_be_reached(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    ca, (certificate, key) = str(authority.certificate), map(str, authority.issue("front"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"servers_ca": str(tmp_path / "none")}, "^servers_ca: .*none: No such file"),
        ({"servers_ca": key}, "^servers_ca: .*: no certificate"),
        (
            {"servers_cert": certificate, "servers_cert_key": key},
            "^servers_ca: a certificate for gRPC servers needs TLS",
        ),
        ({"servers_ca": ca, "servers_cert": certificate}, "^servers_cert_key: TLS needs both"),
        (
            {"servers_ca": ca, "servers_cert": key, "servers_cert_key": certificate},
            "^servers_cert, servers_cert_key: not",
        ),
        ({"max_message_bytes": 5000, "max_inflight_bytes": 4999}, "^max_inflight_bytes: .*; at least 5000 would work"),
    ]
    for values, words in refused:
        with pytest.raises(ConfigError, match=words):
            run(HttpFrontOptions(http_port=0, **values))
    assert servers_tls(HttpFrontOptions(servers_ca=ca, servers_cert=certificate, servers_cert_key=key))


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_be_in_brackets(server: RunningServer, host: str) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    with RunningHttp([server.address], http_host=host) as http:
        assert http.url == f"http://[::1]:{http.port}"
        assert httpx.get(f"{http.url}/ready").status_code == 200


def test_an_address_of_another_machine_is_named() -> None:
    for host in ("192.0.2.1", "[2001:db8::1]", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=f"^http_host: cannot listen on {re.escape(host)}:0: "):
            bind(HttpOptions(http_host=host), 0)
    with bind(HttpOptions(http_host="localhost"), 0) as listener:
        assert url_of(listener, False) == f"http://127.0.0.1:{listener.getsockname()[1]}"
