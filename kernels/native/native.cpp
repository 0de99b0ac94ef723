// Decoding on a CPU with AVX-512 (BF16 and VNNI): matrix products over packed weights, and a whole decode step as one
// list of operations that a few threads work through together. The layouts and the maths are in README.md; structs.py mirrors the structs.
//
// Everything that one row gets is computed in an order that depends on that row alone: a request has the same numbers
// in any batch, and with any number of threads.

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

enum Kind : int64_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };
enum Store : int64_t { STORE = 0, ADD = 1, STORE_BF16 = 2 };
enum Code : int64_t {
    NORM = 0, LINEAR = 1, MAMBA = 2, ATTENTION = 3, CONVERT = 4, RELU_SQUARED = 5,
    ROUTE = 6, GROUP_PICKS = 7, GATHER = 8, EXPERTS = 9, PICKED_RELU_SQUARED = 10, COMBINE = 11,
    NORM_PAIR = 12,
};
enum Target : int64_t { WIDE = 0, RESIDUAL = 1, LOGITS = 2, MID = 3, OPERAND = 4, STREAM = 5 };

constexpr int64_t PANEL = 64;       // columns of a packed weight that lie together
constexpr int64_t GROUP = 128;      // inputs that share a scale in int4
constexpr int64_t FLUSH = 256;      // pairs of products after which int8 sums leave int32: 2 * 256 * 127 * 32767 < 2^31
constexpr int64_t ROWS = 6;         // rows of a register tile: 6 x 4 accumulators of 16
constexpr int64_t ROW_BLOCK = 192;  // rows that a unit of work covers
constexpr int64_t DIVISIBLE = 1024; // inputs from which on a panel may be divided among threads
constexpr float LIMIT = 32767.0f;

}  // namespace

extern "C" {

struct Weight {  // [n, k]; kpad: k as it is stored; scale: int8 [panels * 64], int4 [panels, groups, 64]; bias: [n] or null
    int64_t kind, n, k, kpad;
    const void* data;
    const float* scale;
    const float* bias;
};

struct Experts {  // a mixture of them
    int64_t count, chosen, groups, kept, normalise;
    float scaling;
    const float* correction;   // [count]
    const Weight *up, *down;   // [count]
};

struct Op {
    int64_t code, kind, width;  // kind: of the operand that an operation makes; width: of its rows
    Weight weight;              // LINEAR; EXPERTS: the first expert's
    // LINEAR: WIDE, RESIDUAL (added to x), STREAM (x itself) or LOGITS; COMBINE: RESIDUAL or MID; GATHER: from WIDE or float OPERAND;
    // EXPERTS: WIDE for the first product, RESIDUAL for the second
    int64_t target;
    const float* norm;          // NORM, MAMBA, NORM_PAIR: weight
    void* windows;              // MAMBA: [slots, taps - 1, conv] ...
    int64_t window_stride;      // ... elements between slots
    float* states;              // [slots, heads, head, state]
    int64_t state_stride;
    const float *conv, *conv_bias, *a, *d, *dt_bias;  // conv: [taps, conv]
    void* kv;                                         // ATTENTION: [pages, 2, page, kv_heads, width]
    int64_t kv_stride;
    float* ring;  // MAMBA, or null: [seats, steps, conv + heads], projected inputs since the state in a slot
    int64_t ring_stride;
    const Experts* experts;  // from ROUTE to COMBINE
    int64_t first_key;       // ATTENTION: the first place that is looked at
};

struct Model {
    int64_t count;
    const Op* ops;
    int64_t threads, hidden, vocab;
    int64_t heads, head, groups, state, taps, conv_dim, inner;
    int64_t q_heads, kv_heads, width, page;
    int64_t stored_bf16;  // windows and pages; else float32
    float eps, dt_low, dt_high, scale;
    float *x, *wide, *mid;  // [rows, hidden], [rows, ld], [rows, ld]
    int64_t ld;
    void* operand;  // [rows, operand_ld] of 4 bytes at most
    int64_t operand_ld;
    float* operand_scale;
    // A pick is one token's choice of one expert: a token's are in the order of experts. Rows of picks lie expert by expert.
    int64_t *picks, *places;  // [rows, chosen]: which expert, and which row it got
    float* shares;            // [rows, chosen]
    int64_t* runs;            // how many experts were picked; then of each, ascending: expert, first row, row behind the last
    void* picked;             // like operand, operand_scale and wide, with a row for each pick
    float *picked_scale, *picked_wide;
};

struct Step {
    int64_t tokens;
    int64_t rows;  // MAMBA: row r is tokens [starts[r], starts[r + 1]) ...
    const int64_t *starts, *slots, *initial;  // ... and begins with zeros unless initial[r]
    int64_t save_count;
    const int64_t* saves;  // [saves, 3]: (row, token, slot): what there is of the row before that token goes to that slot too
    const int64_t *lengths, *tables, *places;  // ATTENTION, of each token
    int64_t table_stride;
    float* logits;  // [tokens, vocab]
    // Of rows whose tokens may be taken back. Null, or [rows]: the slot that a row begins from, if not its own; its seat and
    // how many steps of the seat's ring come before it, in which case its slot stays as it is (-1: not so).
    const int64_t *from, *seats, *counts;
};
}

