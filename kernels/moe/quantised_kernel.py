"""Grouped products of experts whose weights stay quantised, in Triton; kernels/linear/README.md has the layouts.

One program computes a tile of one expert's pairs and outputs, like the plain grouped product, and converts the weight's
bytes like the product of a linear layer. A gate is a separate product; its sums are kept in float32 until the up
product is multiplied by their activation. Letters as in `kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ARCHITECTURES, by_architecture, launch, one_instruction
from kernels.linear.kernel import Form, block_product, pointers, row_scaled
from kernels.linear.quantised import Quantised
from kernels.moe.activation_kernel import activated
from kernels.moe.pairs_kernel import block_pairs

WARPS_NVFP4 = dict.fromkeys(ARCHITECTURES, 8) | {"sm_90": 4, "sm_100": 4}
"""Warps of a product of 16-bit rows with nvfp4 weights; with 4, it spills on the others."""


@triton.jit
def _grouped_quantised(  # type: ignore[no-untyped-def]
    p_in,  # [T or X, IN]
    p_values,  # [E, OUT, bytes of a row]
    p_scale,  # [E, OUT, groups]
    p_zeros,  # int8, int4: [E, OUT, groups] uint8
    p_outer,  # nvfp4: [E, OUT] float32
    p_columns,  # [E, IN] int64: the input of each column; with ORDERED
    p_gate,  # [X, OUT] float32: sums of the gates; with GATED
    p_order,  # [X]: pairs by expert
    p_starts,  # [E + 1]: where each expert's pairs begin in that order
    p_out,  # [X, OUT]
    experts,
    row_bytes,
    groups,
    n_count,
    k_count,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    DIVIDED: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UP: tl.constexpr,  # rows are tokens, not pairs
    ACT: tl.constexpr,  # of UP; "": none
    GATED: tl.constexpr,
):
    i_expert, begin, count, first = block_pairs(p_starts, experts, BLOCK_M, 0)
    if first >= count:
        return
    o_m = first + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < count, o_n < n_count
    pair = tl.load(p_order + begin + o_m, mask=m_m, other=0).to(tl.int64)
    p_x = p_in + ((pair // K) * k_count if UP else pair * k_count)[:, None]
    # Offsets within an expert fit 32 bits; 64 bits would need more registers than there are.
    p_values += i_expert.to(tl.int64) * n_count * row_bytes
    p_values += (o_n * row_bytes)[:, None]
    p_scale += i_expert.to(tl.int64) * n_count * groups
    p_zeros += i_expert.to(tl.int64) * n_count * groups
    p_outer += i_expert.to(tl.int64) * n_count
    p_columns += i_expert.to(tl.int64) * k_count
    o_groups = o_n * groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, k_count, BLOCK_K):
        total += block_product(
            p_x, p_values, p_scale, p_zeros, p_columns, m_m, m_n, o_groups, k, k_count, row_bytes, KIND, GROUP, ZEROS,
            ORDERED, BLOCK_K,
        )  # fmt: skip
    total = row_scaled(total, p_scale, p_outer, o_n, m_n, KIND, GROUP, DIVIDED)
    o_out = (pair * n_count)[:, None] + o_n[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    if GATED:
        total = total * activated(tl.load(p_gate + o_out, mask=m_out, other=0.0), ACT)
    elif ACT != "":
        total = activated(total, ACT)
    tl.store(p_out + o_out, total.to(p_out.dtype.element_ty), mask=m_out)


@dataclass(frozen=True)
class Grouping:
    """The (token, expert) pairs of a step, grouped by expert."""

    order: Tensor
    """`[X]` pairs, sorted by expert."""
    starts: Tensor
    """`[E + 1]`: the index in `order` of each expert's first pair, and the number of pairs."""
    chosen: int
    """Experts of a token."""

    @property
    def experts(self) -> int:
        return self.starts.shape[0] - 1


def grouped_quantised(
    rows: Tensor, weight: Quantised, grouping: Grouping, out: Tensor, *, up: bool, activation: str = "",
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes each pair's product with its expert's weight `[E, OUT, IN]` to `out` `[X, OUT]`, and returns it.

    `up`: rows are `[T, IN]`, and the result is `activation` of the sums, or of `gate` `[X, OUT]` (float32) times the
    sums. Otherwise rows are `[X, IN]`. No host sync. `ValueError` as in a linear layer's kernel.
    """
    _, outputs, inner = weight.shape
    form, pairs = Form.of(weight, rows.dtype), out.shape[0]
    assert outputs * inner < 2**31
    warps = by_architecture(WARPS_NVFP4, rows.device) if weight.kind == "nvfp4" else 4
    average = triton.next_power_of_2(max(1, pairs // grouping.experts))
    tall = max(16, min(32 if weight.kind == "int8" else form.tallest, average))
    launch(
        _grouped_quantised,
        (triton.cdiv(outputs, form.outputs), pairs // tall + grouping.experts),
        p_in=rows,
        **pointers(weight),
        p_columns=grouping.order if weight.order is None else weight.order,
        p_gate=out if gate is None else gate,
        p_order=grouping.order,
        p_starts=grouping.starts,
        p_out=out,
        experts=grouping.experts,
        row_bytes=weight.values.shape[-1],
        groups=weight.scale.shape[-1],
        n_count=outputs,
        k_count=inner,
        K=grouping.chosen,
        **form.arguments,
        ORDERED=weight.order is not None,
        BLOCK_M=tall,
        BLOCK_N=form.outputs,
        # Larger nvfp4 blocks, float32 rows with fewer warps, and int8 tiles of 64 rows would spill.
        BLOCK_K=min(form.block, 64) if weight.kind == "nvfp4" else form.block,
        UP=up,
        ACT=activation,
        GATED=gate is not None,
        num_warps=8 if rows.dtype == torch.float32 else warps,
        num_stages=form.stages,
        **one_instruction(rows.device),
    )
    return out
