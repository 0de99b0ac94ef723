"""Products of plain rows with weights that stay quantised, in Triton; layouts and maths are in README.md.

One program computes a tile of rows and outputs. For each block of inputs it reads the weight's bytes, converts them to
the rows' dtype in registers (all values are exact in bfloat16), multiplies, and scales the block's sums in float32. A
byte of a four-bit weight has two neighbouring inputs, so even and odd inputs are two products, unless a group of int4
has only 16 inputs: hardware multiplies at least 16. Scales of nvfp4 change every 16 inputs and are multiplied into the
converted values, which stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.launch import by_architecture, launch, one_instruction
from kernels.linear.quantised import NVFP4_GROUP, Quantised, check_groups
from kernels.linear.rows_kernel import rows_product

INT8, INT4, FP8, NVFP4 = (tl.constexpr(code) for code in range(4))
CODES = {"int8": 0, "int4": 1, "fp8": 2, "nvfp4": 3}
OUTPUTS = 64
"""Outputs per tile."""
INPUTS = 128
"""Largest number of inputs per block."""
TALLEST = {"sm_80": 64, "sm_90": 32, "sm_100": 32, "gfx942": 64}
"""Largest number of rows per tile with weights in 8 bits. From 64 rows on, sm_90 and sm_100 would use another matrix
instruction, so that a row's bits would depend on the number of rows."""
STAGES = {"sm_80": 4, "sm_90": 6, "sm_100": 6, "gfx942": 2}
"""Stages of the load pipeline with rows of 16 bits, as for products of few plain rows. With 2, a block is loaded only
after the one before it has been multiplied."""
WARPS = {"sm_80": 4, "sm_90": 8, "sm_100": 8, "gfx942": 4}
"""Warps with weights in 4 bits and more than 16 rows; some sizes spill with the other number."""
LEAST_INPUTS = tl.constexpr(16)
"""Least inputs of one `tl.dot`: a limit of the compiler, which the interpreter does not check."""


@triton.jit
def _e4m3(b_bytes):
    """uint8 -> float32. NaN is read as 480; weights contain none."""
    bits = b_bytes.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    whole = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, whole)
    return tl.where(bits >= 128, -size, size)


@triton.jit
def _e2m1(b_codes):
    """Codes 0 to 15 -> float32."""
    exponent, mantissa = (b_codes >> 1) & 3, b_codes & 1
    small = mantissa.to(tl.float32) * 0.5
    whole = ((2 + mantissa) << exponent).to(tl.float32) * 0.25
    size = tl.where(exponent == 0, small, whole)
    return tl.where(b_codes >= 8, -size, size)


@triton.jit
def _int4(b_codes, p_zeros, m_n, ZEROS: tl.constexpr):
    """Codes `[N, inputs]` of int4 -> float32, without their scale."""
    if ZEROS:
        b_zero = tl.load(p_zeros, mask=m_n, other=0).to(tl.int32)
        return (b_codes - b_zero[:, None]).to(tl.float32)
    return (b_codes - 8).to(tl.float32)


@triton.jit
def _nvfp4(b_codes, b_scale):
    """Codes of the even or odd inputs `[N, 8 * groups]` -> float32, times the scales of their groups `[N, groups]`."""
    b_values = tl.reshape(_e2m1(b_codes), (b_scale.shape[0], b_scale.shape[1], 8)) * b_scale[:, :, None]
    return tl.reshape(b_values, (b_codes.shape[0], b_codes.shape[1]))


