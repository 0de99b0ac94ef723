// Attention of many queries at once, over keys and values of one head: the maths is in README.md.
//
// Queries are in the lanes of a vector, so a query's largest score, its sum and its output are each in one lane: nothing is
// reduced across a vector, and queries do not affect each other. Keys are processed in order, TILE at a time, from position
// 0.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t TILE = 8;          // keys whose scores are held in registers; also features whose sums are
constexpr int64_t LANES = 48;        // queries of a block: with TILE, 24 accumulators of 16
constexpr int64_t KEY_BLOCK = 128;   // keys whose probabilities are kept until values are multiplied with them
constexpr int64_t KEY_PACK = 1024;   // keys that are packed at once: they stay in the second-level cache
constexpr int64_t VALUE_ROOM = KEY_PACK + 16;  // places for their values: not a power of two, which would share a cache set
constexpr int64_t AHEAD = 4 * TILE;  // keys after those that are being packed, which memory is asked for
constexpr float LOWEST = -1e30f;     // of a reference: below any score that counts, and finite
constexpr float HEADROOM = 32.0f;    // a score may be 2^this above its reference: float32 has the room, and rescaling is rare

inline __mmask32 halves(int64_t left) {
    return left >= 32 ? ~__mmask32(0) : left <= 0 ? __mmask32(0) : (__mmask32(1) << left) - 1;
}

// -- two kinds of arithmetic. A cell is 32 bits: what one instruction multiplies in a lane --------------------------------

