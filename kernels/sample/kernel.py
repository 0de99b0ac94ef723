"""Sampling in Triton: four launches divide each row of logits among many programs; the method is in README.md.

`R` rows, `V` tokens of the vocabulary, `N` blocks of it. Probabilities are summed as integers (`UNIT` is 1), so that
the order of summation cannot change a draw.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.sample.blocks_kernel import collect, extremes, weigh
from kernels.sample.draw_kernel import draw
from kernels.sample.rows import RowParams

MAX_VOCAB = 1 << 18
"""With a larger vocabulary the sum of a row could exceed 63 bits."""
BLOCK = 2048
"""Tokens of the vocabulary that a program reads at a time."""
BINS = 2048
"""Bins of the histogram of a row with filters."""
ENTRIES = 16384
"""The values of the bins that decide a draw are copied to a list if there are at most this many."""
TILE = 512
"""Entries of the list that the last launch reads at a time."""
SPAN = 4
"""Blocks that a program of the third launch reads, because each of these programs sums the row's whole histogram."""
WARPS = 8
"""Warps of a program in the first three launches."""
DRAW_WARPS = 4
"""Warps of a program in the last launch; with other numbers, or with a larger `TILE`, some targets spill registers."""


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    p_tokens,  # [R, T]
    p_drafts,  # [R, T - 1]
    p_counts,  # [R]
    p_out,  # [R] int64
    tokens_row,
    drafts_row,
    DRAFTS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    count = tl.load(p_counts + i_row)
    accepted = tl.full([], 0, tl.int64)
    for i in tl.static_range(DRAFTS):
        token = tl.load(p_tokens + i_row * tokens_row + i)
        draft = tl.load(p_drafts + i_row * drafts_row + i)
        accepted += ((accepted == i) & (i < count) & (token == draft)).to(tl.int64)
    tl.store(p_out + i_row, accepted)


def sample(logits_RV: Tensor, params: RowParams) -> Tensor:
    """Like the reference, in four launches. No host sync. Raises `ValueError` for a vocabulary above `MAX_VOCAB`."""
    rows, vocab = logits_RV.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens is above the maximum of {MAX_VOCAB} of the sampling kernel")
    masks = params.masks
    assert logits_RV.stride(1) == 1 and (masks is None or masks.words_GW.is_contiguous())
    device = logits_RV.device
    blocks = triton.cdiv(vocab, BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    listed = torch.empty(rows, dtype=torch.int32, device=device)
    given = {
        "p_logits": logits_RV,
        "p_temperature": params.temperature_R,
        "p_top_k": params.top_k_R,
        "p_top_p": params.top_p_R,
        "p_min_p": params.min_p_R,
        "p_seeds": params.seeds_R,
        "p_samples": params.samples_R,
        "p_positions": params.positions_R,
        "p_words": listed if masks is None else masks.words_GW,
        "p_masks": params.positions_R if masks is None else masks.index_R,
        "p_largest": torch.empty(rows, blocks, dtype=torch.float32, device=device),
        "p_smallest": torch.empty(rows, blocks, dtype=torch.float32, device=device),
        "p_first": torch.empty(rows, blocks, dtype=torch.int32, device=device),
        "p_sums": torch.empty(rows, blocks, dtype=torch.int64, device=device),
        "p_masses": torch.empty(rows, BINS, dtype=torch.int64, device=device),
        "p_counts": torch.empty(rows, BINS, dtype=torch.int64, device=device),
        "p_listed": listed,
        "p_entries": torch.empty(rows, ENTRIES, dtype=torch.int64, device=device),
        "p_out": out,
        "logits_row": logits_RV.stride(0),
        "words_row": 0 if masks is None else masks.words_GW.stride(0),
        "vocab": vocab,
        "blocks": blocks,
        "MASKED": masks is not None,
        "BLOCK": BLOCK,
        "N": max(64, triton.next_power_of_2(blocks)),  # one bin of a histogram for each thread of a warp, or more
        "BINS": BINS,
        "ENTRIES": ENTRIES,
        "SPAN": SPAN,
        "TILE": TILE,
    }
    _launch(extremes, (blocks, rows), given, WARPS)
    _launch(weigh, (blocks, rows), given, WARPS)
    _launch(collect, (triton.cdiv(blocks, SPAN), rows), given, WARPS)
    _launch(draw, (rows,), given, DRAW_WARPS)
    return out


def _launch(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], warps: int) -> None:
    """Launches a kernel with those of the arguments that it has."""
    launch(kernel, grid, **{name: given[name] for name in kernel.arg_names}, num_warps=warps)


def accept_drafts(tokens_RT: Tensor, drafts_RK: Tensor, counts_R: Tensor) -> Tensor:
    """Like the reference. No host sync."""
    rows, drafts = drafts_RK.shape
    out = torch.empty(rows, dtype=torch.int64, device=drafts_RK.device)
    launch(
        _accept,
        (rows,),
        p_tokens=tokens_RT,
        p_drafts=drafts_RK,
        p_counts=counts_R,
        p_out=out,
        tokens_row=tokens_RT.stride(0),
        drafts_row=drafts_RK.stride(0),
        DRAFTS=drafts,
        num_warps=1,
    )
    return out
