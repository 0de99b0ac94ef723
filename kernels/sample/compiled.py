"""Sampling in compiled code on a CPU: rows of logits to tokens in one call, on all threads.

The maths is the reference's. Exponentials differ from torch's by a few units in the last place, so a token can differ
if the random number is within 1e-7 of the border between two tokens. A row's result depends on that row only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_int64, sizeof

import torch
from torch import Tensor

from kernels.native import library
from kernels.native.structs import Draw, SampleParams

__all__ = ["DrawRow", "Drawing", "SampleParams", "packed"]

_DRAW = struct.Struct("7q")
"""One `Draw`, seven 64-bit integers; packing is ten times as fast as with ctypes."""
assert _DRAW.size == sizeof(Draw)
DrawRow = tuple[int, int, int, int, int, int, int]
"""Address of the row's `SampleParams` (0: take the largest logit); position to draw; whether `ends` are masked; for
penalties: number of prompt tokens, number of all tokens, and the address of the tokens; address of the row's mask (a
row of `Masks.words_GW`; 0: no mask).
"""


def packed(rows: Sequence[DrawRow]) -> bytes:
    """The rows as `Draw` structs."""
    return b"".join(_DRAW.pack(*row) for row in rows)


class Drawing:
    """Compiled sampling from rows of `vocab_size` logits. For one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        """Raises NativeUnavailable with the reason."""
        self.vocab_size = vocab_size
        self._tokens = (c_int64 * 0)()
        self._draw = library().saccade_sample

    def __call__(
        self, logits_RV: Tensor, rows: Sequence[DrawRow] | None = None, likeliest: int | None = None
    ) -> tuple[list[int], tuple[list[float], list[list[int]], list[list[float]]]]:
        """(token of each row, log-probabilities). `rows`: how to draw each row; None takes each row's largest logit.
        `likeliest`: number of likeliest tokens to report, or None for no log-probabilities. These are (log-probability
        of each drawn token, ids of its row's likeliest tokens, their log-probabilities), or empty lists; a row has
        values only if its `SampleParams` ask for log-probabilities. Raises `IndexError` for a request that compiled
        code rejects, such as a token that is not in the vocabulary."""
        logits = logits_RV.float().contiguous()
        count, vocab = logits.shape
        assert vocab == self.vocab_size
        if count > len(self._tokens):
            self._tokens = (c_int64 * count)()
        draws = packed(rows) if rows is not None else None
        threads = torch.get_num_threads()
        if likeliest is None:
            self._draw(logits.data_ptr(), count, vocab, draws, self._tokens, None, None, None, 0, threads)
            return self._tokens[:count], ([], [], [])
        width = min(likeliest, vocab)
        logprobs, values = torch.empty(count), torch.empty(count, width)
        ids = torch.empty(count, width, dtype=torch.int64)
        found = (logprobs.data_ptr(), ids.data_ptr(), values.data_ptr())
        self._draw(logits.data_ptr(), count, vocab, draws, self._tokens, *found, width, threads)
        return self._tokens[:count], (logprobs.tolist(), ids.tolist(), values.tolist())
