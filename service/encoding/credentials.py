"""The credentials with which this process authenticates itself to encoders on other hosts, and verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from service.common.config import ConfigError, EngineOptions
from service.common.tls import check_authority, check_pair, is_loopback, read_pem


def channel_credentials(options: EngineOptions) -> Any:
    """`grpc.ChannelCredentials` for connections to encoders, or None without TLS. Raises ConfigError."""
    if options.encoder_ca is None:
        if options.encoder_cert is not None or options.encoder_cert_key is not None:
            raise ConfigError("encoder_ca: a certificate for encoders needs TLS; name the authority of theirs")
        if options.encoder_api_key is not None:
            _check_loopback(options.encoders)
        return None
    pair: list[bytes | None] = [None, None]
    if options.encoder_cert is not None or options.encoder_cert_key is not None:
        if options.encoder_cert is None or options.encoder_cert_key is None:
            missing = "encoder_cert" if options.encoder_cert is None else "encoder_cert_key"
            raise ConfigError(f"{missing}: TLS needs both a certificate and its key, and this option is not set")
        check_pair(options.encoder_cert, options.encoder_cert_key, "encoder_cert, encoder_cert_key")
        pair = [read_pem(options.encoder_cert_key, "encoder_cert_key"), read_pem(options.encoder_cert, "encoder_cert")]
    check_authority(options.encoder_ca, "encoder_ca")
    return grpc.ssl_channel_credentials(read_pem(options.encoder_ca, "encoder_ca"), *pair)


def _check_loopback(encoders: Sequence[str]) -> None:
    """Raises ConfigError if an API key that is sent without TLS would leave this machine on its way to an encoder."""
    far = [address for address in encoders if not is_loopback(address.rpartition(":")[0], "encoders")]
    if far:
        raise ConfigError(f"encoder_ca: without TLS the key in encoder_api_key can be read on its way to {far[0]}")
