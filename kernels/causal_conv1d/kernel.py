"""The causal convolution in Triton; README.md has the maths, bytes and reasons for the configurations.

x, B and C of the scan stay parts of one row of channels: the scan reads them with the row's stride, so that splitting
the row copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.scan_tables import TILE, ScanTables
from kernels.slots import SlotRun

BLOCK_CHANNELS = 256
"""Channels per warp: 8 per thread, one 16-byte load of bfloat16."""
MAX_TAPS = 4


@triton.jit
def load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS, HAS_BIAS):
    """The weights of four taps, oldest first (zeros for taps that the convolution lacks), and the bias."""
    k_a = tl.load(p_weight + (TAPS - 4) * CHANNELS + o_c, mask=m_c & (TAPS >= 4), other=0.0)
    k_b = tl.load(p_weight + (TAPS - 3) * CHANNELS + o_c, mask=m_c & (TAPS >= 3), other=0.0)
    k_c = tl.load(p_weight + (TAPS - 2) * CHANNELS + o_c, mask=m_c, other=0.0)
    k_x = tl.load(p_weight + (TAPS - 1) * CHANNELS + o_c, mask=m_c, other=0.0)
    bias = tl.load(p_bias + o_c, mask=m_c & HAS_BIAS, other=0.0)
    return k_a, k_b, k_c, k_x, bias


@triton.jit
def convolve(b_a, b_b, b_c, b_x, k_a, k_b, k_c, k_x, bias, SILU: tl.constexpr):
    """The weighted sum of four inputs, oldest first, and the bias; float32. With SILU, its SiLU."""
    b_acc = bias + b_a.to(tl.float32) * k_a + b_b.to(tl.float32) * k_b
    b_acc += b_c.to(tl.float32) * k_c + b_x.to(tl.float32) * k_x
    if SILU:
        b_acc = b_acc * tl.sigmoid(b_acc)
    return b_acc


@triton.jit
def _input(p_x, p_window, position, begin, known, x_stride, o_c, m_c, CHANNELS, KEEP):
    """The input at a packed token of the row; before the row's first token, from its old window (zero if none)."""
    back = position - begin
    b_new = tl.load(p_x + position * x_stride + o_c, mask=m_c & (back >= 0), other=0.0)
    m_old = m_c & (back < 0) & (back + KEEP >= 0) & known
    b_old = tl.load(p_window + (back + KEEP) * CHANNELS + o_c, mask=m_old, other=0.0)
    return tl.where(back >= 0, b_new, b_old.to(b_new.dtype))


@triton.jit
def _inputs_before(p_x, p_window, stop, begin, known, x_stride, o_c, m_c, CHANNELS, KEEP):
    """The three inputs before packed token `stop`, oldest first."""
    b_a = _input(p_x, p_window, stop - 3, begin, known, x_stride, o_c, m_c, CHANNELS, KEEP)
    b_b = _input(p_x, p_window, stop - 2, begin, known, x_stride, o_c, m_c, CHANNELS, KEEP)
    b_c = _input(p_x, p_window, stop - 1, begin, known, x_stride, o_c, m_c, CHANNELS, KEEP)
    return b_a, b_b, b_c


@triton.jit
def keep_window(p_window, b_a, b_b, b_c, o_c, m_c, CHANNELS, TAPS):
    """Writes the last W - 1 of three inputs as a window."""
    p_last = p_window + (TAPS - 2) * CHANNELS + o_c
    tl.store(p_last - 2 * CHANNELS, b_a.to(p_window.dtype.element_ty), mask=m_c & (TAPS >= 4))
    tl.store(p_last - CHANNELS, b_b.to(p_window.dtype.element_ty), mask=m_c & (TAPS >= 3))
    tl.store(p_last, b_c.to(p_window.dtype.element_ty), mask=m_c)


