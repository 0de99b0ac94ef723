"""Mistakes in options are reported before the model is loaded: the model of these tests does not exist, and the error
is about something else."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority

from service.commands.cli import main
from service.common.config import ConfigError, ServerOptions
from service.servers.preflight import check_options

KEY = '[[key]]\nname = "a"\nsha256 = "{digest}"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys of two authorities, and files that are neither."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("one", "two"):
        Authority.create(folder / name).issue("server")
    (folder / "text").write_text("neither a certificate nor TOML\n")
    (folder / "empty").write_text("")
    (folder / "short.toml").write_text(KEY.format(digest="00"))
    (folder / "keys.toml").write_text(KEY.format(digest="00" * 32))
    (folder / "sizes.json").write_text('{"many": 1}')
    return folder


@contextlib.contextmanager
def bound_port() -> Iterator[tuple[socket.socket, int]]:
    """A socket that is bound to a port, and the port. The port before it is free: both are below those that the system
    gives to connections, so that other tests' connections do not take them."""
    for port in random.sample(range(20_001, 32_000), 200):
        with socket.socket() as before, socket.socket() as wanted:
            try:
                before.bind(("127.0.0.1", port - 1))
                wanted.bind(("127.0.0.1", port))
            except OSError:
                continue
            before.close()
            yield wanted, port
            return
    pytest.fail("no two free ports beside each other")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with bound_port() as (listener, port):
        listener.listen()
        yield port


def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    assert main(["serve", str(tmp_path / "no-model"), "--port", "0", *arguments]) == 2
    return capsys.readouterr().err


