// Tiles of AMX of matrix products: up to 16 rows times vectors of 16 columns of a panel. A panel's rows of 64 outputs are
// what these tiles need, so weights are stored as for the other instruction sets.
//
// 32 inputs of bfloat16 are one step: even and odd inputs are summed from zero on, and both sums are then added. A row's bits
// depend on no other row, but are not those of dot_pairs: every product with bfloat16 weights uses tiles, of one row as of many.
// Sums of bytes are exact, so few rows may use dot_bytes instead.

#pragma once

#if defined(__AMX_BF16__) || defined(SACCADE_EMULATE_AMX)
#define AMX_TILES 1

#include <cstdint>
#include <cstring>

#include "amx.h"
#include "tiles.h"

namespace {

struct DotBf16 {
    template <int C, int A, int B>
    static void add() { dot_bf16<C, A, B>(); }
};
struct DotBytes {
    template <int C, int A, int B>
    static void add() { dot_bytes4<C, A, B>(); }
};

// Tiles 0 to 3 are the sums of four vectors, 4 the rows, 5 to 7 columns.
template <class Dot, int V>
inline void add_tiles(const char* a, int64_t lda, const char* b, int64_t ldb) {
    load_tile<4>(a, lda);
    load_tile<5>(b, ldb);
    Dot::template add<0, 4, 5>();
    if constexpr (V > 1) {
        load_tile<6>(b + AMX_BYTES, ldb);
        Dot::template add<1, 4, 6>();
    }
    if constexpr (V > 2) {
        load_tile<7>(b + 2 * AMX_BYTES, ldb);
        Dot::template add<2, 4, 7>();
        load_tile<5>(b + 3 * AMX_BYTES, ldb);
        Dot::template add<3, 4, 5>();
    }
}

// `rows` rows of `length` bytes, `lda` bytes apart, times 16 * V columns: float32 or int32 [rows, PANEL].
template <class Dot, int V>
void multiply_tiles(const char* a, int64_t lda, int64_t rows, const char* b, int64_t length, Ahead ahead, void* sums) {
    constexpr int64_t LDB = 4 * PANEL;
    TileConfig config;
    for (int i = 0; i < 8; i++) config.rows[i] = i < 5 ? uint8_t(rows) : uint8_t(AMX_ROWS), config.bytes[i] = AMX_BYTES;
    configure_tiles(config);
    int64_t at = 0;
    for (; at + AMX_BYTES <= length; at += AMX_BYTES, b += AMX_ROWS * LDB) {
        for (int64_t look = 0; look < AMX_ROWS / STRIDE; look++) ahead.step();
        add_tiles<Dot, V>(a + at, lda, b, LDB);
    }
    if (at < length) {  // the other inputs are zeros
        alignas(64) char x[AMX_ROWS][AMX_BYTES] = {}, columns[AMX_ROWS][V * AMX_BYTES] = {};
        for (int64_t r = 0; r < rows; r++) std::memcpy(x[r], a + r * lda + at, length - at);
        for (int64_t i = 0; i < (length - at) / 4; i++) std::memcpy(columns[i], b + i * LDB, V * AMX_BYTES);
        add_tiles<Dot, V>(x[0], AMX_BYTES, columns[0], V * AMX_BYTES);
    }
    char* const to = static_cast<char*>(sums);
    store_tile<0>(to, LDB);
    if constexpr (V > 1) store_tile<1>(to + AMX_BYTES, LDB);
    if constexpr (V > 2) store_tile<2>(to + 2 * AMX_BYTES, LDB), store_tile<3>(to + 3 * AMX_BYTES, LDB);
    release_tiles();
}

// Like tile_bf16 and tile_bytes, for up to AMX_ROWS rows; `a` and `lda` in bytes.
template <int V>
void tile_amx(const char* a, int64_t lda, const float* scales, int64_t rows, const Weight& w, int64_t panel, int64_t first, Ahead ahead, float* sums) {
    const char* b = static_cast<const char*>(w.data) + panel * panel_bytes(w) + first * AMX_BYTES;
    if (w.kind == BF16) return multiply_tiles<DotBf16, V>(a, lda, rows, b, 2 * w.kpad, ahead, sums);
    multiply_tiles<DotBytes, V>(a, lda, rows, b, w.kpad, ahead, sums);
    for (int v = 0; v < V; v++) {
        const Floats scale = load_floats(w.scale + panel * PANEL + (first + v) * 16);
        for (int64_t r = 0; r < rows; r++) {
            float* const y = sums + r * PANEL + v * 16;
            const Words sum = add32(load_words(y), broadcast_word(a + r * lda + w.kpad));  // what the weights' offset adds
            store_floats(y, (to_floats(sum) * splat(scales[r])) * scale);
        }
    }
}

}  // namespace

#else
#define AMX_TILES 0
#endif
