"""The command line options that say how to reach a server."""

from __future__ import annotations

import argparse
import os

from saccade._core.affinity import CHOICES
from saccade._core.settings import TLSConfig
from saccade.errors import InvalidArgument

SERVER_VARIABLE = "SACCADE_SERVER"
DEFAULT_SERVER = "127.0.0.1:50051"


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        metavar="HOST:PORT[,...]",
        default=os.environ.get(SERVER_VARIABLE, DEFAULT_SERVER),
        help=f"the server's address (default: ${SERVER_VARIABLE}, else {DEFAULT_SERVER})",
    )
    parser.add_argument("--tls", action="store_true", help="use TLS and trust the system's certificates")
    parser.add_argument("--ca", metavar="FILE", help="use TLS and trust the certificates in FILE")
    parser.add_argument("--cert", metavar="FILE", help="own certificate, for servers with --tls-client-ca")
    parser.add_argument("--cert-key", metavar="FILE", help="private key of --cert")
    parser.add_argument(
        "--server-name",
        metavar="NAME",
        help="the name in the server's certificate (default: that of the address; several addresses need one)",
    )


def add_affinity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--affinity",
        choices=CHOICES,
        help="with several replicas, send requests with the same image (auto: or system prompt) to the same replica",
    )


def tls_settings(options: argparse.Namespace) -> TLSConfig | bool:
    """The `tls` argument of a client for the options of `add_connection`. Raises InvalidArgument."""
    if not options.tls and options.ca is None:
        for name in ("cert", "cert_key", "server_name"):
            if getattr(options, name) is not None:
                raise InvalidArgument(f"--{name.replace('_', '-')}: has no effect without TLS; set --tls or --ca")
        return False
    if (options.cert is None) != (options.cert_key is None):
        missing, given = ("--cert", "--cert-key") if options.cert is None else ("--cert-key", "--cert")
        raise InvalidArgument(f"{missing}: {given} needs it; give both or neither")
    if "," in options.server and options.server_name is None:
        raise InvalidArgument("--server-name: several addresses with TLS need it; it is the name in their certificates")
    return TLSConfig(options.ca, options.cert, options.cert_key, options.server_name)
