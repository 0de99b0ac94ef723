"""Options of the encoder's and the decoder's runner, from the server's options and a checkpoint."""

from __future__ import annotations

import torch

from decoder.config import DecoderOptions
from encoder.runner import EncoderOptions
from service.common.config import ConfigError, EngineOptions
from service.model.checkpoint import Checkpoint
from service.model.resolve import resolve_max_len

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
