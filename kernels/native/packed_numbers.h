// Numbers of 8 and 4 bits: how a panel stores them, and how they are unpacked in registers.
//
// Layouts, in panels of 64 outputs. fp8 [k / 4][4][64] bytes: 16 outputs and 4 inputs, in an order that two
// instructions unpack to two vectors of pairs. nvfp4 [k / 16] of 64 bytes of scales (see Nvfp4), then [2][4][64] bytes:
// 16 outputs, 4 inputs as in fp8 in the low halves, and the next 4 in the high halves. int4 [k / 8][4][16][2] words: 16
// outputs, even and odd inputs, four inputs two apart, the first in the lowest bits. int8 in groups [k / 4][64][4]
// bytes: 64 outputs, 4 inputs.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "panels.h"
#include "structs.h"
#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 8;         // inputs that are unpacked together
constexpr int LARGEST_EXPONENT = 8;  // of e4m3

// The bits of `value` as a bfloat16, which must represent it exactly.
inline uint16_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t(bits >> 16);
}

// A table of 128 bfloat16, as a table of upper bytes and one of lower bytes.
struct ByteTables {
    Words upper[2], lower[2];
    template <class F>
    explicit ByteTables(const F& word) {
        alignas(64) uint8_t high[128], low[128];
        for (int i = 0; i < 128; i++) high[i] = uint8_t(word(i) >> 8), low[i] = uint8_t(word(i));
        for (int i = 0; i < 2; i++) upper[i] = load_words(high + 64 * i), lower[i] = load_words(low + 64 * i);
    }
    // Bit 7 of an index is ignored.
    Words high(Words index) const { return lookup_bytes(upper, index); }
    Words low(Words index) const { return lookup_bytes(lower, index); }
};

// Where the numbers of a panel are: chunk(panel, i), those of CHUNK inputs from `i` on. BYTES: bytes of a chunk for one
// output. SPARSE: whether products of one or two rows prefetch only one line in PREFETCHED_LINE_STEP.
struct Fp8Panel {
    static constexpr int64_t KIND = FP8, BYTES = 8;
    static constexpr bool SPARSE = true;
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) { return panel + i * PANEL; }
};
struct Nvfp4Panel {
    static constexpr int64_t KIND = NVFP4, BYTES = 4;
    static constexpr bool SPARSE = false;
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) {
        return panel + i / NVFP4_GROUP * NVFP4_GROUP_BYTES + PANEL + i % NVFP4_GROUP * (PANEL / 2);
    }
    // The scales of the group that begins with `input`.
    static const uint8_t* scales_at(const uint8_t* panel, int64_t input) { return chunk(panel, input) - PANEL; }
};
struct Uint4Panel {
    static constexpr int64_t KIND = UINT4, BYTES = 4;
    static constexpr bool SPARSE = true;
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) { return panel + i * (PANEL / 2); }
};

struct Uint8Panel {
    static constexpr int64_t KIND = UINT8, BYTES = 8;
    static constexpr bool SPARSE = true;
    static const uint8_t* chunk(const uint8_t* panel, int64_t i) { return panel + i * PANEL; }
};

// Unpackers, one for each kind.
//
// begin(weight, panel's bytes, index of the group's scales, first input, vector) prepares the scales or zero points of
// a group for the 16 outputs of a vector. unpack(from, half, group, words) returns two vectors of pairs of bfloat16:
// half a chunk of inputs for 16 outputs.

// e4m3 bytes. NaN is rejected when the weight is packed.
struct Fp8 : Fp8Panel {
    static constexpr bool FLOATS = false;
    struct Group {};
    const ByteTables tables = made();
    static ByteTables made() {
        static const ByteTables all([](int i) {
            return bits_of(i < 8 ? std::ldexp(i / 8.0f, -6) : std::ldexp(1.0f + (i & 7) / 8.0f, (i >> 3) - 7));
        });
        return all;
    }
    Group begin(const Weight&, const uint8_t*, int64_t, int64_t, int64_t) const { return {}; }
    void unpack(const uint8_t* from, int half, const Group&, Words (&words)[2]) const {
        const Words bytes = in_register(load_words(from + half * 4 * PANEL)), low = tables.low(bytes);
        const Words sign = splat_byte(int8_t(0x80));
        const Words high = or_and(tables.high(bytes), bytes, sign);
        words[0] = low_bytes(low, high), words[1] = high_bytes(low, high);
    }
};

