"""`saccade plan MODEL`: what a configuration will do, without loading the model.

Prints memory by part, how many requests fit and what limits them, and which sizes are captured. Reads the configuration
and the headers of the weight files, never the weights; without weight files, sizes are computed from the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from decoder.arena import ArenaLayout, resolve_blocks
from decoder.checkpoints import most_checkpoints, resolve_state_block, state_bytes, state_slots
from decoder.config import DecoderOptions
from decoder.graphs import capture_plan, check_slots, graph_bytes
from encoder.plan import describe
from kernels.cores import available_cores
from kernels.linear import quantised_bytes
from kernels.linear.layouts import is_compact_width
from kernels.native.instruction_sets import NativeUnavailable, choose, processor_features, supported
from kernels.native.library import origin
from kernels.weight_forms import kind_and_group
from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.common.roles import warn_of_unused
from service.engine.build import check_decoders, dtype_loss
from service.engine.checks import check_images, check_instruction_set, check_model, check_role
from service.engine.runner_options import decoder_options, encoder_options, resolve_device, resolve_dtype
from service.engine.threads import describe_threads, warn_of_threads
from service.model.adapter import Adapter
from service.model.checkpoint import Checkpoint
from service.model.hub import fetched
from service.model.resolve import checkpoint_of, resolve_vision

CLIP_FRAMES = 32
AUTO_CHECKPOINTS = (
    "end of the system prompt",
    "junction",
    "last chunk",
    "last multiple of chunks",
    "end of the answer",
)
"""The checkpoints that `state_cache: auto` keeps of one request without images; each image adds one."""


@dataclass(frozen=True)
class Table:
    """A table of text cells with a title; the first row of `rows` is the header."""

    title: str
    rows: list[tuple[str, ...]]

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in self.rows) for i in range(len(self.rows[0]))]
        lines = [self.title]
        for row in self.rows:
            first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            lines.append("  " + "  ".join([first, *rest]).rstrip())
        return "\n".join(lines)


def size(count: int) -> str:
    """Formats bytes for people: 512 B, 1.5 KiB, 2.0 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def plan(options: ServerOptions) -> list[Table]:
    """The tables of the plan. Raises the errors that the server would raise for the same options."""
    warn_of_unused(options)
    options = fetched(options, weights=False)
    warn_of_threads(options, available_cores())
    check_instruction_set(options)
    checkpoint = checkpoint_of(options, outline=True)
    if options.role == "encoder":
        check_role(options, checkpoint)
        check_images(options, checkpoint)
        check_decoders(options, checkpoint)
        return [memory_table(options, checkpoint), encoder_table(options, checkpoint)]
    check_model(options, checkpoint)
    tables = [
        memory_table(options, checkpoint),
        concurrency_table(options, checkpoint),
        states_table(options, checkpoint),
        capture_table(options, checkpoint),
    ]
    if checkpoint.config.vision is not None and options.role == "all":
        tables.append(encoder_table(options, checkpoint))
    return tables


def instructions(options: EngineOptions) -> str:
    """The instruction set that compiled code uses on this machine, as the end of a title; empty on a GPU and with
    `native: off`. Raises ConfigError if `native` is `on` and compiled code cannot run here."""
    if options.native == "off" or not resolve_device(options).startswith("cpu"):
        return ""
    features = processor_features()
    try:
        chosen = choose(options.instruction_set, features)
        source = origin(chosen)
    except NativeUnavailable as reason:
        if options.native == "on":
            raise ConfigError(f"native: 'on' is not possible: {reason}; 'auto' would work") from None
        return f", without compiled code: {reason}"
    others = ", ".join(each.name for each in supported(features) if each is not chosen)
    tested = " (tested under an emulator only)" if chosen.only_emulated else ""
    return f", compiled for {chosen.name}{tested}, {source}" + (f" ({others} possible)" if others else "")


