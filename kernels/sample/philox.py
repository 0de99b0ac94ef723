"""Philox4x32-10, the counter-based generator; the maths is in README.md.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = torch.tensor([0xCD9E8D57, 0xD2511F53])
"""Of the third and the first word of the counter."""
_STEPS = torch.tensor([0x9E3779B9, 0xBB67AE85])
"""Added to the key after each round."""


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds. counter `[..., 4]` and key `[..., 2]` hold 32-bit words in int64; so does the result `[..., 4]`."""
    even, odd = counter[..., 0::2], counter[..., 1::2]
    multipliers, steps = _MULTIPLIERS.to(counter.device), _STEPS.to(counter.device)
    for _ in range(10):
        # Products have 64 bits: signed numbers wrap around, and the mask removes the sign that the shift copies.
        products = even.flip(-1) * multipliers
        even, odd = ((products >> 32) ^ odd ^ key) & _MASK, products & _MASK
        key = (key + steps) & _MASK
    return torch.stack((even, odd), -1).flatten(-2)


def uniform(seed: int, sample_index: int, position: int, count: int) -> Tensor:
    """`[count]` float64 in the open interval (0, 1), for positions `position` onwards.

    key = the two words of `seed`, low first; counter = (position, sample index, purpose, 0), where purpose 0 is drawing
    a token. Uses 52 bits of the first two words of the result plus a half step, so that 0 and 1 cannot occur.
    """
    key = torch.tensor([seed & _MASK, seed >> 32], dtype=torch.int64)
    counter = torch.zeros(count, 4, dtype=torch.int64)
    counter[:, 0] = torch.arange(position, position + count)
    counter[:, 1] = sample_index
    return _unit(philox4x32(counter, key.expand(count, 2)))


def uniforms(seeds_R: Tensor, samples_R: Tensor, positions_R: Tensor) -> Tensor:
    """Like `uniform` for one position per row, on the rows' device. Seeds are int64 with the bits of the key."""
    key = torch.stack((seeds_R & _MASK, (seeds_R >> 32) & _MASK), -1)
    zero = torch.zeros_like(positions_R)
    return _unit(philox4x32(torch.stack((positions_R, samples_R, zero, zero), -1), key))


def _unit(words: Tensor) -> Tensor:
    bits = (words[..., 0] << 20) | (words[..., 1] >> 12)
    return (bits.double() + 0.5) * 2.0**-52