# Tables may have any alignment in their buffer; compiling for each alignment would stall the steps that meet a new one.
@triton.jit(do_not_specialize_on_alignment=["p_rows", "p_saves", "p_tiles"])
def _packed_kernel(
    p_x,  # [T, C]
    p_weight,  # [W, C] float32
    p_bias,  # [C] float32
    p_pool,  # [S, W - 1, C]
    p_slots,  # [R]
    p_initial,  # [R] bool
    p_starts,  # [R + 1]
    p_rows,  # [R + 1] int32, saves of a row
    p_saves,  # [saves, 2] int32
    p_tiles,  # [tiles, 2] int32
    p_out,  # [T, C]
    x_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_row = tl.load(p_tiles + 2 * tl.program_id(0)).to(tl.int64)
    if i_row < 0:
        return
    first = tl.load(p_tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    begin = tl.load(p_starts + i_row).to(tl.int64)
    end = tl.load(p_starts + i_row + 1).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    known = (slot >= 0) & (tl.load(p_initial + i_row) != 0)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    p_window = p_pool + slot * slot_stride
    k_a, k_b, k_c, k_x, bias = load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS, HAS_BIAS)
    b_a, b_b, b_c = _inputs_before(p_x, p_window, first, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS - 1)

    # Four tokens are loaded before the first is stored: a load after a store has to wait for it.
    for token in range(first, tl.minimum(first + TILE_TOKENS, end), 4):
        p_token = p_x + token * x_stride + o_c
        m_1, m_2, m_3 = m_c & (token + 1 < end), m_c & (token + 2 < end), m_c & (token + 3 < end)
        b_0 = tl.load(p_token, mask=m_c, other=0.0)
        b_1 = tl.load(p_token + x_stride, mask=m_1, other=0.0)
        b_2 = tl.load(p_token + 2 * x_stride, mask=m_2, other=0.0)
        b_3 = tl.load(p_token + 3 * x_stride, mask=m_3, other=0.0)
        y_0 = convolve(b_a, b_b, b_c, b_0, k_a, k_b, k_c, k_x, bias, SILU)
        y_1 = convolve(b_b, b_c, b_0, b_1, k_a, k_b, k_c, k_x, bias, SILU)
        y_2 = convolve(b_c, b_0, b_1, b_2, k_a, k_b, k_c, k_x, bias, SILU)
        y_3 = convolve(b_0, b_1, b_2, b_3, k_a, k_b, k_c, k_x, bias, SILU)
        p_y = p_out + token * CHANNELS + o_c
        tl.store(p_y, y_0.to(p_out.dtype.element_ty), mask=m_c)
        tl.store(p_y + CHANNELS, y_1.to(p_out.dtype.element_ty), mask=m_1)
        tl.store(p_y + 2 * CHANNELS, y_2.to(p_out.dtype.element_ty), mask=m_2)
        tl.store(p_y + 3 * CHANNELS, y_3.to(p_out.dtype.element_ty), mask=m_3)
        b_a, b_b, b_c = b_1, b_2, b_3

    if first == begin:
        # Only this tile reads the row's window, so it may overwrite it once all of its threads have read it.
        for save in range(tl.load(p_rows + i_row), tl.load(p_rows + i_row + 1)):
            stop = tl.load(p_saves + 2 * save).to(tl.int64)
            target = tl.load(p_saves + 2 * save + 1).to(tl.int64)
            b_a, b_b, b_c = _inputs_before(p_x, p_window, stop, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS - 1)
            keep_window(p_pool + target * slot_stride, b_a, b_b, b_c, o_c, m_c & (target >= 0), CHANNELS, TAPS)
        b_a, b_b, b_c = _inputs_before(p_x, p_window, end, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS - 1)
        tl.debug_barrier()
        keep_window(p_window, b_a, b_b, b_c, o_c, m_c & (slot >= 0), CHANNELS, TAPS)


@triton.jit
def _update_kernel(
    p_x,  # [R, T, C]
    p_weight,  # [W, C] float32
    p_bias,  # [C] float32
    p_pool,  # [S, W - 1, C]
    p_slots,  # [R, K], K >= T
    p_accepted,  # [R]; with SEVERAL
    p_lengths,  # [R]; with SEVERAL
    p_out,  # [R, T, C]
    x_stride,
    token_stride,
    slot_stride,
    slots_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SEVERAL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < CHANNELS
    p_slots += i_row * slots_stride
    read, length = 0, TOKENS
    if SEVERAL:
        read = tl.load(p_accepted + i_row) - 1
        length = tl.load(p_lengths + i_row)
    slot = tl.load(p_slots + read).to(tl.int64)
    p_last = p_pool + slot * slot_stride + (TAPS - 2) * CHANNELS + o_c
    m_old = m_c & (slot >= 0)
    b_a = tl.load(p_last - 2 * CHANNELS, mask=m_old & (TAPS >= 4), other=0.0)
    b_b = tl.load(p_last - CHANNELS, mask=m_old & (TAPS >= 3), other=0.0)
    b_c = tl.load(p_last, mask=m_old, other=0.0)
    k_a, k_b, k_c, k_x, bias = load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS, HAS_BIAS)
    # A column is read by one thread and may be written by another.
    tl.debug_barrier()
    for token in tl.static_range(TOKENS):
        b_x = tl.load(p_x + i_row * x_stride + token * token_stride + o_c, mask=m_c, other=0.0)
        b_x = b_x.to(p_pool.dtype.element_ty)
        b_y = convolve(b_a, b_b, b_c, b_x, k_a, k_b, k_c, k_x, bias, SILU)
        tl.store(p_out + (i_row * TOKENS + token) * CHANNELS + o_c, b_y.to(p_out.dtype.element_ty), mask=m_c)
        b_a, b_b, b_c = b_b, b_c, b_x
        slot = tl.load(p_slots + token).to(tl.int64)
        m_new = m_c & (slot >= 0) & (token < length)
        keep_window(p_pool + slot * slot_stride, b_a, b_b, b_c, o_c, m_new, CHANNELS, TAPS)


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
    """Like the reference, but the result has x's dtype, and `tables`, which replaces `saves`, is required.

    2 to 4 taps. Rows of x may have any stride. Tokens after the last row are not written. No host sync. Raises
    `ValueError` without tables.
    """
    if tables is None:
        raise ValueError("causal_conv1d on a GPU needs tables (kernels.scan_tables)")
    tokens, channels = x_TC.shape
    taps = weight_WC.shape[0]
    _check_taps(weight_WC, pool_SWC)
    assert x_TC.stride(1) == 1 and pool_SWC.stride()[1:] == (channels, 1)
    out = torch.empty(tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    launch(
        _packed_kernel,
        (tables.tiles_V2.shape[0], triton.cdiv(channels, BLOCK_CHANNELS)),
        p_x=x_TC,
        p_weight=weight_WC,
        p_bias=weight_WC if bias_C is None else bias_C,
        p_pool=pool_SWC,
        p_slots=slots_R,
        p_initial=has_initial_R,
        p_starts=starts_R,
        p_rows=tables.saves_R1,
        p_saves=tables.saves_V2,
        p_tiles=tables.tiles_V2,
        p_out=out,
        x_stride=x_TC.stride(0),
        slot_stride=pool_SWC.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        TILE_TOKENS=TILE,
        HAS_BIAS=bias_C is not None,
        SILU=silu,
        BLOCK_C=BLOCK_CHANNELS,
        num_warps=1,
    )
    return out


def _check_taps(weight_WC: Tensor, pool_SWC: Tensor) -> None:
    taps = weight_WC.shape[0]
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"the kernels convolve 2 to {MAX_TAPS} taps, the model has {taps}")
    assert pool_SWC.shape[1] == taps - 1


def causal_conv1d_update(
    x_RC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots_R: Tensor,
    runs: Sequence[SlotRun] | None = None,
    silu: bool = True,
) -> Tensor:
    """Like the reference, but the result has x's dtype. `runs` is not needed here. 2 to 4 taps. No host sync."""
    return _update(x_RC[:, None], weight_WC, bias_C, pool_SWC, slots_R, None, None, silu)[:, 0]


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
    """Like the reference, but the result has x's dtype. 2 to 4 taps. No host sync."""
    return _update(x_RTC, weight_WC, bias_C, pool_SWC, slots_RK, accepted_R, lengths_R, silu)


def _update(
    x_RTC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    pool_SWC: Tensor,
    slots: Tensor,
    accepted_R: Tensor | None,
    lengths_R: Tensor | None,
    silu: bool,
) -> Tensor:
    rows, tokens, channels = x_RTC.shape
    taps = weight_WC.shape[0]
    _check_taps(weight_WC, pool_SWC)
    assert x_RTC.stride(2) == 1 and pool_SWC.stride()[1:] == (channels, 1) and slots.stride(-1) == 1
    out = torch.empty(rows, tokens, channels, dtype=x_RTC.dtype, device=x_RTC.device)
    launch(
        _update_kernel,
        (rows, triton.cdiv(channels, BLOCK_CHANNELS)),
        p_x=x_RTC,
        p_weight=weight_WC,
        p_bias=weight_WC if bias_C is None else bias_C,
        p_pool=pool_SWC,
        p_slots=slots,
        p_accepted=slots if accepted_R is None else accepted_R,
        p_lengths=slots if lengths_R is None else lengths_R,
        p_out=out,
        x_stride=x_RTC.stride(0),
        token_stride=x_RTC.stride(1),
        slot_stride=pool_SWC.stride(0),
        slots_stride=slots.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        TOKENS=tokens,
        HAS_BIAS=bias_C is not None,
        SILU=silu,
        SEVERAL=accepted_R is not None,
        BLOCK_C=BLOCK_CHANNELS,
        num_warps=1,
    )
    return out
