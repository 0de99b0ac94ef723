"""Names of gRPC targets, for the SDK and for the server's options that take such names."""

from __future__ import annotations

GRPC_SCHEMES = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:", "google-c2p:")
"""Prefixes of gRPC target names; anything else is HOST:PORT."""
