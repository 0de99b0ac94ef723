// Products of plain rows with weights of 8 and 4 bits: fp8, nvfp4, int4 in groups.
//
// A weight's small number is exactly a bfloat16 (e4m3 has 4 significant bits, e2m1 two, int4 less its zero point five), so
// it is converted in registers. The sums equal those of the same rows times the unpacked numbers; a group's sum is then
// multiplied by its scale in float32. Rows are pairs of bfloat16, or float32: the numbers are then widened by a shift.
//
// Layouts, in panels of 64 outputs. fp8 [k / 4][4][64] bytes: 16 outputs and 4 inputs, in an order that two instructions
// unpack to two vectors of pairs. Four bits [k / 8][4][16][2] words: 16 outputs, even and odd inputs, four inputs two
// apart, the first in the lowest bits.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "products.h"

namespace {

constexpr int64_t CHUNK = 8;        // inputs that are unpacked together
constexpr int64_t SCALED_WIDE = 3;  // rows up to which all 64 outputs are summed at once; more leave too few registers

inline __m512i in_all_lanes(__m128i table) { return _mm512_broadcast_i32x4(table); }

// e4m3 bytes -> bfloat16. The upper byte depends on sign and upper exponent bits, the lower one on the rest: a table of 16
// bytes each. That is wrong for subnormal numbers (exponent bits 0), which use words and a separate table. NaN is rejected
// when the weight is packed.
struct Fp8 {
    __m512i upper, lower;
    Fp8() {
        alignas(16) uint8_t high[16], low[16];
        for (int i = 0; i < 16; i++) high[i] = uint8_t((i & 8) << 4 | (60 + (i & 7))), low[i] = uint8_t((i & 8) << 4 | (i & 7) << 4);
        upper = in_all_lanes(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
        lower = in_all_lanes(_mm_load_si128(reinterpret_cast<const __m128i*>(low)));
    }
    void plain(__m512i bytes, __m512i& one, __m512i& two) const {
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i high = _mm512_shuffle_epi8(upper, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble));
        const __m512i low = _mm512_shuffle_epi8(lower, _mm512_and_si512(bytes, nibble));
        one = _mm512_unpacklo_epi8(low, high), two = _mm512_unpackhi_epi8(low, high);
    }
    static __m512i any(__m512i w) {
        const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
        const __m512i size = _mm512_and_si512(_mm512_slli_epi16(w, 4), _mm512_set1_epi16(0x07f0));
        const __m512i whole = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
        const __mmask32 without = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x78));
        const __m512i found = _mm512_mask_permutexvar_epi16(whole, without, w, small);
        return _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(w, 8), _mm512_set1_epi16(int16_t(0x8000))), found);
    }
    static void any(__m512i bytes, __m512i& one, __m512i& two) {
        one = any(_mm512_unpacklo_epi8(bytes, _mm512_setzero_si512())), two = any(_mm512_unpackhi_epi8(bytes, _mm512_setzero_si512()));
    }
};

// Numbers in the lowest 4 bits of words -> bfloat16, by a table of 32 words. Bit 4 is arbitrary, so e2m1 and int4 with a
// zero point of 8 have every entry twice; with other zero points, the index is number - zero point + 16.
struct Nibbles {
    __m512i table;
    Nibbles(int64_t kind, bool zeros) {
        alignas(64) uint16_t words[32];
        const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
        for (int i = 0; i < 32; i++) {
            const int code = i & 15;
            const float value = kind == NVFP4 ? (code & 8 ? -e2m1[code & 7] : e2m1[code & 7]) : float(zeros ? i - 16 : code - 8);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            words[i] = uint16_t(bits >> 16);
        }
        table = _mm512_load_si512(words);
    }
    __m512i operator()(__m512i w) const { return _mm512_permutexvar_epi16(w, table); }
    __m512i operator()(__m512i w, __m512i shift) const {
        return (*this)(_mm512_add_epi16(_mm512_and_si512(w, _mm512_set1_epi16(15)), shift));
    }
};

// A pair of inputs of a row times those of 16 outputs.
struct PairsOfBf16 {
    using Element = uint16_t;
    using Cell = __m512bh;
    static Cell cell(const Element* a) { return (__m512bh)broadcast_word(a); }
    struct Column {
        __m512bh pair;
        Column() = default;
        explicit Column(__m512i words) : pair((__m512bh)in_register(words)) {}
    };
    static __m512 add(__m512 sum, const Cell& x, const Column& w) { return _mm512_dpbf16_ps(sum, x, w.pair); }
};

struct PairsOfF32 {
    using Element = float;
    struct Cell {
        __m512 even, odd;
    };
    static Cell cell(const Element* a) { return {_mm512_set1_ps(a[0]), _mm512_set1_ps(a[1])}; }
    struct Column {
        __m512 even, odd;
        Column() = default;
        explicit Column(__m512i words)
            : even(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))),
              odd(_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int32_t(0xffff0000))))) {}
    };
    static __m512 add(__m512 sum, const Cell& x, const Column& w) {
        return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, sum));
    }
};

// Scales of 16 outputs: float32, or unsigned e4m3 bytes, whose bits are a float32 2^120 times too small.
inline __m512 scales_of(const Weight& w, int64_t at) {
    if (w.kind != NVFP4) return _mm512_loadu_ps(w.scale + at);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w.small_scale + at));
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 20)), _mm512_set1_ps(0x1p120f));
}

