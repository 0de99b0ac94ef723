// Vectors of instruction sets whose registers have 32 or 16 bytes: the functions that vectors.h describes, on halves or
// quarters of a vector.
//
// A part is one register, defined by parts_avx2.h or parts_neon.h with the operations that have instructions of their
// own; the others are GCC's vector operations. All sums across lanes add in the same order as with AVX-512.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include "parts_avx2.h"
#else
#include "parts_neon.h"
#endif

namespace {

template <class V>
struct Two {
    V low, high;
};

template <class V>
struct LanesOf {
    static constexpr int COUNT = PART_BYTES / 4;
};
template <class V>
struct LanesOf<Two<V>> {
    static constexpr int COUNT = 2 * LanesOf<V>::COUNT;
};

using Mask = uint16_t;
constexpr Mask ALL = 0xffff;

#define OF_ONE(name)                        \
    template <class V>                      \
    inline ALWAYS Two<V> name(Two<V> a) {   \
        return {name(a.low), name(a.high)}; \
    }
#define OF_TWO(name)                                       \
    template <class V>                                     \
    inline ALWAYS Two<V> name(Two<V> a, Two<V> b) {        \
        return {name(a.low, b.low), name(a.high, b.high)}; \
    }
#define OF_THREE(name)                                                    \
    template <class V>                                                    \
    inline ALWAYS Two<V> name(Two<V> a, Two<V> b, Two<V> c) {             \
        return {name(a.low, b.low, c.low), name(a.high, b.high, c.high)}; \
    }
#define OPERATOR(symbol)                                       \
    template <class V>                                         \
    inline ALWAYS Two<V> operator symbol(Two<V> a, Two<V> b) { \
        return {a.low symbol b.low, a.high symbol b.high};     \
    }

// -- operations on a part that are the same for all -------------------------------------------------------------------

inline ALWAYS FloatPart as_floats(WordPart x) { return (FloatPart)x; }
inline ALWAYS FloatPart in_register(FloatPart x) { return (FloatPart)in_register((WordPart)x); }
inline ALWAYS WordPart as_words(FloatPart x) { return (WordPart)x; }
inline ALWAYS WordPart add32(WordPart a, WordPart b) { return a + b; }
inline ALWAYS WordPart sub32(WordPart a, WordPart b) { return a - b; }
inline ALWAYS WordPart mul32(WordPart a, WordPart b) { return a * b; }
inline ALWAYS WordPart larger(WordPart a, WordPart b) { return (IntegerPart)a > (IntegerPart)b ? a : b; }
inline ALWAYS WordPart add16(WordPart a, WordPart b) { return (WordPart)((HalfPart)a + (HalfPart)b); }
inline ALWAYS WordPart choose_bits(WordPart mask, WordPart yes, WordPart no) { return (mask & yes) | (~mask & no); }
inline ALWAYS WordPart or_and(WordPart a, WordPart b, WordPart c) { return a | (b & c); }
template <int N>
inline ALWAYS WordPart shift_left32(WordPart a) {
    return a << N;
}
template <int N>
inline ALWAYS WordPart shift_right32(WordPart a) {
    return (WordPart)((IntegerPart)a >> N);
}
inline ALWAYS WordPart shift_right16(WordPart a, int n) { return (WordPart)((HalfPart)a >> n); }
inline ALWAYS FloatPart to_floats(WordPart a) { return __builtin_convertvector((IntegerPart)a, FloatPart); }
inline ALWAYS FloatPart magnitude(FloatPart x) { return as_floats(as_words(x) & 0x7fffffffu); }
inline ALWAYS FloatPart above_floor(FloatPart x) {
    x = larger(splat_part(-1000.0f), x);
    return x - floor_of(x);
}
inline ALWAYS FloatPart from_nearest(FloatPart x) {
    x = larger(splat_part(-1000.0f), x);
    return x - nearest(x);
}
// Results below the normal numbers become 0.
inline ALWAYS FloatPart times_power(FloatPart p, FloatPart n) {
    const FloatPart whole = smaller(splat_part(127.0f), larger(splat_part(-127.0f), floor_of(n)));
    return p * as_floats((to_integers(whole) + 127u) << 23);
}
#if !BF16_PAIRS
// The nearest bfloat16, ties to even; NaN stays NaN.
inline ALWAYS FloatPart rounded_bf16(FloatPart x) {
    const WordPart bits = as_words(x), near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return as_floats(x == x ? near : as_words(splat_part(__builtin_nanf(""))));
}
#endif
inline ALWAYS FloatPart select(uint32_t mask, FloatPart yes, FloatPart no) {
    return (LANE_BITS & mask) != 0u ? yes : no;
}
inline ALWAYS uint32_t at_least(FloatPart a, FloatPart b) { return bits_of_lanes((WordPart)(a >= b)); }
inline ALWAYS uint32_t above(FloatPart a, FloatPart b) { return bits_of_lanes((WordPart)(a > b)); }
inline ALWAYS uint32_t at_least(WordPart a, WordPart b) {
    return bits_of_lanes((WordPart)((IntegerPart)a >= (IntegerPart)b));
}
inline ALWAYS Four total_four(Four x) { return x + __builtin_shuffle(x, FourWords{2, 3, 0, 1}); }

// -- two of them ------------------------------------------------------------------------------------------------------

OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|)
OF_ONE(magnitude) OF_ONE(nearest) OF_ONE(from_nearest) OF_ONE(above_floor) OF_ONE(rounded_bf16) OF_ONE(in_register)
OF_TWO(larger) OF_TWO(smaller) OF_TWO(times_power)
OF_TWO(add32) OF_TWO(sub32) OF_TWO(mul32) OF_TWO(add16) OF_TWO(sub16_saturating)
OF_TWO(low_bytes) OF_TWO(high_bytes) OF_TWO(low_words) OF_TWO(high_words) OF_TWO(low_pairs) OF_TWO(high_pairs)
OF_TWO(shuffle_bytes)
OF_THREE(fmadd) OF_THREE(fnmadd) OF_THREE(fmsub) OF_THREE(choose_bits) OF_THREE(or_and) OF_THREE(dot_bytes)
#if !BYTE_DOTS
OF_THREE(dot_halves) OF_THREE(dot_in_halves)
#endif
#if SIGNED_DOTS
OF_ONE(without_offset) OF_THREE(dot_stored)
#endif
#undef OF_ONE
#undef OF_TWO
#undef OF_THREE
#undef OPERATOR

