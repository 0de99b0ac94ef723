"""Settings that the two gRPC clients share: configuration, channel options, credentials and retry limits."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from saccade._core.affinity import CHOICES, HEADER, LB_CONFIG, Affinity, call_key
from saccade._core.ranges import check_count, check_seconds, check_string, check_strings
from saccade._core.targets import GRPC_SCHEMES, is_local, lacks_brackets
from saccade.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from saccade._core.steps import Call

API_KEY_VARIABLE = "SACCADE_API_KEY"

_BALANCING = frozenset({"grpc.service_config", "grpc.lb_policy_name"})
ROUND_ROBIN = '{"loadBalancingConfig":[{"round_robin":{}}]}'
"""The service config for several addresses without affinity."""

DEFAULT_OPTIONS: Mapping[str, int] = {
    # Answers with logprobs can exceed gRPC's default of 4 MiB; the size of requests is limited by the server.
    "grpc.max_receive_message_length": 256 * 2**20,
    "grpc.max_send_message_length": -1,
    # Finds connections that have died silently during a call; an idle client sends no pings.
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 0,
    # The client retries by itself: gRPC's retries do not read the server's error details and do not know what a stream
    # has delivered.
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
    """The certificate authorities that are trusted to sign the server's certificate."""
    certificate: str | os.PathLike[str] | bytes | None = None
    """The client's own certificate chain, for servers that ask for one."""
    key: str | os.PathLike[str] | bytes | None = field(default=None, repr=False)
    """The private key of `certificate`; not part of the repr."""
    server_name: str | None = None
    """The name that the server's certificate must have, if it is not that of the address."""

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str | os.PathLike | bytes)):
                raise InvalidArgument(f"tls.{name}: expected a path or bytes, got {type(value).__name__}")
        if self.server_name is not None:
            check_string("tls.server_name", self.server_name)
        if (self.certificate is None) != (self.key is None):  # gRPC would end the process
            missing, given = ("key", "certificate") if self.key is None else ("certificate", "key")
            raise InvalidArgument(f"tls.{missing}: expected with tls.{given}, got None; give both or neither")


@dataclass(frozen=True)
class CallSettings:
    """Settings of a client's calls; `with_options` makes a copy of the client with other ones."""

    timeout: float | None = 600.0
    """Seconds for a whole call, retries included; None for no limit."""
    max_retries: int | None = None
    """Maximum number of retries of a call that failed as UNAVAILABLE, or because of a rate limit with a time to wait;
    for a stream, counted since its last part. None: any number within the timeout."""
    first_token_timeout: float | None = None
    """Seconds that a reader of a stream waits for its first part, time in queues included; None for no limit."""
    idle_timeout: float | None = None
    """Seconds that a reader of a stream waits for each further part; None for no limit."""
    upload_above: int | None = 2 * 2**20
    """Images and videos of more bytes than this are uploaded once and then named by their ids; None: all are sent in
    each request."""

    def __post_init__(self) -> None:
        for name in ("timeout", "first_token_timeout", "idle_timeout"):
            check_seconds(name, getattr(self, name))
        for name in ("max_retries", "upload_above"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 0)

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
    """All settings of a gRPC client, as plain data: a client is pickled as its settings."""

    address: str
    api_key: str | None = field(default=None, repr=False)
    tls: TLSConfig | None = None
    calls: CallSettings = CallSettings()
    channel_options: tuple[tuple[str, Any], ...] = ()
    affinity: Affinity | None = None

    def all_channel_options(self) -> list[tuple[str, Any]]:
        options: dict[str, Any] = dict(DEFAULT_OPTIONS)
        if is_local(self.address):  # http_proxy is for other machines: a proxy would connect to itself
            options["grpc.enable_http_proxy"] = 0
        if self.tls is not None and self.tls.server_name is not None:
            options["grpc.ssl_target_name_override"] = self.tls.server_name
        if self.affinity is not None:
            options["grpc.service_config"] = LB_CONFIG
        elif "," in self.address:
            options["grpc.service_config"] = ROUND_ROBIN
        options.update(self.channel_options)
        return list(options.items())

    def call_metadata(self, call: Call) -> tuple[tuple[str, str], ...]:
        metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()
        key = call_key(call, self.affinity) if self.affinity is not None else ""
        return (*metadata, (HEADER, key)) if key else metadata


