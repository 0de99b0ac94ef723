"""The gRPC port: its address, what the server needs if other machines can reach it, and gRPC's options."""

from __future__ import annotations

from typing import Any

from service.common.config import ConfigError, ServerOptions
from service.common.option import host_port
from service.common.tls import is_loopback

HANDSHAKE_SECONDS = 20.0
"""Seconds that a new connection may take until calls can be made on it."""


def check_exposure(options: ServerOptions, name: str = "host") -> None:
    """Raises ConfigError if other machines can reach the address and the server has no TLS or does not authenticate
    callers, unless `insecure` is set. `name`: of the option, for errors."""
    exposed = not is_loopback(options.host, name)
    missing = []
    if options.tls_cert is None:
        missing.append("no TLS (--tls-cert and --tls-key)")
    if options.api_keys is None and options.tls_client_ca is None:
        missing.append("no authentication of callers (--api-keys or --tls-client-ca)")
    if exposed and missing and not options.insecure:
        raise ConfigError(
            f"{name}: {options.host} can be reached from other machines, but this server has {' and '.join(missing)}; "
            "set these options, listen on 127.0.0.1 behind a proxy that provides what is missing, or set --insecure"
        )


def listen(server: Any, options: ServerOptions, credentials: Any) -> int:
    """Binds the address; returns the port. Raises ConfigError if it cannot be bound."""
    where = address_of(options, options.port)
    try:
        if credentials is None:
            return int(server.add_insecure_port(where))
        return int(server.add_secure_port(where, credentials))
    except RuntimeError:  # `service.servers.preflight` has said why, unless another program was faster
        raise ConfigError(
            f"port: cannot listen on {where}: another program may use the port; choose another port, or 0 for any free "
            "one"
        ) from None


def address_of(options: ServerOptions, port: int) -> str:
    """The address of the gRPC server, as clients write it."""
    return host_port(options.host, port)


def channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    """Options of the gRPC server."""
    settings = [
        # Off, so that a second server on the port fails instead of silently receiving half of the calls. Several
        # frontend processes of one server share the port; `frontends.reserved_port` keeps other servers off it.
        ("grpc.so_reuseport", int(options.frontends > 1 and options.role != "encoder")),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # Clients may ping every 10 s during a long generation without output; gRPC must not close their connections.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # TLS and HTTP/2's first frames; gRPC's default is 120 s.
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_concurrent_streams", options.max_connection_streams),
    ]
    # Connections have a maximum age, so that clients find servers that were added after they connected.
    for name in ("max_connection_age", "max_connection_age_grace"):
        if (seconds := getattr(options, name)) is not None:
            settings.append((f"grpc.{name}_ms", round(seconds * 1000)))
    return settings
