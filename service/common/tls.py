"""Certificates and keys in files, checked before a transport uses them."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path

from service.common.config import ConfigError


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address. Raises ConfigError for a host name that does not resolve."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        raise ConfigError(f"{host!r} has no address") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def read_pem(path: str, name: str) -> bytes:
    """Reads the file that the option `name` names. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None


def check_pair(certificate: str, key: str, names: str) -> None:
    """Raises ConfigError unless certificate and key belong together, which may not be so during a renewal."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"{names}: no certificate with its unencrypted key: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{names}: {error.strerror}") from None
