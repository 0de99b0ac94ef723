"""TLS of the HTTP server, and between it and gRPC servers. Files are watched: a renewed certificate is used from the
next handshake on."""

from __future__ import annotations

import ssl

from saccade._core.settings import TLSConfig
from service.common.config import ConfigError, HttpFrontOptions
from service.common.tls import TlsFiles, check_authority, check_client_files, check_pair, tls_files
from service.common.watch import Watched


def tls_context(options: HttpFrontOptions) -> ssl.SSLContext | None:
    """The context for the TLS options, or None without them. Raises ConfigError.

    With `tls_client_ca`, clients must present a certificate that this authority has signed. Certificate, key and CA are
    read again when any of them has changed.
    """
    named = tls_files(options)
    if named is None:
        return None
    files = Watched(named.options, named.paths, lambda _: _context(named))
    context = files.current()

    def use_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = files.current()

    # OpenSSL calls this function for each handshake, with or without a server name. The context of a listening socket
    # cannot be replaced, but that of a connection can.
    context.sni_callback = use_current
    return context


def servers_tls(options: HttpFrontOptions) -> Watched[TLSConfig] | None:
    """The TLS settings of calls to gRPC servers, or None without TLS. Raises ConfigError for files with which no server
    could be reached."""
    authority, certificate, key = options.servers_ca, options.servers_cert, options.servers_cert_key
    if authority is None:
        if certificate is not None or key is not None:
            raise ConfigError("servers_ca: a certificate for gRPC servers needs TLS; name the authority of theirs")
        return None
    names = "servers_ca", "servers_cert", "servers_cert_key"

    def parse(contents: list[bytes]) -> TLSConfig:
        check_client_files(authority, certificate, key, names)
        ca, chain, private = contents if len(contents) == 3 else (contents[0], None, None)
        return TLSConfig(ca=ca, certificate=chain, key=private)

    check_client_files(authority, certificate, key, names)  # its errors name the option of each file
    paths = [path for path in (authority, certificate, key) if path is not None]
    return Watched(", ".join(names), paths, parse)


def _context(files: TlsFiles) -> ssl.SSLContext:
    certificate, key, authority = files
    check_pair(certificate, key, "tls_cert, tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    if authority is not None:
        check_authority(authority, "tls_client_ca")
        context.load_verify_locations(authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
