// Products of rows with panels by tiles of AMX: of bfloat16 with weights that are bfloat16 or unpacked to it, and of bytes with bytes.
//
// Integers of 16 bits are two bytes, so 16 rows of them are two tiles: of lows and of highs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "finish.h"
#include "panels.h"
#include "structs.h"
#include "tiles_amx.h"

namespace {

#if AMX_TILES

constexpr int64_t HEIGHT = 2 * AMX_ROWS;  // rows of a block

// From LONG_INPUTS on, the rows of a unit of work and a panel would not both fit in the second-level cache, so that each panel would read all rows
// from beyond it. Units of LONG_ROWS to LONG_BLOCK rows then have several panels, which take a slice of the inputs after the other.
constexpr int64_t LONG_INPUTS = 4096, LONG_SLICE = 2048, LONG_ROWS = 64, LONG_BLOCK = 256, LONG_PANELS = 4;

int64_t summed_groups(const Weight& w);  // scaled.h
inline bool is_long(const Weight& w) { return w.operand == BF16 && w.kpad >= LONG_INPUTS && (w.kind == BF16 || summed_groups(w) == 1); }
void unpack_and_multiply(const Product& job, int64_t row, int64_t rows, int64_t panel, uint16_t* unpacked, const char* next);  // unpack_amx.h
void long_panels(const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t panels_end, const char* next);

// Sums of bytes of V vectors as float32. The corrections for the weights' offset lie after a row's bytes.
template <int V>
void scale_bytes(const Product& job, int64_t row, int64_t rows, int64_t panel, int64_t first, float* sums) {
    const Weight& w = *job.weight;
    const char* behind = static_cast<const char*>(job.a) + 2 * row * job.lda + w.kpad;
    Floats scale[V];
    for (int v = 0; v < V; v++) scale[v] = load_floats(w.scale + panel * PANEL + (first + v) * 16);
    for (int64_t r = 0; r < rows; r++, behind += 2 * job.lda, sums += PANEL)
        for (int v = 0; v < V; v++) {
            const Words sum = add32(load_words(sums + v * 16), broadcast_word(behind));
            store_floats(sums + v * 16, (to_floats(sum) * splat(job.scales[row + r])) * scale[v]);
        }
}

// total = sum * scale, of the first group, or += of a later one.
inline void add_group(const Weight& w, int64_t panel, int64_t g, int64_t rows, const float* sums, float* totals) {
    const int64_t at = (panel * summed_groups(w) + g) * PANEL;
    Floats scale[4];
    for (int v = 0; v < 4; v++) scale[v] = group_scales(w, at + v * 16);
    for (int64_t i = 0; i < rows * PANEL; i += PANEL)
        for (int v = 0; v < 4; v++) {
            float* const total = totals + i + v * 16;
            store_floats(total, fmadd(load_floats(sums + i + v * 16), scale[v], g ? load_floats(total) : zero()));
        }
}

// Sums times the scales of whole outputs, where a weight has them.
inline void scale_outputs(const Weight& w, int64_t panel, int64_t rows, float* sums) {
    const float* const scales = w.kind == NVFP4 ? w.outer : w.kind == FP8 || w.kind == UINT4 ? w.scale : nullptr;
    if (!scales) return;
    for (int64_t i = 0; i < rows * PANEL; i += 16) store_floats(sums + i, load_floats(sums + i) * load_floats(scales + panel * PANEL + i % PANEL));
}

// Rows [row, row + rows) of T tiles, which lie at `a`, times V vectors of a panel, of which W are multiplied at a time. `columns`: what they
// are multiplied with, from the first vector on. Tiles are configured.
template <class Dot, int T, int W, int V>
void tile_rows(
    const Product& job, int64_t row, int64_t rows, const TileRows& a, const char* columns, int64_t panel, int64_t first, bool& fresh, Ahead ahead
) {
    using Block = TileBlock<Dot, T, W>;
    const Weight& w = *job.weight;
    const bool bytes = w.operand == BYTES;
    const int64_t groups = bytes || w.kind == BF16 ? 1 : summed_groups(w), width = groups > 1 ? w.group : w.kpad, size = bytes ? 1 : 2;
    alignas(64) float sums[T * AMX_ROWS * PANEL], totals[T * AMX_ROWS * PANEL];
    for (int64_t r = 0; r < rows; r++) fetch_outputs<1, V>(job, row + r, panel * PANEL + first * 16);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = g * width, inputs = std::min(w.kpad - from, width);
        for (int v = 0; v < V; v += W) {
            if (!fresh) Block::zero();
            fresh = false;
            Block::add(a, from * size, columns + from * size * PANEL + v * AMX_BYTES, inputs * size, ahead);
            Block::store(sums + v * 16);
        }
        if (groups > 1) add_group(w, panel, g, rows, sums, totals);
    }
    if (bytes) scale_bytes<V>(job, row, rows, panel, first, sums);
    else if (groups == 1 && w.kind != BF16) scale_outputs(w, panel, rows, sums);
    finish<V>(job, groups > 1 ? totals : sums, row, rows, panel * PANEL + first * 16);
}

