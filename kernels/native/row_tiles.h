// Products of many rows with panels whose numbers are stored as they are multiplied: pairs of bfloat16, and bytes times
// rows of signed bytes. A pair or four bytes are a word; one instruction multiplies a word of a row by those of 16
// outputs.
//
// One call computes several tiles of the same height. A tile of 768 inputs takes 2,300 cycles with bytes; its end is a
// branch that is predicted wrongly, so instructions between two tiles' loops do not overlap with them: calls,
// divisions, and sums that are stored for another function added 8 %.

#pragma once

#include <algorithm>
#include <cstdint>

#include "activations.h"
#include "finish.h"
#include "numbers.h"
#include "panels.h"
#include "product.h"
#include "structs.h"
#include "tiles.h"

namespace {

// What the last `tiles` of several tiles prefetch into the second-level cache, from `at` on: `lines` lines at each
// step, which is a word of a row.
struct TilesPrefetch {
    const char* at = nullptr;
    int64_t tiles = 0, lines = 0;
    // What is left for the last `count` of all tiles, each of which takes `steps` steps.
    TilesPrefetch last(int64_t count, int64_t steps) const {
        const int64_t later = std::min(count, tiles);
        return {at + (tiles - later) * lines * LINE * steps, later, lines};
    }
};

// Four signed bytes of a row. The sums are exact: results fit 32 bits, and an overflow on the way wraps around.
struct ByteWords {
    static constexpr int LEAST_ROWS = 1;  // of a tile
    using Sum = Words;
    static int64_t steps(const Weight& w) { return w.kpad / 4; }
    static constexpr int beside(int rows) { return bytes_beside(rows); }
    static Sum none() { return zero_words(); }
    static Words column(const uint8_t* b) { return in_register(without_offset(load_words(b))); }
    static Words row(const char* a) { return word_of_row(a); }
    static Sum add(Sum sum, Words x, Words column) { return dot_stored(sum, column, x); }
    // The sums of row `row`, whose first input is at `a`, of V vectors from output `begin` on.
    template <int V>
    static inline ALWAYS void outputs(
        const Product& product, int64_t row, int64_t begin, const char* a, const Sum (&sum)[V], Floats (&y)[V]
    ) {
        // for the weights' offset, after the row's bytes (make_bytes)
        const Words correction =
            SIGNED_DOTS ? zero_words() : broadcast_word(reinterpret_cast<const int8_t*>(a) + product.weight->kpad);
        const Floats scale = splat(product.scales[row]);
        const float* const scales = product.weight->scale + begin;
        unrolled<V>([&](int v) ALWAYS {
            y[v] = (to_floats(SIGNED_DOTS ? sum[v] : add32(sum[v], correction)) * scale) * load_floats(scales + v * 16);
        });
    }
};

#if PAIR_PRODUCTS
// Pairs of bfloat16, of weights whose scales belong to whole outputs.
struct PairWords {
    static constexpr int LEAST_ROWS = LEAST_TILE_ROWS;
    using Sum = Floats;
    static int64_t steps(const Weight& w) { return w.kpad / 2; }
    static constexpr int beside(int rows) { return vectors_beside(rows); }
    static Sum none() { return zero(); }
    static Words column(const uint8_t* b) { return in_register(load_words(b)); }
    static Words row(const char* a) { return broadcast_word(a); }
    static Sum add(Sum sum, Words x, Words column) { return dot_pairs(sum, x, column); }
    template <int V>
    static inline ALWAYS void outputs(
        const Product& product, int64_t, int64_t begin, const char*, const Sum (&sum)[V], Floats (&y)[V]
    ) {
        const Weight& w = *product.weight;
        const float* const scales = output_scales(w);
        unrolled<V>([&](int v) ALWAYS { y[v] = scales ? sum[v] * load_floats(scales + begin + v * 16) : sum[v]; });
    }
};
#endif

// Tiles of ByteWords or PairWords.
template <class Cells>
struct WordTiles {
    static constexpr int LEAST_ROWS = Cells::LEAST_ROWS;
    static int64_t steps(const Weight& w) { return Cells::steps(w); }
    static constexpr int beside(int rows) { return Cells::beside(rows); }

