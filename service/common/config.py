"""All options of the server: field, default, unit. `service.common.settings` reads their values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kernels.native.instruction_sets import CHOICES


class ConfigError(ValueError):
    """An option has a value that is not allowed; the message names it and the allowed values."""


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    size: bool = False,
) -> Any:
    """A field with its help text; `size` accepts suffixes such as 512Mi."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "size": size}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine process: model, memory, scheduling, speculation, encoders."""

    model: str = _option("demo", "'demo', a checkpoint directory, or a hub id, which is downloaded where it has to be")
    revision: str | None = _option(
        None, "branch, tag or commit of a model that is named by its hub id; unset: main as it is now"
    )
    dtype: str | None = _option(
        None, "compute dtype; unset: what the checkpoint declares", choices=("float32", "bfloat16")
    )
    weights: str | None = _option(
        None,
        "weights of the decoder's linear layers, quantised as they are read; unset: in dtype",
        choices=("int8", "int4", "fp8", "nvfp4"),
    )
    activations: str | None = _option(
        None, "rows before products with fp8 weights, on a GPU that multiplies fp8; changes answers; unset: in dtype",
        choices=("fp8",),
    )  # fmt: skip
    native: str = _option(
        "auto", "compiled decoder and vision tower on a CPU; on refuses to start without", choices=("auto", "on", "off")
    )
    instruction_set: str = _option(
        "auto", "instructions that compiled code uses; auto: the best that the processor has", choices=CHOICES
    )
    device: str | None = _option(None, "'cpu' or 'cuda'; unset: cuda where there is one")
    threads: int | None = _option(None, "threads of the engine's maths; unset: one per core", minimum=1, maximum=1024)
    max_seqs: int = _option(32, "requests that run at the same time", minimum=1)
    max_len: int | None = _option(
        None, "tokens of one request, prompt, images and answer together; unset: the model's, at most 8192", minimum=2
    )
    max_batched_tokens: int = _option(2048, "tokens of one decoder step over all requests", minimum=1)
    max_chunk: int | None = _option(
        None, "prompt tokens of one request in one decoder step; unset: no limit but max_batched_tokens", minimum=1
    )
    ageing: int = _option(
        256, "decoder steps that one level of priority is worth: later requests of a higher level go first for so long",
        minimum=1,
    )  # fmt: skip
    memory_bytes: int | None = _option(
        None,
        "bytes of the state arena (states, KV pages); unset: what max_seqs x max_len needs, within memory_share",
        minimum=1,
        size=True,
    )
    memory_share: float = _option(
        0.5, "largest share of the device's memory for the state arena while memory_bytes is unset", minimum=0
    )
    host_bytes: int | None = _option(
        None, "host memory for the states of preempted requests; unset: a quarter of the arena", minimum=0, size=True
    )
    state_cache: str = _option(
        "auto",
        "where states are kept for later requests with the same beginning: auto = ends of images and prompts, "
        "align = the last state_block boundary, all = every one, none = nowhere",
        choices=("auto", "align", "all", "none"),
    )
    checkpoint_bytes: int | None = _option(
        None, "bytes of the state arena for states that are kept for later requests; unset: all that running requests "
        "leave", minimum=0, size=True,
    )  # fmt: skip
    state_block: int | None = _option(
        None, "tokens between the boundaries of align and all; unset: the model's chunk", minimum=16
    )
    speculative: str = _option(
        "none",
        "what drafts tokens that the next step verifies: ngram = what followed the same tokens before, mtp = the "
        "checkpoint's own heads; answers are the same",
        choices=("none", "ngram", "mtp"),
    )
    draft_tokens: int = _option(3, "drafts of one step and request, at most 15", minimum=1)
    spec_state: str = _option(
        "replay",
        "how a state is restored after a rejected draft: replay = one slot and the last inputs, slots = a slot for "
        "each token of a step",
        choices=("replay", "slots"),
    )
    draft_policy: str = _option(
        "adaptive",
        "adaptive = the number of drafts that gives the most tokens per second, possibly none; fixed = always "
        "draft_tokens",
        choices=("adaptive", "fixed"),
    )
    forced_tokens: str = _option(
        "auto",
        "tokens that a grammar leaves no choice about are verified together, as drafts: on (reserves memory for "
        "drafts), off, or where speculative drafts too; answers are the same",
        choices=("auto", "on", "off"),
    )
    handoff_bytes: int = _option(256 * 2**20, "bytes of image embeddings, in flight and cached", minimum=1, size=True)
    video_pruning_rate: float | None = _option(
        None, "share of a video's tokens that are dropped after the encoder, the most redundant ones (0.5: half); "
        "unset: the checkpoint's", minimum=0,
    )  # fmt: skip
    graphs: str = _option(
        "auto",
        "graphs of encoder and decoder: on, off, or where they pay (a decoder's on a GPU, an encoder's where they win)",
        choices=("auto", "on", "off"),
    )
    max_capture: int = _option(
        512, "largest captured decoder graph, in tokens and in requests; larger steps run without", minimum=1
    )
    overlap: str = _option(
        "auto",
        "a decoder step is prepared while the device runs the one before it: on, off, or where there is a GPU; answers "
        "are the same",
        choices=("auto", "on", "off"),
    )
    token_budgets: tuple[int, ...] = _option(
        (), "encoder budgets in image tokens, such as 64,256,1024; unset: a ladder", minimum=1
    )
    max_images: int | None = _option(
        None, "images of one encoder batch; unset: as many as the budgets allow", minimum=1
    )
    encoder_step_tokens: int | None = _option(
        None, "image tokens that the encoder encodes in one step; unset: the largest legal image", minimum=1
    )
    encoder_time_slice: float | None = _option(
        None,
        "seconds that images are encoded for between two decoder steps, where both share the cores of a CPU: shorter "
        "for steadier streams, longer for sooner images; unset: 0.1",
        minimum=0,
    )
    role: str = _option(
        "all",
        "all = images are encoded and answers generated here, encoder = images are encoded for others, decoder = "
        "images are encoded by --encoders",
        choices=("all", "encoder", "decoder"),
    )
    hang_timeout: float = _option(
        120.0,
        "seconds that the engine process may take for one step, and a frontend process for an answer, before it "
        "counts as hung, is killed and started again",
        minimum=0.1,
    )
    load_timeout: float = _option(
        3600.0,
        "seconds that a process may take to start, which includes loading the model, before it counts as hung and is "
        "killed",
        minimum=0.1,
    )
    encoders: tuple[str, ...] = _option(
        (), "with --role decoder: HOST:PORT of servers with --role encoder, with commas"
    )
    encoder_process: bool = _option(
        False, "encode in a process of its own on this host, whose death costs a retry and not the engine"
    )
    encoder_segment_bytes: int = _option(
        256 * 2**20, "bytes of shared memory between the engine and that process", minimum=2**16, size=True
    )
    encoder_lease: float = _option(
        30.0, "seconds that another process may take over an image before it goes to the next one", minimum=0.001
    )
    encoder_ca: str | None = _option(
        None, "PEM file of the authority that the encoders' certificates come from; unset: plain text"
    )
    encoder_cert: str | None = _option(None, "PEM file of the certificate that this server shows to encoders")
    encoder_cert_key: str | None = _option(None, "PEM file of its private key")
    encoder_api_key: str | None = _option(
        None, "API key for the encoders, with the scope encoder; better set as SACCADE_ENCODER_API_KEY"
    )

    def __post_init__(self) -> None:
        if self.role == "decoder" and not self.encoders:
            raise ConfigError("encoders: --role decoder needs the encoders' addresses, such as 10.0.0.5:50051")
        if self.role != "decoder" and self.encoders:
            raise ConfigError(f"encoders: {','.join(self.encoders)} would not be used by --role {self.role}")
        if self.encoder_process and self.role != "all":
            raise ConfigError(f"encoder_process: it would have nothing to do in --role {self.role}")
        if self.encoder_time_slice is not None and (self.encoder_process or self.role != "all"):
            where = "with --encoder-process" if self.encoder_process else f"by --role {self.role}"
            raise ConfigError(
                f"encoder_time_slice: {self.encoder_time_slice:g} would not be used {where}: the two share no loop"
            )
        for address in self.encoders:
            if not re.fullmatch(r".+:\d+", address):
                raise ConfigError(f"encoders: {address!r} is not HOST:PORT")
        if len(set(self.encoders)) < len(self.encoders):
            raise ConfigError(f"encoders: an address is there twice in {','.join(self.encoders)}")