def memory_table(options: EngineOptions, checkpoint: Checkpoint) -> Table:
    """Bytes by part, for a server with the role in `options`."""
    device, item = resolve_device(options), resolve_dtype(options, checkpoint).itemsize
    rows: list[tuple[str, ...]] = [("part", "bytes", "what")]
    total = weight_bytes(options, checkpoint)
    quantised = ""
    if options.weights is not None and options.role != "encoder":
        quantised = f", linear layers of the decoder in {options.weights}"
    elif checkpoint.formats:
        quantised = f", or in the format they are stored in: {', '.join(checkpoint.formats)}"
    elif checkpoint.declared is not None and not checkpoint.files.paths:
        quantised = f"; the files would be smaller: {checkpoint.declared.method}"
    count = checkpoint.parameters(options.role, drafts=options.speculative == "mtp")
    what = f"{count / 1e6:.1f} M parameters of {item} bytes{quantised}"
    rows.append(("weights", size(total), what))
    if (adapter := checkpoint.adapter) is not None:
        rows.append(("  adapter", size(adapter.nbytes), _merged(adapter, checkpoint)))
    if loss := dtype_loss(options, checkpoint):
        rows.append(("  dtype", "", loss))
    if saved := compact_savings(options, checkpoint):
        how = "16-bit decoder weights stored in 12 bits without loss where that is as fast; rare values keep 16 bits"
        rows.append(("  as compiled code", size(total - saved), how))
    if options.role != "encoder":
        total += _decoder_memory(options, checkpoint, rows)
    if checkpoint.config.vision is not None:
        row = checkpoint.config.vision.row_width * item
        rows.append(("handoff", size(options.handoff_bytes), f"{options.handoff_bytes // row} image tokens"))
        total += options.handoff_bytes
        if options.encoder_process:
            rows.append(("encoder segments", size(options.encoder_segment_bytes), "shared with the encoder's process"))
            total += options.encoder_segment_bytes
    rows.append(("total", size(total), "without activations"))
    of = "" if options.role == "all" else f", role {options.role}"
    outline = "as config.json describes it, without weights"
    source = f"revision {checkpoint.revision}" if checkpoint.files.paths else outline
    threads = f", {describe_threads(options, available_cores())}" if device.startswith("cpu") else ""
    return Table(f"{checkpoint.config.name}, {source}, on {device}{instructions(options)}{threads}{of}", rows)


def _merged(adapter: Adapter, checkpoint: Checkpoint) -> str:
    """What becomes of an adapter."""
    if not adapter.files.paths:
        return f"{adapter.name}, of which only the configuration is here and was checked"
    return f"{adapter.name}, merged into {len(checkpoint.merges or ())} weights while they are loaded"


def _decoder_memory(options: EngineOptions, checkpoint: Checkpoint, rows: list[tuple[str, ...]]) -> int:
    """Adds the rows of the decoder's memory besides weights; returns its bytes."""
    decoder, layout = decoder_options(options, checkpoint), arena_layout(options, checkpoint)
    graphs = graph_bytes(checkpoint.config.decoder, decoder)
    blocks = resolve_blocks(layout, decoder, graphs)
    check_slots(checkpoint.config.decoder, decoder, layout, blocks)
    arena = blocks * layout.block_bytes
    rows.append(("state arena", size(arena), f"{blocks} superblocks of {size(layout.block_bytes)}"))
    dtype, parts = str(decoder.state_dtype).removeprefix("torch."), f"windows {size(sum(layout.window_bytes))}"
    if states := sum(layout.state_bytes):
        parts = f"states {size(states)} in {dtype}, {parts}"
    slot = f"one sequence, {len(layout.state_bytes)} recurrent layers: {parts}"
    rows.append(("  a state slot", size(layout.slot_bytes), slot))
    rows.append(("  a KV page", size(layout.page_bytes), f"{layout.page_size} tokens, all attention layers"))
    if layout.slot_bytes and decoder.state_cache != "none":
        rows.append(_checkpoints_row(decoder, layout, blocks))
    total = arena
    if layout.slot_bytes or layout.page_bytes:
        host = arena // 4 if decoder.host_bytes is None else decoder.host_bytes
        rows.append(("preempted requests", size(host), "at most, in host memory"))
        total += host if decoder.device == "cpu" else 0
    if layout.ring_bytes:
        rings = layout.ring_bytes * decoder.max_seqs
        rows.append(("rings", size(rings), f"{size(layout.ring_bytes)} for each of {decoder.max_seqs} requests"))
        total += rings
    if rotations := checkpoint.config.decoder.rotation_bytes(decoder.max_len):
        rows.append(("rotations", size(rotations), f"for {decoder.max_len} positions"))
        total += rotations
    if graphs:
        rows.append(("decoder graphs", size(graphs), "buffers, and activations of the largest size"))
        total += graphs
    return total


