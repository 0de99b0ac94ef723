"""Depthwise causal convolution with a state of the last inputs; the maths is in README.md.

`T` tokens, `R` rows (sequences), `C` channels, `W` taps, `S` slots of the state pool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots_R: Tensor,
    has_initial_R: Tensor,
    starts_R: Tensor,
) -> Tensor:
    """Packed rows of any length, each from its own window of earlier inputs; SiLU at the end.

    x: `[T, C]`, rows packed one after the other; row r is `starts[r]:starts[r+1]` (`starts` has R + 1 entries).
    weight: `[W, C]` float32, oldest tap first; bias: `[C]` float32. pool: `[S, W-1, C]`, oldest input first.
    A row whose `has_initial` is False starts from zeros whatever its slot holds. Slot -1: the row starts from zeros and
    leaves no state. Returns `[T, C]` float32; each row's last W-1 inputs go to its slot, in the pool's dtype.
    """
    taps = weight_WC.shape[0]
    keep = taps - 1
    bounds, slots, initial = starts_R.tolist(), slots_R.tolist(), has_initial_R.tolist()
    pieces: list[Tensor] = []
    for row, slot in enumerate(slots):
        window = pool_SWC[slot] if initial[row] and slot >= 0 else x_TC.new_zeros(keep, x_TC.shape[1])
        pieces += [window.to(x_TC.dtype), x_TC[bounds[row] : bounds[row + 1]]]
    padded = torch.cat(pieces).float()
    length = padded.shape[0] - keep
    out = padded[:length] * weight_WC[0]
    for tap in range(1, taps):
        out.addcmul_(padded[tap : tap + length], weight_WC[tap])
    if bias_C is not None:
        out += bias_C
    F.silu(out, inplace=True)
    for row, slot in enumerate(slots):
        end = bounds[row + 1] + (row + 1) * keep
        if slot >= 0:
            pool_SWC[slot] = padded[end - keep : end].to(pool_SWC.dtype)
    if len(slots) == 1:
        return out
    return torch.cat([out[bounds[r] + r * keep : bounds[r + 1] + r * keep] for r in range(len(slots))])


def causal_conv1d_update(
    x_RC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots_R: Tensor,
    first_slot: int | None = None,
) -> Tensor:
    """One token for each row. Arguments as above; returns `[R, C]` float32.

    `first_slot` is what the host knows already: row i uses slot `first_slot + i` and none is padding; the state is
    then worked on in place. Rows with slot -1 read and write no slot, and their output is that of a zero state.
    """
    rows = x_RC.shape[0]
    if first_slot is not None:
        window = pool_SWC[first_slot : first_slot + rows]
    else:
        window = pool_SWC.index_select(0, slots_R.clamp(min=0))
        window = torch.where((slots_R < 0)[:, None, None], torch.zeros((), dtype=window.dtype), window)
    full = torch.cat((window, x_RC.to(window.dtype)[:, None]), 1)
    out = (full.float() * weight_WC).sum(1)
    if bias_C is not None:
        out += bias_C
    if first_slot is not None:
        window.copy_(full[:, 1:])
    else:
        _scatter_rows(pool_SWC, slots_R, full[:, 1:])
    return F.silu(out, inplace=True)


def _scatter_rows(pool: Tensor, slots_R: Tensor, values: Tensor) -> None:
    """Writes row r to slot `slots[r]`, and nothing for -1."""
    live = slots_R >= 0
    if bool(live.all()):
        pool.index_copy_(0, slots_R, values)
    else:
        pool.index_copy_(0, slots_R[live], values[live])
