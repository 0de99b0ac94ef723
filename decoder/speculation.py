"""Speculative decoding of the running requests: the number of drafts of each, the drafts, and acceptance counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from decoder.config import DecoderOptions
from decoder.drafting import DraftPolicy, NgramIndex, Record
from decoder.sequence import DraftState, Sequence
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
        """Whether it has enough state of a sequence to draft for it."""

    def draft(self, rows: SequenceOf[Row]) -> list[tuple[Sequence, list[int]]]:
        """Drafts for the rows that are to have drafts, by sequence."""


class Speculation:
    """Asks for drafts before a step is scheduled, and counts acceptance afterwards."""

    def __init__(self, options: DecoderOptions, head: Head | None = None) -> None:
        self.source = options.speculative
        adaptive = options.draft_policy == "adaptive"
        self.policy = DraftPolicy(options.num_drafts, adaptive=adaptive)
        self._forcing: DraftPolicy | None = None
        """Decides how many of the tokens that a constraint forces are proposed; `None`: none. Forced tokens may be
        rejected, because the model may write the same text with other tokens.
        """
        if options.forced_on:
            self._forcing = DraftPolicy(options.num_drafts, adaptive=adaptive)
            self._forcing.times = self.policy.times
        self.forced = [0, 0]
        """Forced drafts that were verified, and those that were accepted."""
        self.drafted = [0] * options.num_drafts
        self.accepted = [0] * options.num_drafts
        """By position in the row: how many drafts were verified, and how many of them were accepted."""
        self.new_index: Callable[[Sequence], Proposer] = partial(_ngrams, WeakValueDictionary())
        """Makes the drafter of a sequence for `ngram`."""
        self.head = head
        """The drafter for `mtp`."""
        self._records: defaultdict[int, Record] = defaultdict(Record)
        self._forced_records: defaultdict[int, Record] = defaultdict(Record)
        self._indices: dict[int, Proposer] = {}
        self._timing: tuple[int, int, float] | None = None
        """(rows, drafts, start) of the last step, if its time is to be recorded."""

    def ask(self, running: Iterable[Sequence]) -> None:
        """Sets how many drafts each decoding sequence is to get, and for `ngram` the drafts themselves. A sequence with
        a constraint gets drafts that the constraint allows, or tokens that it forces.
        """
        awake = self.policy.awake()
        if self.head is not None:
            self.head.attend(awake)
        decoding = [sequence for sequence in running if sequence.decoding]
        for sequence in decoding:
            if sequence.guide is not None:
                sequence.draft = DraftState()
        if awake and self.source != "none":
            self._propose(decoding)
        self._constrain(decoding)

    def _propose(self, decoding: list[Sequence]) -> None:
        """Asks the drafter. Not called while drafting pauses, when no sequence has drafts of the drafter."""
        policy, head, rows = self.policy, self.head, len(decoding)
        if policy.measures(rows):
            for sequence in decoding:
                sequence.draft.limit = 0
            return
        wanted = unready = drafts = 0
        for sequence in decoding:
            limit = policy.wanted(self._records[sequence.arrival], len(sequence.tokens), rows)
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

    def _constrain(self, decoding: list[Sequence]) -> None:
        """Cuts drafts at the first that a constraint does not allow; if a constraint forces tokens, they replace the
        drafts."""
        if self._forcing is not None:
            self._forcing.awake()
        for sequence in decoding:
            if sequence.guide is None:
                continue
            draft = sequence.draft
            if draft.tokens:
                draft.tokens = sequence.guide.cut(draft.tokens)
                draft.limit = len(draft.tokens)
            if self._forcing is None or self._forcing.measures(len(decoding)) or not (of := sequence.guide.forced()):
                continue
            count = self._forcing.wanted(self._forced_records[sequence.arrival], len(sequence.tokens), len(decoding))
            if count:
                sequence.draft = DraftState(of[:count], min(count, len(of)), forced=True)

    def draft(self, rows: SequenceOf[Row]) -> None:
        """Fills in the drafts of a step's rows if a head makes them."""
        if self.head is not None:
            for sequence, tokens in self.head.draft([row for row in rows if not row.sequence.draft.forced]):
                sequence.draft.tokens = tokens

    def _index(self, sequence: Sequence) -> Proposer:
        index = self._indices.get(sequence.arrival)
        if index is None:
            index = self._indices[sequence.arrival] = self.new_index(sequence)
        return index

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records that the first `accepted` of a row's `drafted` drafts were accepted."""
        if sequence.draft.forced:
            assert self._forcing is not None
            self.forced[0] += min(drafted, accepted + 1)
            self.forced[1] += accepted
            self._forcing.learn(self._forced_records[sequence.arrival], len(sequence.tokens), drafted, accepted)
            return
        for place in range(min(drafted, accepted + 1)):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
        self.policy.learn(self._records[sequence.arrival], len(sequence.tokens), drafted, accepted)

    def timed(self, step: Step, started: float) -> None:
        """Records that `step`, which has run, began at the time `started`. A step lasts until the next one begins, so
        that its time includes the processing of its tokens. Only steps in which all rows decode are used for timing."""
        if self._timing is not None:
            rows, drafted, before = self._timing
            self.policy.timed(rows, drafted, started - before)
            self._timing = None
        if self.policy.measuring and step.rows and all(row.samples and row.kind == 0 for row in step.rows):
            self._timing = len(step.rows), sum(row.drafts for row in step.rows), started

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.arrival, None)
        self._forced_records.pop(sequence.arrival, None)
        self._indices.pop(sequence.arrival, None)
        self._timing = None

    def stats(self) -> dict[str, int]:
        """`drafted_1`, `accepted_1`, ...: drafts by position; `forced_drafted`, `forced_accepted`: forced tokens at all
        positions. Drafts after a rejected one are not counted, since they are not compared."""
        counts = (("drafted", self.drafted), ("accepted", self.accepted))
        placed = {f"{name}_{place}": count for name, of in counts for place, count in enumerate(of, 1)}
        return placed | {"forced_drafted": self.forced[0], "forced_accepted": self.forced[1]}


def _ngrams(prompts: WeakValueDictionary[int, NgramIndex], sequence: Sequence) -> NgramIndex:
    """A new index of a sequence. Samples of a prompt share the index of its tokens, which takes milliseconds to make.
    `prompts`: these indices by the identity of the ids, which the sequences keep alive."""
    ids = sequence.request.prompt_ids
    prompt = prompts.get(id(ids))
    if prompt is None:
        prompt = prompts[id(ids)] = NgramIndex.of(ids)
    return NgramIndex(prompt)
