"""Products of rows with a 16-bit weight in Triton, each row rounded in the same way whatever the number of rows; the
reasons are in README.md.

`R` rows, `N` outputs, `K` inputs. A program computes BLOCK_R rows of BLOCK_N outputs. Every sum is accumulated over all
inputs in their order by the same instructions, so configurations differ in speed and never in the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import by_architecture, launch, one_instruction
from kernels.tiles import Tile


class Choice(NamedTuple):
    """A tile for products with at most `rows` rows that it divides among at least `programs` programs, and whether its
    blocks are loaded by tensor descriptors (the copy engine of sm_90 and later)."""

    rows: float
    programs: int
    tile: Tile
    described: bool = False


ANY = float("inf")
# By architecture; the first choice that applies is used. Those of sm_90 are the fastest of 30 that were measured on an
# H200; the others have not been measured.
TILES: dict[str, tuple[Choice, ...]] = {
    "sm_80": (
        Choice(16, 0, Tile(16, 64, 128, 4, 4)),
        Choice(32, 0, Tile(32, 64, 128, 4, 4)),
        Choice(64, 0, Tile(64, 64, 64, 4, 4)),
        Choice(256, 0, Tile(64, 128, 32, 4, 4)),
        Choice(ANY, 0, Tile(128, 128, 32, 8, 4)),
    ),
    "sm_90": (
        Choice(16, 0, Tile(16, 64, 128, 4, 6)),
        Choice(32, 0, Tile(32, 64, 128, 4, 6)),
        Choice(64, 0, Tile(64, 64, 128, 4, 6), True),
        Choice(128, 100, Tile(128, 128, 64, 4, 5), True),
        Choice(128, 0, Tile(128, 64, 128, 4, 4), True),
        Choice(256, 100, Tile(256, 128, 64, 8, 4), True),
        Choice(256, 0, Tile(256, 64, 64, 4, 4), True),
        Choice(ANY, 400, Tile(256, 128, 64, 8, 4), True),
        Choice(ANY, 0, Tile(128, 128, 64, 4, 4), True),
    ),
    "sm_100": (
        Choice(16, 0, Tile(16, 64, 128, 4, 6)),
        Choice(32, 0, Tile(32, 64, 128, 4, 6)),
        Choice(64, 0, Tile(64, 64, 128, 4, 5)),
        Choice(256, 0, Tile(64, 128, 64, 4, 4)),
        Choice(ANY, 0, Tile(128, 128, 64, 4, 4)),
    ),
    "gfx942": (
        Choice(16, 0, Tile(16, 64, 128, 4, 2)),
        Choice(32, 0, Tile(32, 64, 128, 4, 2)),
        Choice(64, 0, Tile(64, 64, 64, 4, 2)),
        Choice(256, 0, Tile(64, 128, 64, 4, 2)),
        Choice(ANY, 0, Tile(128, 128, 64, 8, 2)),
    ),
}
GROUP = 8
"""Blocks of outputs whose weights stay in the L2 cache while all rows are computed."""


@triton.jit
def _block(rows, n_count, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(block of rows, block of outputs) of this program: GROUP blocks of outputs for each block of rows."""
    blocks_r, blocks_n = tl.cdiv(rows, BLOCK_R), tl.cdiv(n_count, BLOCK_N)
    of_group = GROUP * blocks_r
    first = tl.program_id(0) // of_group * GROUP
    size = tl.minimum(blocks_n - first, GROUP)
    inside = tl.program_id(0) % of_group
    return inside // size, first + inside % size


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    acc, p_bias, p_out, i_r, i_n, rows, n_count, BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    o_r, o_n = i_r * BLOCK_R + tl.arange(0, BLOCK_R), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < n_count
    if BIAS:
        acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_to = p_out + o_r.to(tl.int64)[None, :] * n_count + o_n[:, None]
    tl.store(p_to, acc.to(p_out.dtype.element_ty), mask=m_n[:, None] & (o_r < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(  # type: ignore[no-untyped-def]
    p_x,  # [R, K]
    p_w,  # [N, K]
    p_bias,  # [N], with BIAS
    p_out,  # [R, N]
    rows,
    n_count,
    k_count,
    x_stride,
    w_stride,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether k_count is a multiple of BLOCK_K
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    i_r, i_n = _block(rows, n_count, BLOCK_R, BLOCK_N, GROUP)
    # Rows and outputs past the end are computed again from the beginning and not stored, so that loads need no masks.
    o_r, o_n = i_r * BLOCK_R + tl.arange(0, BLOCK_R), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_x += (o_r % rows).to(tl.int64)[None, :] * x_stride + o_k[:, None]
    p_w += (o_n % n_count).to(tl.int64)[:, None] * w_stride + o_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for k in range(0, k_count, BLOCK_K):
        if WHOLE:
            b_w, b_x = tl.load(p_w), tl.load(p_x)
        else:
            m_k = o_k < k_count - k
            b_w, b_x = tl.load(p_w, mask=m_k[None, :], other=0.0), tl.load(p_x, mask=m_k[:, None], other=0.0)
        acc = tl.dot(b_w, b_x, acc)
        p_w += BLOCK_K
        p_x += BLOCK_K
    _store(acc, p_bias, p_out, i_r, i_n, rows, n_count, BIAS, BLOCK_R, BLOCK_N)


@triton.jit(do_not_specialize=["rows"])
def _described_kernel(  # type: ignore[no-untyped-def]
    d_x,  # [R, K], blocks [BLOCK_R, BLOCK_K]
    d_w,  # [N, K], blocks [BLOCK_N, BLOCK_K]
    p_bias,  # [N], with BIAS
    p_out,  # [R, N]
    rows,
    n_count,
    k_count,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    i_r, i_n = _block(rows, n_count, BLOCK_R, BLOCK_N, GROUP)
    acc = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for k in range(0, k_count, BLOCK_K):
        b_w, b_x = d_w.load([i_n * BLOCK_N, k]), d_x.load([i_r * BLOCK_R, k])
        acc = tl.dot(b_w, b_x.T, acc)
    _store(acc, p_bias, p_out, i_r, i_n, rows, n_count, BIAS, BLOCK_R, BLOCK_N)


def programs(rows: int, outputs: int, tile: Tile) -> int:
    """Number of programs among which a product is divided."""
    return int(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs))


def choice_of(rows: int, outputs: int, device: torch.device) -> Choice:
    """The configuration for a product of this size."""
    for choice in by_architecture(TILES, device):
        if rows <= choice.rows and programs(rows, outputs, choice.tile) >= choice.programs:
            return choice
    raise AssertionError("the last choice of an architecture applies to every product")


def rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b` of 16-bit rows `[R, K]` and a weight `[N, K]` of the same dtype, accumulated in float32 and rounded
    once. A row's result does not depend on the other rows or on their number. No host sync."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    assert weight.stride(1) == 1 and weight.dtype == x.dtype
    choice = choice_of(rows, outputs, x.device)
    tile = choice.tile
    shared = {
        "p_bias": out if bias is None else bias, "p_out": out, "rows": rows, "n_count": outputs, "k_count": inputs,
        "BIAS": bias is not None, "BLOCK_R": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs, "GROUP": GROUP,
        "num_warps": tile.warps, "num_stages": tile.stages, **one_instruction(x.device),
    }  # fmt: skip
    grid = (programs(rows, outputs, tile),)
    if choice.described and all(_describable(tensor) for tensor in (x, weight)):
        blocks = [
            TensorDescriptor.from_tensor(tensor, [size, tile.inputs])
            for tensor, size in ((x, tile.rows), (weight, tile.outputs))
        ]
        launch(_described_kernel, grid, d_x=blocks[0], d_w=blocks[1], **shared)
    else:
        strides = {"x_stride": x.stride(0), "w_stride": weight.stride(0), "WHOLE": inputs % tile.inputs == 0}
        launch(_rows_kernel, grid, p_x=x, p_w=weight, **shared, **strides)
    return out


def _describable(tensor: Tensor) -> bool:
    """Whether the copy engine can read the tensor: addresses and strides have to be multiples of 16 bytes."""
    return tensor.stride(0) % 8 == 0 and tensor.data_ptr() % 16 == 0
