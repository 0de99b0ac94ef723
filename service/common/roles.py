"""Which options have an effect in which role of a server, and beside which other options. A file of options may be
shared by several servers, so options without an effect are a warning; those that contradict others are errors of
`ServerOptions`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields

from service.common.config import BatchOptions, HttpOptions, MediaOptions, ServerOptions

log = logging.getLogger(__name__)


def _names(options: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(options))


ENCODER_USES = frozenset({
    "model", "revision", "adapter", "adapter_revision", "dtype", "native", "instruction_set", "device", "threads",
    "max_len", "handoff_bytes", "video_pruning_rate", "max_video_frames", "graphs", "token_budgets", "max_images",
    "encoder_step_tokens", "role", "host", "port", "insecure", "tls_cert", "tls_key", "tls_client_ca", "api_keys",
    "max_connection_streams", "max_connection_age", "max_connection_age_grace", "max_tenant_calls", "max_message_bytes",
    "max_inflight_bytes", "max_decoders", "receive_timeout", "stall_timeout", "grace", "metrics_port", "metrics_host",
    "sizes_file", "log_json", "log_level",
})  # fmt: skip
"""Options that have an effect with `--role encoder`."""
ENCODER_IGNORES = _names(MediaOptions) | _names(BatchOptions) | _names(HttpOptions) | frozenset({
    "weights", "activations", "state_dtype", "max_seqs", "max_batched_tokens", "max_chunk", "ageing", "memory_bytes",
    "memory_share", "host_bytes", "state_cache", "checkpoint_bytes", "state_block", "speculative", "draft_tokens",
    "draft_vocab", "spec_state", "draft_policy", "forced_tokens", "max_capture", "overlap", "encoder_time_slice",
    "hang_timeout", "load_timeout", "encoders", "encoder_process", "encoder_segment_bytes", "encoder_lease",
    "encoder_ca", "encoder_cert", "encoder_cert_key", "encoder_api_key", "frontends", "admin", "vllm_engine",
    "max_queue", "max_tenant_requests", "default_timeout", "warmup", "otlp_endpoint",
})  # fmt: skip
"""All others."""
IGNORED = {
    "all": frozenset({"max_decoders", "encoder_ca", "encoder_cert", "encoder_cert_key", "encoder_api_key"}),
    "decoder": frozenset({"max_decoders", "token_budgets", "max_images", "encoder_segment_bytes"}),
    "encoder": ENCODER_IGNORES,
}
"""Role -> options without an effect in it."""


def _unused(options: ServerOptions) -> Iterator[tuple[str, frozenset[str]]]:
    """Where options have no effect, and their names."""
    yield f"with --role {options.role}", IGNORED[options.role]
    if options.speculative == "none" and options.forced_tokens != "on":
        yield "without --speculative or --forced-tokens on", frozenset({"draft_tokens", "draft_policy", "spec_state"})
    if options.state_cache == "none":
        yield "with --state-cache none", frozenset({"checkpoint_bytes"})
    if options.memory_bytes is not None:
        yield "with --memory-bytes", frozenset({"memory_share"})
    if options.graphs == "off":
        yield "with --graphs off", frozenset({"max_capture"})
    if options.native == "off":
        yield "with --native off", frozenset({"instruction_set"})
    if options.role == "all" and not options.encoder_process:
        yield "without --encoder-process", frozenset({"encoder_segment_bytes", "encoder_lease"})
    if options.api_keys is None:
        yield "without --api-keys", frozenset({"max_tenant_requests", "max_tenant_calls"})
    if options.frontends > 1:
        yield "with several frontends", _names(BatchOptions)
    if not options.image_url_hosts:
        urls = {"image_url_networks", "image_url_timeout", "image_url_redirects", "image_url_ca"}
        yield "without --image-url-hosts", frozenset(urls)
    if options.http_port is None:  # the image for containers sets addresses for ports that there may be
        yield "without --http-port", _names(HttpOptions) - {"http_host"}


def warn_of_unused(options: ServerOptions) -> None:
    """Logs warnings that name the options that have another value than their default, but no effect in this role, or
    beside the other options."""
    known = frozenset[str]()
    for where, ignored in _unused(options):
        unused = [
            field.name
            for field in fields(options)
            if field.name in ignored - known and getattr(options, field.name) != field.default
        ]
        if unused:
            log.warning("without effect %s: %s", where, ", ".join(unused))
        known |= ignored
