"""Checks of options that need no model. They run before a model is downloaded or loaded, so that mistakes are reported
at once."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path
from types import ModuleType

from service.common.auth import watch_keys
from service.common.config import ConfigError, ServerOptions
from service.common.folders import locked, temporary
from service.common.option import LAST_PORT, cannot_listen
from service.common.roles import warn_of_unused
from service.encoding.credentials import channel_credentials
from service.http.listen import bind, check_packages
from service.media.fetch import make_fetcher
from service.servers.credentials import server_credentials
from service.servers.exposure import check_exposure
from service.servers.from_options import frontend_limits
from service.servers.process_memory import check_process_memory
from service.telemetry.metrics import check_installed
from service.telemetry.sizes import check_sizes_file
from service.telemetry.tracing import check_endpoint


def check_options(options: ServerOptions) -> None:
    """Raises ConfigError for files, folders, ports and packages with which no model could be served here. They may
    still change while the model is loaded, so the code that uses them handles errors as well."""
    warn_of_unused(options)
    check_exposure(options)
    if options.role != "encoder":
        check_process_memory(options)
    server_credentials(options)
    channel_credentials(options)
    if _several(options):
        check_frontends(options)
    elif options.api_keys is not None:
        watch_keys(options.api_keys)
    check_sizes_file(options)
    if options.role == "encoder":
        from service.encoding.largest_item import (
            check_messages,  # imported here: it needs torch, and a frontend does not
        )

        check_messages(options)
    else:
        check_largest_message(options)
        make_fetcher(options, frontend_limits(options).media)
        check_batches(options)
        _check_folders(options)
        if options.vllm_engine:
            gateway()
        if options.otlp_endpoint is not None:
            check_endpoint(options.otlp_endpoint)
    if options.http_port is not None:
        check_packages()
        if options.http_file_dir is not None:
            locked(Path(options.http_file_dir), "http_file_dir").close()
    _check_ports(options)


def _several(options: ServerOptions) -> bool:
    return options.frontends > 1 and options.role != "encoder"


def check_frontends(options: ServerOptions) -> None:
    """Raises ConfigError for options that several frontends cannot implement together."""
    if options.batch_dir is not None:
        raise ConfigError(
            f"batch_dir: batches need a server with one frontend process, but frontends is {options.frontends}; "
            "use frontends 1"
        )
    if options.sizes_file is not None:
        raise ConfigError(
            f"sizes_file: only a server with one frontend process writes it, but frontends is {options.frontends}; "
            "use frontends 1"
        )
    divided = {name: getattr(options, name) for name in ("max_queue", "max_tenant_calls", "max_tenant_requests")}
    small = {name: total for name, total in divided.items() if total is not None and total < options.frontends}
    if small:
        raise ConfigError(
            f"{', '.join(small)}: {', '.join(map(str, small.values()))} cannot be divided among {options.frontends} "
            f"frontends; use at least {options.frontends}, or at most {min(small.values())} frontends"
        )
    if options.api_keys is not None:
        watch_keys(options.api_keys, options.frontends)


def check_largest_message(options: ServerOptions) -> None:
    """Raises ConfigError if a frontend could never hold a message of the largest size that it accepts."""
    share = options.max_inflight_bytes // options.frontends
    if share < options.max_message_bytes:
        each = f", {share} for each of {options.frontends} frontends," if options.frontends > 1 else ""
        raise ConfigError(
            f"max_inflight_bytes: {options.max_inflight_bytes} bytes{each} hold no message of max_message_bytes "
            f"({options.max_message_bytes}); at least {options.max_message_bytes * options.frontends} would work"
        )


def check_batches(options: ServerOptions) -> None:
    """Raises ConfigError if batches could occupy the whole queue."""
    rows, queue = options.batch_concurrency or 0, options.max_queue
    if rows >= queue:
        way = f"at most {queue - 1}" if queue > 1 else f"max_queue of at least {rows + 1}"
        raise ConfigError(
            f"batch_concurrency: {rows} rows would leave no room for other calls in max_queue ({queue}); {way} would "
            "work"
        )


def gateway() -> ModuleType:
    """The module that implements `vllm_engine`. Raises ConfigError if a package that it needs is not installed."""
    try:
        from service.rpc import vllm_engine
    except ModuleNotFoundError as error:
        raise ConfigError(f"vllm_engine: {error.name} is not installed: pip install smg-grpc-proto") from error
    return vllm_engine


def _check_folders(options: ServerOptions) -> None:
    """Raises ConfigError for a folder that cannot be used, that two options name, or that another process uses, and if
    there is none for temporary files."""
    if options.media_dir is None or options.batch_dir is None:
        temporary()
    named: dict[Path, str] = {}
    for option in ("media_dir", "batch_dir"):
        _check_folder(options, option)
        if (folder := getattr(options, option)) is None:
            continue
        if (other := named.setdefault(Path(folder).resolve(), option)) != option:
            raise ConfigError(f"{option}: {folder} is also {other}; each needs a folder of its own")
        locked(Path(folder), option).close()


def _check_folder(options: ServerOptions, option: str) -> None:
    """Creates the folder that an option names. Raises ConfigError if no file can be written in it."""
    folder = getattr(options, option)
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: {folder}: {error.strerror}") from None


def _check_ports(options: ServerOptions) -> None:
    """Raises ConfigError for a port that another program uses, or that two options name. Listens on each for a moment;
    the ports are free again on return."""
    with contextlib.ExitStack() as held:
        if options.http_port:
            held.enter_context(bind(options, options.http_port))
        with contextlib.ExitStack() as apart:  # any free port must not be one that is checked below
            try:
                _hold(held if options.port else apart, options.host, options.port)
            except OSError as error:
                if not _several(options):  # else `frontends.reserved_port` reports it
                    raise cannot_listen("host", "port", options.host, options.port, error) from None
        for port in _metrics_ports(options):
            with contextlib.ExitStack() as apart:
                try:
                    _hold(held if port else apart, options.metrics_host, port)
                except OSError as error:
                    raise cannot_listen("metrics_host", "metrics_port", options.metrics_host, port, error) from None


def _metrics_ports(options: ServerOptions) -> range:
    """The ports of the Prometheus endpoints, one for each frontend; 0 for any free ones, empty without endpoints.
    Raises ConfigError if there are not enough ports, or if prometheus-client is not installed."""
    first = options.metrics_port
    if first is None:
        return range(0)
    check_installed(first)
    last = first + (options.frontends - 1 if _several(options) else 0)
    if last > LAST_PORT:
        raise ConfigError(
            f"metrics_port: {options.frontends} frontends need as many ports, {first} to {last}, but the last port is "
            f"{LAST_PORT}; at most {LAST_PORT - options.frontends + 1} would work"
        )
    return range(first, last + 1) if first else range(1)


def _hold(held: contextlib.ExitStack, host: str, port: int) -> None:
    """Listens, until `held` is closed, on those addresses of the host that can be used, as gRPC does. If there is none,
    raises the last OSError."""
    failure: OSError | None = None
    listening = False
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with contextlib.ExitStack() as failing:
            try:
                listener = failing.enter_context(socket.socket(family, kind))  # fails on a machine without IPv6
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(1)
            except OSError as error:
                failure = error
            else:
                held.push(failing.pop_all())
                listening = True
    if failure is not None and not listening:
        raise failure
