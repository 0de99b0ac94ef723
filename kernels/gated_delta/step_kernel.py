"""The recurrence of the gated delta rule in Triton: one token per row, several, or the steps of a ring; see README.md.

A program holds `BLOCK_V` value channels of one head's state in registers, with all K rows: both products with the state
are sums inside the program. It reads the state once, and writes it once for each slot that stores it. All variants run
`_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_delta.reference import DeltaTerms
from kernels.launch import OF_ROWS, by_architecture, launch
from kernels.selective_state_update.kernel import softplus, token_stride
from kernels.slots import SlotRun
from kernels.state_replay.kernel import mix_ring


@dataclass(frozen=True)
class Part:
    """What a program holds of one head's state: a number of elements, divided between the threads of some warps."""

    elements: int
    warps: int


PARTS = {"sm_80": Part(2048, 4), "sm_90": Part(4096, 4), "sm_100": Part(2048, 4), "gfx942": Part(4096, 4)}
"""By architecture. README.md has the reasons."""


@triton.jit
def unit(b_x):
    """Normalises a vector to length 1, with `NORM_EPS` under the root."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) + 1e-6)


@triton.jit
def gates_of(b, a, rate, bias, beta_scale):
    """(decay, beta) of one token and head."""
    return tl.exp(rate * softplus(a.to(tl.float32) + bias)), tl.sigmoid(b.to(tl.float32)) * beta_scale


@triton.jit
def _step(b_h, b_k, b_v, decay, beta):
    """(the state after one token, the change of the values). Fused multiply-adds are explicit, so that all kernels
    round in the same way."""
    b_change = beta * tl.fma(tl.sum(b_h * b_k[:, None], 0), -decay, b_v)
    return tl.fma(tl.broadcast_to(b_k[:, None], b_h.shape), b_change[None, :], b_h * decay), b_change


@triton.jit
def _read(b_h, b_q, b_k, b_change, decay):
    """The output of a token, from the state before it."""
    return tl.fma(b_change, tl.sum(b_q * b_k, 0), decay * tl.sum(b_h * b_q[:, None], 0))


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _update_kernel(
    p_pool,  # [S, H, K, V]
    p_slots,  # [R, N], N >= T
    p_accepted,  # [R]; with SEVERAL
    p_lengths,  # [R]; with SEVERAL
    p_q,  # [R, T, J, K]
    p_k,  # [R, T, J, K]
    p_v,  # [R, T, H, V]
    p_b,  # [R, T, H]
    p_a,  # [R, T, H]
    p_A,  # [H] float32
    p_dt_bias,  # [H] float32
    p_out,  # [R, T, H, V]
    scale,
    beta_scale,
    slot_stride,
    slots_stride,
    q_stride,
    k_stride,
    v_stride,
    b_stride,
    a_stride,
    TOKENS: tl.constexpr,
    SEVERAL: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(0) // tl.cdiv(VALUE, BLOCK_V)
    o_v = (tl.program_id(0) % tl.cdiv(VALUE, BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    m_k, m_v = o_k < KEY, o_v < VALUE
    m_state = m_k[:, None] & m_v[None, :]

    p_slots += i_row * slots_stride
    read, length = 0, TOKENS
    if SEVERAL:
        read = tl.load(p_accepted + i_row) - 1
        length = tl.load(p_lengths + i_row)
    slot = tl.load(p_slots + read).to(tl.int64)
    p_pool += i_head * KEY * VALUE
    o_state = o_k[:, None] * VALUE + o_v[None, :]
    m_read = m_state & (slot >= 0)
    b_h = tl.load(p_pool + slot * slot_stride + o_state, mask=m_read, other=0.0, eviction_policy="evict_first")
    b_h = b_h.to(tl.float32)
    rate, bias = tl.load(p_A + i_head), tl.load(p_dt_bias + i_head)
    o_key = (i_head // SHARED) * KEY + o_k
    for token in tl.static_range(TOKENS):
        i_token = i_row * TOKENS + token
        b_q = unit(tl.load(p_q + i_token * q_stride + o_key, mask=m_k, other=0.0).to(tl.float32)) * scale
        b_k = unit(tl.load(p_k + i_token * k_stride + o_key, mask=m_k, other=0.0).to(tl.float32))
        b_v = tl.load(p_v + i_token * v_stride + i_head * VALUE + o_v, mask=m_v, other=0.0).to(tl.float32)
        b, a = tl.load(p_b + i_token * b_stride + i_head), tl.load(p_a + i_token * a_stride + i_head)
        decay, beta = gates_of(b, a, rate, bias, beta_scale)
        b_new, b_change = _step(b_h, b_k, b_v, decay, beta)
        b_y = _read(b_h, b_q, b_k, b_change, decay)
        b_h = b_new
        slot = tl.load(p_slots + token).to(tl.int64)
        m_write = m_state & (slot >= 0) & (token < length)
        tl.store(p_pool + slot * slot_stride + o_state, b_h.to(p_pool.dtype.element_ty), mask=m_write)
        tl.store(p_out + (i_token * HEADS + i_head) * VALUE + o_v, b_y.to(p_out.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _replay_kernel(
    p_states,  # [S, H, K, V]
    p_rings,  # [Q, L, X], X = C + 2 H
    p_batch_slots,  # [R]
    p_slots,  # [R]
    p_targets,  # [R]; with ADVANCE
    p_counts,  # [R]
    p_lengths,  # [R]; without ADVANCE
    p_mixed,  # [R, L, C]
    p_A,  # [H] float32
    p_dt_bias,  # [H] float32
    p_out,  # [R, T, H, V]; without ADVANCE
    scale,
    beta_scale,
    slot_stride,
    ring_stride,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ADVANCE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(0) // tl.cdiv(VALUE, BLOCK_V)
    o_v = (tl.program_id(0) % tl.cdiv(VALUE, BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    m_k, m_v = o_k < KEY, o_v < VALUE
    m_state = m_k[:, None] & m_v[None, :]
    p_out += (i_row * TOKENS * HEADS + i_head) * VALUE + o_v
    slot = tl.load(p_slots + i_row).to(tl.int64)
    length = 0
    if not ADVANCE:
        length = tl.load(p_lengths + i_row)
        length = tl.where(slot < 0, 0, length)
        for token in tl.static_range(TOKENS):
            b_zero = tl.zeros((BLOCK_V,), dtype=p_out.dtype.element_ty)
            tl.store(p_out + token * (HEADS * VALUE), b_zero, mask=m_v & (token >= length))
    if slot < 0:
        return
    p_states += (i_head * KEY + o_k[:, None]) * VALUE + o_v[None, :]
    b_h = tl.load(p_states + slot * slot_stride, mask=m_state, other=0.0, eviction_policy="evict_first").to(tl.float32)
    rate, bias = tl.load(p_A + i_head), tl.load(p_dt_bias + i_head)
    p_b = p_rings + tl.load(p_batch_slots + i_row).to(tl.int64) * ring_stride + CHANNELS + i_head
    p_q = p_mixed + i_row * STEPS * CHANNELS + (i_head // SHARED) * KEY + o_k
    p_k = p_q + (HEADS // SHARED) * KEY
    p_v = p_mixed + i_row * STEPS * CHANNELS + 2 * (HEADS // SHARED) * KEY + i_head * VALUE + o_v
    count = tl.load(p_counts + i_row)
    for step in range(count):
        b, a = tl.load(p_b + step * (CHANNELS + 2 * HEADS)), tl.load(p_b + step * (CHANNELS + 2 * HEADS) + HEADS)
        decay, beta = gates_of(b, a, rate, bias, beta_scale)
        b_k = unit(tl.load(p_k + step * CHANNELS, mask=m_k, other=0.0).to(tl.float32))
        b_v = tl.load(p_v + step * CHANNELS, mask=m_v, other=0.0).to(tl.float32)
        b_h, _ = _step(b_h, b_k, b_v, decay, beta)
    if ADVANCE:
        target = tl.load(p_targets + i_row).to(tl.int64)
        tl.store(p_states + target * slot_stride, b_h.to(p_states.dtype.element_ty), mask=m_state)
    else:
        for token in range(length):
            step = count + token
            b, a = tl.load(p_b + step * (CHANNELS + 2 * HEADS)), tl.load(p_b + step * (CHANNELS + 2 * HEADS) + HEADS)
            decay, beta = gates_of(b, a, rate, bias, beta_scale)
            b_q = unit(tl.load(p_q + step * CHANNELS, mask=m_k, other=0.0).to(tl.float32)) * scale
            b_k = unit(tl.load(p_k + step * CHANNELS, mask=m_k, other=0.0).to(tl.float32))
            b_v = tl.load(p_v + step * CHANNELS, mask=m_v, other=0.0).to(tl.float32)
            b_new, b_change = _step(b_h, b_k, b_v, decay, beta)
            b_y = _read(b_h, b_q, b_k, b_change, decay)
            b_h = b_new
            tl.store(p_out + token * (HEADS * VALUE), b_y.to(p_out.dtype.element_ty), mask=m_v)


def gated_delta_update(
    pool_SHKV: Tensor,
    slots_R: Tensor,
    q_RJK: Tensor,
    k_RJK: Tensor,
    v_RHV: Tensor,
    b_RH: Tensor,
    a_RH: Tensor,
    A_H: Tensor,
    dt_bias_H: Tensor,
    runs: Sequence[SlotRun] | None = None,
    beta_scale: float = 1.0,
) -> Tensor:
    """Like the reference, but q, k, v may have any float dtype and the result has v's. `runs` is not needed here.

    Rows may have any stride; heads and channels of a row are contiguous, and so is each slot. No host sync.
    """
    given = [x[:, None] for x in (q_RJK, k_RJK, v_RHV, b_RH, a_RH)]
    return _update(pool_SHKV, slots_R, None, None, given, A_H, dt_bias_H, beta_scale)[:, 0]


def gated_delta_tokens(
    pool_SHKV: Tensor,
    slots_RK: Tensor,
    accepted_R: Tensor,
    lengths_R: Tensor,
    q_RTJK: Tensor,
    k_RTJK: Tensor,
    v_RTHV: Tensor,
    b_RTH: Tensor,
    a_RTH: Tensor,
    A_H: Tensor,
    dt_bias_H: Tensor,
    beta_scale: float = 1.0,
) -> Tensor:
    """Like the reference for float32 states, with dtypes and strides as in `gated_delta_update`; the stride of rows
    must be that of tokens times T. The state stays in registers from token to token. No host sync."""
    assert pool_SHKV.dtype == torch.float32, "states stay in registers, and are not rounded there"
    given = [q_RTJK, k_RTJK, v_RTHV, b_RTH, a_RTH]
    return _update(pool_SHKV, slots_RK, accepted_R, lengths_R, given, A_H, dt_bias_H, beta_scale)


def _update(
    pool_SHKV: Tensor,
    slots: Tensor,
    accepted_R: Tensor | None,
    lengths_R: Tensor | None,
    given: list[Tensor],
    A_H: Tensor,
    dt_bias_H: Tensor,
    beta_scale: float,
) -> Tensor:
    """`given`: q, k, v, b and a, all `[R, T, ...]`."""
    q, k, v, b, a = given
    rows, tokens, heads, value = v.shape
    assert slots.stride(-1) == b.stride(-1) == a.stride(-1) == 1 and v.stride()[2:] == (value, 1)
    assert q.stride()[2:] == (q.shape[3], 1) == k.stride()[2:]
    out = torch.empty(rows, tokens, heads, value, dtype=v.dtype, device=v.device)
    blocks = _blocks(pool_SHKV, q.shape[2])
    launch(
        _update_kernel,
        (heads * triton.cdiv(value, blocks["BLOCK_V"]), rows),
        p_pool=pool_SHKV,
        p_slots=slots,
        p_accepted=slots if accepted_R is None else accepted_R,
        p_lengths=slots if lengths_R is None else lengths_R,
        p_q=q,
        p_k=k,
        p_v=v,
        p_b=b,
        p_a=a,
        p_A=A_H,
        p_dt_bias=dt_bias_H,
        p_out=out,
        scale=q.shape[3] ** -0.5,
        beta_scale=beta_scale,
        slot_stride=pool_SHKV.stride(0),
        slots_stride=slots.stride(0),
        q_stride=token_stride(q),
        k_stride=token_stride(k),
        v_stride=token_stride(v),
        b_stride=token_stride(b),
        a_stride=token_stride(a),
        TOKENS=tokens,
        SEVERAL=accepted_R is not None,
        **blocks,
    )
    return out


def gated_delta_replay(
    states_SHKV: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    lengths_R: Tensor,
    inputs_RTX: Tensor,
    terms: DeltaTerms,
    span: int,
    runs: Sequence[SlotRun] | None = None,
) -> Tensor:
    """Like the reference for float32 states; the result has the inputs' dtype. `span` and `runs` are not needed here.
    No host sync."""
    rows, tokens, _ = inputs_RTX.shape
    ring = (windows_SWC, rings_QLX, batch_slots_R, slots_R, counts_R)
    mixed = mix_ring(*ring, terms.conv_WC, None, lengths_R, inputs_RTX, None)
    heads, _, value = states_SHKV.shape[1:]
    out = torch.empty(rows, tokens, heads, value, dtype=inputs_RTX.dtype, device=inputs_RTX.device)
    _replay(states_SHKV, ring, mixed, terms, {"p_targets": slots_R, "p_lengths": lengths_R, "p_out": out})
    return out


def gated_delta_advance(
    states_SHKV: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    targets_R: Tensor,
    counts_R: Tensor,
    terms: DeltaTerms,
    span: int,
) -> None:
    """Like the reference for float32 states. `span` is not needed here. No host sync."""
    ring = (windows_SWC, rings_QLX, batch_slots_R, slots_R, counts_R)
    mixed = mix_ring(*ring, terms.conv_WC, None, None, None, targets_R)
    _replay(states_SHKV, ring, mixed, terms, {"p_targets": targets_R, "p_lengths": slots_R, "p_out": None})


def _replay(
    states_SHKV: Tensor,
    ring: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    mixed_RLC: Tensor,
    terms: DeltaTerms,
    given: dict[str, Any],
) -> None:
    """`ring`: windows, rings, batch slots, slots and counts. If `p_out` is None, states are written to the targets."""
    assert states_SHKV.dtype == torch.float32, "states stay in registers, and are not rounded there"
    _, rings_QLX, batch_slots_R, slots_R, counts_R = ring
    out = given.pop("p_out")
    blocks = _blocks(states_SHKV, terms.key_heads)
    launch(
        _replay_kernel,
        (states_SHKV.shape[1] * triton.cdiv(states_SHKV.shape[3], blocks["BLOCK_V"]), slots_R.shape[0]),
        p_states=states_SHKV,
        p_rings=rings_QLX,
        p_batch_slots=batch_slots_R,
        p_slots=slots_R,
        p_counts=counts_R,
        p_mixed=mixed_RLC,
        p_A=terms.A_H,
        p_dt_bias=terms.dt_bias_H,
        p_out=mixed_RLC if out is None else out,
        **given,
        scale=terms.key_dim**-0.5,
        beta_scale=terms.beta_scale,
        slot_stride=states_SHKV.stride(0),
        ring_stride=rings_QLX.stride(0),
        TOKENS=0 if out is None else out.shape[1],
        STEPS=rings_QLX.shape[1],
        CHANNELS=terms.conv_WC.shape[1],
        ADVANCE=out is None,
        **blocks,
    )


def _blocks(states_SHKV: Tensor, key_heads: int) -> dict[str, int]:
    """The compile-time sizes and warps of these kernels, which are the same for all of them and for any batch: how K is
    divided between threads decides the order of its sums."""
    heads, key, value = states_SHKV.shape[1:]
    assert states_SHKV.stride()[1:] == (key * value, value, 1)
    block_k = triton.next_power_of_2(key)
    part = by_architecture(PARTS, states_SHKV.device)
    most = part.elements // block_k
    return {
        "HEADS": heads,
        "SHARED": heads // key_heads,
        "KEY": key,
        "VALUE": value,
        "BLOCK_K": block_k,
        "BLOCK_V": max(1, min(most, triton.next_power_of_2(value))),
        "num_warps": part.warps,
    }
