"""Graphs over all layers: one for each captured size, on buffers that never move.

`decode` graphs have one token for each of N requests and take the update path; `mixed` graphs have N tokens of any
rows, all scanned; `verify` graphs have a token and its drafts for each of N requests, and one token for each of N
others. A step with drafts and prompts is two replays. The embedding is computed before a graph and logits after it.
`decoder.buffers` has the buffers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.arena import Arena, ArenaLayout
from decoder.batch import Batch, BatchBuilder, Unread
from decoder.buffers import (
    BatchBuffers,
    decode_batch,
    decode_values,
    graph_fields,
    hidden_field,
    mixed_batch,
    mixed_values,
    places_of,
    runs_kernels,
    scan_room,
    table_width,
    verify_batch,
    verify_values,
)
from decoder.capture import Bucket, CapturePlan, capture_sizes, check_state_slots, decode_sizes
from decoder.config import RING, DecoderConfig, DecoderOptions
from decoder.metadata import pad_rows, prefilling_rows, split_rows
from decoder.model import HybridModel
from decoder.singles import singles
from decoder.step import Row
from kernels.graphs import GraphPool, ReplayError, StaticGraph

log = logging.getLogger(__name__)

PROGRESS = 16
"""Captures between two log lines on a GPU, where each takes part of a second."""

Checkpoints = Mapping[int, list[tuple[int, int]]]


def capture_plan(options: DecoderOptions) -> CapturePlan:
    """The sizes that these options capture: those of `capture_sizes` and `decode_sizes`."""
    return CapturePlan(
        tuple(decode_sizes(options.max_seqs, options.max_capture)),
        tuple(capture_sizes(options.max_batched_tokens, options.max_capture)),
        options.num_drafts,
    )


def graph_bytes(config: DecoderConfig, options: DecoderOptions) -> int:
    """Bytes of graphs besides the arena: their buffers, and what the layers allocate in the largest graph. Captures
    share a memory pool, whose size is that of the largest graph, which is captured first. 0 if graphs are off."""
    if not options.graphs_on:
        return 0
    plan = capture_plan(options)
    largest = _largest(plan)
    held = sum(
        field.bytes(bucket.size)
        for bucket in largest
        for field in (*graph_fields(bucket.kind, config, options).values(), hidden_field(bucket.kind, config, options))
    )
    scans = [_scan_bytes(config, options, bucket.size) for bucket in largest if bucket.kind == "mixed"]
    return held + max(map(plan.tokens, largest)) * _widest(config) * 4 + max(scans, default=0)


def _scan_bytes(config: DecoderConfig, options: DecoderOptions, size: int) -> int:
    """Bytes of the states before each chunk, which kernels store between the two halves of a scan: for the layer with
    the largest state, and the chunks of a mixed graph of `size` tokens."""
    if not config.slots or not runs_kernels(options):
        return 0
    entries = scan_room(config, options, size)["entries"]
    return entries * max(slot.state_size for slot in config.slots) * options.dtype.itemsize


def _largest(plan: CapturePlan) -> list[Bucket]:
    """The largest bucket of each kind."""
    found = {bucket.kind: bucket for bucket in reversed(plan.buckets)}
    return list(found.values())


def check_slots(config: DecoderConfig, options: DecoderOptions, layout: ArenaLayout, blocks: int) -> None:
    """Raises `ValueError` if an arena of `blocks` superblocks has fewer state slots than the largest decode graph has
    rows."""
    check_state_slots(
        options.max_seqs,
        blocks,
        concurrent=layout.sequences_for(blocks, options.max_len),
        has_mamba=bool(config.slots),
        full_graphs=options.graphs_on,
        slots_per_seq=options.slots_per_seq,
    )


def _widest(config: DecoderConfig) -> int:
    """Values per token that are in memory at a time in the largest layer."""
    return 3 * config.hidden_size + max(sum(mixer.activations for _, mixer in layer.parts) for layer in config.layers)


class DecoderGraphs:
    """The captured graphs of one runner; chooses one for each step."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions, arena: Arena, model: HybridModel) -> None:
        """Captures every size of the plan, largest first, into one pool. Raises `ValueError` if the arena has fewer
        state slots than the largest decode graph has rows.
        """
        self.config, self.options, self.arena, self.model = config, options, arena, model
        self.plan = capture_plan(options)
        check_slots(config, options, arena.layout, arena.pool.num_blocks)
        self.expected_bytes, self.pool_bytes = graph_bytes(config, options), 0
        self._longest = table_width(config, options) * options.page_size
        self.buffers: dict[str, BatchBuffers] = {}
        self.hidden: dict[str, Tensor] = {}
        for bucket in _largest(self.plan):
            kind, size = bucket.kind, bucket.size
            fields, left = graph_fields(kind, config, options), hidden_field(kind, config, options)
            self.buffers[kind] = BatchBuffers(fields, size, options.device)
            self.hidden[kind] = torch.zeros(left.rows(size), *left.rest, dtype=left.dtype, device=options.device)
        self.replays: Counter[Bucket] = Counter()
        self.eager: Counter[str] = Counter()
        self.padded_tokens = 0
        self._computed, self._prompt = [0] * options.max_seqs, [0] * options.max_seqs
        self._pool = GraphPool(torch.device(options.device))
        self._graphs: dict[Bucket, StaticGraph] = {}
        self._capture()
        self.check_integrity()

    def _capture(self) -> None:
        started, before, buckets = time.perf_counter(), self._pool.reserved(), self.plan.buckets
        for number, bucket in enumerate(buckets, 1):
            graph = StaticGraph(
                f"decoder-{bucket}", self._step(bucket), self._inputs(bucket), self._outputs(bucket), pool=self._pool
            )
            graph.capture()
            self._graphs[bucket] = graph
            level = logging.INFO if number % PROGRESS == 0 and self._pool.handle is not None else logging.DEBUG
            log.log(level, "captured %s, %d of %d decoder graphs", bucket, number, len(buckets))
        self.pool_bytes = self._pool.reserved() - before
        log.info(
            "decoder graphs: %d decode and %d mixed sizes, up to %d requests and %d tokens, %.1f MB of buffers and "
            "%.1f MB of a pool (%.1f MB were reserved), %.1f s",
            len(self.plan.decode), len(self.plan.mixed), self.plan.decode[-1], self.plan.mixed[-1],
            self.buffer_bytes / 1e6, self.pool_bytes / 1e6, self.expected_bytes / 1e6, time.perf_counter() - started,
        )  # fmt: skip

    @property
    def buffer_bytes(self) -> int:
        tensors = [t for buffers in self.buffers.values() for t in buffers.tensors.values()]
        return sum(t.numel() * t.element_size() for t in (*tensors, *self.hidden.values()))

    def _inputs(self, bucket: Bucket) -> dict[str, Tensor]:
        """The memory that a replay reads: the bucket's buffers, and the arena, whose address is also captured."""
        return {**self.buffers[bucket.kind].view(bucket.size), "arena": self.arena.buffer}

    def _outputs(self, bucket: Bucket) -> dict[str, Tensor]:
        return {"hidden": self.hidden[bucket.kind][: self.plan.tokens(bucket)]}

    def _step(self, bucket: Bucket) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]:
        view, width = self.buffers[bucket.kind].view(bucket.size), self.options.num_drafts + 1
        span = RING if self.options.spec_state == "replay" else 0
        chunk = BatchBuilder.scan_chunk(self.config, self.options)
        batch = {
            "decode": lambda: decode_batch(view, self._longest),
            "verify": lambda: verify_batch(view, self._longest, span, width),
            "mixed": lambda: mixed_batch(view, scan_room(self.config, self.options, bucket.size), chunk),
        }[bucket.kind]()

        def run(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
            outputs["hidden"].copy_(inputs["x"])
            hidden = self.model.run_layers(outputs["hidden"], batch)
            if hidden is not outputs["hidden"]:
                outputs["hidden"].copy_(hidden)

        return run

    # -- a step --------------------------------------------------------------------------------------------------------

    def choose(self, rows: SequenceOf[Row], checkpoints: Checkpoints) -> Bucket | None:
        """The bucket of a step, which must not have both rows with drafts and rows to scan; `None`, with the reason
        counted, if the step has to run eagerly."""
        count = len(rows)
        for index, row in enumerate(rows):
            self._computed[index], self._prompt[index] = row.start, row.sequence.prompt_len
        prefilling = prefilling_rows(self._computed, self._prompt, count)
        lengths = pad_rows([1 if row.drafts else row.count for row in rows], len(prefilling), 0)
        _, prefills = split_rows(prefilling, self._computed, lengths)
        tokens = sum(row.count for row in rows)
        bucket = self.plan.choose(count, tokens, prefills, sum(row.verified for row in rows))
        if bucket is None:
            self.eager["larger"] += 1
        elif bucket.kind == "mixed" and not self._saves_fit(bucket, rows, checkpoints):
            self.eager["checkpoints"] += 1
            return None
        return bucket

    def _saves_fit(self, bucket: Bucket, rows: SequenceOf[Row], checkpoints: Checkpoints) -> bool:
        if not checkpoints:
            return True
        inside = sum(position < row.end for row in rows for position, _ in checkpoints.get(row.sequence.arrival, ()))
        buffers = self.buffers["mixed"]
        room = buffers.fields["state_saves"].rows(bucket.size) if "state_saves" in buffers.fields else inside
        return inside <= room

    def run(self, bucket: Bucket, x_TD: Tensor, batch: Batch) -> Tensor:
        """`[T, d]` of the batch's tokens, before the final norm: a view, valid until the next replay of this kind."""
        buffers, places = self.buffers[bucket.kind], None
        if bucket.kind == "verify":
            places = places_of(batch, bucket.size, self.options.num_drafts + 1)
            values = verify_values(x_TD, batch, buffers.fields, bucket.size, places)
        else:
            room = scan_room(self.config, self.options, bucket.size) if "scan_tables" in buffers.fields else None
            values = decode_values(x_TD, batch) if bucket.kind == "decode" else mixed_values(x_TD, batch, room)
        buffers.set_batch(bucket.size, values)
        hidden = self._graphs[bucket].replay(self._inputs(bucket))["hidden"]
        self.replays[bucket] += 1
        self.padded_tokens += hidden.shape[0] - x_TD.shape[0]
        return hidden[: x_TD.shape[0]] if places is None else hidden.index_select(0, places)

    # -- statistics and checks -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Replays by bucket, eager steps by reason, number of graphs, padded tokens, and bytes of buffers and pool."""
        return {
            **{f"replays_{bucket}": count for bucket, count in self.replays.items()},
            **{f"eager_{reason}": count for reason, count in self.eager.items()},
            "graphs_now": len(self._graphs),
            "padded_tokens": self.padded_tokens,
            "graph_bytes": self.buffer_bytes + self.pool_bytes,
        }

    def check_integrity(self) -> None:
        """`ReplayError` unless every size of the plan is captured and no two buffers lie in the same memory."""
        wanted = {*map(str, capture_plan(self.options).buckets)}
        found = {str(bucket) for bucket, graph in self._graphs.items() if graph.captured}
        if wanted != found:
            raise ReplayError(f"captured graphs are {sorted(found)}, not {sorted(wanted)}")
        named = [(f"{kind} {name}", t) for kind, of in self.buffers.items() for name, t in of.tensors.items()]
        named += [(f"{kind} hidden", t) for kind, t in self.hidden.items()]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for n, t in named if t.numel())
        for (_, end, first), (begin, _, second) in zip(spans, spans[1:], strict=False):
            if begin < end:
                raise ReplayError(f"{first} and {second} share memory")

    def close(self) -> None:
        """Destroys all graphs; idempotent."""
        for graph in self._graphs.values():
            graph.close()


