"""Sampling in Triton: four launches divide each row of logits among many programs; the method is in README.md.

`R` rows, `V` tokens of the vocabulary, `N` blocks of it. Probabilities are summed as integers (`UNIT` is 1), so that
the order of summation cannot change a draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.sample.rows import RowParams

UNIT = tl.constexpr(float(1 << 44))
REACH = tl.constexpr(31.0)
"""Values that are further below the row's largest weigh nothing: exp(-31) is less than 1 / UNIT."""
MAX_VOCAB = 1 << 18
"""With a larger vocabulary the sum of a row could exceed 63 bits."""
BLOCK = 2048
"""Tokens of the vocabulary that a program reads at a time."""
BINS = 2048
"""Bins of the histogram of a row with filters."""
ENTRIES = 16384
"""The values of the bins that decide a draw are copied to a list if there are at most this many."""
TILE = 512
"""Entries of the list that the last launch reads at a time."""
SPAN = 4
"""Blocks that a program of the third launch reads, because each of these programs sums the row's whole histogram."""
WARPS = 8
"""Warps of a program in the first three launches."""
DRAW_WARPS = 4
"""Warps of a program in the last launch; with other numbers, or with a larger `TILE`, some targets spill registers."""

# The rows' parameters are parts of one tensor and may have any alignment; compiling for each alignment would stall the
# steps that meet a new one.
OF_ROWS = ["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_samples", "p_positions", "p_masks"]


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """int32 with the same order as the float32 `x`, equal for both zeros."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top):  # type: ignore[no-untyped-def]
    """exp(x - top) as an integer, in units of 1 / UNIT."""
    return (tl.exp(x - top) * UNIT).to(tl.int64)


@triton.jit
def _mask_of(p_words, p_masks, i_row, words_row, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pointer to the words of the row's mask, whether the row has one)."""
    i_mask = tl.full([], -1, tl.int64)
    if MASKED:
        i_mask = tl.load(p_masks + i_row)
    return p_words + i_mask * words_row, i_mask >= 0


