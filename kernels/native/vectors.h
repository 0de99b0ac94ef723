// Vectors of the instruction set that this is compiled for. Floats: 16 float32; Words: 64 bytes, as words of 32 bits,
// halves of 16 or bytes; a quarter of a vector is 16 bytes; Mask: a bit for each of 16 lanes. Floats have + - * /,
// Words & and |. vectors_avx512.h and vectors_split.h define the same functions. What they do, where a name does not
// say it:
//
// Memory
//   splat               the number in all lanes; splat_quarter: 16 bytes in all quarters
//   load16(p, m)        the lanes of the mask, the others are zero; load_or: the others are those of `otherwise`
//   store_some          the lanes of the mask
//   load_bf16           sixteen bfloat16, as float32; store_bf16: rounded to nearest, ties to even; rounded_bf16: what
//                       load_bf16 would return after store_bf16
//   store_low_bytes     the lowest byte of each word
//   store_bytes         words that are signed bytes, of four vectors, which it returns as one vector of bytes
//   prefetch_near, _far into the first-level, the second-level cache; fetch_line: the same as prefetch_far
//   fetch_to_write      into the first-level cache, to be written
//   in_register         prevents the compiler from loading a value again for each use
//
// Floats
//   larger, smaller     the second argument if one is NaN; `larger`, and `largest_of` for all lanes, also take words,
//                       as signed numbers
//   nearest             the nearest integer, ties to even; from_nearest: x - nearest(x); above_floor: x - floor(x);
//                       both are finite for minus infinity
//   times_power(p, n)   p * 2^floor(n)
//   rough_inverse       1 / x, with a relative error of at most 2^-14
//   total_of            the sum of all lanes
//   fold                two vectors of partial sums as one: eight lanes of the first, then eight of the second
//   sums_of             eight results of `fold` as the sums of their sixteen vectors
//   sums_of_eights      of the lower and of the upper eight lanes, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
//
// Words
//   low_bytes           of each quarter the lower 8 bytes of both arguments, alternating; likewise high_bytes,
//                       low_words, high_pairs (of words) ...
//   transpose_quarters  quarter j of vector i becomes quarter i of vector j
//   shuffle_bytes       within each quarter
//   lookup_bytes        in a table of 128 bytes (bit 7 of an index is ignored); lookup_halves: in a table of 32 halves
//   choose_bits         the bits of `yes` where the mask has ones; or_and: a | (b & c)
//   dot_bytes           sum + 4 products of unsigned and signed bytes, in each word
//   dot_stored          the same for bytes without_offset, which removes an offset of 128 if products take signed bytes
//                       only
//   dot_halves          sum + 2 products of signed halves, in each word; dot_in_halves: sum + 2 products of bytes below
//                       128 and signed bytes, in each half, which must hold the result; both only where no instruction
//                       adds four products of bytes
//
// Pairs of bfloat16, if BF16_PAIRS
//   dot_pairs           sum + 2 products, in each word; dot_pairs_at: with the pair at an address in all lanes
//   load_pairs(p, n)    n bfloat16, at most 32; the others are zero
//   pairs_after         32 floats to bfloat16, one vector after the other; pairs_beside: lanes alternate
//   pairs_between       the halves of two vectors, alternating

#pragma once

#include <cstdint>

#define ALWAYS __attribute__((always_inline))

#if defined(__AVX512F__)
#include "vectors_avx512.h"
#else
#include "vectors_split.h"
#endif

#ifndef BYTE_DOTS  // whether one instruction adds four products of bytes
#define BYTE_DOTS 0
#endif
#ifndef SIGNED_DOTS  // whether that instruction takes signed bytes only
#define SIGNED_DOTS 0
#endif
#ifndef SLOW_BYTE_TABLES  // whether lookup_bytes is a shuffle for each part of its table
#define SLOW_BYTE_TABLES 0
#endif
#ifndef SLOW_HALF_TABLES  // whether lookup_halves is several shuffles
#define SLOW_HALF_TABLES 0
#endif
#ifndef BF16_PAIRS  // whether one instruction multiplies pairs of bfloat16: dot_pairs, and functions that arrange pairs
#define BF16_PAIRS 0
#endif

namespace {

#if !SIGNED_DOTS
inline Words without_offset(Words unsigned_bytes) { return unsigned_bytes; }
inline Words dot_stored(Words sum, Words unsigned_bytes, Words signed_bytes) {
    return dot_bytes(sum, unsigned_bytes, signed_bytes);
}
#endif

// How many vectors of columns a tile of so many rows multiplies at a time: their sums, a row and the columns fit the
// registers.
constexpr int vectors_beside(int rows) {
    const int most = (REGISTERS - 2) / VECTOR_REGISTERS;
    return rows == 1 || (rows + 1) * 4 <= most ? 4 : (rows + 1) * 2 <= most ? 2 : 1;
}
// The same for rows of integers of 16 bits, which are two rows of bytes.
constexpr int integers_beside(int rows) { return VECTOR_REGISTERS == 1 ? 4 : rows == 1 ? 2 : 1; }
// Where products of bytes are several instructions, their parts need registers too.
constexpr int bytes_beside(int rows) {
    return BYTE_DOTS || rows == 1 ? vectors_beside(rows) : (vectors_beside(rows) + 1) / 2;
}

}  // namespace
