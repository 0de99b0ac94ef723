"""Checks of options against a checkpoint, before its weights are read. Errors name a value that would work."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from decoder.arena import device_memory
from decoder.checkpoints import resolve_state_block
from decoder.config import DecoderOptions
from decoder.mtp_head import check_mtp
from encoder.item import IMAGE
from encoder.plan import describe
from families import VisionSpec
from kernels.linear.int8_rows import has_whole_sums
from kernels.linear.quantised import INTEGERS
from kernels.native import instruction_sets
from kernels.native.structs import SUMMED
from kernels.weight_forms import kind_and_group
from service.common.config import ConfigError, EngineOptions
from service.engine.runner_options import encoder_options, resolve_device, resolve_dtype
from service.model.checkpoint import Checkpoint
from service.model.formats.tensors import StoredWeight
from service.model.resolve import resolve_max_len, resolve_vision
from service.model.weight_sources import EMBEDDINGS, HEAD

log = logging.getLogger(__name__)


def check_model(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError, or ValueError for drafts, if a server with these options could not serve the model as they
    say."""
    check_role(options, checkpoint)
    check_activations(options, checkpoint)
    check_state_dtype(options, checkpoint)
    check_state_block(options, checkpoint)
    check_drafting(options, checkpoint)
    check_images(options, checkpoint)


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
    """Formats of published checkpoints and converted files."""
    forms: frozenset[str]
    """Values of `--weights`; a checkpoint in this server's own format has these formats too."""
    words: str
    """All of them, for messages."""


ROWS_OF = {
    "fp8": RowsOf(frozenset({"fp8-tensor", "fp8-channel"}), frozenset({"fp8"}), "fp8 with a scale per row or tensor"),
    "int8": RowsOf(
        frozenset({"int8", "int8-packed", "int8-16", "int4", "int4-16", "gptq", "gptq-int8", "awq"}),
        frozenset({"int8", "int8-32", "int4", "int4-32"}),
        "int8 or int4",
    ),
}
"""By kind of activations."""


def check_activations(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if no weight could be multiplied with activations of this kind, if the device cannot do so, or
    if the checkpoint declares another kind of activations. Logs which weights keep rows of 16 bits."""
    kind = options.activations
    if kind is None:
        return
    of = ROWS_OF[kind]
    stored = options.weights is None and (of.stored | of.forms) & checkpoint.stored_as.keys()
    device, wanted = resolve_device(options), "CPU" if kind == "int8" else "GPU"
    if options.weights not in of.forms and not stored:
        kinds = options.weights or ", ".join(checkpoint.formats) or "16 or 32 bits"
        raise ConfigError(
            f"activations: {kind} would have no effect: linear layers are in {kinds}, not in {of.words}; with "
            f"--weights {kind} it would work, on a {wanted}"
        )
    if device.startswith("cpu") != (wanted == "CPU"):
        raise ConfigError(f"activations: {kind} needs a {wanted}, and the device is {device}")
    if kind == "int8":
        _check_groups(checkpoint, options.weights)
    if kind == "int8" and checkpoint.declared is not None:
        for weight in checkpoint.weights.values():
            if weight.scheme in of.stored and (other := checkpoint.declared.say(weight.module).inputs):
                raise ConfigError(f"activations: int8 contradicts the checkpoint: {weight.module}: {other}")


def _check_groups(checkpoint: Checkpoint, form: str | None) -> None:
    """Logs how many weights keep rows of 16 bits because of their groups; ConfigError if all do. Weights of the kind of
    `form` (`--weights`) keep their groups, others are quantised to it. The vocabulary projection and experts always
    keep rows of 16 bits."""
    names = checkpoint.config.decoder.linear_weights().keys() - {EMBEDDINGS, HEAD}
    products: list[tuple[StoredWeight, str]] = []
    for name, weight in checkpoint.weights.items():
        targets = [each.name for each in checkpoint.targets(name) if each.how != "stack" and each.name in names]
        kind = checkpoint.kind_of(targets[0]) if targets and len(weight.shape) == 2 else ""
        if kind in INTEGERS or (kind and form is not None):
            products.append((weight, kind))
    kept = INTEGERS if form is None else (kind_and_group(form)[0],)
    others = [
        (weight, kind) for weight, kind in products
        if kind in kept and weight.group and not has_whole_sums(weight.group, weight.shape[-1])
    ]  # fmt: skip
    if not others:
        return
    first = others[0][0]
    why = f"{first.module} has groups of {first.group} inputs, not of a multiple of {SUMMED}"
    if len(others) == len(products):
        other = "int8" if any(kind == "int4" for _, kind in others) else "int4"
        raise ConfigError(f"activations: int8 would have no effect: {why}; with --weights {other} it would work")
    log.info("activations: %d of %d weights keep rows of 16 bits: %s", len(others), len(products), why)


def check_drafting(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ValueError with the reason if this checkpoint's multi-token prediction heads cannot draft."""
    if options.speculative == "mtp":
        check_mtp(checkpoint.config.decoder, checkpoint.decoder_shapes(), options.draft_vocab)


def check_state_dtype(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for a dtype other than float32 if no layer has a recurrent state."""
    if options.state_dtype != "float32" and not checkpoint.config.decoder.has_recurrent_states:
        raise ConfigError(
            f"state_dtype: {options.state_dtype} would have no effect: {checkpoint.config.name} has no recurrent "
            "states; float32 would work"
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
