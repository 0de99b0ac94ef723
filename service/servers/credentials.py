"""The server's TLS credentials. Their files are watched: a renewed certificate is used from the next handshake on."""

from __future__ import annotations

from typing import Any

import grpc

from service.common.config import ServerOptions
from service.common.tls import check_authority, check_pair, tls_files
from service.common.watch import Watched


def server_credentials(options: ServerOptions) -> Any:
    """`grpc.ServerCredentials` for the TLS options, or None without them. Raises ConfigError.

    With `tls_client_ca`, clients must present a certificate that this authority has signed. Certificate, key and CA are
    read again when any of them has changed.
    """
    named = tls_files(options)
    if named is None:
        return None

    def parse(contents: list[bytes]) -> Any:
        check_pair(named.certificate, named.key, "tls_cert, tls_key")
        if named.authority is not None:
            check_authority(named.authority, "tls_client_ca")
        return _configuration(contents)

    files = Watched(named.options, named.paths, parse)
    used = first = files.current()

    def fetch() -> Any:
        """Called by gRPC before each handshake; None: unchanged."""
        nonlocal used
        latest = files.current()
        if latest is used:
            return None
        used = latest
        return latest

    return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=named.authority is not None)


def _configuration(contents: list[bytes]) -> Any:
    certificate, key, *authority = contents
    return grpc.ssl_server_certificate_configuration(
        [(key, certificate)], root_certificates=authority[0] if authority else None
    )
