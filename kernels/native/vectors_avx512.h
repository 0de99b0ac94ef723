// Vectors of AVX-512 (F, BW, VL, DQ; BF16, VNNI and VBMI where the set has them): the functions that vectors.h
// describes.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

constexpr int REGISTERS = 32;        // vector registers ...
constexpr int VECTOR_REGISTERS = 1;  // ... of which Floats takes this many

inline void spin_pause() { _mm_pause(); }
inline void prefetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
// The same for functions without other effects, which GCC would drop.
inline void fetch_line(const char* p) { asm volatile("prefetcht1 %0" : : "m"(*p)); }
inline void fetch_to_write(const char* p) { asm volatile("prefetchw %0" : : "m"(*p)); }

// -- floats -----------------------------------------------------------------------------------------------------------

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats load16(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
inline Floats load_or(Floats otherwise, Mask m, const float* p) { return _mm512_mask_loadu_ps(otherwise, m, p); }
inline void store_some(float* p, Mask m, Floats v) { _mm512_mask_storeu_ps(p, m, v); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Floats select(Mask m, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, m, yes); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 0x08); }
inline Floats from_nearest(Floats x) { return _mm512_reduce_ps(x, 0x08); }
inline Floats above_floor(Floats x) { return _mm512_reduce_ps(x, 0x09); }
inline Floats times_power(Floats p, Floats n) { return _mm512_scalef_ps(p, n); }
inline Floats rough_inverse(Floats x) { return _mm512_rcp14_ps(x); }
inline float total_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }

inline Floats fold(Floats first, Floats second) {
    return _mm512_shuffle_f32x4(first, second, 0x44) + _mm512_shuffle_f32x4(first, second, 0xee);
}