template <class V>
inline ALWAYS auto as_floats(Two<V> x) -> Two<decltype(as_floats(x.low))> {
    return {as_floats(x.low), as_floats(x.high)};
}
template <class V>
inline ALWAYS auto as_words(Two<V> x) -> Two<decltype(as_words(x.low))> {
    return {as_words(x.low), as_words(x.high)};
}
template <class V>
inline ALWAYS auto to_floats(Two<V> x) -> Two<decltype(to_floats(x.low))> {
    return {to_floats(x.low), to_floats(x.high)};
}
template <class V>
inline ALWAYS auto to_integers(Two<V> x) -> Two<decltype(to_integers(x.low))> {
    return {to_integers(x.low), to_integers(x.high)};
}
template <int N, class V>
inline ALWAYS Two<V> shift_left32(Two<V> x) {
    return {shift_left32<N>(x.low), shift_left32<N>(x.high)};
}
template <int N, class V>
inline ALWAYS Two<V> shift_right32(Two<V> x) {
    return {shift_right32<N>(x.low), shift_right32<N>(x.high)};
}
template <class V>
inline ALWAYS Two<V> shift_right16(Two<V> x, int n) {
    return {shift_right16(x.low, n), shift_right16(x.high, n)};
}
template <class V>
inline ALWAYS Two<V> select(uint32_t mask, Two<V> yes, Two<V> no) {
    return {select(mask, yes.low, no.low), select(mask >> LanesOf<V>::COUNT, yes.high, no.high)};
}
template <class V>
inline ALWAYS uint32_t at_least(Two<V> a, Two<V> b) {
    return at_least(a.low, b.low) | at_least(a.high, b.high) << LanesOf<V>::COUNT;
}
template <class V>
inline ALWAYS uint32_t above(Two<V> a, Two<V> b) {
    return above(a.low, b.low) | above(a.high, b.high) << LanesOf<V>::COUNT;
}

