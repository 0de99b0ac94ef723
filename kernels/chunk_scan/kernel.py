"""The chunked scan in Triton; README.md has the maths, bytes and reasons for the configurations.

Two kernels. `_states_kernel` iterates over the chunks of a row with the state of one head in registers: the slot is
read once and written once, saves are written in between, and the state before each chunk is stored in the compute dtype
for `_outputs_kernel`, which processes all chunks in parallel. Chunks lie on the absolute grid and are processed in
order, so a row that is resumed at a chunk's end with float32 states takes exactly the steps that it would have taken
without the interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.chunk_scan.plan import Chunk
from kernels.exponentials import LOG2_E
from kernels.fence_kernel import needs_fences, publish
from kernels.launch import ARCHITECTURES, by_architecture, launch
from kernels.scan_tables import ScanTables


class Configuration(NamedTuple):
    """Configuration of one kernel: largest number of channels of a program, warps, and chunks with loads in flight."""

    channels: int
    warps: int
    stages: int


# By bytes of an element: 2 has tensor cores, 4 takes exact products.
STATES = {
    2: {
        "sm_80": Configuration(64, 8, 2),
        "sm_90": Configuration(128, 8, 2),
        "sm_100": Configuration(128, 8, 2),
        "gfx942": Configuration(64, 8, 1),
    },
    4: dict.fromkeys(ARCHITECTURES, Configuration(32, 8, 1)),
}
OUTPUTS = {
    2: {
        "sm_80": Configuration(64, 8, 1),
        "sm_86": Configuration(64, 4, 1),
        "sm_90": Configuration(128, 4, 1),
        "sm_100": Configuration(64, 4, 2),
        "gfx942": Configuration(64, 4, 1),
    },
    4: dict.fromkeys(ARCHITECTURES, Configuration(32, 8, 1)),
}
BLOCK_TOKENS = 64
"""Tokens of a program of `_outputs_kernel`: half a chunk of 128, so that the first half computes no masked products."""


@triton.jit
def _running_sum(sum_0, dt_0, sum_1, dt_1):
    """Combines two parts of the running sum. dt is passed through; otherwise every thread that needs it would load it
    again."""
    return sum_0 + sum_1, dt_1


@triton.jit
def _decays(p_dt, dt_stride, a, o_l, m_l, BLOCK_L):
    """(sums of dt * a up to each token, dt, their total) of one chunk and head; masked tokens do not decay."""
    b_dt = tl.load(p_dt + o_l * dt_stride, mask=m_l, other=0.0)
    b_sum, b_dt = tl.associative_scan((b_dt * a, b_dt), 0, _running_sum)
    total = tl.sum(tl.where(o_l == BLOCK_L - 1, b_sum, 0.0), 0)
    return b_sum, b_dt, total


# Tables may have any alignment in their buffer; compiling for each alignment would stall the steps that meet a new one.
@triton.jit(do_not_specialize_on_alignment=["p_rows", "p_chunks"])
def _states_kernel(
    p_pool,  # [S, H, P, N]
    p_slots,  # [R]
    p_initial,  # [R] bool
    p_rows,  # [R + 1] int32, chunks of a row
    p_chunks,  # [C, 4] int32
    p_x,  # [T, H, P]
    p_dt,  # [T, H] float32
    p_A,  # [H] float32
    p_B,  # [T, G, N]
    p_before,  # [C, H, N, P]: the state before each chunk
    slot_stride,
    x_stride,
    dt_stride,
    b_stride,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(1)
    chunk = tl.load(p_rows + i_row)
    behind = tl.load(p_rows + i_row + 1)
    if chunk == behind:
        return
    i_head = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_P)).to(tl.int64)
    i_p = (tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_P)) * BLOCK_P
    o_l, o_p, o_n = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    # In a full tile the masks are known to be true and cost nothing.
    m_p = (o_p < WIDTH - i_p) | (WIDTH % BLOCK_P == 0)
    m_n = (o_n < STATE) | (STATE == BLOCK_N)
    m_state = m_n[:, None] & m_p[None, :]
    o_state = o_p[None, :] * STATE + o_n[:, None]
    o_before = o_n[:, None] * WIDTH + o_p[None, :]
    p_pool += (i_head * WIDTH + i_p) * STATE
    p_before += (chunk.to(tl.int64) * HEADS + i_head) * (STATE * WIDTH) + i_p
    p_x += i_head * WIDTH + i_p
    p_dt += i_head
    p_B += (i_head // HEADS_OF_GROUP) * STATE
    a = tl.load(p_A + i_head) * SCALE
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_h = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    if (slot >= 0) & (tl.load(p_initial + i_row) != 0):
        b_h += tl.load(p_pool + slot * slot_stride + o_state, mask=m_state, other=0.0)

    first = tl.load(p_chunks + chunk * 4 + 1)
    last = tl.load(p_chunks + chunk * 4 + 2)
    for i_chunk in range(chunk, behind):
        # Loaded one chunk ahead, so that the loads of the next chunk need not wait.
        ahead = tl.minimum(i_chunk + 1, behind - 1)
        next_first = tl.load(p_chunks + ahead * 4 + 1)
        next_last = tl.load(p_chunks + ahead * 4 + 2)
        target = tl.load(p_chunks + i_chunk * 4 + 3).to(tl.int64)
        m_l = o_l < last - first
        tl.store(p_before + o_before, b_h.to(p_before.dtype.element_ty), mask=m_state)
        p_before += HEADS * STATE * WIDTH
        b_sum, b_dt, total = _decays(p_dt + first.to(tl.int64) * dt_stride, dt_stride, a, o_l, m_l, BLOCK_L)
        p_B_chunk = p_B + first.to(tl.int64) * b_stride + (o_l[:, None] * b_stride + o_n[None, :])
        p_x_chunk = p_x + first.to(tl.int64) * x_stride + (o_l[:, None] * x_stride + o_p[None, :])
        b_B = tl.load(p_B_chunk, mask=m_l[:, None] & m_n[None, :], other=0.0)
        b_x = tl.load(p_x_chunk, mask=m_l[:, None] & m_p[None, :], other=0.0)
        b_x = (b_x.to(tl.float32) * (tl.exp2(total - b_sum) * b_dt)[:, None]).to(b_x.dtype)
        b_h = tl.dot(tl.trans(b_B), b_x, acc=b_h * tl.exp2(total), input_precision="ieee")
        if target >= 0:
            tl.store(p_pool + target * slot_stride + o_state, b_h.to(p_pool.dtype.element_ty), mask=m_state)
        first, last = next_first, next_last
    if slot >= 0:
        tl.store(p_pool + slot * slot_stride + o_state, b_h.to(p_pool.dtype.element_ty), mask=m_state)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["p_rows", "p_chunks"])
def _outputs_kernel(
    p_rows,  # [R + 1] int32, chunks of a row
    p_chunks,  # [C, 4] int32
    p_before,  # [C, H, N, P]
    p_x,  # [T, H, P]
    p_dt,  # [T, H] float32
    p_A,  # [H] float32
    p_B,  # [T, G, N]
    p_C,  # [T, G, N]
    p_D,  # [H] float32
    p_out,  # [T, H, P]
    tokens,
    rows,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FENCES: tl.constexpr,
):
    i_chunk = tl.program_id(1).to(tl.int64)
    i_head = (tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_P)).to(tl.int64)
    i_p = (tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_P)) * BLOCK_P
    begin = tl.program_id(2) * BLOCK_M  # of this program's tokens in the chunk
    o_m, o_p, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    m_p = (o_p < WIDTH - i_p) | (WIDTH % BLOCK_P == 0)
    m_n = (o_n < STATE) | (STATE == BLOCK_N)
    o_out = o_m[:, None] * (HEADS * WIDTH) + o_p[None, :]
    p_out += i_head * WIDTH + i_p
    first = tl.load(p_chunks + i_chunk * 4 + 1).to(tl.int64)
    length = tl.load(p_chunks + i_chunk * 4 + 2).to(tl.int64) - first
    if length <= begin:
        # The entry after all chunks gives the end of the rows: tokens that pad a graph's buffers become zeros.
        if (i_chunk == tl.load(p_rows + rows)) & (begin == 0):
            for token in range(first, tokens, BLOCK_M):
                b_zero = tl.zeros((BLOCK_M, BLOCK_P), dtype=p_out.dtype.element_ty)
                m_out = (o_m < tokens - token)[:, None] & m_p[None, :]
                tl.store(p_out + token * (HEADS * WIDTH) + o_out, b_zero, mask=m_out)
        return
    p_B += first * b_stride + (i_head // HEADS_OF_GROUP) * STATE
    p_x += first * x_stride + i_head * WIDTH + i_p
    p_dt += first * dt_stride + i_head
    p_C += (first + begin) * c_stride + (i_head // HEADS_OF_GROUP) * STATE
    p_before += (i_chunk * HEADS + i_head) * (STATE * WIDTH) + i_p
    a = tl.load(p_A + i_head) * SCALE
    m_m = o_m < length - begin
    m_before = m_n[:, None] & m_p[None, :]
    b_C = tl.load(p_C + (o_m[:, None] * c_stride + o_n[None, :]), mask=m_m[:, None] & m_n[None, :], other=0.0)
    b_h = tl.load(p_before + (o_n[:, None] * WIDTH + o_p[None, :]), mask=m_before, other=0.0)
    o_l = tl.arange(0, BLOCK_L)
    b_earlier = tl.load(p_dt + o_l * dt_stride, mask=o_l < begin, other=0.0)
    b_rows, _, _ = _decays(p_dt + begin * dt_stride, dt_stride, a, o_m, m_m, BLOCK_M)
    b_rows += tl.sum(b_earlier * a, 0)

    publish(FENCES)
    b_y = tl.dot(b_C, b_h, input_precision="ieee") * tl.exp2(b_rows)[:, None]
    so_far = 0.0
    for other in range(0, begin + 1, BLOCK_M):
        m_k = o_m < length - other
        p_B_block = p_B + other * b_stride + (o_m[:, None] * b_stride + o_n[None, :])
        p_x_block = p_x + other * x_stride + (o_m[:, None] * x_stride + o_p[None, :])
        b_B = tl.load(p_B_block, mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_x = tl.load(p_x_block, mask=m_k[:, None] & m_p[None, :], other=0.0)
        b_sum, b_dt, total = _decays(p_dt + other * dt_stride, dt_stride, a, o_m, m_k, BLOCK_M)
        publish(FENCES)
        b_scores = tl.dot(b_C, tl.trans(b_B), input_precision="ieee")
        causal = (o_m + begin)[:, None] >= (o_m + other)[None, :]
        b_decay = tl.where(causal, b_rows[:, None] - (b_sum + so_far)[None, :], float("-inf"))
        b_scores = b_scores * tl.exp2(b_decay) * b_dt[None, :]
        publish(FENCES)
        b_y = tl.dot(b_scores.to(b_x.dtype), b_x, acc=b_y, input_precision="ieee")
        so_far += total
    p_skip = p_x + begin * x_stride + (o_m[:, None] * x_stride + o_p[None, :])
    b_skip = tl.load(p_skip, mask=m_m[:, None] & m_p[None, :], other=0.0)
    b_y += b_skip.to(tl.float32) * tl.load(p_D + i_head)
    p_y = p_out + (first + begin) * (HEADS * WIDTH) + o_out
    tl.store(p_y, b_y.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_p[None, :])


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
    """Like the reference for float32 states; x, B and C may have any one float dtype, which the result has too.
    `tables`, which replaces `chunks` and `saves`, is required.

    Rows may have any stride; heads, channels and states of a row are contiguous, and so is each slot. Tokens after the
    last row give zeros. No host sync. Raises `ValueError` without tables.
    """
    if tables is None:
        raise ValueError("chunk_scan on a GPU needs tables (kernels.scan_tables)")
    tokens, heads, width = x_THP.shape
    groups, state = B_TGN.shape[1:]
    assert pool_SHPN.dtype == torch.float32, "products of chunks have no states to round after every token"
    assert pool_SHPN.stride()[1:] == (width * state, state, 1)
    assert x_THP.stride()[1:] == (width, 1) and B_TGN.stride()[1:] == (state, 1) == C_TGN.stride()[1:]
    assert dt_TH.stride(1) == 1 and x_THP.dtype == B_TGN.dtype == C_TGN.dtype
    out = torch.empty(tokens, heads, width, dtype=x_THP.dtype, device=x_THP.device)
    entries, block_l = tables.chunks_C4.shape[0], max(16, triton.next_power_of_2(tables.chunk_size))
    before = torch.empty(entries, heads, state, width, dtype=x_THP.dtype, device=x_THP.device)
    shared = {
        "p_rows": tables.chunks_R1,
        "p_chunks": tables.chunks_C4,
        "p_x": x_THP,
        "p_dt": dt_TH,
        "p_A": A_H,
        "p_B": B_TGN,
        "p_before": before,
        "x_stride": x_THP.stride(0),
        "dt_stride": dt_TH.stride(0),
        "b_stride": B_TGN.stride(0),
        "SCALE": LOG2_E,
        "HEADS": heads,
        "WIDTH": width,
        "STATE": state,
        "HEADS_OF_GROUP": heads // groups,
        "BLOCK_L": block_l,
        "BLOCK_N": max(16, triton.next_power_of_2(state)),
    }
    _launch(
        _states_kernel, STATES, shared, (slots_R.shape[0],), x_THP,
        p_pool=pool_SHPN, p_slots=slots_R, p_initial=has_initial_R, slot_stride=pool_SHPN.stride(0),
    )  # fmt: skip
    block_m = min(BLOCK_TOKENS, block_l)
    _launch(
        _outputs_kernel, OUTPUTS, shared, (entries, block_l // block_m), x_THP,
        p_C=C_TGN, p_D=D_H, p_out=out, tokens=tokens, rows=tables.rows, c_stride=C_TGN.stride(0),
        BLOCK_M=block_m, FENCES=needs_fences(x_THP.dtype, x_THP.device),
    )  # fmt: skip
    return out


def _launch(
    kernel: Any,
    table: dict[int, dict[str, Configuration]],
    shared: dict[str, Any],
    grid: tuple[int, ...],
    x_THP: Tensor,
    **given: Any,
) -> None:
    """`grid`: the dimensions behind that of the heads, whose channels are divided among programs."""
    configuration = by_architecture(table[x_THP.element_size()], x_THP.device)
    heads, width = x_THP.shape[1:]
    block_p = max(16, min(triton.next_power_of_2(width), configuration.channels))
    launch(
        kernel,
        (heads * triton.cdiv(width, block_p), *grid),
        **shared,
        **given,
        BLOCK_P=block_p,
        num_warps=configuration.warps,
        num_stages=configuration.stages,
    )
