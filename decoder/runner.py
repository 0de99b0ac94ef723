"""The decoder runner: requests in, token events out. One thread owns it and nothing here locks.

A step is launched (scheduled, its memory moved, run, its tokens drawn) and later collected (tokens read, ends found,
events made). With `overlap` the next step is launched in between, while the device still runs this one: see
`decoder.flight`. Where the next step needs to know what was drawn, this one is collected first, and counted so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from decoder.arena import Arena, Saved
from decoder.batch import BatchBuilder, Unread, image_rows
from decoder.checkpoints import Placement, resolve_state_block
from decoder.config import RING, DecoderConfig, DecoderOptions
from decoder.flight import Flight, accepted_drafts, expect
from decoder.graphs import Forward, graph_bytes
from decoder.model import HybridModel
from decoder.mtp import MtpDrafter
from decoder.pace import Pace
from decoder.pooling import Pools
from decoder.prefix_cache import COUNTERS, PrefixCache
from decoder.prompt_scores import PromptScores
from decoder.request import DecoderRequest, FinishReason, TokenEvent
from decoder.sampler import Choice, Sampler
from decoder.scheduler import Scheduler
from decoder.sequence import Sequence, Status
from decoder.slot_tables import EndTokens
from decoder.speculation import Speculation
from decoder.step import Row, Step
from kernels.linear import Quantised
from kernels.transfer import upload

log = logging.getLogger(__name__)

WAITS = ("drafts", "pooled", "prompt_logprobs", "checkpoint", "swap")
"""What makes a step wait for the one before it although steps overlap: requests that draft, whose hidden states or
prompt's scores are read, one that passes a checkpoint (whose key hashes the ids), memory that goes to or from the host.
"""
CACHE_STATS = [f"cache_{name}" for name in (*COUNTERS, "checkpoints", "pages", "bytes")]


class DecoderRunner:
    """Serves any number of requests, `max_seqs` at a time."""

    def __init__(
        self, config: DecoderConfig, options: DecoderOptions, weights: Iterable[tuple[str, Tensor | Quantised]]
    ) -> None:
        """`weights` are read once and copied. `ValueError` when they, or the memory, do not fit the configuration."""
        self.config, self.options = config, options
        self.arena = Arena(config, options, reserved=graph_bytes(config, options))
        self.model = HybridModel(config, options, self.arena, weights)
        layout = self.arena.layout
        sizes = {"page_bytes": layout.page_bytes, "slot_bytes": layout.slot_bytes}
        self.cache = None
        if options.state_cache != "none" and any(sizes.values()):
            self.cache = PrefixCache(self.arena.pool, _placement(config, options, layout.slot_bytes > 0), **sizes)
        self.scheduler = Scheduler(options, self.arena.pool, cache=self.cache, ring_bytes=layout.ring_bytes, **sizes)
        self.speculation = Speculation(options) if options.num_drafts else None
        self.builder = BatchBuilder(config, options)
        self.forward = Forward(config, options, self.arena, self.model, self.builder)
        compiled = options.native != "off"
        self._empties = self.model.native is not None and self.forward.graphs is None
        self.sampler = Sampler(
            config.vocab_size, options.max_seqs, options.device, compiled=compiled, largest=self.model.largest
        )
        self.drafter: MtpDrafter | None = None
        if options.speculative == "mtp":
            self.drafter = MtpDrafter(config, options, self.arena, self.model, self.builder, self.sampler)
            assert self.speculation is not None
            self.speculation.head = self.drafter
        self.model.mtp_weights.clear()
        self.pools = Pools(self.model.final_norm)
        self.prompt_scores = PromptScores(self.model.logits)
        self.pace, self.clock = Pace(), time.perf_counter
        self.ends = EndTokens(options)
        self._flight: Flight | None = None
        self._collected = 0.0
        self._overlaps = options.overlap_on and self.speculation is None
        self._at_once = not options.overlap_on and torch.device(options.device).type == "cpu"
        """Tokens are read where they are drawn: nothing runs meanwhile."""
        self._read: dict[str, Sequence] = {}
        """Requests of whose prompts a step reads something back."""
        self._sequences: dict[str, Sequence] = {}
        self._saved: dict[str, Saved] = {}
        self._counters = {"steps": 0, "output_tokens": 0, "batched_tokens": 0, "failed": 0, "overlapped_steps": 0}
        self._waits = dict.fromkeys(WAITS, 0)
        if options.overlap == "on" and self.speculation is not None:
            log.warning("overlap 'on' has no effect with speculative %r: every step waits", options.speculative)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: DecoderRequest, *others: DecoderRequest) -> None:
        """Queues a request. `ValueError` when it can never be served, `DeadlineError` when not in time: both with the
        numbers that stand against it.

        `others`: further samples of the same prompt, each with image sources of its own; it is read once for all.
        """
        samples = (request, *others)
        names = [sample.request_id for sample in samples]
        for index, name in enumerate(names):
            if name in self._sequences:
                raise ValueError(f"a request {name!r} is here already")
            if name in names[:index]:
                raise ValueError(f"two samples of one prompt are called {name!r}")
        _check_ids("", (*request.prompt_ids, *request.output_ids), self.config.vocab_size)
        for sample in samples:
            _check_sample(request, sample, self.config.vocab_size)
        added: list[Sequence] = []
        try:
            for sample in samples:
                added.append(self.scheduler.add(sample, added[0] if added else None))
            if request.timeout is not None:
                self._check_deadline(added[0], request.timeout)
        except Exception:  # nothing of the group stays
            for sequence in reversed(added):
                self.scheduler.finish(sequence)
            raise
        for sequence in added:
            self._sequences[sequence.request_id] = sequence
            if sequence.request.pooled or sequence.request.sampling.prompt_logprobs is not None:
                self._read[sequence.request_id] = sequence

    def _check_deadline(self, sequence: Sequence, timeout: float) -> None:
        """`DeadlineError` when the sequence cannot have its first tokens in time."""
        least = min(sequence.request.sampling.min_tokens, sequence.limit) - sequence.output_len
        if self.pace.meets(timeout, self.scheduler.tokens_ahead(sequence, cached=False), least):
            return
        self.pace.check(timeout, self.scheduler.tokens_ahead(sequence), least)

    def abort(self, request_id: str) -> bool:
        """Ends a request without an event and frees all it holds. False when there is none of that name.

        Steps run in the caller's own thread, so that no step is being prepared. One in flight may still write to its
        memory, before any later one does. Waits for that one only if it may be reading the request's images.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        if not self._sequences:
            self._collect()
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def runnable(self) -> bool:
        """False when there is nothing to do until some image's rows are ready."""
        return self._flight is not None or self.scheduler.runnable

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Launches a step and collects one: the same, or the one before. Empty when nothing could advance, or when no
        row reached its last token.
        """
        events: list[TokenEvent] = []
        if self.options.overlap_on and (reason := self._why_wait()) is not None:
            self._waits[reason] += 1
            events += self._collect()
        flight = self._launch()
        if self._flight is not None:
            events += self._collect()
        events += [self._failure(*failed) for failed in flight.step.failed if self._here(failed[0])]
        self._flight = flight
        if not (self._overlaps and flight.step.rows and self._sequences):
            events += self._collect()
        return events

    def _here(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request_id) is sequence

    def _why_wait(self) -> str | None:
        """Must the step before have been collected when the next one is scheduled? `None` where there is none."""
        if self.speculation is not None:
            return "drafts"
        if self._flight is None:
            return None
        for sequence in self._read.values():
            whole = sequence.computed >= sequence.prompt_len
            if whole and sequence.request.pooled:
                return "pooled"
            if not whole and sequence.request.sampling.prompt_logprobs is not None:
                return "prompt_logprobs"
        return "checkpoint" if self.scheduler.needs_ids else None

    def _launch(self) -> Flight:
        """Schedule, move, run. What the step leaves in memory is taken over here, unless drafts are to be judged."""
        started = self.clock()
        self._ask_for_drafts()
        step = self.scheduler.schedule()
        self._move(step)
        images = self._images(step)
        flight = Flight(step, started)
        if step.rows:
            self._counters["steps"] += 1
            self._counters["batched_tokens"] += step.tokens
            self._counters["overlapped_steps"] += self._flight is not None
            self._run(flight, images)
        if self.speculation is None:
            self._commit(step)
            if self._overlaps:
                drawing = [row.sequence for row in step.rows if row.samples]
                expect(drawing + [fork.follower for fork in step.forks])
        return flight

    def _ask_for_drafts(self) -> None:
        """Sets how many drafts each request is to get, and makes room for them in its ring. One without drafts goes on
        without a ring. A compiled step empties rings itself, where no graph stands between.
        """
        if self.speculation is None:
            return
        running = self.scheduler.running
        self.speculation.ask(running)
        room = 0 if self.model.native is not None and not self._empties else RING
        full = [
            s
            for s in running
            if s.held.replayed and not 0 < s.draft.limit < room - s.held.replayed * (not self._empties)
        ]
        if not full:
            return
        self._advance([(s, s.slot, s.slot, s.held.replayed) for s in full])
        for sequence in full:
            self.scheduler.memory.replay(sequence, 0)
            self.builder.states.accept(sequence)

    def _advance(self, jobs: list[tuple[Sequence, int, int, int]]) -> None:
        """(sequence, slot, target, count): the state in `slot` and the first `count` inputs of the sequence's ring give
        the state that goes to `target`.
        """
        for _, slot, target, count in jobs:
            if count == 0 and slot != target:
                self.arena.copy_slot(slot, target)
        moved = [(sequence.held.batch_slot, *rest) for sequence, *rest in jobs if rest[2] and rest[0] >= 0]
        if moved:
            self.model.advance(moved)
        if moved and self.arena.carry is not None:
            for _, slot, target, _ in moved:
                self.arena.carry[target] = self.arena.carry[slot]

    def _move(self, step: Step) -> None:
        """Memory changes hands: out to the host, cleared, copied from the cache, back in."""
        if self._flight is not None and (step.saves or step.loads):
            self._waits["swap"] += 1
        moves = step.saves or step.preempted or step.page_copies or step.slot_copies or step.loads
        if self.drafter is not None and moves:
            self.drafter.flush()
        for sequence, slot, pages, batch_slot in step.saves:
            self._saved[sequence.request_id] = self.arena.save(slot, pages, batch_slot, sequence.held.replayed)
        self.arena.clear_pages(step.new_pages)
        for source, target in step.page_copies:
            self.arena.copy_page(source, target)
        for source, target in step.slot_copies:
            self.arena.copy_slot(source, target)
        for sequence in step.loads:
            saved = self._saved.pop(sequence.request_id)
            self.arena.load(sequence.slot, sequence.held.pages, saved, sequence.held.batch_slot)
        if self.drafter is not None:
            self.drafter.moved(step)

    def _images(self, step: Step) -> dict[str, list[tuple[int, Tensor]]]:
        """Image rows of the step. A request whose source cannot give them fails, and its row leaves the step."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        for row in list(step.rows):
            sequence = row.sequence
            if sequence.next_span == len(sequence.request.spans):
                continue
            try:
                found[sequence.request_id] = image_rows(row, self.config.hidden_size)
            except Exception as error:  # whatever a source raises ends its own request, and no other
                step.rows.remove(row)
                step.failed.append((sequence, error))
        return found

    def _run(self, flight: Flight, images: dict[str, list[tuple[int, Tensor]]]) -> None:
        step, before, unread = flight.step, self._flight, None
        if before is not None and before.tokens_L is not None:
            unread = Unread(before.tokens_L, before.ended_L)
        drafter = self.drafter if self.drafter is not None and self.drafter.awake else None
        if drafter is not None:
            drafter.draft(step.rows)
        computed = self.forward(step.rows, images, step.checkpoints, unread)
        if drafter is not None:
            drafter.observe(step.rows, computed)
        self.pools.add(step.rows, computed.hidden_TD)
        self.prompt_scores.add(step.rows, computed.hidden_TD)
        if any(row.samples for row in step.rows):
            self._draw(flight, self.model.logits(computed.hidden_TD, computed.samples), unread)
        elif not self._at_once:
            flight.send(self.options.device, None, None, None)

    def _draw(self, flight: Flight, logits_LV: Tensor, unread: Unread | None) -> None:
        """A token for each row of logits, and for each sample that goes on from one of them by itself."""
        step = flight.step
        drawing = [(row, place) for row in step.rows if row.samples for place in range(row.drafts + 1)]
        ahead = [row.sequence.draft.tokens[:place] for row, place in drawing]
        shared = [
            (place, fork.follower)
            for place, (row, _) in enumerate(drawing)
            if row.sequence.followers
            for fork in self.scheduler.fork(row, step)
        ]
        for fork in step.forks:
            if fork.follower.request.pooled:
                self.pools.share(fork.leader.request_id, fork.follower.request_id)
        if shared:
            places = [*range(len(drawing)), *(place for place, _ in shared)]
            logits_LV = logits_LV.index_select(0, upload(places, torch.int64, logits_LV.device))
            ahead += [[] for _ in shared]
        owners = [row.sequence for row, _ in drawing] + [follower for _, follower in shared]
        if self._at_once:
            flight.choices = self.sampler.sample(logits_LV, owners, ahead)
            return
        drawn = self.sampler.draw(logits_LV, owners, ahead, None if unread is None else unread.tokens_M)
        ended, accepted = None, None
        if self._overlaps:
            ended = self.ends.reached(drawn.tokens_L, owners)
        verified = [row for row in step.rows if row.verified]
        if verified:
            accepted = accepted_drafts(drawn.tokens_L, step.rows)
            self.builder.states.stay(verified, accepted)
        flight.send(self.options.device, drawn, ended, accepted)

    # -- what a step has drawn -----------------------------------------------------------------------------------------

    def _collect(self) -> list[TokenEvent]:
        """Reads what the step in flight has drawn, and ends who is to end. Nobody left: nothing is waited for."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        step, tokens = flight.step, list[TokenEvent]()
        if self._at_once or any(self._here(sequence) for sequence in step.sequences):
            choices, accepted = flight.read()
            self._timed(flight)
            tokens = self._take_all(step, choices, accepted)
        if self.speculation is not None:
            self._commit(step)
        for row in step.rows:
            if row.sequence.next_span < len(row.sequence.request.spans):
                _release_spans(row.sequence, min(row.end, row.sequence.computed))
        for fork in step.forks:
            _release_spans(fork.follower, min(fork.follower.prompt_len, fork.follower.computed))
        for event in tokens:
            if event.finish_reason is not None:
                sequence = self._sequences[event.request_id]
                self._keep(sequence)
                self._end(sequence)
        return tokens

    def _timed(self, flight: Flight) -> None:
        """A step that was launched while another ran took the time since that was read."""
        now = self.clock()
        seconds, self._collected = now - max(flight.started, self._collected), now
        self.pace.observe(flight.step.tokens, seconds)
        if self.speculation is not None:
            self.speculation.timed(flight.step, flight.started)

    def _take_all(self, step: Step, choices: list[Choice], accepted: list[int]) -> list[TokenEvent]:
        """Hands out what was drawn; what nobody waits for any more is dropped."""
        drawn, judged = iter(choices), iter(accepted)
        tokens: list[TokenEvent] = []
        for row in step.rows:
            if not row.samples:
                continue
            choice, hits, here = next(drawn), None, self._here(row.sequence)
            if accepted and row.verified:
                hits = next(judged)
            if row.drafts:
                mine = [choice, *(next(drawn) for _ in range(row.drafts))]
                hits = _hits(row, mine) if hits is None else hits
                tokens += self._take(row, mine[: hits + 1]) if here else []
            elif here:
                tokens.append(self._append(row.sequence, row.end, choice))
        for fork in step.forks:
            choice = next(drawn)
            if self._here(fork.follower):
                tokens.append(self._append(fork.follower, fork.follower.prompt_len, choice))
        return tokens

    def _take(self, row: Row, choices: list[Choice]) -> list[TokenEvent]:
        """Adds to a row's sequence what was drawn in the places of its accepted drafts, and behind them; none behind
        the end.
        """
        sequence, first = row.sequence, row.end - row.drafts
        events: list[TokenEvent] = []
        for place, choice in enumerate(choices):
            events.append(self._append(sequence, first + place, choice))
            if events[-1].finish_reason is not None:
                break
        if self.speculation is not None:
            self.speculation.verified(sequence, row.drafts, min(len(choices) - 1, len(events)))
        return events

    def _append(self, sequence: Sequence, at: int, choice: Choice) -> TokenEvent:
        """Gives a sequence its token in place `at`, and says whether it ends it: then there is nothing behind."""
        if at < len(sequence.tokens):
            sequence.tokens[at] = choice.token
            sequence.unread -= 1
        else:
            sequence.tokens.append(choice.token)
        self._counters["output_tokens"] += 1
        pooled, scores = self.pools.take(sequence.request_id), self.prompt_scores.take(sequence.request_id)
        self._read.pop(sequence.request_id, None)  # all that was to be read of its prompt goes out with this token
        reason, stop = _finish_reason(sequence, at + 1 - sequence.prompt_len, choice.token)
        if reason is not None and sequence.unread:
            del sequence.tokens[at + 1 :]
            sequence.unread, sequence.computed = 0, min(sequence.computed, at)
        scheduled, sequence.scheduled = sequence.scheduled, None
        return TokenEvent(
            sequence.request_id,
            choice.token,
            choice.logprob,
            choice.top,
            reason,
            cached_tokens=sequence.cached_tokens,
            stop_token=stop,
            pooled=pooled,
            prompt_scores=scores,
            scheduled=scheduled,
        )

    # -- memory after a step -------------------------------------------------------------------------------------------

    def _commit(self, step: Step) -> None:
        """What the step leaves is taken over: current states, those to keep, samples that go on by themselves."""
        first = 0
        carried: list[tuple[int, int]] = []
        for row in step.rows:
            kept = self._settle(row, step.checkpoints.get(row.sequence.arrival, ()))
            carried += [(slot, first + position - row.start - 1) for position, slot in kept]
            first += row.count
        if self.drafter is not None:
            self.drafter.settle(carried)
            if step.forks:
                self.drafter.forked(step.forks)
        for fork in step.forks:
            if fork.pages is not None:
                self.arena.copy_page(*fork.pages)
            if fork.slots[0] >= 0:
                self.arena.copy_slot(*fork.slots)
        self.scheduler.commit(step)

    def _settle(self, row: Row, checkpoints: SequenceOf[tuple[int, int]]) -> list[tuple[int, int]]:
        """States after a row: which one is current, and those at `checkpoints` (position, slot) that are to be kept.
        Returns (position, slot) of them all.
        """
        sequence, verified = row.sequence, row.verified
        before = 0 if self._empties else sequence.held.replayed
        end = len(sequence.tokens) - 1 if row.drafts else row.end
        written = row.drafts > 0 and not self.builder.states.replayed
        jobs = []
        for position, target in checkpoints:
            if target < 0 or position > end or (position < row.end and not verified):
                continue
            done = position - row.start
            source = sequence.held.slots[done - 1] if written else sequence.slot
            jobs.append((sequence, source, target, before + done if verified and not written else 0))
        self._advance(jobs)
        if verified:
            if written:
                self.scheduler.memory.accept(sequence, end - row.start)
            else:
                self.scheduler.memory.replay(sequence, before + end - row.start)
            if self._at_once:
                self.builder.states.accept(sequence)
        return [(end, sequence.slot), *(kept for kept in checkpoints if kept[0] <= end)]

    def _keep(self, sequence: Sequence) -> None:
        """Leaves the state at the end of an answer to whoever continues it."""
        if self.drafter is not None:
            self.drafter.flush()
        copy = self.scheduler.keep(sequence)
        if copy is not None:
            self._advance([(sequence, *copy, sequence.held.replayed)])

    def _failure(self, sequence: Sequence, error: Exception) -> TokenEvent:
        self._counters["failed"] += 1
        self._end(sequence)
        return TokenEvent(sequence.request_id, None, finish_reason="error", error=error)

    def _end(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.flush()
        if sequence.status is not Status.DONE:
            self.scheduler.finish(sequence)
        if sequence.next_span < len(sequence.request.spans) and self._flight is not None:
            self._flight.wait()
        for span in sequence.request.spans[sequence.next_span :]:
            span.source.release()
        sequence.next_span = len(sequence.request.spans)
        self._saved.pop(sequence.request_id, None)
        self.pools.drop(sequence.request_id)
        self.prompt_scores.take(sequence.request_id)
        self._read.pop(sequence.request_id, None)
        if self.speculation is not None:
            self.speculation.forget(sequence)
        del self._sequences[sequence.request_id]

    # -- looking in ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        pool = self.arena.pool
        cached = self.cache.stats() if self.cache is not None else dict.fromkeys(CACHE_STATS, 0)
        return {
            **self._counters,
            **{f"waited_{reason}": count for reason, count in self._waits.items()},
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
        """Forgets everything that requests have left behind. What running ones share stays theirs."""
        if self.cache is not None:
            self.cache.clear()

    def check_integrity(self) -> None:
        """`AssertionError` unless everything that is held belongs to a request that is here."""
        self.scheduler.check_integrity()
        known = {sequence.request_id for sequence in self.scheduler.queues}
        assert known == set(self._sequences), "a request is lost"
        swapped = {s.request_id for s in self.scheduler.waiting if s.status is Status.SWAPPED}
        assert set(self._saved) <= swapped, "saved state without an owner"

    def close(self) -> None:
        """Ends all requests without events, and empties the cache. Idempotent."""
        for sequence in list(self._sequences.values()):
            self._end(sequence)
        self._collect()
        self.flush_cache()
        self.forward.close()


def _placement(config: DecoderConfig, options: DecoderOptions, has_states: bool) -> Placement:
    chunk = config.scan_chunk or options.page_size
    block = resolve_state_block(options.state_block, options.page_size, chunk)
    return Placement(options.state_cache, block, chunk, options.page_size, has_states)


def _check_ids(name: str, ids: Collection[int], vocab: int) -> None:
    """`ValueError` for an id that the model has no row for."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        bad = next(token for token in ids if not 0 <= token < vocab)
        raise ValueError(f"{name}token id {bad} is not between 0 and {vocab - 1}")


