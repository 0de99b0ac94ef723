"""One token of the Mamba-2 recurrence for each row, in place on a pool of states; the maths is in README.md.

`R` rows, `H` heads, `P` channels of a head, `N` state size, `G` groups of heads that share B and C, `S` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def discretise(dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """`softplus(dt + bias)` in float32, clamped to `limit` only. `F.softplus` is the log1p form, linear above 20."""
    dt = F.softplus(dt_TH.float() + dt_bias_H)
    if limit != (0.0, float("inf")):
        dt = dt.clamp_(*limit)
    return dt


def selective_state_update(
    pool_SHPN: Tensor,
    slots_R: Tensor,
    x_RHP: Tensor,
    dt_RH: Tensor,
    A_H: Tensor,
    B_RGN: Tensor,
    C_RGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    limit: tuple[float, float] = (0.0, float("inf")),
    first_slot: int | None = None,
) -> Tensor:
    """Advances the state of each row by one token and returns `[R, H, P]` float32.

    pool: `[S, H, P, N]`, any strides between slots. x, B, C: float32; dt: raw, before bias and softplus; A (negative), D
    and dt_bias: `[H]` float32. `first_slot`: row i uses slot `first_slot + i` and none is padding. Rows with slot -1
    neither read nor write a slot; their output is that of a zero state. No slot may appear twice.
    """
    rows, heads, width = x_RHP.shape
    groups = B_RGN.shape[1]
    dt = discretise(dt_RH, dt_bias_H, limit)
    decay = torch.exp(dt * A_H)
    scaled = x_RHP * dt[:, :, None]
    out = torch.empty_like(x_RHP)
    slots = range(first_slot, first_slot + rows) if first_slot is not None else slots_R.tolist()
    for row, slot in enumerate(slots):
        if slot < 0:
            h = torch.zeros(pool_SHPN.shape[1:], dtype=torch.float32, device=x_RHP.device)
        else:
            h = pool_SHPN[slot]
        new = h if h.dtype == torch.float32 else h.float()
        new.mul_(decay[row, :, None, None])
        grouped = new.view(groups, heads // groups * width, -1)
        grouped.baddbmm_(scaled[row].view(groups, -1, 1), B_RGN[row, :, None, :])
        torch.bmm(grouped, C_RGN[row, :, :, None], out=out[row].view(groups, -1, 1))
        if slot >= 0 and new is not h:
            h.copy_(new)
    return out.addcmul_(x_RHP, D_H[:, None])
