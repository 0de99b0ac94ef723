"""All options of the server: field, default, unit. `service.common.settings` reads their values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernels.native.instruction_sets import CHOICES
from kernels.weight_forms import FORMS
from service.common.option import GRPC_MAXIMUM, LAST_PORT, check_addresses
from service.common.option import ConfigError as ConfigError
from service.common.option import option as _option


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine process: model, memory, scheduling, speculation, encoders."""

    model: str = _option(
        "demo", "'demo', a checkpoint directory, or a Hugging Face hub id, which is downloaded if it is not cached"
    )
    revision: str | None = _option(
        None, "branch, tag or commit of a model given by its hub id; unset: the latest commit of main"
    )
    dtype: str | None = _option(None, "dtype of computation; unset: the checkpoint's", choices=("float32", "bfloat16"))
    weights: str | None = _option(
        None,
        "quantise the weights of the decoder's linear layers to this format while loading (int4: a scale for 128 "
        "inputs, int4-32: for 32); unset: as in the checkpoint",
        choices=FORMS,
    )
    activations: str | None = _option(
        None,
        "quantise activations before products; changes answers; fp8: with fp8 weights, on a GPU with fp8 products; "
        "int8: with int8 weights, on a CPU; unset: no",
        choices=("fp8", "int8"),
    )
    state_dtype: str = _option(
        "float32",
        "dtype of recurrent states, in batch slots and in the prefix cache; bfloat16 halves their memory, rounds them "
        "after every token and changes answers; on a CPU",
        choices=("float32", "bfloat16"),
    )
    native: str = _option(
        "auto",
        "compiled code for decoder and vision tower on a CPU; on: an error if there is none",
        choices=("auto", "on", "off"),
    )
    instruction_set: str = _option(
        "auto", "instruction set of compiled code; auto: the best that the processor supports", choices=CHOICES
    )
    device: str | None = _option(None, "'cpu', 'cuda' or 'cuda:N'; unset: cuda if available")
    threads: int | None = _option(
        None, "threads of computation in the engine; unset: one for each core", minimum=1, maximum=1024
    )
    max_seqs: int = _option(32, "requests that run at the same time, each in a batch slot", minimum=1)
    max_len: int | None = _option(
        None, "tokens of one request: prompt, images and answer; unset: the model's limit, at most 8192", minimum=2
    )
    max_batched_tokens: int | None = _option(
        None,
        "tokens of one decoder step, of all requests together; unset: 2048 on a GPU, on a CPU 512 or max_seqs",
        minimum=1,
    )
    max_chunk: int | None = _option(
        None, "prompt tokens of one request in one decoder step; unset: max_batched_tokens", minimum=1
    )
    ageing: int = _option(
        256, "decoder steps of waiting that equal one level of priority: a request overtakes older ones of a lower "
        "level by at most this many steps for each level",
        minimum=1,
    )  # fmt: skip
    memory_bytes: int | None = _option(
        None,
        "bytes of the state arena (recurrent states and KV pages); unset: enough for max_seqs requests of max_len "
        "tokens, within memory_share",
        minimum=1,
        size=True,
    )
    memory_share: float = _option(
        0.5,
        "largest share of the device's memory (on a CPU: the machine's or the container's limit) for the state arena "
        "if memory_bytes is unset",
        minimum=0,
    )
    host_bytes: int | None = _option(
        None,
        "bytes of host memory for the states of preempted requests; unset: a quarter of the arena",
        minimum=0,
        size=True,
    )
    state_cache: str = _option(
        "auto",
        "prefix cache, positions where states are kept for later requests with the same beginning: auto = ends of "
        "images and prompts, align = the last multiple of state_block, all = every multiple, none = no prefix cache",
        choices=("auto", "align", "all", "none"),
    )
    checkpoint_bytes: int | None = _option(
        None, "bytes of the state arena for the prefix cache; unset: all that running requests do not use",
        minimum=0, size=True,
    )  # fmt: skip
    state_block: int | None = _option(
        None,
        "tokens between positions of state_cache align and all, a multiple of the page size; unset: the model's chunk "
        "size",
        minimum=16,
    )
    speculative: str = _option(
        "none",
        "speculative decoding, source of draft tokens: ngram = what followed the same tokens before, mtp = the "
        "checkpoint's multi-token prediction heads; answers are the same",
        choices=("none", "ngram", "mtp"),
    )
    draft_tokens: int = _option(3, "draft tokens of one request in one step, at most 15", minimum=1)
    spec_state: str = _option(
        "replay",
        "how a state is restored after a rejected draft: replay = one state slot and the last inputs, slots = a state "
        "slot for each token of a step",
        choices=("replay", "slots"),
    )
    draft_policy: str = _option(
        "adaptive",
        "adaptive = the number of drafts that gives the most tokens per second, which may be 0; fixed = always "
        "draft_tokens",
        choices=("adaptive", "fixed"),
    )
    forced_tokens: str = _option(
        "auto",
        "use tokens that a grammar forces as drafts: on (reserves memory for drafts), off, auto = only with "
        "speculative; answers are the same",
        choices=("auto", "on", "off"),
    )
    handoff_bytes: int = _option(256 * 2**20, "bytes of image embeddings, in use and cached", minimum=1, size=True)
    video_pruning_rate: float | None = _option(
        None, "share of a video's tokens to drop after the encoder, the most redundant ones first (0.5: half); unset: "
        "the checkpoint's", minimum=0,
    )  # fmt: skip
    graphs: str = _option(
        "auto",
        "CUDA graphs (on a CPU, for tests: the same buffers); auto = for the decoder on a GPU, for the encoder where "
        "a graph is measured to be faster",
        choices=("auto", "on", "off"),
    )
    max_capture: int = _option(
        512, "largest captured decoder graph, in tokens and in requests; larger steps run without a graph", minimum=1
    )
    overlap: str = _option(
        "auto",
        "prepare a decoder step while the device runs the one before it; auto = on a GPU; answers are the same",
        choices=("auto", "on", "off"),
    )
    token_budgets: tuple[int, ...] = _option(
        (),
        "sizes of encoder batches in image tokens, such as 64,256,1024 (`saccade tune`); unset: chosen for the model",
        minimum=1,
    )
    max_images: int | None = _option(
        None, "images of one encoder batch; unset: limited only by token_budgets", minimum=1
    )
    encoder_step_tokens: int | None = _option(
        None,
        "image tokens that the encoder takes from the queue at a time; unset: the largest allowed image",
        minimum=1,
    )
    encoder_time_slice: float | None = _option(
        None,
        "seconds of encoding between two decoder steps, if both share the cores of a CPU: less for steadier streams, "
        "more for faster images; unset: 0.1",
        minimum=0,
    )
    role: str = _option(
        "all",
        "all = encode images and generate answers, encoder = encode images for servers of role decoder, decoder = "
        "generate answers with images from --encoders",
        choices=("all", "encoder", "decoder"),
    )
    hang_timeout: float = _option(
        120.0,
        "seconds without a finished step of the engine process, or a heartbeat of a frontend process, before the "
        "process is killed and started again",
        minimum=0.1,
    )
    load_timeout: float = _option(
        3600.0, "seconds that a process may take to start, model loading included, before it is killed", minimum=0.1
    )
    encoders: tuple[str, ...] = _option(
        (), "with --role decoder: HOST:PORT of servers with --role encoder, separated by commas"
    )
    encoder_process: bool = _option(
        False, "encode in a separate process on this host, so that a crash of the encoder does not end the engine"
    )
    encoder_segment_bytes: int = _option(
        256 * 2**20, "bytes of shared memory between the engine and that process", minimum=2**16, size=True
    )
    encoder_lease: float = _option(
        30.0,
        "seconds that an encoder in another process may take for an image before another encoder gets it",
        minimum=0.001,
    )
    encoder_ca: str | None = _option(None, "PEM file of the CA that signed the encoders' certificates; unset: no TLS")
    encoder_cert: str | None = _option(None, "PEM file of the certificate that this server presents to encoders")
    encoder_cert_key: str | None = _option(None, "PEM file of the private key of encoder_cert")
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
        check_addresses("encoders", self.encoders)
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device: {self.device!r} is not 'cpu', 'cuda' or one of several GPUs, such as 'cuda:1'")


