"""Names of gRPC targets, for the SDK and for the server's options that take such names."""

from __future__ import annotations

import ipaddress

GRPC_SCHEMES = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:", "google-c2p:")
"""Prefixes of gRPC target names; anything else is HOST:PORT."""


def lacks_brackets(host: str) -> bool:
    """Whether the HOST of HOST:PORT is an IPv6 address without brackets, so that it is not clear where it ends."""
    return ":" in host and not (host.startswith("[") and host.endswith("]"))


def is_local(target: str) -> bool:
    """Whether all addresses of a target name this machine, judged by their text alone."""
    if target.startswith("dns:"):  # dns:[//authority/]host[:port]; without an authority often dns:///host
        name = target.removeprefix("dns:")
        target = name.removeprefix("//").partition("/")[2] if name.startswith("//") else name
    addresses = target.removeprefix("ipv4:").removeprefix("ipv6:").split(",")
    return all(_is_loopback(address.rpartition(":")[0].strip("[]")) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name other than localhost
        return False
