"""Builds an engine from options and a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch

from decoder.runner import DecoderRunner
from encoder.item import VIDEO
from encoder.runner import EncoderRunner
from families import VisionSpec
from kernels.host_memory import release_freed_memory
from kernels.native import instruction_sets
from service.common.config import EngineOptions, ServerOptions
from service.encoding.encoder import TIME_SLICE_SECONDS, Encoding, LocalEncoder, WorkSource
from service.encoding.encoder_pool import EncoderPool
from service.encoding.handoff import Handoff
from service.encoding.largest_item import Largest, check_messages, check_window, largest_item
from service.encoding.partner import Partner, partner_of
from service.engine.checks import check_images, check_instruction_set, check_model, check_role, check_segment
from service.engine.constraining import Constraining
from service.engine.engine import Engine
from service.engine.runner_options import decoder_options, encoder_options, resolve_device, resolve_dtype
from service.engine.threads import use_threads
from service.engine.types import EngineInfo
from service.model.checkpoint import Checkpoint, Progress
from service.model.modelconfig import COMPUTE_DTYPES
from service.model.resolve import checkpoint_of, resolve_max_len, resolve_vision

log = logging.getLogger(__name__)


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


def use_processor(options: EngineOptions) -> None:
    """Sets the number of threads and the instruction set of this process. Raises ConfigError for a set that the
    processor lacks."""
    use_threads(options)
    check_instruction_set(options)
    instruction_sets.use(options.instruction_set)
    if options.instruction_set != instruction_sets.AUTO and options.native == "off":
        log.warning("instruction_set %s has no effect without compiled code (native is off)", options.instruction_set)


def build_engine(options: EngineOptions) -> Engine:
    """Reads the checkpoint and builds encoder, handoff and decoder. Starts nothing. Raises ConfigError or
    CheckpointError with a value that would work."""
    use_processor(options)
    checkpoint = checkpoint_of(options)
    check_model(options, checkpoint)
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
            encoding = start_encoder_process(options, vision, handoff)
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
    """The encoder in this process. `shared`: with a decoder. Then it has a thread of its own on a GPU; on a CPU the
    engine's loop calls it between decoder steps, for short time slices. Otherwise its caller's thread runs it."""
    on_gpu = torch.device(resolve_device(options)).type != "cpu"
    if on_gpu and options.encoder_time_slice is not None:
        log.warning(
            "encoder_time_slice %g has no effect: on a GPU the encoder has a thread of its own",
            options.encoder_time_slice,
        )
    time_slice = TIME_SLICE_SECONDS if options.encoder_time_slice is None else options.encoder_time_slice
    return LocalEncoder(
        _encoder_runner(options, checkpoint, vision), handoff, step_tokens=step_tokens(options, vision),
        own_thread=shared and on_gpu, time_slice=time_slice if shared and not on_gpu else None,
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


def start_encoder_process(options: EngineOptions, vision: VisionSpec, handoff: Handoff) -> EncoderPool:
    """Starts the encoder in another process on this host. Raises ConfigError with that process's message."""
    from service.encoding.process_link import ProcessLink

    check_segment(options, vision, handoff.dtype)
    link = ProcessLink(options, segment_bytes=options.encoder_segment_bytes)
    return EncoderPool(handoff, [link], lease=options.encoder_lease, step_tokens=step_tokens(options, vision))


def encoder_of_process(options: EngineOptions, source: WorkSource) -> LocalEncoder:
    """Builds the encoder in the process that `start_encoder_process` has started. It has no thread of its own on any
    device: its caller runs it."""
    use_processor(options)
    checkpoint = checkpoint_of(options)
    vision = resolve_vision(options, checkpoint)
    assert vision is not None, "a process for the encoder of a model without one"
    runner = _encoder_runner(options, checkpoint, vision)
    return LocalEncoder(runner, source, step_tokens=step_tokens(options, vision))


def build_encoder(
    options: EngineOptions, checkpoint: Checkpoint | None = None
) -> tuple[LocalEncoder, Handoff, Partner]:
    """The encoder's half of a model, for `--role encoder`. `checkpoint`: the options' model, if it is already open.
    Raises ConfigError or CheckpointError."""
    use_processor(options)
    checkpoint = checkpoint or checkpoint_of(options)
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