inline Floats sums_of(const Floats pairs[8]) {
    Floats fours[4], twos[2];
    for (int i = 0; i < 4; i++) {
        const Floats a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    for (int i = 0; i < 2; i++) {
        const Floats a = fours[2 * i], b = fours[2 * i + 1];
        twos[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
    }
    const Floats mixed = _mm512_shuffle_ps(twos[0], twos[1], 0x88) + _mm512_shuffle_ps(twos[0], twos[1], 0xdd);
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed);
}

inline void sums_of_eights(Floats x, float (&sums)[2]) {
    x = x + _mm512_permute_ps(x, 0xb1);
    x = x + _mm512_permute_ps(x, 0x4e);
    x = x + _mm512_shuffle_f32x4(x, x, 0xb1);
    sums[0] = _mm512_cvtss_f32(x), sums[1] = _mm256_cvtss_f32(_mm512_extractf32x8_ps(x, 1));
}

// -- words ------------------------------------------------------------------------------------------------------------

inline Words zero_words() { return _mm512_setzero_si512(); }
inline Words splat_word(int32_t x) { return _mm512_set1_epi32(x); }
inline Words splat_half(int16_t x) { return _mm512_set1_epi16(x); }
inline Words splat_byte(int8_t x) { return _mm512_set1_epi8(x); }
inline Words splat_quarter(const void* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline void store_words(void* p, Words v) { _mm512_storeu_si512(p, v); }
inline void store_low_half(void* p, Words v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_castsi512_si256(v));
}
inline void store_high_half(void* p, Words v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_extracti64x4_epi64(v, 1));
}
template <int J>
inline void store_quarter(void* p, Words v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_extracti32x4_epi32(v, J));
}
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }
inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words to_integers(Floats x) { return _mm512_cvtps_epi32(x); }
inline Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
inline Words add32(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words sub32(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words mul32(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words add16(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Words sub16_saturating(Words a, Words b) { return _mm512_subs_epi16(a, b); }
template <int N>
inline Words shift_left32(Words a) {
    return _mm512_slli_epi32(a, N);
}
template <int N>
inline Words shift_right32(Words a) {
    return _mm512_srai_epi32(a, N);
}
inline Words shift_right16(Words a, int n) { return _mm512_srli_epi16(a, n); }
inline Words choose_bits(Words mask, Words yes, Words no) { return _mm512_ternarylogic_epi32(mask, yes, no, 0xca); }
inline Words or_and(Words a, Words b, Words c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }
inline Mask at_least(Words a, Words b) { return _mm512_cmpge_epi32_mask(a, b); }
inline int32_t total_of(Words x) {  // what _mm512_reduce_add_epi32 is, whose signed sums must not overflow in C++
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline Words larger(Words a, Words b) { return _mm512_max_epi32(a, b); }
inline int32_t largest_of(Words x) { return _mm512_reduce_max_epi32(x); }
inline Words low_bytes(Words a, Words b) { return _mm512_unpacklo_epi8(a, b); }
inline Words high_bytes(Words a, Words b) { return _mm512_unpackhi_epi8(a, b); }
inline Words low_words(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
inline Words high_words(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
inline Words low_pairs(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
inline Words high_pairs(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
inline void transpose_quarters(Words (&x)[4]) {
    const Words a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    const Words c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(a, b, 0x88), x[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_i32x4(c, d, 0x88), x[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}
inline Words shuffle_bytes(Words a, Words order) { return _mm512_shuffle_epi8(a, order); }
struct HalfTable {
    Words halves;
    explicit HalfTable(const uint16_t (&halves)[32]) : halves(load_words(halves)) {}
};
inline Words lookup_halves(Words index, const HalfTable& table) {
    return _mm512_permutexvar_epi16(index, table.halves);
}

#if defined(__AVX512VBMI__)
inline Words lookup_bytes(const Words (&table)[2], Words index) {
    return _mm512_permutex2var_epi8(table[0], index, table[1]);
}
#else
#define SLOW_BYTE_TABLES 1
// One shuffle for each 16 of the table, which gives 0 where bit 7 of its index is set.
inline Words lookup_bytes(const Words (&table)[2], Words index) {
    const Words own = index & splat_byte(127);
    Words found = zero_words();
    for (int i = 0; i < 8; i++) {
        const Words at = _mm512_adds_epu8(_mm512_xor_si512(own, splat_byte(int8_t(16 * i))), splat_byte(0x70));
        found |= _mm512_shuffle_epi8(splat_quarter(reinterpret_cast<const char*>(table) + 16 * i), at);
    }
    return found;
}
#endif

inline Words in_register(Words x) {
    asm("" : "+v"(x));
    return x;
}
inline Floats in_register(Floats x) {
    asm("" : "+v"(x));
    return x;
}

// The lowest bytes of sixteen words of `low` and of `high`: four of the first, four of the second, and so on.
inline void store_bytes_in_fours(int8_t* p, Words low, Words high) {
    const __m128i l = _mm512_cvtepi32_epi8(low), h = _mm512_cvtepi32_epi8(high);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(l, h));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm_unpackhi_epi32(l, h));
}

inline Words store_bytes(int8_t* p, const Words (&x)[4]) {
    // Each quarter has 4 numbers of x[0], then 4 of x[1], x[2] and x[3].
    const Words packed = _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    const Words bytes =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
    _mm512_storeu_si512(p, bytes);
    return bytes;
}
inline void store_low_bytes(int8_t* p, Words v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}

#if defined(__AVX512VNNI__)
#define BYTE_DOTS 1
inline Words dot_bytes(Words sum, Words unsigned_bytes, Words signed_bytes) {
    return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
}
#else
// Even and odd bytes as numbers of 16 bits: products of bytes as such would saturate.
inline Words dot_bytes(Words sum, Words u, Words s) {
    const Words even = _mm512_madd_epi16(u & splat_half(255), _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const Words odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
    return add32(add32(sum, even), odd);
}
inline Words dot_halves(Words sum, Words a, Words b) { return add32(sum, _mm512_madd_epi16(a, b)); }
inline Words dot_in_halves(Words sum, Words unsigned_bytes, Words signed_bytes) {
    return add16(sum, _mm512_maddubs_epi16(unsigned_bytes, signed_bytes));
}
#endif

// -- bfloat16 ---------------------------------------------------------------------------------------------------------

inline Floats load_bf16(const uint16_t* p) {
    return as_floats(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16)
    );
}
inline Floats load16(const uint16_t* p, Mask m) {
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
#if defined(__AVX512BF16__)
inline __m256i to_bf16(Floats v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
inline __m256i to_bf16(Floats v) {  // NaN stays NaN
    const Words bits = as_words(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat_word(1));
    const Words near = _mm512_srli_epi32(add32(bits, add32(odd, splat_word(0x7fff))), 16);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), splat_word(0x7fc0))
    );
}
#endif
inline void store_bf16(uint16_t* p, Floats v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }
inline void store_some_bf16(uint16_t* p, Mask m, Floats v) { _mm256_mask_storeu_epi16(p, m, to_bf16(v)); }
inline Floats rounded_bf16(Floats v) { return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16)); }

#if defined(__AVX512BF16__)
#define BF16_PAIRS 1
// Sums of products of pairs of bfloat16.
inline Floats dot_pairs(Floats sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
// The same with the pair at `a` for all lanes, which is read again each time and takes no register.
inline Floats dot_pairs_at(Floats sum, const uint16_t* a, Words b) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(b), "m"(*reinterpret_cast<const char (*)[4]>(a)));
    return sum;
}
inline Words load_pairs(const uint16_t* p, int64_t left) {
    const __mmask32 m = left >= 32 ? ~__mmask32(0) : left <= 0 ? __mmask32(0) : (__mmask32(1) << left) - 1;
    return _mm512_maskz_loadu_epi16(m, p);
}
inline Words pairs_after(Floats low, Floats high) { return (Words)_mm512_cvtne2ps_pbh(high, low); }
inline Words pairs_beside(Floats a, Floats b) {
    const Words order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0
    );
    return _mm512_permutexvar_epi16(order, (Words)_mm512_cvtne2ps_pbh(b, a));
}
inline void pairs_between(Words a, Words b, Words (&pairs)[2]) {
    const Words low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1,
        32, 0
    );
    pairs[0] = _mm512_permutex2var_epi16(a, low, b);
    pairs[1] = _mm512_permutex2var_epi16(a, add16(low, splat_half(16)), b);
}
#endif

}  // namespace
