"""Options + checkpoint -> a running engine: the one place where the parts are put together."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from encoder.config import VisionConfig
from encoder.runner import EncoderOptions, EncoderRunner
from service.checkpoint import Checkpoint, Progress, open_checkpoint
from service.config import ConfigError, EngineOptions
from service.engine import Engine, EngineInfo
from service.handoff import Handoff

log = logging.getLogger(__name__)

DEFAULT_MAX_LEN = 8192


def resolve_device(options: EngineOptions) -> str:
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} was asked for and this torch finds no CUDA device; 'cpu' would work")
    return device


def resolve_max_len(options: EngineOptions, checkpoint: Checkpoint) -> int:
    """The model's context, at most 8192, unless the option says otherwise; a model has no positions that forbid
    more."""
    return options.max_len or min(checkpoint.config.decoder.max_position_embeddings, DEFAULT_MAX_LEN)


def resolve_vision(checkpoint: Checkpoint, max_len: int) -> VisionConfig | None:
    """The vision configuration with the image budget that a context of `max_len` leaves."""
    vision = checkpoint.config.vision
    return None if vision is None else replace(vision, max_model_len=min(vision.max_model_len, max_len))


def build_engine(options: EngineOptions) -> Engine:
    """Reads the checkpoint and makes encoder, handoff and decoder. Raises ConfigError or CheckpointError with the
    number that would work; nothing is started yet."""
    device = resolve_device(options)
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(options.model)
    name = options.dtype or checkpoint.config.dtype
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    max_len = resolve_max_len(options, checkpoint)
    vision = resolve_vision(checkpoint, max_len)
    with _progress("decoder") as progress:
        decoder = DecoderRunner(
            checkpoint.config.decoder,
            DecoderOptions(
                dtype=dtype,
                device=device,
                max_seqs=options.max_seqs,
                max_len=max_len,
                max_batched_tokens=options.max_batched_tokens,
                memory_bytes=options.memory_bytes,
            ),
            checkpoint.decoder_weights(progress),
        )
    encoder, handoff = None, None
    if vision is not None:
        with _progress("encoder") as progress:
            encoder = EncoderRunner(
                vision,
                EncoderOptions(
                    dtype=dtype,
                    device=torch.device(device),
                    graphs=options.graphs,
                    token_budgets=options.token_budgets or None,
                    max_images=options.max_images,
                    max_tokens_per_step=options.encoder_step_tokens,
                ),
                checkpoint.vision_weights(progress),
            )
        handoff = Handoff(options.handoff_bytes, checkpoint.config.decoder.hidden_size, dtype, device)
        if handoff.max_tokens < vision.min_image_tokens:
            need = vision.min_image_tokens * checkpoint.config.decoder.hidden_size * dtype.itemsize
            raise ConfigError(
                f"handoff_bytes: {options.handoff_bytes} holds {handoff.max_tokens} image tokens and the smallest "
                f"picture has {vision.min_image_tokens}; at least {need} would work"
            )
    info = EngineInfo(
        model=checkpoint.config.name,
        revision=checkpoint.revision,
        max_len=max_len,
        max_seqs=options.max_seqs,
        max_image_tokens=handoff.max_tokens if handoff else 0,
        dtype=name,
        pixel_dtype=dtype,
    )
    log.info(
        "%s (%s, revision %s): %.1f M parameters on %s, up to %d requests of %d tokens",
        info.model, name, info.revision, checkpoint.parameters() / 1e6, device, options.max_seqs, max_len,
    )  # fmt: skip
    step_tokens = options.encoder_step_tokens or (vision.max_image_tokens if vision else None)
    return Engine(info, decoder, encoder, handoff, encoder_step_tokens=step_tokens, threads=threads)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    """A bar on stderr while weights stream in, where a person is looking; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(f"{what} weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