def _checkpoints_row(decoder: DecoderOptions, layout: ArenaLayout, blocks: int) -> tuple[str, ...]:
    """How many states can be kept for later requests in memory that running requests do not use: beside one request of
    one token, and beside `max_seqs` requests of `max_len` tokens."""
    budget = most_checkpoints(decoder.checkpoint_bytes, layout.slot_bytes)
    beside = [max(0, blocks - layout.blocks_for(*load)) for load in ((1, 1), (decoder.max_seqs, decoder.max_len))]
    most, least = (count if budget is None else min(count, budget) for count in beside)
    bound = "" if budget is None else f" (checkpoint_bytes allows {budget})"
    what = f"at most {most} states kept{bound}, {least} beside {decoder.max_seqs} requests of {decoder.max_len} tokens"
    return "  checkpoints", size(most * layout.slot_bytes), what


def weight_bytes(options: EngineOptions, checkpoint: Checkpoint) -> int:
    """Bytes of all weights of the role; weights that are stored or loaded in a quantised format count as such."""
    item, form = resolve_dtype(options, checkpoint).itemsize, options.weights
    linear = {} if form is None else checkpoint.config.decoder.linear_weights()
    total = 0
    for name in _kept(options, checkpoint):
        if form is None or name not in linear or checkpoint.kind_of(name) == kind_and_group(form)[0]:
            total += checkpoint.weight_bytes(name, item)
        else:
            total += quantised_bytes(linear[name], form)
    return total


def _kept(options: EngineOptions, checkpoint: Checkpoint) -> list[str]:
    """Native names of the weights that stay in memory."""
    return checkpoint.served(options.role, drafts=options.speculative == "mtp")


def compact_savings(options: EngineOptions, checkpoint: Checkpoint) -> int:
    """Bytes that compiled code saves by storing bfloat16 weights in 12 bits (kernels/native/compact.h), assuming that
    the decoder's embeddings and all of its linear layers can be stored so; 0 where compiled code does not do this."""
    bfloat16 = resolve_dtype(options, checkpoint) == torch.bfloat16
    if options.role == "encoder" or not bfloat16 or resolve_device(options) != "cpu" or options.native == "off":
        return 0
    try:
        chosen = choose(options.instruction_set, processor_features())
    except (NativeUnavailable, ValueError):
        return 0
    text = checkpoint.config.decoder
    is_compact = not text.tie_word_embeddings and is_compact_width(text.hidden_size)
    numbers = text.vocab_size * text.hidden_size if is_compact else 0
    if chosen.compact_weights and options.weights is None and not checkpoint.formats:
        linear = text.linear_weights()
        numbers += sum(math.prod(linear[name]) for name in _kept(options, checkpoint) if name in linear)
    return numbers // 2


def arena_layout(options: EngineOptions, checkpoint: Checkpoint) -> ArenaLayout:
    return ArenaLayout.of(checkpoint.config.decoder, decoder_options(options, checkpoint))


