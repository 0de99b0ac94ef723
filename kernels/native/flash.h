// Attention of many queries at once, over keys and values of one head: the maths is in README.md.
//
// Queries are in the lanes of a vector, so a query's largest score, its sum and its output are each in one lane:
// nothing is reduced across a vector, and queries do not affect each other. Keys are processed in order, TILE at a
// time, at multiples of TILE in their sequence.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cells.h"
#include "numbers.h"
#include "scratch.h"
#include "transpose.h"

namespace {

constexpr int64_t TILE = 8;  // keys whose scores, or features whose sums, are held in registers
constexpr int TILE_ROWS = VECTOR_REGISTERS == 1 ? TILE : 4;  // rows of a tile whose sums are held at a time
constexpr int64_t MAX_SOURCE_KEYS = 16;                      // keys that are asked of a source at a time, at most
constexpr int64_t BLOCK_QUERIES = 48;  // queries that are multiplied together: with TILE, 24 vectors of sums
constexpr int64_t UNIT_QUERIES = 10 * BLOCK_QUERIES;  // of a unit of work, which packs all keys for itself
constexpr int64_t KEY_BLOCK = 128;  // keys whose probabilities are kept until values are multiplied with them
constexpr int64_t KEY_PACK = 1024;  // keys that are packed at once: they stay in the second-level cache
// Keys between two tiles of packed values: not a power of two, at which they would share cache sets.
constexpr int64_t VALUE_STRIDE = KEY_PACK + 16;
constexpr int64_t PREFETCH_KEYS = 4 * TILE;  // how far ahead of packing keys are prefetched
constexpr float LOWEST_REFERENCE = -1e30f;   // below any score, and finite
// How far a scaled score may be above its query's reference: probabilities up to 2^32 fit in float32, and rescaling is
// rare.
constexpr float HEADROOM = 32.0f;

// Prefetches a row.
template <typename T>
void fetch(const T* row, int64_t width) {
    const char *at = reinterpret_cast<const char*>(row), *end = reinterpret_cast<const char*>(row + width);
    for (; at < end; at += 64) fetch_line(at);
}

// -- packing ----------------------------------------------------------------------------------------------------------

// `count` rows of at most `places` -> out[cell][places], zero for missing rows.
template <typename Cells, typename Row>
void pack_across(int64_t count, int64_t places, int64_t width, Row&& row, uint32_t* out) {
    for (int64_t first = 0; first < places; first += 4) {
        for (int64_t cell = 0; cell * Cells::EACH < width; cell += 16) {
            Words four[4];
            for (int64_t i = 0; i < 4; i++) four[i] = first + i < count ? row(first + i, cell) : zero_words();
            transpose4(four, out + cell * places + first, places);
        }
    }
}

// -- a block of queries over packed keys ------------------------------------------------------------------------------

struct HeadShape {
    int64_t width;          // features
    int64_t cells, padded;  // of a row of `width` features, and rounded up to 16
    int64_t tiles;          // of TILE features
    float scale;            // of scores, times log2(e): probabilities are powers of two

    template <typename Cells>
    static HeadShape of(int64_t width, float scale) {
        const int64_t cells = (width + Cells::EACH - 1) / Cells::EACH;
        return {width, cells, (cells + 15) / 16 * 16, (width + TILE - 1) / TILE, scale * LOG2_E};
    }
};

// The queries of a block, and the state of each one's softmax over the keys so far.
struct SoftmaxState {
    int64_t count, vectors;                    // queries; vectors of 16 of them
    int64_t min_last, max_last;                // the least and the largest of `last`
    int64_t min_first, max_first;              // and of `first`
    alignas(64) int32_t last[BLOCK_QUERIES];   // the last key that a query attends to
    alignas(64) int32_t first[BLOCK_QUERIES];  // and the first one
    // Probabilities are 2^(scaled score - reference), not divided by their sum yet; `sum`: over the keys so far.
    alignas(64) float reference[BLOCK_QUERIES];
    alignas(64) float sum[BLOCK_QUERIES];

