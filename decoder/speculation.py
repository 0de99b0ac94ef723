"""Speculative decoding of the running requests: number of drafts per request, the drafts, and acceptance counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from decoder.config import DecoderOptions
from decoder.drafting import DraftPolicy, NgramIndex, Record
from decoder.sequence import Sequence
from decoder.step import Row, Step


class Proposer(Protocol):
    """Proposes how a sequence continues, from its tokens alone."""

    def propose(self, tokens: SequenceOf[int], count: int) -> list[int]:
        """At most `count` tokens that may follow."""


class Head(Protocol):
    """Proposes drafts from state that it keeps for sequences."""

    def attend(self, awake: bool) -> None:
        """Sets whether state is kept from now on."""

    def ready(self, sequence: Sequence) -> bool:
        """Whether it has enough state of a sequence."""

    def draft(self, rows: SequenceOf[Row]) -> list[tuple[Sequence, list[int]]]:
        """Drafts for the rows that are to have some, by sequence."""


class Speculation:
    """Asks for drafts before a step is scheduled, and counts acceptance afterwards."""

    def __init__(self, options: DecoderOptions, head: Head | None = None) -> None:
        self.source = options.speculative
        self.policy = DraftPolicy(options.num_drafts, adaptive=options.draft_policy == "adaptive")
        self.drafted = [0] * options.num_drafts
        self.accepted = [0] * options.num_drafts
        """By position in the step: how many drafts were verified, and how many were accepted."""
        self.new_index: Callable[[Sequence], Proposer] = lambda sequence: NgramIndex()
        """The drafter of each sequence under `ngram`."""
        self.head = head
        """The drafter under `mtp`."""
        self._records: dict[int, Record] = {}
        self._indices: dict[int, Proposer] = {}
        self._timing: tuple[int, int, float] | None = None
        """Rows, drafts and start of the last step, if its time is to be recorded."""

    def ask(self, running: Iterable[Sequence]) -> None:
        """Sets the number of drafts of each decoding sequence, and under `ngram` the drafts themselves. While drafting
        pauses there are none, and nothing is done."""
        policy, head = self.policy, self.head
        awake = policy.awake()
        if head is not None:
            head.attend(awake)
        if not awake:
            return
        decoding = [sequence for sequence in running if sequence.decoding]
        rows = len(decoding)
        if policy.measures(rows):
            for sequence in decoding:
                sequence.draft.limit = 0
            return
        wanted = unready = drafts = 0
        for sequence in decoding:
            limit = policy.wanted(self._record(sequence), len(sequence.tokens), rows)
            if limit:
                wanted += 1
                if self.source == "ngram":
                    sequence.draft.tokens = self._index(sequence).propose(sequence.tokens, limit)
                    limit = len(sequence.draft.tokens)
                elif head is not None and not head.ready(sequence):
                    unready, limit = unready + 1, 0
            sequence.draft.limit = limit
            drafts += limit
        if drafts:
            policy.drafts()
        elif rows:
            unwanted = "refused" if policy.best(Record(), rows) else "unwanted"
            policy.idle("unready" if unready else "unfound" if wanted else unwanted)

    def draft(self, rows: SequenceOf[Row]) -> None:
        """Fills in the drafts of a step's rows if a head makes them."""
        if self.head is not None:
            for sequence, tokens in self.head.draft(rows):
                sequence.draft.tokens = tokens

    def _record(self, sequence: Sequence) -> Record:
        record = self._records.get(sequence.arrival)
        if record is None:
            record = self._records[sequence.arrival] = Record()
        return record

    def _index(self, sequence: Sequence) -> Proposer:
        index = self._indices.get(sequence.arrival)
        if index is None:
            index = self._indices[sequence.arrival] = self.new_index(sequence)
        return index

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The first `accepted` of a row's drafts were accepted."""
        for place in range(min(drafted, accepted + 1)):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
        self.policy.learn(self._record(sequence), len(sequence.tokens), drafted, accepted)

    def timed(self, step: Step, started: float) -> None:
        """`step`, which has run, began at this time. A step lasts until the next one begins, so the processing of its
        tokens is included. Only steps in which all requests draw and continue are used for timing."""
        if self._timing is not None:
            rows, drafted, before = self._timing
            self.policy.timed(rows, drafted, started - before)
            self._timing = None
        if self.policy.measuring and step.rows and all(row.samples and row.kind == 0 for row in step.rows):
            self._timing = len(step.rows), sum(row.drafts for row in step.rows), started

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.arrival, None)
        self._indices.pop(sequence.arrival, None)
        self._timing = None

    def stats(self) -> dict[str, int]:
        """`drafted_1`, `accepted_1`, ...: by position. A draft after a rejected one is not counted, since it was not
        compared."""
        counts = (("drafted", self.drafted), ("accepted", self.accepted))
        return {f"{name}_{place}": count for name, of in counts for place, count in enumerate(of, 1)}
