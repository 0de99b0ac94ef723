"""Which options have an effect in which role of a server. A file of options may be shared by servers of several roles,
so options without an effect are a warning; those that contradict a role are errors of `ServerOptions`."""

from __future__ import annotations

import logging
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


def warn_of_unused(options: ServerOptions) -> None:
    """Logs a warning that names the options that have another value than their default, but no effect in this role."""
    ignored = IGNORED[options.role]
    unused = [
        field.name
        for field in fields(options)
        if field.name in ignored and getattr(options, field.name) != field.default
    ]
    if unused:
        log.warning("without effect with --role %s: %s", options.role, ", ".join(unused))
