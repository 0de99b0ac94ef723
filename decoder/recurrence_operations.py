"""Operations of compiled code for layers with memory in slots: Mamba-2, gated delta rule, short convolution."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.short_conv import ShortConvMixer
from kernels.linear import Packed
from kernels.native.structs import BLOCK_TOKENS, Code, DeltaShape, Kind, Op, Target

MAX_TAPS, MAX_SHORT_TAPS = 4, 8
"""Largest number of taps of a convolution in compiled code: before a recurrence, and of a short convolution."""

Recurrence = Mamba2Mixer | GatedDeltaMixer | ShortConvMixer


def recurrence_operations(
    mixer: Recurrence, after: Packed, bf16_rows: bool, pointer: Callable[[Tensor | None], int | None]
) -> tuple[list[Op], DeltaShape | None]:
    """The operation of a mixer between its projections, which also converts its rows to the operand of the product
    `after` it. If that form depends on a whole row, of which the mixer has only a group of heads, or some channels, at
    a time, a second operation converts the rows.

    `bf16_rows`: whether the rows before the second operation are bfloat16. `pointer`: returns the address of a tensor
    and keeps it alive; the caller must keep the returned shape alive.
    """
    steps = mixer.ring.shape[1] if mixer.ring.numel() else 0
    assert steps <= BLOCK_TOKENS, f"the ring has {steps} steps, compiled code has memory for {BLOCK_TOKENS}"
    itself = after.kind in (Kind.BF16, Kind.F32) and after.kpad == after.k
    target = Target.OPERAND if itself else Target.MID
    op, shape = _mixer_operation(mixer, after, target, pointer)
    if itself:
        return [op], shape
    op.bf16_rows = bf16_rows
    return [op, Op(Code.CONVERT, after.kind, after.k, bf16_rows=bf16_rows)], shape


def _mixer_operation(
    mixer: Recurrence, after: Packed, target: Target, pointer: Callable[[Tensor | None], int | None]
) -> tuple[Op, DeltaShape | None]:
    op = Op(
        kind=after.kind, width=after.k, target=target,
        windows=mixer.windows.data_ptr(), window_stride=mixer.windows.stride(0),
        states=mixer.states.data_ptr(), state_stride=mixer.states.stride(0),
        ring=mixer.ring.data_ptr() if mixer.ring.numel() else None, ring_stride=mixer.ring.stride(0),
    )  # fmt: skip
    if isinstance(mixer, ShortConvMixer):
        op.code, op.taps = Code.SHORT_CONV, mixer.spec.conv_kernel
        op.conv, op.conv_bias = pointer(mixer.conv_WD), pointer(mixer.conv_bias_D)
        return op, None
    op.norm = pointer(mixer.norm_weight)
    terms = mixer.terms
    op.conv, op.a, op.dt_bias = pointer(terms.conv_WC), pointer(terms.A_H), pointer(terms.dt_bias_H)
    if isinstance(mixer, Mamba2Mixer):
        op.code, op.conv_bias, op.d = Code.MAMBA, pointer(mixer.conv_bias_C), pointer(mixer.D_H)
        op.scale, op.norm_first = mixer.gate_scale, mixer.spec.gated_norm == "norm_first"
        return op, None
    spec = mixer.spec
    shape = DeltaShape(
        key_heads=spec.num_key_heads, heads=spec.num_value_heads, key=spec.key_head_dim, value=spec.value_head_dim,
        taps=spec.conv_kernel, eps=spec.norm_eps, beta_scale=spec.beta_scale,
    )  # fmt: skip
    op.code, op.delta = Code.DELTA, ctypes.addressof(shape)
    return op, shape
