"""The Mamba-2 recurrence over packed sequences, a chunk at a time; the maths is in README.md.

`T` tokens, `K` chunks, `L` places in a chunk, `H` heads, `P` channels of a head, `G` groups, `J` heads of a group, `N`
state size, `S` slots, `R` rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.chunk_scan.plan import ChunkPlan


def chunk_scan(
    pool_SHPN: Tensor,
    slots_R: Tensor,
    has_initial_R: Tensor,
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    plan: ChunkPlan,
    saves: list[tuple[int, int]] | None = None,
) -> Tensor:
    """Runs every row from its slot's state (or zeros) to its end and writes the final state to the slot.

    pool: `[S, H, P, N]`. x, B, C, dt: float32, dt after bias, softplus and clamp. A (negative), D: `[H]` float32. A row whose
    `has_initial` is False, or whose slot is -1, starts from zeros; slot -1 leaves no state. `saves`: (chunk of the plan,
    slot) pairs: the state after that chunk goes to that slot too. Returns `[T, H, P]` float32.
    """
    groups, state = B_TGN.shape[1:]
    heads, width = x_THP.shape[1:]
    chunks, places, per = len(plan.chunks), plan.width, heads // groups
    x = _spread(x_THP, plan).view(chunks, places, groups, per, width)
    dt = _spread(dt_TH, plan).view(chunks, places, groups, per).permute(0, 2, 3, 1)
    b = _spread(B_TGN, plan).view(chunks, places, groups, state).transpose(1, 2)
    c = _spread(C_TGN, plan).view(chunks, places, groups, state).transpose(1, 2)
    sums = torch.cumsum(dt * A_H.view(groups, per, 1), -1)
    carried = (dt * torch.exp(sums[..., -1:] - sums)).permute(0, 3, 1, 2)
    weighted = (x * carried[..., None]).permute(0, 2, 3, 4, 1).reshape(chunks, groups, per * width, places)
    states = torch.matmul(weighted, b).view(chunks, heads, width, state)
    before = _pass_states(pool_SHPN, slots_R, has_initial_R, states, torch.exp(sums[..., -1]), plan, saves or [])

    out = torch.matmul(c, before.view(chunks, groups, per * width, state).transpose(2, 3))
    out = out.view(chunks, groups, places, per, width).transpose(2, 3)
    out = out * torch.exp(sums)[..., None]
    scores = torch.matmul(c, b.transpose(2, 3))
    mix = (sums[..., :, None] - sums[..., None, :]).clamp_(max=0.0).exp_()
    mix = mix.mul_(scores[:, :, None]).mul_(dt[..., None, :]).tril_()
    inner = x.permute(0, 2, 3, 1, 4).reshape(chunks * heads, places, width)
    out = torch.baddbmm(out.reshape(chunks * heads, places, width), mix.view(chunks * heads, places, places), inner)
    y = out.view(chunks, heads, places, width).transpose(1, 2).reshape(chunks * places, heads, width)
    if plan.inverse is not None:
        y = y.index_select(0, plan.inverse)
    return y.addcmul_(x_THP, D_H[:, None])


def _spread(packed: Tensor, plan: ChunkPlan) -> Tensor:
    """`[T, ...]` -> `[chunks * width, ...]`, zeros in empty places (so dt is 0 there: no decay, no input)."""
    if plan.index is None:
        return packed.contiguous()
    padded = F.pad(packed.reshape(packed.shape[0], -1), (0, 0, 0, 1))
    return padded.index_select(0, plan.index).view(-1, *packed.shape[1:])


def _pass_states(
    pool_SHPN: Tensor,
    slots_R: Tensor,
    has_initial_R: Tensor,
    states_KHPN: Tensor,
    decay_KGJ: Tensor,
    plan: ChunkPlan,
    saves: list[tuple[int, int]],
) -> Tensor:
    """State before each chunk `[K, H, P, N]`; stores final and saved states. Turns `states` into states *after* chunks."""
    before = torch.empty_like(states_KHPN)
    decay = decay_KGJ.reshape(*states_KHPN.shape[:2], 1, 1)
    slots, initial = slots_R.tolist(), has_initial_R.tolist()
    for row, places in enumerate(plan.row_chunks):
        slot = slots[row]
        if initial[row] and slot >= 0:
            before[places[0]] = pool_SHPN[slot]
        else:
            before[places[0]] = 0.0
        for place in places:
            if place != places[0]:
                before[place] = states_KHPN[place - 1]
            states_KHPN[place].addcmul_(before[place], decay[place])
        if slot >= 0:
            pool_SHPN[slot] = states_KHPN[places[-1]].to(pool_SHPN.dtype)
    for place, slot in saves:
        pool_SHPN[slot] = states_KHPN[place].to(pool_SHPN.dtype)
    return before