struct Bf16Cells {  // two bfloat16, summed in float32
    static constexpr int64_t EACH = 2;
    static __m512 multiply(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    // 16 cells of a row of `width` numbers, from cell `cell` on; zeros after its end.
    static __m512i row(const uint16_t* p, int64_t width, int64_t cell) {
        return _mm512_maskz_loadu_epi16(halves(width - 2 * cell), p + 2 * cell);
    }
    static __m512i row(const float* p, int64_t width, int64_t cell) {
        const __m512 low = load16(p + 2 * cell, lanes(width - 2 * cell));
        const __m512 high = load16(p + 2 * cell + 16, lanes(width - 2 * cell - 16));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    static __m512i beside(__m512 a, __m512 b) {  // 16 cells, a's numbers below b's
        const __m512i order = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    static __m512 power(__m512 x) {  // 2^x within 9e-5 of itself, a twentieth of what rounding to bfloat16 may take
        const __m512 rest = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
        __m512 p = _mm512_fmadd_ps(rest, _mm512_set1_ps(0.07706704231f), _mm512_set1_ps(0.2276449907f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.6951167866f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
        return _mm512_scalef_ps(p, x);
    }
};

struct F32Cells {
    static constexpr int64_t EACH = 1;
    static __m512 multiply(__m512 sum, __m512i a, __m512i b) { return _mm512_fmadd_ps((__m512)a, (__m512)b, sum); }
    template <typename T>
    static __m512i row(const T* p, int64_t width, int64_t cell) { return (__m512i)load16(p + cell, lanes(width - cell)); }
    static __m512i beside(__m512 a, __m512) { return (__m512i)a; }
    static __m512 power(__m512 x) {  // 2^x within 2 ulp
        const __m512 whole = _mm512_roundscale_ps(x, 0x08), rest = _mm512_reduce_ps(x, 0x08);
        __m512 p = _mm512_fmadd_ps(rest, _mm512_set1_ps(0.0001535336192f), _mm512_set1_ps(0.001339887441f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.009618437358f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.05550332471f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.2402264791f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.6931472029f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
        return _mm512_scalef_ps(p, whole);
    }
};

// Prefetches a row. GCC treats a function that only calls _mm_prefetch as having no effects, and drops the call.
template <typename T>
void fetch(const T* row, int64_t width) {
    const char *at = reinterpret_cast<const char*>(row), *end = reinterpret_cast<const char*>(row + width);
    for (; at < end; at += 64)
        asm volatile("prefetcht1 %0" : : "m"(*at));
}

// -- packing ---------------------------------------------------------------------------------------------------------------

// Cell i of row r goes to out[i * ld + r], for four rows of 16 cells.
inline void transpose4(const __m512i row[4], uint32_t* out, int64_t ld) {
    const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
    const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
    const __m512i quads[4] = {
        _mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
    const auto put = [&](int64_t cell, __m128i four) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out + cell * ld), four); };
    for (int j = 0; j < 4; j++) {
        put(j, _mm512_castsi512_si128(quads[j]));
        put(4 + j, _mm512_extracti32x4_epi32(quads[j], 1));
        put(8 + j, _mm512_extracti32x4_epi32(quads[j], 2));
        put(12 + j, _mm512_extracti32x4_epi32(quads[j], 3));
    }
}

// `count` rows of at most `places` -> out[cell][places], zero for missing rows.
template <typename Cells, typename Row>
void pack_across(int64_t count, int64_t places, int64_t width, Row&& row, uint32_t* out) {
    for (int64_t first = 0; first < places; first += 4) {
        for (int64_t cell = 0; cell * Cells::EACH < width; cell += 16) {
            __m512i four[4];
            for (int64_t i = 0; i < 4; i++) four[i] = first + i < count ? row(first + i, cell) : _mm512_setzero_si512();
            transpose4(four, out + cell * places + first, places);
        }
    }
}

// -- a block of queries over packed keys ----------------------------------------------------------------------------------------

struct Head {
    int64_t width;
    int64_t cells, padded;  // of a row of `width`, and rounded up to 16
    int64_t tiles;          // of features
    float scale;            // of scores, in powers of two

    template <typename Cells>
    static Head of(int64_t width, float scale) {
        const int64_t cells = (width + Cells::EACH - 1) / Cells::EACH;
        return {width, cells, (cells + 15) / 16 * 16, (width + TILE - 1) / TILE, scale * 1.44269504f};
    }
};

struct Lanes {  // queries of a block, at most LANES, and how far each has come
    int64_t count, vectors;     // queries; vectors of 16 of them
    int64_t nearest, furthest;  // the least and the largest of `last`
    alignas(64) int32_t last[LANES];                 // the last key that a query looks at
    alignas(64) float reference[LANES], sum[LANES];  // probabilities are 2^(score - reference), and their sum

    template <typename Source>
    void begin(const Source& source, int64_t first, int64_t queries) {
        count = queries, vectors = (queries + 15) / 16;
        nearest = source.last(first), furthest = source.last(first + count - 1);
        for (int64_t i = 0; i < LANES; i++) {
            last[i] = int32_t(source.last(first + std::min(i, count - 1)));
            reference[i] = LOWEST, sum[i] = 0.0f;
        }
    }
    __m512 inverse(int64_t vector) const { return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(sum + 16 * vector)); }
};

// Turns scores of TILE keys into probabilities, TILE / EACH x V vectors of cells in `to`, and sums them.
template <typename Cells, int V>
inline __attribute__((always_inline)) void weigh(
    __m512 score[TILE][V], __m512 scale, const __m512 reference[V], __m512 total[V], uint32_t* to
) {
    for (int v = 0; v < V; v++) {
        for (int i = 0; i < TILE; i++) score[i][v] = Cells::power(_mm512_fmsub_ps(score[i][v], scale, reference[v]));
        __m512 four[4];
        for (int i = 0; i < 4; i++) four[i] = _mm512_add_ps(score[2 * i][v], score[2 * i + 1][v]);
        total[v] = _mm512_add_ps(total[v], _mm512_add_ps(_mm512_add_ps(four[0], four[1]), _mm512_add_ps(four[2], four[3])));
        if constexpr (Cells::EACH == 2) {
            for (int i = 0; i < TILE / 2; i++)
                _mm512_storeu_si512(to + (i * V + v) * 16, Cells::beside(score[2 * i][v], score[2 * i + 1][v]));
        } else {
            for (int i = 0; i < TILE; i++) _mm512_storeu_ps(to + (i * V + v) * 16, score[i][v]);
        }
    }
}

// Scores of keys before `first`, or after a query's last key, become scores without weight.
template <int V>
inline void close(const Lanes& lanes, int64_t at, int64_t first, __m512 score[TILE][V]) {
    for (int i = 0; i < TILE; i++)
        for (int v = 0; v < V; v++) {
            const __m512i last = _mm512_load_si512(lanes.last + 16 * v);
            const __mmask16 open = at + i < first ? 0 : _mm512_cmpge_epi32_mask(last, _mm512_set1_epi32(int32_t(at + i)));
            score[i][v] = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), open, score[i][v]);
        }
}

// Each query's largest score of a tile; whether one is far above its reference.
template <int V>
inline __attribute__((always_inline)) bool look(
    const __m512 score[TILE][V], __m512 scale, const __m512 reference[V], __m512 largest[V]
) {
    bool far = false;
    for (int v = 0; v < V; v++) {
        __m512 four[4];
        for (int i = 0; i < 4; i++) four[i] = _mm512_max_ps(score[2 * i][v], score[2 * i + 1][v]);
        largest[v] = _mm512_max_ps(_mm512_max_ps(four[0], four[1]), _mm512_max_ps(four[2], four[3]));
        largest[v] = _mm512_mul_ps(largest[v], scale);
        far |= _mm512_cmp_ps_mask(largest[v], _mm512_add_ps(reference[v], _mm512_set1_ps(HEADROOM)), _CMP_GT_OQ) != 0;
    }
    return far;
}

// For those queries the score becomes the reference; `factor` is what to multiply their sums with.
template <typename Cells, int V>
void raise(const __m512 largest[V], __m512 reference[V], __m512 total[V], __m512 factor[V]) {
    for (int v = 0; v < V; v++) {
        const __m512 limit = _mm512_add_ps(reference[v], _mm512_set1_ps(HEADROOM));
        const __mmask16 far = _mm512_cmp_ps_mask(largest[v], limit, _CMP_GT_OQ);
        const __m512 raised = _mm512_mask_mov_ps(reference[v], far, largest[v]);
        factor[v] = Cells::power(_mm512_sub_ps(reference[v], raised));
        reference[v] = raised;
        total[v] = _mm512_mask_mul_ps(total[v], far, total[v], factor[v]);
    }
}

// Keys [begin, end), from a multiple of TILE on, for all queries of a block. Parameters:
//   scores(at, score): adds the products of TILE keys; add(from, to, chances): adds those of values and probabilities to
//   the outputs;
//   rescale(factor): multiplies the outputs.
template <typename Cells, int V, typename Products>
void walk(float scores_scale, Lanes& lanes, const Products& products, int64_t begin, int64_t end, int64_t first) {
    alignas(64) uint32_t chances[KEY_BLOCK / Cells::EACH * 16 * V];
    const __m512 scale = _mm512_set1_ps(scores_scale);
    __m512 reference[V], total[V];
    for (int v = 0; v < V; v++) {
        reference[v] = _mm512_load_ps(lanes.reference + 16 * v);
        total[v] = _mm512_load_ps(lanes.sum + 16 * v);
    }
    int64_t pending = begin, at = begin;  // from `pending` on, probabilities have not met their values
    for (; at < end; at += TILE) {
        __m512 score[TILE][V];
        for (int i = 0; i < TILE; i++)
            for (int v = 0; v < V; v++) score[i][v] = _mm512_setzero_ps();
        products.scores(at, score);
        if (at + TILE > lanes.nearest + 1 || at < first) close<V>(lanes, at, first, score);
        __m512 largest[V];
        if (__builtin_expect(look<V>(score, scale, reference, largest), 0)) {
            __m512 factor[V];
            raise<Cells, V>(largest, reference, total, factor);
            products.add(pending, at, chances);
            products.rescale(factor);
            pending = at;
        }
        weigh<Cells, V>(score, scale, reference, total, chances + (at - pending) / Cells::EACH * 16 * V);
        if (at + TILE - pending == KEY_BLOCK) {
            products.add(pending, at + TILE, chances);
            pending = at + TILE;
        }
    }
    products.add(pending, at, chances);
    for (int v = 0; v < V; v++) {
        _mm512_store_ps(lanes.reference + 16 * v, reference[v]);
        _mm512_store_ps(lanes.sum + 16 * v, total[v]);
    }
}

// -- many queries: keys and values are packed, and blocks of queries go over them ------------------------------------------

struct Block {
    Lanes lanes;
    uint32_t* queries;  // [padded][16 * vectors]
    float* out;         // [TILE * tiles][16 * vectors]: their products with values
};

struct Keys {  // packed, from a multiple of TILE on
    int64_t begin, end;  // positions
    uint32_t *keys;      // [tile of keys][padded][TILE]
    uint32_t *values;    // [tile of features][VALUE_ROOM / EACH][TILE]
};

// sum[i][v] += a[step][i] * b[step][16 v ..], step by step.
template <typename Cells, int V>
inline __attribute__((always_inline)) void multiply_tile(
    int64_t steps, const uint32_t* a, const uint32_t* b, __m512 sum[TILE][V]
) {
    for (int64_t step = 0; step < steps; step++, a += TILE, b += 16 * V) {
        __m512i column[V];
        for (int v = 0; v < V; v++) column[v] = _mm512_loadu_si512(b + 16 * v);
        for (int i = 0; i < TILE; i++) {
            const __m512i x = _mm512_set1_epi32(int32_t(a[i]));
            for (int v = 0; v < V; v++) sum[i][v] = Cells::multiply(sum[i][v], x, column[v]);
        }
    }
}

template <typename Cells, int V>
struct PackedProducts {
    const Head& head;
    const Block& block;
    const Keys& keys;

    inline __attribute__((always_inline)) void scores(int64_t at, __m512 score[TILE][V]) const {
        multiply_tile<Cells, V>(head.cells, keys.keys + (at - keys.begin) * head.padded, block.queries, score);
    }
    void add(int64_t from, int64_t to, const uint32_t* chances) const {
        for (int64_t tile = 0; tile < head.tiles && from < to; tile++) {
            float* out = block.out + tile * TILE * 16 * V;
            __m512 sum[TILE][V];
            for (int i = 0; i < TILE; i++)
                for (int v = 0; v < V; v++) sum[i][v] = _mm512_loadu_ps(out + (i * V + v) * 16);
            const uint32_t* values = keys.values + (tile * VALUE_ROOM + from - keys.begin) / Cells::EACH * TILE;
            multiply_tile<Cells, V>((to - from) / Cells::EACH, values, chances, sum);
            for (int i = 0; i < TILE; i++)
                for (int v = 0; v < V; v++) _mm512_storeu_ps(out + (i * V + v) * 16, sum[i][v]);
        }
    }
    void rescale(const __m512 factor[V]) const {
        for (int64_t i = 0; i < head.tiles * TILE; i++)
            for (int v = 0; v < V; v++) {
                float* out = block.out + (i * V + v) * 16;
                _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), factor[v]));
            }
    }
};