// e2m1 numbers times the scale of their group, (1 + m / 8) * 2^(8 - d). The byte of a scale has m in bits 4 to 6, the
// lowest bit of d in bit 7 and its other bits in bits 0 to 3. The table is indexed by m and the number and has the
// product for d = 0; d is then subtracted from the exponent. Zero is stored as 0x8000 (-0), the only word that a
// saturating subtraction leaves unchanged; in a group whose scale is zero, all numbers are packed as zeros.
struct Nvfp4 : Nvfp4Panel {
    static constexpr bool FLOATS = false;
    struct Group {
        Words scale, exponent;  // the scale of each byte's output; d of each word's output
    };
    const ByteTables tables = made();
    static ByteTables made() {
        static const ByteTables all([](int i) {
            const float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f},
                        size = e2m1[i & 7] * (1.0f + (i >> 4) / 8.0f);
            return size == 0.0f ? uint16_t(0x8000) : bits_of(std::ldexp(i & 8 ? -size : size, LARGEST_EXPONENT));
        });
        return all;
    }
    Group begin(const Weight&, const uint8_t* panel, int64_t, int64_t input, int64_t vector) const {
        const Words each = splat_quarter(scales_at(panel, input) + vector * 16);
        // for each lane's 4 outputs, the scale in all four bytes of the output
        alignas(64) static const uint64_t order[8] = {0x0303020201010000, 0x0303020201010000, 0x0707060605050404,
                                                      0x0707060605050404, 0x0b0b0a0a09090808, 0x0b0b0a0a09090808,
                                                      0x0f0f0e0e0d0d0c0c, 0x0f0f0e0e0d0d0c0c};
        const Words bytes = shuffle_bytes(each, load_words(order));
        return {bytes, low_bytes(bytes, bytes) & splat_half(0x0f80)};
    }
    void unpack(const uint8_t* from, int half, const Group& group, Words (&words)[2]) const {
        const Words bytes = load_words(from), code = half ? shift_right16(bytes, 4) : bytes;
        const Words index = choose_bits(splat_byte(15), code, group.scale);
        const Words low = tables.low(index), high = tables.high(index);
        words[0] = sub16_saturating(low_bytes(low, high), group.exponent);
        words[1] = sub16_saturating(high_bytes(low, high), group.exponent);
    }
};

// Four bits less 8, or less a zero point, in the lowest bits of words, by a table of 32 words. Bit 4 of an index is
// undefined, so the table repeats itself; with zero points the index is number - zero point + 16.
template <bool ZEROS>
struct Uint4 : Uint4Panel {
    static constexpr bool FLOATS = false;
    struct Group {
        Words shift;  // of even and odd inputs
    };
    const HalfTable table = made();
    static HalfTable made() {
        uint16_t halves[32];
        for (int i = 0; i < 32; i++) halves[i] = bits_of(float(ZEROS ? i - 16 : (i & 15) - 8));
        return HalfTable(halves);
    }
    Group begin(const Weight& w, const uint8_t*, int64_t scales, int64_t, int64_t vector) const {
        if (!ZEROS) return {zero_words()};
        const Words zeros = to_integers(load_floats(w.zeros + scales + vector * 16));
        const Words shift = sub32(splat_word(16), zeros);
        return {shift | shift_left32<16>(shift)};
    }
    void unpack(const uint8_t* from, int half, const Group& group, Words (&words)[2]) const {
        const Words four = load_words(from);
        for (int pair = 0; pair < 2; pair++) {
            const int shift = 8 * half + 4 * pair;
            Words index = shift ? shift_right16(four, shift) : four;
            if constexpr (ZEROS) index = add16(index & splat_half(15), group.shift);
            words[pair] = lookup_halves(index, table);
        }
    }
};

// Bytes less 128, or less a zero point: 9 bits with the sign, which bfloat16 represents exactly.
struct Uint8Bytes : Uint8Panel {
    struct Group {
        Floats low, high;  // what is subtracted from lower and upper bytes, see `of_byte`
    };
    Group begin(const Weight& w, const uint8_t*, int64_t scales, int64_t, int64_t vector) const {
        const Floats zero = w.zeros ? load_floats(w.zeros + scales + vector * 16) : splat(128.0f);
        return {splat(0x1p23f) + zero, splat(0x1p15f) + zero};
    }
    // The number of a byte of the lower halves of words: in the lowest bits of the fraction of 2^23, or, from bit 8 on,
    // in that of 2^15.
    template <bool UPPER>
    static Floats of_byte(Words words, const Group& group) {
        if (UPPER) return as_floats(or_and(splat_word(0x47000000), words, splat_word(0xff00))) - group.high;
        return as_floats(or_and(splat_word(0x4b000000), words, splat_word(0xff))) - group.low;
    }
};
struct Uint8 : Uint8Bytes {
    static constexpr bool FLOATS = false;
    void unpack(const uint8_t* from, int half, const Group& group, Words (&words)[2]) const {
        const Words four = load_words(from + half * 4 * PANEL);
        for (int pair = 0; pair < 2; pair++) {
            const Words two = pair ? shift_right32<16>(four) : four;
            const Words even = as_words(of_byte<false>(two, group)), odd = as_words(of_byte<true>(two, group));
            words[pair] = choose_bits(splat_word(int32_t(0xffff0000)), odd, shift_right32<16>(even));
        }
    }
};

// The same numbers as float32, for sets whose tables of bytes are several shuffles (SLOW_BYTE_TABLES,
// SLOW_HALF_TABLES). input(from, i, group) returns input i of a chunk, of the 16 outputs at `from`.

