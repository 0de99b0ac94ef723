"""Parts of the sampling kernels: values, weights and parameters of a row. Letters as in `kernel.py`."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(float(1 << 44))
REACH = tl.constexpr(31.0)
"""Values that are further below the row's largest weigh nothing: exp(-31) is less than 1 / UNIT."""

# The rows' parameters are parts of one tensor and may have any alignment; compiling for each alignment would stall the
# steps that meet a new one.
OF_ROWS = ["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_samples", "p_positions", "p_masks"]


@triton.jit
def key_of(x):  # type: ignore[no-untyped-def]
    """int32 with the same order as the float32 `x`, equal for both zeros."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):  # type: ignore[no-untyped-def]
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top):  # type: ignore[no-untyped-def]
    """exp(x - top) as an integer, in units of 1 / UNIT."""
    return (tl.exp(x - top) * UNIT).to(tl.int64)


@triton.jit
def mask_of(p_words, p_masks, i_row, words_row, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pointer to the words of the row's mask, whether the row has one)."""
    i_mask = tl.full([], -1, tl.int64)
    if MASKED:
        i_mask = tl.load(p_masks + i_row)
    return p_words + i_mask * words_row, i_mask >= 0


@triton.jit
def scaled_logits(p_row, p_bits, masked, temperature, o, vocab, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's logits at `o` after its mask, divided by its temperature, float32; -inf outside the vocabulary."""
    m = o < vocab
    x = tl.load(p_row + o, mask=m, other=float("-inf")).to(tl.float32)
    if MASKED:
        words = tl.load(p_bits + o // 32, mask=m & masked, other=-1)
        x = tl.where((words >> (o % 32)) & 1 != 0, x, float("-inf"))
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(x))


@triton.jit
def filters_of(p_top_k, p_top_p, p_min_p, i_row):  # type: ignore[no-untyped-def]
    """(top_k, top_p, min_p, whether one of them is on)."""
    top_k, top_p, min_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row), tl.load(p_min_p + i_row)
    return top_k, top_p, min_p, (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def uniform_of(p_seeds, p_samples, p_positions, i_row):  # type: ignore[no-untyped-def]
    """The row's random number in (0, 1), float64."""
    seed = tl.load(p_seeds + i_row).to(tl.uint64, bitcast=True)
    sample = tl.load(p_samples + i_row).to(tl.uint32)
    position = tl.load(p_positions + i_row).to(tl.uint32)
    zero = tl.full([], 0, tl.uint32)
    first, second, _, _ = tl.philox(seed, position, sample, zero, zero)
    bits = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def largest_of(p_largest, i_row, blocks, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's largest value."""
    o = tl.arange(0, N)
    return tl.max(tl.load(p_largest + i_row * blocks + o, mask=o < blocks, other=float("-inf")), 0)


@triton.jit
def bins_per_unit(p_smallest, i_row, blocks, top, N: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bins for each unit of the distance to `top`, so that the bins cover all values that can have a weight."""
    o = tl.arange(0, N)
    smallest = tl.min(tl.load(p_smallest + i_row * blocks + o, mask=o < blocks, other=float("inf")), 0)
    distance = tl.maximum(tl.minimum(top - smallest, REACH), 1e-30)
    return tl.div_rn(tl.full([], BINS, tl.float32), distance)


@triton.jit
def bin_of(x, top, per_unit, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bins of values: 0 is that of `top`. A larger value is never in a later bin than a smaller one."""
    return tl.maximum(tl.minimum((top - x) * per_unit, BINS - 1.0), 0.0).to(tl.int32)


@triton.jit
def goal_of(top_p, mass):  # type: ignore[no-untyped-def]
    """The weight that top-p keeps at least, of `mass`. It does not fall if `mass` rises."""
    return tl.minimum(tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1), mass)


@triton.jit
def target_of(uniform, mass):  # type: ignore[no-untyped-def]
    """The first token whose cumulative weight exceeds this is drawn. It does not fall if `mass` rises."""
    return tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def sums_before(ends, goal):  # type: ignore[no-untyped-def]
    """(number of the cumulative sums `ends` that are less than `goal`, the largest of them or 0)."""
    less = ends < goal
    return tl.sum(less.to(tl.int32), 0), tl.max(tl.where(less, ends, 0), 0)