#if PART_BYTES == 32
using Floats = Two<FloatPart>;
using Words = Two<WordPart>;
constexpr int REGISTERS = 16, VECTOR_REGISTERS = 2;
inline ALWAYS Floats splat(float x) { return {splat_part(x), splat_part(x)}; }
inline ALWAYS Words splat_words(WordPart x) { return {x, x}; }
inline ALWAYS Four half_sum(FloatPart x) { return lower_quarter(x) + upper_quarter(x); }
inline ALWAYS Four half_largest(FloatPart x) { return larger(lower_quarter(x), upper_quarter(x)); }
template <int J>
inline ALWAYS FourWords quarter(Words x) {
    return part_quarter<J % 2>(J / 2 ? x.high : x.low);
}
inline ALWAYS Floats of_quarters(Four a, Four b, Four c, Four d) { return {joined_part(a, b), joined_part(c, d)}; }
#else
using Floats = Two<Two<FloatPart>>;
using Words = Two<Two<WordPart>>;
constexpr int REGISTERS = 32, VECTOR_REGISTERS = 4;
inline ALWAYS Floats splat(float x) { return {{splat_part(x), splat_part(x)}, {splat_part(x), splat_part(x)}}; }
inline ALWAYS Words splat_words(WordPart x) { return {{x, x}, {x, x}}; }
inline ALWAYS Four half_sum(Two<FloatPart> x) { return x.low + x.high; }
inline ALWAYS Four half_largest(Two<FloatPart> x) { return larger(x.low, x.high); }
template <int J>
inline ALWAYS FourWords quarter(Words x) {
    return J == 0 ? x.low.low : J == 1 ? x.low.high : J == 2 ? x.high.low : x.high.high;
}
inline ALWAYS Floats of_quarters(Four a, Four b, Four c, Four d) { return {{a, b}, {c, d}}; }
#endif

inline ALWAYS Floats zero() { return splat(0.0f); }
inline ALWAYS Floats rough_inverse(Floats x) { return splat(1.0f) / x; }
inline ALWAYS Words splat_word(int32_t x) { return splat_words(WordPart{} + uint32_t(x)); }
inline ALWAYS Words splat_half(int16_t x) { return splat_words((WordPart)(HalfPart{} + uint16_t(x))); }
inline ALWAYS Words splat_byte(int8_t x) { return splat_words((WordPart)(BytePart{} + uint8_t(x))); }
inline ALWAYS Words zero_words() { return splat_words(WordPart{}); }

// -- memory -----------------------------------------------------------------------------------------------------------

// Part by part: GCC keeps in memory what is copied as a whole.
template <class V>
inline ALWAYS V load_part(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}
template <class V>
inline ALWAYS void load_to(Two<V>& v, const char* p);
template <class V>
inline ALWAYS void store_from(const Two<V>& v, char* p);
inline ALWAYS void load_to(FloatPart& v, const char* p) { v = load_part<FloatPart>(p); }
inline ALWAYS void load_to(WordPart& v, const char* p) { v = load_part<WordPart>(p); }
inline ALWAYS void store_from(const FloatPart& v, char* p) { std::memcpy(p, &v, sizeof(v)); }
inline ALWAYS void store_from(const WordPart& v, char* p) { std::memcpy(p, &v, sizeof(v)); }
template <class V>
inline ALWAYS void load_to(Two<V>& v, const char* p) {
    load_to(v.low, p), load_to(v.high, p + LanesOf<V>::COUNT * 4);
}
template <class V>
inline ALWAYS void store_from(const Two<V>& v, char* p) {
    store_from(v.low, p), store_from(v.high, p + LanesOf<V>::COUNT * 4);
}

