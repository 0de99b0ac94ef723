// Register tiles of matrix products: a few rows times vectors of 16 columns of a panel.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "numbers.h"
#include "panels.h"
#include "processor.h"
#include "product.h"
#include "structs.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t LINE = 64;           // bytes of a cache line, and of a vector
constexpr int64_t PREFETCH_STEPS = 4;  // steps through the inputs between two calls of Prefetch::step
// Inputs of rows that are widened together: with 6 rows they stay in the first-level cache.
constexpr int64_t WIDENED_INPUTS = 512;
// How far ahead the first pass over a panel prefetches: of packed numbers, in bytes (16 groups of nvfp4); of others, in
// steps through the inputs.
constexpr int64_t PREFETCH_BYTES = 9216, NEAR_PREFETCH_STEPS = 16;

inline Words broadcast_word(const void* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return splat_word(v);
}

// A word of a row of integers, in all lanes. Where their products are several instructions, GCC would otherwise compute
// those of all rows first and keep sums in memory.
inline Words word_of_row(const void* p) { return BYTE_DOTS ? broadcast_word(p) : in_register(broadcast_word(p)); }

// Prefetches what is needed next into the second-level cache while the current panel is multiplied: some lines every
// PREFETCH_STEPS steps of the inputs.
struct Prefetch {
    const char *at = nullptr, *end = nullptr;
    int64_t bytes = 0;  // of each step
    Prefetch() = default;
    Prefetch(const char* at, const char* end, int64_t bytes) : at(at), end(end), bytes(bytes) {}
    bool step() {  // whether there was something to prefetch
        if (at >= end) return false;
        const char* stop = std::min(at + bytes, end);
        for (; at < stop; at += LINE) prefetch_far(at);
        return true;
    }
};

constexpr int64_t PREFETCHING_TILES = 4;  // the last tiles of rows, which prefetch the next panel

// The part of `bytes` at `next` that tile `tile` of `tiles` prefetches. `steps`: how often the tile calls step().
Prefetch prefetch_of(int64_t tile, int64_t tiles, const char* next, int64_t bytes, int64_t steps) {
    const int64_t sharing = std::min(tiles, PREFETCHING_TILES), share = tile - (tiles - sharing);
    if (!next || share < 0) return {nullptr, nullptr, 0};
    Prefetch part{next + bytes * share / sharing / LINE * LINE, next + bytes * (share + 1) / sharing / LINE * LINE, 0};
    part.bytes = (part.end - part.at + steps * LINE - 1) / (steps * LINE) * LINE;
    return part;
}

// f(0), f(1) ... f(N - 1), each with a constant, so that what is indexed with it can stay in registers.
template <int... I, class F>
inline ALWAYS void unrolled(std::integer_sequence<int, I...>, const F& f) {
    (f(I), ...);
}
template <int N, class F>
inline ALWAYS void unrolled(const F& f) {
    unrolled(std::make_integer_sequence<int, N>(), f);
}

// Visits `count` rows in groups of MOST, the rest in one smaller group: visit(size, first), the size as an integral
// constant.
template <int MOST, typename Visit>
inline ALWAYS void in_groups(int64_t count, Visit&& visit) {
    static_assert(MOST == 2 || MOST == 4);
    int64_t first = 0;
    for (; first + MOST <= count; first += MOST) visit(std::integral_constant<int, MOST>(), first);
    if (count - first == 3) visit(std::integral_constant<int, 3>(), first);
    if (count - first == 2) visit(std::integral_constant<int, 2>(), first);
    if (count - first == 1) visit(std::integral_constant<int, 1>(), first);
}

struct Inputs {  // some of a product's: [begin, end). begin is a multiple of 2
    int64_t begin, end;
};

// Sums of R rows and V vectors of outputs, zero or from [R, PANEL], and back. Loops over sums that are not unrolled
// would have GCC keep them in memory throughout: in the products' loops each sum would be stored after each pair of
// inputs.
template <int R, int V>
inline ALWAYS void set_zero(Floats (&sum)[R][V]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[r][v] = zero();
}

