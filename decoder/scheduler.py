"""Which requests run in the next step, and with how many tokens each. Pure policy: no tensors, no clock.

Liveness. A request that runs and can advance always does: when memory is short, the request of least urgency gives
its memory up (its state goes to host memory, or is computed again later), so the most urgent one can always grow to
its end. A request that waits for an image holds nothing that another one, ready to run, needs: it is put out first.
Requests whose image rows are given back already cannot be computed again; they are moved to host memory even above
its bound, when nothing else helps.

Order. A request's rank is the step it came in less `ageing` steps for each level of its priority (levels beyond 100 or
-100 count as these); the smaller rank goes first. So a request is overtaken by those a level above it that come in the
next `ageing` steps, and by none that come later.

Waiting. Let S be the requests that run while this one waits, those of smaller rank, and itself. From the time that all
its images are there it ends within `rounds x (W + R)` steps: W the prompt and output tokens of S, R those that requests
of S compute again after they were put out, plus one for each time that one is; `rounds` = `max_seqs` over
`max_batched_tokens`, rounded up. For the first in order among those that can go on gets a row every `rounds` steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from decoder.blocks import Claims, SuperblockPool
from decoder.cached import MISS, Hit
from decoder.config import DecoderOptions
from decoder.metadata import chunk_end
from decoder.prefix_cache import PrefixCache
from decoder.request import DecoderRequest, Sequence, Status
from decoder.step import Fork, Row, Save, Step

MAX_LEVEL = 100
"""Priorities beyond this count as this: nobody goes first for ever."""


class Scheduler:
    """Owns the queues and, through the pool, all memory of sequences."""

    def __init__(
        self,
        options: DecoderOptions,
        pool: SuperblockPool,
        *,
        page_bytes: int = 0,
        slot_bytes: int = 0,
        ring_bytes: int = 0,
        cache: PrefixCache | None = None,
    ) -> None:
        """`page_bytes`, `slot_bytes`, `ring_bytes`: what a page, a slot and a ring take in host memory, held against
        `host_bytes`. `cache`: what is kept in memory that no sequence needs; it gives way to any that does.
        """
        self.options = options
        self.pool, self.cache = pool, cache
        self.slots_per_seq = options.slots_per_seq
        self.page_bytes, self.state_bytes = page_bytes, slot_bytes + ring_bytes
        block_bytes = max(slot_bytes, page_bytes * pool.pages_per_block)
        self.host_limit = pool.num_blocks * block_bytes // 4 if options.host_bytes is None else options.host_bytes
        self.host_used = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.step_number = 0
        self.preemptions = 0
        self.recomputes = 0
        self.forks = 0
        self.fork_misses = 0
        """Followers that found no seat or memory when their prompt had been read, and queue for themselves."""
        self._arrivals = 0
        self._admissions = 0
        self._seats = list(range(options.max_seqs - 1, -1, -1))
        self._host: dict[str, int] = {}
        self._leaving: list[Sequence] = []
        self._advancing = Claims(pool.pages_per_block)
        """Memory of the running requests that can advance, `_advancers` in number."""
        self._advancers = 0

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: DecoderRequest, leader: Sequence | None = None) -> Sequence:
        """Queues a request. `ValueError` when it can never be served, with the numbers. `leader`: a waiting sequence of
        the same prompt, which reads it for both.
        """
        prompt, output = len(request.prompt_ids), len(request.output_ids)
        maximum = self.options.max_len
        if prompt == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        if prompt + output >= maximum:
            raise ValueError(
                f"a prompt of {prompt} tokens with {output} output tokens leaves no room in max_len {maximum}: "
                f"at most {maximum - 1 - output} prompt tokens can be served"
            )
        limit = maximum - prompt
        if request.sampling.max_tokens is not None:
            limit = min(limit, request.sampling.max_tokens)
        if output >= limit:
            raise ValueError(f"max_tokens {limit} is not above the {output} output tokens that were passed")
        _check_spans(request)
        level = max(-MAX_LEVEL, min(MAX_LEVEL, request.priority))
        sequence = Sequence(request, self._arrivals, limit, rank=self.step_number - level * self.options.ageing)
        self._arrivals += 1
        self.waiting.append(sequence)
        if leader is not None:
            sequence.leader = leader
            leader.followers.append(sequence)
        return sequence

    def _part(self, sequence: Sequence) -> None:
        """Takes a sequence out of its group; the first of those that it led leads the others."""
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
        if sequence.followers:
            first, *rest = sequence.followers
            first.leader, first.followers, sequence.followers = None, rest, []
            for other in rest:
                other.leader = first

    def fork(self, row: Row, step: Step) -> list[Fork]:
        """Starts the followers of a sequence whose prompt ends with this row: whole pages are shared, and what goes on
        from the prompt's end is theirs alone. Those for whom there is no room go on by themselves.
        """
        leader, size = row.sequence, self.options.page_size
        followers, leader.followers = leader.followers, []
        whole, part = divmod(row.end, size) if self.pool.pages_per_block else (0, 0)
        forks = []
        for follower in followers:
            follower.leader = None
            if not self._seats or not self._reclaim(self.slots_per_seq, int(part > 0) + 1):
                self.fork_misses += 1
                continue
            slots = [self.pool.take_slot() for _ in range(self.slots_per_seq)]
            own = self.pool.take_pages(int(part > 0))
            assert own is not None
            shared = leader.pages[:whole]
            self.pool.retain_pages(shared)
            follower.slots, follower.pages = [slot for slot in slots if slot is not None], [*shared, *own]
            follower.seat, follower.admission = self._seats.pop(), self._admissions
            self._admissions += 1
            follower.computed, follower.last_step, follower.status = row.end, self.step_number, Status.RUNNING
            follower.cached_tokens, follower.chain = leader.cached_tokens, list(leader.chain)
            if self.cache is not None:
                follower.last_mark = leader.last_mark
                follower.next_mark = self.cache.placement.next_mark((), follower.prompt_len, row.end)
            self.waiting.remove(follower)
            self.running.append(follower)
            self._count(follower, True)
            copied = (leader.pages[whole], own[0]) if own else None
            forks.append(Fork(leader, follower, (leader.slot, follower.slot), copied))
        self.forks += len(forks)
        step.forks += forks
        return forks

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out and frees all it holds. The caller sees to it that no step is using it."""
        self._part(sequence)
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.status is not Status.DONE:
            self.waiting.remove(sequence)
            self.host_used -= self._host.pop(sequence.request_id, 0)
        sequence.status = Status.DONE

    def preempt(self, sequence: Sequence) -> bool:
        """In the next step a running sequence gives its memory up and queues again. False for one that does not run."""
        if sequence.status is not Status.RUNNING:
            return False
        if sequence not in self._leaving:
            self._leaving.append(sequence)
        return True

    def commit(self, step: Step) -> None:
        """The rows of `step` have been computed, and what they have drawn is in their sequences' tokens."""
        for row in step.rows:
            sequence = row.sequence
            sequence.computed = row.end if not row.drafts else min(row.end, len(sequence.tokens) - 1)
            sequence.last_step = self.step_number
            if step.checkpoints:
                self._register(sequence, step.checkpoints.pop(sequence.arrival, ()))
            if row.drafts and self.cache is not None:
                following = self.cache.placement.next_mark(sequence.marks, sequence.prompt_len, sequence.computed)
                sequence.next_mark = following
        for lost in step.checkpoints.values():
            for _, slot in lost:
                self.pool.release_slot(slot)
        for slot in step.held_slots:
            self.pool.release_slot(slot)
        self.pool.release_pages(step.held_pages)

    @property
    def needs_ids(self) -> bool:
        """Could the next step keep a state behind a token that has been drawn and not read? Its key hashes the id."""
        return any(s.unread and s.computed + 1 >= s.next_mark for s in self.running)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Rows for the next step; empty when nothing can advance. Memory for them is taken."""
        self.step_number += 1
        step = Step()
        self._collect_failures(step)
        for sequence in self._leaving:
            if sequence.status is Status.RUNNING:
                self._put_out(sequence, step, {})
        self._leaving.clear()
        budget = self.options.max_batched_tokens
        spare = max(0, budget - len(self.running))
        chosen: dict[int, Row] = {}
        for sequence in self._running_order():
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING or (sequence.unread and sequence.full):
                continue
            row = self._drafted(sequence, min(spare, budget - 1)) or self._row(sequence, budget)
            if row is not None and self._grow(sequence, row.end, step, chosen):
                chosen[sequence.arrival] = row
                budget -= row.count
                spare -= row.drafts
        budget = self._admit(step, chosen, budget)
        step.rows = sorted(chosen.values(), key=_batch_order)
        if self.cache is not None:
            self._place_checkpoints(step, self.cache)
        return step

    def _collect_failures(self, step: Step) -> None:
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.spans:
                error = sequence.source_error()
                if error is not None:
                    step.failed.append((sequence, error))
        for sequence, _ in step.failed:
            self.finish(sequence)

    def _running_order(self) -> list[Sequence]:
        """Decode rows first, then by urgency; those that advanced longest ago first when the budget cannot hold all."""
        crowded = len(self.running) > self.options.max_batched_tokens
        return sorted(
            self.running,
            key=lambda s: (s.last_step if crowded else 0, not s.decoding, *s.order),
        )

    def _row(self, sequence: Sequence, budget: int, cached: int = 0) -> Row | None:
        """What the sequence can compute now, from its `cached` first tokens on where it has computed none; `None` when
        its next row is not ready.
        """
        start = max(sequence.computed, cached)
        align = 1 if self.cache is None else self.cache.placement.grid
        budget = min(budget, self.options.max_chunk or budget)
        end = chunk_end(start, len(sequence.tokens), budget, sequence.ready_end(start), align)
        return Row(sequence, end - start, start) if end > start else None

    def _drafted(self, sequence: Sequence, spare: int) -> Row | None:
        """The row of a sequence with drafts, at most `spare` of them; `None` where there are none to be had. Nobody is
        put out for a draft, and none is made for a token that could not come any more.
        """
        drafts = min(sequence.draft_limit, spare, sequence.limit - sequence.output_len - 1)
        if drafts <= 0 or not sequence.decoding:
            return None
        row = Row(sequence, 1 + drafts, sequence.computed, drafts)
        return row if self._reclaim(0, self._pages_for(row.end) - len(sequence.pages)) else None

    # -- memory --------------------------------------------------------------------------------------------------------

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.options.page_size) if self.pool.pages_per_block else 0

    def _grow(self, sequence: Sequence, tokens: int, step: Step, chosen: dict[int, Row]) -> bool:
        """Pages for the first `tokens` tokens; puts less urgent sequences out for them. False: it has to wait or was
        put out.
        """
        while True:
            needed = max(0, self._pages_for(tokens) - len(sequence.pages))
            pages = self.pool.take_pages(needed)
            if pages is None and self._reclaim(0, needed):
                pages = self.pool.take_pages(needed)
            if pages is not None:
                sequence.pages += pages
                if sequence.counted:
                    self._advancing.add(pages=pages)
                step.new_pages += pages
                return True
            victim = self._victim(sequence, chosen)
            if victim is None:
                return False
            self._put_out(victim, step, chosen)
            if victim is sequence:
                return False

    def _victim(self, sequence: Sequence, chosen: dict[int, Row]) -> Sequence | None:
        """Whom to put out so that `sequence` can grow: one that is stuck, else the least urgent one, maybe itself."""
        others = [s for s in self.running if s is not sequence]
        for stuck in (True, False):
            candidates = [s for s in others if not stuck or self._stuck(s)]
            for candidate in sorted(candidates, key=lambda s: s.order, reverse=True):
                if not stuck and candidate.order < sequence.order:
                    break
                if self._can_leave(candidate):
                    return candidate
        if not others:
            return None
        first = not any(other.order < sequence.order and not self._stuck(other) for other in others)
        return sequence if self._can_leave(sequence) and not first else self._forced(sequence)

    def _forced(self, sequence: Sequence) -> Sequence:
        """Nobody may leave by the rules: the least urgent goes to host memory above its bound."""
        return max(self.running, key=lambda s: s.order)

    def _stuck(self, sequence: Sequence) -> bool:
        return sequence.ready_end() <= sequence.computed

    def _host_need(self, sequence: Sequence) -> int:
        return self.state_bytes + len(sequence.pages) * self.page_bytes

    def _can_leave(self, sequence: Sequence) -> bool:
        """By swap within the bound, or by computing again what it has."""
        return self._swappable(sequence) or sequence.next_span == 0

    def _swappable(self, sequence: Sequence) -> bool:
        return sequence.computed > 0 and self.host_used + self._host_need(sequence) <= self.host_limit

    def _put_out(self, sequence: Sequence, step: Step, chosen: dict[int, Row]) -> None:
        """Back to the queue, its memory free. Its exact state is saved if there is room, or if it could not be computed
        again.
        """
        self.preemptions += 1
        step.put_out.add(sequence.arrival)
        if self._stuck(sequence):
            sequence.barrier = sequence.ready_end() + 1
        chosen.pop(sequence.arrival, None)
        fresh = set(step.new_pages) & set(sequence.pages)
        step.new_pages = [page for page in step.new_pages if page not in fresh]
        if self._swappable(sequence) or sequence.next_span > 0:
            used = sequence.pages[: self._pages_for(sequence.computed)]
            step.saves.append(Save(sequence, sequence.slot, used, sequence.seat))
            need = self.state_bytes + len(used) * self.page_bytes
            self._host[sequence.request_id] = need
            self.host_used += need
            sequence.status = Status.SWAPPED
        else:
            self.recomputes += 1
            sequence.computed = sequence.replayed = 0
            sequence.status = Status.WAITING
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)

    def _count(self, sequence: Sequence, advances: bool) -> None:
        """From now on the memory of a running sequence is counted as that of one that can advance, or is not."""
        if advances == sequence.counted:
            return
        change = self._advancing.add if advances else self._advancing.remove
        change(sequence.slots, sequence.pages)
        self._advancers += 1 if advances else -1
        sequence.counted = advances

    def _release(self, sequence: Sequence) -> None:
        self._count(sequence, False)
        for slot in sequence.slots:
            self.pool.release_slot(slot)
        self.pool.release_pages(sequence.pages)
        self._seats.append(sequence.seat)
        sequence.slots, sequence.pages, sequence.seat = [], [], -1
        sequence.accepted, sequence.draft_limit = 1, 0

    # -- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, step: Step, chosen: dict[int, Row], budget: int) -> int:
        """Lets waiting requests in, in order, as long as there is budget and memory."""
        if not self.waiting:
            return budget
        for sequence in self.running:
            self._count(sequence, not self._stuck(sequence))
        if not self._seats and self._advancers == len(self.running):
            return budget
        for sequence in sorted(self.waiting, key=lambda s: s.order):
            if budget == 0:
                break
            if sequence.arrival in step.put_out or sequence.leader is not None:
                continue
            hit = self._lookup(sequence)
            row = self._entry_row(sequence, hit, budget)
            if row is None:
                continue
            if self._defers(sequence, hit, chosen) or not self._leaves_room(sequence):
                break
            taken = self._make_room(sequence, hit, step, chosen, budget)
            if taken is None:
                if hit.tokens and not chosen:  # the whole memory does not do for it: it waits for its images instead
                    sequence.hit = MISS
                    continue
                break
            if taken is not hit:
                row = self._entry_row(sequence, taken, budget)
                assert row is not None
            self._enter(sequence, taken, step)
            chosen[sequence.arrival] = row
            budget -= row.count
        return budget

    def _leaves_room(self, sequence: Sequence) -> bool:
        """Is there memory for it and a page for each of those that run, to grow into? Or it would be put out by them,
        or put one of them out, as soon as it is in. Cached memory counts as free, and so does that of requests that
        wait for images.
        """
        if not self._advancers:
            return True
        pages = self._entry_pages(sequence) + (self._advancers if self.pool.pages_per_block else 0)
        return self.pool.fits_beside(self.slots_per_seq, pages, self._advancing)

    def _entry_pages(self, sequence: Sequence) -> int:
        """Pages for every token it has: a prompt that is let in can be computed to its end."""
        return self._pages_for(len(sequence.tokens))

    def _lookup(self, sequence: Sequence) -> Hit:
        """What the cache has of a sequence that has computed nothing."""
        request = sequence.request
        whole = request.pooled or request.sampling.prompt_logprobs is not None  # what is asked for is of all tokens
        if self.cache is None or sequence.computed or whole:
            return MISS
        return self.cache.lookup(sequence)

    def _entry_row(self, sequence: Sequence, hit: Hit, budget: int) -> Row | None:
        """Its first row after a hit, or `None` while that is not ready or is what it was put out for."""
        if sequence.ready_end(max(sequence.computed, hit.tokens)) < sequence.barrier:
            return None
        return self._row(sequence, budget, hit.tokens)

    def _make_room(self, sequence: Sequence, hit: Hit, step: Step, chosen: dict[int, Row], budget: int) -> Hit | None:
        """A seat, a slot and pages for a sequence that has `hit`, or for the whole of it; `None` where there are none.
        Sequences that wait for images are put out for them, no others.
        """
        stuck: list[Sequence] | None = None
        while True:
            if self._seats:
                if hit.tokens and self._take_hit(sequence, hit, step):
                    return hit
                whole = self._entry_pages(sequence)
                ready = not hit.tokens or self._entry_row(sequence, MISS, budget) is not None
                if ready and self._reclaim(self.slots_per_seq, whole):
                    return hit if not hit.tokens else MISS
            if stuck is None:
                stuck = sorted((s for s in self.running if self._stuck(s)), key=lambda s: s.order)
            if not stuck:
                return None
            self._put_out(stuck.pop(), step, chosen)

    def _enter(self, sequence: Sequence, hit: Hit, step: Step) -> None:
        """Gives the sequence its seat and what it lacks; what it takes from the cache it has got from `_take_hit`."""
        slots, taken = list(sequence.slots), sequence.slot >= 0
        while len(slots) < self.slots_per_seq:
            slot = self.pool.take_slot()
            assert slot is not None
            slots.append(slot)
        pages = self.pool.take_pages(self._entry_pages(sequence) - len(sequence.pages))
        assert pages is not None
        if hit.checkpoint is not None:
            if not taken and slots[0] >= 0:
                step.slot_copies.append((hit.slot, slots[0]))
            if hit.tail in step.held_pages:
                step.page_copies.append((hit.tail, pages[0]))
        first, sequence.computed = sequence.admission < 0, max(sequence.computed, hit.tokens)
        sequence.slots, sequence.pages, sequence.seat = slots, [*sequence.pages, *pages], self._seats.pop()
        sequence.admission = self._admissions
        if first:
            sequence.scheduled = time.monotonic()
        if self.cache is not None and sequence.status is Status.WAITING:
            self._start_marks(sequence, hit, self.cache)
            if first:
                sequence.cached_tokens = min(hit.tokens, sequence.prompt_len)
        self._admissions += 1
        step.new_pages += pages
        if sequence.status is Status.SWAPPED:
            step.loads.append(sequence)
            self.host_used -= self._host.pop(sequence.request_id)
        sequence.status, sequence.barrier = Status.RUNNING, 0
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._count(sequence, True)

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    def _reclaim(self, slots: int, pages: int) -> bool:
        """Evicts until `slots` and `pages` fit; False, and nothing evicted, where even an empty cache would not do."""
        if self.pool.fits(slots, pages):
            return True
        if self.cache is None or not self.pool.fits_beside(slots, pages, self.pool.needed):
            return False
        while not self.pool.fits(slots, pages):
            if not self.cache.evict():
                return False
        return True

    def _take_hit(self, sequence: Sequence, hit: Hit, step: Step) -> bool:
        """Makes room for a sequence that starts from `hit`, whose pages and state it then holds: the state is copied,
        or, where memory is short, taken out of the cache. False, and nothing changed, when neither fits.
        """
        assert self.cache is not None
        fresh = self._entry_pages(sequence) - len(hit.pages)
        self.pool.retain_pages(hit.pages)
        held = [page for page in (hit.tail,) if page >= 0]
        self.pool.retain_slot(hit.slot)
        self.pool.retain_pages(held)
        if self._reclaim(self.slots_per_seq, fresh):
            step.held_slots += [hit.slot] if hit.slot >= 0 else []
            step.held_pages += held
            sequence.pages = list(hit.pages)
            return True
        self.pool.release_slot(hit.slot)
        self.pool.release_pages(held)
        if self._adopt(sequence, hit, step):
            return True
        self.pool.release_pages(hit.pages)
        return False

    def _adopt(self, sequence: Sequence, hit: Hit, step: Step) -> bool:
        """Moves the checkpoint itself to the sequence, unless it is copied from. Its pages are retained before."""
        checkpoint = hit.checkpoint
        if checkpoint is None or checkpoint.slot < 0 or self.pool.slot_owners(checkpoint.slot) > 1:
            return False
        own = [hit.tail] if hit.tail >= 0 and self.pool.page_owners(hit.tail) == 1 else []
        fresh = self._entry_pages(sequence) - len(hit.pages) - len(own)
        assert self.cache is not None
        held = [hit.tail] if hit.tail >= 0 else []
        self.pool.retain_slot(checkpoint.slot)
        self.pool.retain_pages(held)
        done = self._reclaim(self.slots_per_seq - 1, fresh)
        self.pool.release_slot(checkpoint.slot)
        self.pool.release_pages(held)
        if not done:
            return False
        self.cache.hand_over(checkpoint)
        sequence.slots, sequence.pages = [checkpoint.slot], [*hit.pages, *own]
        if hit.tail >= 0 and not own:
            step.held_pages.append(hit.tail)
        return True

    def _start_marks(self, sequence: Sequence, hit: Hit, cache: PrefixCache) -> None:
        """Where the states of a sequence that starts after `hit` are to be kept."""
        cache.use(sequence, hit)
        request = sequence.request
        junction = hit.matched if hit.matched > hit.tokens else 0
        sequence.marks = cache.placement.prompt_marks(
            sequence.prompt_len,
            images=[span.end for span in request.spans if span.complete],
            wanted=request.checkpoint_at,
            junction=junction,
        )
        sequence.last_mark = hit.tokens
        sequence.next_mark = cache.placement.next_mark(sequence.marks, sequence.prompt_len, hit.tokens)

    def _defers(self, sequence: Sequence, hit: Hit, chosen: dict[int, Row]) -> bool:
        """Does a row of this step leave a state that the sequence can go on from in the next one? It waits for that
        once.
        """
        if self.cache is None or sequence.deferred or sequence.computed:
            return False
        limit = len(sequence.tokens) - 1
        for row in chosen.values():
            for mark in self._marks(row):
                if hit.tokens < mark <= limit and mark <= len(row.sequence.tokens):
                    if self.cache.key_at(sequence, mark) == self.cache.key_at(row.sequence, mark):
                        sequence.deferred = True
                        return True
        return False

    def _marks(self, row: Row) -> list[int]:
        sequence = row.sequence
        if self.cache is None or row.end < sequence.next_mark:
            return []
        between = self.cache.placement.marks_between
        cuts = range(row.start, row.end) if row.drafts else (row.start,)
        ends = [*cuts[1:], row.end]
        places = (between(sequence.marks, sequence.prompt_len, *cut) for cut in zip(cuts, ends, strict=True))
        return [mark for found in places for mark in found]

    def _place_checkpoints(self, step: Step, cache: PrefixCache) -> None:
        """Slots for the states that this step's rows pass, of memory that nobody needs more."""
        for row in step.rows:
            sequence = row.sequence
            if row.end < sequence.next_mark:
                continue
            for mark in self._marks(row):
                if mark > len(sequence.tokens) or not cache.holds(sequence, mark):
                    slot = cache.take_slot(mark - sequence.last_mark)
                    if slot is None:
                        continue
                    step.checkpoints.setdefault(sequence.arrival, []).append((mark, slot))
            sequence.next_mark = cache.placement.next_mark(sequence.marks, sequence.prompt_len, row.end)

    def _register(self, sequence: Sequence, kept: Iterable[tuple[int, int]]) -> None:
        """The states have been written: from now on they can be hit."""
        cache = self.cache
        assert cache is not None
        for position, slot in kept:
            if position > sequence.computed:  # a refused draft's
                self.pool.release_slot(slot)
                continue
            found = cache.insert(sequence, position, slot, max(1, position - sequence.last_mark))
            sequence.last_mark = max(sequence.last_mark, position)
            if cache.placement.mode == "align" and position >= sequence.prompt_len:
                if sequence.moving is not None:
                    cache.drop(sequence.moving)
                sequence.moving = found

    def keep(self, sequence: Sequence) -> tuple[int, int] | None:
        """Leaves the state after all that a running sequence has computed to the cache, under `auto` and in models of
        pages alone. Returns (from, to) of the state, which has to be copied before anything else runs; where there is
        no memory for a copy, the sequence's own slot passes to the cache. To be called just before `finish`.
        """
        cache, end = self.cache, sequence.computed
        if cache is None or sequence.status is not Status.RUNNING:
            return None
        if not cache.placement.has_states:
            end = end // self.options.page_size * self.options.page_size
        elif cache.placement.mode != "auto":
            return None
        gain, source = end - sequence.last_mark, sequence.slot
        if gain < self.options.page_size or cache.holds(sequence, end):
            return None
        slot = cache.take_slot(gain)
        if slot is None:
            slot = source
            sequence.slots.remove(slot)
            if sequence.counted:
                self._advancing.remove(slots=[slot])
            sequence.accepted = 1
        cache.insert(sequence, end, slot, gain)
        return (source, slot) if slot >= 0 else None

    # -- looking in ----------------------------------------------------------------------------------------------------

    def tokens_ahead(self, sequence: Sequence, *, cached: bool = True) -> int:
        """Prompt tokens to compute before the first token of a waiting sequence: its own and those of all before it.

        `cached`: less what the cache has of them, which takes looking up; without, it is at least as many.
        """
        others = [other for other in self.sequences if other is not sequence and other.leader is None]
        before = [other for other in others if other.order < sequence.order]
        return sum(
            max(0, other.prompt_len - max(other.computed, self._lookup(other).tokens if cached else 0))
            for other in (*before, sequence)
        )

    @property
    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def runnable(self) -> bool:
        """Could `schedule` give rows, or a failure? May be True although memory then says no."""
        return any(s.ready_end() > s.computed or (s.request.spans and s.source_error()) for s in self.running) or any(
            self._could_start(s) or (s.request.spans and s.source_error()) for s in self.waiting
        )

    def _could_start(self, sequence: Sequence) -> bool:
        """By the same measure as its admission: what it would begin with is not ready merely because the text is."""
        if sequence.leader is not None:
            return False
        done = max(sequence.computed, self._lookup(sequence).tokens)
        return sequence.ready_end(done) > max(done, sequence.barrier - 1)

    def check_integrity(self) -> None:
        """`AssertionError` unless seats, slots, pages and host memory add up."""
        slots = [slot for s in self.running for slot in s.slots]
        pages = [page for s in self.running for page in s.pages]
        if self.cache is not None:
            self.cache.check_integrity()
            self.pool.check_integrity(slots, pages, self.cache.slots, self.cache.pages)
        else:
            self.pool.check_integrity(slots, pages)
        seats = self._seats + [s.seat for s in self.running]
        assert sorted(seats) == list(range(self.options.max_seqs)), "a seat is lost or taken twice"
        assert self.host_used == sum(self._host.values())
        assert set(self._host) == {s.request_id for s in self.waiting if s.status is Status.SWAPPED}
        assert all(len(s.slots) == self.slots_per_seq for s in self.running), "a state slot is not reserved"
        assert all(not s.slots and not s.pages and not s.counted for s in self.waiting)
        counted = Claims(self.pool.pages_per_block)
        for sequence in self.running:
            if sequence.counted:
                counted.add(sequence.slots, sequence.pages)
        assert counted == self._advancing, f"memory of those that advance counted {self._advancing}, held {counted}"
        assert self._advancers == sum(s.counted for s in self.running)


def _batch_order(row: Row) -> tuple[int, ...]:
    """By kind; rows that update a state in order of their slots, so that neighbours in the batch are neighbours in
    memory.
    """
    if row.kind < 2:
        return (row.verified, row.kind, row.sequence.slot)
    return (row.kind, *row.sequence.order)


def _check_spans(request: DecoderRequest) -> None:
    last, prompt = 0, len(request.prompt_ids)
    for span in request.spans:
        if span.length < 1 or span.start < last or span.end > prompt:
            raise ValueError(
                f"image rows {span.start} to {span.end} do not lie in the prompt of {prompt} tokens, after row {last}"
            )
        last = span.end
