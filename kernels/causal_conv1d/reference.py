"""Depthwise causal convolution with a window of the last inputs as its state; the maths is in README.md.

`T` tokens, `R` rows (sequences), `C` channels, `W` taps, `S` slots of the state pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.scan_tables import ScanTables
from kernels.slots import SlotRun

BLOCK_ROWS = 128


def causal_conv1d(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots_R: Tensor,
    has_initial_R: Tensor,
    starts_R: Tensor,
    saves: Sequence[tuple[int, int, int]] | Tensor = (),
    tables: ScanTables | None = None,
    silu: bool = True,
) -> Tensor:
    """Convolves packed rows of any length, each continuing from its window of earlier inputs; then SiLU, if `silu`.

    x: `[T, C]`, rows concatenated; row r is `starts[r]:starts[r+1]` (`starts` has R + 1 entries). weight: `[W, C]`
    float32, oldest tap first; bias: `[C]` float32. pool: `[S, W-1, C]`, oldest input first. A row whose `has_initial`
    is False starts from zeros. A row with slot -1 starts from zeros and its window is not stored. `saves`: for each
    (row, end, slot), the window after packed token `end - 1` of the row is also stored in that slot; as a buffer
    `[saves, 3]`, padding has row -1. `tables` has the same content for kernels and is not needed here. Returns `[T, C]`
    float32, zeros for tokens after the last row; stores each row's last W-1 inputs in its slot, in the pool's dtype.
    """
    keep = weight_WC.shape[0] - 1
    out = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    bounds, slots, initial = starts_R.tolist(), slots_R.tolist(), has_initial_R.tolist()
    if isinstance(saves, Tensor):
        saves = [(row, end, slot) for row, end, slot in saves.tolist() if row >= 0]
    out[bounds[-1] :] = 0.0
    for row, slot in enumerate(slots):
        begin, end = bounds[row], bounds[row + 1]
        known = initial[row] and slot >= 0
        window = pool_SWC[slot].to(x_TC.dtype) if known else x_TC.new_zeros(keep, x_TC.shape[1])
        for target, stop in [(target, stop) for owner, stop, target in saves if owner == row]:
            pool_SWC[target] = torch.cat((window, x_TC[max(begin, stop - keep) : stop]))[-keep:]
        for first in range(begin, end, BLOCK_ROWS):
            last = min(end, first + BLOCK_ROWS)
            padded = torch.cat((window, x_TC[first:last]))
            _convolve(padded.float(), weight_WC, bias_C, out[first:last], silu)
            window = padded[padded.shape[0] - keep :]
        if slot >= 0:
            pool_SWC[slot] = window
    return out


def _convolve(padded: Tensor, weight_WC: Tensor, bias_C: Tensor | None, out: Tensor, silu: bool) -> None:
    """`out[t] = silu(bias + sum_j weight[j] * padded[t + j])`, or without SiLU."""
    length = out.shape[0]
    torch.mul(padded[:length], weight_WC[0], out=out)
    for tap in range(1, weight_WC.shape[0]):
        out.addcmul_(padded[tap : tap + length], weight_WC[tap])
    if bias_C is not None:
        out += bias_C
    if silu:
        F.silu(out, inplace=True)


def causal_conv1d_update(
    x_RC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots_R: Tensor,
    runs: Sequence[SlotRun] | None = None,
    silu: bool = True,
) -> Tensor:
    """Convolves one token per row. Arguments as in `causal_conv1d`; returns `[R, C]` float32.

    `runs`: `SlotRun.of(slots)`, if the host knows it already; rows with consecutive slots are processed together, in
    place. A row with slot -1 accesses no slot; its output is that of a zero state.
    """
    out = torch.empty(x_RC.shape, dtype=torch.float32, device=x_RC.device)
    for run in runs if runs is not None else SlotRun.of(slots_R.tolist()):
        x = x_RC[run.begin : run.end, None]
        if run.slot < 0:
            window = x.new_zeros(x.shape[0], pool_SWC.shape[1], x.shape[2])
        else:
            window = pool_SWC[run.slots]
        full = torch.cat((window, x.to(window.dtype)), 1)
        torch.sum(full * weight_WC, 1, out=out[run.begin : run.end])
        if run.slot >= 0:
            window.copy_(full[:, 1:])
    if bias_C is not None:
        out += bias_C
    return F.silu(out, inplace=True) if silu else out


def causal_conv1d_tokens(
    x_RTC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots_RK: Tensor,
    accepted_R: Tensor,
    lengths_R: Tensor,
    silu: bool = True,
) -> Tensor:
    """Convolves several tokens per row and stores a window after each; returns `[R, T, C]` float32.

    slots: `[R, K]`, K >= T. Row r starts from the window in `slots[r, accepted[r] - 1]`, which is read before anything
    is written, and stores the window after its token t in `slots[r, t]`, for t < `lengths[r]`. Tokens after a row's
    length, and rows of slot -1, write nothing; their output is finite. No slot may appear twice.
    """
    tokens, keep = x_RTC.shape[1], pool_SWC.shape[1]
    read = slots_RK.gather(1, (accepted_R - 1)[:, None])[:, 0]
    window = torch.where((read >= 0)[:, None, None], pool_SWC[read.clamp(min=0)], pool_SWC.new_zeros(()))
    full = torch.cat((window, x_RTC.to(window.dtype)), 1)
    slots_RT = slots_RK[:, :tokens]
    kept_RT = (slots_RT >= 0) & (torch.arange(tokens, device=slots_RT.device) < lengths_R[:, None])
    for token in range(tokens):
        kept = kept_RT[:, token]
        pool_SWC[slots_RT[kept, token]] = full[kept, token + 1 : token + 1 + keep]
    return convolve_rows(full, weight_WC, bias_C, silu)


def convolve_rows(full_RLC: Tensor, weight_WC: Tensor, bias_C: Tensor | None, silu: bool = True) -> Tensor:
    """`[R, L, C]`, starting with W - 1 earlier inputs -> `[R, L - W + 1, C]` float32, after SiLU, if `silu`."""
    length = full_RLC.shape[1] - weight_WC.shape[0] + 1
    full = full_RLC.float()
    out = full[:, :length] * weight_WC[0]
    for tap in range(1, weight_WC.shape[0]):
        out.addcmul_(full[:, tap : tap + length], weight_WC[tap])
    if bias_C is not None:
        out += bias_C
    return F.silu(out, inplace=True) if silu else out
