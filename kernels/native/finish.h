// From the sums of a product to its outputs: bias, activation, scale.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "activations.h"
#include "numbers.h"
#include "panels.h"
#include "product.h"
#include "structs.h"
#include "tiles.h"

namespace {

constexpr int64_t MOST_TILE_ROWS = 6;  // rows of a register tile, at most: 6 x 4 accumulators of 16
constexpr int64_t LEAST_TILE_ROWS = (MOST_TILE_ROWS + 1) / 2;  // if there are several tiles, of nearly equal height

// Stores V vectors of a tile's rows, or adds them to what is stored, from row `row` and output `first` on. Not WHOLE:
// the last lanes may not be outputs. A row's old numbers are all read before any is written, because a store may wait
// for its cache line, and later reads would wait with it.
template <int64_t STORED, int V, bool WHOLE>
struct Stored {
    using Number = std::conditional_t<STORED == STORE_BF16, uint16_t, float>;
    Number* to;
    int64_t ldo;
    float scale;
    const float* row_scale;
    Mask m[V];

    inline ALWAYS Stored(const Product& product, int64_t row, int64_t first, int64_t outputs)
        : to(static_cast<Number*>(product.out) + row * product.ldo + first), ldo(product.ldo), scale(product.scale),
          row_scale(product.row_scale ? product.row_scale + row : nullptr) {
        for (int v = 0; v < V; v++)
            m[v] = WHOLE ? Mask(0xffff) : first_lanes(std::max<int64_t>(0, outputs - first - v * 16));
    }
    inline ALWAYS void operator()(int r, Floats (&y)[V]) const {
        Number* const place = to + r * ldo;
        if constexpr (STORED == ADD) {
            const Floats factor = splat(row_scale ? scale * row_scale[r] : scale);
            unrolled<V>([&](int v) ALWAYS {
                y[v] = fmadd(y[v], factor, WHOLE ? load_all(place + v * 16) : load16(place + v * 16, m[v]));
            });
        }
        unrolled<V>([&](int v) ALWAYS {
            if constexpr (WHOLE) store_all(place + v * 16, y[v]);
            else store16(place + v * 16, m[v], y[v]);
        });
    }
};

// Stores `rows` rows of sums, V * 16 wide: + bias, the activation, then stored or added. For a gated weight, vectors of
// gates and of gated outputs alternate, and half as many results are stored.
template <int64_t STORED, int V, bool WHOLE, bool GATED>
void finish(const Product& product, const float* sums, int64_t row, int64_t rows, int64_t begin) {
    constexpr int OUT = GATED ? V / 2 : V;
    const Weight& w = *product.weight;
    const Stored<STORED, OUT, WHOLE> stored(product, row, GATED ? begin / 2 : begin, GATED ? product.outputs : w.n);
    for (int r = 0; r < rows; r++, sums += PANEL) {
        Floats sum[V], y[OUT];
        for (int v = 0; v < V; v++) sum[v] = load_floats(sums + v * 16);
        if (w.bias)
            for (int v = 0; v < V; v++) {
                const Mask outputs = first_lanes(std::max<int64_t>(0, w.n - begin - v * 16));
                sum[v] = sum[v] + load16(w.bias + begin + v * 16, outputs);
            }
        for (int v = 0; v < OUT; v++) y[v] = sum[GATED ? 2 * v : v];
        activate(y, product.activation);
        if constexpr (GATED)
            for (int v = 0; v < OUT; v++) y[v] = y[v] * sum[2 * v + 1];
        stored(r, y);
    }
}

template <int64_t STORED, int V>
void finish(const Product& product, const float* sums, int64_t row, int64_t rows, int64_t begin) {
    if constexpr (STORED != ADD && V > 1)
        if (product.weight->gated) {
            if (product.outputs - begin / 2 >= 8 * V) finish<STORED, V, true, true>(product, sums, row, rows, begin);
            else finish<STORED, V, false, true>(product, sums, row, rows, begin);
            return;
        }
    if (product.weight->n - begin >= 16 * V) finish<STORED, V, true, false>(product, sums, row, rows, begin);
    else finish<STORED, V, false, false>(product, sums, row, rows, begin);
}

template <int V>
void finish(const Product& product, const float* sums, int64_t row, int64_t rows, int64_t begin) {
    if (product.store == STORE_BF16) finish<STORE_BF16, V>(product, sums, row, rows, begin);
    else if (product.store == ADD) finish<ADD, V>(product, sums, row, rows, begin);
    else finish<STORE, V>(product, sums, row, rows, begin);
}

// Prefetches the memory that a tile's outputs are stored in or added to before its sums are complete. Stores complete
// in order, so each one that misses the second-level cache would delay the next ones, and finally the next tile.
template <int R, int V>
inline ALWAYS void fetch_outputs(const Product& product, int64_t row, int64_t begin) {
    const int64_t size = product.store == STORE_BF16 ? 2 : 4, bytes = 16 * V * size / (product.weight->gated ? 2 : 1);
    const char* to = static_cast<const char*>(product.out) +
                     (row * product.ldo + (product.weight->gated ? begin / 2 : begin)) * size;
    for (int r = 0; r < R; r++, to += product.ldo * size)
        for (int64_t at = 0; at < bytes; at += LINE) fetch_to_write(to + at);
}

}  // namespace
