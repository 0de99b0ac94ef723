"""Draws tokens from a step's logits: collects each row's parameters, and keeps the buffers of penalties.

A row's token depends only on its own logits, its own tokens and (seed, sample index, position), never on the batch that
it is in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoder.compiled_sampler import CompiledSampler, Largest
from decoder.guide import MaskBuffer
from decoder.sampling import Choice
from decoder.sequence import Sequence
from kernels.dispatch import implementation
from kernels.native import NativeUnavailable
from kernels.sample import Masks, RowParams, greedy, logprobs, penalise, sample
from kernels.transfer import send, upload

log = logging.getLogger(__name__)


class Drawn(NamedTuple):
    """The tokens of rows, on the device, and the log-probabilities that were requested."""

    tokens_L: Tensor
    """`[L]` int64."""
    scores: tuple[Tensor, ...] = ()
    """For the A rows that request them: log-probability of the token `[A]`, ids of the likeliest tokens `[A, k]`, and
    their log-probabilities `[A, k]`."""
    asked: tuple[tuple[int, int], ...] = ()
    """(row, number of likeliest tokens) of each of these rows."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors from which `choices` is made, to be copied to the host."""
        return (self.tokens_L, *self.scores)

    def choices(self, tokens_L: Tensor, *scores: Tensor) -> list[Choice]:
        """The choices, from host copies of `tensors`; waits for the device if they are on the device."""
        tokens = tokens_L.tolist()
        if not self.asked:
            return [Choice(token) for token in tokens]
        extra = {
            row: (logprob, tuple(zip(top[:count], best[:count], strict=True)))
            for (row, count), logprob, top, best in zip(self.asked, *(of.tolist() for of in scores), strict=True)
        }
        return [Choice(token, *extra.get(row, (None, ()))) for row, token in enumerate(tokens)]


@dataclass
class _SlotState:
    """Per batch slot: the sequence that has it, and its parameters."""

    admission: int = -1
    counted: int = 0
    """Tokens that the penalty buffers count."""
    bias: tuple[Tensor, Tensor] | None = None
    ends: Tensor | None = None


