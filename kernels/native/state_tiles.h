// Products of recurrent states by tiles of AMX.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "state_arithmetic.h"
#include "state_shape.h"
#include "tiles_amx.h"

#if AMX_TILES

namespace {

constexpr int64_t WEIGHT_BYTES = 2 * BLOCK_TOKENS;  // of a token's weights, and of one input of B of a block's tokens

// Up to 16 rows times V vectors of a slice. Tiles 0 to 3 are sums; 4 rows of C and 5 a state's cells; 6 rows of weights
// and 7 x dt.
struct StateTiles {
    static void begin(int64_t rows) {
        TileConfig config = full_tiles();
        for (const int i : {0, 1, 2, 3, 4, 6}) config.rows[i] = uint8_t(rows);
        config.bytes[6] = WEIGHT_BYTES, config.rows[7] = WEIGHT_BYTES / 4;
        configure_tiles(config);
    }

    // sums [rows, STATE_SLICE] = products of `count` cells of rows, `row` words apart, with a slice of a state.
    template <int V>
    static void multiply(
        const uint32_t* a, int64_t row, int64_t rows, int64_t count, const uint32_t* b, const StateAhead* ahead,
        float* sums
    ) {
        zero_tiles<V>();
        for (int64_t k = 0; k < count; k += AMX_ROWS, a += AMX_ROWS, b += AMX_ROWS * 16 * V) {
            const int64_t cells = std::min(count - k, AMX_ROWS);
            if (ahead)
                for (int64_t i = 0; i < cells; i++) fetch_ahead<V>(*ahead, b + i * 16 * V, k + i);
            if (cells == AMX_ROWS) {
                add<4, 5, V>(a, 4 * row, b, 64 * V);
                continue;
            }
            alignas(64) uint32_t x[AMX_ROWS][AMX_ROWS] = {}, columns[AMX_ROWS][16 * V] = {};  // other cells are zeros
            for (int64_t r = 0; r < rows; r++) std::memcpy(x[r], a + r * row, 4 * cells);
            std::memcpy(columns, b, cells * 64 * V);
            add<4, 5, V>(x[0], AMX_BYTES, columns[0], 64 * V);
        }
        store<V>(sums);
    }

    // sums [rows, STATE_SLICE] = products of rows of weights with x dt of a block's tokens, `ld` words apart.
    template <int V>
    static void multiply_weights(const uint32_t* weights, const uint32_t* taken, int64_t ld, float* sums) {
        zero_tiles<V>();
        add<6, 7, V>(weights, WEIGHT_BYTES, taken, 4 * ld);
        store<V>(sums);
    }

  private:
    template <int A, int B, int V>
    static void add(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb) {
        load_tile<A>(a, lda);
        load_tile<B>(b, ldb);
        dot_bf16<0, A, B>();
        if constexpr (V > 1) {
            load_tile<B>(b + 16, ldb);
            dot_bf16<1, A, B>();
        }
        if constexpr (V > 2) {
            load_tile<B>(b + 32, ldb);
            dot_bf16<2, A, B>();
            load_tile<B>(b + 48, ldb);
            dot_bf16<3, A, B>();
        }
    }
    template <int V>
    static void store(float* sums) {
        store_tile<0>(sums, 4 * STATE_SLICE);
        if constexpr (V > 1) store_tile<1>(sums + 16, 4 * STATE_SLICE);
        if constexpr (V > 2) store_tile<2>(sums + 32, 4 * STATE_SLICE), store_tile<3>(sums + 48, 4 * STATE_SLICE);
    }
};

// 16 rows of a state, which are inputs of B, times V vectors of x dt, summed over a block's tokens. Tiles 0 and 1 are
// sums, 2 is B, 4 to 7 are x dt.
struct UpdateTiles {
    static void begin() {
        TileConfig config = full_tiles();
        for (int i = 4; i < 8; i++) config.rows[i] = WEIGHT_BYTES / 4;
        config.bytes[2] = WEIGHT_BYTES;
        configure_tiles(config);
    }
    template <int V>
    static void load(const uint32_t* x) {  // [TOKEN_CELLS, 16 V]
        load_tile<4>(x, 64 * V);
        if constexpr (V > 1) load_tile<5>(x + 16, 64 * V);
        if constexpr (V > 2) load_tile<6>(x + 32, 64 * V), load_tile<7>(x + 48, 64 * V);
    }
    template <int V>
    static void multiply(const uint32_t* b, float* sums) {  // [16, TOKEN_CELLS]; [16, STATE_SLICE]
        load_tile<2>(b, WEIGHT_BYTES);
        multiply_pair<4, 5, V>(sums);
        if constexpr (V > 2) multiply_pair<6, 7, V>(sums + 32);
    }

    // B of a block's tokens, pairs of one input [TOKEN_CELLS, ld], to [inputs, TOKEN_CELLS]; `inputs` is a multiple
    // of 16.
    static void transpose(const uint32_t* from, int64_t ld, int64_t inputs, uint32_t* to) {
        constexpr int64_t TOKEN_CELLS = WEIGHT_BYTES / 4;
        for (int64_t at = 0; at < inputs; at += 16)
            for (int64_t half = 0; half < TOKEN_CELLS; half += 4) {
                const auto step = [&](int64_t i) { return load_words(from + (half + i) * ld + at); };
                const Words low[2] = {low_words(step(0), step(1)), low_words(step(2), step(3))};
                const Words high[2] = {high_words(step(0), step(1)), high_words(step(2), step(3))};
                store_transposed(low_pairs(low[0], low[1]), to + at * TOKEN_CELLS + half);
                store_transposed(high_pairs(low[0], low[1]), to + (at + 1) * TOKEN_CELLS + half);
                store_transposed(low_pairs(high[0], high[1]), to + (at + 2) * TOKEN_CELLS + half);
                store_transposed(high_pairs(high[0], high[1]), to + (at + 3) * TOKEN_CELLS + half);
            }
    }

  private:
    static void store_transposed(Words fours, uint32_t* to) {  // of every fourth input
        store_quarter<0>(to, fours), store_quarter<1>(to + 2 * BLOCK_TOKENS, fours);
        store_quarter<2>(to + 4 * BLOCK_TOKENS, fours), store_quarter<3>(to + 6 * BLOCK_TOKENS, fours);
    }
    template <int B, int NEXT, int V>
    static void multiply_pair(float* sums) {
        zero_tile<0>();
        dot_bf16<0, 2, B>();
        if constexpr (V > 1) {
            zero_tile<1>();
            dot_bf16<1, 2, NEXT>();
        }
        store_tile<0>(sums, 4 * STATE_SLICE);
        if constexpr (V > 1) store_tile<1>(sums + 16, 4 * STATE_SLICE);
    }
};

}  // namespace

#endif
