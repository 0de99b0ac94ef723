// One register of AVX2 and FMA: what vectors_split.h needs.

#pragma once

#include <immintrin.h>

#include <cstdint>

#define PART_BYTES 32

namespace {

typedef float FloatPart __attribute__((vector_size(32)));
typedef uint32_t WordPart __attribute__((vector_size(32)));
typedef int32_t IntegerPart __attribute__((vector_size(32)));
typedef uint16_t HalfPart __attribute__((vector_size(32)));
typedef uint8_t BytePart __attribute__((vector_size(32)));
typedef uint16_t NarrowPart __attribute__((vector_size(16)));  // as many as there are words in a part
typedef uint8_t LowestPart __attribute__((vector_size(8)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t FourWords __attribute__((vector_size(16)));

constexpr WordPart LANE_BITS = {1, 2, 4, 8, 16, 32, 64, 128};

inline void spin_pause() { _mm_pause(); }
inline void prefetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
// The same for functions without other effects, which GCC would drop.
inline void fetch_line(const char* p) { asm volatile("prefetcht1 %0" : : "m"(*p)); }
inline void fetch_to_write(const char* p) { asm volatile("prefetchw %0" : : "m"(*p)); }

inline FloatPart splat_part(float x) { return _mm256_set1_ps(x); }
inline FloatPart fmadd(FloatPart a, FloatPart b, FloatPart c) { return _mm256_fmadd_ps(a, b, c); }
inline FloatPart fnmadd(FloatPart a, FloatPart b, FloatPart c) { return _mm256_fnmadd_ps(a, b, c); }
inline FloatPart fmsub(FloatPart a, FloatPart b, FloatPart c) { return _mm256_fmsub_ps(a, b, c); }
inline FloatPart larger(FloatPart a, FloatPart b) { return _mm256_max_ps(a, b); }
inline FloatPart smaller(FloatPart a, FloatPart b) { return _mm256_min_ps(a, b); }
inline Four larger(Four a, Four b) { return _mm_max_ps(a, b); }
inline FloatPart nearest(FloatPart x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline FloatPart floor_of(FloatPart x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline WordPart to_integers(FloatPart x) { return (WordPart)_mm256_cvtps_epi32(x); }
inline uint32_t bits_of_lanes(WordPart all_or_nothing) { return uint32_t(_mm256_movemask_ps((__m256)all_or_nothing)); }
inline Four lower_quarter(FloatPart x) { return _mm256_castps256_ps128(x); }
inline Four upper_quarter(FloatPart x) { return _mm256_extractf128_ps(x, 1); }
template <int J>
inline FourWords part_quarter(WordPart x) {
    return (FourWords)_mm256_extracti128_si256((__m256i)x, J);
}
inline FloatPart joined_part(Four a, Four b) { return _mm256_set_m128(b, a); }

inline WordPart sub16_saturating(WordPart a, WordPart b) { return (WordPart)_mm256_subs_epi16((__m256i)a, (__m256i)b); }
inline WordPart low_bytes(WordPart a, WordPart b) { return (WordPart)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
inline WordPart high_bytes(WordPart a, WordPart b) { return (WordPart)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
inline WordPart low_words(WordPart a, WordPart b) { return (WordPart)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
inline WordPart high_words(WordPart a, WordPart b) { return (WordPart)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
inline WordPart low_pairs(WordPart a, WordPart b) { return (WordPart)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline WordPart high_pairs(WordPart a, WordPart b) { return (WordPart)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
inline WordPart shuffle_bytes(WordPart a, WordPart order) {
    return (WordPart)_mm256_shuffle_epi8((__m256i)a, (__m256i)order);
}

inline WordPart quarter_everywhere(const void* p) {
    return (WordPart)_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline WordPart in_register(WordPart x) {
    asm("" : "+x"(x));
    return x;
}

// In a table of 32. A shuffle gives 0 where bit 7 of its index is set.
inline WordPart lookup_32_bytes(const uint8_t* table, WordPart index) {
    const __m256i other = _mm256_xor_si256((__m256i)index, _mm256_set1_epi8(16)), above = _mm256_set1_epi8(0x70);
    const __m256i first =
        _mm256_shuffle_epi8((__m256i)quarter_everywhere(table), _mm256_adds_epu8((__m256i)index, above));
    return (WordPart)_mm256_or_si256(
        first, _mm256_shuffle_epi8((__m256i)quarter_everywhere(table + 16), _mm256_adds_epu8(other, above))
    );
}

#define SLOW_HALF_TABLES 1
#define SLOW_BYTE_TABLES 1
// In a table of 128: one shuffle for each 16 of them, which gives 0 for the indices of the others.
inline WordPart lookup_bytes_of(const uint8_t* table, WordPart index) {
    const __m256i own = _mm256_and_si256((__m256i)index, _mm256_set1_epi8(127));
    __m256i found = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        const __m256i part = (__m256i)quarter_everywhere(table + 16 * i);
        const __m256i at =
            _mm256_adds_epu8(_mm256_xor_si256(own, _mm256_set1_epi8(int8_t(16 * i))), _mm256_set1_epi8(0x70));
        found = _mm256_or_si256(found, _mm256_shuffle_epi8(part, at));
    }
    return (WordPart)found;
}

#if defined(__AVXVNNI__)
#define BYTE_DOTS 1
inline WordPart dot_bytes(WordPart sum, WordPart unsigned_bytes, WordPart signed_bytes) {
    return (WordPart)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
}
#else
// Even and odd bytes as numbers of 16 bits: products of bytes as such would saturate.
inline WordPart dot_bytes(WordPart sum, WordPart unsigned_bytes, WordPart signed_bytes) {
    const __m256i u = (__m256i)unsigned_bytes, s = (__m256i)signed_bytes;
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return sum + (WordPart)even + (WordPart)odd;
}
inline WordPart dot_halves(WordPart sum, WordPart a, WordPart b) {
    return sum + (WordPart)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
inline WordPart dot_in_halves(WordPart sum, WordPart unsigned_bytes, WordPart signed_bytes) {
    return (WordPart)_mm256_add_epi16(
        (__m256i)sum, _mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes)
    );
}
#endif

}  // namespace
