"""Builds an engine from options and a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from decoder.arena import device_memory
from decoder.checkpoints import resolve_state_block
from decoder.config import DecoderOptions
from decoder.mtp import check_mtp
from decoder.runner import DecoderRunner
from encoder.item import IMAGE, VIDEO
from encoder.plan import describe
from encoder.runner import EncoderOptions, EncoderRunner
from families import VisionSpec
from kernels.host_memory import release_freed_memory
from kernels.native import instruction_sets
from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.encoding.encoder import TIME_SLICE_SECONDS, Encoding, LocalEncoder, WorkSource
from service.encoding.encoder_pool import EncoderPool
from service.encoding.handoff import Handoff
from service.encoding.partner import Partner, partner_of
from service.encoding.window import Largest, check_messages, check_window, largest_item
from service.engine.constraining import Constraining
from service.engine.engine import Engine
from service.engine.types import EngineInfo
from service.model.checkpoint import Checkpoint, Progress, open_checkpoint
from service.model.modelconfig import COMPUTE_DTYPES
from service.model.resolve import resolve_max_len, resolve_vision

log = logging.getLogger(__name__)

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048


def resolve_device(options: EngineOptions) -> str:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} is given, but torch finds no CUDA device; 'cpu' would work")
    index = int(device.partition(":")[2] or 0)
    if index and index >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device: {device!r} is given, but torch finds {count} CUDA devices; 'cuda:{count - 1}' would work"
        )
    return device


def resolve_dtype(options: EngineOptions, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of computation."""
    dtype: torch.dtype = getattr(torch, checkpoint.config.compute_dtype(options.dtype))
    return dtype


def dtype_loss(options: EngineOptions, checkpoint: Checkpoint) -> str:
    """The warning for a checkpoint whose dtype is not a dtype of computation; empty if it is one, or if `options` name
    a dtype."""
    declared = checkpoint.config.dtype
    if options.dtype is not None or declared in COMPUTE_DTYPES:
        return ""
    return f"{declared} is rounded to bfloat16, which has 8 bits of precision; --dtype float32 has 24"


def _report_loss(options: EngineOptions, checkpoint: Checkpoint) -> None:
    if loss := dtype_loss(options, checkpoint):
        log.warning("%s: %s", checkpoint.config.name, loss)


def resolve_step_tokens(options: EngineOptions) -> int:
    """Tokens of a decoder step. The default on a CPU is a quarter of that on a GPU: prompts are nearly as fast, buffers
    are smaller, and running requests wait less for prompts."""
    if options.max_batched_tokens is not None:
        return options.max_batched_tokens
    return max(CPU_STEP_TOKENS, options.max_seqs) if resolve_device(options) == "cpu" else GPU_STEP_TOKENS


def decoder_options(options: EngineOptions, checkpoint: Checkpoint) -> DecoderOptions:
    return DecoderOptions(
        dtype=resolve_dtype(options, checkpoint),
        device=resolve_device(options),
        max_seqs=options.max_seqs,
        max_len=resolve_max_len(options, checkpoint),
        max_batched_tokens=resolve_step_tokens(options),
        max_chunk=options.max_chunk,
        ageing=options.ageing,
        memory_bytes=options.memory_bytes,
        memory_share=options.memory_share,
        host_bytes=options.host_bytes,
        state_dtype=getattr(torch, options.state_dtype),
        checkpoint_bytes=options.checkpoint_bytes,
        state_cache=options.state_cache,
        state_block=options.state_block,
        speculative=options.speculative,
        draft_tokens=options.draft_tokens,
        draft_vocab=options.draft_vocab,
        spec_state=options.spec_state,
        draft_policy=options.draft_policy,
        forced_tokens=options.forced_tokens,
        graphs=options.graphs,
        max_capture=options.max_capture,
        overlap=options.overlap,
        weights=options.weights,
        activations=options.activations,
        native=options.native,
    )