namespace {

inline float bf16_to_float(uint16_t v) {
    uint32_t bits = uint32_t(v) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t float_to_bf16(float f) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return uint16_t(f != f ? 0x7fc0 : rounded);
}

// exp within 2 ulp on [-87, 88], clamped outside: 2^n times a polynomial of the rest (Cephes' coefficients).
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline int64_t panels_of(const Weight& w) { return (w.n + PANEL - 1) / PANEL; }

// -- operands: float rows in the form that a kind of weight is multiplied with -------------------------------------------

// `values` [k] -> row `row` of the operand; the padding is zero.
void make_operand(const float* values, int64_t k, int64_t kind, void* operand, int64_t ld, float* scales, int64_t row) {
    if (kind == F32) {
        std::memcpy(static_cast<float*>(operand) + row * ld, values, k * sizeof(float));
        return;
    }
    if (kind == BF16) {
        uint16_t* out = static_cast<uint16_t*>(operand) + row * ld;
#pragma omp simd
        for (int64_t i = 0; i < k; i++) out[i] = float_to_bf16(values[i]);
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

inline __m512i broadcast_pair(const uint16_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

// R rows times 16 * V columns, from column 16 * first of a panel.
template <int R, int V>
void tile_bf16(const uint16_t* a, int64_t lda, const Weight& w, int64_t panel, int64_t first, float* out) {
    const uint16_t* b = static_cast<const uint16_t*>(w.data) + panel * w.kpad * PANEL + first * 32;
    __m512 sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_ps();
    for (int64_t p = 0; p < w.kpad / 2; p++, b += 2 * PANEL) {
        __m512bh column[V];
        for (int v = 0; v < V; v++) column[v] = (__m512bh)_mm512_loadu_si512(b + v * 32);
        for (int r = 0; r < R; r++) {
            const __m512bh x = (__m512bh)broadcast_pair(a + r * lda + 2 * p);
            for (int v = 0; v < V; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, column[v]);
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
    int64_t ldo, store, relu_squared;
};

template <int R>
void tile(const Product& job, int64_t row, int64_t panel, int64_t first, int64_t count) {
    alignas(64) float out[ROWS * PANEL];
    const Weight& w = *job.weight;
    if (w.kind == F32) {
        tile_f32<R>(static_cast<const float*>(job.a) + row * job.lda, job.lda, w, panel, out);
    } else {
        const uint16_t* a = static_cast<const uint16_t*>(job.a) + row * job.lda;
        const float* scales = job.scales + row;
        if (w.kind == INT4) tile_int4<R>(a, job.lda, scales, w, panel, out);
        else if (w.kind == INT8 && count == 4) tile_int8<R, 4>(a, job.lda, scales, w, panel, first, out);
        else if (w.kind == INT8) tile_int8<R, 1>(a, job.lda, scales, w, panel, first, out);
        else if (count == 4) tile_bf16<R, 4>(a, job.lda, w, panel, first, out);
        else tile_bf16<R, 1>(a, job.lda, w, panel, first, out);
    }
    const int64_t begin = panel * PANEL + first * 16, width = std::min(w.n - begin, count * 16);
    for (int r = 0; r < R; r++) {
        float* y = out + r * PANEL;
        if (w.bias)
            for (int64_t i = 0; i < width; i++) y[i] += w.bias[begin + i];
        if (job.relu_squared)
            for (int64_t i = 0; i < width; i++) y[i] = y[i] > 0 ? y[i] * y[i] : (y[i] == y[i] ? 0.0f : y[i]);
        const int64_t place = (row + r) * job.ldo + begin;
        if (job.store == STORE_BF16) {
            uint16_t* to = static_cast<uint16_t*>(job.out) + place;
            for (int64_t i = 0; i < width; i++) to[i] = float_to_bf16(y[i]);
        } else {
            float* to = static_cast<float*>(job.out) + place;
            if (job.store == ADD)
                for (int64_t i = 0; i < width; i++) to[i] += y[i];
            else
                std::memcpy(to, y, width * sizeof(float));
        }
    }
}

// Rows [begin, end) in tiles of nearly equal height.
void tiles(const Product& job, int64_t begin, int64_t end, int64_t panel, int64_t first, int64_t count) {
    const int64_t pieces = (end - begin + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t from = begin + (end - begin) * i / pieces, to = begin + (end - begin) * (i + 1) / pieces;
        switch (to - from) {
            case 1: tile<1>(job, from, panel, first, count); break;
            case 2: tile<2>(job, from, panel, first, count); break;
            case 3: tile<3>(job, from, panel, first, count); break;
            case 4: tile<4>(job, from, panel, first, count); break;
            case 5: tile<5>(job, from, panel, first, count); break;
            default: tile<6>(job, from, panel, first, count);
        }
    }
}

// Units of a product: (panel, block of rows), or quarters of panels where there would be too few for the threads.
struct Units {
    int64_t quarters, blocks, count;
    Units(const Weight& w, int64_t rows, int64_t threads, int64_t products = 1) {
        const int64_t panels = panels_of(w);
        blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        // A quarter of one row waits for its own sums as long as a panel does: that pays where memory is what takes time.
        const bool divisible = (w.kind == BF16 || w.kind == INT8) && threads > 1 && w.kpad >= DIVISIBLE;
        quarters = divisible && products * panels * blocks < 6 * threads ? 4 : 1;
        count = panels * blocks * quarters;
    }
};

void run_unit(const Product& job, const Units& units, int64_t unit, int64_t rows, int64_t before = 0) {
    const int64_t block = unit % units.blocks, part = unit / units.blocks;
    const int64_t panel = part / units.quarters, first = part % units.quarters;
    if (panel * PANEL + first * 16 >= job.weight->n) return;
    const int64_t begin = before + rows * block / units.blocks, end = before + rows * (block + 1) / units.blocks;
    tiles(job, begin, end, panel, units.quarters == 1 ? 0 : first, units.quarters == 1 ? 4 : 1);
}

// -- the Mamba-2 mixer between its projections, one row and one group of heads -----------------------------------------------

template <typename T>
inline float load(const T* p, int64_t i);
template <>
inline float load<float>(const float* p, int64_t i) { return p[i]; }
template <>
inline float load<uint16_t>(const uint16_t* p, int64_t i) { return bf16_to_float(p[i]); }
inline void store(float* p, int64_t i, float v) { p[i] = v; }
inline void store(uint16_t* p, int64_t i, float v) { p[i] = float_to_bf16(v); }

// Channels [begin, begin + count): the window moves on by one input, and `out` is the convolution through SiLU.
template <typename T>
void convolve(const Model& m, const Op& op, T* window, const float* in, int64_t begin, int64_t count, float* out) {
    const int64_t keep = m.taps - 1, channels = m.conv_dim;
    for (int64_t i = 0; i < count; i++) out[i] = op.conv_bias ? op.conv_bias[begin + i] : 0.0f;
    const float* last = op.conv + keep * channels + begin;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] += last[i] * in[begin + i];
    for (int64_t tap = 0; tap < keep; tap++) {
        const float* weight = op.conv + tap * channels + begin;
        T* row = window + tap * channels + begin;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) out[i] += weight[i] * load(row, i);
        if (tap + 1 < keep) std::memcpy(row, row + channels, count * sizeof(T));
    }
    if (keep > 0) {
        T* row = window + (keep - 1) * channels + begin;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) store(row, i, in[begin + i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] = silu(out[i]);
}

constexpr int64_t BLOCK = 32;  // tokens of a row that a head works through while its state stays in the cache

inline int64_t mamba_scratch(const Model& m) {  // floats
    const int64_t width = m.heads / m.groups * m.head;
    return BLOCK * (2 * width + 2 * m.state + 2 * m.heads / m.groups) + width * m.state + m.taps * m.conv_dim;
}

// Rows of a pool's part that belongs to a group of heads: the channels of x, B and C in a window, the states of the heads.
template <typename T, typename F>
void each_part(const Model& m, const Op& op, int64_t slot, int64_t group, F&& visit) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head;
    T* window = static_cast<T*>(op.windows) + slot * op.window_stride;
    for (int64_t tap = 0; tap + 1 < m.taps; tap++) {
        T* row = window + tap * m.conv_dim;
        visit(row + group * width, width);
        visit(row + m.inner + group * m.state, m.state);
        visit(row + m.inner + (m.groups + group) * m.state, m.state);
    }
    visit(op.states + slot * op.state_stride + group * width * m.state, width * m.state);
}

template <typename T>
void save_state(const Model& m, const Op& op, int64_t from, int64_t to, int64_t group) {
    std::vector<const void*> sources;
    if (from >= 0) each_part<T>(m, op, from, group, [&](auto* part, int64_t) { sources.push_back(part); });
    size_t next = 0;
    each_part<T>(m, op, to, group, [&](auto* part, int64_t count) {
        if (from >= 0) std::memcpy(part, sources[next++], count * sizeof(*part));
    });
}

struct Recurrence {  // of a block of tokens: x [tokens, width], steps and decays [tokens, heads], b and c [tokens, n], d [heads]
    int64_t tokens, width, head, heads, ldo;
    const float *x, *steps, *decays, *b, *c, *d;
    float *states, *out;  // [width, n], [tokens, ldo]
};

// n = 16 * V: two rows of the state stay in registers for the whole block, and share the loads of B and C.
template <int V>
void advance(const Recurrence& r) {
    for (int64_t p = 0; p < r.width; p += 2) {
        const int64_t h = p / r.head;
        float* rows[2] = {r.states + p * 16 * V, r.states + (p + 1) * 16 * V};
        __m512 s[2][V];
        for (int j = 0; j < 2; j++)
            for (int v = 0; v < V; v++) s[j][v] = _mm512_loadu_ps(rows[j] + 16 * v);
        for (int64_t t = 0; t < r.tokens; t++) {
            const float* x = r.x + t * r.width + p;
            const float step = r.steps[t * r.heads + h];
            const __m512 decay = _mm512_set1_ps(r.decays[t * r.heads + h]);
            const __m512 in[2] = {_mm512_set1_ps(x[0] * step), _mm512_set1_ps(x[1] * step)};
            __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int v = 0; v < V; v++) {
                const __m512 b = _mm512_loadu_ps(r.b + (t * V + v) * 16), c = _mm512_loadu_ps(r.c + (t * V + v) * 16);
                for (int j = 0; j < 2; j++) {
                    s[j][v] = _mm512_fmadd_ps(in[j], b, _mm512_mul_ps(s[j][v], decay));
                    sum[j] = _mm512_fmadd_ps(s[j][v], c, sum[j]);
                }
            }
            for (int j = 0; j < 2; j++) r.out[t * r.ldo + p + j] = _mm512_reduce_add_ps(sum[j]) + r.d[h] * x[j];
        }
        for (int j = 0; j < 2; j++)
            for (int v = 0; v < V; v++) _mm512_storeu_ps(rows[j] + 16 * v, s[j][v]);
    }
}

void advance_any(const Recurrence& r, int64_t n) {
    for (int64_t p = 0; p < r.width; p++) {
        const int64_t h = p / r.head;
        float* s = r.states + p * n;
        for (int64_t t = 0; t < r.tokens; t++) {
            const float value = r.x[t * r.width + p], in = value * r.steps[t * r.heads + h];
            const float decay = r.decays[t * r.heads + h], *b = r.b + t * n, *c = r.c + t * n;
            float y = 0;
#pragma omp simd reduction(+ : y)
            for (int64_t i = 0; i < n; i++) {
                s[i] = s[i] * decay + in * b[i];
                y += s[i] * c[i];
            }
            r.out[t * r.ldo + p] = y + r.d[h] * value;
        }
    }
}

// A block of tokens of one row and one group of heads, from their projected inputs. `window` and `states` advance.
template <typename T>
void mamba_block(
    const Model& m, const Op& op, T* window, float* states, const float* inputs, int64_t ldi, int64_t tokens, float* out,
    int64_t ldo, int64_t group, float* scratch
) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head, n = m.state;
    float *x = scratch, *b = x + BLOCK * width, *c = b + BLOCK * n, *steps = c + BLOCK * n, *decays = steps + BLOCK * heads;
    for (int64_t t = 0; t < tokens; t++) {
        const float* in = inputs + t * ldi;
        const float* raw = in + m.conv_dim + group * heads;
        convolve(m, op, window, in, group * width, width, x + t * width);
        convolve(m, op, window, in, m.inner + group * n, n, b + t * n);
        convolve(m, op, window, in, m.inner + (m.groups + group) * n, n, c + t * n);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t index = group * heads + h;
            steps[t * heads + h] = std::min(std::max(softplus(raw[h] + op.dt_bias[index]), m.dt_low), m.dt_high);
            decays[t * heads + h] = std::exp(steps[t * heads + h] * op.a[index]);
        }
    }
    const Recurrence r{tokens, width, m.head, heads, ldo, x, steps, decays, b, c, op.d + group * heads, states, out};
    if (n == 128 && m.head % 2 == 0) advance<8>(r);
    else if (n == 64 && m.head % 2 == 0) advance<4>(r);
    else if (n == 32 && m.head % 2 == 0) advance<2>(r);
    else advance_any(r, n);
}

void gate_and_norm(const Model& m, const Op& op, int64_t begin, int64_t end, int64_t group) {
    const int64_t width = m.heads / m.groups * m.head;
    const float* weight = op.norm + group * width;
    for (int64_t t = begin; t < end; t++) {
        const float* gate = m.wide + t * m.ld + group * width;
        float* y = m.mid + t * m.ld + group * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) {
            y[i] *= silu(gate[i]);
            squares += y[i] * y[i];
        }
        const float inverse = 1.0f / std::sqrt(squares / width + m.eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) y[i] *= inverse * weight[i];
    }
}