@dataclass(frozen=True)
class ListenOptions:
    """Where the server listens, and who may call it."""

    host: str = _option(
        "127.0.0.1", "address to listen on; one that is not loopback needs TLS and keys (or client certificates)"
    )
    port: int = _option(50051, "port to listen on; 0 picks one", minimum=0)
    frontends: int = _option(
        1, "processes that speak gRPC on the port, over one engine; more than 1 where one cannot keep up", minimum=1
    )
    insecure: bool = _option(False, "listen on an address that others can reach without TLS or without keys")
    tls_cert: str | None = _option(None, "PEM file of the server's certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of its private key, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the authority that clients' certificates must come from")
    api_keys: str | None = _option(None, "TOML file of API key hashes; read again when it changes")
    admin: bool = _option(False, "without API keys: let every caller use AdminService")
    vllm_engine: bool = _option(
        False, "serve gateways such as smg, too: the gRPC service vllm.grpc.engine.VllmEngine; needs smg-grpc-proto"
    )
    max_connection_streams: int = _option(
        1024, "calls of one connection at a time; the client keeps back what is more", minimum=1
    )
    max_connection_age: float | None = _option(
        None,
        "seconds after which a client is asked to connect anew, and so finds servers that have been added; running "
        "calls go on; unset: never",
        minimum=1,
    )
    max_connection_age_grace: float | None = _option(
        None, "seconds that running calls get on a connection that has passed its age; unset: as long as they take",
        minimum=0,
    )  # fmt: skip


