"""A convolution of several tokens per row, from a window that is not written and the inputs since it; the maths is in
README.md.

`R` rows, `T` new tokens of a row, `L` steps of a ring, `C` channels, `W` taps, `S` state slots, `Q` batch slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.causal_conv1d.reference import convolve_rows


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
    """The convolution of each row's new tokens, `[R, T, C]` float32, without an activation; windows are only read.

    rings: `[Q, L, C]`: for each batch slot, the inputs of each step since the window in the state slot. The first
    `counts[r]` steps of batch slot `batch_slots[r]` are valid; the row's `lengths[r]` new inputs are written after
    them, and the caller sets the new count when it knows how many of them are accepted. weight, bias: as in
    `causal_conv1d`. `span`: at least the largest of counts + lengths, at most L. Outputs after a row's length, and
    those of rows with slot -1, are finite but meaningless; rows with slot -1 write nothing.
    """
    tokens, channels = inputs_RTC.shape[1:]
    steps = torch.arange(span, device=rings_QLC.device)
    ends_R, owners, known_R = counts_R + lengths_R, batch_slots_R.clamp(min=0), slots_R >= 0
    ring = rings_QLC[owners, :span]
    offset_RL = steps - counts_R[:, None]
    valid_RL = (steps < ends_R[:, None]) & known_R[:, None]
    new_RL = valid_RL & (offset_RL >= 0)
    taken = inputs_RTC.gather(1, offset_RL.clamp(0, tokens - 1)[:, :, None].expand(-1, -1, channels))
    ring = torch.where(new_RL[:, :, None], taken.to(ring.dtype), ring)
    row_of, step_of = new_RL.nonzero(as_tuple=True)
    rings_QLC[owners[row_of], step_of] = ring[row_of, step_of]
    ring = torch.where(valid_RL[:, :, None], ring, ring.new_zeros(()))  # invalid steps may be NaN
    window = torch.where(known_R[:, None, None], windows_SWC[slots_R.clamp(min=0)], windows_SWC.new_zeros(()))
    mixed = convolve_rows(torch.cat((window, ring.to(window.dtype)), 1), weight_WC, bias_C, silu=False)
    return mixed.gather(1, queries(counts_R, tokens, span)[:, :, None].expand(-1, -1, channels))


def queries(counts_R: Tensor, tokens: int, span: int) -> Tensor:
    """`[R, T]`: the ring step of each new token, at most the last one of the span."""
    return (counts_R[:, None] + torch.arange(tokens, device=counts_R.device)).clamp(max=span - 1)


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
    """Stores the window after the first `counts[r]` steps of each row's ring in slot `targets[r]`.

    The target may be the slot itself. Rows with slot -1 write nothing. weight: `[W, C]`, for its shape. `span`: see
    `conv_replay`.
    """
    keep, channels = weight_WC.shape[0] - 1, weight_WC.shape[1]
    kept, ring = slots_R >= 0, rings_QLC[batch_slots_R.clamp(min=0), :span]
    full = torch.cat((windows_SWC[slots_R.clamp(min=0)], ring.to(windows_SWC.dtype)), 1)
    last = counts_R[:, None] + torch.arange(keep, device=ring.device)
    moved = full.gather(1, last[:, :, None].expand(-1, -1, channels))
    windows_SWC[targets_R[kept]] = moved[kept]