// The first `count` steps of a seat's ring, on `window` and `states`; nobody wants their outputs.
template <typename T>
void replay(const Model& m, const Op& op, T* window, float* states, int64_t seat, int64_t count, int64_t group, float* scratch) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head;
    float* unread = scratch + BLOCK * (width + 2 * m.state + 2 * heads);
    mamba_block(
        m, op, window, states, op.ring + seat * op.ring_stride, m.conv_dim + m.heads, count, unread, width, group, scratch
    );
}

// A row on top of a state that stays as it is, and of a ring's steps; its inputs go behind these.
template <typename T>
void mamba_on_ring(const Model& m, const Op& op, const Step& step, int64_t row, int64_t group, float* scratch) {
    const int64_t heads = m.heads / m.groups, width = heads * m.head, wide = m.conv_dim + m.heads;
    const int64_t begin = step.starts[row], end = step.starts[row + 1], seat = step.seats[row], count = step.counts[row];
    const float* slot_states = op.states + step.slots[row] * op.state_stride + group * width * m.state;
    float* states = scratch + mamba_scratch(m) - width * m.state - m.taps * m.conv_dim;
    T* window = reinterpret_cast<T*>(states + width * m.state);
    std::memcpy(states, slot_states, width * m.state * sizeof(float));
    std::memcpy(window, static_cast<T*>(op.windows) + step.slots[row] * op.window_stride, (m.taps - 1) * m.conv_dim * sizeof(T));
    replay(m, op, window, states, seat, count, group, scratch);
    const int64_t begins[4] = {group * width, m.inner + group * m.state, m.inner + (m.groups + group) * m.state, m.conv_dim + group * heads};
    const int64_t sizes[4] = {width, m.state, m.state, heads};
    for (int64_t t = begin; t < end; t++)
        for (int64_t part = 0; part < 4; part++) {
            float* kept = op.ring + seat * op.ring_stride + (count + t - begin) * wide + begins[part];
            std::memcpy(kept, m.wide + t * m.ld + m.inner + begins[part], sizes[part] * sizeof(float));
        }
    float* out = m.mid + begin * m.ld + group * width;
    mamba_block(m, op, window, states, m.wide + begin * m.ld + m.inner, m.ld, end - begin, out, m.ld, group, scratch);
    gate_and_norm(m, op, begin, end, group);
}

