"""Prompts under the gated delta rule in Triton, chunk by chunk; README.md has the maths and the reasons.

Three kernels. `_prepare_kernel` processes all chunks in parallel: it inverts the triangular system of each, which
depends only on keys and gates, and computes the change of the values without a state (U) and the state's contribution
to it (W). `_states_kernel` iterates over the chunks of a row with a head's state in registers, like that of
`chunk_scan`, and turns U into the changes. `_outputs_kernel` processes all chunks in parallel again. Chunks lie on the
absolute grid and are processed in order, so a row that is resumed at a chunk's end takes exactly the steps that it
would have taken without the interruption.

Queries and keys enter products unnormalised; their lengths are factors of rows and columns of the results.
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
from kernels.fence_kernel import fence, needs_fences, publish
from kernels.launch import ARCHITECTURES, by_architecture, launch
from kernels.scan_tables import ScanTables


class Configuration(NamedTuple):
    """Configuration of one kernel: largest number of value channels of a program, warps, and chunks with loads in
    flight."""

    values: int
    warps: int
    stages: int


# By bytes of an element: 2 has tensor cores, 4 takes exact products.
PREPARE = {
    # On an H200, 4 warps gave wrong numbers for heads of width 16 when products were not fenced; 8 gave right ones.
    2: dict.fromkeys(ARCHITECTURES, Configuration(128, 4, 1))
    | {"sm_90": Configuration(128, 8, 1), "sm_100": Configuration(64, 8, 1)},
    4: dict.fromkeys(ARCHITECTURES, Configuration(16, 8, 1)),
}
STATES = {
    2: dict.fromkeys(ARCHITECTURES, Configuration(32, 4, 2)) | {"gfx942": Configuration(32, 4, 1)},
    4: dict.fromkeys(ARCHITECTURES, Configuration(16, 8, 1)),
}
OUTPUTS = {
    2: dict.fromkeys(ARCHITECTURES, Configuration(64, 4, 1)),
    4: dict.fromkeys(ARCHITECTURES, Configuration(32, 8, 1)),
}


LONGEST = 128
"""Largest number of tokens of a chunk: `_inverse` computes at most 8 blocks of 16."""
PRECISION = {"sm_80": "tf32", "sm_90": "tf32", "sm_100": "tf32", "gfx942": "ieee"}
"""Precision of the products that invert a system for 16-bit results. For float32 it is inverted by substitution
alone."""


@triton.jit
def _lengths(b_x):
    """Factor that makes each row of a block a vector of length 1."""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)


@triton.jit
def _inverse(b_A, BLOCK: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, FENCES: tl.constexpr):
    """`(I + A)^-1` of a strictly lower triangular A. Let D be the diagonal blocks of I + A of size PART, which are
    inverted by substitution, row by row and all in parallel, R the rest of A, and M = D^-1 R, which is 0 when raised to
    the number of blocks. Then `(I + A)^-1 = (I - M)(I + M^2)(I + M^4) .. D^-1`."""
    MANY: tl.constexpr = BLOCK // PART
    o_b, o_i = tl.arange(0, MANY), tl.arange(0, PART)
    o_l = tl.arange(0, BLOCK)
    m_same = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_D = tl.sum(tl.where(m_same, tl.reshape(b_A, (MANY, PART, MANY, PART)), 0.0), 2)
    b_T = tl.where(o_i[None, :, None] == o_i[None, None, :], 1.0, 0.0) + tl.zeros((MANY, PART, PART), tl.float32)
    for i in range(1, PART):
        b_row = tl.sum(tl.where(o_i[None, :, None] == i, b_D, 0.0), 1)
        b_less = tl.sum(b_row[:, :, None] * b_T, 1)
        b_T = tl.where(o_i[None, :, None] == i, b_T - b_less[:, None, :], b_T)
    b_full = tl.reshape(tl.where(m_same, b_T[:, :, None, :], 0.0), (BLOCK, BLOCK))
    if MANY > 1:
        b_R = tl.where((o_l // PART)[:, None] == (o_l // PART)[None, :], 0.0, b_A)
        publish(FENCES)
        b_M = tl.dot(b_full, b_R, input_precision=PRECISION)
        b_P = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0) - b_M
        if MANY > 2:
            b_M = tl.dot(b_M, b_M, input_precision=PRECISION)
            b_P = tl.dot(b_P, b_M, acc=b_P, input_precision=PRECISION)
        if MANY > 4:
            b_M = tl.dot(b_M, b_M, input_precision=PRECISION)
            b_P = tl.dot(b_P, b_M, acc=b_P, input_precision=PRECISION)
        b_full = tl.dot(b_P, b_full, input_precision=PRECISION)
    return b_full


# Tables may have any alignment in their buffer; compiling for each alignment would stall the steps that meet a new one.
@triton.jit(do_not_specialize_on_alignment=["p_chunks"])
def _prepare_kernel(
    p_chunks,  # [C, 4] int32
    p_k,  # [T, J, K]
    p_v,  # [T, H, V]
    p_log_decay,  # [T, H] float32
    p_beta,  # [T, H] float32
    p_W,  # [T, H, K]
    p_U,  # [T, H, V]
    p_carry,  # [T, H] float32: the share of a token's change that is left at the chunk's end / the length of its key
    p_total,  # [C, H] float32: the share of the state that is left at the chunk's end
    k_stride,
    v_stride,
    log_decay_stride,
    beta_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    FENCES: tl.constexpr,
):
    i_head = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1).to(tl.int64)
    first = tl.load(p_chunks + i_chunk * 4 + 1).to(tl.int64)
    length = tl.load(p_chunks + i_chunk * 4 + 2) - first.to(tl.int32)
    if length <= 0:
        tl.store(p_total + i_chunk * HEADS + i_head, 1.0)
        return
    o_l, o_k, o_v = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_l, m_k = o_l < length, o_k < KEY
    m_lk = m_l[:, None] & m_k[None, :]
    p_k += first * k_stride + (i_head // SHARED) * KEY
    b_k = tl.load(p_k + o_l[:, None] * k_stride + o_k[None, :], mask=m_lk, other=0.0)
    p_gate = p_log_decay + first * log_decay_stride + i_head
    b_log = tl.load(p_gate + o_l * log_decay_stride, mask=m_l, other=0.0) * SCALE
    b_beta = tl.load(p_beta + first * beta_stride + i_head + o_l * beta_stride, mask=m_l, other=0.0)
    b_sum = tl.cumsum(b_log, 0)
    total = tl.sum(tl.where(o_l == BLOCK_L - 1, b_sum, 0.0), 0)  # with the same rounding as the sums
    b_size = _lengths(b_k)
    tl.store(p_carry + (first + o_l) * HEADS + i_head, tl.exp2(total - b_sum) * b_size, mask=m_l)
    tl.store(p_total + i_chunk * HEADS + i_head, tl.exp2(total))

    b_ratio = tl.where(o_l[:, None] > o_l[None, :], b_sum[:, None] - b_sum[None, :], float("-inf"))
    publish(FENCES)
    b_A = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * tl.exp2(b_ratio)
    b_A = b_A * (b_beta * b_size)[:, None] * b_size[None, :]
    b_T = _inverse(b_A, BLOCK_L, PART, PRECISION, FENCES) * b_beta[None, :]
    b_TW = (b_T * (tl.exp2(b_sum) * b_size)[None, :]).to(b_k.dtype)
    p_W += (first * HEADS + i_head) * KEY
    for begin in range(0, KEY, BLOCK_V):
        m_part = m_l[:, None] & (begin + o_v < KEY)[None, :]
        b_part = tl.load(p_k + o_l[:, None] * k_stride + (begin + o_v)[None, :], mask=m_part, other=0.0)
        b_W = tl.dot(b_TW, b_part, input_precision="ieee")
        p_to = p_W + o_l[:, None] * (HEADS * KEY) + (begin + o_v)[None, :]
        tl.store(p_to, b_W.to(p_W.dtype.element_ty), mask=m_part)
    b_TU = b_T.to(b_k.dtype)
    p_v += first * v_stride + i_head * VALUE
    p_U += (first * HEADS + i_head) * VALUE
    for begin in range(0, VALUE, BLOCK_V):
        m_part = m_l[:, None] & (begin + o_v < VALUE)[None, :]
        b_part = tl.load(p_v + o_l[:, None] * v_stride + (begin + o_v)[None, :], mask=m_part, other=0.0)
        b_U = tl.dot(b_TU, b_part, input_precision="ieee")
        p_to = p_U + o_l[:, None] * (HEADS * VALUE) + (begin + o_v)[None, :]
        tl.store(p_to, b_U.to(p_U.dtype.element_ty), mask=m_part)


@triton.jit(do_not_specialize_on_alignment=["p_rows", "p_chunks"])
def _states_kernel(
    p_pool,  # [S, H, K, V]
    p_slots,  # [R]
    p_initial,  # [R] bool
    p_rows,  # [R + 1] int32, chunks of a row
    p_chunks,  # [C, 4] int32
    p_k,  # [T, J, K]
    p_W,  # [T, H, K]
    p_U,  # [T, H, V], overwritten with the changes
    p_carry,  # [T, H] float32
    p_total,  # [C, H] float32
    p_before,  # [C, H, K, V]: the state before each chunk
    slot_stride,
    k_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FENCES: tl.constexpr,
):
    i_row = tl.program_id(1)
    chunk = tl.load(p_rows + i_row)
    behind = tl.load(p_rows + i_row + 1)
    if chunk == behind:
        return
    i_head = (tl.program_id(0) // tl.cdiv(VALUE, BLOCK_V)).to(tl.int64)
    i_v = (tl.program_id(0) % tl.cdiv(VALUE, BLOCK_V)) * BLOCK_V
    o_l, o_k, o_v = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    # In a full tile the masks are known to be true and cost nothing.
    m_k = (o_k < KEY) | (KEY == BLOCK_K)
    m_v = (o_v < VALUE - i_v) | (VALUE % BLOCK_V == 0)
    m_state = m_k[:, None] & m_v[None, :]
    o_state = o_k[:, None] * VALUE + o_v[None, :]
    p_pool += i_head * KEY * VALUE + i_v
    p_before += (chunk.to(tl.int64) * HEADS + i_head) * (KEY * VALUE) + i_v
    p_k += (i_head // SHARED) * KEY
    p_W += i_head * KEY
    p_U += i_head * VALUE + i_v
    p_carry += i_head
    p_total += chunk.to(tl.int64) * HEADS + i_head
    slot = tl.load(p_slots + i_row).to(tl.int64)
    b_h = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
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
        total = tl.load(p_total)
        p_total += HEADS
        o_token = first.to(tl.int64) + o_l
        m_l = o_l < last - first
        b_bits = b_h.to(p_before.dtype.element_ty)
        tl.store(p_before + o_state, b_bits, mask=m_state)
        fence(FENCES)
        p_before += HEADS * KEY * VALUE
        m_lk, m_lv = m_l[:, None] & m_k[None, :], m_l[:, None] & m_v[None, :]
        b_W = tl.load(p_W + o_token[:, None] * (HEADS * KEY) + o_k[None, :], mask=m_lk, other=0.0)
        b_k = tl.load(p_k + o_token[:, None] * k_stride + o_k[None, :], mask=m_lk, other=0.0)
        p_change = p_U + o_token[:, None] * (HEADS * VALUE) + o_v[None, :]
        b_U = tl.load(p_change, mask=m_lv, other=0.0)
        b_carry = tl.load(p_carry + o_token * HEADS, mask=m_l, other=0.0)
        b_change = b_U.to(tl.float32) - tl.dot(b_W, b_bits, input_precision="ieee")
        tl.store(p_change, b_change.to(b_U.dtype), mask=m_lv)
        b_change = (b_change * b_carry[:, None]).to(b_k.dtype)
        b_h = tl.dot(tl.trans(b_k), b_change, acc=b_h * total, input_precision="ieee")
        if target >= 0:
            tl.store(p_pool + target * slot_stride + o_state, b_h.to(p_pool.dtype.element_ty), mask=m_state)
        first, last = next_first, next_last
    if slot >= 0:
        tl.store(p_pool + slot * slot_stride + o_state, b_h.to(p_pool.dtype.element_ty), mask=m_state)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["p_rows", "p_chunks"])
def _outputs_kernel(
    p_rows,  # [R + 1] int32, chunks of a row
    p_chunks,  # [C, 4] int32
    p_before,  # [C, H, K, V]
    p_q,  # [T, J, K]
    p_k,  # [T, J, K]
    p_change,  # [T, H, V]
    p_log_decay,  # [T, H] float32
    p_out,  # [T, H, V]
    tokens,
    rows,
    scale,
    q_stride,
    k_stride,
    log_decay_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FENCES: tl.constexpr,
):
    i_chunk = tl.program_id(1).to(tl.int64)
    i_head = (tl.program_id(0) // tl.cdiv(VALUE, BLOCK_V)).to(tl.int64)
    i_v = (tl.program_id(0) % tl.cdiv(VALUE, BLOCK_V)) * BLOCK_V
    o_l, o_k, o_v = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_k = (o_k < KEY) | (KEY == BLOCK_K)
    m_v = (o_v < VALUE - i_v) | (VALUE % BLOCK_V == 0)
    o_out = o_l[:, None] * (HEADS * VALUE) + o_v[None, :]
    p_out += i_head * VALUE + i_v
    first = tl.load(p_chunks + i_chunk * 4 + 1).to(tl.int64)
    length = tl.load(p_chunks + i_chunk * 4 + 2).to(tl.int64) - first
    if length <= 0:
        # The entry after all chunks gives the end of the rows: tokens that pad a graph's buffers become zeros.
        if i_chunk == tl.load(p_rows + rows):
            for token in range(first, tokens, BLOCK_L):
                b_zero = tl.zeros((BLOCK_L, BLOCK_V), dtype=p_out.dtype.element_ty)
                m_out = (o_l < tokens - token)[:, None] & m_v[None, :]
                tl.store(p_out + token * (HEADS * VALUE) + o_out, b_zero, mask=m_out)
        return
    m_l = o_l < length
    m_lk, m_lv = m_l[:, None] & m_k[None, :], m_l[:, None] & m_v[None, :]
    o_key = (i_head // SHARED) * KEY + o_k[None, :]
    b_q = tl.load(p_q + (first + o_l)[:, None] * q_stride + o_key, mask=m_lk, other=0.0)
    b_k = tl.load(p_k + (first + o_l)[:, None] * k_stride + o_key, mask=m_lk, other=0.0)
    p_before += (i_chunk * HEADS + i_head) * (KEY * VALUE) + i_v
    m_state = m_k[:, None] & m_v[None, :]
    b_h = tl.load(p_before + o_k[:, None] * VALUE + o_v[None, :], mask=m_state, other=0.0)
    p_change += first * (HEADS * VALUE) + i_head * VALUE + i_v
    b_change = tl.load(p_change + o_out, mask=m_lv, other=0.0)
    p_gate = p_log_decay + first * log_decay_stride + i_head
    b_sum = tl.cumsum(tl.load(p_gate + o_l * log_decay_stride, mask=m_l, other=0.0) * SCALE, 0)
    b_size = _lengths(b_q) * scale
    publish(FENCES)
    b_y = tl.dot(b_q, b_h, input_precision="ieee") * (b_size * tl.exp2(b_sum))[:, None]
    b_ratio = tl.where(o_l[:, None] >= o_l[None, :], b_sum[:, None] - b_sum[None, :], float("-inf"))
    publish(FENCES)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * tl.exp2(b_ratio)
    b_scores = b_scores * b_size[:, None] * _lengths(b_k)[None, :]
    publish(FENCES)
    b_y = tl.dot(b_scores.to(b_change.dtype), b_change, acc=b_y, input_precision="ieee")
    tl.store(p_out + first * (HEADS * VALUE) + o_out, b_y.to(p_out.dtype.element_ty), mask=m_lv)


def gated_delta_scan(
    pool_SHKV: Tensor,
    slots_R: Tensor,
    has_initial_R: Tensor,
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    chunks: Sequence[Chunk] | Tensor,
    saves: Sequence[tuple[int, int]] | Tensor = (),
    tables: ScanTables | None = None,
) -> Tensor:
    """Like the reference for float32 states; q, k and v may have any one float dtype, which the result has too.
    `tables`, which replaces `chunks` and `saves`, is required.

    Rows may have any stride; heads and channels of a row are contiguous, and so is each slot. Tokens after the last row
    give zeros. No host sync. Raises `ValueError` without tables, and for chunks of more than `LONGEST` tokens.
    """
    if tables is None:
        raise ValueError("gated_delta_scan on a GPU needs tables (kernels.scan_tables)")
    if tables.chunk_size > LONGEST:
        raise ValueError(f"chunk_size {tables.chunk_size} is above the maximum of {LONGEST} tokens of this kernel")
    tokens, heads, value = v_THV.shape
    key_heads, key = k_TJK.shape[1:]
    assert pool_SHKV.dtype == torch.float32, "products of chunks have no states to round after every token"
    assert pool_SHKV.stride()[1:] == (key * value, value, 1) and v_THV.stride()[1:] == (value, 1)
    assert q_TJK.stride()[1:] == (key, 1) == k_TJK.stride()[1:] and q_TJK.dtype == k_TJK.dtype == v_THV.dtype
    assert log_decay_TH.stride(1) == 1 == beta_TH.stride(1)
    dtype, device, size = v_THV.dtype, v_THV.device, v_THV.element_size()
    entries = tables.chunks_C4.shape[0]
    weights = torch.empty(tokens, heads, key, dtype=dtype, device=device)
    changes = torch.empty(tokens, heads, value, dtype=dtype, device=device)
    carry = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    total = torch.empty(entries, heads, dtype=torch.float32, device=device)
    before = torch.empty(entries, heads, key, value, dtype=dtype, device=device)
    out = torch.empty(tokens, heads, value, dtype=dtype, device=device)
    sizes = {
        "p_chunks": tables.chunks_C4,
        "p_k": k_TJK,
        "k_stride": k_TJK.stride(0),
        "HEADS": heads,
        "SHARED": heads // key_heads,
        "KEY": key,
        "VALUE": value,
        "BLOCK_L": max(16, triton.next_power_of_2(tables.chunk_size)),
        "BLOCK_K": max(16, triton.next_power_of_2(key)),
        "FENCES": needs_fences(dtype, device),
    }
    part, precision = (sizes["BLOCK_L"], "ieee") if size == 4 else (16, by_architecture(PRECISION, device))
    _launch(
        _prepare_kernel, PREPARE, sizes, (heads, entries), v_THV, split=False,
        p_v=v_THV, p_log_decay=log_decay_TH, p_beta=beta_TH, p_W=weights, p_U=changes, p_carry=carry, p_total=total,
        v_stride=v_THV.stride(0), log_decay_stride=log_decay_TH.stride(0), beta_stride=beta_TH.stride(0),
        SCALE=LOG2_E, PART=part, PRECISION=precision,
    )  # fmt: skip
    _launch(
        _states_kernel, STATES, sizes, (heads, slots_R.shape[0]), v_THV,
        p_pool=pool_SHKV, p_slots=slots_R, p_initial=has_initial_R, p_rows=tables.chunks_R1, p_W=weights, p_U=changes,
        p_carry=carry, p_total=total, p_before=before, slot_stride=pool_SHKV.stride(0),
    )  # fmt: skip
    _launch(
        _outputs_kernel, OUTPUTS, sizes, (heads, entries), v_THV,
        p_rows=tables.chunks_R1, p_before=before, p_q=q_TJK, p_change=changes, p_log_decay=log_decay_TH, p_out=out,
        tokens=tokens, rows=tables.rows, scale=key**-0.5, q_stride=q_TJK.stride(0),
        log_decay_stride=log_decay_TH.stride(0), SCALE=LOG2_E,
    )  # fmt: skip
    return out


def _launch(
    kernel: Any,
    table: dict[int, dict[str, Configuration]],
    sizes: dict[str, Any],
    grid: tuple[int, int],
    v_THV: Tensor,
    *,
    split: bool = True,
    **given: Any,
) -> None:
    """`grid`: heads and the second dimension; with `split`, the value channels of a head are divided among programs."""
    configuration = by_architecture(table[v_THV.element_size()], v_THV.device)
    value = v_THV.shape[2]
    block_v = max(16, min(triton.next_power_of_2(value), configuration.values))
    launch(
        kernel,
        (grid[0] * (triton.cdiv(value, block_v) if split else 1), grid[1]),
        **sizes,
        **given,
        BLOCK_V=block_v,
        num_warps=configuration.warps,
        num_stages=configuration.stages,
    )
