"""The server's TLS credentials, which follow their files: a renewed certificate is used from the next handshake on."""

from __future__ import annotations

from typing import Any

import grpc

from service.common.config import ConfigError, ServerOptions
from service.common.tls import check_pair
from service.common.watch import Watched


def server_credentials(options: ServerOptions) -> Any:
    """`grpc.ServerCredentials` for the TLS options, or None without them. Raises ConfigError.

    With `tls_client_ca`, clients must present a certificate that this authority has signed. Certificate, key and CA are
    read again when any of them has changed.
    """
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        missing = "tls_cert" if options.tls_cert is None else "tls_key"
        raise ConfigError(f"{missing}: TLS needs both a certificate and its key")
    paths = [options.tls_cert, options.tls_key] + ([options.tls_client_ca] if options.tls_client_ca else [])

    def parse(contents: list[bytes]) -> Any:
        check_pair(str(options.tls_cert), str(options.tls_key), "tls_cert, tls_key")
        return _configuration(contents)

    files = Watched(paths, parse)
    used = first = files.current()

    def fetch() -> Any:
        """Called by gRPC before each handshake; None: unchanged."""
        nonlocal used
        latest = files.current()
        if latest is used:
            return None
        used = latest
        return latest

    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=options.tls_client_ca is not None
    )


def _configuration(contents: list[bytes]) -> Any:
    certificate, key, *authority = contents
    return grpc.ssl_server_certificate_configuration(
        [(key, certificate)], root_certificates=authority[0] if authority else None
    )