// Rows [begin, end) times V vectors of a panel: pairs of tiles, then the remaining rows. `next`: a panel to prefetch during the last blocks.
template <class Dot, int V>
void blocks_of_tiles(const Product& job, int64_t begin, int64_t end, const char* columns, int64_t panel, int64_t first, const char* next) {
    constexpr int W = V < 2 ? V : 2;
    const Weight& w = *job.weight;
    const int64_t pieces = (end - begin + HEIGHT - 1) / HEIGHT, steps = w.kpad * (w.operand == BYTES ? 1 : 2) / AMX_BYTES * (V / W) + 1;
    int64_t configured = 0;
    bool fresh = false;
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t row = begin + i * HEIGHT, rows = std::min(HEIGHT, end - row);
        const TileRows a = TileRows::consecutive(static_cast<const uint16_t*>(job.a) + row * job.lda, 2 * job.lda, rows);
        const Ahead ahead = ahead_of(i, pieces, next, panel_bytes(w), steps);
        if (rows != configured) {
            if (rows > AMX_ROWS) TileBlock<Dot, 2, W>::begin(a);
            else TileBlock<Dot, 1, V>::begin(a);
            configured = rows, fresh = true;
        }
        if (rows > AMX_ROWS) tile_rows<Dot, 2, W, V>(job, row, rows, a, columns, panel, first, fresh, ahead);
        else tile_rows<Dot, 1, V, V>(job, row, rows, a, columns, panel, first, fresh, ahead);
    }
    release_tiles();
}

// Rows [begin, end) of integers of 16 bits times V vectors of a panel of bytes.
template <int V>
void blocks_of_integers(const Product& job, int64_t begin, int64_t end, const char* columns, int64_t panel, int64_t first, const char* next) {
    constexpr int W = V < 2 ? V : 2;
    using Block = TileBlock<DotBytes, 2, W>;
    const Weight& w = *job.weight;
    const int64_t pieces = (end - begin + AMX_ROWS - 1) / AMX_ROWS, steps = w.kpad / AMX_BYTES * (V / W) + 1, lda = 2 * job.lda;
    int64_t configured = 0;
    alignas(64) int32_t parts[2][AMX_ROWS * PANEL];  // sums of lows and of highs
    alignas(64) float sums[AMX_ROWS * PANEL];
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t row = begin + i * AMX_ROWS, rows = std::min(AMX_ROWS, end - row);
        const char* const a = reinterpret_cast<const char*>(static_cast<const uint16_t*>(job.a) + row * job.lda);
        const TileRows planes = TileRows::planes(a, lda, rows, w.kpad);
        Ahead ahead = ahead_of(i, pieces, next, panel_bytes(w), steps);
        if (rows != configured) Block::begin(planes), configured = rows;
        for (int64_t r = 0; r < rows; r++) fetch_outputs<1, V>(job, row + r, panel * PANEL + first * 16);
        for (int v = 0; v < V; v += W) {
            Block::zero();
            Block::add(planes, 0, columns + v * AMX_BYTES, w.kpad, ahead);
            Block::store(&parts[0][v * 16]);
        }
        for (int64_t r = 0; r < rows; r++) {
            const char* const behind = a + r * lda + 2 * w.kpad;  // corrections for the weights' offset
            for (int64_t at = r * PANEL; at < r * PANEL + 16 * V; at += 16) {
                const LongSum sum = LongSum::of(add32(load_words(parts[0] + at), broadcast_word(behind)), add32(load_words(parts[1] + at), broadcast_word(behind + 4)));
                const Floats scale = load_floats(w.scale + panel * PANEL + first * 16 + at % PANEL);
                store_floats(sums + at, (sum.rounded() * scale) * splat(job.scales[row + r]));
            }
        }
        finish<V>(job, sums, row, rows, panel * PANEL + first * 16);
    }
    release_tiles();
}

// f with the number of vectors.
template <class F>
void with_vectors(int64_t count, F&& f) {
    if (count == 4) f(std::integral_constant<int, 4>());
    else if (count == 2) f(std::integral_constant<int, 2>());
    else f(std::integral_constant<int, 1>());
}

// `tiles` in products.h, by tiles of AMX.
inline void amx_tiles(const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t first, int64_t count, const char* next) {
    const Weight& w = *job.weight;
    const char* columns = static_cast<const char*>(w.data) + panel * panel_bytes(w);
    if (w.operand == BF16 && w.kind != BF16) {
        if (end - begin <= HEIGHT) return unpack_and_multiply(job, begin, end - begin, panel, nullptr, next);
        auto* const unpacked = reinterpret_cast<uint16_t*>(own_memory<0>(w.kpad * PANEL / 2));
        if (!is_unpacked(w, panel)) {
            unpack_and_multiply(job, begin, AMX_ROWS, panel, unpacked, nullptr);
            begin += AMX_ROWS;
        }
        columns = reinterpret_cast<const char*>(unpacked);
    } else if (end - begin <= HEIGHT) {
        next = nullptr;  // the processor's own prefetchers follow a panel that is read once
    }
    columns += first * AMX_BYTES;
    with_vectors(count, [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        if (w.operand == BF16) blocks_of_tiles<DotBf16, V>(job, begin, end, columns, panel, first, next);
        else if (w.operand == BYTES) blocks_of_tiles<DotBytes, V>(job, begin, end, columns, panel, first, next);
        else blocks_of_integers<V>(job, begin, end, columns, panel, first, next);
    });
}

#else

constexpr int64_t LONG_BLOCK = 1, LONG_ROWS = 1, LONG_PANELS = 1;
inline bool is_long(const Weight&) { return false; }

#endif

}  // namespace