@dataclass(frozen=True)
class CallOptions:
    """Limits on the number, size and duration of calls."""

    max_queue: int = _option(
        1024, "requests in the server, running and waiting, before new ones are refused", minimum=1
    )
    max_tenant_requests: int | None = _option(
        None, "requests of one API key in the server, running and waiting; unset: half of max_queue", minimum=1
    )
    max_tenant_calls: int = _option(
        1024, "calls of one API key at a time, over all its connections and of any method", minimum=1
    )
    max_message_bytes: int = _option(64 * 2**20, "largest request message", minimum=1024, size=True)
    max_inflight_bytes: int = _option(
        512 * 2**20,
        "bytes of the request messages of all calls in progress; one API key gets half",
        minimum=1024,
        size=True,
    )
    max_decoders: int = _option(
        4, "with --role encoder: decoders at a time, which share --max-inflight-bytes for their pixels", minimum=1
    )
    receive_timeout: float = _option(120.0, "seconds that the message of a call may take to arrive", minimum=0.001)
    default_timeout: float = _option(600.0, "seconds a call without a deadline may take", minimum=0.001)
    stall_timeout: float = _option(
        60.0, "seconds that a message of a stream may wait for its reader, and an upload for its next", minimum=0.001
    )
    warmup: bool = _option(True, "a request of the server's own, answered before health says SERVING")
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0)


