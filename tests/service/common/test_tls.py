"""Credentials for encoders: a key only over TLS or within this machine, a certificate only with its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority

from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.common.tls import is_loopback
from service.encoding.credentials import channel_credentials
from service.servers.credentials import server_credentials


def options(*encoders: str, **values: Any) -> EngineOptions:
    return EngineOptions(role="decoder", encoders=encoders or ("127.0.0.1:1",), **values)


def test_a_key_in_plain_text_stays_on_this_machine() -> None:
    assert channel_credentials(options("10.0.0.1:1"))() is None
    assert channel_credentials(options("127.0.0.1:1", "[::1]:2", encoder_api_key="k"))() is None
    with pytest.raises(ConfigError, match="can be read on its way to 10.0.0.1:1"):
        channel_credentials(options("127.0.0.1:1", "10.0.0.1:1", encoder_api_key="k"))
    with pytest.raises(ConfigError, match="encoders: 'no.such.host.invalid' is neither an IP address nor a host name"):
        channel_credentials(options("no.such.host.invalid:1", encoder_api_key="k"))


def test_without_a_key_the_name_of_an_encoder_may_resolve_later() -> None:
    assert channel_credentials(options("no.such.host.invalid:1"))() is None


def test_certificates_come_whole(tmp_path: Path) -> None:
    authority, other = Authority.create(tmp_path / "a"), Authority.create(tmp_path / "b")
    ca = str(authority.certificate)
    certificate, key = map(str, authority.issue("decoder"))
    strange = str(other.issue("other")[1])
    good: list[dict[str, Any]] = [
        {"encoder_ca": ca}, {"encoder_ca": ca, "encoder_cert": certificate, "encoder_cert_key": key},
        {"encoder_ca": ca, "encoder_api_key": "k"},
    ]  # fmt: skip
    for values in good:
        assert isinstance(channel_credentials(options("10.0.0.1:1", **values))(), grpc.ChannelCredentials)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"encoder_cert": certificate}, "encoder_ca: "), ({"encoder_cert_key": key}, "encoder_ca: "),
        ({"encoder_ca": ca, "encoder_cert": certificate}, "encoder_cert_key: TLS needs both"),
        ({"encoder_ca": ca, "encoder_cert_key": key}, "encoder_cert: TLS needs both"),
        ({"encoder_ca": ca, "encoder_cert": certificate, "encoder_cert_key": strange}, "not a certificate and its"),
        ({"encoder_ca": str(tmp_path / "none")}, "encoder_ca: .*none: No such file"),
    ]  # fmt: skip
    for values, words in bad:
        with pytest.raises(ConfigError, match=words):
            channel_credentials(options(**values))


def test_an_authority_for_clients_needs_a_certificate_of_the_server(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "a")
    with pytest.raises(ConfigError, match="tls_cert: TLS needs both"):
        server_credentials(ServerOptions(tls_client_ca=str(authority.certificate)))


def test_loopback_is_every_address_of_a_name() -> None:
    assert all(is_loopback(host, "host") for host in ("127.0.0.1", "[::1]", "127.9.9.9"))
    assert not any(is_loopback(host, "host") for host in ("10.0.0.1", "0.0.0.0", "::"))
    with pytest.raises(ConfigError, match="^http_host: 'no.such.host.invalid' is neither an IP address nor a host"):
        is_loopback("no.such.host.invalid", "http_host")