template <int R, int V>
inline ALWAYS void load_sums(bool from_zero, const float* sums, Floats (&sum)[R][V]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[r][v] = from_zero ? zero() : load_floats(sums + r * PANEL + v * 16);
}

template <int R, int V>
inline ALWAYS void store_sums(const Floats (&sum)[R][V], float* sums) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store_floats(sums + r * PANEL + v * 16, sum[r][v]);
}

// Whether the last call of this thread in this job was for the same panel. If so, the panel is still unpacked in
// thread_memory<Use::PANEL>: units of several blocks of rows of a panel follow each other. `panel`: -1 for a part of a
// panel, which is not used again.
bool unpacked_before(const Weight& w, int64_t panel) {
    struct Panel {
        uint64_t job;
        const void* weight;
        int64_t operand, panel;
    };
    static thread_local Panel last = {0, nullptr, 0, -1};
    const Panel now{jobs_of_thread(), w.data, w.operand, panel};
    const bool same = now.job == last.job && now.weight == last.weight && now.operand == last.operand &&
                      panel == last.panel && panel >= 0;
    last = now;
    return same;
}

// `count` inputs of R rows times W vectors of a panel, [count][PANEL] float32, added to `sum`. `others`: whether
// further passes follow, for the panel's other vectors.
template <int R, int W>
inline ALWAYS void add_inputs(
    const float* a, int64_t lda, int64_t count, const float* b, bool others, Prefetch& ahead, Floats (&sum)[R][W]
) {
    for (int64_t i = 0; i < count;) {
        const int64_t stop = ahead.step() ? std::min(count, i + 2 * PREFETCH_STEPS) : count;
        for (; i < stop; i++, b += PANEL) {
            if (others)  // also the lines that the next passes read
                for (int v = 0; v < 4; v++) prefetch_near(b + 2 * NEAR_PREFETCH_STEPS * PANEL + v * 16);
            Floats column[W];
#pragma GCC unroll 4
            for (int v = 0; v < W; v++) column[v] = in_register(load_floats(b + v * 16));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const Floats x = in_register(splat(a[r * lda + i]));
#pragma GCC unroll 4
                for (int v = 0; v < W; v++) sum[r][v] = fmadd(x, column[v], sum[r][v]);
            }
        }
    }
}

#if PAIR_PRODUCTS
// The same for pairs of bfloat16, [count / 2][PANEL][2].
template <int R, int W>
inline ALWAYS void add_inputs(
    const uint16_t* a, int64_t lda, int64_t count, const uint16_t* b, bool others, Prefetch& ahead, Floats (&sum)[R][W]
) {
    const uint16_t* const a_end = a + count;
    while (a < a_end) {
        const uint16_t* const stop = ahead.step() ? std::min(a_end, a + 2 * PREFETCH_STEPS) : a_end;
        for (; a < stop; a += 2, b += 2 * PANEL) {
            if (VECTOR_REGISTERS > 1 && others)  // also the lines that the next passes read
                for (int v = 0; v < 4; v++) prefetch_near(b + NEAR_PREFETCH_STEPS * 2 * PANEL + v * 32);
            Words column[W];
#pragma GCC unroll 4
            for (int v = 0; v < W; v++) column[v] = in_register(load_words(b + v * 32));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const Words x = broadcast_word(a + r * lda);
#pragma GCC unroll 4
                for (int v = 0; v < W; v++) sum[r][v] = dot_pairs(sum[r][v], x, column[v]);
            }
        }
    }
}
#endif