@dataclass(frozen=True)
class MediaOptions:
    """Images and videos: formats, limits, fetching and storage."""

    max_images_per_request: int = _option(16, "images of one request", minimum=0)
    max_image_bytes: int = _option(32 * 2**20, "encoded bytes of one image", minimum=1, size=True)
    max_image_pixels: int = _option(64_000_000, "pixels of one image", minimum=1, size=True)
    max_videos_per_request: int = _option(4, "videos of one request", minimum=0)
    max_video_bytes: int = _option(48 * 2**20, "encoded bytes of one video", minimum=1, size=True)
    max_video_frames: int = _option(32, "frames of a video that are looked at, evenly spaced", minimum=1)
    max_video_file_frames: int = _option(20_000, "frames in a video's file, looked at or not", minimum=1)
    max_video_pixels: int = _option(
        2**34, "pixels of one video: width x height x frames of what has to be decoded", minimum=1, size=True
    )
    image_workers: int = _option(
        2,
        "processes that decode and cut images and videos, at least 2 so that videos leave one, and threads that wait",
        minimum=1,
    )
    image_timeout: float = _option(20.0, "seconds that decoding and cutting one image may take", minimum=0.001)
    video_timeout: float = _option(120.0, "seconds that decoding and cutting one video may take", minimum=0.001)
    preprocess_bytes: int = _option(
        2 * 2**30,
        "bytes of decoded and cut images and videos that the encoder has not seen",
        minimum=1,
        size=True,
    )
    image_cache_bytes: int = _option(
        256 * 2**20,
        "bytes of patches that are kept, so that the same image or video is not decoded again; 0: none",
        minimum=0,
        size=True,
    )
    image_url_hosts: tuple[str, ...] = _option(
        (), "hosts that images and videos are fetched from by https URL, such as example.org or *.example.org:8443; "
        "unset: none",
    )  # fmt: skip
    image_url_networks: tuple[str, ...] = _option((), "networks of such hosts that are not public, such as 10.1.0.0/16")
    image_url_timeout: float = _option(10.0, "seconds that fetching one file may take", minimum=0.001)
    image_url_redirects: int = _option(3, "redirects that are followed, each checked like a URL", minimum=0)
    image_url_ca: str | None = _option(
        None, "PEM file of the authority that such hosts' certificates come from; unset: the usual ones"
    )
    media_dir: str | None = _option(None, "folder of uploaded images; unset: a temporary one")
    media_bytes: int = _option(2**30, "bytes of uploaded images, over all callers", minimum=0, size=True)
    media_tenant_bytes: int | None = _option(
        None, "bytes of uploaded images of one tenant; unset: all of media_bytes", minimum=0, size=True
    )
    media_ttl: float = _option(3600.0, "seconds that an uploaded image is kept", minimum=1)


@dataclass(frozen=True)
class BatchOptions:
    """Batches: where they are stored, and their share of the server."""

    batch_dir: str | None = _option(None, "folder of batches, which outlive a restart; unset: a temporary one")
    batch_bytes: int = _option(2**30, "bytes of batches, inputs and outputs, over all callers", minimum=0, size=True)
    batch_tenant_bytes: int | None = _option(
        None, "bytes of the batches of one tenant; unset: all of batch_bytes", minimum=0, size=True
    )
    batch_ttl: float = _option(7 * 86400.0, "seconds that a batch is kept after its end", minimum=1)
    batch_concurrency: int | None = _option(
        None, "rows of batches in flight, over all batches; unset: 16, at most half of max_queue", minimum=1
    )
    batch_jobs: int = _option(4, "batches that run at the same time, one of each tenant", minimum=1)
    batch_row_timeout: float = _option(86400.0, "seconds that one row may take, waiting included", minimum=0.001)