def concurrency_table(options: EngineOptions, checkpoint: Checkpoint) -> Table:
    """How many requests of each length run at the same time, and what limits their number."""
    decoder, layout = decoder_options(options, checkpoint), arena_layout(options, checkpoint)
    blocks = resolve_blocks(layout, decoder, graph_bytes(checkpoint.config.decoder, decoder))
    rows: list[tuple[str, ...]] = [("tokens of each request", "at once", "limited by")]
    lengths = sorted({n for n in (128, 512, 2048, 8192, 32768) if n < decoder.max_len} | {decoder.max_len})
    for length in lengths:
        fits = layout.sequences_for(blocks, length) if layout.slot_bytes or layout.page_bytes else decoder.max_seqs
        bound = f"memory ({fits} fit)" if fits < decoder.max_seqs else f"max_seqs {decoder.max_seqs}"
        rows.append((str(length), str(min(fits, decoder.max_seqs)), bound))
    return Table("requests that run at once", rows)


def states_table(options: EngineOptions, checkpoint: Checkpoint) -> Table:
    """State slots of one request of `max_len` tokens without images under each `state_cache`: those that it holds while
    it runs, and its checkpoints."""
    decoder, layout = decoder_options(options, checkpoint), arena_layout(options, checkpoint)
    config = checkpoint.config.decoder
    block = resolve_state_block(decoder.state_block, decoder.page_size, config.scan_chunk or decoder.page_size)
    checkpoints = len(AUTO_CHECKPOINTS)
    drafts = layout.slots_per_seq - 1
    held = state_bytes(layout.slot_bytes, decoder.max_len, block, drafts, checkpoints)
    rows: list[tuple[str, ...]] = [("state_cache", "slots", "bytes", "")]
    for mode, count in held.items():
        slots = state_slots(mode, decoder.max_len, block, drafts, checkpoints)
        rows.append((mode, str(slots), size(count), "in use" if mode == decoder.state_cache else ""))
    return Table(
        f"states of one request of {decoder.max_len} tokens, state_block {block}: {layout.slots_per_seq} "
        f"{'slot' if drafts == 0 else 'slots'} while it runs, the others are checkpoints, which can be evicted",
        rows,
    )


def capture_table(options: EngineOptions, checkpoint: Checkpoint) -> Table:
    """The two lists of decoder batch sizes."""
    decoder = decoder_options(options, checkpoint)
    captured = capture_plan(decoder)
    mixed, decode = list(captured.mixed), list(captured.decode)
    rows: list[tuple[str, ...]] = [("list", "sizes", "")]
    rows.append(("mixed, in tokens", str(len(mixed)), _sizes(mixed)))
    rows.append(("decode, in requests", str(len(decode)), _sizes(decode)))
    if captured.drafts:
        rows.append((f"with {captured.drafts} drafts, in requests", str(len(decode)), _sizes(decode)))
    return Table(f"decoder graphs, {'captured' if decoder.graphs_on else 'not captured here'}", rows)


def _sizes(sizes: list[int]) -> str:
    text = [str(s) for s in sizes]
    return ", ".join(text if len(text) <= 12 else [*text[:6], "...", *text[-3:]])


def encoder_table(options: EngineOptions, checkpoint: Checkpoint) -> Table:
    """The budgets of the encoder and the buffers that follow from them."""
    vision = resolve_vision(options, checkpoint)
    assert vision is not None
    dtype = resolve_dtype(options, checkpoint)
    budgets = encoder_options(options, checkpoint).budgets(vision)
    rows: list[tuple[str, ...]] = [("budget", "rows/image", "capacity", "ViT rows", "sequences", "buffers")]
    described = describe(vision, budgets, dtype, vision.patch_widths)
    for row in described:
        numbers = (row.budget, row.rows_per_image, row.capacity, row.tower_rows, row.sequences)
        rows.append((*map(str, numbers), size(row.buffer_bytes)))
    clip = ""
    if (rule := vision.video_rule) is not None:
        tokens = rule.tokens(CLIP_FRAMES, 1080, 1920)
        clip = f", {tokens} for {CLIP_FRAMES} frames of 1920x1080 at a pruning rate of {rule.pruning_rate:g}"
    return Table(
        f"encoder, graphs {options.graphs}: {vision.min_image_tokens} to {vision.max_image_tokens} tokens per image"
        f"{clip}, up to {budgets.max_images} images per batch, one arena of {size(described[-1].buffer_bytes)} for all "
        "budgets",
        rows,
    )
