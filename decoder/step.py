"""Types of one step: made by the scheduler, executed by the runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from decoder.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Row:
    """`count` tokens of a sequence, beginning at the token with index `start`."""

    sequence: Sequence
    count: int
    start: int
    drafts: int = 0
    """Number of drafts at its end."""
    samples: bool = field(init=False)
    """Whether the row reaches the sequence's last token, so that the next one can be drawn."""
    images: list[tuple[int, Tensor]] = field(default_factory=list, init=False, compare=False, repr=False)
    """Embeddings of images among its tokens, (index of the first in the row, `[n, hidden]`), once
    `decoder.batch.read_images` has read them."""

    def __post_init__(self) -> None:
        self.samples = self.end - self.drafts == len(self.sequence.tokens)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def acceptable(self) -> int:
        """How many of its drafts may be accepted: those before a position for which its constraint has no mask."""
        guide = self.sequence.guide
        return self.drafts if guide is None else max(0, min(self.drafts, guide.usable - 1))

    @property
    def kind(self) -> int:
        """Order of rows in a batch: 0 decode, 1 short extend, 2 long extend, 3 prefill."""
        if self.start == 0:
            return 3
        if self.count > 1 and not self.drafts:
            return 2
        return 0 if self.samples else 1

    @property
    def verified(self) -> bool:
        """Whether it has drafts, or its state has to be computed from the inputs in a ring first."""
        return self.drafts > 0 or self.sequence.held.replayed > 0

    @property
    def alone(self) -> bool:
        """Whether each of its tokens attends separately, after a state. Other rows are scanned."""
        return self.start > 0 and (self.count == 1 or self.drafts > 0)

    @property
    def ids(self) -> list[int]:
        """Its tokens, drafts included."""
        known = self.sequence.tokens[self.start : self.end]
        return known + self.sequence.draft.tokens[: self.drafts] if self.drafts else known


class Save(NamedTuple):
    """Content of a sequence that is copied to host memory; the sequence no longer holds this slot and these pages."""

    sequence: Sequence
    slot: int
    pages: list[int]
    batch_slot: int


class Fork(NamedTuple):
    """A further sample that continues from another sequence's prompt, with (from, to) of the slot and of the partial
    page that are copied for it."""

    leader: Sequence
    follower: Sequence
    slots: tuple[int, int]
    pages: tuple[int, int] | None


@dataclass
class Step:
    """The work of one step, in this order: save, clear, copy, load, run; failures are reported."""

    rows: list[Row] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    """Content that is copied to host memory before anything else."""
    loads: list[Sequence] = field(default_factory=list)
    """Sequences whose content is copied back into their present slot and pages."""
    new_pages: list[int] = field(default_factory=list)
    """Newly taken pages, which are cleared."""
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    """Both (from, to): cached content that a sequence continues from. The source is held until `commit`."""
    checkpoints: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Arrival number -> (position, slot): states to keep of that sequence's row."""
    held_slots: list[int] = field(default_factory=list)
    held_pages: list[int] = field(default_factory=list)
    """Sources of the copies, held until `commit`."""
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that have ended with an error."""
    preempted: set[int] = field(default_factory=set)
    """Arrival numbers of the sequences that were preempted for this step; they are not admitted to it."""

    forks: list[Fork] = field(default_factory=list)
    """Further samples that start where a row has ended: added while the step runs, copied before the next step."""

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """Sequences that the step computes, and samples that it starts."""
        yield from (row.sequence for row in self.rows)
        yield from (fork.follower for fork in self.forks)