    // `count` tiles of R rows, from `row` on, times V vectors of outputs, from vector `first` of a panel on, which lies
    // at `columns`. finish(row, each) stores the tile from that row on: each(f) calls f(r, outputs) with each of its
    // rows.
    template <int R, int V, class Finish>
    static __attribute__((noinline)) void add(
        const Product& product, int64_t row, int64_t count, const uint8_t* columns, int64_t panel, int64_t first,
        TilesPrefetch ahead, const Finish& finish
    ) {
        const int64_t lda = product.ld_bytes(), begin = panel * PANEL + first * 16,
                      bytes = 4 * Cells::steps(*product.weight);
        const char* a = reinterpret_cast<const char*>(product.row_bytes(row));
        columns += first * LINE;
        for (int64_t left = count; left; left--, row += R, a += R * lda) {
            const int64_t lines = left <= ahead.tiles ? ahead.lines : 0;
            const char* const a_end = a + bytes;
            const uint8_t* b = columns;
            typename Cells::Sum sum[R][V];
            unrolled<R>([&](int r) ALWAYS { unrolled<V>([&](int v) ALWAYS { sum[r][v] = Cells::none(); }); });
            int64_t fetched = 0;
            for (const char* x = a; x < a_end; fetched++) {
                if (fetched < R) fetch_outputs<1, V>(product, row + fetched, begin);
                for (const char* const stop = std::min(a_end, x + LINE); x < stop; x += 4, b += 4 * LINE) {
                    for (int64_t line = 0; line < lines; line++, ahead.at += LINE) prefetch_far(ahead.at);
                    Words column[V];
                    unrolled<V>([&](int v) ALWAYS { column[v] = Cells::column(b + v * LINE); });
                    unrolled<R>([&](int r) ALWAYS {
                        const Words cell = Cells::row(x + r * lda);
                        unrolled<V>([&](int v) ALWAYS { sum[r][v] = Cells::add(sum[r][v], cell, column[v]); });
                    });
                }
            }
            in_registers(sum);
            finish(row, [&](const auto& finish_row) ALWAYS {
                unrolled<R>([&](int r) ALWAYS {
                    Floats y[V];
                    Cells::outputs(product, row + r, begin, a + r * lda, sum[r], y);
                    finish_row(r, y);
                });
            });
        }
    }
};

// Whether `FinishAtOnce` can store the outputs of a product, with V vectors from output `begin` on.
template <int V>
bool can_finish_at_once(const Product& product, int64_t begin) {
    const Weight& w = *product.weight;
    const bool squared = !w.bias && product.activation == Activation::RELU_SQUARED && product.store == STORE_BF16;
    return w.n - begin >= 16 * V && !w.gated && (product.activation == Activation::NONE || squared);
}

// Does what `finish` does, with sums in registers. Functions capture copies: what they captured by reference would be
// loaded again after each store.
template <int V>
struct FinishAtOnce {
    const Product& product;
    int64_t begin;
    template <class Each>
    inline ALWAYS void operator()(int64_t row, const Each& each) const {
        if (product.weight->bias) store_as<true>(row, each);
        else if (product.activation == Activation::RELU_SQUARED)
            store<false, STORE_BF16, Activation::RELU_SQUARED>(row, each);
        else store_as<false>(row, each);
    }

