"""The decoder runner: requests in, token events out. Used by one thread, without locks.

It connects the parts: the scheduler chooses the rows of a step, `decoder.execution` runs it, `decoder.states` commits
its memory, `decoder.answers` reads its results. `decoder.loops` calls them in order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from decoder.answers import Answers
from decoder.arena import Arena
from decoder.batch import BatchBuilder
from decoder.checkpoints import Placement, resolve_state_block
from decoder.config import DecoderConfig, DecoderOptions
from decoder.execution import Execution
from decoder.graphs import Forward, graph_bytes
from decoder.loops import OverlappedLoop, PlainLoop, SpeculativeLoop
from decoder.model import HybridModel
from decoder.mtp import MtpDrafter
from decoder.pace import StepTimer
from decoder.pooling import Pools
from decoder.prefix_cache import COUNTERS, PrefixCache
from decoder.prompt_scores import PromptScoring
from decoder.request import DecoderRequest, TokenEvent
from decoder.sampler import Sampler
from decoder.scheduler import Scheduler
from decoder.sequence import Sequence, Status
from decoder.speculation import Speculation
from decoder.states import States
from kernels.linear import Quantised, Stack

log = logging.getLogger(__name__)

CACHE_STATS = [f"cache_{name}" for name in (*COUNTERS, "checkpoints", "pages", "bytes")]


class DecoderRunner:
    """Serves any number of requests, `max_seqs` at a time."""

    def __init__(
        self, config: DecoderConfig, options: DecoderOptions, weights: Iterable[tuple[str, Tensor | Quantised | Stack]]
    ) -> None:
        """`weights`: (name, tensor) pairs, read once and copied. Raises `ValueError` if they do not fit the
        configuration, or if the memory does not fit the options."""
        self.config, self.options = config, options
        self.arena = Arena(config, options, reserved=graph_bytes(config, options))
        self.model = HybridModel(config, options, self.arena, weights)
        layout = self.arena.layout
        sizes = {"page_bytes": layout.page_bytes, "slot_bytes": layout.slot_bytes}
        self.cache = None
        if options.state_cache != "none" and any(sizes.values()):
            self.cache = PrefixCache(self.arena.pool, _placement(config, options, layout.slot_bytes > 0), **sizes)
        self.scheduler = Scheduler(options, self.arena.pool, cache=self.cache, ring_bytes=layout.ring_bytes, **sizes)
        self.builder = BatchBuilder(config, options)
        self.forward = Forward(config, options, self.arena, self.model, self.builder)
        compiled = options.native != "off"
        self.sampler = Sampler(
            config.vocab_size, options.max_seqs, options.device, compiled=compiled, largest=self.model.largest
        )
        self.drafter: MtpDrafter | None = None
        if options.speculative == "mtp":
            self.drafter = MtpDrafter(config, options, self.arena, self.model, self.builder, self.sampler)
        self.model.mtp_weights.clear()
        self.speculation = Speculation(options, self.drafter) if options.num_drafts else None
        at_once = not options.overlap_on and torch.device(options.device).type == "cpu"  # nothing runs meanwhile
        self.states = States(
            self.arena, self.model, self.builder, self.scheduler, self.drafter,
            empties=self.model.empties_rings and self.forward.graphs is None, at_once=at_once,
        )  # fmt: skip
        pools, scores = Pools(self.model.final_norm), PromptScoring(self.model.logits, config.vocab_size)
        self.execution = Execution(self.states, self.forward, self.sampler, self.speculation, pools, scores)
        self.timer = StepTimer()
        self.answers = Answers(self.states, self.speculation, pools, scores, self.timer)
        self.loop = self._loop()

    def _loop(self) -> PlainLoop:
        """The loop that the options ask for."""
        parts = (self.scheduler, self.execution, self.states, self.answers, self.timer)
        if self.speculation is not None:
            if self.options.overlap == "on":
                log.warning(
                    "overlap 'on' has no effect with speculative %r and forced_tokens %r: every step waits",
                    self.options.speculative,
                    self.options.forced_tokens,
                )
            return SpeculativeLoop(*parts, self.speculation, counted=self.options.overlap_on)
        return OverlappedLoop(*parts) if self.options.overlap_on else PlainLoop(*parts)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: DecoderRequest, *others: DecoderRequest) -> None:
        """Queues a request. Raises `ValueError` if it can never be served, and `DeadlineError` if it cannot be served
        in time, both with the numbers that were compared.

        `others`: further samples of the same prompt, each with its own image sources; the prompt is computed once for
        all samples.
        """
        samples = (request, *others)
        names = [sample.request_id for sample in samples]
        for index, name in enumerate(names):
            if name in self.answers.sequences:
                raise ValueError(f"a request with the id {name!r} exists already")
            if name in names[:index]:
                raise ValueError(f"two samples of one prompt have the id {name!r}")
        _check_ids("", (*request.prompt_ids, *request.output_ids), self.config.vocab_size)
        for sample in samples:
            _check_sample(request, sample, self.config.vocab_size)
        added: list[Sequence] = []
        try:
            for sample in samples:
                added.append(self.scheduler.queues.add(sample, added[0] if added else None))
            self._check_positions(added)
            if request.timeout is not None:
                self._check_deadline(added[0], request.timeout)
        except Exception:  # all samples of the group are removed
            for sequence in reversed(added):
                self.scheduler.finish(sequence)
            raise
        for sequence in added:
            self.answers.add(sequence)

    def _check_positions(self, samples: list[Sequence]) -> None:
        """Raises `ValueError` for positions that tokens, including those to be drawn, cannot have."""
        positions, prompt = samples[0].request.positions, samples[0].prompt_len
        if positions is not None:
            last = prompt + max(sample.limit for sample in samples) - 1
            positions.check(prompt, last, self.config.position_axes, self.options.max_len)

    def _check_deadline(self, sequence: Sequence, timeout: float) -> None:
        """Raises `DeadlineError` if the sequence cannot have its first tokens in time. Looks up the cached prefixes of
        no more sequences than it takes to decide."""
        least = min(sequence.request.sampling.min_tokens, sequence.limit) - sequence.output_len
        scheduler, most = self.scheduler, self.timer.pace.tokens_in(timeout, least)
        ahead = scheduler.ahead(sequence)
        tokens, unknown = 0, sum(scheduler.missing(other, cached=False) for other in ahead)
        for other in ahead:
            if tokens + unknown <= most:
                return
            unknown -= scheduler.missing(other, cached=False)
            tokens += scheduler.missing(other)
            if tokens > most:
                break
        self.timer.pace.check(timeout, tokens, least)

    def abort(self, request_id: str) -> bool:
        """Ends a request without an event and frees all that it holds. Returns False if there is no request of this id.

        No step is being prepared, since steps run in the caller's own thread. A step in flight may still write to the
        request's memory, before any later step does. Waits for that step only if it may be reading the request's
        images.
        """
        sequence = self.answers.sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        if not self.answers.sequences:
            self.loop.drain()
        return True

    def _end(self, sequence: Sequence) -> None:
        if sequence.next_span < len(sequence.request.spans) and self.loop.flight is not None:
            self.loop.flight.wait()
        self.answers.end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.answers.sequences)

    @property
    def runnable(self) -> bool:
        """False if there is nothing to do until the rows of an image are ready."""
        return self.loop.flight is not None or self.scheduler.runnable

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Runs one step and returns its events; empty if nothing could advance or no row reached its last token."""
        return self.loop.step()

    # -- statistics, checks, end ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        pool = self.arena.pool
        cached = self.cache.stats() if self.cache is not None else dict.fromkeys(CACHE_STATS, 0)
        return {
            **self.execution.counters,
            **self.answers.counters,
            **{f"waited_{reason}": count for reason, count in self.loop.waits.items()},
            **self.scheduler.stats(),
            "loose_pages": pool.loose_pages,
            "free_blocks": pool.free_blocks,
            "total_blocks": pool.num_blocks,
            "arena_bytes": self.arena.total_bytes,
            **self.forward.stats(),
            **(self.speculation.stats() if self.speculation is not None else {}),
            **cached,
        }

    def flush_cache(self) -> None:
        """Empties the prefix cache. Running requests keep the pages that they share with it."""
        if self.cache is not None:
            self.cache.clear()

    def check_integrity(self) -> None:
        """`AssertionError` unless everything that is held belongs to a live request."""
        self.scheduler.check_integrity()
        known = {sequence.request_id for sequence in self.scheduler.queues}
        assert known == set(self.answers.sequences), "a request is lost"
        swapped = {s.request_id for s in self.scheduler.waiting if s.status is Status.SWAPPED}
        assert set(self.states.saved) <= swapped, "saved state without an owner"

    def close(self) -> None:
        """Ends all requests without events, and empties the cache. Idempotent."""
        for sequence in list(self.answers.sequences.values()):
            self._end(sequence)
        self.loop.drain()
        self.flush_cache()
        self.forward.close()