template <typename T>
void mamba(const Model& m, const Op& op, const Step& step, int64_t row, int64_t group, float* scratch) {
    if (step.seats && step.seats[row] >= 0) {
        mamba_on_ring<T>(m, op, step, row, group, scratch);
        return;
    }
    const int64_t slot = step.slots[row], width = m.heads / m.groups * m.head, last = step.starts[row + 1];
    if (step.from && step.from[row] != slot) save_state<T>(m, op, step.from[row], slot, group);
    T* window = slot < 0 ? nullptr : static_cast<T*>(op.windows) + slot * op.window_stride;
    float* states = slot < 0 ? nullptr : op.states + slot * op.state_stride + group * width * m.state;
    if (slot < 0) {  // padding: zeros that nobody keeps
        states = scratch + mamba_scratch(m) - width * m.state - m.taps * m.conv_dim;
        window = reinterpret_cast<T*>(states + width * m.state);
        std::fill(states, states + width * m.state + m.taps * m.conv_dim, 0.0f);
    } else if (!step.initial[row]) {
        each_part<T>(m, op, slot, group, [](auto* part, int64_t count) { std::memset(part, 0, count * sizeof(*part)); });
    }
    for (int64_t begin = step.starts[row]; begin < last;) {
        int64_t end = std::min(last, begin + BLOCK);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && begin < save[1] && save[1] < end) end = save[1];
        }
        float* out = m.mid + begin * m.ld + group * width;
        mamba_block(m, op, window, states, m.wide + begin * m.ld + m.inner, m.ld, end - begin, out, m.ld, group, scratch);
        gate_and_norm(m, op, begin, end, group);
        for (int64_t i = 0; i < step.save_count; i++) {
            const int64_t* save = step.saves + 3 * i;
            if (save[0] == row && save[1] == end) save_state<T>(m, op, slot, save[2], group);
        }
        begin = end;
    }
}

// -- attention of one token and one key/value head over its pages ------------------------------------------------------------

inline __mmask16 lanes(int64_t left) { return left >= 16 ? __mmask16(0xffff) : __mmask16((1 << left) - 1); }
inline __m512 load16(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline __m512 load16(const uint16_t* p, __mmask16 m) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}

