// Matrix products over packed weights.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "activations.h"
#include "numbers.h"
#include "structs.h"
#include "threads.h"

namespace {

constexpr int64_t PANEL = 64;       // columns of a packed weight that lie together
constexpr int64_t GROUP = 128;      // inputs that share a scale in int4
constexpr int64_t FLUSH = 256;      // pairs of products after which int8 sums leave int32: 2 * 256 * 127 * 32767 < 2^31
constexpr int64_t ROWS = 6;         // rows of a register tile: 6 x 4 accumulators of 16
constexpr int64_t ROW_BLOCK = 192;  // rows that a unit of work covers
constexpr int64_t LINE = 64;        // bytes that are read from memory together
constexpr int64_t STRIDE = 4;       // steps through the inputs between two looks at what is needed next
constexpr int64_t SPREAD = 4;       // tiles of rows over which reading the next panel is spread
constexpr int64_t DIVISIBLE = 1024; // inputs from which on a panel may be divided among threads
constexpr float LIMIT = 32767.0f;

inline int64_t panels_of(const Weight& w) { return (w.n + PANEL - 1) / PANEL; }

inline int64_t panel_bytes(const Weight& w) { return w.kpad * PANEL * 2 / (w.kind == BF16 ? 1 : w.kind == INT8 ? 2 : 4); }

// -- operands: float rows in the form that a kind of weight is multiplied with -------------------------------------------

// `values` [k] -> row `row` of the operand; the padding is zero.
void make_operand(const float* values, int64_t k, int64_t kind, void* operand, int64_t ld, float* scales, int64_t row) {
    if (kind == F32) {
        std::memcpy(static_cast<float*>(operand) + row * ld, values, k * sizeof(float));
        return;
    }
    if (kind == BF16) {
        uint16_t* out = static_cast<uint16_t*>(operand) + row * ld;
        for (int64_t i = 0; i < k; i += 16) {
            const __mmask16 m = first_lanes(k - i);
            store_bf16(out + i, m, _mm512_maskz_loadu_ps(m, values + i));
        }
        std::fill(out + k, out + (k + 1) / 2 * 2, 0);
        return;
    }
    int16_t* out = static_cast<int16_t*>(operand) + row * ld;
    float largest = 0, poison = 0;  // NaN and infinity have no integers: they pass through the scale
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (int64_t i = 0; i < k; i++) {
        largest = std::max(largest, std::fabs(values[i]));
        poison += values[i] * 0.0f;
    }
    scales[row] = largest / LIMIT + poison;
    const float inverse = largest > 0 ? LIMIT / largest : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < k; i++) out[i] = int16_t(int32_t(std::nearbyint(values[i] * inverse)));
    const int64_t pad = kind == INT4 ? (k + GROUP - 1) / GROUP * GROUP : (k + 1) / 2 * 2;
    std::fill(out + k, out + pad, 0);
}

// -- products --------------------------------------------------------------------------------------------------------------

// Keeps the compiler from loading a value again for each use.
inline __m512i in_register(__m512i x) {
    asm("" : "+v"(x));
    return x;
}

