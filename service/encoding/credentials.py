"""The credentials with which this process authenticates itself to encoders on other hosts, and verifies them. Files are
watched: renewed certificates are used from the next connection on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from service.common.config import ConfigError, EngineOptions
from service.common.tls import check_authority, check_pair, is_loopback, read_pem
from service.common.watch import Watched


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
    if (certificate is None) != (key is None):
        missing = "encoder_cert" if certificate is None else "encoder_cert_key"
        raise ConfigError(f"{missing}: TLS needs both a certificate and its key, and this option is not set")

    def read() -> Any:
        pair: list[bytes | None] = [None, None]
        if certificate is not None and key is not None:
            check_pair(certificate, key, "encoder_cert, encoder_cert_key")
            pair = [read_pem(key, "encoder_cert_key"), read_pem(certificate, "encoder_cert")]
        check_authority(authority, "encoder_ca")
        return grpc.ssl_channel_credentials(read_pem(authority, "encoder_ca"), *pair)

    read()  # its errors name the option of each file
    paths = [path for path in (authority, certificate, key) if path is not None]
    return Watched("encoder_ca, encoder_cert, encoder_cert_key", paths, lambda _: read()).current


def _check_loopback(encoders: Sequence[str]) -> None:
    """Raises ConfigError if an API key that is sent without TLS would leave this machine on its way to an encoder."""
    far = [address for address in encoders if not is_loopback(address.rpartition(":")[0], "encoders")]
    if far:
        raise ConfigError(f"encoder_ca: without TLS the key in encoder_api_key can be read on its way to {far[0]}")
