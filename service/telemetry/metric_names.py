"""All metrics: name, type, unit, labels and meaning. The exporters take types and help texts from here, and the table
in docs/metrics.md is generated from it.

Names are stable: dashboards and alerts use them. A metric is added here and in the `stats` function that counts it;
`tests/service/test_docs.py` compares what servers export with this list.
"""

from __future__ import annotations

from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclass(frozen=True)
class Declared:
    """A metric. `name`: without the prefix `saccade_` and without a counter's suffix `_total`. `unit`: what a value
    counts or is measured in; empty for a value that is 0 or 1. `help`: continues the unit, as in "calls: that have
    ended"."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name of the metric in Prometheus, without the suffixes of a histogram."""
        return f"saccade_{self.name}" + ("_total" if self.kind == COUNTER else "")

    @property
    def documentation(self) -> str:
        """The help text of the metric in Prometheus."""
        return f"{self.unit}: {self.help}" if self.unit else self.help


FRONTEND = (
    Declared("calls", COUNTER, "calls", "gRPC calls that have ended, except health checks", ("method", "code")),
    Declared("request_bytes", COUNTER, "bytes", "request messages of these calls"),
    Declared("generations", COUNTER, "calls", "calls that generate, at their end", ("code",)),
    Declared(
        "tokens", COUNTER, "tokens",
        "by kind: prompt (all of the prompt), image, video and cached (parts of it), generated (the answers)",
        ("kind",),
    ),
    Declared("queue_seconds", HISTOGRAM, "seconds", "from arrival to the first decoder step: preparation and waiting"),
    Declared("time_to_first_token_seconds", HISTOGRAM, "seconds", "from arrival to the first token"),
    Declared("inter_token_seconds", HISTOGRAM, "seconds", "between two tokens of a sample"),
    Declared("generation_seconds", HISTOGRAM, "seconds", "from arrival to the end, of calls that succeeded"),
    Declared("live_requests", GAUGE, "requests", "in the server: being prepared, waiting and running"),
    Declared(
        "oldest_wait_seconds", GAUGE, "seconds",
        "since the arrival of the request that has waited longest for its first token; the histograms have a request "
        "only at its end",
    ),
    Declared("inflight_bytes", GAUGE, "bytes", "request messages of calls in progress (limit: max_inflight_bytes)"),
    Declared("media_bytes", GAUGE, "bytes", "uploaded images and videos (limit: media_bytes)"),
    Declared("batch_bytes", GAUGE, "bytes", "inputs and outputs of batches (limit: batch_bytes)"),
    Declared("draining", GAUGE, "", "1 if new calls are rejected: after AdminService.Drain and during shutdown"),
    Declared("engine_up", GAUGE, "", "1 if the engine answered this scrape"),
)  # fmt: skip
"""Metrics of the process that listens for gRPC."""

PREPROCESS = (
    Declared("preprocess_images", COUNTER, "images", "decoded and cut into patches"),
    Declared("preprocess_videos", COUNTER, "videos", "decoded and cut into patches"),
    Declared("preprocess_frames", COUNTER, "frames", "of these videos"),
    Declared("preprocess_decode_seconds", COUNTER, "seconds", "spent on decoding files"),
    Declared("preprocess_resize_seconds", COUNTER, "seconds", "spent on resizing"),
    Declared("preprocess_patch_seconds", COUNTER, "seconds", "spent on cutting into patches"),
    Declared("preprocess_held_bytes", GAUGE, "bytes", "patches that wait for the encoder (limit: preprocess_bytes)"),
    Declared("preprocess_cache_hits", COUNTER, "files", "whose patches were cached, so that they were not decoded"),
    Declared("preprocess_cache_items", GAUGE, "files", "whose patches are cached"),
    Declared("preprocess_cache_bytes", GAUGE, "bytes", "cached patches (limit: image_cache_bytes)"),
    Declared("preprocess_workers_lost_time", COUNTER, "processes", "image workers replaced after a time limit"),
    Declared("preprocess_workers_lost_died", COUNTER, "processes", "image workers replaced after a crash"),
    Declared(
        "preprocess_workers_lost_nonsense", COUNTER, "processes", "image workers replaced after an invalid answer"
    ),
)
"""Metrics of images and videos before the encoder."""