@dataclass(frozen=True)
class ListenOptions:
    """Where the server listens, and who may call it."""

    host: str = _option(
        "127.0.0.1",
        "address to listen on; an address that is not loopback needs TLS and API keys (or client certificates), or "
        "insecure",
    )
    port: int = _option(50051, "port to listen on; 0: any free port", minimum=0, maximum=LAST_PORT)
    frontends: int = _option(
        1,
        "frontend processes that serve gRPC on the port, with one engine; more than 1 only if one cannot keep up",
        minimum=1,
    )
    insecure: bool = _option(False, "allow an address that other machines can reach without TLS or without API keys")
    tls_cert: str | None = _option(None, "PEM file of the server's certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of the private key of tls_cert, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the CA that must have signed the certificates of clients")
    api_keys: str | None = _option(None, "TOML file of API key hashes; read again when it changes")
    admin: bool = _option(False, "without API keys: let every caller use AdminService")
    vllm_engine: bool = _option(
        False, "also serve vllm.grpc.engine.VllmEngine, for gateways such as smg; needs smg-grpc-proto"
    )
    max_connection_streams: int = _option(
        1024, "calls of one connection at a time; further calls wait in the client", minimum=1, maximum=GRPC_MAXIMUM
    )
    max_connection_age: float | None = _option(
        None,
        "seconds after which a client is asked to reconnect, so that it finds new servers; running calls continue; "
        "unset: never",
        minimum=1,
        maximum=GRPC_MAXIMUM // 1000,
    )
    max_connection_age_grace: float | None = _option(
        None, "seconds that running calls get on a connection that has reached max_connection_age; unset: no limit",
        minimum=0, maximum=GRPC_MAXIMUM // 1000,
    )  # fmt: skip


