"""What the two gRPC clients share: configuration, channel options, credentials and the rule for trying again."""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

from saccade.errors import InvalidArgument, SaccadeError

API_KEY_VARIABLE = "SACCADE_API_KEY"

_TARGETS = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:", "google-c2p:")
"""How gRPC's own names of targets begin; anything else is HOST:PORT."""

DEFAULT_OPTIONS: Mapping[str, int] = {
    # Answers with logprobs can pass gRPC's default of 4 MiB; the request's size is the server's to bound.
    "grpc.max_receive_message_length": 256 * 2**20,
    "grpc.max_send_message_length": -1,
    # A connection that has silently died is noticed in the middle of a call; an idle client sends no pings.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    # Retries are ours: gRPC's would neither read our details nor keep to what a stream has already delivered.
    "grpc.enable_retries": 0,
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # Connections are not shared between clients, so that closing one, or a fork, touches no other.
    "grpc.use_local_subchannel_pool": 1,
}


@dataclass(frozen=True)
class TLSConfig:
    """How to talk TLS. Each item is the path of a PEM file or its content as bytes; None takes the system's default."""

    ca: str | os.PathLike[str] | bytes | None = None
    """The certificates that the server's must descend from."""
    certificate: str | os.PathLike[str] | bytes | None = None
    """The client's own certificate chain, for servers that ask for one."""
    key: str | os.PathLike[str] | bytes | None = None
    """Its private key."""
    server_name: str | None = None
    """The name to look for in the server's certificate, if it is not that of the address."""


@dataclass(frozen=True)
class CallSettings:
    """How calls are made; `with_options` changes these."""

    timeout: float | None = 600.0
    """Seconds for a whole call, retries included; None for no limit."""
    max_retries: int | None = None
    """How often a call that failed as UNAVAILABLE, or over its rate with a time to wait, is tried again. A stream
    counts anew from each piece of the answer on. None: as often as the timeout allows."""
    first_token_timeout: float | None = None
    """Seconds that a reader of a stream waits for its first piece, waiting in queues included; None for no limit."""
    idle_timeout: float | None = None
    """Seconds that a reader of a stream waits for each further piece; None for no limit."""
    upload_above: int | None = 2 * 2**20
    """Pictures of more bytes than this are uploaded once and named from then on; None: they travel in each request."""

    def __post_init__(self) -> None:
        for name in ("timeout", "first_token_timeout", "idle_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidArgument(f"{name}: expected more than 0 seconds, got {value}")
        if self.max_retries is not None and self.max_retries < 0:
            raise InvalidArgument(f"max_retries: expected 0 or more, got {self.max_retries}")

    def changed(self, **options: Any) -> CallSettings:
        """A copy. Raises InvalidArgument for names that are no options."""
        known = [item.name for item in fields(self)]
        if unknown := sorted(options.keys() - set(known)):
            raise InvalidArgument(f"unknown options: {', '.join(unknown)}; known are {', '.join(known)}")
        return replace(self, **options)


class CallOptions(TypedDict, total=False):
    """The arguments of `with_options`; None stands for no limit."""

    timeout: float | None
    max_retries: int | None
    first_token_timeout: float | None
    idle_timeout: float | None
    upload_above: int | None


@dataclass(frozen=True)
class Settings:
    """All that makes a gRPC client. Plain data: it is what a pickled client consists of."""

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


def channel_credentials(tls: TLSConfig) -> Any:
    """`grpc.ChannelCredentials`; reads the files now, so that renewed ones are seen by the next channel."""
    import grpc

    def content(item: str | os.PathLike[str] | bytes | None, name: str) -> bytes | None:
        try:
            return item if item is None or isinstance(item, bytes) else Path(item).read_bytes()
        except OSError as error:
            raise InvalidArgument(f"tls.{name}: cannot read {item!r}: {error.strerror}") from error

    return grpc.ssl_channel_credentials(
        root_certificates=content(tls.ca, "ca"),
        private_key=content(tls.key, "key"),
        certificate_chain=content(tls.certificate, "certificate"),
    )


def stub_class(service: str) -> Any:
    """The stub of "inference", "model" or another of our services, loaded now: importing gRPC takes its time."""
    module = importlib.import_module(f"saccade.v1.{service}_pb2_grpc")
    return getattr(module, f"{service.capitalize()}ServiceStub")


_LONGEST_WAIT = 8.0
_SHORTEST_ATTEMPT = 0.1
"""Seconds. With less than this left after the wait there is no further attempt."""


class Deadline:
    """A total time that all attempts of one call share."""

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if timeout is not None and not timeout > 0:
            raise InvalidArgument(f"timeout: expected more than 0 seconds, got {timeout}")
        self._clock = clock
        self._end = None if timeout is None else clock() + timeout

    def remaining(self) -> float | None:
        """Seconds left, never negative; None if there is no limit."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def left(self) -> float | None:
        """The same as the timeout of a further call: one that has run out is left a millisecond to say so."""
        remaining = self.remaining()
        return None if remaining is None else max(0.001, remaining)


def retry_delay(
    error: SaccadeError,
    attempt: int,
    max_retries: int | None,
    deadline: Deadline,
    random_unit: Callable[[], float] = random.random,
) -> float | None:
    """`delay_within` for what is left of a deadline."""
    return delay_within(error, attempt, max_retries, deadline.remaining(), random_unit)


def delay_within(
    error: SaccadeError,
    attempt: int,
    max_retries: int | None,
    remaining: float | None,
    random_unit: Callable[[], float] = random.random,
) -> float | None:
    """Seconds to wait before trying again, or None if the call has failed for good.

    The wait doubles from half a second to 8, with jitter, and is never shorter than the server asked for. Where little
    time is left it is half of that. It is None where it would leave no time for an attempt: the caller then gets the
    error that says why, not a deadline that says nothing.

    Args:
        attempt: how many attempts have failed, this one included.
        max_retries: None for any number.
        remaining: seconds until the call has to be over; None for no limit.
    """
    if not error.retryable or (max_retries is not None and attempt > max_retries):
        return None
    delay = min(_LONGEST_WAIT, 0.5 * 2 ** min(attempt - 1, 10)) * (0.5 + 0.5 * random_unit())
    asked = max(0.0, error.retry_after or 0.0)
    if error.retry_after is not None:
        delay = asked + delay * 0.2
    if remaining is None or delay < remaining:
        return delay
    delay = max(asked, remaining / 2)
    return delay if remaining - delay >= _SHORTEST_ATTEMPT else None
