"""Pages in which entries of a drafting head may be missing, because none are made while drafting pauses."""

from __future__ import annotations

from decoder.sequence import Sequence
from decoder.step import Step


class EntryPages:
    """Which pages may lack entries: none before the first pause, and after a pause those that were taken before its
    end."""

    def __init__(self, pages: int, max_seqs: int) -> None:
        self._pages = pages
        self._old = bytearray()
        """For each page: 1 if entries may be missing. Empty before the first pause."""
        self._firsts: list[tuple[int, int]] = [(-1, 0)] * max_seqs
        """For each batch slot: (its admission, the first page that drafts attend to)."""

    def end_pause(self) -> None:
        """Marks all pages as possibly lacking entries."""
        self._old = bytearray(b"\1") * self._pages
        self._firsts = [(-1, 0)] * len(self._firsts)

    @property
    def complete(self) -> bool:
        """Whether no page lacks entries."""
        return not self._old

    def first_of(self, sequence: Sequence) -> int:
        """The first page that the sequence's drafts attend to: the one after its last page that may lack entries."""
        if not self._old:
            return 0
        admission, first = self._firsts[sequence.held.batch_slot]
        if admission != sequence.held.admission:
            first = 1 + max((index for index, page in enumerate(sequence.held.pages) if self._old[page]), default=-1)
            self._firsts[sequence.held.batch_slot] = sequence.held.admission, first
        return first

    def moved(self, step: Step) -> None:
        """To be called after memory was reassigned."""
        if not self._old:
            return
        for page in step.new_pages:
            self._old[page] = 0
        for source, target in step.page_copies:
            self._old[target] = self._old[source]
        for sequence in step.loads:  # their entries are unknown after loading
            for page in sequence.held.pages:
                self._old[page] = 1

    def copied(self, source: int, target: int) -> None:
        if self._old:
            self._old[target] = self._old[source]