inline __m512i broadcast_pair(const uint16_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

// Memory that is needed next, read into the second-level cache while the current panel is multiplied: some lines with each
// STRIDE steps through the inputs.
struct Ahead {
    const char *at, *end;
    int64_t bytes;
    bool step() {  // whether there was something to read
        if (at >= end) return false;
        const char* stop = std::min(at + bytes, end);
        for (; at < stop; at += LINE) _mm_prefetch(at, _MM_HINT_T1);
        return true;
    }
};

// R rows times 16 * V columns, from column 16 * first of a panel. Never inlined: the loop needs most registers that there are.
template <int R, int V>
__attribute__((noinline)) void tile_bf16(
    const uint16_t* a, int64_t lda, const Weight& w, int64_t panel, int64_t first, Ahead ahead, float* out
) {
    const uint16_t* b = static_cast<const uint16_t*>(w.data) + panel * w.kpad * PANEL + first * 32;
    const uint16_t* const a_end = a + w.kpad;
    __m512 sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_ps();
    while (a < a_end) {
        const uint16_t* const stop = ahead.step() ? std::min(a_end, a + 2 * STRIDE) : a_end;
        for (; a < stop; a += 2, b += 2 * PANEL) {
            __m512bh column[V];
            for (int v = 0; v < V; v++) column[v] = (__m512bh)in_register(_mm512_loadu_si512(b + v * 32));
            for (int r = 0; r < R; r++) {
                const __m512bh x = (__m512bh)broadcast_pair(a + r * lda);
                for (int v = 0; v < V; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, column[v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) _mm512_storeu_ps(out + r * PANEL + v * 16, sum[r][v]);
}

template <int R, int V>
void tile_int8(
    const uint16_t* a, int64_t lda, const float* scales, const Weight& w, int64_t panel, int64_t first, float* out
) {
    const int8_t* b = static_cast<const int8_t*>(w.data) + panel * w.kpad * PANEL + first * 32;
    const int64_t pairs = w.kpad / 2;
    __m512 total[R][V];
    for (int64_t begin = 0; begin < pairs; begin += FLUSH) {
        __m512i sum[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_si512();
        const int64_t end = std::min(pairs, begin + FLUSH);
        for (int64_t p = begin; p < end; p++, b += 2 * PANEL) {
            __m512i column[V];
            for (int v = 0; v < V; v++)
                column[v] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + v * 32)));
            for (int r = 0; r < R; r++) {
                const __m512i x = broadcast_pair(a + r * lda + 2 * p);
                for (int v = 0; v < V; v++) sum[r][v] = _mm512_dpwssd_epi32(sum[r][v], x, column[v]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                const __m512 part = _mm512_cvtepi32_ps(sum[r][v]);
                total[r][v] = begin ? _mm512_add_ps(total[r][v], part) : part;
            }
    }
    for (int v = 0; v < V; v++) {
        const __m512 scale = _mm512_loadu_ps(w.scale + panel * PANEL + (first + v) * 16);
        for (int r = 0; r < R; r++) {
            const __m512 y = _mm512_mul_ps(_mm512_mul_ps(total[r][v], scale), _mm512_set1_ps(scales[r]));
            _mm512_storeu_ps(out + r * PANEL + v * 16, y);
        }
    }
}

// All 64 columns: a byte holds the same place of columns 0..31 (low half) and 32..63 (high half).
template <int R>
void tile_int4(const uint16_t* a, int64_t lda, const float* scales, const Weight& w, int64_t panel, float* out) {
    const int64_t groups = w.kpad / GROUP;
    const uint8_t* b = static_cast<const uint8_t*>(w.data) + panel * w.kpad * PANEL / 2;
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    __m512 total[R][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++) total[r][v] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i sum[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) sum[r][v] = _mm512_setzero_si512();
        for (int64_t p = g * GROUP / 2; p < (g + 1) * GROUP / 2; p++, b += PANEL) {
            const __m512i both = _mm512_loadu_si512(b);
            const __m512i left = _mm512_shuffle_epi8(values, _mm512_and_si512(both, low));
            const __m512i right = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
            const __m512i column[4] = {
                _mm512_cvtepi8_epi16(_mm512_castsi512_si256(left)),
                _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(left, 1)),
                _mm512_cvtepi8_epi16(_mm512_castsi512_si256(right)),
                _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64(right, 1)),
            };
            for (int r = 0; r < R; r++) {
                const __m512i x = broadcast_pair(a + r * lda + 2 * p);
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_dpwssd_epi32(sum[r][v], x, column[v]);
            }
        }
        for (int v = 0; v < 4; v++) {
            const __m512 scale = _mm512_loadu_ps(w.scale + (panel * groups + g) * PANEL + v * 16);
            for (int r = 0; r < R; r++)
                total[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][v]), scale, total[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 4; v++)
            _mm512_storeu_ps(out + r * PANEL + v * 16, _mm512_mul_ps(total[r][v], _mm512_set1_ps(scales[r])));
}

// float32 weights stay in rows: columns of a panel are dot products, four at a time.
template <int R>
void tile_f32(const float* a, int64_t lda, const Weight& w, int64_t panel, float* out) {
    const float* data = static_cast<const float*>(w.data);
    const int64_t last = std::min(w.n, (panel + 1) * PANEL) - 1;
    for (int64_t c = 0; c < PANEL && panel * PANEL + c <= last; c += 4) {
        const float* b[4];
        for (int v = 0; v < 4; v++) b[v] = data + std::min(panel * PANEL + c + v, last) * w.k;
        __m512 sum[R][4];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) sum[r][v] = _mm512_setzero_ps();
        for (int64_t i = 0; i < w.k; i += 16) {
            const __mmask16 m = w.k - i >= 16 ? __mmask16(0xffff) : __mmask16((1 << (w.k - i)) - 1);
            __m512 column[4];
            for (int v = 0; v < 4; v++) column[v] = _mm512_maskz_loadu_ps(m, b[v] + i);
            for (int r = 0; r < R; r++) {
                const __m512 x = _mm512_maskz_loadu_ps(m, a + r * lda + i);
                for (int v = 0; v < 4; v++) sum[r][v] = _mm512_fmadd_ps(x, column[v], sum[r][v]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 4; v++) out[r * PANEL + c + v] = _mm512_reduce_add_ps(sum[r][v]);
    }
}

struct Product {
    const Weight* weight;
    const void* a;
    int64_t lda;
    const float* scales;
    void* out;
    int64_t ldo, store;
    Activation activation = Activation::NONE;
    const Weight* next = nullptr;  // what is multiplied after this, if that is known
};

// R rows of sums, V * 16 wide (the last ones may be no outputs) -> their place: + bias, the activation, then stored or added.
// A row is read before it is written: a store may have to wait for its line, and what reads behind it with it.
template <int64_t STORED, int R, int V, bool WHOLE>
void finish(const Product& job, const float* sums, int64_t row, int64_t begin) {
    __mmask16 m[V];
    for (int v = 0; v < V; v++) m[v] = first_lanes(std::max<int64_t>(0, job.weight->n - begin - v * 16));
    const float* bias = job.weight->bias;
    const Activation activation = job.activation;
    int64_t place = row * job.ldo + begin;
    for (int r = 0; r < R; r++, sums += PANEL, place += job.ldo) {
        __m512 y[V];
        for (int v = 0; v < V; v++) y[v] = _mm512_loadu_ps(sums + v * 16);
        if (bias)
            for (int v = 0; v < V; v++) y[v] = _mm512_add_ps(y[v], _mm512_maskz_loadu_ps(m[v], bias + begin + v * 16));
        if (activation != Activation::NONE)
            for (int v = 0; v < V; v++) y[v] = activate(y[v], activation);
        if constexpr (STORED == STORE_BF16) {
            uint16_t* to = static_cast<uint16_t*>(job.out) + place;
            for (int v = 0; v < V; v++) store_bf16(to + v * 16, m[v], y[v]);
        } else {
            float* to = static_cast<float*>(job.out) + place;
            if constexpr (STORED == ADD)
                for (int v = 0; v < V; v++) y[v] = _mm512_add_ps(y[v], _mm512_maskz_loadu_ps(m[v], to + v * 16));
            for (int v = 0; v < V; v++) {
                if constexpr (WHOLE) _mm512_storeu_ps(to + v * 16, y[v]);
                else _mm512_mask_storeu_ps(to + v * 16, m[v], y[v]);
            }
        }
    }
}

template <int64_t STORED, int R, int V>
void finish(const Product& job, const float* sums, int64_t row, int64_t begin) {
    if (job.weight->n - begin >= 16 * V) finish<STORED, R, V, true>(job, sums, row, begin);
    else finish<STORED, R, V, false>(job, sums, row, begin);
}

template <int R, int V>
void tile(const Product& job, int64_t row, int64_t panel, int64_t first, Ahead ahead) {
    alignas(64) float out[R * PANEL];
    const Weight& w = *job.weight;
    const uint16_t* a = static_cast<const uint16_t*>(job.a) + row * job.lda;
    const float* scales = job.scales + row;
    if (w.kind == F32) tile_f32<R>(static_cast<const float*>(job.a) + row * job.lda, job.lda, w, panel, out);
    else if (w.kind == INT4) tile_int4<R>(a, job.lda, scales, w, panel, out);
    else if (w.kind == INT8) tile_int8<R, V>(a, job.lda, scales, w, panel, first, out);
    else tile_bf16<R, V>(a, job.lda, w, panel, first, ahead, out);
    const int64_t begin = panel * PANEL + first * 16;
    if (job.store == STORE_BF16) finish<STORE_BF16, R, V>(job, out, row, begin);
    else if (job.store == ADD) finish<ADD, R, V>(job, out, row, begin);
    else finish<STORE, R, V>(job, out, row, begin);
}

// tile<rows, V>.
template <int V, int R = 1>
void tile_of(int64_t rows, const Product& job, int64_t row, int64_t panel, int64_t first, Ahead ahead) {
    if constexpr (R < ROWS) {
        if (rows > R) return tile_of<V, R + 1>(rows, job, row, panel, first, ahead);
    }
    tile<R, V>(job, row, panel, first, ahead);
}

// Rows [begin, end) in tiles of nearly equal height. `next`: where as many bytes as a panel has are read ahead, over the last
// tiles; a single tile waits for memory itself.
void tiles(const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t first, int64_t count, const char* next) {
    const int64_t pieces = (end - begin + ROWS - 1) / ROWS, spread = std::min(pieces, SPREAD), bytes = panel_bytes(*job.weight);
    const int64_t steps = (job.weight->kpad / 2 + STRIDE - 1) / STRIDE;
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t from = begin + (end - begin) * i / pieces, to = begin + (end - begin) * (i + 1) / pieces;
        Ahead ahead{nullptr, nullptr, 0};
        if (const int64_t share = i - (pieces - spread); next && pieces > 1 && share >= 0) {
            ahead.at = next + bytes * share / spread / LINE * LINE;
            ahead.end = next + bytes * (share + 1) / spread / LINE * LINE;
            ahead.bytes = (ahead.end - ahead.at + steps * LINE - 1) / (steps * LINE) * LINE;
        }
        if (count == 4) tile_of<4>(to - from, job, from, panel, first, ahead);
        else tile_of<1>(to - from, job, from, panel, first, ahead);
    }
}

// Units of a product: (panel, block of rows), or quarters of panels where there would be too few for the threads.
struct Units {
    int64_t threads, quarters, blocks, count;
    Units(const Weight& w, int64_t rows, int64_t threads, int64_t products = 1) : threads(threads) {
        const int64_t panels = panels_of(w);
        blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        // A quarter of one row waits for its own sums as long as a panel does: that pays where memory is what takes time.
        const bool divisible = (w.kind == BF16 || w.kind == INT8) && threads > 1 && w.kpad >= DIVISIBLE;
        quarters = divisible && products * panels * blocks < 6 * threads ? 4 : 1;
        count = panels * blocks * quarters;
    }
};

// The panel that a thread will probably take when it is done with a unit: the next of its lane, or the first of its lane in
// the product that follows. Null where it has it already.
const char* next_panel(const Product& job, const Units& units, int64_t unit) {
    const int64_t lane = ((unit + 1) * units.threads - 1) / units.count, last = lane_begin(units.count, units.threads, lane + 1) - 1;
    const Weight* weight = unit < last ? job.weight : job.next;
    if (units.quarters > 1 || !weight || weight->kind == F32) return nullptr;
    const int64_t panel = unit < last ? (unit + 1) / units.blocks : lane_begin(panels_of(*weight), units.threads, lane);
    if (unit < last && panel == unit / units.blocks) return nullptr;
    return static_cast<const char*>(weight->data) + panel * panel_bytes(*weight);
}

void run_unit(const Product& job, const Units& units, int64_t unit, int64_t rows, int64_t before = 0) {
    const int64_t block = unit % units.blocks, part = unit / units.blocks;
    const int64_t panel = part / units.quarters, first = part % units.quarters;
    if (panel * PANEL + first * 16 >= job.weight->n) return;
    const int64_t begin = before + rows * block / units.blocks, end = before + rows * (block + 1) / units.blocks;
    const bool whole = units.quarters == 1;
    tiles(job, begin, end, panel, whole ? 0 : first, whole ? 4 : 1, next_panel(job, units, unit));
}

}  // namespace
