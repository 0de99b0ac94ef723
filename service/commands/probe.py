"""`saccade probe HOST:PORT`: exit code 0 if the server's health is SERVING. For orchestrators whose own gRPC probes do
not support TLS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from service.common.option import LONGEST_TIME, ConfigError, check_addresses, is_local
from service.encoding.credentials import client_credentials


def main(argv: Sequence[str]) -> int:
    """Returns 0 if the server's health is SERVING, and 1 if it has another status or does not answer. Raises
    ConfigError for an invalid argument."""
    parser = argparse.ArgumentParser("saccade probe", description="Ask a server whether it is healthy.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="use TLS and trust the certificates in FILE")
    parser.add_argument("--cert", metavar="FILE", help="own certificate, for servers with --tls-client-ca")
    parser.add_argument("--cert-key", metavar="FILE", help="private key of --cert")
    parser.add_argument("--server-name", metavar="NAME", help="the name in the server's certificate")
    parser.add_argument("--service", default="", help="ask about one gRPC service; default: the whole server")
    parser.add_argument(
        "--timeout",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time to wait for the answer (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    check_addresses("HOST:PORT", (options.address,), targets=True)
    if not 0 < options.timeout <= LONGEST_TIME:  # with larger numbers gRPC's deadline is over at once
        raise ConfigError(
            f"--timeout: expected more than 0 and at most {LONGEST_TIME} seconds, got {options.timeout:g}"
        )
    credentials = _credentials(options)
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    settings: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)] if is_local(options.address) else []
    if options.server_name:
        settings.append(("grpc.ssl_target_name_override", options.server_name))
    if credentials is None:
        channel = grpc.insecure_channel(options.address, settings)
    else:
        channel = grpc.secure_channel(options.address, credentials, settings)
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=options.service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=options.timeout).status
        except grpc.RpcError as error:
            print(f"{options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    serving = status == health_pb2.HealthCheckResponse.SERVING
    if not serving:
        print(f"{options.address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}", file=sys.stderr)
    return 0 if serving else 1


def _credentials(options: argparse.Namespace) -> Any:
    """`grpc.ChannelCredentials`, or None without TLS. Raises ConfigError."""
    if options.ca is None:
        for name in ("cert", "cert_key", "server_name"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: has no effect without TLS; set --ca")
        return None
    return client_credentials(options.ca, options.cert, options.cert_key, ("--ca", "--cert", "--cert-key"))
