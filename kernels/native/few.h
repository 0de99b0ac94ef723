// Attention of up to 16 queries, over keys and values where they lie: what flash.h computes, by the same sums in the same order.
// To pack keys would take longer than these queries' products. Each key's cells meet all queries; each value's numbers lie in
// the lanes, and meet one query after the other.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "flash.h"
#include "numbers.h"

namespace {

constexpr int64_t FEW = 16;   // queries: they fill a vector
constexpr int64_t AHEAD = 16; // tiles of keys that are fetched before they are met

template <typename T>
using CellsOf = std::conditional_t<std::is_same_v<T, float>, F32Cells, Bf16Cells>;

template <typename T>
void fetch(const T* row, int64_t width) {
    for (const char *at = reinterpret_cast<const char*>(row), *end = reinterpret_cast<const char*>(row + width); at < end; at += 64)
        _mm_prefetch(at, _MM_HINT_T1);
}

template <typename T, typename Fetch>
struct FewProducts {
    using Cells = CellsOf<T>;
    const Head& head;
    int64_t count, begin, end;         // queries; keys
    const uint32_t* queries;           // [padded][16]
    const T *const *keys, *const *values;  // from `begin` on
    float* out;                        // [count][wide]
    int64_t wide;                      // width, rounded up to 32
    const Fetch& fetch_next;           // of what is met next: the keys from this place on

    const uint32_t* key(int64_t position) const { return reinterpret_cast<const uint32_t*>(keys[std::min(position, end - 1) - begin]); }

    inline __attribute__((always_inline)) void scores(int64_t at, __m512 score[TILE][1]) const {
        fetch_ahead(at);
        const uint32_t* row[TILE];
        for (int i = 0; i < TILE; i++) row[i] = key(at + i);
        for (int64_t cell = 0; cell < head.cells; cell++) {
            const __m512i query = _mm512_loadu_si512(queries + 16 * cell);
            for (int i = 0; i < TILE; i++) {
                int32_t bits;
                std::memcpy(&bits, row[i] + cell, 4);
                score[i][0] = Cells::multiply(score[i][0], _mm512_set1_epi32(bits), query);
            }
        }
    }
    void fetch_ahead(int64_t at) const {
        const int64_t tiles = (end - begin + TILE - 1) / TILE, then = at + std::min(AHEAD, tiles) * TILE;
        if (then >= begin + tiles * TILE) return fetch_next(then - tiles * TILE);
        for (int64_t i = then; i < std::min(then + TILE, end); i++) fetch(keys[i - begin], head.width), fetch(values[i - begin], head.width);
    }
    // J queries from `first` on, two vectors of features from `feature` on.
    template <int J>
    void add(int64_t first, int64_t feature, int64_t from, int64_t to, const uint32_t* chances) const {
        float* y = out + first * wide + feature;
        const __mmask16 low = lanes(head.width - feature), high = lanes(head.width - feature - 16);
        __m512 sum[J][2];
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2; f++) sum[j][f] = _mm512_loadu_ps(y + j * wide + 16 * f);
        for (int64_t at = from; at < to; at += Cells::EACH, chances += 16) {
            const T* a = values[std::min(at, end - 1) - begin] + feature;
            const T* b = Cells::EACH == 1 ? a : values[std::min(at + 1, end - 1) - begin] + feature;
            const __m512i cells[2] = {Cells::beside(load16(a, low), load16(b, low)), Cells::beside(load16(a + 16, high), load16(b + 16, high))};
            for (int j = 0; j < J; j++) {
                const __m512i chance = _mm512_set1_epi32(int32_t(chances[first + j]));
                for (int f = 0; f < 2; f++) sum[j][f] = Cells::multiply(sum[j][f], chance, cells[f]);
            }
        }
        for (int j = 0; j < J; j++)
            for (int f = 0; f < 2; f++) _mm512_storeu_ps(y + j * wide + 16 * f, sum[j][f]);
    }
    void add(int64_t from, int64_t to, const uint32_t* chances) const {
        for (int64_t feature = 0; feature < head.width && from < to; feature += 32) {
            int64_t j = 0;
            for (; j + 4 <= count; j += 4) add<4>(j, feature, from, to, chances);
            if (count - j == 3) add<3>(j, feature, from, to, chances);
            if (count - j == 2) add<2>(j, feature, from, to, chances);
            if (count - j == 1) add<1>(j, feature, from, to, chances);
        }
    }
    void rescale(const __m512 factor[1]) const {
        alignas(64) float each[16];
        _mm512_store_ps(each, factor[0]);
        for (int64_t j = 0; j < count; j++)
            for (int64_t i = 0; i < wide; i += 16) {
                float* y = out + j * wide + i;
                _mm512_storeu_ps(y, _mm512_mul_ps(_mm512_loadu_ps(y), _mm512_set1_ps(each[j])));
            }
    }
};

// As `attend` in flash.h, for `count` <= FEW queries of whole cells. Of the source's lines, too: `old`, `stored` and `fresh`; and
// fetch_next(position) asks memory for what the thread is likely to need next, the keys from that place on.
template <typename T, typename Source, typename Fetch>
void attend_few(const Head& head, const Source& source, int64_t count, int64_t first, const Fetch& fetch_next, std::vector<float>& memory) {
    const int64_t begin = first / TILE * TILE, end = source.last(count - 1) + 1, keys = end - begin, wide = (head.width + 31) / 32 * 32;
    const int64_t fresh = end - std::min(std::max(source.before, begin), end);
    Scratch scratch(memory, 2 * Scratch::floats<const T*>(keys) + Scratch::floats<T>(2 * fresh * head.width)
        + Scratch::floats<uint32_t>(head.padded * 16) + Scratch::floats<float>(count * wide));
    const T **key = scratch.take<const T*>(keys), **value = scratch.take<const T*>(keys);
    T* made = scratch.take<T>(2 * fresh * head.width);
    uint32_t* queries = scratch.take<uint32_t>(head.padded * 16);
    float* out = scratch.take<float>(count * wide);
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t here = std::min(TILE, end - at);
        const auto lines = source.lines(at, here);
        for (int64_t i = 0; i < here; i++) {
            const T** to[2] = {key + at + i - begin, value + at + i - begin};
            for (int side = 0; side < 2; side++) {
                if (i < lines.old) {
                    *to[side] = lines.stored[side][i];
                    continue;
                }
                const float* from = lines.fresh[side] + (i - lines.old) * lines.stride;
                for (int64_t f = 0; f < head.width; f++) store(made, f, from[f]);
                *to[side] = std::exchange(made, made + head.width);
            }
        }
    }
    pack_across<CellsOf<T>>(count, 16, head.width, [&](int64_t i, int64_t cell) { return source.query(CellsOf<T>(), i, cell); }, queries);
    std::fill(out, out + count * wide, 0.0f);
    Lanes lanes;
    lanes.begin(source, 0, count);
    walk<CellsOf<T>, 1>(head.scale, lanes, FewProducts<T, Fetch>{head, count, begin, end, queries, key, value, out, wide, fetch_next}, begin, end, first);
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, lanes.inverse(0));
    for (int64_t j = 0; j < count; j++) {
        for (int64_t i = 0; i < head.width; i++) out[j * wide + i] *= inverse[j];
        source.write(j, out + j * wide);
    }
}

}  // namespace
