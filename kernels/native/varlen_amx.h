// Attention without a mask by tiles of AMX: the maths is that of flash.h, with queries in rows instead of lanes.
//
// 32 queries are multiplied with 128 keys at a time, which begin at a multiple of 128 in their sequence. Each query's scores, its
// reference and its sum are its own, so its bits depend on no other query.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cells.h"
#include "flash.h"
#include "numbers.h"
#include "tiles_amx.h"

#if AMX_TILES

namespace {

constexpr int64_t QUERY_ROWS = 2 * AMX_ROWS;
constexpr int64_t PAIR_ROWS = 16;  // pairs of numbers in a tile's row, and rows of pairs in a tile

// A head's numbers in tiles.
struct TiledHead {
    int64_t width, steps, vectors;  // steps of 32 features, vectors of 16
    Floats scale;                   // of scores, in powers of two
    TiledHead(int64_t width, float scale) : width(width), steps((width + 31) / 32), vectors((width + 15) / 16), scale(splat(scale * LOG2_E)) {}
    int64_t row() const { return 16 * vectors; }  // numbers of an output with padding
};

struct QueryBlock {
    uint32_t* queries;  // [QUERY_ROWS, steps, 16]
    float *out, *sums;  // [QUERY_ROWS, row()]: products of probabilities with values; [QUERY_ROWS, 16]: parts of the probabilities' sums
    float reference[QUERY_ROWS];
    int64_t count;
};

struct TiledKeys {
    uint32_t* keys;    // [tile of 16 keys, steps, 16 pairs of features, 16 keys]
    uint32_t* values;  // [pair of keys, row()]
};

// Keys and values [begin, end) of a source; those behind them, up to a whole block, are zeros.
template <typename Source>
void pack_tiles(const TiledHead& head, const Source& source, int64_t begin, int64_t end, const TiledKeys& to) {
    const int64_t whole = (end - begin + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
    for (int64_t tile = 0; tile < whole; tile += 16) {
        const int64_t count = std::max<int64_t>(0, std::min<int64_t>(16, end - begin - tile));
        const auto lines = source.lines(begin + tile, count);
        if (tile + 32 < end - begin) source.lines(begin + tile + 32, std::min<int64_t>(16, end - begin - tile - 32)).fetch_all();
        for (int64_t step = 0; step < head.steps; step++) {
            const auto row = [&](int64_t i) ALWAYS { return i < count ? lines.key(Bf16Cells(), i, 16 * step) : zero_words(); };
            transpose16(row, to.keys + (tile / 16 * head.steps + step) * 256, 16);
        }
        for (int64_t i = 0; i < 16; i += 2)
            for (int64_t feature = 0; feature < head.row(); feature += 16) {
                const auto value = [&](int64_t j) { return j < count ? lines.value(j, feature) : zero(); };
                store_words(to.values + (tile + i) / 2 * head.row() + feature, Bf16Cells::beside(value(i), value(i + 1)));
            }
    }
}

class TiledAttention {
  public:
    explicit TiledAttention(const TiledHead& head) : head_(head) {}

    // A block of queries over `count` packed keys, from a multiple of KEY_BLOCK on. Tiles are configured as `full_tiles`.
    void walk(QueryBlock& block, const TiledKeys& keys, int64_t count) {
        for (int64_t at = 0; at < count; at += KEY_BLOCK) {
            score(block.queries, keys.keys + at * head_.steps * 16);
            for (int64_t r = 0; r < block.count; r++) weigh(block, r, count - at);
            for (int64_t v = 0; v < head_.vectors; v += 2) {
                const uint32_t* values = keys.values + at / 2 * head_.row() + 16 * v;
                if (v + 1 < head_.vectors) add<2>(block.out + 16 * v, values);
                else add<1>(block.out + 16 * v, values);
            }
        }
    }

  private:
    void score(const uint32_t* queries, const uint32_t* keys) {
        const int64_t lda = 64 * head_.steps, next = 256 * head_.steps;
        for (int64_t at = 0; at < KEY_BLOCK; at += 32, keys += 2 * next) {
            zero_tiles<4>();
            for (int64_t step = 0; step < head_.steps; step++)
                multiply<2>(queries + 16 * step, lda, keys + 256 * step, keys + next + 256 * step, AMX_BYTES);
            store<2>(scores_ + at, KEY_BLOCK);
        }
    }

    // Probabilities of query r. `left`: the number of keys from here on.
    void weigh(QueryBlock& block, int64_t r, int64_t left) {
        constexpr int V = KEY_BLOCK / 16;
        float* const sum = block.sums + 16 * r;
        Floats score[V];
        unrolled<V>([&](int v) ALWAYS { score[v] = load_floats(scores_ + r * KEY_BLOCK + 16 * v); });
        if (left < KEY_BLOCK)
            for (int v = 0; v < V; v++) score[v] = select(first_lanes(std::max<int64_t>(0, left - 16 * v)), score[v], splat(-__builtin_inff()));
        Floats largest = score[0];
        unrolled<V>([&](int v) ALWAYS { largest = larger(largest, score[v]); });
        largest = largest * head_.scale;
        Floats reference = splat(block.reference[r]), total = load_floats(sum);
        if (__builtin_expect(above(largest, reference + splat(HEADROOM)) != 0, 0)) {
            block.reference[r] = largest_of(largest);
            const Floats raised = splat(block.reference[r]), factor = Bf16Cells::power(reference - raised);
            reference = raised, total = total * factor;
            float* const out = block.out + r * head_.row();
            for (int64_t i = 0; i < head_.row(); i += 16) store_floats(out + i, load_floats(out + i) * factor);
        }
        unrolled<V>([&](int v) ALWAYS {
            score[v] = Bf16Cells::power(fmsub(score[v], head_.scale, reference));
            total = total + score[v];
        });
        store_floats(sum, total);
        unrolled<V / 2>([&](int i) ALWAYS { store_words(chances_ + r * KEY_BLOCK / 2 + 16 * i, pairs_after(score[2 * i], score[2 * i + 1])); });
    }

    // out [QUERY_ROWS, row()] += probabilities times V vectors of values.
    template <int V>
    void add(float* out, const uint32_t* values) {
        load<V>(out, head_.row());
        for (int64_t at = 0; at < KEY_BLOCK / 2; at += PAIR_ROWS) {
            const uint32_t* columns = values + at * head_.row();
            multiply<V>(chances_ + at, 2 * KEY_BLOCK, columns, columns + 16, 4 * head_.row());
        }
        store<V>(out, head_.row());
    }

    // Two tiles of rows (4, 5) times V of columns (6, 7), added to tiles 0 to 3.
    template <int V>
    static void multiply(const uint32_t* a, int64_t lda, const uint32_t* b, const uint32_t* next, int64_t ldb) {
        load_tile<6>(b, ldb);
        load_tile<4>(a, lda);
        dot_bf16<0, 4, 6>();
        if constexpr (V > 1) {
            load_tile<7>(next, ldb);
            dot_bf16<1, 4, 7>();
        }
        load_tile<5>(a + AMX_ROWS * lda / 4, lda);
        dot_bf16<2, 5, 6>();
        if constexpr (V > 1) dot_bf16<3, 5, 7>();
    }
    template <int V>
    static void load(const float* sums, int64_t ld) {
        load_tile<0>(sums, 4 * ld), load_tile<2>(sums + AMX_ROWS * ld, 4 * ld);
        if constexpr (V > 1) load_tile<1>(sums + 16, 4 * ld), load_tile<3>(sums + AMX_ROWS * ld + 16, 4 * ld);
    }
    template <int V>
    static void store(float* sums, int64_t ld) {
        store_tile<0>(sums, 4 * ld), store_tile<2>(sums + AMX_ROWS * ld, 4 * ld);
        if constexpr (V > 1) store_tile<1>(sums + 16, 4 * ld), store_tile<3>(sums + AMX_ROWS * ld + 16, 4 * ld);
    }

    const TiledHead head_;
    alignas(64) float scores_[QUERY_ROWS * KEY_BLOCK];
    alignas(64) uint32_t chances_[QUERY_ROWS * KEY_BLOCK / 2];
};

// `attend` of flash.h for queries that all look at all `rows` keys.
template <typename Source>
void attend_in_tiles(const TiledHead& head, const Source& source, int64_t count, int64_t rows, std::vector<float>& memory) {
    const int64_t blocks = (count + QUERY_ROWS - 1) / QUERY_ROWS, packed = std::min(KEY_PACK, (rows + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK);
    const int64_t of_keys = packed * head.steps * 16, of_values = packed / 2 * head.row();
    const int64_t of_queries = QUERY_ROWS * head.steps * 16, of_out = QUERY_ROWS * (head.row() + 16);
    const int64_t each = Scratch::floats<QueryBlock>(1) + Scratch::floats<float>(of_queries) + Scratch::floats<float>(of_out);
    Scratch scratch(memory, Scratch::floats<float>(of_keys) + Scratch::floats<float>(of_values) + blocks * each);
    QueryBlock* block = scratch.take<QueryBlock>(blocks);
    const TiledKeys keys{scratch.take<uint32_t>(of_keys), scratch.take<uint32_t>(of_values)};
    for (int64_t b = 0; b < blocks; b++) {
        QueryBlock& one = block[b];
        one.count = std::min(QUERY_ROWS, count - b * QUERY_ROWS);
        one.queries = scratch.take<uint32_t>(of_queries), one.out = scratch.take<float>(of_out), one.sums = one.out + QUERY_ROWS * head.row();
        std::fill(one.out, one.out + of_out, 0.0f);
        std::fill_n(one.reference, QUERY_ROWS, LOWEST);
        for (int64_t i = 0; i < QUERY_ROWS; i++)
            for (int64_t cell = 0; cell < 16 * head.steps; cell += 16)
                store_words(one.queries + i * 16 * head.steps + cell, i < one.count ? source.query(Bf16Cells(), b * QUERY_ROWS + i, cell) : zero_words());
    }
    TiledAttention attention(head);
    configure_tiles(full_tiles());
    for (int64_t begin = 0; begin < rows; begin += KEY_PACK) {
        const int64_t end = std::min(begin + KEY_PACK, rows);
        pack_tiles(head, source, begin, end, keys);
        for (int64_t b = 0; b < blocks; b++) attention.walk(block[b], keys, end - begin);
    }
    release_tiles();
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t r = 0; r < block[b].count; r++) {
            float* const out = block[b].out + r * head.row();
            const Floats inverse = splat(1.0f / total_of(load_floats(block[b].sums + 16 * r)));
            for (int64_t i = 0; i < head.row(); i += 16) store_floats(out + i, load_floats(out + i) * inverse);
            source.write(b * QUERY_ROWS + r, out);
        }
}

}  // namespace

#endif