// Words whose upper byte is an e4m3 number, as float32 of 2^-120 times its value. Where the value is below 2^-6 that is
// subnormal, but its product with 2^120 is normal.
inline Words small_floats(Words upper_bytes) { return shift_right32<4>(upper_bytes) & splat_word(int32_t(0x87f00000)); }

// Input i of 4, of bytes in the order of fp8: to the upper bytes of words.
inline Words upper_bytes_of(Words bytes, int i) {
    alignas(16) static constexpr int8_t ORDERS[4][16] = {
        {-1, -1, -1, 0, -1, -1, -1, 2, -1, -1, -1, 4, -1, -1, -1, 6},
        {-1, -1, -1, 1, -1, -1, -1, 3, -1, -1, -1, 5, -1, -1, -1, 7},
        {-1, -1, -1, 8, -1, -1, -1, 10, -1, -1, -1, 12, -1, -1, -1, 14},
        {-1, -1, -1, 9, -1, -1, -1, 11, -1, -1, -1, 13, -1, -1, -1, 15},
    };
    return shuffle_bytes(bytes, splat_quarter(ORDERS[i]));
}

struct Fp8Floats : Fp8Panel {
    static constexpr bool FLOATS = true;
    struct Group {};
    Group begin(const Weight&, const uint8_t*, int64_t, int64_t, int64_t) const { return {}; }
    Floats input(const uint8_t* from, int i, const Group&) const {
        return as_floats(small_floats(upper_bytes_of(load_words(from + i / 4 * 4 * PANEL), i % 4))) * splat(0x1p120f);
    }
};

// A number becomes an e4m3 byte of 2^(13 - 7) times its value, which is normal. Scales are float32.
struct Nvfp4Floats : Nvfp4Panel {
    static constexpr bool FLOATS = true;
    struct Group {
        Floats scale;  // of each output, times 2^(120 - 6)
    };
    Group begin(const Weight&, const uint8_t* panel, int64_t, int64_t input, int64_t vector) const {
        alignas(64) static constexpr int8_t ORDER[64] = {0,  -1, -1, -1, 1,  -1, -1, -1, 2,  -1, -1, -1, 3,
                                                         -1, -1, -1, 4,  -1, -1, -1, 5,  -1, -1, -1, 6,  -1,
                                                         -1, -1, 7,  -1, -1, -1, 8,  -1, -1, -1, 9,  -1, -1,
                                                         -1, 10, -1, -1, -1, 11, -1, -1, -1, 12, -1, -1, -1,
                                                         13, -1, -1, -1, 14, -1, -1, -1, 15, -1, -1, -1};
        const Words bytes = shuffle_bytes(splat_quarter(scales_at(panel, input) + vector * 16), load_words(ORDER));
        const Words fraction = shift_left32<16>(bytes & splat_word(0x70));
        const Words exponent =
            add32(shift_left32<24>(bytes & splat_word(15)), shift_left32<16>(bytes & splat_word(128)));
        return {as_floats(sub32(add32(splat_word((127 + LARGEST_EXPONENT + 114) << 23), fraction), exponent))};
    }
    Floats input(const uint8_t* from, int i, const Group& group) const {
        alignas(16) static constexpr uint8_t E4M3[16] = {0,    0x60, 0x68, 0x6c, 0x70, 0x74, 0x78, 0x7c,
                                                         0x80, 0xe0, 0xe8, 0xec, 0xf0, 0xf4, 0xf8, 0xfc};
        const Words pairs = load_words(from), codes = (i < 4 ? pairs : shift_right16(pairs, 4)) & splat_byte(15);
        const Words bytes = shuffle_bytes(splat_quarter(E4M3), codes);
        return as_floats(small_floats(upper_bytes_of(bytes, i % 4))) * group.scale;
    }
};

// A number in the lowest bits of the fraction of 2^23, less 2^23 and 8 or the zero point.
template <bool ZEROS>
struct Uint4Floats : Uint4Panel {
    static constexpr bool FLOATS = true;
    struct Group {
        Floats zero;
    };
    Group begin(const Weight& w, const uint8_t*, int64_t scales, int64_t, int64_t vector) const {
        if (!ZEROS) return {splat(0x1p23f + 8.0f)};
        return {splat(0x1p23f) + load_floats(w.zeros + scales + vector * 16)};
    }
    Floats input(const uint8_t* from, int i, const Group& group) const {
        const Words four = load_words(from), halves = shift_right16(four, i / 2 * 4);
        const Words number = i % 2 ? shift_right32<16>(halves) : halves;
        return as_floats((number & splat_word(15)) | splat_word(0x4b000000)) - group.zero;
    }
};

struct Uint8Floats : Uint8Bytes {
    static constexpr bool FLOATS = true;
    Floats input(const uint8_t* from, int i, const Group& group) const {
        const Words four = load_words(from + i / 4 * 4 * PANEL), two = i % 4 / 2 ? shift_right32<16>(four) : four;
        return i % 2 ? of_byte<true>(two, group) : of_byte<false>(two, group);
    }
};

}  // namespace
