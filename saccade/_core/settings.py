"""Settings that the two gRPC clients share: configuration, channel options, credentials and retry limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from saccade.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Unpack

API_KEY_VARIABLE = "SACCADE_API_KEY"

_TARGETS = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:", "google-c2p:")
"""Prefixes of gRPC target names; anything else is HOST:PORT."""

DEFAULT_OPTIONS: Mapping[str, int] = {
    # Answers with logprobs can exceed gRPC's default of 4 MiB; the size of requests is limited by the server.
    "grpc.max_receive_message_length": 256 * 2**20,
    "grpc.max_send_message_length": -1,
    # Finds connections that have died silently during a call; an idle client sends no pings.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    # The client retries by itself: gRPC's retries do not read our error details and do not know what a stream has
    # delivered.
    "grpc.enable_retries": 0,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # Connections are not shared between clients, so that closing one, or a fork, does not affect another.
    "grpc.use_local_subchannel_pool": 1,
}


@dataclass(frozen=True)
class TLSConfig:
    """TLS settings. Each item is the path of a PEM file or its content as bytes; None: the system's default."""

    ca: str | os.PathLike[str] | bytes | None = None
    """The certificate authorities that may have signed the server's certificate."""
    certificate: str | os.PathLike[str] | bytes | None = None
    """The client's own certificate chain, for servers that ask for one."""
    key: str | os.PathLike[str] | bytes | None = None
    """Its private key."""
    server_name: str | None = None
    """The name that the server's certificate must have, if it is not that of the address."""


@dataclass(frozen=True)
class CallSettings:
    """Settings of calls, which `with_options` changes."""

    timeout: float | None = 600.0
    """Seconds for a whole call, retries included; None for no limit."""
    max_retries: int | None = None
    """Retries of a call that failed as UNAVAILABLE, or over its rate limit with a time to wait; a stream counts from
    its last piece. None: any number within the timeout."""
    first_token_timeout: float | None = None
    """Seconds that a reader of a stream waits for its first piece, waiting in queues included; None for no limit."""
    idle_timeout: float | None = None
    """Seconds that a reader of a stream waits for each further piece; None for no limit."""
    upload_above: int | None = 2 * 2**20
    """Images of more bytes than this are uploaded once and then named by their ids; None: they are sent in each
    request."""

    def __post_init__(self) -> None:
        for name in ("timeout", "first_token_timeout", "idle_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidArgument(f"{name}: expected more than 0 seconds, got {value}")
        if self.max_retries is not None and self.max_retries < 0:
            raise InvalidArgument(f"max_retries: expected 0 or more, got {self.max_retries}")

    def changed(self, **options: Unpack[CallOptions]) -> CallSettings:
        """A copy. Raises InvalidArgument for names that are no options."""
        known = [item.name for item in fields(self)]
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidArgument(f"unknown options: {', '.join(unknown)}; known are {', '.join(known)}")
        return replace(self, **options)


class CallOptions(TypedDict, total=False):
    """The arguments of `with_options`; None means no limit."""

    timeout: float | None
    max_retries: int | None
    first_token_timeout: float | None
    idle_timeout: float | None
    upload_above: int | None


@dataclass(frozen=True)
class Settings:
    """All settings of a gRPC client. Plain data, which is what a pickled client consists of."""

    address: str
    api_key: str | None = field(default=None, repr=False)
    tls: TLSConfig | None = None
    calls: CallSettings = CallSettings()
    channel_options: tuple[tuple[str, Any], ...] = ()

    def all_channel_options(self) -> list[tuple[str, Any]]:
        options: dict[str, Any] = dict(DEFAULT_OPTIONS)
        if self.tls is not None and self.tls.server_name is not None:
            options["grpc.ssl_target_name_override"] = self.tls.server_name
        options.update(self.channel_options)
        return list(options.items())

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def make_settings(
    address: str,
    *,
    api_key: str | None,
    tls: bool | TLSConfig | None,
    timeout: float | None,
    max_retries: int | None,
    channel_options: Mapping[str, Any] | None,
) -> Settings:
    """Checks what the user has given and fills in the API key from the environment.

    Raises:
        InvalidArgument: an address without a port, a timeout that is not positive, a negative number of retries.
    """
    if not address.startswith(_TARGETS):
        host, colon, port = address.rpartition(":")
        if not (colon and host and "/" not in host and port.isdigit() and int(port) < 65536):
            raise InvalidArgument(f"address: expected HOST:PORT, got {address!r}")
    return Settings(
        address=address,
        api_key=api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE) or None,
        tls=TLSConfig() if tls is True else tls or None,
        calls=CallSettings(timeout=timeout, max_retries=max_retries),
        channel_options=tuple((channel_options or {}).items()),
    )
