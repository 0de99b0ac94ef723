"""Server credentials that follow their files: a renewed certificate is used from the next handshake on."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc

from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.common.watch import Watched


def server_credentials(options: ServerOptions) -> Any:
    """`grpc.ServerCredentials` for the TLS options, or None without them. Raises ConfigError.

    With `tls_client_ca`, clients must present a certificate that descends from it. Certificate, key and CA are read
    again when any of them has changed.
    """
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        missing = "tls_cert" if options.tls_cert is None else "tls_key"
        raise ConfigError(f"{missing}: TLS needs both a certificate and its key")
    paths = [options.tls_cert, options.tls_key] + ([options.tls_client_ca] if options.tls_client_ca else [])

    def parse(contents: list[bytes]) -> Any:
        _check_pair(str(options.tls_cert), str(options.tls_key), "tls_cert, tls_key")
        return _configuration(contents)

    files = Watched(paths, parse)
    used = first = files.current()

    def fetch() -> Any:
        """Called by gRPC before each handshake; None: as before."""
        nonlocal used
        latest = files.current()
        if latest is used:
            return None
        used = latest
        return latest

    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=options.tls_client_ca is not None
    )


def channel_credentials(options: EngineOptions) -> Any:
    """`grpc.ChannelCredentials` for the way to encoders, or None without TLS. Raises ConfigError."""
    if options.encoder_ca is None:
        if options.encoder_cert is not None or options.encoder_cert_key is not None:
            raise ConfigError("encoder_ca: a certificate for encoders needs the authority that theirs come from")
        far = [address for address in options.encoders if not is_loopback(address.rpartition(":")[0])]
        if options.encoder_api_key is not None and far:
            raise ConfigError(f"encoder_ca: without TLS the key in encoder_api_key can be read on its way to {far[0]}")
        return None
    pair: list[bytes | None] = [None, None]
    if options.encoder_cert is not None or options.encoder_cert_key is not None:
        if options.encoder_cert is None or options.encoder_cert_key is None:
            missing = "encoder_cert" if options.encoder_cert is None else "encoder_cert_key"
            raise ConfigError(f"{missing}: TLS needs both a certificate and its key")
        _check_pair(options.encoder_cert, options.encoder_cert_key, "encoder_cert, encoder_cert_key")
        pair = [_read(options.encoder_cert_key, "encoder_cert_key"), _read(options.encoder_cert, "encoder_cert")]
    return grpc.ssl_channel_credentials(_read(options.encoder_ca, "encoder_ca"), *pair)


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant. Raises ConfigError for a host that has no address."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        raise ConfigError(f"{host!r} has no address") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None


def _check_pair(certificate: str, key: str, names: str) -> None:
    """Raises ConfigError unless the two belong together: in the middle of a renewal they may not."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"{names}: no certificate with its unencrypted key: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{names}: {error.strerror}") from None


def _configuration(contents: list[bytes]) -> Any:
    certificate, key, *authority = contents
    return grpc.ssl_server_certificate_configuration(
        [(key, certificate)], root_certificates=authority[0] if authority else None
    )
