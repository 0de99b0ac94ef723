"""Patches to tower rows in one product, in Triton; the maths is in README.md.

T patches of P values, D features, K prefix rows, R tower rows. A program computes M rows of N features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fence_kernel import needs_fences, publish
from kernels.launch import by_architecture, launch
from kernels.linear import Linear
from kernels.tiles import Tile

TILES = {
    "sm_80": Tile(128, 64, 32, 4, 3),
    "sm_90": Tile(128, 128, 64, 8, 3),
    "sm_100": Tile(128, 128, 64, 8, 3),
    "gfx942": Tile(64, 64, 32, 4, 2),
}
TILE_FLOAT32 = Tile(32, 32, 32, 4, 2)
# Bytes become floats in registers. On sm_90 a pipelined loop would leave the product that reads those registers running
# while the next iteration writes them (`kernels.aot` checks for that), so there it has one stage.
TILES_BYTES = TILES | {"sm_90": TILES["sm_90"]._replace(stages=1)}


@triton.jit(do_not_specialize=["rows"])
def _embed(  # type: ignore[no-untyped-def]
    p_patches,  # [T, P]: the weight's dtype, or uint8 with SHIFTED
    p_weight,  # [D, P]
    p_bias,  # [D]
    p_positions,  # [T, D]
    p_table,  # [K, D]
    p_source,  # [R]
    p_scale,  # [P] float32
    p_shift,  # [P] float32
    p_out,  # [R, D]
    rows,
    prefix,
    patch_row,
    position_row,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SHIFTED: tl.constexpr,
    FENCES: tl.constexpr,
):
    i_m = tl.program_id(0)
    i_n = tl.program_id(1)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m < rows
    m_n = o_n < D
    source = tl.load(p_source + o_m, mask=m_m, other=0).to(tl.int64)
    m_patch = m_m & (source >= prefix)
    patch = tl.where(m_patch, source - prefix, 0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, P, BLOCK_K):
        m_k = k + o_k < P
        x = tl.load(
            p_patches + (patch * patch_row)[:, None] + (k + o_k)[None, :],
            mask=m_patch[:, None] & m_k[None, :],
            other=0,
        )
        w = tl.load(p_weight + o_n[None, :] * P + (k + o_k)[:, None], mask=m_n[None, :] & m_k[:, None], other=0.0)
        if SHIFTED:
            scale = tl.load(p_scale + k + o_k, mask=m_k, other=0.0)
            shift = tl.load(p_shift + k + o_k, mask=m_k, other=0.0)
            x = (x.to(tl.float32) * scale[None, :] + shift[None, :]).to(w.dtype)
            publish(FENCES)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    m_at = m_patch[:, None] & m_n[None, :]
    acc += tl.load(p_positions + (patch * position_row)[:, None] + o_n[None, :], mask=m_at, other=0.0).to(tl.float32)
    m_table = (m_m & (source < prefix))[:, None] & m_n[None, :]
    fixed = tl.load(p_table + (source * D)[:, None] + o_n[None, :], mask=m_table, other=0.0).to(tl.float32)
    out = tl.where(m_patch[:, None], acc, fixed)
    tl.store(p_out + o_m.to(tl.int64)[:, None] * D + o_n[None, :], out.to(p_out.dtype.element_ty), mask=m_out)


def patch_embed(
    patches_TP: Tensor,
    projection: Linear,
    positions_TD: Tensor,
    table_KD: Tensor,
    source_R: Tensor,
    pixels: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Like the reference, in one launch with one rounding at the end. No host sync."""
    rows, width, depth = source_R.shape[0], projection.out_features, projection.in_features
    weight = projection.weight
    assert isinstance(weight, Tensor) and weight.is_contiguous(), "on a GPU a weight that is not quantised stays plain"
    assert patches_TP.stride(1) == positions_TD.stride(1) == 1
    out = torch.empty(rows, width, dtype=table_KD.dtype, device=source_R.device)
    tiles = TILES if pixels is None else TILES_BYTES
    tile = TILE_FLOAT32 if table_KD.dtype == torch.float32 else by_architecture(tiles, source_R.device)
    scale, shift = pixels or (positions_TD, positions_TD)
    launch(
        _embed,
        (triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.outputs)),
        p_patches=patches_TP,
        p_weight=weight,
        p_bias=table_KD if projection.bias is None else projection.bias,
        p_positions=positions_TD,
        p_table=table_KD,
        p_source=source_R,
        p_scale=scale,
        p_shift=shift,
        p_out=out,
        rows=rows,
        prefix=table_KD.shape[0],
        patch_row=patches_TP.stride(0),
        position_row=positions_TD.stride(0),
        P=depth,
        D=width,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        BIAS=projection.bias is not None,
        SHIFTED=pixels is not None,
        FENCES=needs_fences(table_KD.dtype, source_R.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
