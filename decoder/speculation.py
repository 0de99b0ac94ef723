"""Drafts of the running requests: who gets how many, where they come from, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from decoder.config import DecoderOptions
from decoder.drafting import DraftPolicy, NgramIndex, Record
from decoder.request import Sequence
from decoder.scheduler import Step


class Proposer(Protocol):
    """Guesses how a sequence goes on, from its tokens alone."""

    def propose(self, tokens: SequenceOf[int], count: int) -> list[int]:
        """At most `count` tokens that may follow."""


class Speculation:
    """Asks for drafts before a step is scheduled, and counts afterwards."""

    def __init__(self, options: DecoderOptions) -> None:
        self.source = options.speculative
        self.policy = DraftPolicy(options.num_drafts, adaptive=options.draft_policy == "adaptive")
        self.drafted = [0] * options.num_drafts
        self.accepted = [0] * options.num_drafts
        """By place in the step: how many drafts were verified, and how many were what was drawn."""
        self.new_index: Callable[[Sequence], Proposer] = lambda sequence: NgramIndex()
        """What drafts for one sequence under `ngram`."""
        self._records: dict[int, Record] = {}
        self._indices: dict[int, Proposer] = {}

    def ask(self, running: Iterable[Sequence]) -> None:
        """Sets `draft_limit`, and under `ngram` the drafts themselves, of all that decode."""
        decoding = [sequence for sequence in running if sequence.decoding]
        rows = len(decoding)
        measuring = self.policy.measures(rows)
        for sequence in decoding:
            record = self._records.setdefault(sequence.arrival, Record())
            limit = 0 if measuring else self.policy.wanted(record, len(sequence.tokens), rows)
            if limit and self.source == "ngram":
                if sequence.arrival not in self._indices:
                    self._indices[sequence.arrival] = self.new_index(sequence)
                sequence.drafts = self._indices[sequence.arrival].propose(sequence.tokens, limit)
                limit = len(sequence.drafts)
            sequence.draft_limit = limit

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The first `accepted` of a row's drafts were what was drawn."""
        for place in range(min(drafted, accepted + 1)):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
        self.policy.learn(self._records[sequence.arrival], len(sequence.tokens), drafted, accepted)

    def timed(self, step: Step, seconds: float) -> None:
        """`step` took so long. Only steps of nothing but requests that draw say what a draft costs."""
        if step.rows and all(row.samples and row.kind == 0 for row in step.rows):
            self.policy.timed(len(step.rows), sum(row.drafts for row in step.rows), seconds)

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.arrival, None)
        self._indices.pop(sequence.arrival, None)

    def stats(self) -> dict[str, int]:
        """`drafted_1`, `accepted_1`, ...: by place. A draft behind a refused one is not counted: it was not tried."""
        counts = (("drafted", self.drafted), ("accepted", self.accepted))
        return {f"{name}_{place}": count for name, of in counts for place, count in enumerate(of, 1)}
