"""Options of the server: field, default, unit. `ServerOptions` has all of them; those of the engine are declared in
engine_options.py, those of the HTTP server in http_options.py. `service.common.settings` reads their values."""

from __future__ import annotations

from dataclasses import dataclass

from service.common.engine_options import EngineOptions as EngineOptions
from service.common.http_options import HttpFrontOptions as HttpFrontOptions
from service.common.http_options import HttpOptions as HttpOptions
from service.common.http_options import check_names
from service.common.option import GRPC_MAXIMUM, INT32, INT64, LAST_PORT, LONGEST_TIME, LONGEST_WAIT, without_brackets
from service.common.option import ConfigError as ConfigError
from service.common.option import option as _option


@dataclass(frozen=True)
class ListenOptions:
    """Where the server listens, and who may call it."""

    host: str = _option(
        "127.0.0.1",
        "address to listen on; an address that other machines can reach needs TLS and API keys (or client "
        "certificates), or insecure",
    )
    port: int = _option(50051, "port to listen on; 0: any free port", minimum=0, maximum=LAST_PORT)
    frontends: int = _option(
        1,
        "frontend processes that serve gRPC on the port and share one engine; use more than 1 only if one process "
        "cannot keep up",
        minimum=1,
    )
    insecure: bool = _option(
        False, "listen on an address that other machines can reach even without TLS or without API keys"
    )
    tls_cert: str | None = _option(None, "PEM file of the server's certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of the private key of tls_cert, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the CA that must have signed the certificates of clients")
    api_keys: str | None = _option(None, "TOML file of API key hashes; read again when it changes")
    admin: bool = _option(False, "without API keys: let every caller use AdminService")
    vllm_engine: bool = _option(
        False, "also serve vllm.grpc.engine.VllmEngine, for gateways such as smg; needs smg-grpc-proto"
    )
    max_connection_streams: int = _option(
        1024, "concurrent calls on one connection; further calls wait in the client", minimum=1, maximum=GRPC_MAXIMUM
    )
    max_connection_age: float | None = _option(
        None,
        "seconds after which a client is asked to reconnect, so that it finds new servers; running calls continue; "
        "unset: never",
        minimum=1,
        maximum=LONGEST_WAIT,
    )
    max_connection_age_grace: float | None = _option(
        None, "seconds that calls may still run on a connection that has reached max_connection_age; unset: no limit",
        minimum=0, maximum=LONGEST_WAIT,
    )  # fmt: skip


@dataclass(frozen=True)
class CallOptions:
    """Limits on the number, size and duration of calls."""

    max_queue: int = _option(
        1024, "requests in the server, running and waiting; further ones are rejected", minimum=1, maximum=INT32
    )
    max_tenant_requests: int | None = _option(
        None, "requests of one tenant (API key) in the server, running and waiting; unset: half of max_queue", minimum=1
    )
    max_tenant_calls: int = _option(
        1024, "calls of one tenant (API key) at a time, of any method and over all its connections", minimum=1
    )
    max_message_bytes: int = _option(
        64 * 2**20, "largest request or response message", minimum=1024, maximum=GRPC_MAXIMUM, size=True
    )
    max_inflight_bytes: int = _option(
        512 * 2**20,
        "bytes of the request messages of all calls in progress; one tenant (API key) may use half, and always one "
        "message of max_message_bytes",
        minimum=1024,
        size=True,
    )
    max_decoders: int = _option(
        4,
        "with --role encoder: connected decoders, each with an equal share of max_inflight_bytes for its pixels",
        minimum=1,
    )
    receive_timeout: float = _option(
        120.0, "seconds that the request message of a call may take to arrive", minimum=0.001, maximum=LONGEST_TIME
    )
    default_timeout: float = _option(
        600.0, "seconds that a call without a deadline may take", minimum=0.001, maximum=LONGEST_TIME
    )
    stall_timeout: float = _option(
        60.0,
        "seconds that a client may pause while it reads a stream or sends an upload",
        minimum=0.001,
        maximum=LONGEST_TIME,
    )
    warmup: bool = _option(True, "no warm-up: do not answer one request internally before health becomes SERVING")
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0, maximum=LONGEST_TIME)