// scores[j * ld + s] = q[j] . key s, for J query heads and the `count` keys of a page, `stride` apart.
template <int J, typename T>
void dots(const float* q, const T* keys, int64_t stride, int64_t count, int64_t w, float scale, float* scores, int64_t ld) {
    for (int64_t s = 0; s < count; s++, keys += stride) {
        __m512 sum[J];
        for (int j = 0; j < J; j++) sum[j] = _mm512_setzero_ps();
        for (int64_t i = 0; i < w; i += 16) {
            const __mmask16 m = lanes(w - i);
            const __m512 k = load16(keys + i, m);
            for (int j = 0; j < J; j++) sum[j] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, q + j * w + i), k, sum[j]);
        }
        for (int j = 0; j < J; j++) scores[j * ld + s] = _mm512_reduce_add_ps(sum[j]) * scale;
    }
}

// out[j] += sum over the page's values of p[j * ld + s] * value s.
template <int J, typename T>
void mix(const float* p, int64_t ld, const T* values, int64_t stride, int64_t count, int64_t w, float* out) {
    for (int64_t i = 0; i < w; i += 16) {
        const __mmask16 m = lanes(w - i);
        __m512 sum[J];
        for (int j = 0; j < J; j++) sum[j] = _mm512_maskz_loadu_ps(m, out + j * w + i);
        for (int64_t s = 0; s < count; s++) {
            const __m512 v = load16(values + s * stride + i, m);
            for (int j = 0; j < J; j++) sum[j] = _mm512_fmadd_ps(_mm512_set1_ps(p[j * ld + s]), v, sum[j]);
        }
        for (int j = 0; j < J; j++) _mm512_mask_storeu_ps(out + j * w + i, m, sum[j]);
    }
}

// Calls visit(std::integral_constant<int, J>, first) for the heads, four at a time.
template <typename F>
void by_four(int64_t heads, F&& visit) {
    int64_t j = 0;
    for (; j + 4 <= heads; j += 4) visit(std::integral_constant<int, 4>(), j);
    if (heads - j == 3) visit(std::integral_constant<int, 3>(), j);
    if (heads - j == 2) visit(std::integral_constant<int, 2>(), j);
    if (heads - j == 1) visit(std::integral_constant<int, 1>(), j);
}

template <typename T>
void attention(const Model& m, const Op& op, const Step& step, int64_t row, int64_t head, std::vector<float>& scores) {
    const int64_t w = m.width, share = m.q_heads / m.kv_heads, length = step.lengths[row], place = step.places[row];
    const int64_t first = op.first_key;
    const float* q = m.wide + row * m.ld + head * share * w;
    float* out = m.mid + row * m.ld + head * share * w;
    T* pool = static_cast<T*>(op.kv);
    const int64_t side = m.page * m.kv_heads * w, token = m.kv_heads * w;
    if (place >= 0) {
        T* to = pool + place / m.page * op.kv_stride + place % m.page * token + head * w;
        const float* k = m.wide + row * m.ld + (m.q_heads + head) * w;
        const float* v = k + m.kv_heads * w;
#pragma omp simd
        for (int64_t i = 0; i < w; i++) store(to, i, k[i]);
        to += side;
#pragma omp simd
        for (int64_t i = 0; i < w; i++) store(to, i, v[i]);
    }
    std::fill(out, out + share * w, 0.0f);
    if (length <= first) return;
    scores.resize(share * length);
    const int64_t* table = step.tables + row * step.table_stride;
    const auto each_page = [&](auto&& visit) {  // (place, its key, places from there on to the end of the page)
        for (int64_t s = first, next; s < length; s = next) {
            next = std::min(length, (s / m.page + 1) * m.page);
            visit(s, pool + table[s / m.page] * op.kv_stride + s % m.page * token + head * w, next - s);
        }
    };
    each_page([&](int64_t s, const T* keys, int64_t here) {
        by_four(share, [&](auto count, int64_t j) {
            dots<count()>(q + j * w, keys, token, here, w, m.scale, scores.data() + j * length + s, length);
        });
    });
    for (int64_t j = 0; j < share; j++) {
        float* p = scores.data() + j * length;
        float largest = p[first], sum = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t s = first; s < length; s++) largest = std::max(largest, p[s]);
#pragma omp simd reduction(+ : sum)
        for (int64_t s = first; s < length; s++) {
            p[s] = fast_exp(p[s] - largest);
            sum += p[s];
        }
        for (int64_t s = first; s < length; s++) p[s] /= sum;
    }
    each_page([&](int64_t s, const T* keys, int64_t here) {
        by_four(share, [&](auto count, int64_t j) {
            mix<count()>(scores.data() + j * length + s, length, keys + side, token, here, w, out + j * w);
        });
    });
}

// -- a mixture of experts ----------------------------------------------------------------------------------------------------

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The largest value's index, the lowest among equals; it is never found again.
int64_t take_largest(float* values, int64_t count) {
    const int64_t best = std::max_element(values, values + count) - values;
    values[best] = -INFINITE;
    return best;
}

