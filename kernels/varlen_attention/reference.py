"""Unmasked attention over packed sequences, in torch; README.md has the maths, FLOPs and bytes.

R packed rows, S rows of one sequence, N neighbouring sequences of equal length, H heads, D features per head; G = N x
H, B query rows of a block, E = D + 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_BLOCK = 128
"""Query rows whose scores are in memory at a time."""
SCORE_BYTES = 4 << 20
"""Score bytes of short sequences processed together, so that they fit a second-level cache."""
MIN_ROWS = 48
"""For shorter sequences `scaled_dot_product_attention` is faster, since it needs fewer operator calls."""
SHIFT_STRIDE = 8
"""Stride of the keys that are sampled to estimate a row's shift."""
FAR_TOTAL = 20
"""A row total above this multiple of the number of keys shows that the sample missed a key with a far larger score."""


def varlen_attention(
    q_RHD: Tensor, k_RHD: Tensor, v_RHD: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, scale: float
) -> Tensor:
    """Every row attends to all rows of its own sequence: `[R, H, D]` -> new `[R, H, D]`. There may be fewer heads of
    keys and values, a divisor of H: head h then reads number `h * heads of keys // H`.

    `cu_seqlens` `[sequences + 1]` int32: 0, then the end of each sequence, never decreasing, the last equal to R, so
    that every output row is written; `max_seqlen` is an upper bound of the lengths. q, k and v may be strided views.
    One host read of `cu_seqlens`. Raises `ValueError` with the offsets unless all of this holds.
    """
    rows, heads, width = q_RHD.shape
    out_RHD = q_RHD.new_empty(rows, heads, width)
    if (group := heads // k_RHD.shape[1]) > 1:
        k_RHD, v_RHD = (x.repeat_interleave(group, 1) for x in (k_RHD, v_RHD))
    blocked = q_RHD.device.type == "cpu" and q_RHD.dtype == torch.bfloat16
    bounds = cu_seqlens.tolist()
    check_offsets(bounds, rows, max_seqlen)
    for start, length, count in _runs(bounds):
        if blocked and length >= MIN_ROWS:
            count_at_once = max(SCORE_BYTES // (heads * min(length, ROW_BLOCK) * length * 2), 1)
        else:
            count_at_once = count
        for first in range(0, count, count_at_once):
            n = min(count_at_once, count - first)
            part = slice(start + first * length, start + (first + n) * length)
            q_NHSD, k_NHSD, v_NHSD = (
                x_RHD[part].unflatten(0, (n, length)).transpose(1, 2) for x_RHD in (q_RHD, k_RHD, v_RHD)
            )
            out_NHSD = out_RHD[part].unflatten(0, (n, length)).transpose(1, 2)
            if blocked and length >= MIN_ROWS:
                blocked_attention(q_NHSD, k_NHSD, v_NHSD, scale, out_NHSD)
            else:
                out_NHSD.copy_(F.scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, scale=scale))
    return out_RHD


def check_offsets(bounds: list[int], rows: int, max_seqlen: int) -> None:
    """Raises `ValueError` with the offsets unless they divide `rows` rows into sequences of at most `max_seqlen`."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != rows:
        raise ValueError(f"sequence offsets must run from 0 to {rows} rows, got {bounds[:1]}..{bounds[-1:]}")
    for before, after in zip(bounds, bounds[1:]):
        if not 0 <= after - before <= max_seqlen:
            raise ValueError(f"a sequence has rows {before} to {after}: its length must be in 0..{max_seqlen}")


def _runs(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first row, length, count) of each run of neighbouring sequences of equal length; empty sequences are skipped."""
    start = count = length = 0
    for before, after in zip(bounds, bounds[1:]):
        size = after - before
        if size == length and count:
            count += 1
        elif size:
            if count:
                yield start, length, count
            start, length, count = before, size, 1
    if count:
        yield start, length, count


def blocked_attention(q_NHSD: Tensor, k_NHSD: Tensor, v_NHSD: Tensor, scale: float, out_NHSD: Tensor) -> None:
    """Attention in bfloat16 matrix products, written to `out_NHSD`; for CPUs, where torch's fused kernel is slower.

    Rounding scores to bfloat16 would change them by 0.4 %. So each row is shifted inside the product, where the sum is
    still float32, by the largest score of a sample of the keys: the scores that matter are then small when they are
    rounded. A block with a row whose shift was estimated badly, or whose exponentials overflowed, is computed again
    with the true maximum.
    """
    count, heads, length, width = q_NHSD.shape
    groups, block = count * heads, min(ROW_BLOCK, length)
    queries_GSE = q_NHSD.new_empty(groups, length, width + 1)
    keys_GSE = q_NHSD.new_ones(groups, length, width + 1)
    torch.mul(q_NHSD, scale, out=queries_GSE.view(count, heads, length, width + 1)[..., :width])
    keys_GSE.view(count, heads, length, width + 1)[..., :width] = k_NHSD
    v_GSD = v_NHSD.reshape(groups, length, width)
    stride = max(min(SHIFT_STRIDE, length // 32), 1)
    sampled_GSK = torch.bmm(queries_GSE[..., :width], keys_GSE[:, ::stride, :width].transpose(1, 2))
    torch.neg(sampled_GSK.amax(-1), out=queries_GSE[..., width])
    keys_GES = keys_GSE.transpose(1, 2)
    # One buffer for all blocks: if each block allocated its own, the memory would return to the system and be faulted
    # in again.
    weights = q_NHSD.new_empty(groups * block * length)
    mixed = q_NHSD.new_empty(groups * block * width)
    for start in range(0, length, block):
        rows = min(block, length - start)
        queries_GBE = queries_GSE[:, start : start + rows]
        weights_GBS = weights[: groups * rows * length].view(groups, rows, length)
        mixed_GBD = mixed[: groups * rows * width].view(groups, rows, width)
        total_GB1 = _exponentials(queries_GBE, keys_GES, weights_GBS)
        if not bool((total_GB1 <= FAR_TOTAL * length).all()):
            queries_GBE[..., width] -= torch.bmm(queries_GBE, keys_GES, out=weights_GBS).amax(-1)
            total_GB1 = _exponentials(queries_GBE, keys_GES, weights_GBS)
        torch.bmm(weights_GBS, v_GSD, out=mixed_GBD)
        torch.div(
            mixed_GBD.view(count, heads, rows, width),
            total_GB1.view(count, heads, rows, 1),
            out=out_NHSD[:, :, start : start + rows],
        )


def _exponentials(queries_GBE: Tensor, keys_GES: Tensor, weights_GBS: Tensor) -> Tensor:
    """Writes `exp(q k)` to `weights_GBS`; returns the rows' totals `[G, B, 1]` in float32."""
    return torch.bmm(queries_GBE, keys_GES, out=weights_GBS).exp_().sum(-1, keepdim=True, dtype=torch.float32)
