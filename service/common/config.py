"""Every option of the server, in one place: field, default, unit, and where its value comes from.

A value is taken from the command line (`--max-seqs 8`), else the environment (`SACCADE_MAX_SEQS=8`), else the file
given by `--config FILE.toml` (`max_seqs = 8`), else the default here. A name that is not an option is an error
everywhere."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ENV_PREFIX = "SACCADE_"
# Variables of the SDK that share the prefix.
_SDK_VARIABLES = {"SACCADE_API_KEY", "SACCADE_SERVER"}
# What Kubernetes puts into every pod of a namespace for a Service named `saccade` or `saccade-...`, such as
# SACCADE_SERVICE_HOST=10.0.0.1, SACCADE_PORT=tcp://10.0.0.1:50051 and SACCADE_PORT_50051_TCP_ADDR=10.0.0.1.
_INJECTED_NAME = re.compile(
    r"SACCADE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_INJECTED_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


T = TypeVar("T", bound="EngineOptions")


class ConfigError(ValueError):
    """An option that cannot be what it was set to; the message names it and what it accepts."""


def _option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), minimum: float | None = None, size: bool = False
) -> Any:
    """A field with its help text; `size` accepts suffixes such as 512Mi."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "size": size}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineOptions:
    """What the engine process is built from."""

    model: str = _option("demo", "'demo', a checkpoint directory, or a hub id that the local Hugging Face cache holds")
    dtype: str | None = _option(
        None, "compute dtype; unset: what the checkpoint declares", choices=("float32", "bfloat16")
    )
    weights: str | None = _option(
        None,
        "weights of the decoder's linear layers, quantised as they are read; unset: in dtype",
        choices=("int8", "int4"),
    )
    native: str = _option(
        "auto", "compiled decoder and vision tower on a CPU; on refuses to start without", choices=("auto", "on", "off")
    )
    device: str | None = _option(None, "'cpu' or 'cuda'; unset: cuda where there is one")
    threads: int | None = _option(None, "threads of the engine's maths; unset: one per core", minimum=1)
    max_seqs: int = _option(32, "requests that run at the same time", minimum=1)
    max_len: int | None = _option(
        None, "tokens of one request, prompt, pictures and answer together; unset: the model's, at most 8192", minimum=2
    )
    max_batched_tokens: int = _option(2048, "tokens of one decoder step over all requests", minimum=1)
    memory_bytes: int | None = _option(
        None,
        "bytes of the state arena (states, KV pages); unset: what max_seqs x max_len needs, within half the memory",
        minimum=1,
        size=True,
    )
    state_cache: str = _option(
        "auto",
        "where states are kept for later requests with the same beginning: auto = ends of pictures and prompts, "
        "align = the last state_block boundary, all = every one, none = nowhere",
        choices=("auto", "align", "all", "none"),
    )
    state_block: int | None = _option(
        None, "tokens between the boundaries of align and all; unset: the model's chunk", minimum=16
    )
    speculative: str = _option(
        "none",
        "who drafts tokens that one step then verifies: ngram = what followed the same tokens before, mtp = the "
        "checkpoint's own heads; answers are the same",
        choices=("none", "ngram", "mtp"),
    )
    draft_tokens: int = _option(3, "drafts of one step and request, at most 15", minimum=1)
    spec_state: str = _option(
        "replay",
        "how a state is taken back behind a refused draft: replay = one slot and the last inputs, slots = a slot for "
        "each token of a step",
        choices=("replay", "slots"),
    )
    draft_policy: str = _option(
        "adaptive",
        "adaptive = as many drafts as have been worth their time, none where drafting loses; fixed = as many as there "
        "may be",
        choices=("adaptive", "fixed"),
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
        None, "pictures of one encoder batch; unset: as many as the budgets allow", minimum=1
    )
    encoder_step_tokens: int | None = _option(
        None, "image tokens the encoder takes on at a time; unset: the largest legal picture", minimum=1
    )
    encoder_turn: float | None = _option(
        None,
        "seconds that pictures are encoded for between two decoder steps, where both share the cores of a CPU: shorter "
        "for steadier streams, longer for sooner pictures; unset: 0.1",
        minimum=0,
    )
    role: str = _option(
        "all",
        "all = pictures are encoded and answers generated here, encoder = pictures are encoded for others, decoder = "
        "pictures are encoded by --encoders",
        choices=("all", "encoder", "decoder"),
    )
    hang_timeout: float = _option(
        120.0,
        "seconds that the engine process may take over one turn, and a front over an answer to the hub, before it "
        "counts as hung, is killed and started again",
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
        30.0, "seconds that another process may take over a picture before it goes to the next one", minimum=0.001
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
        if self.encoder_turn is not None and (self.encoder_process or self.role != "all"):
            where = "with --encoder-process" if self.encoder_process else f"by --role {self.role}"
            raise ConfigError(f"encoder_turn: {self.encoder_turn:g} would not be used {where}: nobody takes turns")
        for address in self.encoders:
            if not re.fullmatch(r".+:\d+", address):
                raise ConfigError(f"encoders: {address!r} is not HOST:PORT")
        if len(set(self.encoders)) < len(self.encoders):
            raise ConfigError(f"encoders: an address is there twice in {','.join(self.encoders)}")


@dataclass(frozen=True)
class ServerOptions(EngineOptions):
    """The engine's options and those of the gRPC front."""

    host: str = _option(
        "127.0.0.1", "address to listen on; one that is not loopback needs TLS and keys (or client certificates)"
    )
    port: int = _option(50051, "port to listen on; 0 picks one", minimum=0)
    fronts: int = _option(
        1, "processes that speak gRPC on the port, over one engine; more than 1 where one cannot keep up", minimum=1
    )
    insecure: bool = _option(False, "listen on an address that others can reach without TLS or without keys")
    tls_cert: str | None = _option(None, "PEM file of the server's certificate chain; read again when it changes")
    tls_key: str | None = _option(None, "PEM file of its private key, not encrypted")
    tls_client_ca: str | None = _option(None, "PEM file of the authority that clients' certificates must come from")
    api_keys: str | None = _option(None, "TOML file of API key hashes; read again when it changes")
    admin: bool = _option(False, "without API keys: let every caller use AdminService")
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
    max_queue: int = _option(
        1024, "requests in the server, running and waiting, before new ones are refused", minimum=1
    )
    max_tenant_requests: int | None = _option(
        None, "requests of one API key in the server, running and waiting; unset: half of max_queue", minimum=1
    )
    max_tenant_calls: int = _option(
        1024, "calls of one API key at a time, over all its connections and of any method", minimum=1
    )
    receive_timeout: float = _option(120.0, "seconds that the message of a call may take to arrive", minimum=0.001)
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
    sizes_file: str | None = _option(
        None, "JSON file to which the sizes of encoded pictures are added at the end, for `saccade tune`"
    )
    max_images_per_request: int = _option(16, "pictures of one request", minimum=0)
    max_image_bytes: int = _option(32 * 2**20, "encoded bytes of one picture", minimum=1, size=True)
    max_image_pixels: int = _option(64_000_000, "pixels of one picture", minimum=1, size=True)
    max_videos_per_request: int = _option(4, "videos of one request", minimum=0)
    max_video_bytes: int = _option(48 * 2**20, "encoded bytes of one video", minimum=1, size=True)
    max_video_frames: int = _option(32, "frames of a video that are looked at, evenly spaced", minimum=1)
    max_video_file_frames: int = _option(20_000, "frames in a video's file, looked at or not", minimum=1)
    max_video_pixels: int = _option(
        2**34, "pixels of one video: width x height x frames of what has to be decoded", minimum=1, size=True
    )
    image_workers: int = _option(
        2,
        "processes that decode pictures and videos, at least 2 so that videos leave one, and threads that cut them",
        minimum=1,
    )
    image_timeout: float = _option(20.0, "seconds that decoding one picture may take", minimum=0.001)
    video_timeout: float = _option(120.0, "seconds that decoding one video may take", minimum=0.001)
    preprocess_bytes: int = _option(
        2 * 2**30,
        "bytes of decoded and cut pictures and videos that the encoder has not seen",
        minimum=1,
        size=True,
    )
    image_url_hosts: tuple[str, ...] = _option(
        (), "hosts that pictures and videos are fetched from by https URL, such as example.org or *.example.org:8443; "
        "unset: none",
    )  # fmt: skip
    image_url_networks: tuple[str, ...] = _option((), "networks of such hosts that are not public, such as 10.1.0.0/16")
    image_url_timeout: float = _option(10.0, "seconds that fetching one file may take", minimum=0.001)
    image_url_redirects: int = _option(3, "redirects that are followed, each checked like a URL", minimum=0)
    image_url_ca: str | None = _option(
        None, "PEM file of the authority that such hosts' certificates come from; unset: the usual ones"
    )
    media_dir: str | None = _option(None, "folder of uploaded pictures; unset: a temporary one")
    media_bytes: int = _option(2**30, "bytes of uploaded pictures, over all callers", minimum=0, size=True)
    media_tenant_bytes: int | None = _option(
        None, "bytes of uploaded pictures of one tenant; unset: all of media_bytes", minimum=0, size=True
    )
    media_ttl: float = _option(3600.0, "seconds that an uploaded picture is kept", minimum=1)
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
    default_timeout: float = _option(600.0, "seconds a call without a deadline may take", minimum=0.001)
    stall_timeout: float = _option(
        60.0, "seconds that a message of a stream may wait for its reader, and an upload for its next", minimum=0.001
    )
    warmup: bool = _option(True, "a request of the server's own, answered before health says SERVING")
    grace: float = _option(30.0, "seconds that running calls get after SIGTERM", minimum=0)
    metrics_port: int | None = _option(None, "port of the Prometheus endpoint; 0 picks one; unset: none", minimum=0)
    metrics_host: str = _option("127.0.0.1", "address of the Prometheus endpoint")
    otlp_endpoint: str | None = _option(
        None, "HOST:PORT of an OpenTelemetry collector that gets a span for each generation and its stages"
    )
    log_json: bool = _option(False, "one JSON object for each request in the log, instead of key=value pairs")
    log_level: str = _option("info", "what is logged to stderr", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_connection_age_grace is not None and self.max_connection_age is None:
            raise ConfigError(
                f"max_connection_age_grace: {self.max_connection_age_grace:g} would not be used without "
                "max_connection_age"
            )


def option_type(options: type, name: str) -> Any:
    """The plain type behind a field's annotation: `int | None` -> int."""
    hint = typing.get_type_hints(options)[name]
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def parse_value(options: type, name: str, raw: Any) -> Any:
    """One value as written on a command line, in the environment or in TOML -> the field's type. Raises ConfigError."""
    spec = next(f for f in dataclasses.fields(options) if f.name == name)
    kind = option_type(options, name)
    try:
        if kind is bool:
            value: Any = _parse_bool(raw)
        elif typing.get_origin(kind) is tuple:
            parts = raw if isinstance(raw, list | tuple) else [p for p in str(raw).split(",") if p.strip()]
            value = tuple(typing.get_args(kind)[0](p) for p in parts)
        elif spec.metadata["size"]:
            value = parse_size(raw)
        elif kind is int and isinstance(raw, float | bool):
            raise ValueError("not a whole number")
        else:
            value = kind(raw)
            if kind is float and not math.isfinite(value):
                raise ValueError("not finite")
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name}: {raw!r} is not {_describe(kind, spec.metadata['size'])}") from None
    if spec.metadata["choices"] and value not in spec.metadata["choices"]:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(spec.metadata['choices'])}")
    minimum = spec.metadata["minimum"]
    for number in value if isinstance(value, tuple) else (value,):
        if minimum is not None and number < minimum:
            raise ConfigError(f"{name}: {number} is below the minimum of {minimum}")
    return value


