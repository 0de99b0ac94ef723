"""Sampling on a CPU in one call of compiled code for all rows of a step (`kernels/sample/compiled.py`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from torch import Tensor

from decoder.guide import MaskBuffer
from decoder.sampling import Choice, SamplingParams
from decoder.sequence import Sequence
from kernels.sample.compiled import Drawing, DrawRow, SampleParams, packed

Largest = Callable[[Tensor], list[int] | None]
"""Returns the ids of the largest logits of rows, if they are known."""


@dataclass
class _SlotState:
    """Sampling data of the sequence in one batch slot."""

    admission: int
    params: SampleParams
    address: int
    """Address of `params`."""
    kept: tuple[object, ...]
    """Objects that `params` points to."""
    tokens: array[int] = field(default_factory=lambda: array("q"))
    """The sequence's tokens, if penalties count them."""


class CompiledSampler:
    """Like `decoder.sampler.Sampler`, for float32 logits on the host."""

    def __init__(self, vocab_size: int, max_seqs: int, largest: Largest) -> None:
        """See `Sampler`. Raises NativeUnavailable with the reason."""
        self._largest = largest
        self._drawing, self._masks = Drawing(vocab_size), MaskBuffer(vocab_size)
        self._slots: list[_SlotState | None] = [None] * max_seqs

    def sample(
        self, logits_LV: Tensor, sequences: SequenceOf[Sequence], ahead: SequenceOf[SequenceOf[int]]
    ) -> list[Choice]:
        """Draws one token per row."""
        if all(sequence.plain for sequence in sequences):
            return list(map(Choice, self._largest(logits_LV) or self._drawing(logits_LV)[0]))
        borrowed: list[array[int]] = []
        masks = [0] * len(sequences)
        for row, mask in self._masks.fill([(s.guide, s.output_len) for s in sequences], ahead):
            masks[row] = mask.address
        rows = [self._row(*row, borrowed) for row in zip(sequences, ahead, masks, strict=True)]
        wanted = [sequence.request.sampling.logprobs for sequence in sequences]
        most = max((count for count in wanted if count is not None), default=None)
        tokens, (logprobs, ids, values) = self._drawing(logits_LV, rows, most)
        if most is None:
            return list(map(Choice, tokens))
        return [
            Choice(token)
            if count is None
            else Choice(token, logprob, tuple(zip(top[:count], best[:count], strict=True)))
            for token, count, logprob, top, best in zip(tokens, wanted, logprobs, ids, values, strict=True)
        ]

    def steady(self, sequences: SequenceOf[Sequence]) -> bytes | None:
        """See `Sampler.steady`."""
        for sequence in sequences:
            params = sequence.request.sampling
            if sequence.guide is not None or params.penalised or sequence.output_len < params.min_tokens:
                return None
        return packed([self._row(sequence, (), 0, []) for sequence in sequences])

    def _row(self, sequence: Sequence, ahead: SequenceOf[int], mask: int, borrowed: list[array[int]]) -> DrawRow:
        """`mask`: address of the row's mask, or 0. `borrowed` keeps the objects alive that the row points to."""
        held, params = sequence.held, sequence.request.sampling
        state = self._slots[held.batch_slot]
        if state is None or state.admission != held.admission:
            state = self._slots[held.batch_slot] = _state(sequence, self._drawing.vocab_size)
        position = len(sequence.tokens) + len(ahead)
        masked = not mask and params.min_tokens > 0 and position - sequence.prompt_len < params.min_tokens
        if not params.penalised:
            return state.address, position, masked, 0, 0, 0, mask
        state.tokens.extend(sequence.tokens[len(state.tokens) :])
        tokens = state.tokens + array("q", ahead) if ahead else state.tokens
        borrowed.append(tokens)
        return state.address, position, masked, sequence.prompt_len, position, tokens.buffer_info()[0], mask


def _state(sequence: Sequence, vocab_size: int) -> _SlotState:
    request = sequence.request
    sampling: SamplingParams = request.sampling
    biased, values = sampling.biases
    postponed = request.eos_token_ids | sampling.stop_token_ids if sampling.min_tokens else frozenset[int]()
    ends = sorted(token for token in postponed if token < vocab_size)
    kept = biased, array("q", ends), values
    ids, stops, biases = (of.buffer_info()[0] for of in kept)
    params = SampleParams(
        temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p,
        repetition=sampling.repetition_penalty, presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty, top_k=sampling.top_k, sample=request.sample_index, seed=sampling.seed,
        logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        bias_count=len(biased), end_count=len(ends), bias_ids=ids, ends=stops, bias=biases,
    )  # fmt: skip
    return _SlotState(sequence.held.admission, params, ctypes.addressof(params), kept)