// The sums of `count` inputs, added to `sums` unless these are the first ones. Never inlined: the loop needs most of
// the registers.
template <int R, int W, class T>
__attribute__((noinline)) void add_slice(
    const T* a, int64_t lda, int64_t count, const T* b, bool from_zero, bool others, Prefetch ahead, float* sums
) {
    Floats sum[R][W];
    load_sums(from_zero, sums, sum);
    add_inputs(a, lda, count, b, others, ahead, sum);
    store_sums(sum, sums);
}

// Tiles of bfloat16 weights: R rows times V vectors of a panel, from vector `first` on, as many at a time as there are
// registers for. Sums begin with the first inputs.
#if PAIR_PRODUCTS
template <int R, int V>
void tile_bf16(
    const Product& product, int64_t row, int64_t panel, int64_t first, Inputs inputs, Prefetch ahead, float* sums
) {
    constexpr int W = vectors_beside(R) < V ? vectors_beside(R) : V;
    const Weight& w = *product.weight;
    const uint16_t* const a = product.row<uint16_t>(row) + inputs.begin;
    const uint16_t* b = static_cast<const uint16_t*>(w.data) + (panel * w.kpad + inputs.begin) * PANEL + first * 32;
    for (int v = 0; v < V; v += W)
        add_slice<R, W>(
            a, product.lda, inputs.end - inputs.begin, b + v * 32, !inputs.begin, W < V && v == 0,
            v ? Prefetch{} : ahead, sums + v * 16
        );
}
#elif !AMX_TILES
// Without instructions for bfloat16, numbers are widened to float32: those of rows for WIDENED_INPUTS inputs at a time,
// and those of a panel in registers by the first tile of rows, which stores them if other tiles follow.

// One input of R rows, `rows` [R, WIDENED_INPUTS], times W vectors.
template <int R, int W>
inline ALWAYS void add_column(const float* rows, int64_t input, const Floats (&column)[W], Floats (&sum)[R][W]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        const Floats x = in_register(splat(rows[r * WIDENED_INPUTS + input]));
#pragma GCC unroll 4
        for (int v = 0; v < W; v++) sum[r][v] = fmadd(x, column[v], sum[r][v]);
    }
}

template <int W>
inline ALWAYS void keep_column(const Floats (&column)[W], float* keep) {
#pragma GCC unroll 4
    for (int v = 0; v < W; v++) store_floats(keep + v * 16, column[v]);
}

// `count` inputs of R rows, `rows` [R, WIDENED_INPUTS], times W vectors of a panel of bfloat16, at `b`. KEPT: stores
// the vectors as float32 in `keep`, [count][PANEL].
template <int R, int W, bool KEPT>
__attribute__((noinline)) void add_widened(
    const float* rows, int64_t count, const uint16_t* b, bool from_zero, bool others, float* keep, Prefetch ahead,
    float* sums
) {
    Floats sum[R][W];
    load_sums(from_zero, sums, sum);
    for (int64_t i = 0; i < count;) {
        const int64_t stop = ahead.step() ? std::min(count, i + 2 * PREFETCH_STEPS) : count;
        for (; i < stop; i += 2, b += 2 * PANEL) {
            if (others)  // also the lines that the next passes read
                for (int v = 0; v < 4; v++) prefetch_near(b + NEAR_PREFETCH_STEPS * 2 * PANEL + v * 32);
            Floats column[W];
#pragma GCC unroll 4
            for (int v = 0; v < W; v++) column[v] = as_floats(shift_left32<16>(load_words(b + v * 32)));
            if constexpr (KEPT) keep_column(column, keep);
            add_column(rows, i, column, sum);
            const uint16_t* again = b;  // each word is loaded twice: no register is left to keep it in
            asm("" : "+r"(again));
#pragma GCC unroll 4
            for (int v = 0; v < W; v++)
                column[v] = as_floats(load_words(again + v * 32) & splat_word(int32_t(0xffff0000)));
            if constexpr (KEPT) keep_column(column, keep + PANEL), keep += 2 * PANEL;
            add_column(rows, i + 1, column, sum);
        }
    }
    store_sums(sum, sums);
}