@dataclass(frozen=True)
class MediaOptions:
    """Images and videos: formats, limits, fetching and storage."""

    max_images_per_request: int = _option(16, "images in one request", minimum=0, maximum=INT32)
    max_image_bytes: int = _option(32 * 2**20, "encoded bytes of one image", minimum=1, maximum=INT64, size=True)
    max_image_pixels: int = _option(64_000_000, "pixels of one image", minimum=1, maximum=INT64, size=True)
    max_videos_per_request: int = _option(4, "videos in one request", minimum=0, maximum=INT32)
    max_video_bytes: int = _option(48 * 2**20, "encoded bytes of one video", minimum=1, maximum=INT64, size=True)
    max_video_file_frames: int = _option(20_000, "frames in a video file, sampled or not", minimum=1, maximum=INT32)
    max_video_pixels: int = _option(
        2**34,
        "pixels of one video: width x height x frames that have to be decoded",
        minimum=1,
        maximum=INT64,
        size=True,
    )
    image_workers: int = _option(
        2,
        "processes that decode images and videos; at least 2 are started, one of which never decodes videos",
        minimum=1,
    )
    image_timeout: float = _option(
        20.0, "seconds that decoding and preparing one image may take", minimum=0.001, maximum=LONGEST_WAIT
    )
    video_timeout: float = _option(
        120.0, "seconds that decoding and preparing one video may take", minimum=0.001, maximum=LONGEST_WAIT
    )
    preprocess_bytes: int = _option(
        2 * 2**30, "bytes of decoded images and videos that wait for the encoder", minimum=1, size=True
    )
    image_cache_bytes: int = _option(
        256 * 2**20, "bytes of the cache of decoded images and videos; 0: no cache", minimum=0, size=True
    )
    image_url_hosts: tuple[str, ...] = _option(
        (), "hosts from which https URLs of images and videos may be fetched, such as example.org or "
        "*.example.org:8443; unset: none",
    )  # fmt: skip
    image_url_networks: tuple[str, ...] = _option(
        (), "private networks in which hosts of image_url_hosts may be, such as 10.1.0.0/16; unset: none"
    )
    image_url_timeout: float = _option(
        10.0, "seconds that fetching one file may take", minimum=0.001, maximum=LONGEST_WAIT
    )
    image_url_redirects: int = _option(
        3, "redirects that are followed for one file; each target is checked like the URL itself", minimum=0
    )
    image_url_ca: str | None = _option(
        None, "PEM file of the CA that signed the certificates of image_url_hosts; unset: the system's CAs"
    )
    media_dir: str | None = _option(None, "folder of uploaded images and videos; unset: a temporary one")
    media_bytes: int = _option(
        2**30, "bytes of uploaded images and videos of all tenants together", minimum=0, size=True
    )
    media_tenant_bytes: int | None = _option(
        None, "bytes of uploaded images and videos of one tenant; unset: media_bytes", minimum=0, size=True
    )
    media_ttl: float = _option(
        3600.0, "seconds that an uploaded image or video is kept after its last upload", minimum=1, maximum=LONGEST_TIME
    )


@dataclass(frozen=True)
class BatchOptions:
    """Batches: where they are stored, and their share of the server."""

    batch_dir: str | None = _option(None, "folder of batches, which then survive a restart; unset: a temporary one")
    batch_bytes: int = _option(
        2**30, "bytes of inputs and outputs of the batches of all tenants together", minimum=0, size=True
    )
    batch_tenant_bytes: int | None = _option(
        None, "bytes of inputs and outputs of the batches of one tenant; unset: batch_bytes", minimum=0, size=True
    )
    batch_ttl: float = _option(
        7 * 86400.0, "seconds that a batch is kept after its end", minimum=1, maximum=LONGEST_TIME
    )
    batch_concurrency: int | None = _option(
        None, "rows of all batches together that are in flight; unset: 16, but at most half of max_queue", minimum=1
    )
    batch_jobs: int = _option(4, "batches that run at the same time, at most one of each tenant", minimum=1)
    batch_row_timeout: float = _option(
        86400.0, "seconds that one row may take, waiting and retries included", minimum=0.001, maximum=LONGEST_TIME
    )


@dataclass(frozen=True)
class TelemetryOptions:
    """Logs, metrics, traces and files for the operator."""

    metrics_port: int | None = _option(
        None,
        "port of the Prometheus endpoint; 0: any free port, which the log names; unset: no endpoint",
        minimum=0,
        maximum=LAST_PORT,
    )
    metrics_host: str = _option("127.0.0.1", "address of the Prometheus endpoint")
    otlp_endpoint: str | None = _option(
        None, "HOST:PORT of an OpenTelemetry collector, which receives a span for each generation and each stage of it"
    )
    sizes_file: str | None = _option(
        None, "JSON file to which the sizes of encoded images are added when the server stops, for `saccade tune`"
    )
    log_json: bool = _option(False, "log each request as a JSON object instead of key=value pairs")
    log_level: str = _option(
        "info", "lowest level of messages that are logged to stderr", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class ServerOptions(
    HttpOptions, TelemetryOptions, BatchOptions, MediaOptions, CallOptions, ListenOptions, EngineOptions
):
    """All options of `saccade serve`, the engine's first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("host", "metrics_host"):
            object.__setattr__(self, name, without_brackets(getattr(self, name)))
        check_names(self)
        if self.http_port is not None and self.role == "encoder":
            raise ConfigError(
                f"http_port: {self.http_port} would not be used by --role encoder, which answers no requests of "
                "clients; leave it out"
            )
        if self.admin and self.api_keys is not None:
            raise ConfigError(
                'admin: it would not be used with api_keys; leave it out, and add "admin" to the scopes of a key'
            )
        if self.max_connection_age_grace is not None and self.max_connection_age is None:
            raise ConfigError(
                f"max_connection_age_grace: {self.max_connection_age_grace:g} would not be used without "
                "max_connection_age; set both or neither"
            )
