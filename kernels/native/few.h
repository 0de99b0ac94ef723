// Attention of up to 16 queries without packing keys and values: the same sums in the same order as in flash.h. Packing
// would take longer than these queries' products. Each cell of a key is multiplied with all queries; each value's numbers
// are in the lanes, and are multiplied with one query after the other.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "flash.h"
#include "numbers.h"

namespace {

constexpr int64_t FEW = 16;                // queries: they fill a vector
constexpr int64_t WINDOW_BYTES = 1 << 17;  // of keys and values that all heads of a unit meet before they go on

template <typename T, typename Ahead>
struct FewProducts {
    using Cells = CellsOf<T>;
    const Head& head;
    int64_t count, begin, end;             // queries; keys
    const uint32_t* queries;               // [padded][16]
    const T *const *keys, *const *values;  // from `begin` on ...
    int64_t skip;                          // ... of the heads before this one
    float* out;                            // [count][wide]
    int64_t wide;                          // width, rounded up to 32
    const Ahead& ahead;                    // called for each tile: asks memory for what comes

    // Multiplies each cell of a key with all queries.
    inline __attribute__((always_inline)) void scores(int64_t at, Floats score[TILE][1]) const {
        ahead();
        const T* row[TILE];
        for (int i = 0; i < TILE; i++) row[i] = keys[std::min(at + i, end - 1) - begin] + skip;
        for (int first = 0; first < TILE; first += TILE_ROWS)
            for (int64_t cell = 0; cell < head.cells; cell++) {
                const Words query = load_words(queries + 16 * cell);
                for (int i = first; i < first + TILE_ROWS; i++)
                    score[i][0] = Cells::multiply(score[i][0], Cells::all(row[i], cell), query);
            }
    }
    // J queries from `first` on, two vectors of features from `feature` on.
    template <int J>
    void add(int64_t first, int64_t feature, int64_t from, int64_t to, const uint32_t* chances) const {
        float* y = out + first * wide + feature;
        Floats sum[J][2];
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2; f++) sum[j][f] = load_floats(y + j * wide + 16 * f);
        for (int64_t at = from; at < to; at += Cells::EACH, chances += 16) {
            const T* a = values[std::min(at, end - 1) - begin] + skip + feature;
            const T* b = Cells::EACH == 1 ? a : values[std::min(at + 1, end - 1) - begin] + skip + feature;
            Words cells[2];
            Cells::between(a, b, head.width - feature, cells);
            for (int j = 0; j < J; j++) {
                const Words chance = splat_word(int32_t(chances[first + j]));
                for (int f = 0; f < 2; f++) sum[j][f] = Cells::multiply(sum[j][f], chance, cells[f]);
            }
        }
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2; f++) store_floats(y + j * wide + 16 * f, sum[j][f]);
    }
    void add(int64_t from, int64_t to, const uint32_t* chances) const {
        for (int64_t feature = 0; feature < head.width && from < to; feature += 32) {
            constexpr int MOST = VECTOR_REGISTERS == 1 ? 4 : 2;
            int64_t j = 0;
            for (; j + MOST <= count; j += MOST) add<MOST>(j, feature, from, to, chances);
            if (count - j == 3) add<3>(j, feature, from, to, chances);
            if (count - j == 2) add<2>(j, feature, from, to, chances);
            if (count - j == 1) add<1>(j, feature, from, to, chances);
        }
    }
    void rescale(const Floats factor[1]) const {
        alignas(64) float each[16];
        store_floats(each, factor[0]);
        for (int64_t j = 0; j < count; j++)
            for (int64_t i = 0; i < wide; i += 16) {
                float* y = out + j * wide + i;
                store_floats(y, load_floats(y) * splat(each[j]));
            }
    }
};

// Keys per window for `keys` keys of this many bytes each; windows are nearly equal.
inline int64_t window_of(int64_t keys, int64_t bytes) {
    const int64_t most = std::max(WINDOW_BYTES / bytes, TILE), windows = std::max<int64_t>((keys + most - 1) / most, 1);
    return ((keys + windows - 1) / windows + TILE - 1) / TILE * TILE;
}

