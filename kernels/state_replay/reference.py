"""Several tokens per row, computed from a state that is not written and the inputs since it; the maths is in README.md.

`R` rows, `T` new tokens of a row, `L` steps of a ring, `C` conv channels, `H` heads, `P` channels of a head, `G`
groups, `N` state size, `S` state slots, `W` taps, `Q` batch slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.causal_conv1d.reference import convolve_rows
from kernels.exponentials import LOG2_E
from kernels.selective_state_update.reference import advance_by_token, discretise
from kernels.slots import SlotRun, round_states


@dataclass(frozen=True)
class MambaTerms:
    """A Mamba-2 layer's parameters of the recurrence, all float32."""

    conv_WC: Tensor
    conv_bias_C: Tensor | None
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    groups: int
    state_size: int
    limit: tuple[float, float] = (0.0, float("inf"))


def replay_tokens(
    states_SHPN: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    lengths_R: Tensor,
    inputs_RTX: Tensor,
    terms: MambaTerms,
    span: int,
    runs: Sequence[SlotRun] | None = None,
) -> Tensor:
    """Output of each row's new tokens, `[R, T, H, P]` float32; states and windows are only read.

    rings: `[Q, L, X]`, X = C + H: for each batch slot, the projected conv inputs and raw dt of each step since the
    state in the state slot. The first `counts[r]` steps of batch slot `batch_slots[r]` are valid; the row's
    `lengths[r]` new inputs are written after them, and the caller sets the new count when it knows how many of them are
    accepted. `span`: at least the largest of counts + lengths, at most L. `runs`: `SlotRun.of(slots)`, if the host
    knows it already. Outputs after a row's length, and those of rows with slot -1, are finite but meaningless; rows
    with slot -1 write nothing.
    """
    rows, tokens, _ = inputs_RTX.shape
    heads, width = states_SHPN.shape[1:3]
    steps = torch.arange(span, device=rings_QLX.device)
    ends_R = counts_R + lengths_R
    batch_slots = batch_slots_R.clamp(min=0)
    ring = rings_QLX[batch_slots, :span]
    offset_RL = steps - counts_R[:, None]
    new_RL = (offset_RL >= 0) & (steps < ends_R[:, None]) & (slots_R >= 0)[:, None]
    taken = inputs_RTX.gather(1, offset_RL.clamp(0, tokens - 1)[:, :, None].expand(-1, -1, inputs_RTX.shape[2]))
    ring = torch.where(new_RL[:, :, None], taken, ring)
    row_of, step_of = new_RL.nonzero(as_tuple=True)
    rings_QLX[batch_slots[row_of], step_of] = ring[row_of, step_of]
    valid_RL = (steps < ends_R[:, None]) & (slots_R >= 0)[:, None]
    x, dt, b, c = _recurrence_inputs(ring, valid_RL, windows_SWC, slots_R, heads, width, terms)

    queries_RT = (counts_R[:, None] + torch.arange(tokens, device=steps.device)).clamp(max=span - 1)
    if states_SHPN.dtype != torch.float32:
        y, _ = _token_after_token(states_SHPN, slots_R, x, dt, b, c, terms)
        return y.gather(1, queries_RT[:, :, None, None].expand(-1, -1, heads, width))
    sums = torch.cumsum(dt * (terms.A_H * LOG2_E), 1)
    at = queries_RT[:, :, None]
    sums_q = sums.gather(1, at.expand(-1, -1, heads))
    c_q = c.flatten(2).gather(1, at.expand(-1, -1, c[0, 0].numel())).view(rows, tokens, *c.shape[2:])
    x_q = x.flatten(2).gather(1, at.expand(-1, -1, heads * width)).view(rows, tokens, heads, width)
    closed = steps > queries_RT[:, :, None]
    mix = (sums_q[:, :, None] - sums[:, None]).masked_fill_(closed[..., None], float("-inf")).exp2_()
    scores = torch.matmul(c_q.transpose(1, 2), b.permute(0, 2, 3, 1))
    per = heads // terms.groups
    weights = mix.permute(0, 3, 1, 2) * scores.repeat_interleave(per, 1) * dt.transpose(1, 2)[:, :, None]
    out = torch.matmul(weights, x.transpose(1, 2)).transpose(1, 2).contiguous()
    decay_q = torch.exp2(sums_q)
    for run in runs if runs is not None else SlotRun.of(slots_R.tolist()):
        if run.slot < 0:
            continue
        part = slice(run.begin, run.end)
        state = states_SHPN[run.slots].view(run.end - run.begin, terms.groups, per * width, -1)
        carried = torch.matmul(c_q[part].transpose(1, 2), state.transpose(2, 3).to(c_q.dtype))
        carried = carried.transpose(1, 2).reshape(-1, tokens, heads, width)
        out[part].addcmul_(carried, decay_q[part, :, :, None])
    return out.addcmul_(x_q, terms.D_H[:, None])