// Of a token: its experts and their shares, from the router's products in `wide`. The correction counts for the choice alone.
void route(const Model& m, const Op& op, int64_t token, float* scratch) {
    const Experts& of = *op.experts;
    const int64_t size = of.count / of.groups;
    const float* logits = m.wide + token * m.ld;
    float *scores = scratch, *choice = scores + of.count, *best = choice + of.count;
#pragma omp simd
    for (int64_t e = 0; e < of.count; e++) {
        scores[e] = 1.0f / (1.0f + fast_exp(-logits[e]));
        scores[e] = logits[e] == logits[e] ? scores[e] : logits[e];  // NaN is no clamped exponent
        const float corrected = scores[e] + of.correction[e];
        choice[e] = corrected == corrected ? corrected : INFINITE;
    }
    if (of.kept < of.groups) {
        for (int64_t g = 0; g < of.groups; g++) {  // a group counts as much as its two best
            float first = -INFINITE, second = -INFINITE;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                second = std::max(second, std::min(first, choice[e]));
                first = std::max(first, choice[e]);
            }
            best[g] = size > 1 ? first + second : first;
        }
        for (int64_t i = 0; i < of.kept; i++) take_largest(best, of.groups);
        for (int64_t g = 0; g < of.groups; g++)
            if (best[g] != -INFINITE) std::fill(choice + g * size, choice + (g + 1) * size, -INFINITE);
    }
    int64_t* picks = m.picks + token * of.chosen;
    float *shares = m.shares + token * of.chosen, sum = 1e-20f;
    for (int64_t i = 0; i < of.chosen; i++) picks[i] = take_largest(choice, of.count);
    std::sort(picks, picks + of.chosen);
    for (int64_t i = 0; i < of.chosen; i++) sum += shares[i] = scores[picks[i]];
    for (int64_t i = 0; i < of.chosen; i++) shares[i] = (of.normalise ? shares[i] / sum : shares[i]) * of.scaling;
}

// Rows for all picks, expert by expert.
void group_picks(const Model& m, const Op& op, int64_t tokens) {
    const int64_t picks = tokens * op.experts->chosen;
    std::vector<int64_t> rows(op.experts->count);
    for (int64_t i = 0; i < picks; i++) rows[m.picks[i]]++;
    int64_t found = 0, begin = 0;
    for (int64_t e = 0; e < op.experts->count; e++) {
        if (!rows[e]) continue;
        int64_t* run = m.runs + 1 + 3 * found++;
        run[0] = e, run[1] = begin, run[2] = begin += rows[e];
        rows[e] = run[1];
    }
    m.runs[0] = found;
    for (int64_t i = 0; i < picks; i++) m.places[i] = rows[m.picks[i]]++;
}

void gather(const Model& m, const Op& op, int64_t pick) {
    const int64_t token = pick / op.experts->chosen;
    const float* from = op.target == WIDE ? m.wide + token * m.ld : static_cast<const float*>(m.operand) + token * m.operand_ld;
    make_operand(from, op.width, op.kind, m.picked, m.operand_ld, m.picked_scale, m.places[pick]);
}

// How many experts a step may pick at most: units of the others would only be counted.
int64_t most_experts(const Op& op, const Step& step) { return std::min(op.experts->count, step.tokens * op.experts->chosen); }

void run_expert(const Model& m, const Op& op, const Step& step, int64_t unit) {
    const Units units(op.weight, 1, m.threads, most_experts(op, step));
    const int64_t at = unit / units.count, *run = m.runs + 1 + 3 * at;
    if (at >= m.runs[0]) return;
    const Weight* weight = (op.target == WIDE ? op.experts->up : op.experts->down) + run[0];
    const Product job{weight, m.picked, m.operand_ld, m.picked_scale, m.picked_wide, m.ld, STORE, 0};
    run_unit(job, units, unit % units.count, run[2] - run[1], run[1]);
}

// What a token's experts say, expert after expert.
void combine(const Model& m, const Op& op, int64_t token, float* sum) {
    const int64_t chosen = op.experts->chosen;
    std::fill(sum, sum + op.width, 0.0f);
    for (int64_t i = token * chosen; i < (token + 1) * chosen; i++) {
        const float *y = m.picked_wide + m.places[i] * m.ld, share = m.shares[i];
#pragma omp simd
        for (int64_t c = 0; c < op.width; c++) sum[c] += share * y[c];
    }
    if (op.target == MID) {
        std::memcpy(m.mid + token * m.ld, sum, op.width * sizeof(float));
        return;
    }
    float* x = m.x + token * m.hidden;
#pragma omp simd
    for (int64_t c = 0; c < op.width; c++) x[c] += sum[c];
}

// -- threads -----------------------------------------------------------------------------------------------------------------

// A job is a row of phases, a phase some units of work; a phase begins when all units of the one before it are done.
class Job {
  public:
    virtual int64_t phases() const = 0;
    virtual int64_t units(int64_t phase) const = 0;
    virtual void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const = 0;
};

// The caller and its helpers. Nobody waits for a thread, only for units that were taken: a helper that sleeps, or that has
// lost its core, costs no more than its absence. So each counter carries the number of its job, and a helper that comes late
// takes nothing of a job that is over.
class Pool {
  public:
    void run(const Job& job, int64_t threads) {
        std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
        if (!lock.owns_lock() || threads == 1) {  // another thread of this process is using the helpers
            for (int64_t i = 0; i < job.phases(); i++)
                for (int64_t unit = 0; unit < job.units(i); unit++) job.run(i, unit, scratch());
            return;
        }
        try {
            for (; helpers_ < threads - 1; helpers_++) std::thread(&Pool::help, this, helpers_).detach();
        } catch (const std::system_error&) {
        }  // no more threads to be had: those that there are do the work
        const int64_t phases = job.phases();
        if (phases > int64_t(counters_.size())) {
            for (auto& old : counters_) old.taken.store(0);
            retired_.push_back(std::move(counters_));  // a late helper may still look at it
            counters_ = std::vector<Counter>(phases);
        }
        const uint64_t number = (number_ + 1) & NUMBER_MASK;
        for (int64_t i = 0; i < phases; i++) {
            const uint64_t start = number << 40 | uint64_t(job.units(i)) << 20;
            counters_[i].done.store(start, std::memory_order_relaxed);
            counters_[i].taken.store(start, std::memory_order_relaxed);
        }
        job_.store(&job, std::memory_order_relaxed);
        shared_.store(counters_.data(), std::memory_order_relaxed);
        phases_.store(phases, std::memory_order_relaxed);
        wanted_.store(threads - 1, std::memory_order_relaxed);
        number_ = number;
        signal_.store(uint32_t(number), std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, int(threads - 1));
        work(counters_.data(), phases, number);
    }