@triton.jit
def _scaled(p_row, p_bits, masked, temperature, o, vocab, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's logits at `o` after its mask, divided by its temperature, float32; -inf outside the vocabulary."""
    m = o < vocab
    x = tl.load(p_row + o, mask=m, other=float("-inf")).to(tl.float32)
    if MASKED:
        words = tl.load(p_bits + o // 32, mask=m & masked, other=-1)
        x = tl.where((words >> (o % 32)) & 1 != 0, x, float("-inf"))
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(x))


@triton.jit
def _filters(p_top_k, p_top_p, p_min_p, i_row):  # type: ignore[no-untyped-def]
    """(top_k, top_p, min_p, whether one of them is on)."""
    top_k, top_p, min_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row), tl.load(p_min_p + i_row)
    return top_k, top_p, min_p, (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _uniform(p_seeds, p_samples, p_positions, i_row):  # type: ignore[no-untyped-def]
    """The row's random number in (0, 1), float64."""
    seed = tl.load(p_seeds + i_row).to(tl.uint64, bitcast=True)
    sample = tl.load(p_samples + i_row).to(tl.uint32)
    position = tl.load(p_positions + i_row).to(tl.uint32)
    zero = tl.full([], 0, tl.uint32)
    first, second, _, _ = tl.philox(seed, position, sample, zero, zero)
    bits = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _top(p_largest, i_row, blocks, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's largest value."""
    o = tl.arange(0, N)
    return tl.max(tl.load(p_largest + i_row * blocks + o, mask=o < blocks, other=float("-inf")), 0)


@triton.jit
def _bins_per_unit(p_smallest, i_row, blocks, top, N: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bins for each unit of the distance to `top`, so that the bins cover all values that can have a weight."""
    o = tl.arange(0, N)
    smallest = tl.min(tl.load(p_smallest + i_row * blocks + o, mask=o < blocks, other=float("inf")), 0)
    distance = tl.maximum(tl.minimum(top - smallest, REACH), 1e-30)
    return tl.div_rn(tl.full([], BINS, tl.float32), distance)


@triton.jit
def _bin(x, top, per_unit, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bins of values: 0 is that of `top`. A larger value is never in a later bin than a smaller one."""
    return tl.maximum(tl.minimum((top - x) * per_unit, BINS - 1.0), 0.0).to(tl.int32)


@triton.jit
def _goal(top_p, mass):  # type: ignore[no-untyped-def]
    """The weight that top-p keeps at least, of `mass`. It does not fall if `mass` rises."""
    return tl.minimum(tl.maximum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), 1), mass)


@triton.jit
def _target(uniform, mass):  # type: ignore[no-untyped-def]
    """The first token whose cumulative weight exceeds this is drawn. It does not fall if `mass` rises."""
    return tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def _before(ends, goal):  # type: ignore[no-untyped-def]
    """(number of the cumulative sums `ends` that are less than `goal`, the largest of them or 0)."""
    less = ends < goal
    return tl.sum(less.to(tl.int32), 0), tl.max(tl.where(less, ends, 0), 0)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _extremes(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32: of the values above -inf
    p_first,  # [R, N] int32: the id of the largest value, the lowest among equals
    p_masses,  # [R, BINS] int64: set to 0 for `_weigh`
    p_counts,  # [R, BINS] int64: set to 0 for `_weigh`
    p_listed,  # [R] int32: set to 0 for `_collect`
    logits_row,
    words_row,
    vocab,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    p_bits, masked = _mask_of(p_words, p_masks, i_row, words_row, MASKED)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(p_logits + i_row * logits_row, p_bits, masked, temperature, o, vocab, MASKED)
    largest = tl.max(x, 0)
    place = i_row * tl.num_programs(0) + i_block
    tl.store(p_largest + place, largest)
    tl.store(p_smallest + place, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
    tl.store(p_first + place, tl.min(tl.where(x == largest, o, vocab), 0))
    _, _, _, filtered = _filters(p_top_k, p_top_p, p_min_p, i_row)
    if (i_block == 0) & (temperature > 0) & filtered:
        o_bins = i_row * BINS + tl.arange(0, BINS)
        tl.store(p_masses + o_bins, tl.zeros([BINS], tl.int64))
        tl.store(p_counts + o_bins, tl.zeros([BINS], tl.int64))
        tl.store(p_listed + i_row, 0)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _weigh(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32
    p_sums,  # [R, N] int64: weights of blocks; with filters, of the tokens that min-p keeps
    p_masses,  # [R, BINS] int64: weights of bins
    p_counts,  # [R, BINS] int64: numbers of values that weigh something, with top-k
    logits_row,
    words_row,
    vocab,
    blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    if temperature <= 0:
        return
    p_bits, masked = _mask_of(p_words, p_masks, i_row, words_row, MASKED)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    x = _scaled(p_logits + i_row * logits_row, p_bits, masked, temperature, o, vocab, MASKED)
    top = _top(p_largest, i_row, blocks, N)
    weight = _weight(x, top)
    top_k, _, min_p, filtered = _filters(p_top_k, p_top_p, p_min_p, i_row)
    likely = weight
    if min_p > 0.0:
        likely = tl.where(tl.exp(x - top).to(tl.float64) >= min_p, weight, 0)
    tl.store(p_sums + i_row * blocks + i_block, tl.sum(likely, 0))
    if filtered:
        per_unit = _bins_per_unit(p_smallest, i_row, blocks, top, N, BINS)
        o_bins = i_row * BINS + _bin(x, top, per_unit, BINS)
        tl.atomic_add(p_masses + o_bins, weight, mask=weight > 0, sem="relaxed")
        if top_k > 0:
            tl.atomic_add(p_counts + o_bins, tl.full([BLOCK], 1, tl.int64), mask=weight > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _collect(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_seeds,  # [R] int64, the bits of an unsigned one
    p_samples,  # [R] int64
    p_positions,  # [R] int64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32
    p_sums,  # [R, N] int64
    p_masses,  # [R, BINS] int64
    p_counts,  # [R, BINS] int64
    p_listed,  # [R] int32: number of values that belong in the list
    p_entries,  # [R, ENTRIES] int64: key << 32 | id
    logits_row,
    words_row,
    vocab,
    blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    top_k, top_p, min_p, filtered = _filters(p_top_k, p_top_p, p_min_p, i_row)
    if (temperature <= 0) | (not filtered):
        return
    # Between `low` and `high` is the weight of the tokens that the filters keep: the bins show no more. From both, the
    # bins that may contain the last token of each prefix and the drawn one follow.
    o_bins = i_row * BINS + tl.arange(0, BINS)
    ends = tl.cumsum(tl.load(p_masses + o_bins), 0)
    total = tl.max(ends, 0)
    low = total
    high = total
    bin_k = tl.full([], BINS, tl.int32)
    if top_k > 0:
        less = tl.cumsum(tl.load(p_counts + o_bins), 0) < top_k
        bin_k = tl.sum(less.to(tl.int32), 0)
        if bin_k < BINS:
            low = tl.max(tl.where(less, ends, 0), 0)
            high = tl.min(tl.where(less, total, ends), 0)
    first_p = tl.full([], BINS, tl.int32)
    last_p = tl.full([], -1, tl.int32)
    if top_p < 1.0:
        goal = _goal(top_p, high)
        first_p, least = _before(ends, _goal(top_p, low))
        last_p, _ = _before(ends, goal)
        low = tl.minimum(low, least)
        high = tl.minimum(high, tl.min(tl.where(ends < goal, total, ends), 0))
    if min_p > 0.0:
        o_blocks = tl.arange(0, N)
        likely = tl.sum(tl.load(p_sums + i_row * blocks + o_blocks, mask=o_blocks < blocks, other=0), 0)
        low = tl.minimum(low, likely)
        high = tl.minimum(high, likely)
    uniform = _uniform(p_seeds, p_samples, p_positions, i_row)
    first, _ = _before(ends, _target(uniform, low) + 1)
    last, _ = _before(ends, _target(uniform, high) + 1)

    p_bits, masked = _mask_of(p_words, p_masks, i_row, words_row, MASKED)
    top = _top(p_largest, i_row, blocks, N)
    per_unit = _bins_per_unit(p_smallest, i_row, blocks, top, N, BINS)
    for i in range(SPAN):
        o = (tl.program_id(0) * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(p_logits + i_row * logits_row, p_bits, masked, temperature, o, vocab, MASKED)
        bins = _bin(x, top, per_unit, BINS)
        m = (bins == bin_k) | ((bins >= first_p) & (bins <= last_p)) | ((bins >= first) & (bins <= last))
        m &= _weight(x, top) > 0
        ranks = tl.cumsum(m.to(tl.int32), 0)
        count = tl.max(ranks, 0)
        if count > 0:
            place = tl.atomic_add(p_listed + i_row, count, sem="relaxed") + ranks - 1
            entry = (_key(x).to(tl.int64) << 32) | o.to(tl.int64)
            tl.store(p_entries + i_row * ENTRIES + place, entry, mask=m & (place < ENTRIES))


@triton.jit
def _read(p_entries, row, o, n, listed, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(keys, ids) of the values at `o`: of the list's entries, or of the whole row's logits if it is not `listed`."""
    if listed:
        entry = tl.load(p_entries + o, mask=o < n, other=0)
        key, ids = (entry >> 32).to(tl.int32), entry.to(tl.int32)
    else:
        p_row, p_bits, masked, temperature = row
        key, ids = _key(_scaled(p_row, p_bits, masked, temperature, o, n, MASKED)), o
    return key, ids


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    p_entries,
    row,
    n,
    listed,
    scale,
    bin,
    least,
    goal,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """In one bin: (largest key such that the values with at least this key number at least `least` and weigh at least
    `goal`, number of values with larger keys, their total weight, weight of one value with this key)."""
    top, per_unit = scale
    smallest = tl.full([BLOCK], (1 << 31) - 1, tl.int32)
    largest = tl.full([BLOCK], -(1 << 31), tl.int32)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        key, _ = _read(p_entries, row, o, n, listed, MASKED)
        x = _value(key)
        m = (o < n) & (_bin(x, top, per_unit, BINS) == bin) & (_weight(x, top) > 0)
        smallest = tl.where(m, tl.minimum(smallest, key), smallest)
        largest = tl.where(m, tl.maximum(largest, key), largest)
    low = tl.min(smallest, 0).to(tl.int64)
    high = tl.max(largest, 0).to(tl.int64) + 1
    end = high
    above = tl.full([], 0, tl.int64)
    mass_above = tl.full([], 0, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        counts = tl.zeros([BLOCK], tl.int64)
        masses = tl.zeros([BLOCK], tl.int64)
        for i in range(0, n, BLOCK):
            o = i + tl.arange(0, BLOCK)
            key, _ = _read(p_entries, row, o, n, listed, MASKED)
            m = (o < n) & (key >= middle) & (key < end)
            counts += m.to(tl.int64)
            masses += tl.where(m, _weight(_value(key), top), 0)
        count = tl.sum(counts, 0)
        mass = tl.sum(masses, 0)
        if (count >= least) & (mass >= goal):
            low = middle
        else:
            high = middle
            above = count
            mass_above = mass
    key = low.to(tl.int32)
    return key, above, mass_above, tl.maximum(_weight(_value(key), top), 1)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _draw(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_seeds,  # [R] int64, the bits of an unsigned one
    p_samples,  # [R] int64
    p_positions,  # [R] int64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32
    p_first,  # [R, N] int32
    p_sums,  # [R, N] int64
    p_masses,  # [R, BINS] int64
    p_counts,  # [R, BINS] int64
    p_listed,  # [R] int32
    p_entries,  # [R, ENTRIES] int64
    p_out,  # [R] int64
    logits_row,
    words_row,
    vocab,
    blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    top = _top(p_largest, i_row, blocks, N)
    o_blocks = tl.arange(0, N)
    m_blocks = o_blocks < blocks
    if temperature <= 0:
        largest = tl.load(p_largest + i_row * blocks + o_blocks, mask=m_blocks, other=float("-inf"))
        first = tl.load(p_first + i_row * blocks + o_blocks, mask=m_blocks, other=vocab)
        token = tl.min(tl.where(largest == top, first, vocab), 0)
        tl.store(p_out + i_row, tl.minimum(token, vocab - 1).to(tl.int64))
        return

    p_row = p_logits + i_row * logits_row
    p_bits, masked = _mask_of(p_words, p_masks, i_row, words_row, MASKED)
    top_k, top_p, min_p, filtered = _filters(p_top_k, p_top_p, p_min_p, i_row)
    uniform = _uniform(p_seeds, p_samples, p_positions, i_row)
    sums = tl.load(p_sums + i_row * blocks + o_blocks, mask=m_blocks, other=0)
    total = tl.sum(sums, 0)
    if not filtered:
        target = _target(uniform, total)
        block, before = _before(tl.cumsum(sums, 0), target + 1)
        o = block * BLOCK + tl.arange(0, BLOCK)
        weight = _weight(_scaled(p_row, p_bits, masked, temperature, o, vocab, MASKED), top)
        token = tl.min(tl.where(before + tl.cumsum(weight, 0) > target, o, vocab), 0)
        tl.store(p_out + i_row, tl.minimum(token, vocab - 1).to(tl.int64))
        return

    # The bins show where the last token of each prefix is, so that only the values of one bin decide. They are in the
    # list; if it is too small for them, the whole row is read.
    n = tl.load(p_listed + i_row)
    listed = n <= ENTRIES
    n = tl.where(listed, n, vocab)
    p_entries += i_row * ENTRIES
    scale = (top, _bins_per_unit(p_smallest, i_row, blocks, top, N, BINS))
    row = (p_row, p_bits, masked, temperature)
    o_bins = i_row * BINS + tl.arange(0, BINS)
    ends = tl.cumsum(tl.load(p_masses + o_bins), 0)
    one = tl.full([], 1, tl.int64)
    mass = tl.max(ends, 0)
    if top_k > 0:
        counts = tl.cumsum(tl.load(p_counts + o_bins), 0)
        bin, number = _before(counts, top_k)
        if bin < BINS:
            before = tl.max(tl.where(counts < top_k, ends, 0), 0)
            wanted = top_k - number
            _, above, mass_above, weight = _cut(p_entries, row, n, listed, scale, bin, wanted, one, MASKED, TILE, BINS)
            mass = before + mass_above + (wanted - above) * weight
    kept = mass
    if top_p < 1.0:
        goal = _goal(top_p, mass)
        bin, before = _before(ends, goal)
        _, _, mass_above, weight = _cut(p_entries, row, n, listed, scale, bin, one, goal - before, MASKED, TILE, BINS)
        reached = (goal - before - mass_above + weight - 1) // weight
        kept = tl.minimum(kept, before + mass_above + reached * weight)
    kept = tl.minimum(kept, total)
    target = _target(uniform, kept)
    bin, before = _before(ends, target + 1)
    key, _, mass_above, weight = _cut(
        p_entries, row, n, listed, scale, bin, one, target + 1 - before, MASKED, TILE, BINS
    )
    # Of the tokens with this key, the drawn one has `index` with lower ids. The list is not in the order of ids, so
    # these tokens are counted by block.
    index = ((target - before - mass_above) // weight).to(tl.int32)
    equal = tl.zeros([N], tl.int32)
    for i in range(0, n, TILE):
        o = i + tl.arange(0, TILE)
        keys, ids = _read(p_entries, row, o, n, listed, MASKED)
        equal += tl.histogram(ids // BLOCK, N, mask=(o < n) & (keys == key))
    block, passed = _before(tl.cumsum(equal, 0), index + 1)
    token = tl.full([], 0, tl.int32) + vocab
    for i in range(0, n, TILE):
        o = i + tl.arange(0, TILE)
        keys, ids = _read(p_entries, row, o, n, listed, MASKED)
        m = (o < n) & (keys == key) & (ids // BLOCK == block)
        ranks = passed + tl.cumsum(m.to(tl.int32), 0)
        token = tl.minimum(token, tl.min(tl.where(m & (ranks > index), ids, vocab), 0))
        passed = tl.max(ranks, 0)
    tl.store(p_out + i_row, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    p_tokens,  # [R, T]
    p_drafts,  # [R, T - 1]
    p_counts,  # [R]
    p_out,  # [R] int64
    tokens_row,
    drafts_row,
    DRAFTS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    count = tl.load(p_counts + i_row)
    accepted = tl.full([], 0, tl.int64)
    for i in tl.static_range(DRAFTS):
        token = tl.load(p_tokens + i_row * tokens_row + i)
        draft = tl.load(p_drafts + i_row * drafts_row + i)
        accepted += ((accepted == i) & (i < count) & (token == draft)).to(tl.int64)
    tl.store(p_out + i_row, accepted)


def sample(logits_RV: Tensor, params: RowParams) -> Tensor:
    """Like the reference, in four launches. No host sync. Raises `ValueError` for a vocabulary above `MAX_VOCAB`."""
    rows, vocab = logits_RV.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens is above the maximum of {MAX_VOCAB} of the sampling kernel")
    masks = params.masks
    assert logits_RV.stride(1) == 1 and (masks is None or masks.words_GW.is_contiguous())
    device = logits_RV.device
    blocks = triton.cdiv(vocab, BLOCK)
    padded = max(64, triton.next_power_of_2(blocks))  # one bin of a histogram for each thread of a warp, or more
    out = torch.empty(rows, dtype=torch.int64, device=device)
    largest, smallest = (torch.empty(rows, blocks, dtype=torch.float32, device=device) for _ in range(2))
    first = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    sums = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    masses, counts = (torch.empty(rows, BINS, dtype=torch.int64, device=device) for _ in range(2))
    listed = torch.empty(rows, dtype=torch.int32, device=device)
    entries = torch.empty(rows, ENTRIES, dtype=torch.int64, device=device)
    row = {
        "p_logits": logits_RV,
        "p_temperature": params.temperature_R,
        "p_top_k": params.top_k_R,
        "p_top_p": params.top_p_R,
        "p_min_p": params.min_p_R,
        "p_words": listed if masks is None else masks.words_GW,
        "p_masks": params.positions_R if masks is None else masks.index_R,
        "logits_row": logits_RV.stride(0),
        "words_row": 0 if masks is None else masks.words_GW.stride(0),
        "vocab": vocab,
        "MASKED": masks is not None,
        "BLOCK": BLOCK,
        "BINS": BINS,
    }
    counter = {"p_seeds": params.seeds_R, "p_samples": params.samples_R, "p_positions": params.positions_R}
    extremes = {"p_largest": largest, "p_smallest": smallest}
    weights = {"p_sums": sums, "p_masses": masses, "p_counts": counts}
    size = {"blocks": blocks, "N": padded}
    launch(
        _extremes,
        (blocks, rows),
        **row,
        **extremes,
        p_first=first,
        p_masses=masses,
        p_counts=counts,
        p_listed=listed,
        num_warps=WARPS,
    )
    launch(_weigh, (blocks, rows), **row, **extremes, **weights, **size, num_warps=WARPS)
    launch(
        _collect,
        (triton.cdiv(blocks, SPAN), rows),
        **row,
        **counter,
        **extremes,
        **weights,
        **size,
        p_listed=listed,
        p_entries=entries,
        ENTRIES=ENTRIES,
        SPAN=SPAN,
        num_warps=WARPS,
    )
    launch(
        _draw,
        (rows,),
        **row,
        **counter,
        **extremes,
        **weights,
        **size,
        p_first=first,
        p_listed=listed,
        p_entries=entries,
        p_out=out,
        ENTRIES=ENTRIES,
        TILE=TILE,
        num_warps=DRAW_WARPS,
    )
    return out


def accept_drafts(tokens_RT: Tensor, drafts_RK: Tensor, counts_R: Tensor) -> Tensor:
    """Like the reference. No host sync."""
    rows, drafts = drafts_RK.shape
    out = torch.empty(rows, dtype=torch.int64, device=drafts_RK.device)
    launch(
        _accept,
        (rows,),
        p_tokens=tokens_RT,
        p_drafts=drafts_RK,
        p_counts=counts_R,
        p_out=out,
        tokens_row=tokens_RT.stride(0),
        drafts_row=drafts_RK.stride(0),
        DRAFTS=drafts,
        num_warps=1,
    )
    return out
