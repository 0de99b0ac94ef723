"""gRPC channels, credentials and stubs; gRPC is imported when they are first needed."""

from __future__ import annotations

import importlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade._core.ranges import file_reason
from saccade._core.settings import Settings, TLSConfig
from saccade.errors import FailedPrecondition, InvalidArgument

left_to_the_parent: list[Any] = []
"""Channels that a fork has copied into this process. They are never closed or garbage-collected here, which would
disturb the parent's connections."""


AFFINITY_NEEDS = (1, 70)
"""The first gRPC whose hash ring reads the key from a header."""


def channel_options(settings: Settings) -> list[tuple[str, Any]]:
    """The options of a channel. With affinity, also sets the environment variable that enables the header in gRPC's
    hash ring, which is experimental: without it all calls would wait until their deadlines.

    Raises:
        FailedPrecondition: affinity needs a newer gRPC.
    """
    if settings.affinity is not None:
        import grpc

        version = str(grpc.__version__)
        if tuple(int(part) for part in version.split(".")[:2]) < AFFINITY_NEEDS:
            least = ".".join(map(str, AFFINITY_NEEDS))
            raise FailedPrecondition(f"affinity needs grpcio {least} or newer, {version} is installed")
        os.environ["GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"] = "true"
    return settings.all_channel_options()


def channel_credentials(tls: TLSConfig) -> Any:
    """`grpc.ChannelCredentials`. Reads the files at each call, so that a new channel sees renewed certificates.

    Raises:
        InvalidArgument: a file cannot be read or is empty, or `ca` holds no certificate.
    """
    import grpc

    def content(item: str | os.PathLike[str] | bytes | None, name: str) -> bytes | None:
        try:
            found = item if item is None or isinstance(item, bytes) else Path(item).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"tls.{name}: cannot read {item!r}: {file_reason(error)}") from error
        if found is not None and not found.strip():  # gRPC would use the system's default instead
            raise InvalidArgument(f"tls.{name}: expected PEM, got nothing")
        return found

    authorities = content(tls.ca, "ca")
    if authorities is not None:
        text = authorities.decode("ascii", "backslashreplace")  # comments between the certificates may be anything
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
        except ssl.SSLError as error:
            raise InvalidArgument(f"tls.ca: no certificate in PEM format: {error.reason or error}") from error
    return grpc.ssl_channel_credentials(
        root_certificates=authorities,
        private_key=content(tls.key, "key"),
        certificate_chain=content(tls.certificate, "certificate"),
    )


class Messages:
    """Iterates over the messages of a call, and keeps the error that ended the iteration: gRPC reports only that there
    was one."""

    def __init__(self, messages: Iterator[Any]) -> None:
        self._messages = messages
        self.error: Exception | None = None

    def __iter__(self) -> Messages:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


def stub_class(service: str) -> Any:
    """The stub class of a service such as "inference" or "model"; imports gRPC, which is slow."""
    module = importlib.import_module(f"saccade.v1.{service}_pb2_grpc")
    return getattr(module, f"{service.capitalize()}ServiceStub")