// Rows of `count` bfloat16, `lda` apart, to float32, `ldo` apart.
inline void widen_rows(const uint16_t* a, int64_t lda, int64_t rows, int64_t count, float* out, int64_t ldo) {
    for (int64_t r = 0; r < rows; r++, a += lda, out += ldo) {
        int64_t i = 0;
        for (; i + 16 <= count; i += 16) store_floats(out + i, load_bf16(a + i));
        if (i < count) store_floats(out + i, load16(a + i, lanes(count - i)));
    }
}

template <int R, int V>
void tile_bf16(
    const Product& product, int64_t row, int64_t panel, int64_t first, Inputs inputs, Prefetch ahead, float* sums
) {
    constexpr int W = vectors_beside(R) < V ? vectors_beside(R) : V;
    const Weight& w = *product.weight;
    float* const unpacked = static_cast<float*>(product.unpacked);
    const uint16_t* b = static_cast<const uint16_t*>(w.data) + (panel * w.kpad + inputs.begin) * PANEL + first * 32;
    alignas(64) float rows[R * WIDENED_INPUTS];
    for (int64_t begin = inputs.begin; begin < inputs.end; begin += WIDENED_INPUTS) {
        const int64_t count = std::min(WIDENED_INPUTS, inputs.end - begin), offset = (begin - inputs.begin) * PANEL;
        widen_rows(product.row<uint16_t>(row) + begin, product.lda, R, count, rows, WIDENED_INPUTS);
        for (int v = 0; v < V; v += W) {
            const bool others = W < V && v == 0;
            const Prefetch then = v ? Prefetch{} : ahead;
            float* const kept = unpacked ? unpacked + offset + (first + v) * 16 : nullptr;
            if (unpacked && !product.unpacks) {
                add_slice<R, W>(
                    rows, WIDENED_INPUTS, count, static_cast<const float*>(kept), !begin, others, then, sums + v * 16
                );
            } else {
                const auto add = unpacked ? add_widened<R, W, true> : add_widened<R, W, false>;
                add(rows, count, b + offset + v * 32, !begin, others, kept, then, sums + v * 16);
            }
        }
        ahead = {};
    }
}
#endif

// To be called between a loop and the use of its sums. Otherwise GCC would store each sum in every iteration, or before
// and after the loop.
template <class T, int R, int V>
inline ALWAYS void in_registers(T (&sum)[R][V]) {
    unrolled<R>([&](int r) ALWAYS { unrolled<V>([&](int v) ALWAYS { sum[r][v] = in_register(sum[r][v]); }); });
}

// Products of bytes: R rows of signed ones times columns of a panel.
template <int R, int V>
inline ALWAYS void add_bytes_of(const int8_t* a, int64_t lda, const Words (&column)[V], Words (&sum)[R][V]) {
    unrolled<R>([&](int r) ALWAYS {
        const Words x = word_of_row(a + r * lda);
        unrolled<V>([&](int v) ALWAYS { sum[r][v] = dot_stored(sum[r][v], column[v], x); });
    });
}

// Products of a panel's unsigned bytes with a row's integers of 16 bits. The row has one sum for each output
// (INTEGER_HALVES), or two: of the products with its lows, and with its highs.
constexpr int ROW_PARTS = INTEGER_HALVES ? 1 : 2;

// R rows times four inputs of V vectors of outputs.
template <int R, int V>
inline ALWAYS void add_products(
    const int8_t* a, int64_t lda, int64_t highs, const Words (&column)[V], Words (&sum)[V][R][ROW_PARTS]
) {
#if !BYTE_DOTS && !AMX_TILES
    Words even[V], odd[V];
    unrolled<V>([&](int v) ALWAYS { even[v] = column[v] & splat_half(255), odd[v] = shift_right16(column[v], 8); });
    unrolled<R>([&](int r) ALWAYS {
        const Words first = word_of_row(a + r * lda), second = word_of_row(a + r * lda + highs);
        unrolled<V>([&](int v) ALWAYS {
            sum[v][r][0] = dot_halves(dot_halves(sum[v][r][0], even[v], first), odd[v], second);
        });
    });
#else
    unrolled<2 * R>([&](int i) ALWAYS {
        const Words x = broadcast_word(a + i / 2 * lda + (i % 2 ? highs : 0));
        unrolled<V>([&](int v) ALWAYS { sum[v][i / 2][i % 2] = dot_stored(sum[v][i / 2][i % 2], column[v], x); });
    });
#endif
}