template <typename Cells>
void walk_packed(const Head& head, Block& block, const Keys& keys, int64_t first) {
    const int64_t end = std::min(keys.end, block.lanes.furthest + 1);
    if (end <= keys.begin) return;
    const auto run = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        walk<Cells, V>(head.scale, block.lanes, PackedProducts<Cells, V>{head, block, keys}, keys.begin, end, first);
    };
    switch (block.lanes.vectors) {
        case 1: run(std::integral_constant<int, 1>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        default: run(std::integral_constant<int, 3>());
    }
}

// Passes each query's output, divided by its sum, to write(query, numbers); `rows` holds 16 of them.
template <typename Write>
void finish(const Head& head, const Block& block, float* rows, Write&& write) {
    const int64_t places = 16 * block.lanes.vectors, padded = (head.tiles * TILE + 15) / 16 * 16;
    for (int64_t v = 0; v < block.lanes.vectors; v++) {
        const __m512 inverse = block.lanes.inverse(v);
        for (int64_t i = 0; i < head.tiles * TILE; i += 4) {
            __m512i four[4];
            for (int j = 0; j < 4; j++)
                four[j] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(block.out + (i + j) * places + 16 * v), inverse);
            transpose4(four, reinterpret_cast<uint32_t*>(rows) + i, padded);
        }
        for (int64_t lane = 0; lane < 16 && 16 * v + lane < block.lanes.count; lane++) write(16 * v + lane, rows + lane * padded);
    }
}