def parse_size(raw: Any) -> int:
    """`1048576`, `1Mi`, `64MiB` or `2g` -> bytes. Raises ValueError."""
    text = str(raw).strip().lower().removesuffix("b")
    digits = text.rstrip("kmgi")
    if not math.isfinite(float(digits)):
        raise ValueError(f"{raw!r} is not finite")
    return int(float(digits) * _UNITS[text[len(digits) :]]) if text[len(digits) :] in _UNITS else int(text)


def _parse_bool(raw: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() not in words:
        raise ValueError(raw)
    return words[str(raw).lower()]


def _describe(kind: Any, size: bool) -> str:
    if size:
        return "a number of bytes, such as 67108864 or 64Mi"
    if typing.get_origin(kind) is tuple:
        return "a list" if typing.get_args(kind)[0] is str else "a list of whole numbers, such as 64,256"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")


def flag_of(spec: dataclasses.Field[Any]) -> str:
    """How an option is written on a command line: `--max-seqs`, and `--no-warmup` for what is on unless told."""
    return ("--no-" if spec.default is True else "--") + spec.name.replace("_", "-")


def value_words(options: type, spec: dataclasses.Field[Any]) -> str:
    """What an option takes, for people: its choices, `flag`, `bytes, such as 64Mi`."""
    kind = option_type(options, spec.name)
    if spec.metadata["choices"]:
        return ", ".join(spec.metadata["choices"])
    if spec.metadata["size"]:
        return "bytes, such as 64Mi" if "bytes" in spec.name else "count, such as 64M"
    if typing.get_origin(kind) is tuple:
        return "list" if typing.get_args(kind)[0] is str else "list of numbers"
    return {bool: "flag", int: "number", float: "number"}.get(kind, "text")


_METAVARS = {"text": "TEXT", "list": "A,B", "list of numbers": "N,N", "number": "N"}


def add_arguments(parser: argparse.ArgumentParser, options: type) -> None:
    """One argument per field. Values stay strings here; `resolve` parses them."""
    parser.add_argument("--config", metavar="FILE.toml", help="read options from this file")
    for spec in dataclasses.fields(options):
        if spec.name == "model":
            parser.add_argument(
                "model", nargs="?", default=None, help=f"{spec.metadata['help']} (default: {spec.default})"
            )
            continue
        flag, help_text = flag_of(spec), spec.metadata["help"].replace("%", "%%")
        if option_type(options, spec.name) is bool:
            const = not spec.default
            parser.add_argument(flag, action="store_const", const=const, default=None, dest=spec.name, help=help_text)
        else:
            default = "" if spec.default in (None, ()) else f" (default: {spec.default})"
            metavar = "|".join(spec.metadata["choices"]) or _METAVARS.get(value_words(options, spec), "SIZE")
            parser.add_argument(flag, default=None, dest=spec.name, metavar=metavar, help=help_text + default)


def resolve(options: type[T], arguments: Mapping[str, Any], environment: Mapping[str, str]) -> T:
    """Arguments over environment over `--config` file over defaults. Raises ConfigError."""
    names = {f.name for f in dataclasses.fields(options)}
    values: dict[str, Any] = {}
    if path := arguments.get("config") or environment.get(ENV_PREFIX + "CONFIG"):
        values |= _read_file(Path(path), names)
    everything = {f.name for f in dataclasses.fields(ServerOptions)}
    for variable, raw in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable in _SDK_VARIABLES or variable == ENV_PREFIX + "CONFIG":
            continue
        if _is_injected(variable, raw):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in everything:
            raise ConfigError(
                f"environment variable {variable} is no option; options are {', '.join(sorted(everything))}"
            )
        if name in names:
            values[name] = raw
    values |= {name: value for name, value in arguments.items() if name in names and value is not None}
    return options(**{name: parse_value(options, name, raw) for name, raw in values.items()})


def _is_injected(variable: str, raw: str) -> bool:
    """Whether Kubernetes has set it for a Service, and nobody for this server."""
    if variable.endswith("_PORT") and _INJECTED_ADDRESS.fullmatch(raw):
        return True
    return _INJECTED_NAME.fullmatch(variable) is not None


def _read_file(path: Path, names: set[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: {error}") from None
    if unknown := sorted(set(values) - names):
        raise ConfigError(
            f"config file {path}: {', '.join(unknown)} is no option; options are {', '.join(sorted(names))}"
        )
    return values


def from_keywords(options: type[T], keywords: Mapping[str, Any]) -> T:
    """Keyword arguments of the SDK's LocalClient -> options. Raises ConfigError for unknown names."""
    names = {f.name for f in dataclasses.fields(options)}
    if unknown := sorted(set(keywords) - names):
        raise ConfigError(f"{', '.join(unknown)} is no option; options are {', '.join(sorted(names))}")
    return options(**{name: parse_value(options, name, raw) for name, raw in keywords.items() if raw is not None})


def from_command_line(options: type[T], parser: argparse.ArgumentParser, argv: Sequence[str]) -> T:
    """Parses and resolves in one go, against this process's environment."""
    add_arguments(parser, options)
    return resolve(options, vars(parser.parse_args(list(argv))), os.environ)