@dataclass(frozen=True)
class TelemetryOptions:
    """Logs, metrics, traces and files for the operator."""

    metrics_port: int | None = _option(None, "port of the Prometheus endpoint; 0 picks one; unset: none", minimum=0)
    metrics_host: str = _option("127.0.0.1", "address of the Prometheus endpoint")
    otlp_endpoint: str | None = _option(
        None, "HOST:PORT of an OpenTelemetry collector that gets a span for each generation and its stages"
    )
    sizes_file: str | None = _option(
        None, "JSON file to which the sizes of encoded images are added at the end, for `saccade tune`"
    )
    log_json: bool = _option(False, "one JSON object for each request in the log, instead of key=value pairs")
    log_level: str = _option("info", "what is logged to stderr", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP server in front of gRPC, and what it limits by itself."""

    http_port: int | None = _option(
        None, "port of the OpenAI-compatible HTTP server and its playground; 0 picks one; unset: none for serve, 8000 "
        "for http", minimum=0,
    )  # fmt: skip
    http_host: str = _option("127.0.0.1", "address of the HTTP server; the same rules as for host")
    http_max_connections: int = _option(2048, "connections to the HTTP server at a time", minimum=1)
    http_max_header_bytes: int = _option(64 * 2**10, "bytes of a request's line and headers", minimum=1024, size=True)
    http_header_timeout: float = _option(
        20.0, "seconds that the line and headers of a request may take to arrive", minimum=0.001
    )
    http_file_bytes: int = _option(
        2**30, "bytes of files that were uploaded over HTTP and wait to become batches", minimum=0, size=True
    )
    http_file_dir: str | None = _option(
        None, "folder of these files, which outlive a restart; of one HTTP server; unset: a temporary one"
    )
    http_cors_origins: tuple[str, ...] = _option(
        (), "origins such as https://app.example.org whose pages may call the HTTP server; unset: none"
    )


@dataclass(frozen=True)
class HttpFrontOptions(HttpOptions):
    """All options of `saccade http`, a process of its own that is a client of gRPC servers."""

    servers: tuple[str, ...] = _option(("127.0.0.1:50051",), "HOST:PORT of the gRPC servers, with commas")
    servers_ca: str | None = _option(
        None, "PEM file of the authority that the servers' certificates come from; unset: plain text"
    )
    servers_cert: str | None = _option(None, "PEM file of the certificate that the HTTP server shows to gRPC servers")
    servers_cert_key: str | None = _option(None, "PEM file of its private key")
    insecure: bool = _option(False, "listen on an address that others can reach without TLS")
    tls_cert: str | None = _option(None, "PEM file of the certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of its private key, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the authority that clients' certificates must come from")
    max_message_bytes: int = _option(96 * 2**20, "largest request body", minimum=1024, size=True)
    max_inflight_bytes: int = _option(
        512 * 2**20, "bytes of the request bodies of all calls in progress", minimum=1024, size=True
    )
    receive_timeout: float = _option(120.0, "seconds that the body of a request may take to arrive", minimum=0.001)
    default_timeout: float = _option(600.0, "seconds a call without a deadline may take", minimum=0.001)
    stall_timeout: float = _option(60.0, "seconds that a piece of an answer may wait for its reader", minimum=0.001)
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0)
    log_level: str = _option("info", "what is logged to stderr", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("servers: the HTTP server needs the address of a gRPC server, such as 10.0.0.5:50051")
        if len(set(self.servers)) < len(self.servers):
            raise ConfigError(f"servers: an address is there twice in {','.join(self.servers)}")


@dataclass(frozen=True)
class ServerOptions(
    HttpOptions, TelemetryOptions, BatchOptions, MediaOptions, CallOptions, ListenOptions, EngineOptions
):
    """All options of `saccade serve`, the engine's first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_port is not None and self.role == "encoder":
            raise ConfigError(f"http_port: {self.http_port} would not be used by --role encoder, which answers nobody")
        if self.max_connection_age_grace is not None and self.max_connection_age is None:
            raise ConfigError(
                f"max_connection_age_grace: {self.max_connection_age_grace:g} would not be used without "
                "max_connection_age"
            )