@dataclass(frozen=True)
class CallOptions:
    """Limits on the number, size and duration of calls."""

    max_queue: int = _option(1024, "requests in the server, running and waiting; further ones are rejected", minimum=1)
    max_tenant_requests: int | None = _option(
        None, "requests of one tenant (API key) in the server, running and waiting; unset: half of max_queue", minimum=1
    )
    max_tenant_calls: int = _option(
        1024, "calls of one tenant (API key) at a time, of any method and over all its connections", minimum=1
    )
    max_message_bytes: int = _option(
        64 * 2**20, "largest request message", minimum=1024, maximum=GRPC_MAXIMUM, size=True
    )
    max_inflight_bytes: int = _option(
        512 * 2**20,
        "bytes of the request messages of all calls in progress; one tenant gets half",
        minimum=1024,
        size=True,
    )
    max_decoders: int = _option(
        4, "with --role encoder: connected decoders, which share max_inflight_bytes for their pixels", minimum=1
    )
    receive_timeout: float = _option(
        120.0, "seconds that the request message of a call may take to arrive", minimum=0.001
    )
    default_timeout: float = _option(600.0, "seconds that a call without a deadline may take", minimum=0.001)
    stall_timeout: float = _option(
        60.0, "seconds that a client may pause while it reads a stream or sends an upload", minimum=0.001
    )
    warmup: bool = _option(True, "answer one request internally before health becomes SERVING")
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0)


@dataclass(frozen=True)
class MediaOptions:
    """Images and videos: formats, limits, fetching and storage."""

    max_images_per_request: int = _option(16, "images of one request", minimum=0)
    max_image_bytes: int = _option(32 * 2**20, "encoded bytes of one image", minimum=1, size=True)
    max_image_pixels: int = _option(64_000_000, "pixels of one image", minimum=1, size=True)
    max_videos_per_request: int = _option(4, "videos of one request", minimum=0)
    max_video_bytes: int = _option(48 * 2**20, "encoded bytes of one video", minimum=1, size=True)
    max_video_frames: int = _option(32, "frames that are sampled from a video, evenly spaced", minimum=1)
    max_video_file_frames: int = _option(20_000, "frames in a video's file, sampled or not", minimum=1)
    max_video_pixels: int = _option(
        2**34, "pixels of one video: width x height x frames that have to be decoded", minimum=1, size=True
    )
    image_workers: int = _option(
        2, "processes that decode images and videos, at least 2, of which videos always leave one for images", minimum=1
    )
    image_timeout: float = _option(20.0, "seconds that decoding and preparing one image may take", minimum=0.001)
    video_timeout: float = _option(120.0, "seconds that decoding and preparing one video may take", minimum=0.001)
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
        (), "private networks in which these hosts may be, such as 10.1.0.0/16"
    )
    image_url_timeout: float = _option(10.0, "seconds that fetching one file may take", minimum=0.001)
    image_url_redirects: int = _option(3, "redirects that are followed; each is checked like a URL", minimum=0)
    image_url_ca: str | None = _option(
        None, "PEM file of the CA that signed the certificates of these hosts; unset: the system's CAs"
    )
    media_dir: str | None = _option(None, "folder of uploaded images and videos; unset: a temporary one")
    media_bytes: int = _option(2**30, "bytes of uploaded images and videos, of all tenants", minimum=0, size=True)
    media_tenant_bytes: int | None = _option(
        None, "bytes of uploaded images and videos of one tenant; unset: media_bytes", minimum=0, size=True
    )
    media_ttl: float = _option(
        3600.0, "seconds that an uploaded image or video is kept after its last upload", minimum=1
    )