ENGINE = (
    Declared("engine_live", GAUGE, "requests", "in the engine, also those whose images are still being encoded"),
    Declared("engine_encode_seconds", COUNTER, "seconds", "that the engine process has spent on encoding"),
    Declared("engine_decode_seconds", COUNTER, "seconds", "that the engine process has spent on decoder steps"),
    Declared("decoder_running", GAUGE, "sequences", "that have a batch slot"),
    Declared("decoder_waiting", GAUGE, "sequences", "that wait for a batch slot or memory"),
    Declared("decoder_steps", COUNTER, "steps", "of the decoder"),
    Declared("decoder_batched_tokens", COUNTER, "tokens", "computed in these steps: prompts, answers and drafts"),
    Declared("decoder_output_tokens", COUNTER, "tokens", "of answers"),
    Declared("decoder_failed", COUNTER, "sequences", "that ended with an error"),
    Declared("decoder_overlapped_steps", COUNTER, "steps", "launched before the previous step's tokens were read"),
    Declared(
        "decoder_waited", COUNTER, "steps",
        "launched after the previous step's tokens were read, although steps overlap: `drafts`, `pooled`, "
        "`prompt_logprobs`, `checkpoint` or `swap`", ("reason",),
    ),
    Declared("decoder_replays", COUNTER, "steps", "computed by a captured graph, by its kind and size", ("budget",)),
    Declared(
        "decoder_eager", COUNTER, "steps",
        "computed without a graph: `off`, `capture_failed`, `larger` (than all graphs) or `checkpoints` (more than a "
        "graph can save)", ("reason",),
    ),
    Declared("decoder_graphs_now", GAUGE, "graphs", "captured"),
    Declared("decoder_graph_bytes", GAUGE, "bytes", "of captured graphs and their buffers"),
    Declared("decoder_padded_tokens", COUNTER, "tokens", "of padding that graphs have computed"),
    Declared("decoder_preemptions", COUNTER, "sequences", "preempted because memory ran out"),
    Declared(
        "decoder_recomputes", COUNTER, "sequences",
        "preempted and computed again later, because host memory had no space for their states",
    ),
    Declared("decoder_forks", COUNTER, "samples", "started from the computed prompt of another sample"),
    Declared("decoder_fork_misses", COUNTER, "samples", "queued separately for lack of a batch slot or memory"),
    Declared("decoder_arena_bytes", GAUGE, "bytes", "of the state arena (limit: memory_bytes)"),
    Declared("decoder_total_blocks", GAUGE, "superblocks", "of the state arena"),
    Declared("decoder_free_blocks", GAUGE, "superblocks", "that are free"),
    Declared("decoder_loose_pages", GAUGE, "pages", "free, in superblocks that also have used pages"),
    Declared("decoder_used_slots", GAUGE, "state slots", "of running sequences"),
    Declared("decoder_used_pages", GAUGE, "pages", "of running sequences"),
    Declared("decoder_host_bytes", GAUGE, "bytes", "of preempted sequences' states in host memory (limit: host_bytes)"),
    Declared("decoder_cache_hits", COUNTER, "prompts", "whose beginning was in the prefix cache"),
    Declared("decoder_cache_misses", COUNTER, "prompts", "whose beginning was not in the prefix cache"),
    Declared("decoder_cache_hit_tokens", COUNTER, "tokens", "of prompts, taken from the prefix cache"),
    Declared(
        "decoder_cache_lost_tokens", COUNTER, "tokens",
        "computed again although their pages were cached, because no state was cached at their end",
    ),
    Declared("decoder_cache_inserted", COUNTER, "checkpoints", "added to the prefix cache"),
    Declared("decoder_cache_evicted", COUNTER, "checkpoints", "evicted from the prefix cache"),
    Declared("decoder_cache_checkpoints", GAUGE, "checkpoints", "in the prefix cache"),
    Declared("decoder_cache_pages", GAUGE, "pages", "in the prefix cache"),
    Declared("decoder_cache_bytes", GAUGE, "bytes", "of states and pages in the prefix cache"),
    Declared("decoder_drafted", COUNTER, "tokens", "drafted and compared, by position in the draft", ("position",)),
    Declared("decoder_accepted", COUNTER, "tokens", "of these that were accepted", ("position",)),
    Declared("decoder_forced_drafted", COUNTER, "tokens", "drafted because a grammar left no choice"),
    Declared("decoder_forced_accepted", COUNTER, "tokens", "of these that were accepted"),
)  # fmt: skip
"""Metrics of the engine and its decoder. Those of drafts exist only with `--speculative` or `--forced-tokens on`, those
of graphs only with graphs."""

