"""Options of the engine process: field, default, unit."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernels.native.instruction_sets import CHOICES
from kernels.weight_forms import FORMS
from service.common.option import INT32, LONGEST_TIME, LONGEST_WAIT, ConfigError, check_addresses
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
    adapter: str | None = _option(
        None,
        "folder or hub id of a LoRA adapter in PEFT's format, which is merged into the model's weights while they are "
        "loaded",
    )
    adapter_revision: str | None = _option(
        None, "branch, tag or commit of an adapter given by its hub id; unset: the latest commit of main"
    )
    dtype: str | None = _option(
        None,
        "dtype of computation; unset: the checkpoint's, or bfloat16 if that is float16",
        choices=("float32", "bfloat16"),
    )
    weights: str | None = _option(
        None,
        "quantise the weights of the decoder's linear layers to this format while loading (int8: a scale for "
        "each output, int4: for 128 inputs, int8-32 and int4-32: for 32); unset: as in the checkpoint",
        choices=FORMS,
    )
    activations: str | None = _option(
        None,
        "quantise activations before matrix products, which changes answers; fp8: with fp8 weights, on a GPU with fp8 "
        "products; int8: with int8 or int4 weights, on a CPU; unset: no",
        choices=("fp8", "int8"),
    )
    state_dtype: str = _option(
        "float32",
        "dtype of recurrent states, in batch slots and in the prefix cache; bfloat16 halves their memory, rounds them "
        "at fixed positions of a sequence, which changes answers, and needs a CPU",
        choices=("float32", "bfloat16"),
    )
    native: str = _option(
        "auto",
        "use compiled code for the decoder and the vision tower on a CPU; on: an error if there is none",
        choices=("auto", "on", "off"),
    )
    instruction_set: str = _option(
        "auto", "instruction set of compiled code; auto: the best that the processor supports", choices=CHOICES
    )
    device: str | None = _option(None, "'cpu', 'cuda' or 'cuda:N'; unset: cuda if available")
    threads: int | None = _option(
        None,
        "threads of computation in the engine; unset: one for each physical core that the process may use, and no more "
        "than its CPU quota",
        minimum=1,
        maximum=1024,
    )
    max_seqs: int = _option(32, "requests that run at the same time, each in a batch slot", minimum=1, maximum=2**16)
    max_len: int | None = _option(
        None, "tokens of one request: prompt, images and answer; unset: the model's limit, at most 8192",
        minimum=2, maximum=INT32,
    )  # fmt: skip
    max_batched_tokens: int | None = _option(
        None,
        "tokens of one decoder step, of all requests together; unset: 2048 on a GPU, on a CPU 512 or max_seqs",
        minimum=1,
        maximum=2**20,
    )
    max_chunk: int | None = _option(
        None, "prompt tokens of one request in one decoder step; unset: max_batched_tokens", minimum=1
    )
    ageing: int = _option(
        256, "decoder steps of waiting that count as much as one level of priority: a request overtakes only those of "
        "a lower level that arrived fewer than this many steps earlier for each level",
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
        "positions where the prefix cache keeps states for later requests with the same beginning: auto = ends of "
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
        "source of the draft tokens for speculative decoding: ngram = tokens that followed the same tokens earlier in "
        "the request, mtp = the checkpoint's multi-token prediction heads; answers are the same",
        choices=("none", "ngram", "mtp"),
    )
    draft_tokens: int = _option(3, "draft tokens of one request in one step, at most 15", minimum=1)
    draft_vocab: int | None = _option(
        None,
        "with speculative mtp: only token ids below this number are drafted, so that drafting reads only that part of "
        "the vocabulary projection; unset: all ids; answers are the same",
        minimum=1,
    )
    spec_state: str = _option(
        "replay",
        "how a state is restored after a rejected draft: replay = computed from one state slot and the last inputs, "
        "slots = taken from the state slots of the step, one for each token",
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
    max_video_frames: int = _option(32, "frames that are sampled from a video, evenly spaced", minimum=1, maximum=INT32)
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
        maximum=INT32,
    )
    encoder_time_slice: float | None = _option(
        None,
        "seconds of encoding between two decoder steps, if both share the cores of a CPU: lower for steadier streams, "
        "higher for faster images; unset: 0.1",
        minimum=0,
        maximum=LONGEST_WAIT,
    )
    role: str = _option(
        "all",
        "all = encode images and generate answers, encoder = encode images for servers of role decoder, decoder = "
        "generate answers with images from --encoders",
        choices=("all", "encoder", "decoder"),
    )
    hang_timeout: float = _option(
        120.0,
        "seconds without a finished step of the engine process, or a heartbeat of a frontend process or of the HTTP "
        "server, before the process is killed and started again",
        minimum=0.1,
        maximum=LONGEST_TIME,
    )
    load_timeout: float = _option(
        3600.0,
        "seconds that a process may take to start, model loading included, before it is killed",
        minimum=0.1,
        maximum=LONGEST_WAIT,
    )
    encoders: tuple[str, ...] = _option(
        (), "with --role decoder: HOST:PORT of servers with --role encoder, separated by commas"
    )
    encoder_process: bool = _option(
        False, "encode in a separate process on this host, so that a crash of the encoder does not end the engine"
    )
    encoder_segment_bytes: int = _option(
        256 * 2**20,
        "with encoder_process: bytes of shared memory between the engine and that process",
        minimum=2**16,
        size=True,
    )
    encoder_lease: float = _option(
        30.0,
        "seconds that an encoder in another process may take for an image before another encoder gets it",
        minimum=0.001,
        maximum=LONGEST_WAIT,
    )
    encoder_ca: str | None = _option(
        None, "PEM file of the CA that signed the encoders' certificates; read again when it changes; unset: no TLS"
    )
    encoder_cert: str | None = _option(
        None, "PEM file of the certificate that this server presents to encoders; read again when it changes"
    )
    encoder_cert_key: str | None = _option(None, "PEM file of the private key of encoder_cert")
    encoder_api_key: str | None = _option(
        None,
        "API key for the encoders, with the scope encoder; set SACCADE_ENCODER_API_KEY instead to keep it off the "
        "command line",
    )

    def __post_init__(self) -> None:
        if self.adapter is None and self.adapter_revision is not None:
            raise ConfigError(f"adapter_revision: {self.adapter_revision} would not be used without adapter; name both")
        if self.role == "decoder" and not self.encoders:
            raise ConfigError("encoders: --role decoder needs the encoders' addresses, such as 10.0.0.5:50051")
        if self.role != "decoder" and self.encoders:
            raise ConfigError(f"encoders: {','.join(self.encoders)} would not be used by --role {self.role}")
        if self.encoder_process and self.role != "all":
            raise ConfigError(f"encoder_process: it would not be used by --role {self.role}, only by --role all")
        if self.encoder_time_slice is not None and (self.encoder_process or self.role != "all"):
            where = "with --encoder-process" if self.encoder_process else f"by --role {self.role}"
            raise ConfigError(
                f"encoder_time_slice: {self.encoder_time_slice:g} would not be used {where}: encoder and decoder run "
                "in different processes"
            )
        check_addresses("encoders", self.encoders)
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device: {self.device!r} is not 'cpu', 'cuda' or 'cuda:N', such as 'cuda:1'")