  private:
    template <bool BIAS, class Each>
    inline ALWAYS void store_as(int64_t row, const Each& each) const {
        if (product.store == STORE) store<BIAS, STORE, Activation::NONE>(row, each);
        else if (product.store == ADD) store<BIAS, ADD, Activation::NONE>(row, each);
        else store<BIAS, STORE_BF16, Activation::NONE>(row, each);
    }
    template <bool BIAS, int64_t STORED, Activation ACTIVATION, class Each>
    inline ALWAYS void store(int64_t row, const Each& each) const {
        const Stored<STORED, V, true> stored(product, row, begin, product.weight->n);
        const float* const bias = BIAS ? product.weight->bias + begin : nullptr;
        each([=](int r, Floats(&y)[V]) ALWAYS {
            if constexpr (BIAS) unrolled<V>([&](int v) ALWAYS { y[v] = y[v] + load_floats(bias + v * 16); });
            if constexpr (ACTIVATION == Activation::RELU_SQUARED)
                unrolled<V>([&y](int v) ALWAYS { y[v] = relu_squared(y[v]); });
            stored(r, y);
        });
    }
};

// Stores V vectors of each row's sums in memory, for `finish`.
template <int V>
struct KeepSums {
    float* to;  // [rows, PANEL]
    inline ALWAYS void operator()(int r, Floats (&y)[V]) const {
        unrolled<V>([&](int v) ALWAYS { store_floats(to + r * PANEL + v * 16, y[v]); });
    }
};

// The other cases of `finish`, through memory.
template <int R, int V>
struct FinishTile {
    const Product& product;
    int64_t begin;
    template <class Each>
    inline ALWAYS void operator()(int64_t row, const Each& each) const {
        alignas(64) float sums[R * PANEL];
        each(KeepSums<V>{sums});
        finish<V>(product, sums, row, R, begin);
    }
};

// `count` tiles of `height` rows, from row `row` on. Where registers do not suffice for V vectors, each tile goes over
// the panel several times.
template <class Tiles, int V, int R = MOST_TILE_ROWS>
void equal_tiles(
    const Product& product, int64_t height, int64_t row, int64_t count, const uint8_t* columns, int64_t panel,
    int64_t first, TilesPrefetch ahead
) {
    if constexpr (R > Tiles::LEAST_ROWS) {
        if (height < R) return equal_tiles<Tiles, V, R - 1>(product, height, row, count, columns, panel, first, ahead);
    }
    constexpr int W = std::min(Tiles::beside(R), V);
    const int64_t begin = panel * PANEL + first * 16;
    if constexpr (W == V) {
        if (can_finish_at_once<V>(product, begin))
            Tiles::template add<R, V>(
                product, row, count, columns, panel, first, ahead, FinishAtOnce<V>{product, begin}
            );
        else
            Tiles::template add<R, V>(
                product, row, count, columns, panel, first, ahead, FinishTile<R, V>{product, begin}
            );
    } else {
        alignas(64) float sums[R * PANEL];
        for (int64_t left = count; left; left--, row += R) {
            TilesPrefetch of_tile;
            if (left <= ahead.tiles) of_tile = {ahead.last(left, Tiles::steps(*product.weight)).at, 1, ahead.lines};
            for (int v = 0; v < V; v += W, of_tile = {}) {
                const auto keep = [to = sums + v * 16](int64_t, const auto& each) ALWAYS { each(KeepSums<W>{to}); };
                Tiles::template add<R, W>(product, row, 1, columns, panel, first + v, of_tile, keep);
            }
            finish<V>(product, sums, row, R, begin);
        }
    }
}

// Rows [begin, end) times V vectors of a panel, which is at `columns`, in tiles of nearly equal height.
template <class Tiles, int V>
void row_tiles(const Product& product, int64_t begin, int64_t end, const uint8_t* columns, PanelPart part) {
    const int64_t rows = end - begin, count = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS, height = rows / count,
                  taller = rows % count;
    const int64_t steps = Tiles::steps(*product.weight);
    TilesPrefetch ahead;
    if (part.next && count > 1) {
        const int64_t tiles = std::min(count, PREFETCHING_TILES);
        ahead = {part.next, tiles, (panel_bytes(*product.weight) / LINE + tiles * steps - 1) / (tiles * steps)};
    }
    const TilesPrefetch last = ahead.last(count - taller, steps);
    if (taller)
        equal_tiles<Tiles, V>(
            product, height + 1, begin, taller, columns, part.panel, part.first,
            {ahead.at, ahead.tiles - last.tiles, ahead.lines}
        );
    equal_tiles<Tiles, V>(
        product, height, begin + taller * (height + 1), count - taller, columns, part.panel, part.first, last
    );
}

// The same for as many vectors as the part has.
template <class Tiles>
void row_tiles(const Product& product, int64_t begin, int64_t end, const uint8_t* columns, PanelPart part) {
    with_vectors(part.count, [&](auto vectors) { row_tiles<Tiles, vectors()>(product, begin, end, columns, part); });
}

}  // namespace