// Sums of R rows begin with the corrections for the weights' offset, which are stored after the rows (make_integers).
// An overflow on the way does no harm, because sums and corrections wrap around.
template <int R, int V>
inline ALWAYS void begin_sums(const int8_t* corrections, int64_t lda, Words (&sum)[V][R][ROW_PARTS]) {
    unrolled<R>([&](int r) ALWAYS {
        const Words lows = broadcast_word(corrections + r * lda), highs = broadcast_word(corrections + r * lda + 4);
        const Words parts[2] = {ROW_PARTS == 2 ? lows : add32(lows, shift_left32<8>(highs)), highs};
        unrolled<V * ROW_PARTS>([&](int i) ALWAYS { sum[i / ROW_PARTS][r][i % ROW_PARTS] = parts[i % ROW_PARTS]; });
    });
}

// A sum of many products that may need more than 32 bits: 65,536 high + low.
struct LongSum {
    Words low, high;
    // 256 highs + lows.
    static inline ALWAYS LongSum of(Words lows, Words highs) {
        return {
            add32(lows & splat_word(0xffff), shift_left32<8>(highs & splat_word(255))),
            add32(shift_right32<16>(lows), shift_right32<8>(highs))
        };
    }
    static inline ALWAYS LongSum of(const Words (&sum)[ROW_PARTS]) {
        if constexpr (ROW_PARTS == 2) return of(sum[0], sum[1]);
        else return {sum[0] & splat_word(0xffff), shift_right32<16>(sum[0])};
    }
    inline ALWAYS void add(LongSum other) { low = add32(low, other.low), high = add32(high, other.high); }
    // Rounded once: both parts are exact, whatever the order of the products was.
    inline ALWAYS Floats rounded() const {
        return fmadd(
            to_floats(add32(high, shift_right32<16>(low))), splat(65536.0f), to_floats(low & splat_word(0xffff))
        );
    }
};

// Inputs whose products are summed in 32 bits, with INTEGER_HALVES: a product is at most 255 x 32,639. Otherwise the
// sums of lows and of highs fit for all inputs of a row.
constexpr int64_t SUMMED_INPUTS = 256;

// Adds the products of some inputs of R rows with V vectors of a panel, from `b` on, to `total`. `corrections`: those
// of the first row.
template <int R, int V>
__attribute__((noinline)) void add_int8(
    const int8_t* a, int64_t lda, int64_t highs, int64_t inputs, const int8_t* corrections, const uint8_t* b,
    Prefetch& ahead, LongSum (&total)[V][R]
) {
    const int8_t* const a_end = a + inputs / 4 * FOUR_INPUTS;
    Words sum[V][R][ROW_PARTS];
    if constexpr (ROW_PARTS == 2 && !SIGNED_DOTS) begin_sums<R, V>(corrections, lda, sum);
    else
        unrolled<V>([&](int v) ALWAYS {
            unrolled<R * ROW_PARTS>([&](int i) ALWAYS { sum[v][i / ROW_PARTS][i % ROW_PARTS] = zero_words(); });
        });
    while (a < a_end) {
        const int8_t* const stop = ahead.step() ? std::min(a_end, a + FOUR_INPUTS * PREFETCH_STEPS) : a_end;
        for (; a < stop; a += FOUR_INPUTS, b += 4 * PANEL) {
            Words column[V];
            unrolled<V>([&](int v) ALWAYS { column[v] = in_register(without_offset(load_words(b + v * 64))); });
            add_products<R, V>(a, lda, highs, column, sum);
        }
    }
    unrolled<V>([&](int v) ALWAYS { in_registers(sum[v]); });
    unrolled<V>([&](int v) ALWAYS { unrolled<R>([&](int r) ALWAYS { total[v][r].add(LongSum::of(sum[v][r])); }); });
}