def make_settings(
    address: str | Sequence[str],
    *,
    api_key: str | None,
    tls: bool | TLSConfig | None,
    timeout: float | None,
    max_retries: int | None,
    channel_options: Mapping[str, Any] | None,
    affinity: Affinity | None = None,
) -> Settings:
    """Checks the arguments of a client and fills in the API key from the environment.

    Raises:
        InvalidArgument: an address without a port, a key that no header can hold, a timeout that is not positive, a
            negative number of retries, an unknown affinity.
    """
    given = check_strings("address", address)
    several = given[0].split(",") if len(given) == 1 and not given[0].startswith(GRPC_SCHEMES) else given
    target = several[0] if len(several) == 1 else _target_of(several)
    if not target.startswith(GRPC_SCHEMES):
        _check_host_and_port(target)
    if affinity not in (None, *CHOICES):
        raise InvalidArgument(f"affinity: expected one of {', '.join(CHOICES)} or None, got {affinity!r}")
    if affinity is not None and (taken := _BALANCING & (channel_options or {}).keys()):
        raise InvalidArgument(f"affinity: channel_options {min(taken)!r} also sets the load balancing; give only one")
    if not isinstance(channel_options, Mapping | None):
        raise InvalidArgument(f"channel_options: expected a mapping, got {type(channel_options).__name__}")
    if not (tls is None or isinstance(tls, bool | TLSConfig)):
        raise InvalidArgument(f"tls: expected True, False or a TLSConfig, got {tls!r}")
    if tls and len(several) > 1 and not (isinstance(tls, TLSConfig) and tls.server_name):
        raise InvalidArgument("tls: several addresses need TLSConfig(server_name=...), the name in their certificates")
    return Settings(
        address=target,
        api_key=_api_key(api_key),
        tls=TLSConfig() if tls is True else tls or None,
        calls=CallSettings(timeout=timeout, max_retries=max_retries),
        channel_options=tuple((channel_options or {}).items()),
        affinity=affinity,
    )


def _api_key(given: str | None) -> str | None:
    """The key, which is never part of an error. Raises InvalidArgument for one that no header can hold."""
    name = "api_key" if given is not None else API_KEY_VARIABLE
    key = check_string(name, given if given is not None else os.environ.get(API_KEY_VARIABLE, ""))
    for position, character in enumerate(key):
        if not " " <= character <= "~":
            raise InvalidArgument(
                f"{name}: expected printable ASCII, got {ascii(character)} at position {position} of {len(key)}"
            )
    return key or None


def _check_host_and_port(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (colon and host and "/" not in host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise InvalidArgument(f"address: expected HOST:PORT with a port up to 65535, got {address!r}")
    if lacks_brackets(host):
        raise InvalidArgument(f"address: expected an IPv6 address in brackets, [ADDRESS]:PORT, got {address!r}")


def _target_of(addresses: Sequence[str]) -> str:
    """gRPC's target for several addresses. They have to be numeric, since a target can have only one name to resolve.

    Raises:
        InvalidArgument: no address, an address that is not IP:PORT, or IPv4 and IPv6 mixed.
    """
    if not addresses:
        raise InvalidArgument("address: expected one or more addresses, got none")
    versions = set()
    for address in addresses:
        _check_host_and_port(address)
        host = address.rpartition(":")[0]
        try:
            versions.add(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version)
        except ValueError:
            raise InvalidArgument(
                f"address: expected IP:PORT for each of several addresses, got {address!r}; to use a name, give one "
                "that resolves to all replicas, such as dns:///NAME:PORT of a headless Kubernetes service"
            ) from None
    if len(versions) > 1:
        raise InvalidArgument("address: expected IPv4 or IPv6 addresses, got both")
    return f"ipv{versions.pop()}:{','.join(addresses)}"