SERVER = "--tls-cert {0}/one/server.pem --tls-key {0}/one/server.key "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tls-cert {0}/none --tls-key {0}/one/server.key", "tls_cert, tls_key: cannot read {0}/none: No such file"),
        ("--tls-cert {0}/one/server.pem", "tls_key: TLS needs both"),
        ("--tls-cert {0}/one/server.pem --tls-key {0}/two/server.key", "KEY_VALUES_MISMATCH"),
        ("--tls-cert {0}/text --tls-key {0}/one/server.key", "not a certificate and its unencrypted private key"),
        ("--tls-cert {0} --tls-key {0}/one/server.key", "cannot read {0}: Is a directory"),
        (SERVER + "--tls-client-ca {0}/none", "tls_client_ca: cannot read {0}/none: No such file"),
        (SERVER + "--tls-client-ca {0}/text", "tls_client_ca: {0}/text: no certificate in PEM format"),
        (SERVER + "--tls-client-ca {0}/empty", "tls_client_ca: {0}/empty: no certificate in PEM format"),
        ("--tls-client-ca {0}/one/ca.pem", "tls_cert: TLS needs both"),
        ("--api-keys {0}/none", "api_keys: cannot read {0}/none: No such file"),
        ("--api-keys {0}/text", "api_keys: not TOML"),
        ("--api-keys {0}/empty", "api_keys: the file must hold [[key]] tables"),
        ("--api-keys {0}/short.toml", "api_keys: key 1 ('a'): sha256 must be 64"),
        ("--role encoder --api-keys {0}/text", "api_keys: not TOML"),
        ("--role encoder --tls-cert {0}/text --tls-key {0}/text", "not a certificate and its unencrypted private key"),
        ("--role decoder --encoders 127.0.0.1:1 --encoder-ca {0}/none", "encoder_ca: {0}/none: No such file"),
        ("--role decoder --encoders 127.0.0.1:1 --encoder-ca {0}/text", "encoder_ca: {0}/text: no certificate"),
        ("--role decoder --encoders 127.0.0.1:1 --encoder-cert {0}/one/server.pem", "encoder_ca: "),
        ("--role decoder --encoders 192.0.2.1:1 --encoder-api-key k", "encoder_ca: without TLS the key"),
        ("--host 0.0.0.0", "host: 0.0.0.0 can be reached from other machines"),
        ("--image-url-hosts a/b", "image_url_hosts: 'a/b' is not a host"),
        ("--image-url-hosts a.b --image-url-networks 10.0.0.1/8", "image_url_networks: "),
        ("--image-url-hosts a.b --image-url-ca {0}/text", "image_url_ca: {0}/text"),
        ("--batch-concurrency 5 --max-queue 5", "batch_concurrency: 5 rows would leave"),
        ("--batch-concurrency 1 --max-queue 1", "max_queue of at least 2 would work"),
        ("--media-dir {0}/text", "media_dir: {0}/text: File exists"),
        ("--batch-dir {0}/text/below", "batch_dir: {0}/text/below: Not a directory"),
        ("--media-dir {0}/both --batch-dir {0}/one/../both", "batch_dir: {0}/one/../both is also media_dir; each"),
        ("--sizes-file {0}/sizes.json", "sizes_file: {0}/sizes.json: 'many'"),
        ("--http-port 0 --http-file-dir {0}/text", "http_file_dir: {0}/text cannot be used"),
        ("--otlp-endpoint http://collector", "otlp_endpoint: 'collector' is not HOST:PORT"),
        ("--metrics-port 65535 --frontends 2", "metrics_port: 2 frontends need as many ports, 65535 to 65536"),
        ("--frontends 2 --batch-dir {0}", "batch_dir: batches need a server with one frontend"),
        ("--metrics-host 192.0.2.1 --metrics-port 1234", "metrics_host: cannot listen on 192.0.2.1:1234"),
        ("--metrics-host 192.0.2.1 --metrics-port 0", "metrics_host: cannot listen on 192.0.2.1:0"),
        ("--frontends 2 --metrics-host no.such.invalid --metrics-port 0", "metrics_host: cannot listen on no.such"),
        ("--metrics-host no.such.invalid --metrics-port 1234", "metrics_host: cannot listen on no.such.invalid:1234"),
        ("--host 192.0.2.1 --insecure", "host: cannot listen on 192.0.2.1:0"),
        ("--http-host 192.0.2.1 --http-port 1234 --insecure", "http_host: cannot listen on 192.0.2.1:1234"),
        ("--role encoder --max-message-bytes 1Mi", "max_message_bytes: 1048576 is too small for the messages between"),
        ("--max-message-bytes 2Gi", "max_message_bytes: 2147483648 is above the maximum of 2147483647"),
        ("--max-message-bytes 9999 --max-inflight-bytes 9998", "max_inflight_bytes: 9998 bytes hold no message of"),
        ("--max-connection-age 1e8", "max_connection_age: "),
        ("--max-connection-age 5 --max-connection-age-grace 1e8", "max_connection_age_grace: "),
        ("--max-connection-streams 9999999999", "max_connection_streams: "),
    ],
)
def test_a_mistake_is_reported_without_a_model(
    arguments: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.format(folder).split()
    assert message.format(folder) in (error := said(capsys, tmp_path, *words))
    assert error.startswith("saccade serve: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        lambda port: ["--port", str(port)],
        lambda port: ["--role", "encoder", "--port", str(port)],
        lambda port: ["--metrics-port", str(port)],
        lambda port: ["--frontends", "2", "--metrics-port", str(port - 1)],
        lambda port: ["--http-port", str(port)],
    ],
)
def test_a_port_that_is_taken_is_reported_without_a_model(
    options: Callable[[int], list[str]], taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"port: cannot listen on 127.0.0.1:{taken}" in said(capsys, tmp_path, *options(taken))


def test_two_options_cannot_have_one_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bound_port() as (_, number):
        port = str(number)
    assert "metrics_port: cannot listen" in said(capsys, tmp_path, "--port", port, "--metrics-port", port)
    assert "port: cannot listen" in said(capsys, tmp_path, "--port", port, "--http-port", port)
    several = ("--frontends", "2", "--port", port, "--metrics-port", str(int(port) - 1))
    assert f"metrics_port: cannot listen on 127.0.0.1:{port}" in said(capsys, tmp_path, *several)


def test_without_a_mistake_the_model_is_what_is_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (SERVER + "--tls-client-ca {0}/two/ca.pem --api-keys {0}/keys.toml").format(folder).split()
    assert "no-model" in said(capsys, tmp_path, *words)


def test_each_frontend_can_hold_the_largest_message() -> None:
    options = ServerOptions(port=0, frontends=2, max_message_bytes=5000, max_inflight_bytes=9999)
    with pytest.raises(
        ConfigError, match=r"9999 bytes, 4999 for each of 2 frontends, .* \(5000\); at least 10000 would"
    ):
        check_options(options)
    check_options(replace(options, max_inflight_bytes=10000))
    check_options(replace(options, max_inflight_bytes=5000, frontends=1))


def test_a_folder_for_temporary_files_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    for options in (ServerOptions(port=0), ServerOptions(port=0, http_port=0, media_dir=str(tmp_path / "media"))):
        with pytest.raises(ConfigError, match="^TMPDIR: No usable temporary directory found in .*none"):
            check_options(options)
    check_options(ServerOptions(port=0, media_dir=str(tmp_path / "media"), batch_dir=str(tmp_path / "batches")))


def test_what_was_checked_can_be_used(folder: Path, tmp_path: Path) -> None:
    """Folders exist, and ports and locks are free again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ServerOptions(
        port=port, http_port=0, media_dir=str(tmp_path / "m" / "n"), batch_dir=str(tmp_path / "b"),
        http_file_dir=str(tmp_path / "h"), otlp_endpoint="http://127.0.0.1:4317", metrics_port=0,
    )  # fmt: skip
    for _ in range(2):
        check_options(options)
    assert (tmp_path / "m" / "n").is_dir() and [path.name for path in (tmp_path / "b").iterdir()] == ["lock"]
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))