def _check_sample(first: DecoderRequest, sample: DecoderRequest, vocab: int) -> None:
    """`ValueError` for ids of its own. What samples of one prompt share is the same for all of them."""
    _check_ids("eos_token_ids: ", sample.eos_token_ids, vocab)
    _check_ids("stop_token_ids: ", sample.sampling.stop_token_ids, vocab)
    _check_ids("logit_bias: ", sample.sampling.logit_bias, vocab)
    if sample is not first:
        assert sample.prompt_ids == first.prompt_ids and not sample.output_ids and not first.output_ids
        assert sample.salt == first.salt and sample.pooled == first.pooled
        spans = [[(span.start, span.length, span.key) for span in each.spans] for each in (first, sample)]
        assert spans[0] == spans[1], "samples of one prompt have the same images"


def _hits(row: Row, choices: SequenceOf[Choice]) -> int:
    """How many of a row's drafts are the tokens that were drawn in their places: those before the first that is not."""
    drafts = row.sequence.draft.tokens
    return next((place for place in range(row.drafts) if choices[place].token != drafts[place]), row.drafts)


def _release_spans(sequence: Sequence, end: int) -> None:
    """Gives back the rows of images that lie in the first `end` tokens."""
    spans = sequence.request.spans
    while sequence.next_span < len(spans) and spans[sequence.next_span].end <= end:
        spans[sequence.next_span].source.release()
        sequence.next_span += 1


def _finish_reason(sequence: Sequence, output: int, token: int) -> tuple[FinishReason | None, int | None]:
    """Why the sequence ends with its output token number `output`, and that token if it is an end or stop token."""
    request, params = sequence.request, sequence.request.sampling
    ends = token in params.stop_token_ids or (token in request.eos_token_ids and not params.ignore_eos)
    if ends and output > params.min_tokens:
        return "stop", token
    if output >= sequence.limit:
        return "length", None
    return None, None
