"""Runs a step: moves memory, computes all layers, and draws a token for each row that reaches its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, int64

from decoder.batch import Unread, read_images
from decoder.flight import Flight, accepted_drafts
from decoder.graphs import Forward
from decoder.pooling import Pools
from decoder.prompt_scores import PromptScoring
from decoder.sampler import Sampler
from decoder.sequence import Sequence as Owner
from decoder.slot_tables import EndTokens
from decoder.speculation import Speculation
from decoder.states import States
from decoder.step import Row, Step
from kernels.transfer import upload


class Execution:
    """Executes scheduled steps and returns the results as a `Flight`. Reads nothing back from the device, except for
    drafting heads.
    """

    def __init__(
        self,
        states: States,
        forward: Forward,
        sampler: Sampler,
        speculation: Speculation | None,
        pools: Pools,
        prompt_scores: PromptScoring,
    ) -> None:
        self.states, self.forward, self.sampler, self.speculation = states, forward, sampler, speculation
        self.pools, self.prompt_scores = pools, prompt_scores
        self.scheduler, self.model, self.drafter = states.scheduler, states.model, states.drafter
        self.counters = {"steps": 0, "batched_tokens": 0, "overlapped_steps": 0}
        config, options = self.model.config, self.model.options
        self._device, self._hidden_size = options.device, config.hidden_size
        overlaps = options.overlap_on and speculation is None  # the next step may run before tokens are read
        self._ends = EndTokens(options, config.vocab_size) if overlaps else None

    def run(
        self, step: Step, started: float, before: Flight | None = None, read: Callable[[], None] | None = None
    ) -> Flight:
        """Launches a step. `started`: when it was scheduled. `before`: the in-flight step, whose tokens have not been
        read. `read`: reads these tokens, so that constraints know what may follow.
        """
        self.states.move(step)
        read_images(step, self._hidden_size)
        flight = Flight(step, started)
        if step.rows:
            self.counters["steps"] += 1
            self.counters["batched_tokens"] += step.tokens
            self.counters["overlapped_steps"] += before is not None
            self._compute(flight, before, read)
        return flight

    def _compute(self, flight: Flight, before: Flight | None, read: Callable[[], None] | None) -> None:
        step, unread = flight.step, None
        if before is not None and before.tokens_L is not None:
            unread = Unread(before.tokens_L, before.ended_L)
        drafter = self.drafter if self.drafter is not None and self.drafter.awake else None
        if drafter is not None and self.speculation is not None:
            self.speculation.draft(step.rows)
        reads_prompts = any(row.sequence.reads_prompt for row in step.rows)
        computed = self.forward(step.rows, step.checkpoints, unread, all_rows=reads_prompts or drafter is not None)
        if drafter is not None:
            drafter.observe(step.rows, computed)
        if reads_prompts:
            self.pools.add(step.rows, computed.hidden_TD)
            self.prompt_scores.add(step.rows, computed.hidden_TD)
        if any(row.samples for row in step.rows):
            if read is not None and any(row.sequence.guide and row.sequence.unread for row in step.rows):
                read()  # while the device computes the layers
            self._draw(flight, self.model.logits(computed.hidden_TD, computed.samples), unread)
        elif not self.states.at_once:
            flight.send(self._device, None, None, None)

    def _draw(self, flight: Flight, logits_LV: Tensor, unread: Unread | None) -> None:
        """Draws a token for each row of logits, and for each sample that starts from one of them."""
        step = flight.step
        rows = [row for row in step.rows if row.samples]
        owners, ahead = [row.sequence for row in rows], None
        if any(row.drafts or row.sequence.followers for row in rows):
            owners, ahead, logits_LV = self._drawing(step, rows, logits_LV)
        if self.states.at_once:
            flight.choices = self.sampler.sample(logits_LV, owners, ahead)
            return
        drawn = self.sampler.draw(logits_LV, owners, ahead, None if unread is None else unread.tokens_M)
        ended = None if self._ends is None else self._ends.reached(drawn.tokens_L, owners)
        verified, accepted = [row for row in step.rows if row.verified], None
        if verified:
            accepted = accepted_drafts(drawn.tokens_L, step.rows)
            self.states.builder.states.stay(verified, accepted)
        flight.send(self._device, drawn, ended, accepted)

    def _drawing(
        self, step: Step, rows: Sequence[Row], logits_LV: Tensor
    ) -> tuple[list[Owner], list[list[int]], Tensor]:
        """For each draw of rows with drafts or followers: (its sequence, the drafts before it, its row of logits)."""
        drawing = [(row, place) for row in rows for place in range(row.drafts + 1)]
        ahead = [row.sequence.draft.tokens[:place] for row, place in drawing]
        shared = [
            (place, fork.follower)
            for place, (row, _) in enumerate(drawing)
            if row.sequence.followers
            for fork in self.scheduler.forks.fork(row, step)
        ]
        for fork in step.forks:
            if fork.follower.request.pooled:
                self.pools.share(fork.leader.request_id, fork.follower.request_id)
        if shared:
            places = [*range(len(drawing)), *(place for place, _ in shared)]
            logits_LV = logits_LV.index_select(0, upload(places, int64, logits_LV.device))
            ahead += [[] for _ in shared]
        owners = [row.sequence for row, _ in drawing] + [follower for _, follower in shared]
        return owners, ahead, logits_LV
