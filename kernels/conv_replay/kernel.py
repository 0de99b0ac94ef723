"""A convolution of several tokens after a window and a ring of inputs, in Triton; README.md has the maths and bytes.

The kernel is that of `state_replay`, without an activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.conv_replay.reference import queries
from kernels.state_replay.kernel import mix_ring


def conv_replay(
    windows_SWC: Tensor,
    rings_QLC: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    lengths_R: Tensor,
    inputs_RTC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    span: int,
) -> Tensor:
    """Like the reference, but the result has the windows' dtype. 2 to 8 taps. `span` is not needed here. No host
    sync."""
    mixed = mix_ring(
        windows_SWC, rings_QLC, batch_slots_R, slots_R, counts_R, weight_WC, bias_C, lengths_R, inputs_RTC, None,
        silu=False,
    )  # fmt: skip
    tokens, channels = inputs_RTC.shape[1:]
    places_RT = queries(counts_R, tokens, mixed.shape[1])
    found = mixed.gather(1, places_RT[:, :, None].expand(-1, -1, channels))
    known_RT = (torch.arange(tokens, device=slots_R.device) < lengths_R[:, None]) & (slots_R >= 0)[:, None]
    return torch.where(known_RT[:, :, None], found, found.new_zeros(()))


def conv_advance(
    windows_SWC: Tensor,
    rings_QLC: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    targets_R: Tensor,
    counts_R: Tensor,
    weight_WC: Tensor,
    span: int,
) -> None:
    """Like the reference. 2 to 8 taps. `span` is not needed here. No host sync."""
    ring = (windows_SWC, rings_QLC, batch_slots_R, slots_R, counts_R)
    mix_ring(*ring, weight_WC, None, None, None, targets_R, silu=False)
