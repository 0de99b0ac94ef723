// One register of AArch64's Advanced SIMD: what vectors_split.h needs.

#pragma once

#include <arm_neon.h>

#include <cstdint>

#define PART_BYTES 16

namespace {

typedef float FloatPart __attribute__((vector_size(16)));
typedef uint32_t WordPart __attribute__((vector_size(16)));
typedef int32_t IntegerPart __attribute__((vector_size(16)));
typedef uint16_t HalfPart __attribute__((vector_size(16)));
typedef uint8_t BytePart __attribute__((vector_size(16)));
typedef uint16_t NarrowPart __attribute__((vector_size(8)));  // as many as there are words in a part
typedef uint8_t LowestPart __attribute__((vector_size(4)));
typedef FloatPart Four;
typedef WordPart FourWords;

constexpr WordPart LANE_BITS = {1, 2, 4, 8};

inline void spin_pause() { asm volatile("yield"); }
inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void fetch_line(const char* p) { asm volatile("prfm pldl2keep, %0" : : "Q"(*p)); }
inline void fetch_to_write(const char* p) { asm volatile("prfm pstl1keep, %0" : : "Q"(*p)); }

inline FloatPart splat_part(float x) { return vdupq_n_f32(x); }
inline FloatPart fmadd(FloatPart a, FloatPart b, FloatPart c) { return vfmaq_f32(c, a, b); }
inline FloatPart fnmadd(FloatPart a, FloatPart b, FloatPart c) { return vfmsq_f32(c, a, b); }
inline FloatPart fmsub(FloatPart a, FloatPart b, FloatPart c) { return vfmaq_f32(-c, a, b); }
inline FloatPart larger(FloatPart a, FloatPart b) { return a > b ? a : b; }
inline FloatPart smaller(FloatPart a, FloatPart b) { return a < b ? a : b; }
inline FloatPart nearest(FloatPart x) { return vrndnq_f32(x); }
inline FloatPart floor_of(FloatPart x) { return vrndmq_f32(x); }
inline WordPart to_integers(FloatPart x) { return (WordPart)vcvtnq_s32_f32(x); }
inline uint32_t bits_of_lanes(WordPart all_or_nothing) { return vaddvq_u32(all_or_nothing & LANE_BITS); }

inline WordPart sub16_saturating(WordPart a, WordPart b) { return (WordPart)vqsubq_s16((int16x8_t)a, (int16x8_t)b); }
inline WordPart low_bytes(WordPart a, WordPart b) { return (WordPart)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b); }
inline WordPart high_bytes(WordPart a, WordPart b) { return (WordPart)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b); }
inline WordPart low_words(WordPart a, WordPart b) { return vzip1q_u32(a, b); }
inline WordPart high_words(WordPart a, WordPart b) { return vzip2q_u32(a, b); }
inline WordPart low_pairs(WordPart a, WordPart b) { return (WordPart)vzip1q_u64((uint64x2_t)a, (uint64x2_t)b); }
inline WordPart high_pairs(WordPart a, WordPart b) { return (WordPart)vzip2q_u64((uint64x2_t)a, (uint64x2_t)b); }
inline WordPart shuffle_bytes(WordPart a, WordPart order) {
    return (WordPart)vqtbl1q_u8((uint8x16_t)a, (uint8x16_t)order);
}

inline WordPart quarter_everywhere(const void* p) { return vld1q_u32(static_cast<const uint32_t*>(p)); }
inline WordPart in_register(WordPart x) {
    asm("" : "+w"(x));
    return x;
}

inline WordPart lookup_32_bytes(const uint8_t* table, WordPart index) {
    return (WordPart)vqtbl2q_u8(vld1q_u8_x2(table), (uint8x16_t)index);
}

// In a table of 128: two lookups in tables of 64, each of which gives 0 for an index beyond it.
inline WordPart lookup_bytes_of(const uint8_t* table, WordPart index) {
    const uint8x16_t own = vandq_u8((uint8x16_t)index, vdupq_n_u8(127));
    const uint8x16_t first = vqtbl4q_u8(vld1q_u8_x4(table), own);
    return (WordPart)vorrq_u8(first, vqtbl4q_u8(vld1q_u8_x4(table + 64), veorq_u8(own, vdupq_n_u8(64))));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define BYTE_DOTS 1
inline WordPart dot_bytes(WordPart sum, WordPart unsigned_bytes, WordPart signed_bytes) {
    return (WordPart)vusdotq_s32((int32x4_t)sum, (uint8x16_t)unsigned_bytes, (int8x16_t)signed_bytes);
}
#else
inline WordPart dot_bytes(WordPart sum, WordPart unsigned_bytes, WordPart signed_bytes) {
    const uint8x16_t u = (uint8x16_t)unsigned_bytes;
    const int8x16_t s = (int8x16_t)signed_bytes;  // a product is at least -32,640
    const int16x8_t low = vmulq_s16((int16x8_t)vmovl_u8(vget_low_u8(u)), vmovl_s8(vget_low_s8(s)));
    const int16x8_t high = vmulq_s16((int16x8_t)vmovl_high_u8(u), vmovl_high_s8(s));
    return sum + (WordPart)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#if defined(__ARM_FEATURE_DOTPROD)
#define BYTE_DOTS 1
#define SIGNED_DOTS 1
inline WordPart without_offset(WordPart unsigned_bytes) { return unsigned_bytes ^ 0x80808080u; }
inline WordPart dot_stored(WordPart sum, WordPart a, WordPart b) {
    return (WordPart)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}
#else
inline WordPart dot_halves(WordPart sum, WordPart a, WordPart b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return sum + (WordPart)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
inline WordPart dot_in_halves(WordPart sum, WordPart unsigned_bytes, WordPart signed_bytes) {  // below 128
    const int8x16_t x = (int8x16_t)unsigned_bytes, y = (int8x16_t)signed_bytes;
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
    return (WordPart)vaddq_s16((int16x8_t)sum, pairs);
}
#endif
#endif

// -- bfloat16 ---------------------------------------------------------------------------------------------------------
//
// Without FPCR.EBF, which Linux leaves unset, the sum of a pair and its addition round to odd, and subnormal numbers
// are zeros.

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BF16_PAIRS 1
inline FloatPart dot_pairs(FloatPart sum, WordPart a, WordPart b) {
    return vbfdotq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
inline WordPart to_bf16(FloatPart low, FloatPart high) {
    return (WordPart)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high);
}
inline FloatPart rounded_bf16(FloatPart x) {
    return (FloatPart)vshll_n_u16(vreinterpret_u16_bf16(vcvt_bf16_f32(x)), 16);
}
inline WordPart low_halves(WordPart a, WordPart b) { return (WordPart)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b); }
inline WordPart high_halves(WordPart a, WordPart b) { return (WordPart)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b); }
inline WordPart pairs_beside(FloatPart a, FloatPart b) {
    return low_halves((WordPart)vcvtq_low_bf16_f32(a), (WordPart)vcvtq_low_bf16_f32(b));
}
#endif

}  // namespace
