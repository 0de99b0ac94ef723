"""The same draws in compiled code on a CPU: rows of logits to tokens in one call, on all threads.

The maths is the reference's. Exponentials differ from torch's by a few units in the last place, so that a token can
differ where the random number comes within 1e-7 of the border of two tokens. Whatever a row gets depends on that row
alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_int64, sizeof

import torch
from torch import Tensor

from kernels.native import library
from kernels.native.structs import Draw, Wish

__all__ = ["DrawRow", "Drawing", "Wish", "packed"]

_DRAW = struct.Struct("6q")
"""One `Draw`, six numbers of 64 bits: packed ten times as fast as through ctypes."""
assert _DRAW.size == sizeof(Draw)
DrawRow = tuple[int, int, int, int, int, int]
"""Address of the row's `Wish` (0: the largest); position that is drawn; whether `ends` are masked; of the tokens that
penalties count: those of the prompt, all, their address.
"""


def packed(rows: Sequence[DrawRow]) -> bytes:
    """As `Draw`s."""
    return b"".join(_DRAW.pack(*row) for row in rows)


class Drawing:
    """Compiled draws from rows of so many logits. One thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        """Raises NativeUnavailable with the reason."""
        self.vocab_size = vocab_size
        self._tokens = (c_int64 * 0)()
        self._draw = library().saccade_sample

    def __call__(
        self, logits_RV: Tensor, rows: Sequence[DrawRow] | None = None, likeliest: int | None = None
    ) -> tuple[list[int], tuple[list[float], list[list[int]], list[list[float]]]]:
        """Tokens; and, where `likeliest` says of how many tokens, log-probabilities of the drawn ones, ids of the
        likeliest and theirs, which are there in rows that ask for them. `rows` None: the largest logit of each row.
        """
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