  private:
    struct Counter {  // number of the job << 40 | units of the phase << 20 | units taken, or done
        std::atomic<uint64_t> taken{0};
        alignas(64) std::atomic<uint64_t> done{0};
        Counter() = default;
        Counter(const Counter&) {}
    };
    static constexpr uint64_t NUMBER_MASK = 0xffffff, COUNT_MASK = 0xfffff;
    static constexpr int SPINS = 1024, IDLE_SPINS = 1024;  // of some 40 cycles

    static std::vector<float>& scratch() {
        static thread_local std::vector<float> buffer;
        return buffer;
    }

    void futex(int operation, int value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&signal_), operation, value, nullptr, nullptr, 0);
    }

    void work(Counter* counters, int64_t phases, uint64_t number) {
        for (int64_t i = 0; i < phases; i++) {
            Counter& counter = counters[i];
            uint64_t seen = counter.taken.load(std::memory_order_acquire);
            for (;;) {
                if (seen >> 40 != number) return;
                if ((seen & COUNT_MASK) >= (seen >> 20 & COUNT_MASK)) break;
                if (!counter.taken.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
                job_.load(std::memory_order_relaxed)->run(i, int64_t(seen & COUNT_MASK), scratch());
                counter.done.fetch_add(1, std::memory_order_acq_rel);
                seen = counter.taken.load(std::memory_order_acquire);
            }
            for (int spins = 0;; spins++) {
                const uint64_t done = counter.done.load(std::memory_order_acquire);
                if (done >> 40 != number) return;
                if ((done & COUNT_MASK) == (done >> 20 & COUNT_MASK)) break;
                if (spins < SPINS) _mm_pause();
                else sched_yield();
            }
        }
    }

    void help(int64_t index) {
        uint32_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < IDLE_SPINS && signal_.load(std::memory_order_acquire) == seen; spins++) _mm_pause();
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            while (signal_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, int(seen));
            sleepers_.fetch_sub(1, std::memory_order_seq_cst);
            seen = signal_.load(std::memory_order_acquire);
            if (index < wanted_.load(std::memory_order_relaxed))
                work(shared_.load(std::memory_order_relaxed), phases_.load(std::memory_order_relaxed), seen);
        }
    }

    std::mutex busy_;
    std::vector<Counter> counters_;
    std::vector<std::vector<Counter>> retired_;
    int64_t helpers_ = 0;
    uint64_t number_ = 0;
    std::atomic<const Job*> job_{nullptr};
    std::atomic<Counter*> shared_{nullptr};
    std::atomic<int64_t> phases_{0}, wanted_{0};
    std::atomic<uint32_t> signal_{0};
    std::atomic<int> sleepers_{0};
};

Pool& pool() {
    static Pool* const forever = new Pool;  // helpers outlive static destructors
    return *forever;
}

// -- a step ------------------------------------------------------------------------------------------------------------------

void square(const float* from, int64_t width, float* out) {  // relu(x)^2
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = from[i] <= 0 ? 0.0f : from[i] * from[i];
}

void rms_norm(const float* from, const float* weight, int64_t width, float eps, float* out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; i++) squares += from[i] * from[i];
    const float inverse = 1.0f / std::sqrt(squares / width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = from[i] * inverse * weight[i];
}

void make_row(const Model& m, const Op& op, int64_t row, float* scratch) {
    const float* from = (op.code == NORM ? m.x : op.code == CONVERT ? m.mid : m.wide) + row * (op.code == NORM ? m.hidden : m.ld);
    const int64_t width = op.width;
    if (op.code == NORM || op.code == NORM_PAIR) {  // a pair: two rows side by side, each with its own norm
        const int64_t part = op.code == NORM ? width : width / 2;
        for (int64_t i = 0; i < width; i += part) rms_norm(from + i, op.norm + i, part, m.eps, scratch + i);
        from = scratch;
    } else if (op.code == RELU_SQUARED) {
        square(from, width, scratch);
        from = scratch;
    }
    make_operand(from, width, op.kind, m.operand, m.operand_ld, m.operand_scale, row);
}

Product product_of(const Model& m, const Op& op, const Step& step) {
    Product job{&op.weight, m.operand, m.operand_ld, m.operand_scale, m.wide, m.ld, STORE, 0};
    if (op.target == RESIDUAL) job.out = m.x, job.ldo = m.hidden, job.store = ADD;
    if (op.target == STREAM) job.out = m.x, job.ldo = m.hidden;
    if (op.target == LOGITS) job.out = step.logits, job.ldo = m.vocab;
    return job;
}

int64_t units_of(const Model& m, const Op& op, const Step& step) {
    switch (op.code) {
        case LINEAR: return Units(op.weight, step.tokens, m.threads).count;
        case MAMBA: return step.rows * m.groups;
        case ATTENTION: return step.rows * m.kv_heads;
        case GROUP_PICKS: return 1;
        case GATHER:
        case PICKED_RELU_SQUARED: return step.tokens * op.experts->chosen;
        case EXPERTS: return most_experts(op, step) * Units(op.weight, 1, m.threads, most_experts(op, step)).count;
        default: return step.tokens;
    }
}