def encoder_options(options: EngineOptions, checkpoint: Checkpoint) -> EncoderOptions:
    return EncoderOptions(
        dtype=resolve_dtype(options, checkpoint),
        device=torch.device(resolve_device(options)),
        graphs=options.graphs,
        token_budgets=options.token_budgets or None,
        max_images=options.max_images,
        max_tokens_per_step=options.encoder_step_tokens,
        graph_kinds=None,
        native=options.native,
    )


def check_images(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for options with which the server could not process the images that it accepts, and warns if
    there can be none."""
    vision = resolve_vision(options, checkpoint)
    if vision is None:
        return
    dtype, max_len = resolve_dtype(options, checkpoint), resolve_max_len(options, checkpoint)
    check_handoff(options, vision, dtype)
    if options.role != "decoder":
        check_encoder_step(options, checkpoint, vision)
        if options.native == "on" and (why := vision.not_compiled(dtype, torch.device(resolve_device(options)))):
            raise ConfigError(f"native: 'on' is not possible: {why}; 'auto' would work")
    if options.encoder_process:
        check_segment(options, vision, dtype)
    if max_len <= vision.min_image_tokens:
        log.warning(
            "no image fits a context of %d tokens: the smallest takes %d, and an answer at least 1; text is served",
            max_len, vision.min_image_tokens,
        )  # fmt: skip


def check_handoff(options: EngineOptions, vision: VisionSpec, dtype: torch.dtype) -> None:
    """Raises ConfigError if not even the smallest image fits the handoff."""
    row = vision.row_width * dtype.itemsize
    if options.handoff_bytes // row < vision.min_image_tokens:
        raise ConfigError(
            f"handoff_bytes: {options.handoff_bytes} holds {options.handoff_bytes // row} image tokens and the "
            f"smallest image has {vision.min_image_tokens}; at least {vision.min_image_tokens * row} would work"
        )


def check_segment(options: EngineOptions, vision: VisionSpec, dtype: torch.dtype) -> None:
    """Raises ConfigError if not even the smallest image fits the memory shared with the encoder's process."""
    from service.encoding.process_link import segment_for

    token = vision.min_image_tokens * dtype.itemsize
    least = segment_for(token * vision.patches_per_token * vision.patch_widths[IMAGE], token * vision.row_width)
    if options.encoder_segment_bytes < least:
        raise ConfigError(
            f"encoder_segment_bytes: {options.encoder_segment_bytes} does not hold the smallest image, of "
            f"{vision.min_image_tokens} image tokens; at least {least} would work"
        )


def check_encoder_step(options: EngineOptions, checkpoint: Checkpoint, vision: VisionSpec) -> None:
    """Raises ConfigError if the smallest image does not fit an encoder step, or if a step's buffers and activations
    would take more than the device's memory."""
    step, least = options.encoder_step_tokens, vision.min_image_tokens
    if step is None:
        return
    if step < least:
        raise ConfigError(
            f"encoder_step_tokens: {step} is less than the {least} image tokens of the smallest image; at least "
            f"{least} would work"
        )
    budgets = encoder_options(options, checkpoint).budgets(vision)
    needed = describe(vision, budgets, resolve_dtype(options, checkpoint), vision.patch_widths)[-1]
    size, device = needed.buffer_bytes + needed.activation_bytes, resolve_device(options)
    if size > (memory := device_memory(device)):
        raise ConfigError(
            f"encoder_step_tokens: {step} takes about {size} bytes, more than the {memory} bytes of memory of "
            f"{device}; {vision.max_image_tokens}, the tokens of the largest image, would work"
        )


def check_instruction_set(options: EngineOptions) -> None:
    """Raises ConfigError for a set that the processor lacks, even if the option would have no effect."""
    if options.instruction_set == instruction_sets.AUTO:
        return
    try:
        instruction_sets.choose(options.instruction_set, instruction_sets.processor_features())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def use_processor(options: EngineOptions) -> None:
    """Sets the number of threads and the instruction set of this process. Raises ConfigError for a set that the
    processor lacks."""
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    check_instruction_set(options)
    instruction_sets.use(options.instruction_set)
    if options.instruction_set != instruction_sets.AUTO and options.native == "off":
        log.warning("instruction_set %s has no effect without compiled code (native is off)", options.instruction_set)


def build_engine(options: EngineOptions) -> Engine:
    """Reads the checkpoint and builds encoder, handoff and decoder. Starts nothing. Raises ConfigError or
    CheckpointError with a value that would work."""
    use_processor(options)
    checkpoint = open_checkpoint(options.model, options.revision)
    check_role(options, checkpoint)
    check_activations(options, checkpoint)
    check_state_dtype(options, checkpoint)
    check_state_block(options, checkpoint)
    check_drafting(options, checkpoint)
    check_images(options, checkpoint)
    dtype = resolve_dtype(options, checkpoint)
    _report_loss(options, checkpoint)
    vision = resolve_vision(options, checkpoint)
    with weights_progress("decoder") as progress:
        decoder = DecoderRunner(
            checkpoint.config.decoder, decoder_options(options, checkpoint), checkpoint.decoder_parts(progress)
        )
    handoff: Handoff | None = None
    encoding: Encoding | None = None
    if vision is not None:
        handoff = Handoff(options.handoff_bytes, vision.row_width, dtype, decoder.options.device)
        if options.role == "decoder":
            encoding = connect_encoders(options, checkpoint, vision, handoff)
        elif options.encoder_process:
            encoding = encoder_process(options, vision, handoff)
        else:
            encoding = local_encoder(options, checkpoint, vision, handoff, shared=True)
    release_freed_memory()
    info = EngineInfo(
        model=checkpoint.config.name,
        revision=checkpoint.revision,
        max_len=decoder.options.max_len,
        max_seqs=options.max_seqs,
        max_image_tokens=handoff.max_tokens if handoff else 0,
        dtype=str(dtype).removeprefix("torch."),
        takes_video=VIDEO in checkpoint.encoder_kinds,
    )
    log.info(
        "%s (%s, revision %s): %.1f M parameters on %s, up to %d requests of %d tokens",
        info.model, info.dtype, info.revision, checkpoint.parameters() / 1e6, decoder.options.device, options.max_seqs,
        info.max_len,
    )  # fmt: skip
    constraining = Constraining(
        checkpoint.path / "tokenizer.json", checkpoint.config.decoder.vocab_size, checkpoint.config.eos_token_ids
    )
    return Engine(info, decoder, constraining, handoff, encoding, vision)


def local_encoder(
    options: EngineOptions, checkpoint: Checkpoint, vision: VisionSpec, handoff: Handoff, *, shared: bool = False
) -> LocalEncoder:
    """The encoder in this process. On a GPU it has a thread; on a CPU the engine's loop calls it between decoder steps,
    for short time slices if the thread is `shared` with a decoder."""
    on_gpu = torch.device(resolve_device(options)).type != "cpu"
    if on_gpu and options.encoder_time_slice is not None:
        log.warning(
            "encoder_time_slice %g has no effect: on a GPU the encoder has a thread of its own",
            options.encoder_time_slice,
        )
    time_slice = TIME_SLICE_SECONDS if options.encoder_time_slice is None else options.encoder_time_slice
    return LocalEncoder(
        _encoder_runner(options, checkpoint, vision), handoff, step_tokens=step_tokens(options, vision),
        own_thread=on_gpu, time_slice=time_slice if shared and not on_gpu else None,
    )  # fmt: skip


def _encoder_runner(options: EngineOptions, checkpoint: Checkpoint, vision: VisionSpec) -> EncoderRunner:
    with weights_progress("encoder") as progress:
        return EncoderRunner(vision, encoder_options(options, checkpoint), checkpoint.vision_weights(progress))


def step_tokens(options: EngineOptions, vision: VisionSpec) -> int:
    return options.encoder_step_tokens or vision.max_image_tokens


def largest_of(options: EngineOptions, checkpoint: Checkpoint, vision: VisionSpec, rows: int) -> Largest:
    """Bounds on the images and videos of a server with a handoff of `rows` rows."""
    frames = options.max_video_frames if VIDEO in checkpoint.encoder_kinds else 0
    room = min(rows, resolve_max_len(options, checkpoint) - 1)
    return largest_item(vision, resolve_dtype(options, checkpoint), frames=frames, room=room)


def check_decoders(options: ServerOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if no decoder with the same options could use this encoder."""
    check_role(options, checkpoint)
    check_messages(options)
    vision = resolve_vision(options, checkpoint)
    assert vision is not None
    rows = options.handoff_bytes // (vision.row_width * resolve_dtype(options, checkpoint).itemsize)
    check_window(options, largest_of(options, checkpoint, vision, rows))


def connect_encoders(
    options: EngineOptions, checkpoint: Checkpoint, vision: VisionSpec, handoff: Handoff
) -> EncoderPool:
    """The encoders of `--encoders`. An encoder that cannot be reached yet is connected later. Raises PartnerRefused if
    one serves another model, or takes less than the largest image or video."""
    from service.encoding.credentials import channel_credentials
    from service.encoding.grpc_link import GrpcLink

    dtype = resolve_dtype(options, checkpoint)
    partner = partner_of(checkpoint, vision, dtype)
    largest = largest_of(options, checkpoint, vision, handoff.max_tokens)
    credentials = channel_credentials(options)
    links = [
        GrpcLink(address, partner, largest, credentials=credentials, api_key=options.encoder_api_key)
        for address in options.encoders
    ]
    return EncoderPool(handoff, links, lease=options.encoder_lease, step_tokens=step_tokens(options, vision))


def encoder_process(options: EngineOptions, vision: VisionSpec, handoff: Handoff) -> EncoderPool:
    """Starts the encoder in another process on this host. Raises ConfigError with that process's message."""
    from service.encoding.process_link import ProcessLink

    check_segment(options, vision, handoff.dtype)
    link = ProcessLink(options, segment_bytes=options.encoder_segment_bytes)
    return EncoderPool(handoff, [link], lease=options.encoder_lease, step_tokens=step_tokens(options, vision))


def encoder_of_process(options: EngineOptions, source: WorkSource) -> LocalEncoder:
    """Builds the encoder inside the encoder process. It has no thread of its own on any device: its caller runs it."""
    use_processor(options)
    checkpoint = open_checkpoint(options.model, options.revision)
    vision = resolve_vision(options, checkpoint)
    assert vision is not None, "a process for the encoder of a model without one"
    runner = _encoder_runner(options, checkpoint, vision)
    return LocalEncoder(runner, source, step_tokens=step_tokens(options, vision))


def check_role(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a role that needs images if the model takes none."""
    if options.role != "all" and checkpoint.config.vision is None:
        nothing = {"encoder": "to encode", "decoder": "that encoders could do"}[options.role]
        raise ConfigError(
            f"role: {checkpoint.config.name} takes no images, so there is nothing {nothing}; 'all' would work"
        )


class RowsOf(NamedTuple):
    """The formats of weights that can be multiplied with one kind of activations."""

    stored: frozenset[str]
    """Formats of published checkpoints."""
    forms: frozenset[str]
    """Values of `--weights`. The format "own" of a checkpoint stands for one of them."""
    words: str
    """All of them, for messages."""


ROWS_OF = {
    "fp8": RowsOf(frozenset({"fp8-tensor", "fp8-channel"}), frozenset({"fp8"}), "fp8 with a scale per row or tensor"),
    "int8": RowsOf(frozenset({"int8", "int4", "gptq", "awq"}), frozenset({"int8", "int4", "int4-32"}), "int8 or int4"),
}
"""By kind of activations."""


def check_activations(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if no weight could be multiplied with activations of this kind, if the device cannot do so, or
    if the checkpoint declares another kind of activations."""
    kind = options.activations
    if kind is None:
        return
    of = ROWS_OF[kind]
    rows = of.stored | ({"own"} if checkpoint.config.weights in of.forms else set())
    stored = options.weights is None and rows & checkpoint.stored_as.keys()
    device, wanted = resolve_device(options), "CPU" if kind == "int8" else "GPU"
    if options.weights not in of.forms and not stored:
        kinds = options.weights or ", ".join(checkpoint.formats) or "16 or 32 bits"
        raise ConfigError(
            f"activations: {kind} would have no effect: linear layers are in {kinds}, not in {of.words}; with "
            f"--weights {kind} it would work, on a {wanted}"
        )
    if device.startswith("cpu") != (wanted == "CPU"):
        raise ConfigError(f"activations: {kind} needs a {wanted}, and the device is {device}")
    if kind == "int8" and checkpoint.declared is not None:
        for weight in checkpoint.weights.values():
            if weight.scheme in of.stored and (other := checkpoint.declared.say(weight.module).inputs):
                raise ConfigError(f"activations: int8 contradicts the checkpoint: {weight.module}: {other}")


def check_drafting(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ValueError with the reason if this checkpoint's multi-token prediction heads cannot draft."""
    if options.speculative == "mtp":
        check_mtp(checkpoint.config.decoder, checkpoint.decoder_shapes(), options.draft_vocab)


def check_state_dtype(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a dtype other than float32 if no layer has a recurrent state."""
    if options.state_dtype != "float32" and not checkpoint.config.decoder.slots:
        raise ConfigError(
            f"state_dtype: {options.state_dtype} would have no effect: {checkpoint.config.name} has no recurrent "
            "layers; float32 would work"
        )


def check_state_block(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if no request is long enough to use a state of `state_cache` align or all, and warns if
    `state_block` has no effect."""
    config, mode, given = checkpoint.config.decoder, options.state_cache, options.state_block
    if mode not in ("align", "all") or not config.slots:
        if given is not None:
            why = f"with state_cache {mode}; align and all use it" if config.slots else "without recurrent layers"
            log.warning("state_block %d has no effect %s", given, why)
        return
    page, max_len = DecoderOptions.page_size, resolve_max_len(options, checkpoint)
    block = resolve_state_block(given, page, config.scan_chunk or page)
    longest = max_len - 2  # after the state, a request has a token that is computed, and one of its answer
    if block > longest:
        most = longest // page * page
        way = f"state_block of at most {most}" if most > 0 else "state_cache auto"
        raise ConfigError(
            f"{'state_cache' if given is None else 'state_block'}: a request that can use a state at token {block}, "
            f"the first that state_cache {mode} keeps, has at least {block + 2} tokens, but max_len is {max_len}; "
            f"{way} would work"
        )


def build_encoder(
    options: EngineOptions, checkpoint: Checkpoint | None = None
) -> tuple[LocalEncoder, Handoff, Partner]:
    """The encoder's half of a model, for `--role encoder`. `checkpoint`: the options' model, if it is already open.
    Raises ConfigError or CheckpointError."""
    use_processor(options)
    checkpoint = checkpoint or open_checkpoint(options.model, options.revision)
    check_role(options, checkpoint)
    check_images(options, checkpoint)
    dtype = resolve_dtype(options, checkpoint)
    vision = resolve_vision(options, checkpoint)
    assert vision is not None
    _report_loss(options, checkpoint)
    # Rows are sent over the network, so they are kept in host memory.
    handoff = Handoff(options.handoff_bytes, vision.row_width, dtype)
    return local_encoder(options, checkpoint, vision, handoff), handoff, partner_of(checkpoint, vision, dtype)


@contextlib.contextmanager
def weights_progress(what: str) -> Iterator[Progress | None]:
    """Shows a progress bar on stderr while weights are read, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(f"{what} weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
