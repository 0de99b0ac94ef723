"""The Mamba-2 recurrence for one or several tokens per row, on a pool of states; the maths is in README.md.

`R` rows, `T` tokens of a row, `H` heads, `P` channels of a head, `N` state size, `G` groups of heads that share B and
C, `S` slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.slots import SlotRun, round_states


def discretise(dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """`softplus(dt + bias)` in float32, clamped to `limit` and nothing else. `F.softplus` uses log1p and is linear
    above 20."""
    dt = F.softplus(dt_TH + dt_bias_H)
    if limit != (0.0, float("inf")):
        dt = dt.clamp_(*limit)
    return dt


def advance_by_token(
    h_RHPN: Tensor, decay_RH: Tensor, scaled_RGX1: Tensor, B_RGN: Tensor, C_RGN: Tensor, out_RGX: Tensor
) -> None:
    """Advances float32 states in place by one token each and fills `out` without the D term.

    X: channels of a group, H P / G. scaled: inputs times their step size.
    """
    h_RHPN.mul_(decay_RH[:, :, None, None])
    grouped = h_RHPN.view(*out_RGX.shape, -1)
    grouped.addcmul_(scaled_RGX1, B_RGN[:, :, None])
    torch.sum(grouped * C_RGN[:, :, None], -1, out=out_RGX)


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
    runs: Sequence[SlotRun] | None = None,
) -> Tensor:
    """Advances the state of each row by one token and returns `[R, H, P]` float32.

    pool: `[S, H, P, N]`, any stride between slots, float32 or the dtype that states are rounded to. x, B, C: float32;
    dt: raw, before bias and softplus; A (negative), D and dt_bias: `[H]` float32. `runs`: `SlotRun.of(slots)`, if the
    host knows it already. Rows with slot -1 access no slot; their output is that of a zero state. No slot may appear
    twice.
    """
    rows, heads, width = x_RHP.shape
    groups = B_RGN.shape[1]
    per = heads // groups * width
    dt = discretise(dt_RH, dt_bias_H, limit)
    decay = torch.exp(dt * A_H)
    scaled = (x_RHP * dt[:, :, None]).view(rows, groups, per, 1)
    out = torch.empty(rows, groups, per, dtype=torch.float32, device=x_RHP.device)
    for run in runs if runs is not None else SlotRun.of(slots_R.tolist()):
        part = slice(run.begin, run.end)
        if run.slot < 0:
            h = torch.zeros(run.end - run.begin, *pool_SHPN.shape[1:], device=x_RHP.device)
        else:
            h = pool_SHPN[run.slots]
        new = h if h.dtype == torch.float32 else h.float()
        advance_by_token(new, decay[part], scaled[part], B_RGN[part], C_RGN[part], out[part])
        if run.slot >= 0 and new is not h:
            h.copy_(new)
    return out.view(rows, heads, width).addcmul_(x_RHP, D_H[:, None])


def selective_state_update_tokens(
    pool_SHPN: Tensor,
    slots_RK: Tensor,
    accepted_R: Tensor,
    lengths_R: Tensor,
    x_RTHP: Tensor,
    dt_RTH: Tensor,
    A_H: Tensor,
    B_RTGN: Tensor,
    C_RTGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Advances each row by several tokens and stores a state after each; returns `[R, T, H, P]` float32.

    slots: `[R, K]`, K >= T. Row r starts from the state in `slots[r, accepted[r] - 1]`, which is read before anything
    is written, and stores the state after its token t in `slots[r, t]`, for t < `lengths[r]`. Tokens after a row's
    length, and rows of slot -1, write nothing; their output is finite. Other arguments as in `selective_state_update`.
    No slot may appear twice.
    """
    rows, tokens, heads, width = x_RTHP.shape
    groups = B_RTGN.shape[2]
    per = heads // groups * width
    read = slots_RK.gather(1, (accepted_R - 1)[:, None])[:, 0]
    h = torch.where((read >= 0)[:, None, None, None], pool_SHPN[read.clamp(min=0)].float(), 0.0)
    dt = discretise(dt_RTH, dt_bias_H, limit)
    decay = torch.exp(dt * A_H)
    scaled = (x_RTHP * dt[..., None]).view(rows, tokens, groups, per, 1)
    out = torch.empty(rows, tokens, groups, per, dtype=torch.float32, device=x_RTHP.device)
    slots_RT = slots_RK[:, :tokens]
    kept_RT = (slots_RT >= 0) & (torch.arange(tokens, device=slots_RT.device) < lengths_R[:, None])
    for token in range(tokens):
        advance_by_token(h, decay[:, token], scaled[:, token], B_RTGN[:, token], C_RTGN[:, token], out[:, token])
        round_states(h, pool_SHPN.dtype)
        kept = kept_RT[:, token]
        pool_SHPN[slots_RT[kept, token]] = h[kept].to(pool_SHPN.dtype)
    return out.view(rows, tokens, heads, width).addcmul_(x_RTHP, D_H[:, None])