    template <typename Source>
    void begin(const Source& source, int64_t from, int64_t queries) {
        count = queries, vectors = (queries + 15) / 16;
        min_last = source.last(from), max_last = source.last(from + count - 1);
        min_first = source.first_key(from), max_first = source.first_key(from + count - 1);
        for (int64_t i = 0; i < BLOCK_QUERIES; i++) {
            const int64_t query = from + std::min(i, count - 1);
            last[i] = int32_t(source.last(query)), first[i] = int32_t(source.first_key(query));
            reference[i] = LOWEST_REFERENCE, sum[i] = 0.0f;
        }
    }
    Floats inverse(int64_t vector) const { return splat(1.0f) / load_floats(sum + 16 * vector); }
};

// Turns scores of TILE keys into probabilities, cells [TILE / EACH, 16 V] in `to`, and adds them to `total`.
template <typename Cells, int V>
inline ALWAYS void exponentiate(
    Floats score[TILE][V], Floats scale, const Floats reference[V], Floats total[V], uint32_t* to
) {
    for (int v = 0; v < V; v++) {
        for (int i = 0; i < TILE; i++) score[i][v] = Cells::exp2(fmsub(score[i][v], scale, reference[v]));
        Floats four[4];
        for (int i = 0; i < 4; i++) four[i] = score[2 * i][v] + score[2 * i + 1][v];
        total[v] = total[v] + ((four[0] + four[1]) + (four[2] + four[3]));
        if constexpr (Cells::EACH == 2) {
            for (int i = 0; i < TILE / 2; i++)
                store_words(to + (i * V + v) * 16, Cells::beside(score[2 * i][v], score[2 * i + 1][v]));
        } else {
            for (int i = 0; i < TILE; i++) store_words(to + (i * V + v) * 16, Cells::beside(score[i][v], score[i][v]));
        }
    }
}

// Scores of keys before a query's first key, or after its last one, become minus infinity.
template <int V>
inline void mask_scores(const SoftmaxState& softmax, int64_t at, Floats score[TILE][V]) {
    for (int i = 0; i < TILE; i++)
        for (int v = 0; v < V; v++) {
            const Words key = splat_word(int32_t(at + i));
            const Mask visible = at_least(load_words(softmax.last + 16 * v), key) &
                                 at_least(key, load_words(softmax.first + 16 * v));
            score[i][v] = select(visible, score[i][v], splat(-__builtin_inff()));
        }
}

// Computes each query's largest score of a tile, scaled. Returns whether one exceeds its reference by more than
// HEADROOM.
template <int V>
inline ALWAYS bool largest_scores(
    const Floats score[TILE][V], Floats scale, const Floats reference[V], Floats largest[V]
) {
    bool exceeds = false;
    for (int v = 0; v < V; v++) {
        Floats four[4];
        for (int i = 0; i < 4; i++) four[i] = larger(score[2 * i][v], score[2 * i + 1][v]);
        largest[v] = larger(larger(four[0], four[1]), larger(four[2], four[3]));
        largest[v] = largest[v] * scale;
        exceeds |= above(largest[v], reference[v] + splat(HEADROOM)) != 0;
    }
    return exceeds;
}

// For these queries the largest score becomes the reference; `factor`: what to multiply their outputs with.
template <typename Cells, int V>
void raise_references(const Floats largest[V], Floats reference[V], Floats total[V], Floats factor[V]) {
    for (int v = 0; v < V; v++) {
        const Floats limit = reference[v] + splat(HEADROOM);
        const Mask exceeds = above(largest[v], limit);
        const Floats raised = select(exceeds, largest[v], reference[v]);
        factor[v] = Cells::exp2(reference[v] - raised);
        reference[v] = raised;
        total[v] = select(exceeds, total[v] * factor[v], total[v]);
    }
}

// Attention of a block of queries to keys [begin, end), where `begin` is a multiple of TILE. `products` has
//   scores(at, score): adds the products of queries and TILE keys;
//   add(from, to, probabilities): adds the products of probabilities and values to the outputs;
//   rescale(factor): multiplies the outputs.
template <typename Cells, int V, typename Products>
void attend_keys(float score_scale, SoftmaxState& softmax, const Products& products, int64_t begin, int64_t end) {
    alignas(64) uint32_t probabilities[KEY_BLOCK / Cells::EACH * 16 * V];
    const Floats scale = splat(score_scale);
    Floats reference[V], total[V];
    for (int v = 0; v < V; v++) {
        reference[v] = load_floats(softmax.reference + 16 * v);
        total[v] = load_floats(softmax.sum + 16 * v);
    }
    int64_t pending = begin, at = begin;  // from `pending` on, probabilities have not met their values
    for (; at < end; at += TILE) {
        Floats score[TILE][V];
        for (int i = 0; i < TILE; i++)
            for (int v = 0; v < V; v++) score[i][v] = zero();
        products.scores(at, score);
        if (at + TILE > softmax.min_last + 1 || at < softmax.max_first) mask_scores<V>(softmax, at, score);
        Floats largest[V];
        if (__builtin_expect(largest_scores<V>(score, scale, reference, largest), 0)) {
            Floats factor[V];
            raise_references<Cells, V>(largest, reference, total, factor);
            products.add(pending, at, probabilities);
            products.rescale(factor);
            pending = at;
        }
        exponentiate<Cells, V>(score, scale, reference, total, probabilities + (at - pending) / Cells::EACH * 16 * V);
        if (at + TILE - pending == KEY_BLOCK) {
            products.add(pending, at + TILE, probabilities);
            pending = at + TILE;
        }
    }
    products.add(pending, at, probabilities);
    for (int v = 0; v < V; v++) {
        store_floats(softmax.reference + 16 * v, reference[v]);
        store_floats(softmax.sum + 16 * v, total[v]);
    }
}

// -- many queries: keys and values are packed, and blocks of queries go over them -------------------------------------

struct Block {
    SoftmaxState softmax;
    uint32_t* queries;  // [padded][16 * vectors]
    float* out;         // [TILE * tiles][16 * vectors]: their products with values
};

struct PackedKeys {      // packed, from a multiple of TILE on
    int64_t begin, end;  // positions
    uint32_t* keys;      // [tile of keys][padded][TILE]
    uint32_t* values;    // [tile of features][VALUE_ROOM / EACH][TILE]
};

// sum[i][v] += a[step][i] * b[step][16 v ..], step by step, for as many sums at a time as there are registers for.
template <typename Cells, int V>
inline ALWAYS void multiply_tile(int64_t steps, const uint32_t* a, const uint32_t* b, Floats sum[TILE][V]) {
    constexpr int I = TILE_ROWS, W = TILE_ROWS == TILE ? V : 1;
    for (int first = 0; first < TILE; first += I)
        for (int beside = 0; beside < V; beside += W) {
            const uint32_t *x_at = a + first, *column_at = b + 16 * beside;
            Floats part[I][W];
            for (int i = 0; i < I; i++)
                for (int v = 0; v < W; v++) part[i][v] = sum[first + i][beside + v];
            for (int64_t step = 0; step < steps; step++, x_at += TILE, column_at += 16 * V) {
                Words column[W];
                for (int v = 0; v < W; v++) column[v] = load_words(column_at + 16 * v);
                for (int i = 0; i < I; i++) {
                    const Words x = splat_word(int32_t(x_at[i]));
                    for (int v = 0; v < W; v++) part[i][v] = Cells::multiply(part[i][v], x, column[v]);
                }
            }
            for (int i = 0; i < I; i++)
                for (int v = 0; v < W; v++) sum[first + i][beside + v] = part[i][v];
        }
}

template <typename Cells, int V>
struct PackedProducts {
    const HeadShape& head;
    const Block& block;
    const PackedKeys& keys;

