"""The Mamba-2 recurrence over packed sequences, a chunk at a time; the maths is in README.md.

`T` tokens, `L` tokens of a chunk, `H` heads, `P` channels of a head, `G` groups, `N` state size, `S` slots, `R` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.chunk_scan.plan import Chunk, listed_chunks
from kernels.exponentials import LOG2_E
from kernels.selective_state_update.reference import advance_by_token
from kernels.slots import round_states

if TYPE_CHECKING:
    from kernels.scan_tables import ScanTables


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
    chunks: Sequence[Chunk] | Tensor,
    saves: Sequence[tuple[int, int]] | Tensor = (),
    tables: ScanTables | None = None,
) -> Tensor:
    """Runs every row from its slot's state (or zeros) to its end and writes the final state to the slot.

    pool: `[S, H, P, N]`, float32 or the dtype that states are rounded to after every token. x: `[T, H, P]`, B, C:
    `[T, G, N]` and dt: `[T, H]`, all float32, dt after bias, softplus and clamp. A (negative), D: `[H]` float32. A row
    whose `has_initial` is False, or whose slot is -1, starts from zeros; with slot -1 the final state is not stored.
    `chunks`: those of all rows, in row order. `saves`: for each (index of a chunk, slot), the state after that chunk is
    also stored in that slot. Both may be buffers, `[chunks, 4]` as written by `chunk_table` and `[saves, 2]`, with -1
    in the first column for padding. `tables` has the same content for kernels and is not needed here. Returns
    `[T, H, P]` float32; zeros for tokens of no chunk (padding of a static batch).

    Chunks are computed one after the other on purpose: the data of a chunk stays in the cache, and no padding is
    computed. If states are rounded, tokens are computed one after the other instead, because the products of a chunk
    have no state after each token to round.
    """
    tokens, heads, width = x_THP.shape
    out = torch.empty(tokens, heads, width, dtype=torch.float32, device=x_THP.device)
    if isinstance(chunks, Tensor):
        chunks = listed_chunks(chunks)
    if isinstance(saves, Tensor):
        saves = [(index, slot) for index, slot in saves.tolist() if index >= 0]
    out[chunks[-1].last :] = 0.0
    slots, initial = slots_R.tolist(), has_initial_R.tolist()
    shape = (heads, width, B_TGN.shape[2])
    kept = dict(_by_chunk(saves))
    mask = _causal_mask(max(chunk.last - chunk.first for chunk in chunks), x_THP.device)
    h = torch.zeros(shape, device=x_THP.device)
    for index, chunk in enumerate(chunks):
        part, slot = slice(chunk.first, chunk.last), slots[chunk.row]
        fresh = chunk.opens and not (initial[chunk.row] and slot >= 0)
        if chunk.opens:
            in_place = slot >= 0 and pool_SHPN.dtype == torch.float32
            h = pool_SHPN[slot] if in_place else torch.zeros(shape, device=x_THP.device)
            if not fresh and not in_place:
                h.copy_(pool_SHPN[slot])
        inputs = x_THP[part], dt_TH[part], A_H, B_TGN[part], C_TGN[part]
        if pool_SHPN.dtype == torch.float32:
            _scan_chunk(h, fresh, *inputs, mask, out[part])
        else:
            _scan_tokens(h, *inputs, pool_SHPN.dtype, out[part])
        last = index + 1 == len(chunks) or chunks[index + 1].opens
        if last and slot >= 0 and h.dtype != pool_SHPN.dtype:
            pool_SHPN[slot] = h
        for target in kept.get(index, ()):
            pool_SHPN[target] = h
    out[: chunks[-1].last].addcmul_(x_THP[: chunks[-1].last], D_H[:, None])
    return out


def _by_chunk(saves: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    grouped: dict[int, list[int]] = {}
    for index, slot in saves:
        grouped.setdefault(index, []).append(slot)
    return grouped


def _causal_mask(size: int, device: torch.device) -> Tensor:
    """`[size, size]`: 0 on and below the diagonal, -inf above."""
    return torch.full((size, size), float("-inf"), device=device).triu_(1)


def _scan_tokens(
    h_HPN: Tensor,
    x_LHP: Tensor,
    dt_LH: Tensor,
    A_H: Tensor,
    b_LGN: Tensor,
    c_LGN: Tensor,
    dtype: torch.dtype,
    out_LHP: Tensor,
) -> None:
    """Like `_scan_chunk`, but token by token; the state after each token is rounded to `dtype`."""
    length, groups = b_LGN.shape[:2]
    decay = torch.exp(dt_LH * A_H)
    scaled = (x_LHP * dt_LH[:, :, None]).view(length, groups, -1, 1)
    out = out_LHP.view(length, groups, -1)
    for token in range(length):
        one = slice(token, token + 1)
        advance_by_token(h_HPN[None], decay[one], scaled[one], b_LGN[one], c_LGN[one], out[one])
        round_states(h_HPN, dtype)


def _scan_chunk(
    h_HPN: Tensor,
    fresh: bool,
    x_LHP: Tensor,
    dt_LH: Tensor,
    A_H: Tensor,
    b_LGN: Tensor,
    c_LGN: Tensor,
    mask: Tensor,
    out_LHP: Tensor,
) -> None:
    """Computes one chunk: fills `out` (without the D term) and advances `h` in place. `fresh`: the state before the
    chunk is zero, whatever `h` holds."""
    length, heads, width = x_LHP.shape
    groups, state = b_LGN.shape[1:]
    grouped = h_HPN.view(groups, heads // groups * width, state)
    b, c = b_LGN.transpose(0, 1), c_LGN.transpose(0, 1)
    sums = torch.cumsum(dt_LH * (A_H * LOG2_E), 0)
    by_head = sums.t().contiguous()
    input_LHP = x_LHP * dt_LH[:, :, None]

    mix = by_head[:, :, None] - by_head[:, None, :]
    mix.add_(mask[:length, :length]).exp2_()
    mix.view(groups, -1, length, length).mul_(torch.bmm(c, b.transpose(1, 2))[:, None])
    inner = torch.bmm(mix, input_LHP.transpose(0, 1)).transpose(0, 1)
    if fresh:
        out_LHP.copy_(inner)
    else:
        carried = torch.bmm(c, grouped.transpose(1, 2)).view(groups, length, -1, width).transpose(0, 1)
        decay = torch.exp2(sums).view(length, groups, -1, 1)
        torch.addcmul(inner.view(carried.shape), carried, decay, out=out_LHP.view(carried.shape))

    input_LHP *= torch.exp2(sums[-1] - sums)[:, :, None]
    weighted = input_LHP.view(length, groups, -1).permute(1, 2, 0)
    if fresh:
        torch.bmm(weighted, b, out=grouped)
    else:
        h_HPN.mul_(torch.exp2(sums[-1])[:, None, None])
        grouped.baddbmm_(weighted, b)