def _recurrence_inputs(
    ring_RLX: Tensor,
    valid_RL: Tensor,
    windows_SWC: Tensor,
    slots_R: Tensor,
    heads: int,
    width: int,
    terms: MambaTerms,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x `[R, L, H, P]`, dt `[R, L, H]`, B and C `[R, L, G, N]` of a ring's steps. Inputs of invalid steps, and their
    dt, are zero."""
    ring_RLX = torch.where(valid_RL[:, :, None], ring_RLX, ring_RLX.new_zeros(()))  # invalid steps may be NaN
    conv_in, dt_raw = ring_RLX.split([ring_RLX.shape[2] - heads, heads], dim=-1)
    window = windows_SWC[slots_R.clamp(min=0)]
    window = torch.where((slots_R >= 0)[:, None, None], window, window.new_zeros(()))
    mixed = convolve_rows(torch.cat((window, conv_in.to(window.dtype)), 1), terms.conv_WC, terms.conv_bias_C)
    bc = terms.groups * terms.state_size
    x, b, c = mixed.split([heads * width, bc, bc], dim=-1)
    shape = (*mixed.shape[:2], terms.groups, terms.state_size)
    dt = discretise(dt_raw, terms.dt_bias_H, terms.limit) * valid_RL[:, :, None]
    return x.reshape(*mixed.shape[:2], heads, width), dt, b.reshape(shape), c.reshape(shape)


def _token_after_token(
    states_SHPN: Tensor,
    slots_R: Tensor,
    x_RLHP: Tensor,
    dt_RLH: Tensor,
    b_RLGN: Tensor,
    c_RLGN: Tensor,
    terms: MambaTerms,
) -> tuple[Tensor, Tensor]:
    """Outputs `[R, L, H, P]` of a ring's steps, and the states after them, rounded to the pool's dtype after each.

    A step whose dt is 0 leaves its state unchanged.
    """
    rows, steps, heads, width = x_RLHP.shape
    h = torch.where((slots_R >= 0)[:, None, None, None], states_SHPN[slots_R.clamp(min=0)].float(), 0.0)
    decay = torch.exp(dt_RLH * terms.A_H)
    scaled = (x_RLHP * dt_RLH[..., None]).view(rows, steps, terms.groups, -1, 1)
    out = torch.empty(rows, steps, terms.groups, heads // terms.groups * width, device=h.device)
    for step in range(steps):
        advance_by_token(h, decay[:, step], scaled[:, step], b_RLGN[:, step], c_RLGN[:, step], out[:, step])
        round_states(h, states_SHPN.dtype)
    return out.view(x_RLHP.shape).addcmul_(x_RLHP, terms.D_H[:, None]), h


def replay_advance(
    states_SHPN: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    targets_R: Tensor,
    counts_R: Tensor,
    terms: MambaTerms,
    span: int,
) -> None:
    """Stores the state and the window after the first `counts[r]` steps of each row's ring in slot `targets[r]`.

    The target may be the slot itself. Rows with slot -1 write nothing. `span`: see `replay_tokens`.
    """
    rows, (heads, width), keep = slots_R.shape[0], states_SHPN.shape[1:3], windows_SWC.shape[1]
    steps = torch.arange(span, device=rings_QLX.device)
    ring = rings_QLX[batch_slots_R.clamp(min=0), :span]
    valid_RL = (steps < counts_R[:, None]) & (slots_R >= 0)[:, None]
    x, dt, b, c = _recurrence_inputs(ring, valid_RL, windows_SWC, slots_R, heads, width, terms)
    if states_SHPN.dtype != torch.float32:
        _, state = _token_after_token(states_SHPN, slots_R, x, dt, b, c, terms)
    else:
        sums = torch.cumsum(dt * (terms.A_H * LOG2_E), 1)
        weighted = x * (dt * torch.exp2(sums[:, -1:] - sums))[..., None]
        grouped = weighted.view(rows, span, terms.groups, -1).permute(0, 2, 3, 1)
        state = states_SHPN[slots_R.clamp(min=0)] * torch.exp2(sums[:, -1])[:, :, None, None]
        state += torch.matmul(grouped, b.transpose(1, 2)).view_as(state)
    window = windows_SWC[slots_R.clamp(min=0)]
    channels = windows_SWC.shape[2]
    full = torch.cat((window, ring[..., :channels].to(window.dtype)), 1)
    last = counts_R[:, None] + torch.arange(keep, device=steps.device)
    moved = full.gather(1, last[:, :, None].expand(-1, -1, channels))
    kept = slots_R >= 0
    states_SHPN[targets_R[kept]] = state[kept].to(states_SHPN.dtype)
    windows_SWC[targets_R[kept]] = moved[kept]