class Sampler:
    """Draws for rows of logits. Penalty buffers have a row for each batch slot and are allocated when a request first
    asks for a penalty.
    """

    def __init__(
        self,
        vocab_size: int,
        max_seqs: int,
        device: torch.device | str = "cpu",
        *,
        compiled: bool = True,
        largest: Largest = lambda logits: None,
    ) -> None:
        """`compiled`: whether to draw in compiled code on a CPU that has it. `largest`: returns the ids of the largest
        of a step's logits, if the step has found them already.
        """
        self.vocab_size, self.max_seqs, self.device = vocab_size, max_seqs, device
        compiled = compiled and torch.device(device).type == "cpu" and implementation("cpu")[0] == "reference"
        self._compiled = _compiled(vocab_size, max_seqs, largest) if compiled else None
        self._masks = MaskBuffer(vocab_size)
        self._slots = [_SlotState() for _ in range(max_seqs)]
        self._in_context: Tensor | None = None
        self._counts: Tensor | None = None
        if implementation(torch.device(device).type)[0] == "triton":
            self._compile()

    def _compile(self) -> None:
        """Draws once without a mask and once with one, so that no step has to wait for the kernel's compilation, which
        takes seconds."""
        single, double, whole = (
            torch.zeros(1, dtype=dtype, device=self.device) for dtype in (torch.float32, torch.float64, torch.int64)
        )
        logits = torch.zeros(1, self.vocab_size, device=self.device)
        words = torch.zeros(1, -(-self.vocab_size // 32), dtype=torch.int32, device=self.device)
        for masks in (None, Masks(words, whole)):
            sample(logits, RowParams(single, whole, double, double, whole, whole, whole, masks))

    def sample(
        self, logits_LV: Tensor, sequences: SequenceOf[Sequence], ahead: SequenceOf[SequenceOf[int]] | None = None
    ) -> list[Choice]:
        """Draws one token for each row. One host sync, to read the tokens.

        `ahead`: for each row, tokens (drafts) between its sequence and the position that is drawn, which count as if
        they were in the sequence.
        """
        if self._compiled is not None:
            return self._compiled.sample(logits_LV, sequences, ahead or [()] * len(sequences))
        drawn = self.draw(logits_LV, sequences, ahead)
        return drawn.choices(*drawn.tensors)

    def draw(
        self,
        logits_LV: Tensor,
        sequences: SequenceOf[Sequence],
        ahead: SequenceOf[SequenceOf[int]] | None = None,
        unread_M: Tensor | None = None,
    ) -> Drawn:
        """Like `sample`, but leaves the results on the device.

        `unread_M`: the tokens of the previous step, for sequences whose last token is one of them and still `UNREAD`.
        """
        if all(sequence.plain for sequence in sequences):
            return Drawn(greedy(logits_LV))
        for sequence in sequences:
            self._state(sequence)
            if sequence.request.sampling.penalised:
                self._count(sequence, unread_M)
        ahead = ahead or [()] * len(sequences)
        raw = logits_LV.float()
        adjusted = self._adjust(raw, sequences, ahead)
        tokens = sample(adjusted, self._row_params(sequences, ahead))
        return self._scored(raw, tokens, sequences)

    def steady(self, sequences: SequenceOf[Sequence]) -> bytes | None:
        """What compiled code needs to draw the next tokens of sequences one after another: a `Draw` struct of
        kernels/native/sample.h for each sequence. `None` without compiled draws, and if more than the position changes
        from token to token.
        """
        return None if self._compiled is None else self._compiled.steady(sequences)

    def _state(self, sequence: Sequence) -> _SlotState:
        """The state of a sequence's batch slot, created anew if the slot had another sequence before."""
        if self._slots[sequence.held.batch_slot].admission != sequence.held.admission:
            params, state = sequence.request.sampling, _SlotState(sequence.held.admission)
            self._slots[sequence.held.batch_slot] = state
            if params.logit_bias:
                ids, values = params.biases
                biased, biases = torch.frombuffer(ids, dtype=torch.int64), torch.frombuffer(values, dtype=torch.float32)
                state.bias = send(biased, self.device), send(biases, self.device)
            if params.min_tokens > 0 and sequence.guide is None:  # with a constraint, its masks forbid the end tokens
                ends = sequence.request.eos_token_ids | params.stop_token_ids
                state.ends = self._ids(sorted(token for token in ends if token < self.vocab_size))
        return self._slots[sequence.held.batch_slot]

    def _ids(self, tokens: SequenceOf[Any]) -> Tensor:
        return upload(list(tokens), torch.int64, self.device)

    # -- adjustments ---------------------------------------------------------------------------------------------------

    def _adjust(self, raw_LV: Tensor, sequences: SequenceOf[Sequence], ahead: SequenceOf[SequenceOf[int]]) -> Tensor:
        """Applies bias, penalties and the `min_tokens` mask to a copy of the logits; returns the logits themselves if
        there are none."""
        biased: list[tuple[int, tuple[Tensor, Tensor]]] = []
        penalised: list[int] = []
        masked: list[tuple[int, Tensor]] = []
        for row, sequence in enumerate(sequences):
            params, state = sequence.request.sampling, self._slots[sequence.held.batch_slot]
            if state.bias is not None:
                biased.append((row, state.bias))
            if params.penalised:
                penalised.append(row)
            if state.ends is not None and sequence.output_len + len(ahead[row]) < params.min_tokens:
                masked.append((row, state.ends))
        if not (biased or penalised or masked):
            return raw_LV
        out = raw_LV.clone()
        for row, bias in biased:
            out[row].index_add_(0, *bias)
        if penalised:
            self._penalise(out, penalised, sequences, ahead)
        for row, ends in masked:
            out[row].index_fill_(0, ends, float("-inf"))
        return out

    def _penalise(
        self,
        logits_LV: Tensor,
        rows: list[int],
        sequences: SequenceOf[Sequence],
        ahead: SequenceOf[SequenceOf[int]],
    ) -> None:
        chosen = [sequences[row] for row in rows]
        assert self._in_context is not None and self._counts is not None
        index, batch_slots = self._ids(rows), self._ids([s.held.batch_slot for s in chosen])
        part = logits_LV.index_select(0, index)
        params = [s.request.sampling for s in chosen]
        in_context, counts = self._in_context.index_select(0, batch_slots), self._counts.index_select(0, batch_slots)
        extra = [(at, token) for at, row in enumerate(rows) for token in ahead[row]]
        if extra:
            at, tokens = self._ids([at for at, _ in extra]), self._ids([token for _, token in extra])
            in_context[at, tokens] = True
            counts.index_put_((at, tokens), torch.ones_like(at, dtype=torch.int32), accumulate=True)
        penalise(
            part,
            in_context,
            counts,
            self._floats([p.repetition_penalty for p in params]),
            self._floats([p.presence_penalty for p in params]),
            self._floats([p.frequency_penalty for p in params]),
        )
        logits_LV.index_copy_(0, index, part)

    def _count(self, sequence: Sequence, unread_M: Tensor | None) -> None:
        """Updates the batch slot's buffers with the sequence's new tokens."""
        if self._in_context is None or self._counts is None:
            shape = (self.max_seqs, self.vocab_size)
            self._in_context = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        state, row = self._slots[sequence.held.batch_slot], sequence.held.batch_slot
        if state.counted == len(sequence.tokens):
            return
        if state.counted == 0:
            self._in_context[row] = False
            self._counts[row] = 0
        tokens, known = sequence.tokens, sequence.known
        fresh = self._ids([token for token in tokens[state.counted : known] if token < self.vocab_size])
        output = self._ids(tokens[max(state.counted, sequence.prompt_len) : known])
        if sequence.unread:
            assert unread_M is not None and sequence.unread == 1
            last = unread_M[sequence.place : sequence.place + 1]
            fresh, output = torch.cat((fresh, last)), torch.cat((output, last))
        self._in_context[row].index_fill_(0, fresh, True)
        self._counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        state.counted = len(sequence.tokens)

    def _floats(self, values: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return upload(values, dtype, self.device)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _row_params(self, sequences: SequenceOf[Sequence], ahead: SequenceOf[SequenceOf[int]]) -> RowParams:
        """The parameters of all rows, on the device in two copies."""
        params = [sequence.request.sampling for sequence in sequences]
        reals = self._floats([[p.temperature, p.top_p, p.min_p] for p in params], torch.float64).t().contiguous()
        whole = self._ids(
            [
                [
                    p.top_k,
                    p.seed - (p.seed >> 63 << 64),
                    sequence.request.sample_index,
                    len(sequence.tokens) + len(more),
                ]
                for p, sequence, more in zip(params, sequences, ahead, strict=True)
            ]
        )
        top_k, seeds, samples, positions = whole.t().contiguous()
        masks = self._masks_of(sequences, ahead)
        return RowParams(reals[0].float(), top_k, reals[1], reals[2], seeds, samples, positions, masks)

    def _masks_of(self, sequences: SequenceOf[Sequence], ahead: SequenceOf[SequenceOf[int]]) -> Masks | None:
        """The masks of the rows' constraints, on the device; `None` if no row has a constraint."""
        filled = self._masks.fill([(sequence.guide, sequence.output_len) for sequence in sequences], ahead)
        if not filled:
            return None
        index = [-1] * len(sequences)
        for place, (row, _) in enumerate(filled):
            index[row] = place
        return Masks(send(self._masks.words(len(filled)), self.device), self._ids(index))

    # -- reporting -----------------------------------------------------------------------------------------------------

    def _scored(self, raw_LV: Tensor, tokens_L: Tensor, sequences: SequenceOf[Sequence]) -> Drawn:
        wanted = [sequence.request.sampling.logprobs for sequence in sequences]
        asked = tuple((row, count) for row, count in enumerate(wanted) if count is not None)
        if not asked:
            return Drawn(tokens_L)
        index = self._ids([row for row, _ in asked])
        most = max(count for _, count in asked)
        return Drawn(tokens_L, logprobs(raw_LV.index_select(0, index), tokens_L.index_select(0, index), most), asked)


def _compiled(vocab_size: int, max_seqs: int, largest: Largest) -> CompiledSampler | None:
    """The compiled sampler; None, with the reason logged, if there is no compiled code."""
    try:
        return CompiledSampler(vocab_size, max_seqs, largest)
    except NativeUnavailable as reason:
        log.info("tokens are drawn operation by operation: %s", reason)
        return None