// One pair of inputs: R rows times V vectors of outputs.
template <class Rows, int R, int V>
inline __attribute__((always_inline)) void multiply_pair(
    const typename Rows::Element* a, int64_t lda, const __m512i (&words)[V], __m512 (&sum)[R][V]
) {
    typename Rows::Column column[V];
    for (int v = 0; v < V; v++) column[v] = typename Rows::Column(words[v]);
    for (int r = 0; r < R; r++) {
        const auto x = Rows::cell(a + r * lda);
        for (int v = 0; v < V; v++) sum[r][v] = Rows::add(sum[r][v], x, column[v]);
    }
}

// Zero points of 16 outputs -> the index offsets of their numbers, for even and odd inputs.
inline __m512i shifts_of(const float* zeros) {
    const __m512i shift = _mm512_sub_epi32(_mm512_set1_epi32(16), _mm512_cvtps_epi32(_mm512_loadu_ps(zeros)));
    return _mm512_or_si512(shift, _mm512_slli_epi32(shift, 16));
}

// R rows times 16 * V outputs from output 16 * first of a panel, group by group.
template <class Rows, int64_t KIND, bool ZEROS, int R, int V>
__attribute__((noinline)) void tile_scaled(
    const typename Rows::Element* a, int64_t lda, const Weight& w, int64_t panel, int64_t first, Ahead ahead, float* out
) {
    const int64_t groups = (w.kpad + w.group - 1) / w.group;
    const uint8_t* const data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w) + first * 64;
    const uint8_t* const uncommon = KIND == FP8 ? w.small_scale + panel * (w.kpad / CHUNK) : nullptr;
    const Fp8 fp8;
    const Nibbles nibbles(KIND, ZEROS);
    __m512 total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512 sum[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = _mm512_setzero_ps();
        __m512i shift[V];
        if constexpr (ZEROS)
            for (int v = 0; v < V; v++) shift[v] = shifts_of(w.zeros + (panel * groups + g) * PANEL + (first + v) * 16);
        const int64_t end = std::min(w.kpad, (g + 1) * w.group);
        for (int64_t i = g * w.group; i < end; i += CHUNK) {
            ahead.step();
            __m512i words[V];
            if constexpr (KIND == FP8) {
                for (int half = 0; half < 2; half++) {
                    const uint8_t* b = data + (i + 4 * half) * PANEL;
                    __m512i behind[V];
                    if (__builtin_expect(uncommon[i / CHUNK], 0)) {
                        for (int v = 0; v < V; v++) Fp8::any(_mm512_loadu_si512(b + v * 64), words[v], behind[v]);
                    } else {
                        for (int v = 0; v < V; v++) fp8.plain(_mm512_loadu_si512(b + v * 64), words[v], behind[v]);
                    }
                    multiply_pair<Rows, R, V>(a + i + 4 * half, lda, words, sum);
                    multiply_pair<Rows, R, V>(a + i + 4 * half + 2, lda, behind, sum);
                }
            } else {
                __m512i four[V];
                for (int v = 0; v < V; v++) four[v] = _mm512_loadu_si512(data + i * PANEL / 2 + v * 64);
                for (int pair = 0; pair < 4; pair++) {
                    for (int v = 0; v < V; v++) {
                        if constexpr (ZEROS) words[v] = nibbles(four[v], shift[v]);
                        else words[v] = nibbles(four[v]);
                        four[v] = _mm512_srli_epi16(four[v], 4);
                    }
                    multiply_pair<Rows, R, V>(a + i + 2 * pair, lda, words, sum);
                }
            }
        }
        for (int v = 0; v < V; v++) {
            const __m512 scale = scales_of(w, (panel * groups + g) * PANEL + (first + v) * 16);
            for (int r = 0; r < R; r++) total[r][v] = _mm512_fmadd_ps(sum[r][v], scale, total[r][v]);
        }
    }
    for (int v = 0; v < V; v++) {
        const __m512 outer = w.outer ? _mm512_loadu_ps(w.outer + panel * PANEL + (first + v) * 16) : _mm512_set1_ps(1.0f);
        for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * PANEL + v * 16, _mm512_mul_ps(total[r][v], outer));
    }
}

// The tile of R rows from column 16 * first, which has V vectors.
template <int R, int V>
void tile_scaled(const void* rows, int64_t row, int64_t lda, const Weight& w, int64_t panel, int64_t first, Ahead ahead, float* out) {
    const auto run = [&](auto kind) {
        using Rows = decltype(kind);
        const auto* a = static_cast<const typename Rows::Element*>(rows) + row * lda;
        const auto part = [&]<int W>(std::integral_constant<int, W>, int64_t from, Ahead reads) {
            float* to = out + (from - first) * 16;
            if (w.kind == FP8) tile_scaled<Rows, FP8, false, R, W>(a, lda, w, panel, from, reads, to);
            else if (w.kind == NVFP4) tile_scaled<Rows, NVFP4, false, R, W>(a, lda, w, panel, from, reads, to);
            else if (w.zeros) tile_scaled<Rows, UINT4, true, R, W>(a, lda, w, panel, from, reads, to);
            else tile_scaled<Rows, UINT4, false, R, W>(a, lda, w, panel, from, reads, to);
        };
        if constexpr (V <= 2 || R <= SCALED_WIDE) {
            part(std::integral_constant<int, V>(), first, ahead);
        } else {
            part(std::integral_constant<int, 2>(), first, Ahead{nullptr, nullptr, 0});
            part(std::integral_constant<int, 2>(), first + 2, ahead);
        }
    };
    if (w.operand == BF16) run(PairsOfBf16());
    else run(PairsOfF32());
}

}  // namespace