inline ALWAYS Floats load_floats(const float* p) {
    Floats v;
    load_to(v, reinterpret_cast<const char*>(p));
    return v;
}
inline ALWAYS void store_floats(float* p, Floats v) { store_from(v, reinterpret_cast<char*>(p)); }
inline ALWAYS Words load_words(const void* p) {
    Words v;
    load_to(v, static_cast<const char*>(p));
    return v;
}
inline ALWAYS void store_words(void* p, Words v) { store_from(v, static_cast<char*>(p)); }
inline ALWAYS void store_low_half(void* p, Words v) { store_from(v.low, static_cast<char*>(p)); }
inline ALWAYS void store_high_half(void* p, Words v) { store_from(v.high, static_cast<char*>(p)); }
template <int J>
inline ALWAYS void store_quarter(void* p, Words v) {
    const FourWords q = quarter<J>(v);
    std::memcpy(p, &q, 16);
}
inline ALWAYS Words splat_quarter(const void* p) { return splat_words(quarter_everywhere(p)); }

// Some lanes, one by one: never read or written are those outside the mask.
__attribute__((noinline)) Floats load_lanes(Floats otherwise, Mask m, const float* p) {
    alignas(64) float each[16];
    store_floats(each, otherwise);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) each[i] = p[i];
    return load_floats(each);
}
__attribute__((noinline)) void store_some(float* p, Mask m, Floats v) {
    alignas(64) float each[16];
    store_floats(each, v);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) p[i] = each[i];
}
inline ALWAYS Floats load_or(Floats otherwise, Mask m, const float* p) {
    return m == ALL ? load_floats(p) : load_lanes(otherwise, m, p);
}
inline ALWAYS Floats load16(const float* p, Mask m) { return load_or(zero(), m, p); }

// -- across lanes -----------------------------------------------------------------------------------------------------

inline ALWAYS float total_of(Floats x) {
    const Four four = total_four(half_sum(x.low + x.high));
    return four[0] + four[1];
}
inline ALWAYS float largest_of(Floats x) {
    const Four four = half_largest(larger(x.low, x.high));
    const float a = four[0] > four[2] ? four[0] : four[2], b = four[1] > four[3] ? four[1] : four[3];
    return a > b ? a : b;
}
inline ALWAYS int32_t total_of(Words x) {
    uint32_t each[16], sum = 0;
    store_words(each, x);
    for (uint32_t one : each) sum += one;
    return int32_t(sum);
}
inline ALWAYS int32_t largest_of(Words x) {
    int32_t each[16], most = INT32_MIN;
    store_words(each, x);
    for (int32_t one : each) most = one > most ? one : most;
    return most;
}
inline ALWAYS float total_of_neighbours(Four x) {  // (0 + 1) + (2 + 3)
    x = x + __builtin_shuffle(x, FourWords{1, 0, 3, 2});
    return x[0] + x[2];
}
inline ALWAYS void sums_of_eights(Floats x, float (&sums)[2]) {
    const Words all = as_words(x);
    sums[0] = total_of_neighbours((Four)quarter<0>(all)) + total_of_neighbours((Four)quarter<1>(all));
    sums[1] = total_of_neighbours((Four)quarter<2>(all)) + total_of_neighbours((Four)quarter<3>(all));
}

template <int J>
inline ALWAYS Words quarters_of(const Words (&x)[4]) {
    return as_words(
        of_quarters((Four)quarter<J>(x[0]), (Four)quarter<J>(x[1]), (Four)quarter<J>(x[2]), (Four)quarter<J>(x[3]))
    );
}
inline ALWAYS void transpose_quarters(Words (&x)[4]) {
    const Words found[4] = {quarters_of<0>(x), quarters_of<1>(x), quarters_of<2>(x), quarters_of<3>(x)};
    for (int i = 0; i < 4; i++) x[i] = found[i];
}