ENCODER = (
    Declared("encoder_images", COUNTER, "images", "encoded"),
    Declared("encoder_temporal_patches", COUNTER, "temporal patches", "of videos, encoded"),
    Declared("encoder_batches", COUNTER, "batches", "of the vision tower"),
    Declared("encoder_image_batches", COUNTER, "batches", "of images"),
    Declared("encoder_video_batches", COUNTER, "batches", "of temporal patches of videos"),
    Declared("encoder_real_tokens", COUNTER, "image tokens", "encoded"),
    Declared("encoder_padded_tokens", COUNTER, "image tokens", "of padding that graphs have computed"),
    Declared("encoder_replays", COUNTER, "batches", "computed by a captured graph, by its token budget", ("budget",)),
    Declared(
        "encoder_eager", COUNTER, "batches",
        "computed without a graph: `off`, `host_reads` (this attention cannot be captured), `no_image_graphs`, "
        "`no_video_graphs`, `no_graph_pays`, `slower_graph` (than without), `too_large` or `closed`", ("reason",),
    ),
    Declared("encoder_unused_graphs", GAUGE, "graphs", "captured but not used, because they are slower than no graph"),
    Declared("encoder_position_hits", COUNTER, "grids", "whose position embeddings were cached"),
    Declared("encoder_position_misses", COUNTER, "grids", "whose position embeddings had to be computed"),
    Declared("encoder_position_bytes", GAUGE, "bytes", "of cached position embeddings"),
    Declared("encoder_encode_seconds", COUNTER, "seconds", "spent in the vision tower"),
)  # fmt: skip
"""Metrics of the vision tower in the engine process, or in a server with `--role encoder`."""

ENCODERS = (
    Declared("encoder_given", COUNTER, "images", "assigned to an encoder"),
    Declared("encoder_written", COUNTER, "images", "that came back encoded"),
    Declared("encoder_failed", COUNTER, "images", "that an encoder rejected or could not encode"),
    Declared("encoder_lost", COUNTER, "images", "in progress on an encoder that died; they are retried"),
    Declared("encoder_late", COUNTER, "images", "not encoded within encoder_lease; they are retried"),
    Declared("encoder_cancelled", COUNTER, "images", "revoked because no request was waiting for them"),
    Declared("encoder_in_progress_now", GAUGE, "images", "assigned to an encoder"),
    Declared("encoders_up", GAUGE, "", "1 if the encoder is connected", ("encoder",)),
    Declared("encoders_late", GAUGE, "", "1 if the encoder exceeded encoder_lease and has not answered", ("encoder",)),
    Declared("encoders_in_progress_tokens", GAUGE, "image tokens", "assigned to the encoder", ("encoder",)),
    Declared("encoders_connections", COUNTER, "connections", "made to the encoder", ("encoder",)),
    Declared("encoders_sent_pixel_bytes", COUNTER, "bytes", "of patches sent to the encoder", ("encoder",)),
    Declared("encoders_received_row_bytes", COUNTER, "bytes", "of rows received from the encoder", ("encoder",)),
    Declared("encoders_starts", COUNTER, "starts", "of the encoder process", ("encoder",)),
    Declared("encoders_segment_bytes", GAUGE, "bytes", "of shared memory (limit: encoder_segment_bytes)", ("encoder",)),
    Declared("encoders_quarantined_bytes", GAUGE, "bytes", "of shared memory of revoked images", ("encoder",)),
    Declared("encoders_images", COUNTER, "images", "that the encoder process has encoded", ("encoder",)),
    Declared("encoders_batches", COUNTER, "batches", "of the encoder process", ("encoder",)),
    Declared("encoders_real_tokens", COUNTER, "image tokens", "that the encoder process has encoded", ("encoder",)),
    Declared("encoders_padded_tokens", COUNTER, "image tokens", "of padding in the encoder process", ("encoder",)),
    Declared(
        "encoders_encode_seconds", COUNTER, "seconds", "spent in the encoder process's vision tower", ("encoder",)
    ),
    Declared("attached_decoders", GAUGE, "decoders", "connected to this server with --role encoder"),
    Declared("images_in_progress", GAUGE, "images", "that decoders have sent to this server with --role encoder"),
)
"""Metrics that exist with `--role decoder`, `--encoder-process` or `--role encoder`."""