@triton.jit
def block_product(
    p_x,  # pointers [M, 1] to the first input of rows
    p_values,  # pointers [N, 1] to the first byte of outputs
    p_scale,
    p_zeros,
    p_order,  # int64: the input of each column; with ORDERED
    m_m,
    m_n,
    o_groups,  # [N]: offset of each output's first group in the scales
    k,
    k_count,
    row_bytes,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`[M, N]` float32: the part of the product for inputs `[k, k + BLOCK_K)`, scaled if scales belong to groups of
    inputs."""
    element = p_x.dtype.element_ty
    o_scale = o_groups + (k // GROUP if GROUP > 0 else 0)
    o_k = k + tl.arange(0, BLOCK_K)
    m_k = o_k < k_count
    o_x = tl.load(p_order + o_k, mask=m_k, other=0) if ORDERED else o_k
    b_x = tl.load(p_x + o_x[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
    if KIND == INT8 or KIND == FP8:
        b_values = tl.load(p_values + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0)
        if KIND == FP8:
            b_w = _e4m3(b_values).to(element)
        else:
            b_w = b_values.to(tl.float32)
            if ZEROS:
                b_w += 128.0 - tl.load(p_zeros + o_scale, mask=m_n, other=0).to(tl.float32)[:, None]
            b_w = b_w.to(element)
        b_sum = tl.dot(b_x, tl.trans(b_w), input_precision="ieee")
    elif BLOCK_K < 2 * LEAST_INPUTS:  # of int4: the halves of a block have too few inputs, so bytes are read twice
        m_values = m_n[:, None] & m_k[None, :]
        b_bytes = tl.load(p_values + (o_k // 2)[None, :], mask=m_values, other=0).to(tl.int32)
        b_codes = (b_bytes >> (4 * (o_k % 2))[None, :]) & 15
        b_w = _int4(b_codes, p_zeros + o_scale, m_n, ZEROS).to(element)
        b_sum = tl.dot(b_x, tl.trans(b_w), input_precision="ieee")
    else:
        # Bytes and rows are loaded as they lie in memory, and rows are divided into even and odd inputs in registers:
        # loads with a stride, or a mask that is not one comparison with a multiple of 16, would have a byte or two.
        o_pair = tl.multiple_of(k // 2, BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        m_pair = o_pair < row_bytes
        b_bytes = tl.load(p_values + o_pair[None, :], mask=m_n[:, None] & m_pair[None, :], other=0).to(tl.int32)
        b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], BLOCK_K // 2, 2)))
        if KIND == NVFP4:
            o_group = tl.multiple_of(k // 16, BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)
            m_group = m_n[:, None] & (o_group * 16 < k_count)[None, :]
            b_scale = _e4m3(tl.load(p_scale + o_groups[:, None] + o_group[None, :], mask=m_group, other=0))
            b_sum = tl.dot(b_even, tl.trans(_nvfp4(b_bytes & 15, b_scale).to(element)), input_precision="ieee")
            b_w = _nvfp4(b_bytes >> 4, b_scale).to(element)
        else:
            b_w = _int4(b_bytes & 15, p_zeros + o_scale, m_n, ZEROS).to(element)
            b_sum = tl.dot(b_even, tl.trans(b_w), input_precision="ieee")
            b_w = _int4(b_bytes >> 4, p_zeros + o_scale, m_n, ZEROS).to(element)
        b_sum = tl.dot(b_odd, tl.trans(b_w), b_sum, input_precision="ieee")
    if KIND != NVFP4 and GROUP > 0:
        b_sum = b_sum * tl.load(p_scale + o_scale, mask=m_n, other=0.0)[None, :]
    return b_sum


@triton.jit
def row_scaled(total, p_scale, p_outer, o_n, m_n, KIND: tl.constexpr, GROUP: tl.constexpr, DIVIDED: tl.constexpr):
    """Applies scales of whole outputs to the sums `[M, N]`: nvfp4's outer scales, or one scale for all inputs."""
    if KIND == NVFP4:
        b_outer = tl.load(p_outer + o_n, mask=m_n, other=1.0)
        total = total / b_outer[None, :] if DIVIDED else total * b_outer[None, :]
    elif GROUP == 0:
        total = total * tl.load(p_scale + o_n, mask=m_n, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["m_count"])
def _linear_kernel(
    p_x,  # [M, K]
    p_values,  # [N, K] bytes, or [N, K / 2]
    p_scale,  # [N, groups] float32; nvfp4: e4m3 bytes
    p_zeros,  # int8, int4: [N, groups] uint8
    p_outer,  # nvfp4: [N] float32
    p_bias,  # [N], of the rows' dtype
    p_out,  # [M, N]
    x_stride,
    values_stride,
    row_bytes,
    groups,
    m_count,
    n_count,
    k_count,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    ZEROS: tl.constexpr,
    DIVIDED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP, or is a multiple of it for nvfp4
):
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < m_count, o_n < n_count
    p_x += o_m[:, None].to(tl.int64) * x_stride
    p_values += o_n[:, None].to(tl.int64) * values_stride
    o_groups = o_n.to(tl.int64) * groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, k_count, BLOCK_K):
        total += block_product(
            p_x, p_values, p_scale, p_zeros, p_x, m_m, m_n, o_groups, k, k_count, row_bytes, KIND, GROUP, ZEROS,
            False, BLOCK_K,
        )  # fmt: skip
    total = row_scaled(total, p_scale, p_outer, o_n, m_n, KIND, GROUP, DIVIDED)
    if BIAS:
        total += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    p_out += o_m[:, None].to(tl.int64) * n_count + o_n[None, :]
    tl.store(p_out, total.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@dataclass(frozen=True)
class Form:
    """How a kernel reads a weight, as compile-time constants."""

    arguments: dict[str, Any]
    """KIND, GROUP, ZEROS, DIVIDED."""
    block: int
    """Inputs per block."""
    outputs: int
    """Outputs per tile."""
    tallest: int
    """Largest number of rows per tile: more would spill on sm_80."""
    stages: int
    """Stages of the load pipeline."""

    @classmethod
    def of(cls, weight: Quantised, dtype: torch.dtype) -> Form:
        """`dtype`: of the rows. `ValueError` for groups that are not multiples of 16 inputs."""
        group, exact = weight.scale_group, dtype == torch.float32  # no tensor cores for float32: smaller tiles
        whole = not weight.in_groups
        outputs, block = (16, 32) if exact else (OUTPUTS, INPUTS)
        if not whole and weight.kind != "nvfp4":
            check_groups(weight)
            block = min(block, group & -group)
        arguments = {
            "KIND": CODES[weight.kind], "GROUP": NVFP4_GROUP if weight.kind == "nvfp4" else 0 if whole else group,
            "ZEROS": weight.zeros is not None, "DIVIDED": weight.divided,
        }  # fmt: skip
        tallest = by_architecture(TALLEST, weight.values.device)
        narrow = weight.kind in ("int4", "nvfp4") or not whole
        tallest = 16 if exact else 32 if narrow else tallest
        stages = 2 if exact else by_architecture(STAGES, weight.values.device)
        return cls(arguments, block, outputs, tallest, stages)


def pointers(weight: Quantised) -> dict[str, Tensor]:
    """The tensors of a weight as arguments of the kernels; an arbitrary tensor stands for those that it lacks."""
    as_bytes = weight.values if weight.kind == "int8" else weight.values.view(torch.uint8)
    return {
        "p_values": as_bytes,
        "p_scale": weight.scale.view(torch.uint8) if weight.kind == "nvfp4" else weight.scale,
        "p_zeros": as_bytes if weight.zeros is None else weight.zeros,
        "p_outer": weight.scale if weight.outer is None else weight.outer,
    }


def quantised_linear(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """Like the reference. No host sync. `ValueError` for groups that are not multiples of 16 inputs."""
    rows, inner = x.shape
    outputs, form, tensors = weight.shape[0], Form.of(weight, x.dtype), pointers(weight)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    tall = max(16, min(form.tallest, triton.next_power_of_2(max(1, rows))))
    launch(
        _linear_kernel,
        (triton.cdiv(outputs, form.outputs), triton.cdiv(rows, tall)),
        p_x=x,
        **tensors,
        p_bias=x if bias is None else bias,
        p_out=out,
        x_stride=x.stride(0),
        values_stride=tensors["p_values"].stride(0),
        row_bytes=weight.values.shape[-1],
        groups=weight.scale.shape[1],
        m_count=rows,
        n_count=outputs,
        k_count=inner,
        **form.arguments,
        BIAS=bias is not None,
        BLOCK_M=tall,
        BLOCK_N=form.outputs,
        BLOCK_K=form.block,
        num_warps=by_architecture(WARPS, x.device) if tall > 16 and weight.kind in ("int4", "nvfp4") else 4,
        num_stages=form.stages,
        **one_instruction(x.device),
    )
    return out


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Like the reference. A row of 16 bits gives the same numbers in any company; rows of float32 are multiplied by
    cuBLAS, whose results depend in the last bits on the number of rows. No host sync."""
    if x.dtype.itemsize != 2 or not x.shape[0]:
        return F.linear(x, weight, bias)
    return rows_product(x, weight, bias)