inline ALWAYS Floats fold(Floats first, Floats second) { return {first.low + first.high, second.low + second.high}; }
inline Floats sums_of(const Floats pairs[8]) {
    Four sum[4];
    for (int i = 0; i < 4; i++) {
        const Four a = half_sum(pairs[2 * i].low), b = half_sum(pairs[2 * i].high);
        const Four c = half_sum(pairs[2 * i + 1].low), d = half_sum(pairs[2 * i + 1].high);
        const Four ab = __builtin_shuffle(a, b, FourWords{0, 1, 4, 5}) + __builtin_shuffle(a, b, FourWords{2, 3, 6, 7});
        const Four cd = __builtin_shuffle(c, d, FourWords{0, 1, 4, 5}) + __builtin_shuffle(c, d, FourWords{2, 3, 6, 7});
        sum[i] = __builtin_shuffle(ab, cd, FourWords{0, 2, 4, 6}) + __builtin_shuffle(ab, cd, FourWords{1, 3, 5, 7});
    }
    return of_quarters(sum[0], sum[1], sum[2], sum[3]);
}

// -- bytes ------------------------------------------------------------------------------------------------------------

template <class V>
inline ALWAYS Two<V> lookup_bytes_of(const uint8_t* table, Two<V> index) {
    return {lookup_bytes_of(table, index.low), lookup_bytes_of(table, index.high)};
}
inline ALWAYS Words lookup_bytes(const Words (&table)[2], Words index) {
    return lookup_bytes_of(reinterpret_cast<const uint8_t*>(table), index);
}

struct HalfTable {  // lower and upper bytes
    alignas(64) uint8_t low[32], high[32];
    explicit HalfTable(const uint16_t (&halves)[32]) {
        for (int i = 0; i < 32; i++) low[i] = uint8_t(halves[i]), high[i] = uint8_t(halves[i] >> 8);
    }
};
// The index in both bytes of a half: one of them finds the lower byte, the other the upper one.
inline ALWAYS WordPart lookup_halves_of(const HalfTable& table, WordPart index) {
    const WordPart own = index & 0x001f001fu, both = own | own << 8;
    return (lookup_32_bytes(table.low, both) & 0x00ff00ffu) | (lookup_32_bytes(table.high, both) & 0xff00ff00u);
}
template <class V>
inline ALWAYS Two<V> lookup_halves_of(const HalfTable& table, Two<V> index) {
    return {lookup_halves_of(table, index.low), lookup_halves_of(table, index.high)};
}
inline ALWAYS Words lookup_halves(Words index, const HalfTable& table) { return lookup_halves_of(table, index); }

inline ALWAYS void low_bytes_to(int8_t* p, WordPart v) {
    const LowestPart narrow = __builtin_convertvector(v, LowestPart);
    std::memcpy(p, &narrow, sizeof(narrow));
}
template <class V>
inline ALWAYS void low_bytes_to(int8_t* p, Two<V> v) {
    low_bytes_to(p, v.low), low_bytes_to(p + LanesOf<V>::COUNT, v.high);
}
inline ALWAYS void store_low_bytes(int8_t* p, Words v) { low_bytes_to(p, v); }
inline ALWAYS Words store_bytes(int8_t* p, const Words (&x)[4]) {
    for (int i = 0; i < 4; i++) store_low_bytes(p + 16 * i, x[i]);
    return load_words(p);
}

// The lowest bytes of sixteen words of `low` and of `high`: four of the first, four of the second, and so on.
inline void store_bytes_in_fours(int8_t* p, Words low, Words high) {
    int32_t lows[16], highs[16];
    store_words(lows, low), store_words(highs, high);
    for (int i = 0; i < 16; i++) p[i / 4 * 8 + i % 4] = int8_t(lows[i]), p[i / 4 * 8 + 4 + i % 4] = int8_t(highs[i]);
}