    inline ALWAYS void scores(int64_t at, Floats score[TILE][V]) const {
        multiply_tile<Cells, V>(head.cells, keys.keys + (at - keys.begin) * head.padded, block.queries, score);
    }
    void add(int64_t from, int64_t to, const uint32_t* probabilities) const {
        for (int64_t tile = 0; tile < head.tiles && from < to; tile++) {
            float* out = block.out + tile * TILE * 16 * V;
            Floats sum[TILE][V];
            for (int i = 0; i < TILE; i++)
                for (int v = 0; v < V; v++) sum[i][v] = load_floats(out + (i * V + v) * 16);
            const uint32_t* values = keys.values + (tile * VALUE_STRIDE + from - keys.begin) / Cells::EACH * TILE;
            multiply_tile<Cells, V>((to - from) / Cells::EACH, values, probabilities, sum);
            for (int i = 0; i < TILE; i++)
                for (int v = 0; v < V; v++) store_floats(out + (i * V + v) * 16, sum[i][v]);
        }
    }
    void rescale(const Floats factor[V]) const {
        for (int64_t i = 0; i < head.tiles * TILE; i++)
            for (int v = 0; v < V; v++) {
                float* out = block.out + (i * V + v) * 16;
                store_floats(out, load_floats(out) * factor[v]);
            }
    }
};

template <typename Cells>
void attend_packed(const HeadShape& head, Block& block, const PackedKeys& keys) {
    const int64_t begin = std::max(keys.begin, block.softmax.min_first / TILE * TILE),
                  end = std::min(keys.end, block.softmax.max_last + 1);
    if (end <= begin) return;
    const auto run = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        attend_keys<Cells, V>(head.scale, block.softmax, PackedProducts<Cells, V>{head, block, keys}, begin, end);
    };
    switch (block.softmax.vectors) {
        case 1: run(std::integral_constant<int, 1>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        default: run(std::integral_constant<int, 3>());
    }
}

// Passes each query's output, divided by its sum, to write(query, numbers); `rows` holds 16 of them.
template <typename Write>
void finish(const HeadShape& head, const Block& block, float* rows, Write&& write) {
    const int64_t places = 16 * block.softmax.vectors, padded = (head.tiles * TILE + 15) / 16 * 16;
    for (int64_t v = 0; v < block.softmax.vectors; v++) {
        const Floats inverse = block.softmax.inverse(v);
        for (int64_t i = 0; i < head.tiles * TILE; i += 4) {
            Words four[4];
            for (int j = 0; j < 4; j++)
                four[j] = as_words(load_floats(block.out + (i + j) * places + 16 * v) * inverse);
            transpose4(four, reinterpret_cast<uint32_t*>(rows) + i, padded);
        }
        for (int64_t lane = 0; lane < 16 && 16 * v + lane < block.softmax.count; lane++)
            write(16 * v + lane, rows + lane * padded);
    }
}

// Keys and values [keys.begin, keys.end) of a source; those before `first` are not read.
template <typename Cells, typename Source>
void pack_keys(const HeadShape& head, const Source& source, int64_t first, const PackedKeys& keys) {
    for (int64_t tile = keys.begin; tile < keys.end; tile += TILE) {
        const int64_t count = std::min(TILE, keys.end - tile), unread = first - tile;
        const auto lines = source.keys_and_values(tile, count);
        if (tile + PREFETCH_KEYS < keys.end)
            source.keys_and_values(tile + PREFETCH_KEYS, std::min(TILE, keys.end - tile - PREFETCH_KEYS)).fetch_all();
        uint32_t* to = keys.keys + (tile - keys.begin) * head.padded;
        pack_across<Cells>(
            count, TILE, head.width,
            [&](int64_t i, int64_t cell) { return i < unread ? zero_words() : lines.key(Cells(), i, cell); }, to
        );
        for (int64_t i = 0; i < TILE; i += Cells::EACH)
            for (int64_t feature = 0; feature < head.width; feature += 2 * TILE) {
                const auto value = [&](int64_t j) {
                    return j < count && j >= unread ? lines.value(j, feature) : zero();
                };
                const Words cells = Cells::beside(value(i), value(i + 1));
                to = keys.values + (feature / TILE * VALUE_STRIDE + tile + i - keys.begin) / Cells::EACH * TILE;
                store_low_half(to, cells);
                to += VALUE_STRIDE / Cells::EACH * TILE;
                store_high_half(to, cells);
            }
    }
}

// Attention of `count` queries, in `memory`. The source has the queries, keys and values:
//   query(Cells, i, cell): 16 cells of query i, from `cell` on; fetch_query(i): prefetches it;
//   first_key(i), last(i): the first and the last key that query i attends to, which never decrease;
//   keys_and_values(position, count): for at most MAX_SOURCE_KEYS keys, an object with key(Cells, i, cell): 16 cells of
//   a key; value(i, feature): 16 numbers of a value; and fetch_all(), which prefetches them; write(i, numbers): takes
//   the output of query i.
template <typename Cells, typename Source>
void attend(const HeadShape& head, const Source& source, int64_t count, std::vector<float>& memory) {
    const int64_t blocks = (count + BLOCK_QUERIES - 1) / BLOCK_QUERIES, end = source.last(count - 1) + 1,
                  first = source.first_key(0), begin = first / TILE * TILE;
    const int64_t key_words = (std::min(KEY_PACK, end - begin) + TILE - 1) / TILE * TILE * head.padded;
    const int64_t value_words = (head.tiles + 1) * TILE * VALUE_STRIDE / Cells::EACH,
                  row_floats = 16 * (head.tiles * TILE + 15);
    const int64_t query_words = head.padded * BLOCK_QUERIES, out_floats = head.tiles * TILE * BLOCK_QUERIES;
    const int64_t floats_per_block = Scratch::floats<Block>(1) + Scratch::floats<float>(query_words) +
                                     Scratch::floats<float>(out_floats);
    const int64_t shared_floats = Scratch::floats<float>(key_words) + Scratch::floats<float>(value_words) +
                                  Scratch::floats<float>(row_floats);
    Scratch scratch(memory, shared_floats + blocks * floats_per_block);
    Block* block = scratch.take<Block>(blocks);
    PackedKeys keys{0, 0, scratch.take<uint32_t>(key_words), scratch.take<uint32_t>(value_words)};
    float* rows = scratch.take<float>(row_floats);
    const auto fetch_queries = [&](int64_t b) {
        for (int64_t i = b * BLOCK_QUERIES; i < std::min((b + 1) * BLOCK_QUERIES, count); i++) source.fetch_query(i);
    };
    fetch_queries(0);
    for (int64_t b = 0; b < blocks; b++) {
        fetch_queries(b + 1);
        Block& current = block[b];
        current.softmax.begin(source, b * BLOCK_QUERIES, std::min(BLOCK_QUERIES, count - b * BLOCK_QUERIES));
        current.queries = scratch.take<uint32_t>(query_words), current.out = scratch.take<float>(out_floats);
        std::fill(current.out, current.out + head.tiles * TILE * 16 * current.softmax.vectors, 0.0f);
        pack_across<Cells>(
            current.softmax.count, 16 * current.softmax.vectors, head.width,
            [&](int64_t i, int64_t cell) { return source.query(Cells(), b * BLOCK_QUERIES + i, cell); }, current.queries
        );
    }
    for (keys.begin = begin; keys.begin < end; keys.begin = keys.end) {
        keys.end = std::min(keys.begin + KEY_PACK, end);
        pack_keys<Cells>(head, source, first, keys);
        for (int64_t b = 0; b < blocks; b++) attend_packed<Cells>(head, block[b], keys);
    }
    for (int64_t b = 0; b < blocks; b++)
        finish(head, block[b], rows, [&](int64_t i, const float* numbers) {
            source.write(b * BLOCK_QUERIES + i, numbers);
        });
}

}  // namespace
