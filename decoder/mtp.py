"""Drafts from multi-token prediction (MTP) heads. `decoder.mtp_head` has the maths."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decoder.arena import Arena
from decoder.batch import BatchBuilder
from decoder.compiled_head import CompiledHead
from decoder.config import DecoderConfig, DecoderOptions
from decoder.graphs import Computed
from decoder.head_weights import HeadWeights
from decoder.model import HybridModel
from decoder.mtp_head import MtpHead, check_mtp
from decoder.mtp_pages import EntryPages
from decoder.positions import positions_before
from decoder.sampler import Sampler
from decoder.sequence import Sequence
from decoder.step import Fork, Row
from kernels.transfer import upload

PENDING = 512
"""Least capacity, in rows of the trunk, for rows that are kept so that their entries can be made together."""
UNDRAFTED = -1e30
"""Logit of an id that cannot be drafted."""


class Due(NamedTuple):
    """An entry that has to be made."""

    token: int
    place: int
    position: tuple[int, ...]
    """Empty for a head that reads no positions."""
    source: int
    """Index of the kept row of the token before this one."""


class MtpDrafter:
    """Keeps the head's entries up to date with the trunk, and drafts.

    The entry of a token becomes due when the trunk has computed the token. Entries are made when a draft needs them,
    when memory is reassigned, or when many are due, since making them one by one is slow. Until then the trunk's rows
    are kept here. While drafting pauses no entries are made. A page that was taken before the end of the last pause may
    lack entries: a sequence's drafts attend only to the pages after its last such page, without the first place there,
    whose entry may have been made from an outdated hidden row.
    """

    def __init__(
        self, config: DecoderConfig, options: DecoderOptions, arena: Arena, model: HybridModel, builder: BatchBuilder,
        sampler: Sampler,
    ) -> None:  # fmt: skip
        check_mtp(config, model.mtp_weights, options.draft_vocab)
        self.model, self.builder, self.sampler = model, builder, sampler
        kv_B2SKP = arena.kv[len(config.pages)]
        self.head = MtpHead(HeadWeights.of(config, options, model.mtp_weights, kv_B2SKP), model.trunk)
        assert arena.carry is not None
        self.carry, self.page = arena.carry, options.page_size
        """For each state slot: the trunk's row of its last token, before the final norm."""
        self.awake = True
        self.pages = EntryPages(kv_B2SKP.shape[0], options.max_seqs)
        rows = max(PENDING, 2 * options.max_seqs * (1 + options.num_drafts))
        self._kept = self.carry.new_empty(rows, self.carry.shape[1])
        """The trunk's rows of steps whose rows draw tokens."""
        self._used = 0
        self._last: dict[int, int] = {}
        """State slot -> index of the kept row that will become its carry."""
        self._due: list[Due] = []
        """Entries to be made."""
        self._observed: tuple[SequenceOf[Row], list[int], int] | None = None
        """The last step, if its hidden rows are kept here: (its rows, for each the index of the kept row of the token
        before it, the index of the step's first kept row)."""
        self._hidden: Tensor | None = None
        """The last step's hidden rows if they are not kept here."""

    # -- pauses --------------------------------------------------------------------------------------------------------

    def attend(self, awake: bool) -> None:
        """Starts (`awake`) or stops making entries."""
        if awake == self.awake:
            return
        self.awake = awake
        if awake:
            self.pages.end_pause()
        else:
            self._kept_from(0)

    def ready(self, sequence: Sequence) -> bool:
        """Whether drafts can be made for the sequence: it has a page without missing entries."""
        return self.pages.complete or self.pages.first_of(sequence) * self.page < len(sequence.tokens) - 1

    def forked(self, forks: SequenceOf[Fork]) -> None:
        """To be called before pages are copied for forks."""
        self.flush()
        for fork in forks:
            if fork.pages is not None:
                self.pages.copied(*fork.pages)

    # -- drafts --------------------------------------------------------------------------------------------------------

    def draft(self, rows: SequenceOf[Row]) -> list[tuple[Sequence, list[int]]]:
        """The rows' drafts, by sequence. Each token is drawn as plain sampling would draw it if the head's logits were
        the model's."""
        rows = [row for row in rows if row.drafts]
        if not rows:
            return []
        self._room(len(rows))
        sources = [self._row(row.sequence.slot) for row in rows]
        sequences, compiled = [row.sequence for row in rows], self.head.compiled
        if compiled is not None and max(len(self._due), len(rows)) <= compiled.max_tokens:
            drawable = _biases_are_below(self.head.vocabulary.out_features, sequences)
            draws = self.sampler.steady(sequences) if drawable else None
            if draws is not None:
                return list(zip(sequences, self._draft_at_once(compiled, rows, sources, draws), strict=True))
        drafts: list[list[int]] = [[] for _ in rows]
        self._draft_by_token(rows, sources, drafts)
        return list(zip(sequences, drafts, strict=True))

    def _draft_at_once(
        self, compiled: CompiledHead, rows: SequenceOf[Row], sources: list[int], draws: bytes
    ) -> list[list[int]]:
        """The rows' drafts, made by one call of compiled code. `draws`: see `CompiledHead.draft`."""
        axes, (given, due) = self.head.axes, self._given(sources)
        last = [(row.sequence.tokens[-1], *self._at(row, 0), row.drafts) for row in rows]
        passes = [_positions(rows, ahead, axes) for ahead in range(max(row.drafts for row in rows))]
        positions = [[at.position for at in due], *passes] if axes else []
        known, tables = [(at.token, at.place) for at in due], self._tables([row.sequence for row in rows])
        return compiled.draft(given, known, last, positions, tables, draws)

    def _draft_by_token(self, rows: SequenceOf[Row], sources: list[int], drafts: SequenceOf[list[int]]) -> None:
        """Appends the rows' drafts to `drafts`, one pass of the head for each token."""
        axes, tables, hidden = self.head.axes, self._tables([row.sequence for row in rows]), self._make_due(sources)
        tokens = [row.sequence.tokens[-1] for row in rows]
        for ahead in range(max(row.drafts for row in rows)):
            kept = [index for index, row in enumerate(rows) if row.drafts > ahead]
            if len(kept) < len(rows):
                rows, drafts, tokens = [rows[i] for i in kept], [drafts[i] for i in kept], [tokens[i] for i in kept]
                hidden, tables = (of.index_select(0, self._ints(kept)) for of in (hidden, tables))
            places, lengths = zip(*(self._at(row, ahead) for row in rows), strict=True)
            ids, writes, keys = self._ints([tokens, places, lengths]).unbind()
            embedded = self.model.embed_ids(ids)
            at = self._ints(_positions(rows, ahead, axes)) if axes else None
            hidden, logits = self.head.predict(embedded, hidden, writes, tables, keys, max(lengths), at)
            logits = _over_all(logits, self.model.config.vocab_size)
            tokens = [choice.token for choice in self.sampler.sample(logits, [row.sequence for row in rows], drafts)]
            for drafted, token in zip(drafts, tokens, strict=True):
                drafted.append(token)

    def _tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        """`[R, W]` page numbers, from the first page that each sequence's drafts attend to."""
        firsts = [self.pages.first_of(sequence) for sequence in sequences]
        if not any(firsts):
            return self.builder.page_tables(sequences)
        pages = [sequence.held.pages[first:] for sequence, first in zip(sequences, firsts, strict=True)]
        width = max(map(len, pages))
        return self._ints([[*of, *[-1] * (width - len(of))] for of in pages])

    def _at(self, row: Row, ahead: int) -> tuple[int, int]:
        """(place of the token `ahead` tokens after a row's first one, number of keys that it attends to)."""
        length = row.start + ahead + 1 - self.pages.first_of(row.sequence) * self.page
        return _where(row.sequence, row.start + ahead, self.page), length

    # -- entries -------------------------------------------------------------------------------------------------------

    def observe(self, rows: SequenceOf[Row], computed: Computed) -> None:
        """Takes the trunk's results for these rows. The entries of their tokens become due (see `settle`), or are made
        at once."""
        hidden_TD, batch = computed.hidden_TD, computed.batch
        count = hidden_TD.shape[0]
        fits = count + len(rows) <= self._kept.shape[0]
        if batch is None or (all(row.alone for row in rows) and not batch.splices and fits):
            self._room(count + len(rows))
            before = [self._row(row.sequence.slot) for row in rows]
            self._observed, self._hidden = (rows, before, self._used), None
            self._kept[self._used : self._used + count] = hidden_TD  # copied: a graph's next step overwrites it
            self._used += count
            return
        self.flush()
        self._observed, self._hidden = None, hidden_TD
        firsts, first = [], 0
        for row in rows:
            firsts.append(first)
            first += row.count
        before_TD, places = hidden_TD.to(self.carry.dtype).roll(1, 0), batch.places_T
        before_TD[self._ints(firsts)] = self.carry[self._ints([row.sequence.slot for row in rows])]
        normed = self.model.final_norm(before_TD)
        fresh = self._ints([index for index, row in zip(firsts, rows, strict=True) if row.start == 0])
        if fresh.shape[0]:
            places = places.index_fill(0, fresh, -1)
            normed.index_fill_(0, fresh, 0)
        axes, positions = self.head.axes, None
        if axes:
            found = [positions_before(row.sequence.request.positions, row.start, row.end, axes) for row in rows]
            positions = self._ints([at for of in found for at in of])
        self.head.enter(self.model.embed(batch), normed, places, positions)

    def settle(self, kept: Iterable[tuple[int, int]]) -> None:
        """To be called after verification. `kept`: (slot, index in the batch of the token whose hidden state the slot
        continues from)."""
        if not self.awake:
            return
        pairs = [pair for pair in kept if pair[0] >= 0]
        if self._hidden is not None:
            slots, tokens = self._ints([slot for slot, _ in pairs]), self._ints([token for _, token in pairs])
            self.carry[slots] = self._hidden.index_select(0, tokens).to(self.carry.dtype)
            self._hidden = None
        elif self._observed is not None:
            rows, before, first = self._observed
            self._last |= {slot: first + token for slot, token in pairs}
            for row, source in zip(rows, before, strict=True):
                sequence, place = row.sequence, row.start
                end = len(sequence.tokens) - 1 if row.drafts else row.end
                # The entry of a row's first token exists already if the head has drafted from it.
                sources = [source, *range(first, first + row.count)]
                for at in range(place + (row.drafts > 0 and not sequence.draft.forced), end):
                    where, position = _where(sequence, at, self.page), _position(sequence, at, self.head.axes)
                    self._due.append(Due(sequence.tokens[at], where, position, sources[at - place]))
                first += row.count
            self._observed = None
            if len(pairs) > len(rows):  # there are checkpoints, whose slots may be reassigned without notice
                self.flush()

    def flush(self) -> None:
        """Makes the entries that are due, and writes the slots' hidden rows."""
        if self._due:
            self._make_due([])
        if self._last:
            self.carry[self._ints(list(self._last))] = self._kept[self._ints(list(self._last.values()))]
        self._kept_from(0)

    def _kept_from(self, used: int) -> None:
        self._used = used
        self._due.clear()
        self._last.clear()

    def _room(self, count: int) -> None:
        if self._used + count > self._kept.shape[0]:
            self.flush()

    def _row(self, slot: int) -> int:
        """Index of the kept row of a slot's last token."""
        row = self._last.get(slot)
        if row is None:
            row = self._last[slot] = self._used
            self._kept[row] = self.carry[slot]
            self._used += 1
        return row

    def _make_due(self, sources: list[int]) -> Tensor:
        """Makes the entries that are due. Returns `[R, d]`: the kept rows `sources` after the final norm."""
        given, due = self._given(sources)
        hidden = self.model.final_norm(given)
        if due:
            ids, places = self._ints([[at.token for at in due], [at.place for at in due]]).unbind()
            positions = self._ints([at.position for at in due]) if self.head.axes else None
            self.head.enter(self.model.embed_ids(ids), hidden[: len(due)], places, positions)
        return hidden[len(due) :]

    def _given(self, sources: list[int]) -> tuple[Tensor, list[Due]]:
        """Removes and returns the entries that are due, with the indices of kept rows: those before the tokens of these
        entries, then `sources`."""
        due, self._due = self._due, []
        return self._kept.index_select(0, self._ints([at.source for at in due] + sources)), due

    def _ints(self, values: list[Any]) -> Tensor:
        return upload(values, torch.int64, self.carry.device)


