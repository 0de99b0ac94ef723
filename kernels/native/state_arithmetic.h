// The arithmetic of recurrent states: products of rows with columns of cells, and numbers that are stored as a
// bfloat16, which products need, and the rest of their float32.

#pragma once

#include <cstdint>

#include "activations.h"
#include "cells.h"
#include "numbers.h"
#include "tiles.h"

namespace {

constexpr int64_t STATE_AHEAD = 48;  // lines of a state that are prefetched before a single token needs them

// Memory that is prefetched while a row is multiplied with a state's columns: the columns that follow STATE_AHEAD lines
// later, from column `from` on `skip` words further; and with each of the first `lines` columns one line of `next`.
struct StateAhead {
    const uint32_t* next;
    int64_t lines, from, skip;
};

// With column `k`, which is at `b`.
template <int W>
inline ALWAYS void fetch_ahead(const StateAhead& ahead, const uint32_t* b, int64_t k) {
    const uint32_t* far = b + STATE_AHEAD * 16 + (k < ahead.from ? 0 : ahead.skip);
    unrolled<W>([&](int w) ALWAYS { prefetch_far(far + 16 * w); });
    if (k < ahead.lines) prefetch_far(ahead.next + 16 * k);
}

// sum[r][w] += products of `count` cells of row r, which are at a + r * row + k * step, with cells of 16 W columns,
// which are at b + k * ld.
template <class Cells, int R, int W>
inline ALWAYS void multiply_cells(
    Floats (&sum)[R][W], const uint32_t* a, int64_t row, int64_t step, int64_t count, const uint32_t* b, int64_t ld,
    const StateAhead* ahead = nullptr
) {
    for (int64_t k = 0; k < count; k++, a += step, b += ld) {
        if (ahead) fetch_ahead<W>(*ahead, b, k);
        Words column[W];
        unrolled<W>([&](int w) ALWAYS { column[w] = in_register(load_words(b + 16 * w)); });
        unrolled<R>([&](int r) ALWAYS {
            const Words x = broadcast_word(a + r * row);
            unrolled<W>([&](int w) ALWAYS { sum[r][w] = Cells::multiply(sum[r][w], x, column[w]); });
        });
    }
}

// How many of V vectors are multiplied with this many rows at a time, so that their sums fit in registers.
constexpr int vectors_at_once(int rows, int v) { return v % vectors_beside(rows) ? 1 : vectors_beside(rows); }

// The products of a row of C with `count` rows of B, in the first lanes; the other lanes are zeros, except perhaps the
// next one.
template <class Cells>
inline Floats products_with(const uint32_t* c, const uint32_t* b, int64_t row, int64_t count) {
    Floats pairs[8];
    for (int i = 0; i < 8; i++) {
        if (2 * i >= count) {
            pairs[i] = zero();
            continue;
        }
        Floats sum[2] = {zero(), zero()};
        for (int64_t at = 0; at < row; at += 16) {
            const Words x = load_words(c + at);
            for (int j = 0; j < 2; j++) sum[j] = Cells::multiply(sum[j], x, load_words(b + (2 * i + j) * row + at));
        }
        pairs[i] = fold(sum[0], sum[1]);
    }
    return sums_of(pairs);
}

// Stores 16 channels of token t of a block in its cells [TOKEN_CELLS, ld]. A pair's even token is stored together with
// `next`: the next token's channels, or zeros.
template <class Cells>
inline void put_in_cells(uint32_t* cells, int64_t ld, int64_t t, Floats x, Floats next) {
    uint32_t* to = cells + t / Cells::EACH * ld;
    if constexpr (Cells::EACH == 1) store_words(to, as_words(x));
    else if (t % 2 == 0) store_words(to, Cells::beside(x, next));
    else store_words(to, load_words(to) | Cells::beside(zero(), x));
}

template <class Cells>
inline void put_weights(uint32_t* to, Floats weights) {  // of 16 tokens, in cells
#if BF16_PAIRS
    if constexpr (Cells::EACH == 2) return store_low_half(to, pairs_after(weights, zero()));
#endif
    store_words(to, as_words(weights));
}

// exp(x), where the result is rounded to bfloat16 or multiplied with a state in bfloat16.
template <class Cells>
inline Floats decay_of(Floats x) {
    if constexpr (Cells::EACH == 2) return Cells::exp2(x * splat(LOG2_E));
    else return exp16(x);
}

// Adds `decay` times rows [at, at + R) of a slice of a state, vectors [v, v + W) of its V. `rest`:
// BlockShape::rest_at().
template <class Shape, typename S, int R, int V, int W>
inline ALWAYS void add_state(const S* state, int64_t rest, int64_t at, int v, Floats decay, Floats (&sum)[R][W]) {
    if constexpr (Shape::PAIRS) {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(state) + at / 2 * 16 * V + 16 * v;
        const Words high = splat_word(int32_t(0xffff0000));
        unrolled<R / 2>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS {
                const uint32_t* p = from + (r * V + w) * 16;
                const Words bits = load_words(p);
                Words a = shift_left32<16>(bits), b = bits & high;
                if constexpr (Shape::SPLIT) {
                    const Words left = load_words(p + rest);
                    a = add32(a, shift_right32<16>(shift_left32<16>(left))), b = add32(b, shift_right32<16>(left));
                }
                sum[2 * r][w] = fmadd(as_floats(a), decay, sum[2 * r][w]),
                        sum[2 * r + 1][w] = fmadd(as_floats(b), decay, sum[2 * r + 1][w]);
            });
        });
    } else {
        unrolled<R>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS {
                sum[r][w] = fmadd(load_all(state + (at + r) * 16 * V + 16 * (v + w)), decay, sum[r][w]);
            });
        });
    }
}

// Stores the same rows and vectors.
template <class Shape, typename S, int R, int V, int W>
inline ALWAYS void store_state(S* state, int64_t rest, int64_t at, int v, const Floats (&sum)[R][W]) {
    if constexpr (Shape::PAIRS) {
        uint32_t* to = reinterpret_cast<uint32_t*>(state) + at / 2 * 16 * V + 16 * v;
        const Words high = splat_word(int32_t(0xffff0000)), half = splat_word(0x8000);
        unrolled<R / 2>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS {
                uint32_t* p = to + (r * V + w) * 16;
                if constexpr (Shape::SPLIT) {
                    const Words a = as_words(sum[2 * r][w]), b = as_words(sum[2 * r + 1][w]);
                    store_words(p, choose_bits(high, add32(b, half), shift_right32<16>(add32(a, half))));
                    store_words(p + rest, choose_bits(high, shift_left32<16>(b), a));
                } else {
                    store_words(p, Shape::Cells::beside(sum[2 * r][w], sum[2 * r + 1][w]));
                }
            });
        });
    } else {
        unrolled<R>([&](int r) ALWAYS {
            unrolled<W>([&](int w) ALWAYS { store_all(state + (at + r) * 16 * V + 16 * (v + w), sum[r][w]); });
        });
    }
}

}  // namespace
