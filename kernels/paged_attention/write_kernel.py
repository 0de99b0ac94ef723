"""Writes new keys and values to their pages. Letters as in `kernel.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import OF_ROWS, launch


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _write(
    p_pool,  # [B, 2, S, K, P]
    p_k,  # [T, K, P]
    p_v,  # [T, K, P]
    p_places,  # [T]
    pool_page,
    pool_side,
    pool_place,
    pool_head,
    k_token,
    k_head,
    v_token,
    v_head,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    place = tl.load(p_places + i_token).to(tl.int64)
    if place < 0:
        return
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_p = tl.arange(0, BLOCK_P)[None, :]
    m = (o_h < HEADS) & (o_p < P)
    p_to = p_pool + (place // SIZE) * pool_page + (place % SIZE) * pool_place + o_h * pool_head + o_p
    tl.store(p_to, tl.load(p_k + i_token * k_token + o_h * k_head + o_p, mask=m, other=0.0), mask=m)
    tl.store(p_to + pool_side, tl.load(p_v + i_token * v_token + o_h * v_head + o_p, mask=m, other=0.0), mask=m)


def write_kv(pool_B2SKP: Tensor, k_TKP: Tensor, v_TKP: Tensor, places_T: Tensor) -> None:
    """Like the reference. No host sync."""
    tokens, heads, width = k_TKP.shape
    assert pool_B2SKP.stride(-1) == k_TKP.stride(-1) == v_TKP.stride(-1) == 1
    launch(
        _write,
        (tokens,),
        p_pool=pool_B2SKP,
        p_k=k_TKP,
        p_v=v_TKP,
        p_places=places_T,
        pool_page=pool_B2SKP.stride(0),
        pool_side=pool_B2SKP.stride(1),
        pool_place=pool_B2SKP.stride(2),
        pool_head=pool_B2SKP.stride(3),
        k_token=k_TKP.stride(0),
        k_head=k_TKP.stride(1),
        v_token=v_TKP.stride(0),
        v_head=v_TKP.stride(1),
        SIZE=pool_B2SKP.shape[2],
        HEADS=heads,
        P=width,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_P=triton.next_power_of_2(width),
        num_warps=4,
    )