// R rows of integers of 16 bits times V vectors of an int8 panel, from vector `first` on. Outputs are stored in `out`,
// rows of which are PANEL apart.
template <int R, int V>
void tile_int8(const Product& product, int64_t row, int64_t panel, int64_t first, Prefetch ahead, float* out) {
    const Weight& w = *product.weight;
    const int8_t* const a = product.row_bytes(row);
    const int64_t lda = product.ld_bytes();
    const float* const scales = product.scales + row;
    constexpr int W = integers_beside(R) < V ? integers_beside(R) : V;
    const int64_t each = INTEGER_HALVES ? SUMMED_INPUTS : w.kpad;
    const uint8_t* const columns = static_cast<const uint8_t*>(w.data) + panel * w.kpad * PANEL + first * 64;
    const int8_t* const corrections = a + 2 * w.kpad;
    for (int v = 0; v < V; v += W, ahead = {}) {
        LongSum total[W][R];
        for (int r = 0; r < R; r++) {
            const int8_t* const correction = corrections + r * lda;
            const LongSum offset = LongSum::of(broadcast_word(correction), broadcast_word(correction + 4));
            for (int i = 0; i < W; i++) total[i][r] = INTEGER_HALVES ? offset : LongSum{zero_words(), zero_words()};
        }
        for (int64_t at = 0; at < w.kpad; at += each)
            add_int8<R, W>(
                a + at / 4 * FOUR_INPUTS, lda, highs_at(w.kpad), std::min(each, w.kpad - at), corrections,
                columns + at * PANEL + v * 64, ahead, total
            );
        for (int i = 0; i < W; i++) {
            const Floats scale = load_floats(w.scale + panel * PANEL + (first + v + i) * 16);
            for (int r = 0; r < R; r++)
                store_floats(out + r * PANEL + (v + i) * 16, (total[i][r].rounded() * scale) * splat(scales[r]));
        }
    }
}

// Four inputs of vectors [first, first + V) of an int4 panel, as bytes of 0 to 15. A byte of the panel holds the same
// input of an output of [0, 32) in its lower half, and of the output 32 further in its upper half.
template <int V>
inline ALWAYS void unpack_int4(const uint8_t* b, int64_t first, Words (&column)[V]) {
    const Words low = splat_byte(15);
    if constexpr (V == 4) {
        const Words one = in_register(load_words(b)), two = in_register(load_words(b + 64));
        column[0] = one & low, column[1] = two & low;
        column[2] = shift_right16(one, 4) & low, column[3] = shift_right16(two, 4) & low;
    } else {
        const int shift = int(first / 2 * 4);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) column[v] = shift_right16(load_words(b + (first + v) % 2 * 64), shift) & low;
    }
}

inline ALWAYS Floats group_sum(const Words (&sum)[ROW_PARTS]) {
    return to_floats(ROW_PARTS == 2 ? add32(sum[0], shift_left32<8>(sum[ROW_PARTS - 1])) : sum[0]);
}

