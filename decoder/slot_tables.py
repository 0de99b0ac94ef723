"""Device tables with a row for each batch slot, kept from step to step: pages, state slots, end tokens.

A row belongs to one admission and is rewritten for the next, so values of an ended or preempted request are never read.
A row is updated just before a step uses it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoder.config import DecoderOptions
from decoder.sequence import Sequence
from decoder.step import Row
from kernels.transfer import upload


class PageTables:
    """Page numbers of every batch slot, `[max_seqs, width]` int64 on the device; -1 after the last page."""

    def __init__(self, options: DecoderOptions) -> None:
        width = -(-options.max_len // options.page_size)
        self.table = torch.full((options.max_seqs, width), -1, dtype=torch.int64, device=options.device)
        self._host = self.table.numpy() if options.device == "cpu" else None
        """The same memory as a numpy array, in which writing a row takes a tenth of the time."""
        self._written: list[tuple[int, int]] = [(-1, 0)] * options.max_seqs

    def update(self, sequence: Sequence) -> None:
        """Writes the missing pages of the batch slot's row."""
        held = sequence.held
        slot, stamp = held.batch_slot, held.admission
        owner, count = self._written[slot]
        table: Any = self.table if self._host is None else self._host
        if owner != stamp:
            table[slot] = -1
            count = 0
        pages = held.pages[count:]
        if pages:
            values = upload(pages, torch.int64, self.table.device) if self._host is None else pages
            table[slot, count : count + len(pages)] = values
        if pages or owner != stamp:
            self._written[slot] = (stamp, len(held.pages))


class SlotStates:
    """State slots of every batch slot, and its count of accepted tokens (or of inputs in its ring, if inputs are
    replayed), on the device."""

    def __init__(self, options: DecoderOptions) -> None:
        self.replayed = options.spec_state == "replay"
        shape = (options.max_seqs, options.slots_per_seq)
        self.slots = torch.full(shape, -1, dtype=torch.int64, device=options.device)
        self.accepted = torch.ones(options.max_seqs, dtype=torch.int64, device=options.device)
        self._accepted = self.accepted.numpy() if options.device == "cpu" else self.accepted
        """The same memory as a numpy array, in which writing a number takes a tenth of the time."""
        self._written = [-1] * options.max_seqs

    def update(self, sequence: Sequence) -> None:
        """Writes a batch slot's row if it was written for another sequence."""
        held = sequence.held
        if self._written[held.batch_slot] != held.admission:
            self._written[held.batch_slot] = held.admission
            self.slots[held.batch_slot] = upload(held.slots, torch.int64, self.slots.device)
            self.accept(sequence)

    def stay(self, rows: SequenceOf[Row], accepted_V: Tensor) -> None:
        """Updates the counts by the accepted drafts of these rows, whose number only the device knows yet."""
        before = [row.sequence.held.replayed if self.replayed else 0 for row in rows]
        batch_slots, before_V = upload(
            [[row.sequence.held.batch_slot for row in rows], before], torch.int64, self.accepted.device
        )
        self.accepted.index_copy_(0, batch_slots, before_V + accepted_V + 1)

    def accept(self, sequence: Sequence) -> None:
        """Sets the batch slot's count to the sequence's."""
        self._accepted[sequence.held.batch_slot] = sequence.held.replayed if self.replayed else sequence.held.accepted


class EndTokens:
    """Which tokens end the sequence of each batch slot: a bit for each token, `[max_seqs, ceil(vocabulary / 64)]` int64
    on the device. A request may have any number of stop tokens."""

    def __init__(self, options: DecoderOptions, vocab_size: int) -> None:
        self._width = -(-vocab_size // 64)
        self.bits = torch.zeros(options.max_seqs, self._width, dtype=torch.int64, device=options.device)
        self._written = [-1] * options.max_seqs
        self._any = [False] * options.max_seqs
        """Whether the batch slot has an end token."""

    def reached(self, tokens_L: Tensor, owners: SequenceOf[Sequence]) -> Tensor | None:
        """`[L]` bool: whether each token ends its sequence. `None` if none of them can."""
        for owner in owners:
            self._update(owner)
        batch_slots = [owner.held.batch_slot for owner in owners]
        if not any(self._any[slot] for slot in batch_slots):
            return None
        # With a constraint, end tokens are drawn only if they may end the sequence, even before `min_tokens`.
        open_ = [int(bool(owner.guide) or owner.output_len >= owner.request.sampling.min_tokens) for owner in owners]
        rows = [slot * self._width for slot in batch_slots]
        first, able = upload([rows, open_], torch.int64, self.bits.device)
        words = self.bits.view(-1).index_select(0, first + (tokens_L >> 6))
        return (words >> (tokens_L & 63) & able).bool()

    def _update(self, owner: Sequence) -> None:
        slot = owner.held.batch_slot
        if self._written[slot] == owner.held.admission:
            return
        self._written[slot] = owner.held.admission
        params = owner.request.sampling
        ignored = params.ignore_eos and owner.guide is None
        ends = params.stop_token_ids | (frozenset() if ignored else owner.request.eos_token_ids)
        if self._any[slot]:
            self.bits[slot].zero_()
        if ends:
            bits = np.zeros(64 * self._width, bool)
            bits[list(ends)] = True
            words = np.packbits(bits, bitorder="little").view(np.int64)
            places = np.flatnonzero(words)
            index, values = upload([places.tolist(), words[places].tolist()], torch.int64, self.bits.device)
            self.bits[slot].index_copy_(0, index, values)
        self._any[slot] = bool(ends)