HANDOFF = (
    Declared("handoff_capacity_bytes", GAUGE, "bytes", "of image embeddings (handoff_bytes)"),
    Declared("handoff_used_bytes", GAUGE, "bytes", "in use, cached ones included"),
    Declared("handoff_cached_bytes", GAUGE, "bytes", "of embeddings that no request uses"),
    Declared("handoff_quarantined_bytes", GAUGE, "bytes", "revoked from an encoder that may still write to them"),
    Declared("handoff_leases", GAUGE, "leases", "of requests on images"),
    Declared("handoff_cached", GAUGE, "images", "that no request uses"),
    Declared("handoff_quarantined", GAUGE, "images", "revoked from an encoder that may still write to them"),
    Declared("handoff_waiting", GAUGE, "images", "that wait for memory"),
    Declared("handoff_reserved", GAUGE, "images", "that wait for the encoder"),
    Declared("handoff_writing", GAUGE, "images", "being encoded"),
    Declared("handoff_ready", GAUGE, "images", "encoded, cached ones included"),
    Declared("handoff_hits", COUNTER, "images", "of requests that were encoded already"),
    Declared("handoff_joins", COUNTER, "images", "of requests that were being encoded for another request"),
    Declared("handoff_misses", COUNTER, "images", "of requests that had to be encoded"),
    Declared("handoff_evictions", COUNTER, "images", "evicted from the cache"),
    Declared("handoff_revocations", COUNTER, "images", "evicted although requests still wait, and encoded again later"),
    Declared("handoff_failures", COUNTER, "images", "whose requests got an error"),
    Declared("handoff_retries", COUNTER, "images", "encoded again after a failed attempt"),
    Declared("handoff_expirations", COUNTER, "images", "not encoded within encoder_lease"),
    Declared("handoff_late", COUNTER, "images", "encoded after encoder_lease"),
)
"""Metrics of the queue of image embeddings between encoder and decoder, which is also their cache."""

HTTP = (
    Declared(
        "http_requests", COUNTER, "requests",
        "that have ended; route other: pages, and requests that no route answers; status 499: the client closed its "
        "connection",
        ("route", "status"),
    ),
    Declared("http_running", GAUGE, "requests", "in progress, the scrape included"),
    Declared("http_streams", GAUGE, "answers", "being streamed"),
    Declared("http_body_bytes", GAUGE, "bytes", "of request bodies (limit: max_inflight_bytes)"),
    Declared("http_file_bytes", GAUGE, "bytes", "of uploaded files (limit: http_file_bytes)"),
)  # fmt: skip
"""Metrics of the HTTP server, which serves them itself: `GET /metrics` on its port."""

SECTIONS = {
    "Frontend": FRONTEND,
    "Images and videos before the encoder": PREPROCESS,
    "Engine and decoder": ENGINE,
    "Encoder": ENCODER,
    "Encoders in other processes or on other hosts": ENCODERS,
    "Image embeddings": HANDOFF,
    "HTTP server": HTTP,
}
METRICS = {declared.name: declared for section in SECTIONS.values() for declared in section}


def find(part: str, counter: str) -> tuple[Declared, str] | None:
    """The metric of one counter of the engine, and the value of its label, empty without one: `("decoder",
    "replays_64")` -> (decoder_replays, "64"). None if no metric is declared for it. `part`: decoder, encoder, handoff,
    engine or preprocess."""
    name = f"{part}_{counter}"
    if name in METRICS:
        return METRICS[name], ""
    prefixes = (name[:at] for at in range(len(name) - 1, 0, -1) if name[at] == "_")
    for prefix in prefixes:
        if prefix in METRICS and METRICS[prefix].labels:
            return METRICS[prefix], name[len(prefix) + 1 :]
    return None