@dataclass(frozen=True)
class BatchOptions:
    """Batches: where they are stored, and their share of the server."""

    batch_dir: str | None = _option(None, "folder of batches, which then survive a restart; unset: a temporary one")
    batch_bytes: int = _option(2**30, "bytes of batches, inputs and outputs, of all tenants", minimum=0, size=True)
    batch_tenant_bytes: int | None = _option(
        None, "bytes of the batches of one tenant; unset: batch_bytes", minimum=0, size=True
    )
    batch_ttl: float = _option(7 * 86400.0, "seconds that a batch is kept after its end", minimum=1)
    batch_concurrency: int | None = _option(
        None, "rows in flight, of all batches together; unset: 16, but at most half of max_queue", minimum=1
    )
    batch_jobs: int = _option(4, "batches that run at the same time, at most one of each tenant", minimum=1)
    batch_row_timeout: float = _option(86400.0, "seconds that one row may take, waiting included", minimum=0.001)


@dataclass(frozen=True)
class TelemetryOptions:
    """Logs, metrics, traces and files for the operator."""

    metrics_port: int | None = _option(
        None, "port of the Prometheus endpoint; 0: any free port; unset: no endpoint", minimum=0, maximum=LAST_PORT
    )
    metrics_host: str = _option("127.0.0.1", "address of the Prometheus endpoint")
    otlp_endpoint: str | None = _option(
        None, "HOST:PORT of an OpenTelemetry collector, to which a span is sent for each generation and its stages"
    )
    sizes_file: str | None = _option(
        None, "JSON file to which the sizes of encoded images are added when the server stops, for `saccade tune`"
    )
    log_json: bool = _option(False, "log each request as a JSON object instead of key=value pairs")
    log_level: str = _option("info", "what is logged to stderr", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class HttpOptions:
    """The HTTP server in front of gRPC, and what it limits by itself."""

    http_port: int | None = _option(
        None, "port of the OpenAI-compatible HTTP server and its playground; 0: any free port; unset: 8000 for "
        "`saccade http`, no HTTP server for `saccade serve`", minimum=0, maximum=LAST_PORT,
    )  # fmt: skip
    http_host: str = _option("127.0.0.1", "address of the HTTP server; the same rules as for host")
    http_max_connections: int = _option(2048, "connections to the HTTP server at a time", minimum=1)
    http_max_header_bytes: int = _option(64 * 2**10, "bytes of a request's line and headers", minimum=1024, size=True)
    http_header_timeout: float = _option(
        20.0, "seconds that the line and headers of a request may take to arrive", minimum=0.001
    )
    http_file_bytes: int = _option(
        2**30, "bytes of files that are uploaded over HTTP for batches", minimum=0, size=True
    )
    http_file_dir: str | None = _option(
        None, "folder of these files, which then survive a restart; only for one HTTP server; unset: a temporary one"
    )
    http_cors_origins: tuple[str, ...] = _option(
        (), "origins whose pages may call the HTTP server, such as https://app.example.org; unset: none"
    )


@dataclass(frozen=True)
class HttpFrontOptions(HttpOptions):
    """All options of `saccade http`, a process of its own that is a client of gRPC servers."""

    servers: tuple[str, ...] = _option(("127.0.0.1:50051",), "HOST:PORT of the gRPC servers, separated by commas")
    servers_ca: str | None = _option(
        None, "PEM file of the CA that signed the certificates of the gRPC servers; unset: no TLS"
    )
    servers_cert: str | None = _option(
        None, "PEM file of the certificate that the HTTP server presents to gRPC servers"
    )
    servers_cert_key: str | None = _option(None, "PEM file of the private key of servers_cert")
    insecure: bool = _option(False, "allow an address that other machines can reach without TLS")
    tls_cert: str | None = _option(None, "PEM file of the certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of the private key of tls_cert, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the CA that must have signed the certificates of clients")
    max_message_bytes: int = _option(96 * 2**20, "largest request body", minimum=1024, size=True)
    max_inflight_bytes: int = _option(
        512 * 2**20, "bytes of the request bodies of all calls in progress", minimum=1024, size=True
    )
    receive_timeout: float = _option(120.0, "seconds that the body of a request may take to arrive", minimum=0.001)
    default_timeout: float = _option(600.0, "seconds that a call without a deadline may take", minimum=0.001)
    stall_timeout: float = _option(60.0, "seconds that a client may pause while it reads a stream", minimum=0.001)
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0)
    log_level: str = _option("info", "what is logged to stderr", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("servers: the HTTP server needs the address of a gRPC server, such as 10.0.0.5:50051")
        check_addresses("servers", self.servers, targets=True)


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