// -- bfloat16 ---------------------------------------------------------------------------------------------------------

inline ALWAYS void widen_to(FloatPart& v, const uint16_t* p) {
    v = as_floats(__builtin_convertvector(load_part<NarrowPart>(p), WordPart) << 16);
}
inline ALWAYS void narrow_from(FloatPart v, uint16_t* p) {
    const NarrowPart narrow = __builtin_convertvector(as_words(v) >> 16, NarrowPart);
    std::memcpy(p, &narrow, sizeof(narrow));
}
template <class V>
inline ALWAYS void widen_to(Two<V>& v, const uint16_t* p) {
    widen_to(v.low, p), widen_to(v.high, p + LanesOf<V>::COUNT);
}
template <class V>
inline ALWAYS void narrow_from(Two<V> v, uint16_t* p) {
    narrow_from(v.low, p), narrow_from(v.high, p + LanesOf<V>::COUNT);
}
inline ALWAYS Floats load_bf16(const uint16_t* p) {
    Floats v;
    widen_to(v, p);
    return v;
}
#if BF16_PAIRS
inline ALWAYS Two<WordPart> to_bf16(Floats v) {
    return {to_bf16(v.low.low, v.low.high), to_bf16(v.high.low, v.high.high)};
}
inline ALWAYS void store_bf16(uint16_t* p, Floats v) { store_from(to_bf16(v), reinterpret_cast<char*>(p)); }
#else
inline ALWAYS void store_bf16(uint16_t* p, Floats v) { narrow_from(rounded_bf16(v), p); }
#endif
__attribute__((noinline)) Floats load_some_bf16(const uint16_t* p, Mask m) {
    uint16_t each[16] = {};
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) each[i] = p[i];
    return load_bf16(each);
}
__attribute__((noinline)) void store_some_bf16(uint16_t* p, Mask m, Floats v) {
    uint16_t each[16];
    store_bf16(each, v);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1) p[i] = each[i];
}
inline ALWAYS Floats load16(const uint16_t* p, Mask m) { return m == ALL ? load_bf16(p) : load_some_bf16(p, m); }

#if BF16_PAIRS  // of registers of 16 bytes
template <class F, class W>
inline ALWAYS Two<F> dot_pairs(Two<F> sum, Two<W> a, Two<W> b) {
    return {dot_pairs(sum.low, a.low, b.low), dot_pairs(sum.high, a.high, b.high)};
}
inline ALWAYS Floats dot_pairs_at(Floats sum, const uint16_t* a, Words b) {
    int32_t pair;
    std::memcpy(&pair, a, 4);
    return dot_pairs(sum, splat_word(pair), b);
}
__attribute__((noinline)) Words load_some_pairs(const uint16_t* p, int64_t left) {
    uint16_t each[32] = {};
    if (left > 0) std::memcpy(each, p, left * sizeof(uint16_t));
    return load_words(each);
}
inline ALWAYS Words load_pairs(const uint16_t* p, int64_t left) {
    return left >= 32 ? load_words(p) : load_some_pairs(p, left);
}
inline ALWAYS Words pairs_after(Floats low, Floats high) { return {to_bf16(low), to_bf16(high)}; }
template <class V>
inline ALWAYS auto pairs_beside(Two<V> a, Two<V> b) -> Two<decltype(pairs_beside(a.low, b.low))> {
    return {pairs_beside(a.low, b.low), pairs_beside(a.high, b.high)};
}
inline ALWAYS Words halves_between(Two<WordPart> a, Two<WordPart> b) {
    return {
        {low_halves(a.low, b.low), high_halves(a.low, b.low)}, {low_halves(a.high, b.high), high_halves(a.high, b.high)}
    };
}
inline ALWAYS void pairs_between(Words a, Words b, Words (&pairs)[2]) {
    pairs[0] = halves_between(a.low, b.low), pairs[1] = halves_between(a.high, b.high);
}
#endif

}  // namespace