class StepJob : public Job {
  public:
    StepJob(const Model& m, const Step& step, int64_t first, int64_t last) : m_(m), step_(step), first_(first), last_(last) {}
    int64_t phases() const override { return last_ - first_; }
    int64_t units(int64_t phase) const override { return units_of(m_, m_.ops[first_ + phase], step_); }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        const Op& op = m_.ops[first_ + phase];
        const int64_t own = op.code == MAMBA ? mamba_scratch(m_) : op.code == ROUTE ? 3 * op.experts->count : 0;
        const size_t needed = std::max(m_.ld, own);
        if (scratch.size() < needed) scratch.resize(needed);
        switch (op.code) {
            case LINEAR: run_unit(product_of(m_, op, step_), Units(op.weight, step_.tokens, m_.threads), unit, step_.tokens); break;
            case MAMBA:
                if (m_.stored_bf16) mamba<uint16_t>(m_, op, step_, unit / m_.groups, unit % m_.groups, scratch.data());
                else mamba<float>(m_, op, step_, unit / m_.groups, unit % m_.groups, scratch.data());
                break;
            case ATTENTION:
                attend(op, unit / m_.kv_heads, unit % m_.kv_heads, scratch);
                break;
            case ROUTE: route(m_, op, unit, scratch.data()); break;
            case GROUP_PICKS: group_picks(m_, op, step_.tokens); break;
            case GATHER: gather(m_, op, unit); break;
            case EXPERTS: run_expert(m_, op, step_, unit); break;
            case PICKED_RELU_SQUARED:
                square(m_.picked_wide + unit * m_.ld, op.width, scratch.data());
                make_operand(scratch.data(), op.width, op.kind, m_.picked, m_.operand_ld, m_.picked_scale, unit);
                break;
            case COMBINE: combine(m_, op, unit, scratch.data()); break;
            default: make_row(m_, op, unit, scratch.data());
        }
    }

  private:
    // Token after token of a row: each looks at the keys that those before it have written.
    void attend(const Op& op, int64_t row, int64_t head, std::vector<float>& scratch) const {
        for (int64_t token = step_.starts[row]; token < step_.starts[row + 1]; token++) {
            if (m_.stored_bf16) attention<uint16_t>(m_, op, step_, token, head, scratch);
            else attention<float>(m_, op, step_, token, head, scratch);
        }
    }

    const Model& m_;
    const Step& step_;
    const int64_t first_, last_;
};

// In each Mamba layer: the state in a slot, after the first steps of a ring, goes to a target. jobs: [rows, 4] of seat, slot,
// target, steps.
class AdvanceJob : public Job {
  public:
    AdvanceJob(const Model& m, int64_t rows, const int64_t* jobs) : m_(m), rows_(rows), jobs_(jobs) {}
    int64_t phases() const override { return m_.count; }
    int64_t units(int64_t phase) const override { return m_.ops[phase].code == MAMBA ? rows_ * m_.groups : 0; }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        if (scratch.size() < size_t(mamba_scratch(m_))) scratch.resize(mamba_scratch(m_));
        if (m_.stored_bf16) advance_row<uint16_t>(m_.ops[phase], unit, scratch.data());
        else advance_row<float>(m_.ops[phase], unit, scratch.data());
    }

  private:
    template <typename T>
    void advance_row(const Op& op, int64_t unit, float* scratch) const {
        const int64_t *job = jobs_ + unit / m_.groups * 4, group = unit % m_.groups, target = job[2];
        if (job[1] != target) save_state<T>(m_, op, job[1], target, group);
        T* window = static_cast<T*>(op.windows) + target * op.window_stride;
        float* states = op.states + target * op.state_stride + group * m_.heads / m_.groups * m_.head * m_.state;
        replay(m_, op, window, states, job[0], job[3], group, scratch);
    }

    const Model& m_;
    const int64_t rows_;
    const int64_t* jobs_;
};

// x as the weight wants it, where it is not, then the product.
class LinearJob : public Job {
  public:
    LinearJob(const Product& product, const void* x, int64_t ldx, bool is_bf16, void* operand, float* scales, int64_t rows, int64_t threads)
        : product_(product), x_(x), ldx_(ldx), is_bf16_(is_bf16), operand_(operand), scales_(scales), rows_(rows),
          units_(*product.weight, rows, threads) {}
    int64_t phases() const override { return 2; }
    int64_t units(int64_t phase) const override { return phase ? units_.count : product_.a == operand_ ? rows_ : 0; }
    void run(int64_t phase, int64_t unit, std::vector<float>& scratch) const override {
        if (phase) {
            run_unit(product_, units_, unit, rows_);
            return;
        }
        const Weight& w = *product_.weight;
        const float* from = static_cast<const float*>(x_) + unit * ldx_;
        if (is_bf16_) {
            if (scratch.size() < size_t(w.k)) scratch.resize(w.k);
            const uint16_t* bits = static_cast<const uint16_t*>(x_) + unit * ldx_;
            for (int64_t i = 0; i < w.k; i++) scratch[i] = bf16_to_float(bits[i]);
            from = scratch.data();
        }
        make_operand(from, w.k, w.kind, operand_, product_.lda, scales_, unit);
    }

  private:
    const Product product_;
    const void* x_;
    const int64_t ldx_;
    const bool is_bf16_;
    void* operand_;
    float* scales_;
    const int64_t rows_;
    const Units units_;
};

}  // namespace

extern "C" {

// Runs the model's operations [first, last) on `m.x`.
void saccade_step(const Model* model, const Step* step, int64_t first, int64_t last) {
    pool().run(StepJob(*model, *step, first, last), model->threads);
}

void saccade_advance(const Model* model, int64_t rows, const int64_t* jobs) {
    pool().run(AdvanceJob(*model, rows, jobs), model->threads);
}

// out[rows, n] = x[rows, k] W^T + b, `x` and `out` both float32 or both bfloat16.
void saccade_linear(
    const Weight* weight, const void* x, int64_t ldx, int64_t is_bf16, void* out, int64_t ldo, int64_t rows,
    int64_t relu_squared, int64_t threads, void* operand, int64_t operand_ld, float* scales
) {
    const Weight& w = *weight;
    Product product{weight, operand, operand_ld, scales, out, ldo, is_bf16 ? STORE_BF16 : STORE, relu_squared};
    if (is_bf16 ? w.kind == BF16 && w.k % 2 == 0 : w.kind == F32) product.a = x, product.lda = ldx;
    pool().run(LinearJob(product, x, ldx, is_bf16, operand, scales, rows, threads), threads);
}
}
