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

from kernels.launch import OF_ROWS, launch
from kernels.scan_tables import TILE, ScanTables
from kernels.slots import SlotRun

BLOCK_CHANNELS = 256
"""Channels per warp: 8 per thread, one 16-byte load of bfloat16."""
MAX_TAPS = 8


@triton.jit
def load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS: tl.constexpr, HAS_BIAS):
    """The weights of the taps, a tuple, oldest first; and the bias."""
    weights = ()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(p_weight + tap * CHANNELS + o_c, mask=m_c, other=0.0),)  # type: ignore[assignment]
    return weights, tl.load(p_bias + o_c, mask=m_c & HAS_BIAS, other=0.0)


@triton.jit
def convolve(past, b_x, weights, bias, TAPS: tl.constexpr, SILU: tl.constexpr):
    """The weighted sum of the inputs `past`, oldest first, and of the newest one, with the bias; float32. With SILU,
    its SiLU."""
    b_acc = bias
    for tap in tl.static_range(TAPS - 2):
        b_acc += past[tap].to(tl.float32) * weights[tap]
    b_acc += past[TAPS - 2].to(tl.float32) * weights[TAPS - 2] + b_x.to(tl.float32) * weights[TAPS - 1]
    if SILU:
        b_acc = b_acc * tl.sigmoid(b_acc)
    return b_acc


@triton.jit
def load_window(p_window, o_c, m_c, CHANNELS, TAPS: tl.constexpr):
    """The inputs in a window, a tuple, oldest first."""
    past = ()
    for tap in tl.static_range(TAPS - 1):
        past += (tl.load(p_window + tap * CHANNELS + o_c, mask=m_c, other=0.0),)  # type: ignore[assignment]
    return past


@triton.jit
def _input(p_x, p_window, position, begin, known, x_stride, o_c, m_c, CHANNELS, KEEP):
    """The input at a packed token of the row; before the row's first token, from its old window (zero if none)."""
    back = position - begin
    b_new = tl.load(p_x + position * x_stride + o_c, mask=m_c & (back >= 0), other=0.0)
    m_old = m_c & (back < 0) & (back + KEEP >= 0) & known
    b_old = tl.load(p_window + (back + KEEP) * CHANNELS + o_c, mask=m_old, other=0.0)
    return tl.where(back >= 0, b_new, b_old.to(b_new.dtype))


@triton.jit
def _inputs_before(p_x, p_window, stop, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS: tl.constexpr):
    """The W - 1 inputs before packed token `stop`, a tuple, oldest first."""
    past = ()
    for tap in tl.static_range(TAPS - 1):
        position = stop - (TAPS - 1) + tap
        past += (_input(p_x, p_window, position, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS - 1),)  # type: ignore[assignment]
    return past


@triton.jit
def keep_window(p_window, past, o_c, m_c, CHANNELS, TAPS: tl.constexpr):
    """Writes the W - 1 inputs as a window."""
    for tap in tl.static_range(TAPS - 1):
        tl.store(p_window + tap * CHANNELS + o_c, past[tap].to(p_window.dtype.element_ty), mask=m_c)


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
    weights, bias = load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS, HAS_BIAS)
    past = _inputs_before(p_x, p_window, first, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS)

    # Four tokens are loaded before the first is stored: a load after a store has to wait for it.
    for token in range(first, tl.minimum(first + TILE_TOKENS, end), 4):
        p_token = p_x + tl.cast(token, tl.int64) * x_stride + o_c
        m_1, m_2, m_3 = m_c & (token + 1 < end), m_c & (token + 2 < end), m_c & (token + 3 < end)
        b_0 = tl.load(p_token, mask=m_c, other=0.0)
        b_1 = tl.load(p_token + x_stride, mask=m_1, other=0.0)
        b_2 = tl.load(p_token + 2 * x_stride, mask=m_2, other=0.0)
        b_3 = tl.load(p_token + 3 * x_stride, mask=m_3, other=0.0)
        past_1 = past[1:] + (b_0,)
        past_2 = past_1[1:] + (b_1,)
        past_3 = past_2[1:] + (b_2,)
        y_0 = convolve(past, b_0, weights, bias, TAPS, SILU)
        y_1 = convolve(past_1, b_1, weights, bias, TAPS, SILU)
        y_2 = convolve(past_2, b_2, weights, bias, TAPS, SILU)
        y_3 = convolve(past_3, b_3, weights, bias, TAPS, SILU)
        p_y = p_out + token * CHANNELS + o_c
        tl.store(p_y, y_0.to(p_out.dtype.element_ty), mask=m_c)
        tl.store(p_y + CHANNELS, y_1.to(p_out.dtype.element_ty), mask=m_1)
        tl.store(p_y + 2 * CHANNELS, y_2.to(p_out.dtype.element_ty), mask=m_2)
        tl.store(p_y + 3 * CHANNELS, y_3.to(p_out.dtype.element_ty), mask=m_3)
        past = past_3[1:] + (b_3,)

    if first == begin:
        # Only this tile reads the row's window, so it may overwrite it once all of its threads have read it.
        for save in range(tl.load(p_rows + i_row), tl.load(p_rows + i_row + 1)):
            stop = tl.load(p_saves + 2 * save).to(tl.int64)
            target = tl.load(p_saves + 2 * save + 1).to(tl.int64)
            saved = _inputs_before(p_x, p_window, stop, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS)
            keep_window(p_pool + target * slot_stride, saved, o_c, m_c & (target >= 0), CHANNELS, TAPS)
        last = _inputs_before(p_x, p_window, end, begin, known, x_stride, o_c, m_c, CHANNELS, TAPS)
        tl.debug_barrier()
        keep_window(p_window, last, o_c, m_c & (slot >= 0), CHANNELS, TAPS)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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
    past = load_window(p_pool + slot * slot_stride, o_c, m_c & (slot >= 0), CHANNELS, TAPS)
    weights, bias = load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS, HAS_BIAS)
    # A column is read by one thread and may be written by another.
    tl.debug_barrier()
    for token in tl.static_range(TOKENS):
        b_x = tl.load(p_x + i_row * x_stride + token * token_stride + o_c, mask=m_c, other=0.0)
        b_x = b_x.to(p_pool.dtype.element_ty)
        b_y = convolve(past, b_x, weights, bias, TAPS, SILU)
        tl.store(p_out + (i_row * TOKENS + token) * CHANNELS + o_c, b_y.to(p_out.dtype.element_ty), mask=m_c)
        past = past[1:] + (b_x,)
        slot = tl.load(p_slots + token).to(tl.int64)
        m_new = m_c & (slot >= 0) & (token < length)
        keep_window(p_pool + slot * slot_stride, past, o_c, m_new, CHANNELS, TAPS)


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

    2 to 8 taps. Rows of x may have any stride. Tokens after the last row are not written. No host sync. Raises
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
    """Like the reference, but the result has x's dtype. `runs` is not needed here. 2 to 8 taps. No host sync."""
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
    """Like the reference, but the result has x's dtype. 2 to 8 taps. No host sync."""
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
