// Attention by tiles of AMX: the maths is that of flash.h, with queries in rows instead of lanes.
//
// 16 or 32 queries are multiplied with up to 128 keys at a time, which begin at a multiple of 128 in their sequence.
// Each query's scores, its reference and its sum are its own, and keys that it does not attend to add zeros, so its
// bits depend neither on other queries nor on their number.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cells.h"
#include "flash.h"
#include "numbers.h"
#include "scratch.h"
#include "tiles_amx.h"
#include "transpose.h"

namespace {

#if AMX_TILES

constexpr int64_t PAIR_ROWS = 16;             // pairs of numbers in a tile's row, and rows of pairs in a tile
constexpr int64_t STEP_KEYS = 2 * PAIR_ROWS;  // of a product of probabilities and values

// A head's numbers in tiles.
struct TiledHead {
    int64_t width, steps, vectors;  // steps of 32 features, vectors of 16
    Floats scale;                   // of scores, in powers of two
    TiledHead(int64_t width, float scale)
        : width(width), steps((width + 31) / 32), vectors((width + 15) / 16), scale(splat(scale * LOG2_E)) {}
    int64_t row() const { return 16 * vectors; }  // numbers of an output with padding
};

// Up to T tiles of queries.
template <int T>
struct QueryBlock {
    static constexpr int64_t ROWS = T * AMX_ROWS;
    int64_t count, max_last;          // queries; the largest of `last`
    int64_t first[ROWS], last[ROWS];  // the first and the last key that a query attends to
    float reference[ROWS];
    uint32_t* queries;  // [ROWS, steps, 16]
    // [ROWS, row()]: products of probabilities with values; [ROWS, 16]: parts of the probabilities' sums
    float *out, *sums;

