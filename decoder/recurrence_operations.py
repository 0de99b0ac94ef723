"""Operations of compiled code for layers with memory in slots: Mamba-2, gated delta rule, short convolution."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.short_conv import ShortConvMixer
from kernels.linear import Packed
from kernels.native.structs import BLOCK_TOKENS, Code, DeltaShape, Kind, Op, Target, Weight

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
    shape: DeltaShape | None = None
    norm: Tensor | None = None
    terms: tuple[Tensor | None, ...]
    if isinstance(mixer, ShortConvMixer):
        code, terms = Code.SHORT_CONV, (mixer.conv_WD, mixer.conv_bias_D, None, None, None)
    elif isinstance(mixer, Mamba2Mixer):
        code, norm = Code.MAMBA, mixer.norm_weight
        terms = (mixer.conv_WC, mixer.conv_bias_C, mixer.A_H, mixer.D_H, mixer.dt_bias_H)
    else:
        code, spec, own, norm = Code.DELTA, mixer.spec, mixer.terms, mixer.norm_weight
        terms = (own.conv_WC, None, own.A_H, None, own.dt_bias_H)
        shape = DeltaShape(
            spec.num_key_heads, spec.num_value_heads, spec.key_head_dim, spec.value_head_dim, spec.conv_kernel,
            spec.norm_eps, spec.beta_scale,
        )  # fmt: skip
    op = Op(
        code, after.kind, after.k, Weight(), target, pointer(norm),
        mixer.windows.data_ptr(), mixer.windows.stride(0), mixer.states.data_ptr(), mixer.states.stride(0),
        *(pointer(term) for term in terms), None, 0,
        mixer.ring.data_ptr() if mixer.ring.numel() else None, mixer.ring.stride(0),
    )  # fmt: skip
    if shape is not None:
        op.delta = ctypes.addressof(shape)
    if isinstance(mixer, Mamba2Mixer):
        op.scale, op.norm_first = mixer.gate_scale, mixer.spec.gated_norm == "norm_first"
    if code == Code.SHORT_CONV:
        op.taps = mixer.spec.conv_kernel
    return op, shape
