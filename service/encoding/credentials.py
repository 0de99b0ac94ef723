"""The credentials with which this process authenticates itself to gRPC servers, such as encoders on other hosts, and
verifies them. Those for encoders are read again when their files change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from service.common.config import ConfigError, EngineOptions
from service.common.tls import check_client_files, is_loopback, read_pem
from service.common.watch import Watched


def client_credentials(authority: str, certificate: str | None, key: str | None, names: tuple[str, str, str]) -> Any:
    """`grpc.ChannelCredentials` of a client that trusts servers whose certificates `authority` has signed, and has a
    certificate of its own unless `certificate` and `key` are both None. All are paths of PEM files; `names`: of their
    options, for errors. Raises ConfigError."""
    check_client_files(authority, certificate, key, names)
    pair = [read_pem(path, name) for path, name in ((key, names[2]), (certificate, names[1])) if path is not None]
    return grpc.ssl_channel_credentials(read_pem(authority, names[0]), *pair)


def channel_credentials(options: EngineOptions) -> Callable[[], Any]:
    """A function that returns the present `grpc.ChannelCredentials` for connections to encoders, or None without TLS.
    Raises ConfigError."""
    authority, certificate, key = options.encoder_ca, options.encoder_cert, options.encoder_cert_key
    if authority is None:
        if certificate is not None or key is not None:
            raise ConfigError("encoder_ca: a certificate for encoders needs TLS; name the authority of theirs")
        if options.encoder_api_key is not None:
            _check_loopback(options.encoders)
        return lambda: None

    def read() -> Any:
        return client_credentials(authority, certificate, key, names)

    names = "encoder_ca", "encoder_cert", "encoder_cert_key"
    read()  # its errors name the option of each file
    paths = [path for path in (authority, certificate, key) if path is not None]
    return Watched(", ".join(names), paths, lambda _: read()).current


def _check_loopback(encoders: Sequence[str]) -> None:
    """Raises ConfigError if an API key that is sent without TLS would leave this machine on its way to an encoder."""
    far = [address for address in encoders if not is_loopback(address.rpartition(":")[0], "encoders")]
    if far:
        raise ConfigError(f"encoder_ca: without TLS the key in encoder_api_key can be read on its way to {far[0]}")
