"""`saccade probe HOST:PORT`: exit code 0 if the server says SERVING. For orchestrators whose own probes have no TLS."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if the server says something else or does not answer."""
    parser = argparse.ArgumentParser("saccade probe", description="Ask a server whether it is healthy.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="speak TLS, and trust the certificates in FILE")
    parser.add_argument("--server-name", metavar="NAME", help="the name in the server's certificate")
    parser.add_argument("--service", default="", help="one service instead of the whole server")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    settings = [("grpc.ssl_target_name_override", options.server_name)] if options.server_name else []
    if options.ca is None:
        channel = grpc.insecure_channel(options.address, settings)
    else:
        credentials = grpc.ssl_channel_credentials(Path(options.ca).read_bytes())
        channel = grpc.secure_channel(options.address, credentials, settings)
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=options.service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=options.timeout).status
        except grpc.RpcError as error:
            print(f"{options.address}: {error.code().name}", file=sys.stderr)
            return 1
    serving = status == health_pb2.HealthCheckResponse.SERVING
    if not serving:
        print(f"{options.address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}", file=sys.stderr)
    return 0 if serving else 1


if __name__ == "__main__":
    raise SystemExit(main())
