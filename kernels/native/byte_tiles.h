// Tiles of products with rows of signed bytes.
//
// Several tiles of the same height are one call. A tile of 768 inputs takes some 2,300 cycles; its end is a branch that is
// predicted wrongly, so what lies between two tiles' loops takes as long as it looks: calls, divisions and sums that are stored for
// another function added 8 %.

#pragma once

#include <algorithm>
#include <cstdint>

#include "activations.h"
#include "finish.h"
#include "numbers.h"
#include "panels.h"
#include "structs.h"
#include "tiles.h"

namespace {

// What the last `tiles` of several tiles prefetch into the second-level cache: so many lines at each step of four inputs.
struct AheadOfTiles {
    const char* at = nullptr;
    int64_t tiles = 0, lines = 0;
    // The same for the last `count` tiles of these, after those before them.
    AheadOfTiles last(int64_t count, int64_t inputs) const {
        const int64_t later = std::min(count, tiles);
        return {at + (tiles - later) * lines * LINE * (inputs / 4), later, lines};
    }
};

// `count` tiles of R rows, from `row` on, times V vectors of outputs, from vector `first` of a panel on. finish(row, each) stores the
// tile from that row on: each(f) calls f(r, sums) with each of its rows. The sums are exact: they fit 32 bits, and what is beyond
// on the way is no loss.
template <int R, int V, class Finish>
__attribute__((noinline)) void add_bytes(
    const Product& job, int64_t row, int64_t count, int64_t panel, int64_t first, AheadOfTiles ahead, const Finish& finish
) {
    const Weight& w = *job.weight;
    const int64_t lda = 2 * job.lda, begin = panel * PANEL + first * 16;
    const int8_t* a = static_cast<const int8_t*>(job.a) + row * lda;
    const uint8_t* const columns = static_cast<const uint8_t*>(w.data) + panel * w.kpad * PANEL + first * 64;
    for (int64_t left = count; left; left--, row += R, a += R * lda) {
        const int64_t lines = left <= ahead.tiles ? ahead.lines : 0;
        const int8_t* const a_end = a + w.kpad;
        const uint8_t* b = columns;
        Words sum[R][V];
        unrolled<R>([&](int r) ALWAYS { unrolled<V>([&](int v) ALWAYS { sum[r][v] = zero_words(); }); });
        int64_t fetched = 0;
        for (const int8_t* x = a; x < a_end; fetched++) {
            if (fetched < R) fetch_outputs<1, V>(job, row + fetched, begin);
            for (const int8_t* const stop = std::min(a_end, x + LINE); x < stop; x += 4, b += 4 * PANEL) {
                for (int64_t line = 0; line < lines; line++, ahead.at += LINE) prefetch_far(ahead.at);
                Words column[V];
                unrolled<V>([&](int v) ALWAYS { column[v] = in_register(without_offset(load_words(b + v * 64))); });
                add_bytes_of(x, lda, column, sum);
            }
        }
        in_registers(sum);
        const float *const scales = job.scales + row, *const scale = w.scale + begin;
        finish(row, [&](const auto& finish_row) ALWAYS {
            unrolled<R>([&](int r) ALWAYS {
                const Words behind = SIGNED_DOTS ? zero_words() : broadcast_word(a_end + r * lda);  // what the offset adds
                Floats y[V];
                unrolled<V>([&](int v) ALWAYS {
                    const Words whole = SIGNED_DOTS ? sum[r][v] : add32(sum[r][v], behind);
                    y[v] = (to_floats(whole) * splat(scales[r])) * load_floats(scale + v * 16);
                });
                finish_row(r, y);
            });
        });
    }
}

// Whether `FinishAtOnce` does what a product asks for, with V vectors from output `begin` on.
template <int V>
bool is_simple(const Product& job, int64_t begin) {
    const Weight& w = *job.weight;
    const bool squared = job.activation == Activation::RELU_SQUARED && job.store == STORE_BF16;
    return w.n - begin >= 16 * V && !w.gated && !w.bias && (job.activation == Activation::NONE || squared);
}

// Does what `finish` does, with sums in registers. What a function captures is a copy: after each store it would be loaded again.
template <int V>
struct FinishAtOnce {
    const Product& job;
    int64_t begin;
    template <class Each>
    inline ALWAYS void operator()(int64_t row, const Each& each) const {
        const int64_t ldo = job.ldo, place = row * ldo + begin;
        float* const floats = static_cast<float*>(job.out) + place;
        uint16_t* const halves = static_cast<uint16_t*>(job.out) + place;
        if (job.store == STORE) {
            each([=](int r, Floats (&y)[V]) ALWAYS { unrolled<V>([=, &y](int v) ALWAYS { store_floats(floats + r * ldo + v * 16, y[v]); }); });
        } else if (job.store == ADD) {
            const float* const row_scale = job.row_scale ? job.row_scale + row : nullptr;
            const float all = job.scale;
            each([=](int r, Floats (&y)[V]) ALWAYS {
                const Floats scale = splat(row_scale ? all * row_scale[r] : all);
                float* const to = floats + r * ldo;
                unrolled<V>([=, &y](int v) ALWAYS { store_floats(to + v * 16, fmadd(y[v], scale, load_floats(to + v * 16))); });
            });
        } else if (job.activation == Activation::NONE) {
            each([=](int r, Floats (&y)[V]) ALWAYS { unrolled<V>([=, &y](int v) ALWAYS { store_bf16(halves + r * ldo + v * 16, y[v]); }); });
        } else {
            each([=](int r, Floats (&y)[V]) ALWAYS {
                unrolled<V>([=, &y](int v) ALWAYS { store_bf16(halves + r * ldo + v * 16, relu_squared(y[v])); });
            });
        }
    }
};

// `count` tiles of `height` rows.
template <int V, int R = ROWS>
void equal_tiles(const Product& job, int64_t height, int64_t row, int64_t count, int64_t panel, int64_t first, AheadOfTiles ahead) {
    if constexpr (R > 1) {
        if (height < R) return equal_tiles<V, R - 1>(job, height, row, count, panel, first, ahead);
    }
    constexpr int W = bytes_beside(R) < V ? bytes_beside(R) : V;
    const int64_t begin = panel * PANEL + first * 16;
    if constexpr (W == V) {
        if (is_simple<V>(job, begin)) return add_bytes<R, V>(job, row, count, panel, first, ahead, FinishAtOnce<V>{job, begin});
    }
    alignas(64) float sums[R * PANEL];
    for (int64_t left = count; left; left--, row += R) {
        for (int v = 0; v < V; v += W) {
            const auto keep = [to = sums + v * 16](int64_t, const auto& each) ALWAYS {
                each([to](int r, Floats (&y)[W]) ALWAYS { unrolled<W>([=, &y](int i) ALWAYS { store_floats(to + r * PANEL + i * 16, y[i]); }); });
            };
            const bool prefetches = !v && left <= ahead.tiles;
            add_bytes<R, W>(job, row, 1, panel, first + v, prefetches ? AheadOfTiles{ahead.last(left, job.weight->kpad).at, 1, ahead.lines} : AheadOfTiles{}, keep);
        }
        finish<R, V>(job, sums, row, begin);
    }
}

// Rows [begin, end), in tiles of nearly equal height. `next`: see `tiles`.
template <int V>
void byte_tiles(const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t first, const char* next) {
    const Weight& w = *job.weight;
    const int64_t rows = end - begin, count = (rows + ROWS - 1) / ROWS, height = rows / count, higher = rows % count;
    AheadOfTiles ahead;
    if (next && count > 1) {
        const int64_t tiles = std::min(count, SPREAD), looks = tiles * (w.kpad / 4);
        ahead = {next, tiles, (panel_bytes(w) / LINE + looks - 1) / looks};
    }
    if (const int64_t before = ahead.tiles - std::min(count - higher, ahead.tiles); higher)
        equal_tiles<V>(job, height + 1, begin, higher, panel, first, {ahead.at, before, ahead.lines});
    equal_tiles<V>(job, height, begin + higher * (height + 1), count - higher, panel, first, ahead.last(count - higher, w.kpad));
}

}  // namespace