// Keys and values [keys.begin, keys.end) of a source.
template <typename Cells, typename Source>
void pack_keys(const Head& head, const Source& source, const Keys& keys) {
    for (int64_t tile = keys.begin; tile < keys.end; tile += TILE) {
        const int64_t count = std::min(TILE, keys.end - tile);
        const auto lines = source.lines(tile, count);
        if (tile + AHEAD < keys.end) source.lines(tile + AHEAD, std::min(TILE, keys.end - tile - AHEAD)).fetch_all();
        uint32_t* to = keys.keys + (tile - keys.begin) * head.padded;
        pack_across<Cells>(count, TILE, head.width, [&](int64_t i, int64_t cell) { return lines.key(Cells(), i, cell); }, to);
        for (int64_t i = 0; i < TILE; i += Cells::EACH)
            for (int64_t feature = 0; feature < head.width; feature += 2 * TILE) {
                const auto value = [&](int64_t j) { return j < count ? lines.value(j, feature) : _mm512_setzero_ps(); };
                const __m512i cells = Cells::beside(value(i), value(i + 1));
                to = keys.values + (feature / TILE * VALUE_ROOM + tile + i - keys.begin) / Cells::EACH * TILE;
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(cells));
                to += VALUE_ROOM / Cells::EACH * TILE;
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_extracti64x4_epi64(cells, 1));
            }
    }
}

