"""Options of the HTTP server, as part of `saccade serve` and as `saccade http`: field, default, unit."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from service.common.option import LAST_PORT, LONGEST_TIME, ConfigError, check_addresses
from service.common.option import option as _option


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP server in front of gRPC: where it listens, and its own limits."""

    http_port: int | None = _option(
        None, "port of the OpenAI-compatible HTTP server and its playground; 0: any free port; unset: 8000 for "
        "`saccade http`, no HTTP server for `saccade serve`", minimum=0, maximum=LAST_PORT,
    )  # fmt: skip
    http_host: str = _option("127.0.0.1", "address of the HTTP server; the same rules apply as for host")
    http_max_connections: int = _option(2048, "concurrent connections to the HTTP server", minimum=1)
    http_max_header_bytes: int = _option(
        64 * 2**10, "bytes of the request line and headers of one request", minimum=1024, size=True
    )
    http_header_timeout: float = _option(
        20.0, "seconds that the request line and headers may take to arrive, and a TLS handshake before them",
        minimum=0.001, maximum=LONGEST_TIME,
    )  # fmt: skip
    http_file_bytes: int = _option(
        2**30, "bytes of files that are uploaded over HTTP for batches, of all API keys together", minimum=0, size=True
    )
    http_file_key_bytes: int | None = _option(
        None, "bytes of such files of one API key; unset: http_file_bytes", minimum=0, size=True
    )
    http_file_dir: str | None = _option(
        None,
        "folder of files that are uploaded over HTTP, which then survive a restart; HTTP servers cannot share it; "
        "unset: a temporary one",
    )
    http_allowed_hosts: tuple[str, ...] = _option(
        (), "host names under which clients may call the HTTP server, such as that of a proxy in front of it; loopback "
        "names are always allowed; *: any; unset: only loopback names for a server on 127.0.0.1 without API keys and "
        "TLS, else any",
    )  # fmt: skip
    http_cors_origins: tuple[str, ...] = _option(
        (), "origins whose pages may call the HTTP server, such as https://app.example.org; unset: none"
    )


DEFAULT_PORTS = {"http": 80, "https": 443}
"""Ports that browsers leave out of origins."""


def check_names(options: HttpOptions) -> None:
    """Raises ConfigError for host names and origins that no request has, so that they would allow nothing."""
    for name in options.http_allowed_hosts:
        if (host := _host(name)) != name.strip("[]").lower():
            raise ConfigError(f"http_allowed_hosts: {name!r} is no host name; {host!r} would work")
    for origin in options.http_cors_origins:
        sent = origin if origin in ("*", "null") else _origin(origin)
        if sent != origin:
            raise ConfigError(f"http_cors_origins: {origin!r} is no origin that browsers send; {sent!r} would work")


def _host(name: str) -> str:
    """The host name in what may be a name, an address with a port, or a URL."""
    is_address = name.count(":") > 1 and not name.startswith("[") and "//" not in name  # IPv6 without brackets
    try:
        host = urlsplit(name if "//" in name else f"//[{name}]" if is_address else f"//{name}").hostname
    except ValueError:
        host = None
    return (host or "").rstrip(".") or "app.example.org"


def _origin(url: str) -> str:
    """The origin of a page, as browsers send it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not parts.scheme:
        return "https://app.example.org"
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + ("" if port in (None, DEFAULT_PORTS.get(parts.scheme)) else f":{port}")


@dataclass(frozen=True)
class HttpFrontOptions(HttpOptions):
    """All options of `saccade http`, a process of its own that is a client of gRPC servers."""

    servers: tuple[str, ...] = _option(("127.0.0.1:50051",), "HOST:PORT of the gRPC servers, separated by commas")
    servers_ca: str | None = _option(
        None,
        "PEM file of the CA that signed the gRPC servers' certificates; read again when it changes; unset: no TLS",
    )
    servers_cert: str | None = _option(
        None, "PEM file of the certificate that the HTTP server presents to gRPC servers"
    )
    servers_cert_key: str | None = _option(None, "PEM file of the private key of servers_cert")
    insecure: bool = _option(False, "listen on an address that other machines can reach even without TLS")
    tls_cert: str | None = _option(None, "PEM file of the certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of the private key of tls_cert, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the CA that must have signed the certificates of clients")
    max_message_bytes: int = _option(96 * 2**20, "largest request body", minimum=1024, size=True)
    max_inflight_bytes: int = _option(
        512 * 2**20, "bytes of the request bodies of all calls in progress", minimum=1024, size=True
    )
    receive_timeout: float = _option(
        120.0, "seconds that the body of a request may take to arrive", minimum=0.001, maximum=LONGEST_TIME
    )
    default_timeout: float = _option(
        600.0, "seconds that a call without a deadline may take", minimum=0.001, maximum=LONGEST_TIME
    )
    stall_timeout: float = _option(
        60.0, "seconds that a client may pause while it reads a stream", minimum=0.001, maximum=LONGEST_TIME
    )
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0, maximum=LONGEST_TIME)
    log_level: str = _option(
        "info", "lowest level of messages that are logged to stderr", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("servers: the HTTP server needs the address of a gRPC server, such as 10.0.0.5:50051")
        check_addresses("servers", self.servers, targets=True)
        check_names(self)
