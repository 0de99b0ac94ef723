// Tiles of AMX of matrix products: blocks of rows times vectors of 16 outputs of a panel. Tiles take numbers in the
// order in which a panel has them, so weights are stored as for the other instruction sets.
//
// 32 inputs of bfloat16 are one step: the even and the odd ones are summed separately, from zero on, and both sums are
// then added. A row's bits depend on no other row, but are not those of dot_pairs: every product with rows of bfloat16
// uses tiles, also those of one row. Sums of bytes are exact, so few rows may use dot_bytes instead.

#pragma once

#include "panels.h"

#if AMX_TILES

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "tiles.h"

namespace {

struct DotBf16 {
    static constexpr int64_t SIZE = 2;  // bytes of an input
    template <int C, int A, int B>
    static void add() {
        dot_bf16<C, A, B>();
    }
};
struct DotBytes {
    static constexpr int64_t SIZE = 1;
    template <int C, int A, int B>
    static void add() {
        dot_bytes4<C, A, B>();
    }
};

// Rows of one or two tiles, each of at most AMX_ROWS, in memory.
struct TileRows {
    const char* at;     // the first row of a tile ...
    int64_t lda, next;  // ... bytes from there to the next row, and to the first row of the other tile
    int64_t count[2];   // rows of each tile

    static TileRows consecutive(const void* a, int64_t lda, int64_t rows) {
        const int64_t first = std::min(rows, AMX_ROWS);
        return {static_cast<const char*>(a), lda, AMX_ROWS * lda, {first, rows - first}};
    }
    // The lows and the highs of the same rows.
    static TileRows planes(const void* a, int64_t lda, int64_t rows, int64_t highs) {
        return {static_cast<const char*>(a), lda, highs, {rows, rows}};
    }
};

// T tiles of rows times V vectors of outputs. Two tiles of rows times two vectors load four tiles for four products;
// one times four loads five. Tiles 0 to 3 are sums (of tile t and vector v: t * V + v), 4 and with T == 2 also 5 are
// rows, and the others numbers of the panel.
template <class Dot, int T, int V>
struct TileBlock {
    static_assert(T * V <= 4);
    static constexpr int64_t LD_SUMS = 4 * PANEL;  // bytes between rows of sums in memory

    // Configures the tiles, for as many rows as these; sums are zeros.
    static void begin(const TileRows& rows) {
        TileConfig config = full_tiles();
        for (int t = 0; t < T; t++) {
            for (int v = 0; v < V; v++) config.rows[t * V + v] = uint8_t(rows.count[t]);
            config.rows[4 + t] = uint8_t(rows.count[t]);
        }
        configure_tiles(config);
    }
    static void zero() { zero_tiles<T * V>(); }

    // Adds products of bytes [from, from + length) of the rows with the panel's numbers from `b` on. 4 bytes of a row
    // are multiplied with V vectors, and the next ones with those `ldb` bytes further. ahead.step(): called once for
    // each 64 bytes of the rows.
    template <class Ahead>
    static void add(const TileRows& rows, int64_t from, const char* b, int64_t ldb, int64_t length, Ahead& ahead) {
        const char* const a = rows.at + from;
        int64_t at = 0;
        for (; at + AMX_BYTES <= length; at += AMX_BYTES, b += AMX_ROWS * ldb) {
            ahead.step();
            step(a + at, rows.lda, rows.next, b, ldb, [](int) {});
        }
        if (at == length) return;
        // the other inputs are zeros
        alignas(64) char x[T][AMX_ROWS][AMX_BYTES] = {}, columns[AMX_ROWS][V * AMX_BYTES] = {};
        for (int t = 0; t < T; t++)
            for (int64_t r = 0; r < rows.count[t]; r++)
                std::memcpy(x[t][r], a + t * rows.next + r * rows.lda + at, length - at);
        for (int64_t i = 0; i < (length - at) / 4; i++) std::memcpy(columns[i], b + i * ldb, V * AMX_BYTES);
        step(x[0][0], AMX_BYTES, AMX_ROWS * AMX_BYTES, columns[0], V * AMX_BYTES, [](int) {});
    }

    static void store(void* sums) {  // [T * AMX_ROWS, PANEL], float32 or int32
        each_sum([&](auto tile, int64_t at) ALWAYS { store_tile<tile()>(static_cast<char*>(sums) + at, LD_SUMS); });
    }
    static void load(const void* sums) {
        each_sum([&](auto tile, int64_t at) ALWAYS {
            load_tile<tile()>(static_cast<const char*>(sums) + at, LD_SUMS);
        });
    }

    // Adds products of 64 bytes of the rows, and calls between(0), between(1) ... after each of the T * V products.
    template <class Between>
    static ALWAYS void step(
        const char* a, int64_t lda, int64_t next, const char* b, int64_t ldb, const Between& between
    ) {
        step(a, lda, next, b, ldb, between, std::make_integer_sequence<int, T * V>());
    }

  private:
    // visit(tile, bytes): each tile of sums, and where it begins in memory.
    template <class Visit>
    static ALWAYS void each_sum(const Visit& visit) {
        each_sum(visit, std::make_integer_sequence<int, T * V>());
    }
    template <class Visit, int... I>
    static ALWAYS void each_sum(const Visit& visit, std::integer_sequence<int, I...>) {
        (visit(std::integral_constant<int, I>(), I / V * AMX_ROWS * LD_SUMS + I % V * AMX_BYTES), ...);
    }
    template <class Between, int... I>
    static ALWAYS void step(
        const char* a, int64_t lda, int64_t next, const char* b, int64_t ldb, const Between& between,
        std::integer_sequence<int, I...>
    ) {
        ((product<I / V, I % V>(a, lda, next, b, ldb), between(I)), ...);
    }
    template <int R, int C>
    static ALWAYS void product(const char* a, int64_t lda, int64_t next, const char* b, int64_t ldb) {
        constexpr int ROWS_TILE = 4 + R, COLUMNS_TILE = T == 1 ? 5 + C % 3 : 6 + C;
        if constexpr (C == 0) load_tile<ROWS_TILE>(a + R * next, lda);
        if constexpr (R == 0) load_tile<COLUMNS_TILE>(b + C * AMX_BYTES, ldb);
        Dot::template add<R * V + C, ROWS_TILE, COLUMNS_TILE>();
    }
};

}  // namespace

#endif