// Parts of a thread's scratch memory, each aligned to 64 bytes.
class Scratch {
  public:
    Scratch(std::vector<float>& memory, int64_t floats) {
        if (memory.size() < size_t(floats + 16)) memory.resize(floats + 16);
        at_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    }
    template <typename T>
    static int64_t floats(int64_t count) { return (count * int64_t(sizeof(T)) + 63) / 64 * 16; }
    template <typename T>
    T* take(int64_t count) { return reinterpret_cast<T*>(std::exchange(at_, at_ + floats<T>(count) * sizeof(float))); }

  private:
    char* at_;
};

// Attention of `count` queries. The source has the queries and the keys:
//   query(Cells, i, cell): 16 cells of query i; fetch_query(i): prefetches it; last(i): the last key that it attends to,
//     which never decreases;
//   lines(position, count): an object whose key(Cells, i, cell) is 16 cells of a key, value(i, feature) 16 numbers of a
//     value, and fetch_all() prefetches them;
//   write(i, numbers): takes the output of query i.
template <typename Cells, typename Source>
void attend(const Head& head, const Source& source, int64_t count, int64_t first, std::vector<float>& memory) {
    const int64_t blocks = (count + LANES - 1) / LANES, behind = source.last(count - 1) + 1, begin = first / TILE * TILE;
    const int64_t of_keys = (std::min(KEY_PACK, behind - begin) + TILE - 1) / TILE * TILE * head.padded;
    const int64_t of_values = (head.tiles + 1) * TILE * VALUE_ROOM / Cells::EACH, of_rows = 16 * (head.tiles * TILE + 15);
    const int64_t of_queries = head.padded * LANES, of_out = head.tiles * TILE * LANES;
    const int64_t each = Scratch::floats<Block>(1) + Scratch::floats<float>(of_queries) + Scratch::floats<float>(of_out);
    const int64_t once = Scratch::floats<float>(of_keys) + Scratch::floats<float>(of_values) + Scratch::floats<float>(of_rows);
    Scratch scratch(memory, once + blocks * each);
    Block* block = scratch.take<Block>(blocks);
    Keys keys{0, 0, scratch.take<uint32_t>(of_keys), scratch.take<uint32_t>(of_values)};
    float* rows = scratch.take<float>(of_rows);
    const auto fetch_queries = [&](int64_t b) {
        for (int64_t i = b * LANES; i < std::min((b + 1) * LANES, count); i++) source.fetch_query(i);
    };
    fetch_queries(0);
    for (int64_t b = 0; b < blocks; b++) {
        fetch_queries(b + 1);
        Block& one = block[b];
        one.lanes.begin(source, b * LANES, std::min(LANES, count - b * LANES));
        one.queries = scratch.take<uint32_t>(of_queries), one.out = scratch.take<float>(of_out);
        std::fill(one.out, one.out + head.tiles * TILE * 16 * one.lanes.vectors, 0.0f);
        pack_across<Cells>(one.lanes.count, 16 * one.lanes.vectors, head.width, [&](int64_t i, int64_t cell) {
            return source.query(Cells(), b * LANES + i, cell);
        }, one.queries);
    }
    for (keys.begin = begin; keys.begin < behind; keys.begin = keys.end) {
        keys.end = std::min(keys.begin + KEY_PACK, behind);
        pack_keys<Cells>(head, source, keys);
        for (int64_t b = 0; b < blocks; b++) walk_packed<Cells>(head, block[b], keys, first);
    }
    for (int64_t b = 0; b < blocks; b++)
        finish(head, block[b], rows, [&](int64_t i, const float* numbers) { source.write(b * LANES + i, numbers); });
}

}  // namespace
