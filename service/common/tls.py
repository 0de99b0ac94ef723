"""Certificates and keys in files, checked before a transport uses them."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from typing import NamedTuple

from service.common.config import ConfigError, HttpFrontOptions, ServerOptions
from service.common.small_files import read_small


class TlsFiles(NamedTuple):
    """Paths of PEM files."""

    certificate: str
    key: str
    authority: str | None
    """The CA that must have signed the clients' certificates; None: clients need no certificate."""

    @property
    def options(self) -> str:
        """The names of the options that are set, for errors."""
        return ", ".join(f"tls_{name}" for name, path in zip(("cert", "key", "client_ca"), self) if path is not None)

    @property
    def paths(self) -> list[str]:
        return [path for path in self if path is not None]


def tls_files(options: ServerOptions | HttpFrontOptions) -> TlsFiles | None:
    """The files that the TLS options name; None if no TLS option is set. Raises ConfigError if the certificate or its
    key is missing."""
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    return TlsFiles(
        *certificate_and_key(options.tls_cert, options.tls_key, ("tls_cert", "tls_key")), options.tls_client_ca
    )


def certificate_and_key(certificate: str | None, key: str | None, names: tuple[str, str]) -> tuple[str, str]:
    """The paths of a certificate and its key. Raises ConfigError with the option's name if one of them is missing."""
    if certificate is None or key is None:
        missing = names[0] if certificate is None else names[1]
        raise ConfigError(f"{missing}: TLS needs both a certificate and its key, but this option is not set")
    return certificate, key


def check_client_files(authority: str, certificate: str | None, key: str | None, names: tuple[str, str, str]) -> None:
    """Checks the PEM files of a client that trusts servers whose certificates `authority` has signed, and has a
    certificate of its own unless `certificate` and `key` are both None. `names`: of their options, for errors. Raises
    ConfigError."""
    if certificate is not None or key is not None:
        check_pair(*certificate_and_key(certificate, key, names[1:]), ", ".join(names[1:]))
    check_authority(authority, names[0])


def is_loopback(host: str, name: str) -> bool:
    """Whether the host is a loopback address. `name`: of the option that names it. Raises ConfigError for a host name
    that does not resolve."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        raise ConfigError(
            f"{name}: {host!r} is neither an IP address nor a host name that resolves on this machine"
        ) from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def read_pem(path: str, name: str) -> bytes:
    """Reads the file that the option `name` names. Raises ConfigError."""
    try:
        return read_small(path)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None


def check_authority(path: str, name: str) -> None:
    """Raises ConfigError unless the file that the option `name` names holds certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{name}: {path}: no certificate in PEM format: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{name}: {path}: {error.strerror}") from None


def check_pair(certificate: str, key: str, names: str) -> None:
    """Raises ConfigError unless certificate and key belong together; while they are renewed, they may not. `names`: of
    the options, for errors."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"{names}: not a certificate and its unencrypted private key: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{names}: {error.strerror}") from None