def _biases_are_below(vocab: int, sequences: SequenceOf[Sequence]) -> bool:
    """Whether all ids with a `logit_bias` of these requests are below `vocab`, and so can be drafted."""
    return all(token < vocab for sequence in sequences for token in sequence.request.sampling.logit_bias)


def _where(sequence: Sequence, place: int, page_size: int) -> int:
    """Where the entry of the token at this place of the sequence is among all pages."""
    return sequence.held.pages[place // page_size] * page_size + place % page_size


def _over_all(logits_RV: Tensor, vocab: int) -> Tensor:
    """Logits of all ids, given those of the first V ids. The others are so small that none of them is drawn unless
    nothing else is allowed, but finite, so that there are probabilities in that case too."""
    missing = vocab - logits_RV.shape[1]
    return F.pad(logits_RV.float(), (0, missing), value=UNDRAFTED) if missing else logits_RV


def _position(sequence: Sequence, place: int, axes: int) -> tuple[int, ...]:
    """Position of the entry of the token at this place; empty for a head that reads no positions."""
    [position] = positions_before(sequence.request.positions, place, place + 1, axes)
    return position


def _positions(rows: SequenceOf[Row], ahead: int, axes: int) -> list[tuple[int, ...]]:
    """For each row, the position of the entry of the token `ahead` tokens after its first one, or of the last token
    that it drafts from, if that comes before."""
    return [_position(row.sequence, row.start + min(ahead, row.drafts - 1), axes) for row in rows]