class Computed(NamedTuple):
    """The result of a forward pass."""

    hidden_TD: Tensor
    """Rows before the final norm, in memory that the next pass may overwrite: `[T, d]`, or `[L, d]` of the tokens whose
    logits are needed."""
    samples: Tensor | None = None
    """Rows whose logits are needed; `None` for all, in order."""
    batch: Batch | None = None
    """The batch; `None` for rows of one token that were passed to compiled code without a batch."""


class Forward:
    """Runs all layers for a step, by replay if there is a graph for it."""

    def __init__(
        self, config: DecoderConfig, options: DecoderOptions, arena: Arena, model: HybridModel, builder: BatchBuilder
    ) -> None:
        self.model, self.builder = model, builder
        self.graphs: DecoderGraphs | None = None
        self._reason, self._eager = "off", 0
        if options.graphs_on:
            self._try_capture(config, options, arena)
        self._native = model.native if self.graphs is None else None

    def _try_capture(self, config: DecoderConfig, options: DecoderOptions, arena: Arena) -> None:
        """Captures the graphs. If that fails, `auto` runs every step eagerly and counts why; `on` raises the error."""
        try:
            self.graphs = DecoderGraphs(config, options, arena, self.model)
        except RuntimeError as error:
            if options.graphs == "on":
                raise
            self._reason = "capture_failed"
            log.warning("decoder graphs cannot be captured here; every step runs eagerly", exc_info=error)

    def __call__(
        self, rows: SequenceOf[Row], checkpoints: Checkpoints, unread: Unread | None = None, *, all_rows: bool = True
    ) -> Computed:
        """Computes a step's rows. `all_rows`: whether results of all tokens are read, or only of those that draw."""
        if self._native is not None and len(rows) <= self._native.max_singles and not unread:
            tables, axes = self.builder.tables, self.builder.config.position_axes
            if (found := singles(rows, tables, self.builder.options.page_size, axes)) is not None:
                self._eager += 1
                return Computed(self._native.single(found, None if tables is None else tables.table))
        alone = sum(1 for row in rows if row.alone)
        if self.graphs is None or alone == len(rows) or not any(row.verified for row in rows[:alone]):
            batch, hidden = self._part(rows, checkpoints, unread, all_rows)
            return Computed(hidden, batch.samples if all_rows else None, batch)
        first, hidden = self._part(rows[:alone], checkpoints, unread)
        hidden = hidden.clone()  # the second part may be computed in the same memory
        second, more = self._part(rows[alone:], checkpoints, unread)
        behind = torch.arange(more.shape[0], device=more.device) if second.samples is None else second.samples
        before = torch.arange(hidden.shape[0], device=more.device) if first.samples is None else first.samples
        samples = torch.cat((before, behind + hidden.shape[0]))
        moved = tuple((at + hidden.shape[0], embeddings) for at, embeddings in second.splices)
        at, more_at = first.positions_TA, second.positions_TA
        whole = replace(
            first,
            ids_T=torch.cat((first.ids_T, second.ids_T)),
            splices=first.splices + moved,
            places_T=torch.cat((first.places_T, second.places_T)),
            positions_TA=None if at is None or more_at is None else torch.cat((at, more_at)),
        )
        return Computed(torch.cat((hidden, more)), samples, whole)

    def _part(
        self, rows: SequenceOf[Row], checkpoints: Checkpoints, unread: Unread | None, all_rows: bool = True
    ) -> tuple[Batch, Tensor]:
        """Computes rows by one graph, or eagerly. `all_rows`: as in `HybridModel.hidden`."""
        bucket = None if self.graphs is None else self.graphs.choose(rows, checkpoints)
        scan_all = bucket is not None and bucket.kind == "mixed"
        batch = self.builder.build(rows, checkpoints, scan_all=scan_all, unread=unread)
        if bucket is None or self.graphs is None:
            self._eager += self.graphs is None
            return batch, self.model.hidden(batch, all_rows=all_rows)
        hidden = self.graphs.run(bucket, self.model.embed(batch), batch)
        return batch, hidden if all_rows or batch.samples is None else hidden.index_select(0, batch.samples)

    def stats(self) -> dict[str, int]:
        """Those of the graphs; without graphs, the number of steps, all of which were eager for the same reason."""
        return {f"eager_{self._reason}": self._eager} if self.graphs is None else self.graphs.stats()

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