// R rows of integers of 16 bits times vectors [first, first + V) of an int4 panel. Outputs are stored in `out`, rows of
// which are PANEL apart.
template <int R, int V>
__attribute__((noinline)) void add_int4(
    const Product& product, int64_t row, int64_t panel, int first, Prefetch ahead, float* out
) {
    const Weight& w = *product.weight;
    const int8_t* a = product.row_bytes(row);
    const int64_t lda = product.ld_bytes();
    const int64_t groups = w.kpad / GROUP, highs = highs_at(w.kpad);
    const uint8_t* b = static_cast<const uint8_t*>(w.data) + panel * w.kpad * PANEL / 2;
    const int8_t* corrections = a + 2 * w.kpad;
    Floats total[V][R];
    unrolled<V>([&](int v) ALWAYS { unrolled<R>([&](int r) ALWAYS { total[v][r] = zero(); }); });
    for (int64_t g = 0; g < groups; g++, corrections += 8) {
        Words sum[V][R][ROW_PARTS];
        begin_sums<R, V>(corrections, lda, sum);
        for (const int8_t* const a_end = a + GROUP / 4 * FOUR_INPUTS; a < a_end;) {
            ahead.step();
            for (const int8_t* const stop = a + FOUR_INPUTS * PREFETCH_STEPS; a < stop;
                 a += FOUR_INPUTS, b += 2 * PANEL) {
                Words column[V];
                unpack_int4(b, first, column);
                add_products<R, V>(a, lda, highs, column, sum);
            }
        }
        unrolled<V>([&](int v) ALWAYS {
            const Floats scale = load_floats(w.scale + (panel * groups + g) * PANEL + (first + v) * 16);
            unrolled<R>([&](int r) ALWAYS { total[v][r] = fmadd(group_sum(sum[v][r]), scale, total[v][r]); });
        });
    }
    unrolled<V>([&](int v) ALWAYS {
        unrolled<R>([&](int r) ALWAYS {
            store_floats(out + r * PANEL + v * 16, total[v][r] * splat(product.scales[row + r]));
        });
    });
}

template <int R>
void tile_int4(const Product& product, int64_t row, int64_t panel, Prefetch ahead, float* out) {
    constexpr int W = VECTOR_REGISTERS == 1 ? 4 : 1;
    for (int v = 0; v < 4; v += W) add_int4<R, W>(product, row, panel, v, v ? Prefetch{} : ahead, out + v * 16);
}

// The scales of 16 outputs of a group. `at`: of the first one in Weight::scale or bf16_scale.
inline Floats group_scales(const Weight& w, int64_t at) {
    return w.bf16_scale ? load_bf16(w.bf16_scale + at) : load_floats(w.scale + at);
}

// float32 weights stay in rows, [n, k]: outputs are dot products, some at a time.
template <int R>
void tile_f32(const Product& product, int64_t row, int64_t panel, float* out) {
    const Weight& w = *product.weight;
    const float* const a = product.row<float>(row);
    const int64_t lda = product.lda;
    const float* data = static_cast<const float*>(w.data);
    const int64_t last = std::min(w.n, (panel + 1) * PANEL) - 1;
    constexpr int W = vectors_beside(R);
    for (int64_t c = 0; c < PANEL && panel * PANEL + c <= last; c += W) {
        const float* b[W];
        for (int v = 0; v < W; v++) b[v] = data + std::min(panel * PANEL + c + v, last) * w.k;
        Floats sum[R][W];
        set_zero(sum);
        const auto add = [&](const auto& load, int64_t i) ALWAYS {
            Floats column[W];
            unrolled<W>([&](int v) ALWAYS { column[v] = load(b[v] + i); });
            unrolled<R>([&](int r) ALWAYS {
                const Floats x = load(a + r * lda + i);
                unrolled<W>([&](int v) ALWAYS { sum[r][v] = fmadd(x, column[v], sum[r][v]); });
            });
        };
        int64_t i = 0;
        for (; i + 16 <= w.k; i += 16) add([](const float* p) ALWAYS { return load_floats(p); }, i);
        in_registers(sum);
        if (const Mask rest = first_lanes(w.k - i)) add([&](const float* p) ALWAYS { return load16(p, rest); }, i);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < W; v++) out[r * PANEL + c + v] = total_of(sum[r][v]);
    }
}

}  // namespace
