// Operands: float rows in the form that a kind of weight is multiplied with.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "panels.h"
#include "structs.h"

namespace {

constexpr float SMALLEST = 0x1p-119f;  // 127 over it is a number, and it over 127 is no subnormal one
constexpr float LIMIT = 32639.0f;   // 127 * 256 + 127: the largest number that two signed bytes make

// x in steps of its row's largest value / LIMIT, as 256 high + low, both signed bytes: for each 4 inputs the 4 lows, then
// the 4 highs. Weights are stored unsigned, so the row is followed by what that adds to a sum: for each group of inputs
// -offset times the sum of lows, and of highs.
void make_integers(const float* values, int64_t k, int64_t kind, int8_t* out, float* scale) {
    Floats largest = zero(), poison = zero();  // NaN and infinity have no integers: they pass through the scale
    for (int64_t i = 0; i < k; i += 16) {
        const Floats x = load16(values + i, first_lanes(k - i));
        largest = larger(magnitude(x), largest);
        poison = fmadd(x, zero(), poison);
    }
    const float top = largest_of(largest);
    *scale = top / LIMIT + total_of(poison);
    const Floats inverse = splat(top > 0 ? LIMIT / top : 0.0f);
    const int64_t kpad = padded_inputs(k, kind), group = kind == INT4 ? GROUP : kpad, offset = kind == INT4 ? 8 : 128;
    int8_t* sums = out + 2 * kpad;
    for (int64_t begin = 0; begin < kpad; begin += group) {
        Words lows = zero_words(), highs = zero_words();
        for (int64_t i = begin; i < begin + group; i += 16) {
            const Floats x = load16(values + i, first_lanes(std::max<int64_t>(0, k - i)));
            const Words whole = to_integers(x * inverse);
            const Words high = shift_right32<8>(add32(whole, splat_word(128)));
            const Words low = sub32(whole, shift_left32<8>(high));
            lows = add32(lows, low), highs = add32(highs, high);
            store_bytes_in_fours(out + 2 * i, low, high);
        }
        const int32_t both[2] = {int32_t(-offset * total_of(lows)), int32_t(-offset * total_of(highs))};
        std::memcpy(sums, both, 8);
        sums += 8;
    }
}

// x in steps of its row's largest value / 127, as signed bytes, then what the weights' offset of 128 adds to a sum. A scale is
// never 0: what is below 127 steps of SMALLEST is rounded in those.
void make_bytes(const float* values, int64_t k, int8_t* out, float* scale) {
    constexpr int64_t AT_ONCE = 4;
    Floats largest[AT_ONCE], poison[AT_ONCE];  // NaN and infinity have no integers: they pass through the scale
    for (int i = 0; i < AT_ONCE; i++) largest[i] = poison[i] = zero();
    for (int64_t begin = 0; begin < k; begin += AT_ONCE * 16)
        for (int i = 0; i < AT_ONCE; i++) {
            const int64_t left = std::max<int64_t>(0, k - begin - i * 16);
            const Floats x = load16(values + begin + i * 16, first_lanes(left));
            largest[i] = larger(magnitude(x), largest[i]);
            poison[i] = fmadd(x, zero(), poison[i]);
        }
    const Floats both = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
    const float top = std::max(largest_of(both), SMALLEST), inverse = 127.0f / top;
    *scale = top / 127.0f + total_of((poison[0] + poison[1]) + (poison[2] + poison[3]));
    const int64_t kpad = padded_inputs(k, BYTES);
    Words sum = zero_words();
    for (int64_t i = 0; i < kpad; i += 16) {
        const Words whole = to_integers(load16(values + i, first_lanes(k - i)) * splat(inverse));
        sum = add32(sum, whole);
        store_low_bytes(out + i, whole);
    }
    const int32_t behind = int32_t(-128 * int64_t(total_of(sum)));
    std::memcpy(out + kpad, &behind, 4);
}

// `values` [k] -> row `row` of the operand, whose rows are `ld` elements apart; the padding is zero.
void make_operand(const float* values, int64_t k, int64_t kind, void* operand, int64_t ld, float* scales, int64_t row) {
    if (kind == F32) {
        std::memcpy(static_cast<float*>(operand) + row * ld, values, k * sizeof(float));
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(operand) + row * ld;
    if (kind == BYTES) {
        make_bytes(values, k, reinterpret_cast<int8_t*>(out), scales + row);
        return;
    }
    if (kind != BF16) {
        make_integers(values, k, kind, reinterpret_cast<int8_t*>(out), scales + row);
        return;
    }
    for (int64_t i = 0; i < k; i += 16) {
        const Mask m = first_lanes(k - i);
        store16(out + i, m, load16(values + i, m));
    }
    std::fill(out + k, out + padded_inputs(k, kind), 0);
}

}  // namespace
