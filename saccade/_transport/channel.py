"""gRPC channels: credentials and stubs, loaded when they are first needed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from saccade._core.settings import TLSConfig
from saccade.errors import InvalidArgument

left_to_the_parent: list[Any] = []
"""Channels that a fork has copied into this process: closing them, or letting them be collected, would disturb the
connections of the process they belong to."""


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