def _placement(config: DecoderConfig, options: DecoderOptions, has_states: bool) -> Placement:
    chunk = config.scan_chunk or options.page_size
    block = resolve_state_block(options.state_block, options.page_size, chunk)
    return Placement(options.state_cache, block, chunk, options.page_size, has_states)


def _check_ids(name: str, ids: Collection[int], vocab: int) -> None:
    """`ValueError` for an id that is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        bad = next(token for token in ids if not 0 <= token < vocab)
        raise ValueError(f"{name}token id {bad} is not between 0 and {vocab - 1}")


def _check_sample(first: DecoderRequest, sample: DecoderRequest, vocab: int) -> None:
    """Raises `ValueError` for invalid ids in a sample's own parameters. What the samples of a prompt share is checked
    only once."""
    _check_ids("eos_token_ids: ", sample.eos_token_ids, vocab)
    _check_ids("stop_token_ids: ", sample.sampling.stop_token_ids, vocab)
    if sample is first or sample.sampling is not first.sampling:
        _check_ids("logit_bias: ", sample.sampling.logit_bias, vocab)
    if sample is not first:
        assert sample.prompt_ids == first.prompt_ids and not sample.output_ids and not first.output_ids
        assert sample.salt == first.salt and sample.pooled == first.pooled
        assert sample.positions == first.positions, "samples of one prompt have the same positions"
        spans = [[(span.start, span.end, span.key) for span in each.spans] for each in (first, sample)]
        assert spans[0] == spans[1], "samples of one prompt have the same images"
