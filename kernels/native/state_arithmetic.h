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

// Memory that is prefetched while columns are multiplied: columns STATE_AHEAD lines ahead, from column `from` on `skip`
// words further; and lines of `next`, one for each column.
struct StateAhead {
    const uint32_t* next;
    int64_t lines, from, skip;
};

// Where column `k` is at `b`.
template <int W>
inline ALWAYS void fetch_ahead(const StateAhead& ahead, const uint32_t* b, int64_t k) {
    const uint32_t* far = b + STATE_AHEAD * 16 + (k < ahead.from ? 0 : ahead.skip);
    unrolled<W>([&](int w) ALWAYS { prefetch_far(far + 16 * w); });
    if (k < ahead.lines) prefetch_far(ahead.next + 16 * k);
}

// sum[r][w] += products of `count` cells of row r, at a + r * row + k * step, with those of columns, at b + k * ld.
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

// Vectors of V that R rows are multiplied with at a time.
constexpr int beside(int rows, int v) { return v % vectors_beside(rows) ? 1 : vectors_beside(rows); }

// The products of a row of C with `count` rows of B, perhaps one more, and zeros.
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

// Puts 16 channels of token t of a block in cells that are `ld` apart, of an even one with those of the next token or
// zeros.
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

// exp(x) of what is rounded to bfloat16, or multiplied with a state that is.
template <class Cells>
inline Floats decay_of(Floats x) {
    if constexpr (Cells::EACH == 2) return Cells::power(x * splat(LOG2_E));
    else return exp16(x);
}

// Adds `decay` times a state's rows [at, at + R) of a slice, [n or cells, 16 V].
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