    static int64_t floats(const TiledHead& head) {
        return Scratch::floats<uint32_t>(ROWS * 16 * head.steps) + Scratch::floats<float>(ROWS * (head.row() + 16));
    }
    // Queries [from, from + number) of a source.
    template <typename Source>
    void begin(const TiledHead& head, const Source& source, int64_t from, int64_t number, Scratch& scratch) {
        count = number, max_last = source.last(from + number - 1);
        queries = scratch.take<uint32_t>(ROWS * 16 * head.steps);
        out = scratch.take<float>(ROWS * (head.row() + 16)), sums = out + ROWS * head.row();
        std::fill_n(out, ROWS * (head.row() + 16), 0.0f);
        std::fill_n(reference, ROWS, LOWEST_REFERENCE);
        for (int64_t i = 0; i < ROWS; i++) {
            if (i < count) first[i] = source.first_key(from + i), last[i] = source.last(from + i);
            for (int64_t cell = 0; cell < 16 * head.steps; cell += 16)
                store_words(
                    queries + i * 16 * head.steps + cell,
                    i < count ? source.query(Bf16Cells(), from + i, cell) : zero_words()
                );
        }
    }
    // Steps of a block of keys from `at` on that no query attends to, if the block has a key that one attends to.
    int64_t skipped(int64_t at) const { return std::max(first[0] - at, int64_t(0)) / STEP_KEYS; }
    // Passes each query's output, divided by its sum, to write(query, numbers).
    template <typename Write>
    void finish(const TiledHead& head, Write&& write) {
        for (int64_t r = 0; r < count; r++) {
            float* const numbers = out + r * head.row();
            const Floats inverse = splat(1.0f / total_of(load_floats(sums + 16 * r)));
            for (int64_t i = 0; i < head.row(); i += 16) store_floats(numbers + i, load_floats(numbers + i) * inverse);
            write(r, numbers);
        }
    }
};

struct TiledKeys {
    int64_t begin, end;  // positions, from a multiple of KEY_BLOCK on
    uint32_t* keys;      // [tile of 16 keys, steps, 16 pairs of features, 16 keys]
    uint32_t* values;    // [pair of keys, row()]
};

// Positions [at, at + 16), of which the first `count` exist; the others are zeros. Parameters:
//   key(i, cell): 16 cells of key i; values(i, feature, cells): cells of 32 numbers of value i and of the one after it.
template <typename Key, typename Values>
inline ALWAYS void pack_tile(
    const TiledHead& head, const TiledKeys& to, int64_t at, int64_t count, Key&& key, Values&& values
) {
    uint32_t* const keys = to.keys + (at - to.begin) * head.steps * 16;
    for (int64_t step = 0; step < head.steps; step++)
        transpose16(
            [&](int64_t i) ALWAYS { return i < count ? key(i, 16 * step) : zero_words(); }, keys + step * 256, 16
        );
    uint32_t* row = to.values + (at - to.begin) / 2 * head.row();
    for (int64_t i = 0; i < 16; i += 2, row += head.row())
        for (int64_t feature = 0; feature < head.row(); feature += 32) {
            Words cells[2] = {zero_words(), zero_words()};
            if (i < count) values(i, feature, cells);
            store_words(row + feature, cells[0]);
            if (feature + 16 < head.row()) store_words(row + feature + 16, cells[1]);
        }
}

// Keys and values [keys.begin, keys.end) of a source, up to a multiple of STEP_KEYS; those before `first` are not read.
template <typename Source>
void pack_tiles(const TiledHead& head, const Source& source, int64_t first, const TiledKeys& keys) {
    const int64_t padded_end = keys.begin + (keys.end - keys.begin + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS;
    for (int64_t at = keys.begin; at < padded_end; at += 16) {
        const int64_t count = std::clamp<int64_t>(keys.end - at, 0, 16), unread = first - at;
        const auto lines = source.keys_and_values(std::min(at, keys.end), count);
        if (at + 32 < keys.end) source.keys_and_values(at + 32, std::min<int64_t>(16, keys.end - at - 32)).fetch_all();
        pack_tile(
            head, keys, at, count,
            [&](int64_t i, int64_t cell) ALWAYS { return i < unread ? zero_words() : lines.key(Bf16Cells(), i, cell); },
            [&](int64_t i, int64_t feature, Words(&cells)[2]) ALWAYS {
                const auto value = [&](int64_t j, int64_t f) ALWAYS {
                    return j < count && j >= unread ? lines.value(j, f) : zero();
                };
                cells[0] = Bf16Cells::beside(value(i, feature), value(i + 1, feature));
                cells[1] = Bf16Cells::beside(value(i, feature + 16), value(i + 1, feature + 16));
            }
        );
    }
}

// Tiles are configured as `full_tiles` while it exists.
class TiledAttention {
  public:
    explicit TiledAttention(const TiledHead& head) : head_(head) { configure_tiles(full_tiles()); }
    ~TiledAttention() { release_tiles(); }
    TiledAttention(const TiledAttention&) = delete;

    // A block of queries over packed keys.
    template <int T>
    void attend_keys(QueryBlock<T>& block, const TiledKeys& keys) {
        const int64_t begin = std::max(keys.begin, block.first[0] / KEY_BLOCK * KEY_BLOCK),
                      end = std::min(keys.end, block.max_last + 1);
        for (int64_t at = begin; at < end; at += KEY_BLOCK) {
            const uint32_t* const packed = keys.keys + (at - keys.begin) * head_.steps * 16;
            const uint32_t* const values = keys.values + (at - keys.begin) / 2 * head_.row();
            with_steps((std::min(end - at, KEY_BLOCK) + STEP_KEYS - 1) / STEP_KEYS, [&](auto S) ALWAYS {
                score<T, S()>(block.queries, packed, block.skipped(at));
                exponentiate_and_add<T, S()>(block, at, values);
            });
        }
    }

    // Calls f with the number of steps as a constant; a block of KEY_BLOCK keys has four.
    template <typename F>
    static void with_steps(int64_t steps, F&& f) {
        static_assert(KEY_BLOCK == 4 * STEP_KEYS);
        switch (steps) {
            case 1: f(std::integral_constant<int, 1>()); break;
            case 2: f(std::integral_constant<int, 2>()); break;
            case 3: f(std::integral_constant<int, 3>()); break;
            default: f(std::integral_constant<int, 4>());
        }
    }
    // Of keys from `at` on: [T * AMX_ROWS, KEY_BLOCK]. Skipped steps may have any scores.
    float* scores() { return scores_; }
    // Makes probabilities of the scores of S steps of keys, and adds their products with values.
    template <int T, int S>
    void exponentiate_and_add(QueryBlock<T>& block, int64_t at, const uint32_t* values) {
        const int64_t skipped = block.skipped(at);
        for (int64_t r = 0; r < block.count; r++) exponentiate<T, S>(block, r, at);
        for (int64_t v = 0; v < head_.vectors; v += 2) {
            if (v + 1 < head_.vectors) add<T, S, 2>(block.out + 16 * v, values + 16 * v, skipped);
            else add<T, S, 1>(block.out + 16 * v, values + 16 * v, skipped);
        }
    }

  private:
    template <int T, int S>
    void score(const uint32_t* queries, const uint32_t* keys, int64_t skipped) {
        const int64_t lda = 64 * head_.steps, next = 256 * head_.steps;
        keys += 2 * next * skipped;
        for (int64_t at = skipped * STEP_KEYS; at < S * STEP_KEYS; at += STEP_KEYS, keys += 2 * next) {
            zero_tiles<2 * T>();
            for (int64_t step = 0; step < head_.steps; step++)
                multiply<T, 2>(queries + 16 * step, lda, keys + 256 * step, keys + next + 256 * step, AMX_BYTES);
            store<T, 2>(scores_ + at, KEY_BLOCK);
        }
    }

    // Probabilities of query r.
    template <int T, int S>
    void exponentiate(QueryBlock<T>& block, int64_t r, int64_t at) {
        constexpr int V = 2 * S;
        float* const sum = block.sums + 16 * r;
        Floats score[V];
        unrolled<V>([&](int v) ALWAYS { score[v] = load_floats(scores_ + r * KEY_BLOCK + 16 * v); });
        const int64_t left = block.last[r] + 1 - at, before = block.first[r] - at;
        if (left < 16 * V || before > 0)
            for (int v = 0; v < V; v++) {
                const Mask visible = lanes(left - 16 * v) & ~lanes(before - 16 * v);
                score[v] = select(visible, score[v], splat(-__builtin_inff()));
            }
        Floats largest = score[0];
        unrolled<V>([&](int v) ALWAYS { largest = larger(largest, score[v]); });
        largest = largest * head_.scale;
        Floats reference = splat(block.reference[r]), total = load_floats(sum);
        if (__builtin_expect(above(largest, reference + splat(HEADROOM)) != 0, 0)) {
            block.reference[r] = largest_of(largest);
            const Floats raised = splat(block.reference[r]), factor = Bf16Cells::exp2(reference - raised);
            reference = raised, total = total * factor;
            float* const out = block.out + r * head_.row();
            for (int64_t i = 0; i < head_.row(); i += 16) store_floats(out + i, load_floats(out + i) * factor);
        }
        unrolled<V>([&](int v) ALWAYS {
            score[v] = Bf16Cells::exp2(fmsub(score[v], head_.scale, reference));
            total = total + score[v];
        });
        store_floats(sum, total);
        unrolled<S>([&](int i) ALWAYS {
            store_words(probabilities_ + r * KEY_BLOCK / 2 + 16 * i, pairs_after(score[2 * i], score[2 * i + 1]));
        });
    }

    // out [T * AMX_ROWS, row()] += probabilities times V vectors of values.
    template <int T, int S, int V>
    void add(float* out, const uint32_t* values, int64_t skipped) {
        load<T, V>(out, head_.row());
        for (int64_t at = skipped * PAIR_ROWS; at < S * PAIR_ROWS; at += PAIR_ROWS) {
            const uint32_t* columns = values + at * head_.row();
            multiply<T, V>(probabilities_ + at, 2 * KEY_BLOCK, columns, columns + 16, 4 * head_.row());
        }
        store<T, V>(out, head_.row());
    }

    // T tiles of rows (4, 5) times V of columns (6, 7), added to tiles 0 to 3: of row t and column v to t * V + v.
    template <int T, int V>
    static void multiply(const uint32_t* a, int64_t lda, const uint32_t* b, const uint32_t* next, int64_t ldb) {
        load_tile<6>(b, ldb);
        load_tile<4>(a, lda);
        dot_bf16<0, 4, 6>();
        if constexpr (V > 1) {
            load_tile<7>(next, ldb);
            dot_bf16<1, 4, 7>();
        }
        if constexpr (T > 1) {
            load_tile<5>(a + AMX_ROWS * lda / 4, lda);
            dot_bf16<V, 5, 6>();
            if constexpr (V > 1) dot_bf16<V + 1, 5, 7>();
        }
    }
    template <int T, int V>
    static void load(const float* sums, int64_t ld) {
        load_tile<0>(sums, 4 * ld);
        if constexpr (V > 1) load_tile<1>(sums + 16, 4 * ld);
        if constexpr (T > 1) load_tile<V>(sums + AMX_ROWS * ld, 4 * ld);
        if constexpr (T > 1 && V > 1) load_tile<V + 1>(sums + AMX_ROWS * ld + 16, 4 * ld);
    }
    template <int T, int V>
    static void store(float* sums, int64_t ld) {
        store_tile<0>(sums, 4 * ld);
        if constexpr (V > 1) store_tile<1>(sums + 16, 4 * ld);
        if constexpr (T > 1) store_tile<V>(sums + AMX_ROWS * ld, 4 * ld);
        if constexpr (T > 1 && V > 1) store_tile<V + 1>(sums + AMX_ROWS * ld + 16, 4 * ld);
    }

    const TiledHead head_;
    alignas(64) float scores_[2 * AMX_ROWS * KEY_BLOCK];
    alignas(64) uint32_t probabilities_[2 * AMX_ROWS * KEY_BLOCK / 2];
};

// `attend` of flash.h.
template <typename Source>
void attend_in_tiles(const TiledHead& head, const Source& source, int64_t count, std::vector<float>& memory) {
    using Block = QueryBlock<2>;
    const int64_t blocks = (count + Block::ROWS - 1) / Block::ROWS, first = source.first_key(0),
                  begin = first / KEY_BLOCK * KEY_BLOCK, end = source.last(count - 1) + 1;
    const int64_t packed = std::min(KEY_PACK, (end - begin + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS);
    const int64_t key_words = packed * head.steps * 16, value_words = packed / 2 * head.row();
    Scratch scratch(
        memory, Scratch::floats<uint32_t>(key_words) + Scratch::floats<uint32_t>(value_words) +
                    Scratch::floats<Block>(blocks) + blocks * Block::floats(head)
    );
    Block* const block = scratch.take<Block>(blocks);
    TiledKeys keys{0, 0, scratch.take<uint32_t>(key_words), scratch.take<uint32_t>(value_words)};
    const auto fetch_queries = [&](int64_t b) {
        for (int64_t i = b * Block::ROWS; i < std::min((b + 1) * Block::ROWS, count); i++) source.fetch_query(i);
    };
    fetch_queries(0);
    for (int64_t b = 0; b < blocks; b++) {
        fetch_queries(b + 1);
        block[b].begin(head, source, b * Block::ROWS, std::min(Block::ROWS, count - b * Block::ROWS), scratch);
    }
    TiledAttention attention(head);
    for (keys.begin = begin; keys.begin < end; keys.begin = keys.end) {
        keys.end = std::min(keys.begin + KEY_PACK, end);
        pack_tiles(head, source, first, keys);
        for (int64_t b = 0; b < blocks; b++) attention.attend_keys(block[b], keys);
    }
    for (int64_t b = 0; b < blocks; b++)
        block[b].finish(head, [&](int64_t i, const float* numbers) { source.write(b * Block::ROWS + i, numbers); });
}

#endif

// Attention of `count` queries, with products of T, by what this processor has for them: `attend` or `attend_in_tiles`.
template <typename T, typename Source>
void attend_many(int64_t width, float scale, const Source& source, int64_t count, std::vector<float>& memory) {
#if AMX_TILES
    if constexpr (!std::is_same_v<T, float>) {
        attend_in_tiles(TiledHead(width, scale), source, count, memory);
        return;
    }
#endif
    attend<CellsOf<T>>(HeadShape::of<CellsOf<T>>(width, scale), source, count, memory);
}

}  // namespace