// Like `attend` in flash.h, for `count` <= FEW queries of whole cells and several heads; the keys of one token in two
// neighbouring heads lie `apart` numbers from each other, a multiple of the width. source.of(h) is one head's source. For the first head, its lines() also says which keys are in pages (`old`, `stored`)
// and which are not (`fresh`). fetch(then, i) prefetches key and value i of the window that begins at `then` for all heads;
// with then < 0, those of the unit that this thread is likely to take next.
template <typename T, typename Source, typename Fetch>
void attend_few(
    const Head& head, const Source& source, int64_t heads, int64_t apart, int64_t count, int64_t first, const Fetch& fetch,
    std::vector<float>& memory
) {
    using Cells = CellsOf<T>;
    const int64_t begin = first / TILE * TILE, end = source.last(count - 1) + 1, keys = end - begin;
    const int64_t wide = (head.width + 31) / 32 * 32, side = heads * head.width;
    const int64_t fresh = end - std::min(std::max(source.before, begin), end);
    const int64_t per = apart / head.width, copied = (fresh + per - 1) / per * heads * apart;  // fresh keys lie as in pages
    Scratch scratch(memory, 2 * Scratch::floats<const T*>(keys) + Scratch::floats<T>(2 * copied)
        + Scratch::floats<Lanes>(heads) + Scratch::floats<uint32_t>(heads * head.padded * 16)
        + Scratch::floats<float>(heads * count * wide));
    const T **key = scratch.take<const T*>(keys), **value = scratch.take<const T*>(keys);
    T* made = scratch.take<T>(2 * copied);
    int64_t copies = 0;
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t here = std::min(TILE, end - at);
        const auto lines = source.lines(at, here);
        for (int64_t i = 0; i < here; i++) {
            for (int64_t which = 0; which < 2; which++) {
                const T*& to = (which ? value : key)[at + i - begin];
                if (i < lines.old) {
                    to = lines.stored[which][i];
                    continue;
                }
                const float* from = lines.fresh[which] + (i - lines.old) * lines.stride;
                T* copy = made + which * copied + copies / per * heads * apart + copies % per * head.width;
                to = copy;
                for (int64_t h = 0; h < heads; h++, copy += apart, from += head.width)
                    for (int64_t f = 0; f < head.width; f++) store(copy, f, from[f]);
            }
            copies += i >= lines.old;
        }
    }
    Lanes* lanes = scratch.take<Lanes>(heads);
    const int64_t of_queries = head.padded * 16, of_out = count * wide;
    uint32_t* queries = scratch.take<uint32_t>(heads * of_queries);
    float* out = scratch.take<float>(heads * of_out);
    std::fill(out, out + heads * of_out, 0.0f);
    for (int64_t h = 0; h < heads; h++) {
        lanes[h].begin(source, 0, count);
        const auto query = [&](int64_t i, int64_t cell) { return source.of(h).query(Cells(), i, cell); };
        pack_across<Cells>(count, 16, head.width, query, queries + h * of_queries);
    }
    const int64_t window = window_of(keys, 2 * side * int64_t(sizeof(T)));
    for (int64_t at = begin; at < end; at += window) {
        const int64_t behind = std::min(at + window, end), then = behind < end ? behind : -1;
        const int64_t tiles = heads * ((behind - at + TILE - 1) / TILE), each = (window + tiles - 1) / tiles;
        int64_t fetched = 0;
        const auto ahead = [&] {
            for (const int64_t to = std::min(fetched + each, window); fetched < to; fetched++) fetch(then, fetched);
        };
        for (int64_t h = 0; h < heads; h++) {
            const FewProducts<T, decltype(ahead)> products{
                head, count, begin, end, queries + h * of_queries, key, value, h * apart, out + h * of_out, wide, ahead};
            walk<Cells, 1>(head.scale, lanes[h], products, at, behind, first);
        }
    }
    for (int64_t h = 0; h < heads; h++) {
        alignas(64) float inverse[16];
        store_floats(inverse, lanes[h].inverse(0));
        for (int64_t j = 0; j < count; j++) {
            float* numbers = out + h * of_out + j * wide;
            for (int64_t i = 0; i < head.width; i++) numbers[i] *= inverse[j];
            source.of(h).write(j, numbers);
        }
    }
}

}  // namespace
