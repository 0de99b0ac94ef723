"""What the option classes of `service.common.config` are made of: the description of one option, and checks of
values."""

from __future__ import annotations

import errno
import socket
from dataclasses import field
from typing import Any

from saccade._core.targets import GRPC_SCHEMES, lacks_brackets
from saccade._core.targets import is_local as is_local

LAST_PORT = 65535
GRPC_MAXIMUM = 2**31 - 1
"""The largest value of a gRPC option; times are in ms."""
LONGEST_WAIT = GRPC_MAXIMUM // 1000
"""Largest value, in seconds, of times that are passed to functions that wait: they count milliseconds in 32 bits."""
LONGEST_TIME = 10**9
"""Largest value, in seconds, of times that are only compared with clocks."""
INT32, INT64 = 2**31 - 1, 2**63 - 1
"""The largest values of fields of messages."""


class ConfigError(ValueError):
    """An option has a value that is not allowed; the message names it and the allowed values."""


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None,
    maximum: float | None = None, size: bool = False,
) -> Any:  # fmt: skip
    """A field with its help text; `size` accepts suffixes such as 512Mi."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "size": size}
    return field(default=default, metadata=metadata)


def without_brackets(host: str) -> str:
    """The host, if it is an IPv6 address in brackets, as in `host_port`, without them."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int) -> str:
    """`host:port`, as clients write it: IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cannot_listen(host_option: str, port_option: str, host: str, port: int, error: OSError) -> ConfigError:
    """The error for an address that cannot be bound. It names the option at fault: the host's if this machine has no
    such address, else the port's."""
    where = host_port(host, port)
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ConfigError(
            f"{host_option}: cannot listen on {where}: {error.strerror}; an address of this machine would work, such "
            "as 127.0.0.1"
        )
    return ConfigError(f"{port_option}: cannot listen on {where}: {error.strerror}; another port or 0 would work")


def check_addresses(name: str, addresses: tuple[str, ...], *, targets: bool = False) -> None:
    """Raises ConfigError unless each address is HOST:PORT, or with `targets` any gRPC target name, and no address is
    listed twice. `name`: of the option."""
    for address in addresses:
        if targets and address.startswith(GRPC_SCHEMES):
            continue
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 1 <= int(port) <= LAST_PORT):
            raise ConfigError(f"{name}: {address!r} is not HOST:PORT with a port from 1 to {LAST_PORT}")
        if lacks_brackets(host):
            raise ConfigError(f"{name}: {address!r} is an IPv6 address without brackets; [ADDRESS]:PORT would work")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"{name}: an address is listed twice in {','.join(addresses)}")
