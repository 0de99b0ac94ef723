"""Several tokens after a state and a ring of inputs, in Triton; README.md has the maths and bytes.

Each operation is two kernels. `_mix_kernel` convolves the window and the ring of a row and writes new inputs to the
ring. Then `_tokens_kernel` reads a state once, multiplies it with C of each new token, and adds the contributions of
the ring's steps, or `_advance_kernel` advances a state by the ring's steps and writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.causal_conv1d.kernel import BLOCK_CHANNELS, MAX_TAPS, convolve, keep_window, load_weights, load_window
from kernels.exponentials import LOG2_E
from kernels.launch import OF_ROWS, by_architecture, launch
from kernels.selective_state_update.kernel import ELEMENTS, step_size
from kernels.slots import SlotRun
from kernels.state_replay.reference import MambaTerms


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _mix_kernel(
    p_windows,  # [S, W - 1, C]
    p_rings,  # [Q, L, X], X = C + H
    p_batch_slots,  # [R]
    p_slots,  # [R]
    p_targets,  # [R]; with ADVANCE
    p_counts,  # [R]
    p_lengths,  # [R]; without ADVANCE
    p_inputs,  # [R, T, X]; without ADVANCE
    p_weight,  # [W, C] float32
    p_bias,  # [C] float32
    p_mixed,  # [R, L, C]
    slot_stride,
    ring_stride,
    input_stride,
    token_stride,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ADVANCE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    if slot < 0:
        return
    count = tl.load(p_counts + i_row)
    end = count
    if not ADVANCE:
        end = count + tl.load(p_lengths + i_row)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_x, m_c = o_c < WIDTH, o_c < CHANNELS
    p_ring = p_rings + tl.load(p_batch_slots + i_row).to(tl.int64) * ring_stride + o_c
    past = load_window(p_windows + slot * slot_stride, o_c, m_c, CHANNELS, TAPS)
    weights, bias = load_weights(p_weight, p_bias, o_c, m_c, CHANNELS, TAPS, HAS_BIAS)
    for step in range(end):
        b_x = tl.load(p_ring + step * WIDTH, mask=m_x & (step < count), other=0.0)
        if not ADVANCE:
            new = step - count
            p_new = p_inputs + i_row * input_stride + new * token_stride + o_c
            b_new = tl.load(p_new, mask=m_x & (new >= 0), other=0.0).to(b_x.dtype)
            tl.store(p_ring + step * WIDTH, b_new, mask=m_x & (new >= 0))
            b_x = tl.where(new >= 0, b_new, b_x)
        b_y = convolve(past, b_x, weights, bias, TAPS, SILU)
        tl.store(p_mixed + (i_row * STEPS + step) * CHANNELS + o_c, b_y.to(p_mixed.dtype.element_ty), mask=m_c)
        past = past[1:] + (b_x.to(p_windows.dtype.element_ty),)
    if ADVANCE:
        # The target may be the slot: all threads have read its window.
        tl.debug_barrier()
        target = tl.load(p_targets + i_row).to(tl.int64)
        keep_window(p_windows + target * slot_stride, past, o_c, m_c, CHANNELS, TAPS)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _tokens_kernel(
    p_states,  # [S, H, P, N]
    p_rings,  # [Q, L, X]
    p_batch_slots,  # [R]
    p_slots,  # [R]
    p_counts,  # [R]
    p_lengths,  # [R]
    p_mixed,  # [R, L, C]
    p_A,  # [H] float32
    p_D,  # [H] float32
    p_dt_bias,  # [H] float32
    p_out,  # [R, T, H, P]
    limit_low,
    limit_high,
    slot_stride,
    ring_stride,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    i_head = tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_P)
    o_p = (tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_P)) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n, o_l = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_L)
    m_p, m_n = o_p < WIDTH, o_n < STATE
    p_out += (i_row * TOKENS * HEADS + i_head) * WIDTH + o_p
    slot = tl.load(p_slots + i_row).to(tl.int64)
    if slot < 0:
        for token in tl.static_range(TOKENS):
            p_zero = p_out + token * (HEADS * WIDTH)
            tl.store(p_zero, tl.zeros((BLOCK_P,), dtype=p_out.dtype.element_ty), mask=m_p)
        return
    p_state = p_states + slot * slot_stride + (i_head * WIDTH + o_p[:, None]) * STATE + o_n[None, :]
    b_h = tl.load(p_state, mask=m_p[:, None] & m_n[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
    count = tl.load(p_counts + i_row)
    m_l = o_l < count + tl.load(p_lengths + i_row)
    p_dt = p_rings + tl.load(p_batch_slots + i_row).to(tl.int64) * ring_stride + CHANNELS + i_head
    b_dt = tl.load(p_dt + o_l * (CHANNELS + HEADS), mask=m_l, other=0.0)
    b_dt = step_size(b_dt, tl.load(p_dt_bias + i_head), limit_low, limit_high, LIMITED)
    b_dt = tl.where(m_l, b_dt, 0.0)
    b_sum = tl.cumsum(b_dt * (tl.load(p_A + i_head) * SCALE), 0)
    o_group = HEADS * WIDTH + (i_head // (HEADS // GROUPS)) * STATE + o_n
    p_mixed += i_row * STEPS * CHANNELS
    o_step = o_l[:, None] * CHANNELS
    m_ln = m_l[:, None] & m_n[None, :]
    b_B = tl.load(p_mixed + o_step + o_group[None, :], mask=m_ln, other=0.0).to(tl.float32)
    p_x = p_mixed + i_head * WIDTH + o_p
    b_x = tl.load(p_x[None, :] + o_step, mask=m_l[:, None] & m_p[None, :], other=0.0).to(tl.float32)
    d = tl.load(p_D + i_head)
    for token in tl.static_range(TOKENS):
        step = count + token
        known = step < BLOCK_L
        p_C = p_mixed + step * CHANNELS + GROUPS * STATE + o_group
        b_C = tl.load(p_C, mask=m_n & known & (token < tl.load(p_lengths + i_row)), other=0.0).to(tl.float32)
        here = tl.sum(tl.where(o_l == step, b_sum, 0.0), 0)
        # After the ring's end `here` is not one of the sums, and its difference from one could overflow exp2.
        b_decay = tl.where((o_l <= step) & known, here - b_sum, float("-inf"))
        b_weight = tl.sum(b_B * b_C[None, :], 1) * tl.exp2(b_decay) * b_dt + tl.where(o_l == step, d, 0.0)
        b_y = tl.sum(b_h * b_C[None, :], 1) * tl.exp2(here) + tl.sum(b_weight[:, None] * b_x, 0)
        tl.store(p_out + token * (HEADS * WIDTH), b_y.to(p_out.dtype.element_ty), mask=m_p)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _advance_kernel(
    p_states,  # [S, H, P, N]
    p_rings,  # [Q, L, X]
    p_batch_slots,  # [R]
    p_slots,  # [R]
    p_targets,  # [R]
    p_counts,  # [R]
    p_mixed,  # [R, L, C]
    p_A,  # [H] float32
    p_dt_bias,  # [H] float32
    limit_low,
    limit_high,
    slot_stride,
    ring_stride,
    STEPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    if slot < 0:
        return
    i_head = tl.program_id(0) // tl.cdiv(WIDTH, BLOCK_P)
    o_p = (tl.program_id(0) % tl.cdiv(WIDTH, BLOCK_P)) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    m_p, m_n = o_p < WIDTH, o_n < STATE
    m_state = m_p[:, None] & m_n[None, :]
    p_states += (i_head * WIDTH + o_p[:, None]) * STATE + o_n[None, :]
    b_h = tl.load(p_states + slot * slot_stride, mask=m_state, other=0.0).to(tl.float32)
    a, bias = tl.load(p_A + i_head), tl.load(p_dt_bias + i_head)
    p_dt = p_rings + tl.load(p_batch_slots + i_row).to(tl.int64) * ring_stride + CHANNELS + i_head
    p_x = p_mixed + i_row * STEPS * CHANNELS + i_head * WIDTH + o_p
    p_B = p_mixed + i_row * STEPS * CHANNELS + HEADS * WIDTH + (i_head // (HEADS // GROUPS)) * STATE + o_n
    for step in range(tl.load(p_counts + i_row)):
        dt = step_size(tl.load(p_dt + step * (CHANNELS + HEADS)), bias, limit_low, limit_high, LIMITED)
        b_x = tl.load(p_x + step * CHANNELS, mask=m_p, other=0.0).to(tl.float32)
        b_B = tl.load(p_B + step * CHANNELS, mask=m_n, other=0.0).to(tl.float32)
        b_h = b_h * tl.exp(dt * a) + (b_x * dt)[:, None] * b_B[None, :]
    target = tl.load(p_targets + i_row).to(tl.int64)
    tl.store(p_states + target * slot_stride, b_h.to(p_states.dtype.element_ty), mask=m_state)


def replay_tokens(
    states_SHPN: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    lengths_R: Tensor,
    inputs_RTX: Tensor,
    terms: MambaTerms,
    span: int,
    runs: Sequence[SlotRun] | None = None,
) -> Tensor:
    """Like the reference for float32 states; the result has the inputs' dtype. `span` and `runs` are not needed here.
    No host sync."""
    rows, tokens, _ = inputs_RTX.shape
    heads, width = states_SHPN.shape[1:3]
    mixed = mix_ring(
        windows_SWC, rings_QLX, batch_slots_R, slots_R, counts_R, terms.conv_WC, terms.conv_bias_C, lengths_R,
        inputs_RTX, None,
    )  # fmt: skip
    out = torch.empty(rows, tokens, heads, width, dtype=inputs_RTX.dtype, device=inputs_RTX.device)
    blocks = _blocks(states_SHPN, rings_QLX, terms)
    launch(
        _tokens_kernel,
        (heads * triton.cdiv(width, blocks["BLOCK_P"]), rows),
        p_states=states_SHPN,
        p_rings=rings_QLX,
        p_batch_slots=batch_slots_R,
        p_slots=slots_R,
        p_counts=counts_R,
        p_lengths=lengths_R,
        p_mixed=mixed,
        p_A=terms.A_H,
        p_D=terms.D_H,
        p_dt_bias=terms.dt_bias_H,
        p_out=out,
        limit_low=terms.limit[0],
        limit_high=terms.limit[1],
        slot_stride=states_SHPN.stride(0),
        ring_stride=rings_QLX.stride(0),
        SCALE=LOG2_E,
        TOKENS=tokens,
        BLOCK_L=triton.next_power_of_2(rings_QLX.shape[1]),
        **blocks,
        num_warps=8,
    )
    return out


def replay_advance(
    states_SHPN: Tensor,
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    targets_R: Tensor,
    counts_R: Tensor,
    terms: MambaTerms,
    span: int,
) -> None:
    """Like the reference for float32 states. `span` is not needed here. No host sync."""
    heads, width = states_SHPN.shape[1:3]
    mixed = mix_ring(
        windows_SWC,
        rings_QLX,
        batch_slots_R,
        slots_R,
        counts_R,
        terms.conv_WC,
        terms.conv_bias_C,
        None,
        None,
        targets_R,
    )
    blocks = _blocks(states_SHPN, rings_QLX, terms)
    launch(
        _advance_kernel,
        (heads * triton.cdiv(width, blocks["BLOCK_P"]), slots_R.shape[0]),
        p_states=states_SHPN,
        p_rings=rings_QLX,
        p_batch_slots=batch_slots_R,
        p_slots=slots_R,
        p_targets=targets_R,
        p_counts=counts_R,
        p_mixed=mixed,
        p_A=terms.A_H,
        p_dt_bias=terms.dt_bias_H,
        limit_low=terms.limit[0],
        limit_high=terms.limit[1],
        slot_stride=states_SHPN.stride(0),
        ring_stride=rings_QLX.stride(0),
        **blocks,
        num_warps=4,
    )


def _blocks(states_SHPN: Tensor, rings_QLX: Tensor, terms: MambaTerms) -> dict[str, int]:
    """The compile-time sizes of both state kernels."""
    heads, width, state = states_SHPN.shape[1:]
    assert states_SHPN.dtype == torch.float32, "states stay in registers, and are not rounded there"
    assert states_SHPN.stride()[1:] == (width * state, state, 1)
    block_n = triton.next_power_of_2(state)
    most = by_architecture(ELEMENTS, states_SHPN.device) // block_n
    return {
        "STEPS": rings_QLX.shape[1],
        "CHANNELS": terms.conv_WC.shape[1],
        "HEADS": heads,
        "WIDTH": width,
        "STATE": state,
        "GROUPS": terms.groups,
        "LIMITED": terms.limit != (0.0, float("inf")),
        "BLOCK_P": max(1, min(most, triton.next_power_of_2(width))),
        "BLOCK_N": block_n,
    }


def mix_ring(
    windows_SWC: Tensor,
    rings_QLX: Tensor,
    batch_slots_R: Tensor,
    slots_R: Tensor,
    counts_R: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    lengths_R: Tensor | None,
    inputs_RTX: Tensor | None,
    targets_R: Tensor | None,
    silu: bool = True,
) -> Tensor:
    """The convolution of each row's valid steps and new inputs, `[R, L, C]`, after SiLU, if `silu`; new inputs are
    written to the ring after the valid steps. With `targets`, the windows after the steps are stored in these slots.
    Other steps, and rows with slot -1, are not written."""
    steps, size = rings_QLX.shape[1:]
    taps, channels = weight_WC.shape
    assert 2 <= taps <= MAX_TAPS and windows_SWC.stride()[1:] == (channels, 1) and rings_QLX.stride()[1:] == (size, 1)
    assert inputs_RTX is None or inputs_RTX.stride(2) == 1
    of_rows = (batch_slots_R, slots_R, counts_R, lengths_R, targets_R)
    assert all(each is None or each.is_contiguous() for each in of_rows)
    mixed = torch.empty(slots_R.shape[0], steps, channels, dtype=windows_SWC.dtype, device=windows_SWC.device)
    launch(
        _mix_kernel,
        (slots_R.shape[0], triton.cdiv(size, BLOCK_CHANNELS)),
        p_windows=windows_SWC,
        p_rings=rings_QLX,
        p_batch_slots=batch_slots_R,
        p_slots=slots_R,
        p_targets=slots_R if targets_R is None else targets_R,
        p_counts=counts_R,
        p_lengths=counts_R if lengths_R is None else lengths_R,
        p_inputs=rings_QLX if inputs_RTX is None else inputs_RTX,
        p_weight=weight_WC,
        p_bias=weight_WC if bias_C is None else bias_C,
        p_mixed=mixed,
        slot_stride=windows_SWC.stride(0),
        ring_stride=rings_QLX.stride(0),
        input_stride=0 if inputs_RTX is None else inputs_RTX.stride(0),
        token_stride=0 if inputs_RTX is None else inputs_RTX.stride(1),
        STEPS=steps,
        CHANNELS=channels,
        WIDTH=size,
        TAPS=taps,
        HAS_BIAS=bias_C is not None,
        SILU=silu,
        ADVANCE=targets_R is not None,
        BLOCK_C=BLOCK_CHANNELS,
        num_warps=1,
    )
    return mixed
